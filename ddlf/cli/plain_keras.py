"""Checks whether an app with one slot computes the same as plain Keras: same data, order and seeds.

Runs on the master, which trains next to its one worker. Both sides begin with the same weights, a fresh optimizer and
the same seeds. Both train on the first samples of the first round's order: the worker with the app's ``train``, the
master with ``Model.fit`` on arrays. Then their updates are compared. If they differ, a binary search finds the first
batch with a difference; each step trains both sides again from the start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ddlf.algorithms.codec import CODEC
from ddlf.algorithms.partition import shuffled
from ddlf.algorithms.reading_order import Portion, SlotSamples
from ddlf.algorithms.weights import Weights, difference, is_float
from ddlf.data.app_data import batches as data_of
from ddlf.data.app_data import content, contents, data_set_of, has_own_train, rows
from ddlf.data.stream import SampleStream, usual_memory
from ddlf.data.trees import tree_map
from ddlf.errors import ConfigError
from ddlf.training.context import App
from ddlf.training.crew.crew import Crew
from ddlf.training.crew.opening import crew_of
from ddlf.training.exchanges.carrier import Carrier, StarWeights
from ddlf.training.exchanges.states import SlotStates
from ddlf.training.refusals import check_app, check_backend, check_spec
from ddlf.training.registry import spec_of
from ddlf.training.roles import have_keras
from ddlf.training.slot.build import describe_optimizer, describe_weights, number_format, set_precision
from ddlf.training.slot.keras_model import KerasModel, keeps_a_seed
from ddlf.training.slot.optimizers import no_final_averages
from ddlf.training.slot.task import Reply, Task
from ddlf.training.spec import RunSpec

Update = Callable[[int], Awaitable[Weights]]
"""Trains again from the start on a number of batches, and returns the update."""
ROUNDING = 1e-4
"""Tolerance for sums in another order, as a share of a tensor's largest change."""
NOTHING = 1e-7
"""Tolerance for changes below the resolution of a float32 near 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Differs:
    """The first difference between two trainings, with plain Keras and with the app.

    Args:
        batch: Number of the batch, from 1.
        tensor: Path of the first weight that differs.
        element: Indices of this weight's element with the largest difference.
        expected: Its value with plain Keras, after this batch.
        actual: Its value with the app.
        tensors: The number of weights that differ.
        most: The largest difference of all elements.
        cause: The likely cause.
    """

    batch: int
    tensor: str
    element: tuple[int, ...]
    expected: float
    actual: float
    tensors: int
    most: float
    cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The result of comparing an app with plain Keras.

    Args:
        batches: The number of batches that both have trained on.
        batch_size: Samples in each batch; the last may have fewer.
        same_bits: Whether all weights have the same bits. If not, and ``differs`` is None, they agree to rounding.
        most: The largest difference of all elements.
        differs: The first difference; None if there is none.
    """

    batches: int
    batch_size: int
    same_bits: bool
    most: float
    differs: Differs | None = None


def _first(order: SlotSamples, samples: int) -> SlotSamples:
    return order[:samples] if not isinstance(order, Portion) else replace(order, end=min(samples, len(order)))


