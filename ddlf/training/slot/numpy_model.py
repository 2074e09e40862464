"""A model of NumPy arrays: ``NumpyModel``. It tests runs through the real replica in milliseconds, without Keras."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from ddlf.algorithms.local_rules import LOCAL, Control
from ddlf.algorithms.reading_order import Portion
from ddlf.algorithms.weights import Weights, is_float
from ddlf.training.slot.batchnorm import moving
from ddlf.training.slot.loss_scale import Overflow
from ddlf.training.slot.model import Gradient
from ddlf.training.slot.task import NOTHING_COUNTED, MetricCounts, Task

Sizes = Callable[[int], list[int]]
"""Samples in each partition file, by version of the data set."""


class NumpyModel:
    """A ``TrainableModel`` with random gradients. It also has the methods of a Keras model that the master uses.

    Everything that a round depends on changes the bits of its update: weights, samples, seed, round, slot, local epochs
    and the optimizer state, which is a momentum. Random numbers instead of a loss have this effect without a cost.

    Args:
        start: Initial weights, by path.
        frozen: Paths of the weights that are not trained. Must include all weights of integers or booleans.
        learning_rate: Step size.
        norms: Paths of the weights of a batch normalization layer.
        samples: Samples in the data set.
        sizes: Samples in each partition file, if tasks read partition files.

    Attributes:
        gradient: None for local training; ``gradient_of`` if a round is the gradient of one batch.
        update: The update of the last ``fit``, weights before minus weights after.
        steps: Makes the local steps of a round: ``step``, unless a test replaces it.
        measures: Computes moving statistics: ``measure``, unless a test replaces it.
        rule: The local rule of the round.
    """

    built = True
    name = "fake"

    def __init__(
        self,
        start: Mapping[str, np.ndarray[Any, Any]],
        frozen: frozenset[str] = frozenset(),
        learning_rate: float = 0.1,
        norms: frozenset[str] = frozenset(),
        samples: int = 1,
        sizes: Sizes | None = None,
    ) -> None:
        self.weights = [SimpleNamespace(path=p, shape=a.shape, dtype=str(a.dtype)) for p, a in start.items()]
        self.trainable_weights = [weight for weight in self.weights if weight.path not in frozen]
        self.non_trainable_weights = [weight for weight in self.weights if weight.path in frozen]
        self.optimizer = SimpleNamespace(get_config=lambda: {"name": "sgd", "learning_rate": learning_rate})
        normalized = [weight for weight in self.weights if weight.path in norms]
        self._layers = [BatchNormalization(normalized, frozen)] if normalized else []
        self.like: Weights = list(start.values())
        self.lossless: Sequence[bool] = [path in frozen for path in start]
        self.learning_rate, self._samples, self._sizes = learning_rate, samples, sizes
        self.steps: Callable[[Task, Weights, Weights | None], tuple[Weights, Weights]] = self.step
        self.measures: Callable[[Task, Weights], Weights] = self.measure
        self.rule = NumpyRule(self)
        self.update: Weights = []
        self.gradient: Gradient | None = None
        self._momentum: Weights | None = None
        self.set_weights(self.like)

    # -- methods of a Keras model that the master uses ----------------------------------------------------------------

    def _flatten_layers(self) -> list[BatchNormalization]:
        return self._layers

    def get_weights(self) -> Weights:
        """Return copies of the weights, as Keras does."""
        return [array.copy() for array in self._arrays]

    def set_weights(self, arrays: Weights) -> None:
        """Set the weights to copies of these arrays, as Keras does."""
        self._arrays = [np.array(array) for array in arrays]

    # -- TrainableModel -----------------------------------------------------------------------------------------------

    def begin(self, task: Task, optimizer: Weights | None) -> None:
        self._task, self._momentum = task, optimizer

    def optimizer_state(self, task: Task) -> Weights:
        return self._momentum or []

    def fit(
        self,
        data: Any,
        epochs: range,
        callbacks: Iterable[Any],
        begin_epoch: Callable[[int], None],
        end_batch: Callable[[int, int, Any], bool],
        begun: Callable[[], None],
    ) -> dict[str, float]:
        """Make the steps of all epochs at once, and then the steps of the local rule.

        Loss and accuracy are functions of the initial weights.
        """
        begun()
        for epoch in epochs:
            begin_epoch(epoch)
        weights = self.get_weights()
        update, self._momentum = self.steps(self._task, weights, self._momentum)
        self.update = self.rule.steps(weights, update)
        self.set_weights([w - u if is_float(w) else w for w, u in zip(weights, self.update, strict=True)])
        return {"loss": float(np.abs(weights[0]).mean()), "accuracy": accuracy_of(weights)}

    def gradient_of(self, batch: tuple[Any, ...], weights: Weights) -> tuple[Weights, dict[str, float]]:
        """Return the gradient of ``sum(w^2) / 20 + sum(w) * s``, where s is the mean of the samples' shares of n.

        So the gradient of a batch is the mean of the gradients of its parts, weighted by their samples. Weights that
        are not trained, integers and booleans do not change.
        """
        shift = float(np.mean(batch[0])) / self._samples
        frozen = (not_trained or not is_float(w) for not_trained, w in zip(self.lossless, weights, strict=True))
        update = [
            np.zeros_like(w) if fixed else np.asarray(0.1 * w + shift, w.dtype)
            for fixed, w in zip(frozen, weights, strict=True)
        ]
        trained = [
            np.asarray(w, np.float64) for w, untrained in zip(weights, self.lossless, strict=True) if not untrained
        ]
        loss = sum(float(np.sum(w * w) / 20 + np.sum(w) * shift) for w in trained)
        return update, {"loss": loss, "accuracy": accuracy_of(weights)}

    def statistics(self, task: Task, weights: Weights, batches: Iterable[tuple[tuple[Any, ...], int]]) -> Weights:
        return self.measures(task, weights)

    def counted(self, metrics: dict[str, float]) -> MetricCounts:
        return NOTHING_COUNTED

    def overflow(self, task: Task) -> Overflow | None:
        return None

    def entries(self, task: Task) -> int:
        return 0

    # -- training -----------------------------------------------------------------------------------------------------

    def measure(self, task: Task, weights: Weights) -> Weights:
        """Return made-up moving statistics ``s + learning_rate * (mean(samples) / n + |mean of the first weight|)``.

        Here ``s`` are the statistics before, and ``samples`` the numbers of the task's samples.
        """
        step = np.mean(self.samples_of(task)) / self._samples + np.abs(np.mean(weights[0]))
        return [np.asarray(weights[index] + self.learning_rate * step, weights[index].dtype) for index in moving(self)]

    def samples_of(self, task: Task) -> Any:
        """Return the numbers of the samples that a task trains on."""
        if not isinstance(task.indices, Portion):
            return task.indices
        assert self._sizes is not None
        return task.indices.ids(self._sizes(task.indices.version))

    def step(self, task: Task, weights: Weights, momentum: Weights | None) -> tuple[Weights, Weights]:
        """Train locally. For each tensor ``w`` of floats::

            g = 0.1 w + epochs * N(0, 1),  m <- 0.9 m + g,  update = learning_rate * m

        The update of integers and booleans consists of ones, which the master must ignore.

        Returns:
            The update (weights before minus weights after) and the momentum.
        """
        chance = np.random.default_rng((task.seed, task.round, task.slot, int(self.samples_of(task).sum())))
        update, after = [], []
        for w, m in zip(weights, momentum or [np.zeros_like(w) for w in weights], strict=True):
            if is_float(w):
                g = 0.1 * w + np.asarray(chance.normal(size=w.shape), w.dtype) * task.epochs
                m = np.asarray(w.dtype.type(0.9) * m + np.asarray(g, w.dtype))
                update.append(np.asarray(w.dtype.type(self.learning_rate) * m))
            else:
                update.append(np.ones_like(w))
            after.append(m)
        return update, after

    def corrected(
        self, task: Task, weights: Weights, update: Weights, control: Control | None
    ) -> tuple[Weights, Control]:
        """Make a second step, whose gradient is only the correction of the local rule.

        Returns:
            The update of both steps, and the slot's control variate after them.
        """
        rule, stepped = LOCAL.read(task.local), []
        after: Control = []
        for index, (frozen, w, u) in enumerate(zip(self.lossless, weights, update, strict=True)):
            if task.local == "plain" or frozen:
                stepped.append(u)
                after.append(None)
                continue
            controls = [None if values is None else values[index] for values in (control, task.control)]
            own_control, mean = (np.zeros_like(w) if values is None else values for values in controls)
            rate = w.dtype.type(self.learning_rate)
            stepped.append(np.asarray(u + rate * rule.correction(w - u, rule.constant(w, own_control, mean)), w.dtype))
            after.append(rule.new_control(own_control, mean, stepped[-1], 1, float(rate)))
        return stepped, after


class NumpyRule:
    """Applies the local rule of a round to the update of a ``NumpyModel``."""

    def __init__(self, model: NumpyModel) -> None:
        self._model = model
        self._control: Control | None = None

    def begin(self, name: str, weights: Weights, control: Control | None, mean: Control | None) -> None:
        self._control = control

    def steps(self, weights: Weights, update: Weights) -> Weights:
        """Return the update of a round, with the additional step of the local rule."""
        update, self._control = self._model.corrected(self._model._task, weights, update, self._control)
        return update

    def count_steps(self) -> None: ...

    def new_control(self, update: Weights) -> Control | None:
        return self._control


class BatchNormalization:
    """A layer that only has weights. Other code recognizes it by its name, which is the one of Keras's layer."""

    trainable = True

    def __init__(self, weights: list[Any], frozen: frozenset[str]) -> None:
        self.weights = weights
        self.non_trainable_weights = [weight for weight in weights if weight.path in frozen]
        self._non_trainable_variables = weights


class CountedSamples:
    """Training samples that have numbers but no data, which is enough for a ``NumpyModel``."""

    skipped: list[tuple[int, int]] = []  # noqa: RUF012  never modified
    dataset = None

    def feed(self, batch_size: int) -> CountedSamples:
        return self

    def set_order(self, order: Any) -> None:
        """Do nothing, since a ``NumpyModel`` reads no batches."""

    def batch(self, task: Task) -> tuple[Any, ...]:
        """Return the numbers of the task's samples instead of their data."""
        return (np.asarray(task.indices),)

    def batches(self, task: Task) -> Iterator[tuple[tuple[Any, ...], int]]:
        return iter(())

    def run_fit(self, fit: Callable[[], dict[str, float]]) -> dict[str, float]:
        return fit()

    def end(self) -> None: ...

    def take_stats(self) -> tuple[float, list[int]]:
        return 0.0, []


def accuracy_of(weights: Weights) -> float:
    """Return the made-up accuracy that a ``NumpyModel`` reports for some weights."""
    return float(1 / (1 + np.abs(weights[0]).mean()))
