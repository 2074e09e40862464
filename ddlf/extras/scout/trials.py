"""The role of a worker in a search: it trains trials, and keeps only their losses. Runs in the executor.

A trial is the app's own local training of one slot, with the rate multiplied by a factor. So it works with every
optimizer, schedule and own ``train``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ddlf.algorithms.weights import Weights, difference
from ddlf.data.app_data import has_own_train
from ddlf.errors import AppError, ConfigError
from ddlf.training.evaluation.metrics import scalars
from ddlf.training.evaluation.model import EVALUATION_BATCH, evaluate, reading
from ddlf.training.slot.build import ModelReport
from ddlf.training.slot.distribution import scope_of
from ddlf.training.slot.feed import Feed, make_feed
from ddlf.training.slot.keras_model import use_fast_steps
from ddlf.training.slot.optimizers import HELD_PATH, build_optimizer, innermost
from ddlf.training.slot.replica import Replica
from ddlf.training.slot.task import Task
from ddlf.training.slot.variables import set_weights


def optimizers_of(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizers that change weights: one, or several inside a ``MultiOptimizer``."""
    inner = innermost(optimizer)
    inner_optimizers = getattr(inner, "optimizers", ())
    for inner_optimizer in inner_optimizers:
        yield from optimizers_of(inner_optimizer)
    if inner is not None and not inner_optimizers:
        yield inner


def highest_rate(model: Any, steps: int) -> float:
    """Return the highest learning rate of a model's optimizers in a run of some steps.

    Raises:
        ConfigError: The model has no optimizer with a learning rate.
    """
    import keras

    rates: list[float] = []
    build_optimizer(model)  # before, several optimizers are unknown
    for optimizer in optimizers_of(model.optimizer):
        rate = getattr(optimizer, "_learning_rate", None)
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            rates += [_rate_at(rate, step, steps) for step in np.unique(np.linspace(0, steps, 101).astype(int))]
        elif rate is not None:
            rates.append(float(keras.ops.convert_to_numpy(rate() if callable(rate) else rate)))
    rates = [rate for rate in rates if math.isfinite(rate)]
    if not rates or max(rates) <= 0:
        raise ConfigError(
            "the model's optimizer has no learning rate above 0, so there is none to search",
            hint="compile the model with an optimizer, such as keras.optimizers.Adam(1e-3)",
        )
    return max(rates)


def _rate_at(schedule: Any, step: int, steps: int) -> float:
    import keras

    if getattr(schedule, "peak", None) is not None and getattr(schedule, "follows_the_run", False):
        return float(schedule.peak)
    return float(keras.ops.convert_to_numpy(schedule(keras.ops.convert_to_tensor(step))))


class RateFactor:
    """Multiplies the learning rates of a model's optimizers, also if they follow a schedule.

    The factor is a variable of each optimizer that is not part of its state, so no step is compiled again.

    Args:
        model: A compiled model with a built optimizer.
    """

    def __init__(self, model: Any) -> None:
        with scope_of(model):
            self._variables = [_multiplied(optimizer) for optimizer in optimizers_of(model.optimizer)]
        model.train_function = None

    def set(self, factor: float, warm: int = 0) -> None:
        """Set the factor.

        Args:
            factor: The factor.
            warm: Steps of a warm-up, in which the rate rises from about 0.
        """
        for variable in self._variables:
            variable.assign([factor, max(warm, 1)])


def _multiplied(optimizer: Any) -> Any:
    import keras

    variable = optimizer.add_variable((2,), name=f"{HELD_PATH}_factor", dtype="float32")
    variable.assign([1.0, 1.0])
    current_rate = optimizer._get_current_learning_rate

    def multiplied() -> Any:
        rate = current_rate()
        risen = keras.ops.minimum((keras.ops.cast(optimizer._iterations, "float32") + 1) / variable[1], 1.0)
        return keras.ops.cast(rate, "float32") * variable[0] * risen

    vars(optimizer)["_get_current_learning_rate"] = multiplied
    return variable


class TrialReplica(Replica):
    """One worker's copy of an app for trials. No callback runs, and no state stays between trials."""

    _factor: RateFactor
    _held_out: Feed | None = None

    def build(self) -> ModelReport:
        report = super().build()
        model = self.app.model
        self.app.worker_callbacks = []  # create_model may have set some
        self._factor = RateFactor(model)
        if not has_own_train(self.app):  # it will fit so, and would then compile the evaluation a second time
            use_fast_steps(model, (), model.steps_per_execution)
        return report

    async def trial(self, task: dict[str, Any], factor: float, warm: int, held_out: Any) -> dict[str, Any]:
        """Train a trial, and return its validation loss.

        Args:
            task: The ``Task``, as a message; without samples, only its weights are evaluated.
            factor: Multiplies the learning rate.
            warm: Steps of a warm-up.
            held_out: Numbers of the training samples that are held out, or their portion as a message; None for the app's
                validation data.
        """
        result: dict[str, Any] = await self._on_thread(lambda: self.tried(task, factor, warm, held_out))
        return result

    def tried(self, message: dict[str, Any], factor: float, warm: int, held_out: Any) -> dict[str, Any]:
        """Train a trial on this thread. It has the arguments of ``trial``."""
        task = Task.from_message(message)
        self._factor.set(factor, warm)
        round = self._begin_round(task)
        if not len(task.indices):
            self._end_round(round, [np.zeros_like(w) for w in round.begun])
            return {"loss": self._loss(round.begun, task, held_out)}
        update, _ = self._trained(round)
        self._end_round(round, update)
        if not any(int(np.asarray(optimizer._iterations)) for optimizer in optimizers_of(self.app.model.optimizer)):
            raise AppError(
                "a learning rate has no effect: train made no step with self.model.optimizer",
                hint="train with replica.fit or self.model.optimizer, or choose the rate yourself",
            )
        weights: Weights = difference(round.begun, update)
        if not all(np.isfinite(w).all() for w in weights):
            return {"loss": math.inf}
        return {"loss": self._loss(weights, task, held_out)}

    def _loss(self, weights: Weights, task: Task, held_out: Any) -> float:
        """Return the validation loss of weights."""
        if held_out is None:
            return float(evaluate(self.app, weights, "val")["loss"])
        if self._held_out is None:
            self._held_out = self._feed_of(task, held_out)
        set_weights(self.app.model, weights)
        with reading(self.app, self._held_out) as dataset:
            return float(scalars(self.app.model.evaluate(dataset, verbose=0, return_dict=True))["loss"])

    def _feed_of(self, task: Task, held_out: Any) -> Feed:
        """Return the samples that are held out, for an evaluation. They are in memory, because they are few."""
        held_out_task = Task.from_message({**replace(task, indices=np.arange(0)).to_message(), "indices": held_out})
        (rows, count), *_ = self._samples.batches(replace(held_out_task, batch_size=len(held_out_task.indices)))
        feed = make_feed(rows, EVALUATION_BATCH)
        feed.set_order(np.arange(count))
        return feed