async def compare(app: App, batches: int) -> Compared:
    """Train an app with one slot and plain Keras, and compare them.

    Args:
        app: The user's ``IApp``, with a cluster of one worker.
        batches: The number of batches to train on, at most all.

    Raises:
        ConfigError: A setting cannot be used.
        AppError: The app lacks something.
        RemoteError: The app raised an error on the worker.
    """
    # The same checks as for a run, except for several slots and for folders: one slot trains, and no file is written.
    await app.run_context.check_written()
    check_app(app)
    spec = spec_of(app)
    check_spec(spec)
    check_backend()
    if spec.exchange.one_step:
        raise ConfigError(
            "local training is compared, and with exchange='gradient' there is none",
            hint="compare with exchange='star' (-p exchange=star), which has the same model, data and seeds",
        )
    await have_keras()
    set_precision(app.precision, number_format())
    with ThreadPoolExecutor(1) as thread:  # one thread, since Keras keeps some state per thread
        async with crew_of(app, spec.seed, backups=False) as (crew, samples):
            both = Both(app, crew, samples, spec, thread)
            last = min(batches, -(-samples // spec.data.batch_size))
            return await both.compared(last)


class Both:
    """Trains one app on both sides, with plain Keras on the master and with DDLF on a worker, to compare the updates.

    Args:
        app: The app, with data and model.
        crew: The crew with the app's only worker.
        samples: n, the number of samples.
        spec: The run.
        thread: Runs plain Keras.
    """

    def __init__(self, app: App, crew: Crew, samples: int, spec: RunSpec, thread: ThreadPoolExecutor):
        self._app = app
        self._crew = crew
        self._thread = thread
        self._start: Weights = app.model.get_weights()
        self._names = [row[0] for row in describe_weights(app.model)]
        self._size, self._seed, self._epochs = (spec.data.batch_size, spec.seed, spec.epochs)
        self._order: SlotSamples = shuffled(samples, self._seed, 0)
        if data_set_of(app, "train") is not None:  # files in their stored order
            self._order = Portion(shuffle="none", seed=self._seed, epoch=0, slots=1, start=0, stop=samples)
        self._model = KerasModel(app)
        codec = CODEC.read("float32")
        states = SlotStates(app.run_context.name, crew, [{}], {})
        weights_out = StarWeights("float32", [True] * len(self._start))
        self._exchange = Carrier(app.run_context.name, samples, codec.name, weights_out, states)
        self._last: Reply | None = None

    async def compared(self, batches: int) -> Compared:
        """Compare both sides after a number of batches, and find the first batch that differs."""
        expected, actual = await self.plain(batches), await self.carried(batches)
        compared = Compared(
            batches=batches,
            batch_size=self._size,
            same_bits=all(left.tobytes() == right.tobytes() for left, right in zip(expected, actual, strict=True)),
            most=max(map(_most, expected, actual), default=0.0),
        )
        if not differing(expected, actual):
            return compared
        batch = await first_batch(self.plain, self.carried, batches)
        expected, actual = await self.plain(batch), await self.carried(batch)
        if not (tensors := differing(expected, actual)):  # the second run gave other numbers
            tensors, batch = [0], batches
        first = tensors[0]
        distances = np.nan_to_num(np.abs(expected[first] - actual[first]), nan=np.inf)
        element = tuple(int(number) for number in np.unravel_index(int(np.argmax(distances)), distances.shape))
        differs = Differs(
            batch=batch,
            tensor=self._names[first],
            element=element,
            expected=float(self._start[first][element] - expected[first][element]),
            actual=float(self._start[first][element] - actual[first][element]),
            tensors=len(tensors),
            most=max(map(_most, expected, actual)),
            cause=await self._cause(batch, expected, actual),
        )
        return replace(compared, differs=differs)

    async def plain(self, batches: int) -> Weights:
        """Train with plain Keras on a number of batches, and return the update: how the weights have changed."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._fit, self._task(batches))

    async def carried(self, batches: int) -> Weights:
        """Train the app on its worker on a number of batches, and return the update: how the weights have changed."""
        task = self._task(batches)
        self._last = await self._crew.carry(0, 0, partial(self._exchange.send, lambda: task))
        update: Weights = self._last.update
        return update

    def _task(self, batches: int) -> Task:
        return Task(
            slot=0,
            round=0,
            slots=1,
            first_epoch=0,
            epochs=1,
            batch_size=self._size,
            seed=self._seed,
            indices=_first(self._order, batches * self._size),
            weights=self._start,
            version=0,
            steps=(0, batches, self._epochs * -(-len(self._order) // self._size), self._epochs),
        )

    def _fit(self, task: Task) -> Weights:
        model = self._app.model
        model.set_weights(self._start)
        self._model.begin(task, None)
        data = self._data_of(task.indices)
        arguments = dict(zip(("x", "y", "sample_weight"), data, strict=False))
        callbacks = list(self._app.worker_callbacks)
        with no_final_averages(model):  # the end of a round is not the end of training, as on the worker
            model.fit(**arguments, batch_size=task.batch_size, shuffle=False, verbose=0, callbacks=callbacks)
        return difference(self._start, model.get_weights())

    def _data_of(self, indices: SlotSamples) -> tuple[Any, ...]:
        """Return the samples with these numbers as arrays for Keras's ``fit``."""
        if not isinstance(indices, Portion):
            return tuple(tree_map(lambda array: array[indices], data_of(self._app, "train")))
        data_set = data_set_of(self._app, "train")
        assert data_set is not None
        chunks = list(SampleStream(data_set, indices, self._size, usual_memory()))
        return rows(self._app, "train", {name: np.concatenate([chunk[name] for chunk in chunks]) for name in data_set})

    async def _cause(self, batch: int, expected: Weights, actual: Weights) -> str:
        """Return the likely cause of the difference, as a sentence."""
        app, name = self._app, type(self._app).__name__
        if differing(expected, await self.plain(batch)):
            return (
                "plain Keras does not repeat itself here: something in the model draws numbers or counts without a seed of Keras's, "
                "or the backend sums in any order (tf.config.experimental.enable_op_determinism() ends that)"
            )
        if differing(actual, await self.carried(batch)):
            return f"{name} gives other results each time on the worker: it keeps earlier state, or draws numbers without its own seed"
        own_facts, worker_facts = describe_optimizer(app.model.optimizer), app.run_context.optimizer
        if differing_facts := [
            fact for fact in {**own_facts, **worker_facts} if own_facts.get(fact) != worker_facts.get(fact)
        ]:
            fact = differing_facts[0]
            return (
                f"create_model makes another optimizer on the worker ({fact}: {worker_facts.get(fact)!r}) than here ({own_facts.get(fact)!r}): "
                "it uses something that is not the same there, such as a global that was changed"
            )
        if content(contents(app)) != app.run_context.content:
            return "create_model changes the training data after it was loaded: do that in load_dataset"
        assert self._last is not None
        if self._last.fed is not None:
            return (
                f"{name}.train trains on other samples than self.indices had, or in more epochs than it was asked for"
            )
        if has_own_train(app):
            return f"your own {name}.train does something else than fit"
        if keeps_a_seed(app.model):
            return "a layer or the loss draws from tf.random, whose seed is compiled in: use keras.random with a seed generator"
        return (
            "both began with the same weights, samples and seeds: create_model or a layer uses something that is not the same in both "
            "processes, such as a global that was changed, a file, or the environment"
        )


def differing(expected: Weights, actual: Weights) -> list[int]:
    """Return the indices of the weight tensors in which two updates differ by more than rounding."""
    return [index for index, pair in enumerate(zip(expected, actual, strict=True)) if not _is_near(*pair)]


async def first_batch(expected: Update, actual: Update, last: int) -> int:
    """Find the smallest number of batches that makes two trainings differ, by binary search.

    Args:
        expected: Trains again on a number of batches; returns the update.
        actual: Trains the other side again on a number of batches; returns the update.
        last: A number of batches that makes them differ. Once different, they are assumed to stay different.
    """
    alike = 0
    while last - alike > 1:
        middle = (alike + last) // 2
        if differing(await expected(middle), await actual(middle)):
            last = middle
        else:
            alike = middle
    return last


def _is_near(expected: np.ndarray[Any, Any], actual: np.ndarray[Any, Any]) -> bool:
    if not is_float(expected):
        return np.array_equal(expected, actual)
    wide = np.asarray(expected, np.float64), np.asarray(actual, np.float64)
    largest = np.max(np.abs(wide[0]), initial=0.0, where=np.isfinite(wide[0]))
    return np.allclose(*wide, rtol=0.0, atol=ROUNDING * largest + NOTHING, equal_nan=True)


def _most(expected: np.ndarray[Any, Any], actual: np.ndarray[Any, Any]) -> float:
    """Return the largest difference between the values of two arrays; infinite if one of two values is NaN."""
    if not expected.size:
        return 0.0
    same = (expected == actual) | ((expected != expected) & (actual != actual))
    distances = np.abs(np.asarray(expected, np.float64) - np.asarray(actual, np.float64))
    return float(np.max(np.where(same, 0.0, np.nan_to_num(distances, nan=np.inf))))
