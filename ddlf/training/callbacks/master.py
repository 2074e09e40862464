"""The user's Keras callbacks on the master, where they see all slots together.

Runs on the master; the calls to Keras run on a thread. This module makes the calls that ``fit`` would make. It calls
``on_epoch_end`` each time all samples were trained on, before the hooks, with the metrics of the record and of the
validation data. It calls ``on_epoch_begin`` after the hooks. The next round and the checkpoint wait for these calls.
During the calls the model has the merged weights, and its optimizer has the state of the first slot's optimizer.

A round of several epochs has one ``on_epoch_end``, for its last epoch. ``on_epoch_begin`` is called for each of its
epochs before the round, since it may set each epoch's learning rate.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ddlf.algorithms.rate_decay import Never, Plateau, RateDecay
from ddlf.algorithms.weights import Weights
from ddlf.errors import AppError, BadUpdate
from ddlf.events import Warned
from ddlf.events.record import RoundRecord, accuracy
from ddlf.training.callbacks.checks import check, check_rates, look_at_tests, warnings_of_master
from ddlf.training.callbacks.states import CallbackStates
from ddlf.training.context import App
from ddlf.training.evaluation.master import compute
from ddlf.training.evaluation.metrics import scalars
from ddlf.training.progress import Progress, WeightsRef, local
from ddlf.training.slot.build import describe_optimizer
from ddlf.training.slot.optimizers import (
    build_optimizer,
    final_weights,
    rate_variables,
    read_optimizer,
    read_rates,
    write_optimizer,
    write_rates,
)
from ddlf.training.slot.task import OPTIMIZER
from ddlf.training.slot.variables import is_made, set_weights
from ddlf.training.spec import RunSpec


class Callbacks:
    """All callbacks of one run: the user's callbacks and the callback of ``rate_decay``.

    Args:
        app: The user's ``IApp``, with its model.
        spec: All settings of the run.

    Attributes:
        final: The weights that ``on_train_end`` has set; None if it changed none.

    Raises:
        AppError: A callback cannot do its work on the master.
    """

    def __init__(self, app: App, spec: RunSpec) -> None:
        check(app)
        self._decay_callbacks = callbacks_of(app, spec.local.rate_decay)
        self._callbacks = [*app.callbacks, *self._decay_callbacks]
        for sentence in warnings_of_master(app, spec.train.name, app.run_context.data):
            app.run_context.emit(Warned(about="callback", why=sentence))
        self.final: Weights | None = None
        self._app = app
        self._batch_size = spec.data.batch_size
        self._in_rounds = spec.train.in_rounds
        self._steps = spec.exchange.one_step  # the optimizer is on the master
        self._model = app.model  # kept, since reading app.model later would set each round's weights
        self._keeps = app.checkpoint is not None or app.resume is not None
        self._logs: dict[str, Any] = {}
        self._progress: Progress
        self._list: Any
        self._states: CallbackStates
        self._first_rates: list[float] = []

    @property
    def stopped(self) -> bool:
        """Whether a callback has set ``stop_training``, which ends the run."""
        return bool(self._model.stop_training)

    @property
    def need_weights(self) -> bool:
        """Whether a callback may read the model's weights.

        Only some of Keras's own callbacks are known to read just metrics and learning rates.
        """
        import keras

        classes = keras.callbacks
        blind = (classes.LearningRateScheduler, classes.ReduceLROnPlateau, classes.CSVLogger, classes.TerminateOnNaN)
        return not all(
            type(callback) in blind or (type(callback) is classes.EarlyStopping and not callback.restore_best_weights)
            for callback in self._callbacks
            if callback not in self._decay_callbacks
        )

    @property
    def weights(self) -> Weights | WeightsRef:
        """The global weights, with the changes that the callbacks have made."""
        return self._progress.weights

    def for_tests(self) -> Any:
        """Return the callbacks to call during ``evaluate``, if one of them has methods for the evaluation; or None."""
        return self._list if look_at_tests(self._list.callbacks) else None

    async def begin(self, progress: Progress) -> None:
        """Call ``on_train_begin`` of all callbacks, and restore their states from the checkpoint.

        Args:
            progress: Progress that the run continues from; receives weights and learning rates that callbacks set.
        """
        self._progress = progress
        for name in await compute(self._begin):
            sentence = f"the checkpoint has the state of a {name}, but callbacks has none now"
            self._app.run_context.emit(Warned(about="callback", why=sentence))

    async def show(self) -> None:
        """Let callbacks see the current state: set the model's weights, and the first slot's optimizer state."""
        await compute(self._show)

    async def end_epoch(self) -> RoundRecord:
        """Call ``on_epoch_end`` of all callbacks for everything trained since the last call.

        Returns:
            The newest record, with the metrics that callbacks have added.
        """
        record: RoundRecord = await compute(self._end_epoch)
        return record

    async def begin_epoch(self) -> None:
        """Call ``on_epoch_begin`` of all callbacks for each epoch of the next round.

        In asynchronous training, call it for the next epoch.
        """
        await compute(self._begin_epoch)

    async def go_back(self) -> None:
        """Give the callbacks their states of an earlier round, which the progress has now."""
        await compute(self._go_back)

    async def end(self, *, whole: bool) -> None:
        """Call ``on_train_end`` of all callbacks.

        Args:
            whole: Whether the run is complete rather than stopped. Then a longer run continues from the weights that
                callbacks set here.
        """
        await compute(self._end, whole)

    def terminate(self, error: BadUpdate) -> bool:
        """Return whether an unusable update should end the run.

        It should if a callback is ``TerminateOnNaN``, which ends ``fit`` after a NaN loss.
        """
        import keras

        terminators = [
            callback for callback in self._list.callbacks if isinstance(callback, keras.callbacks.TerminateOnNaN)
        ]
        if (
            not terminators
            or any(getattr(callback, "raise_error", False) for callback in terminators)
            or not error.count
        ):
            return False
        self._app.run_context.emit(Warned(about="callback", why=f"TerminateOnNaN ends the run: {error.message}"))
        return True

    # -- on the thread of Keras ------------------------------------------------------------------------------------

    def _begin(self) -> list[str]:
        import keras

        model, progress, app = self._model, self._progress, self._app
        if not isinstance(progress.weights, WeightsRef):
            set_weights(model, progress.weights)
        if self._has_weights:
            build_optimizer(model)
        if progress.rates:
            write_rates(model, progress.rates[-1])
        elif rate_variables(model) and app.run_context.optimizer.items() - describe_optimizer(model.optimizer).items():
            progress.rates = [read_rates(model)]  # changed since the model was made, for example by an earlier training
        resumed = progress.callbacks is not None
        callbacks = self._callbacks
        for callback in callbacks:
            if resumed and isinstance(callback, keras.callbacks.CSVLogger):
                callback.append = True  # append to its file
        self._list = keras.callbacks.CallbackList(
            callbacks,
            model=model,
            verbose=int(app.verbose),
            epochs=progress.starts[-1],
            steps=-(-progress.samples // len(progress.states) // self._batch_size),
        )
        self._show()
        model.stop_training, model._initial_epoch = False, None
        before = self._weights_and_rates()
        self._first_rates = read_rates(model)
        self._list.on_train_begin()
        self._states = CallbackStates(callbacks)
        missing = [] if progress.callbacks is None else self._states.write(progress.callbacks)
        self._go_on_from(model._initial_epoch or 0)
        self._take(before)
        if progress.reported_records is None:
            progress.reported_records = len(progress.records)
        if progress.begun <= progress.epochs_done:
            self._begin_epoch()
        model.stop_training = False
        return missing

    def _go_on_from(self, epoch: int) -> None:
        """Skip the rounds before an epoch, if ``BackupAndRestore`` has restored the model at its beginning."""
        progress, model = self._progress, self._model
        model._initial_epoch = None
        if not epoch or progress.version:
            return
        # The round that contains the beginning of the epoch.
        begun = progress.starts[bisect.bisect_right(progress.starts, epoch) - 1]
        progress.round = bisect.bisect_left(progress.starts, begun)
        progress.version = progress.merges = progress.round * (1 if self._in_rounds else len(progress.states))
        if self._app.optimizer_state != "fresh" and not self._steps and (state := read_optimizer(model)):
            progress.states[:] = [{OPTIMIZER: state} for _ in progress.states]

    def _go_back(self) -> None:
        assert self._progress.callbacks is not None  # a run goes back only if it writes checkpoints
        self._states.go_back(self._progress.callbacks)
        write_rates(self._model, self._first_rates)  # the progress has no rates before a callback sets one
        self._show()
        self._model.stop_training = False

    def _begin_epoch(self) -> None:
        progress, before = self._progress, self._weights_and_rates()
        rates = []
        for epoch in progress.next_epochs:
            self._list.on_epoch_begin(epoch)
            rates.append(read_rates(self._model))
        progress.begun = progress.next_epochs.stop
        self._take(before, rates)

    def _show(self) -> None:
        model, progress = self._model, self._progress
        if not isinstance(progress.weights, WeightsRef):
            set_weights(model, progress.weights)
        shapes = [] if model.optimizer is None else [tuple(variable.shape) for variable in model.optimizer.variables]
        state = next((state for state in self._optimizers if state), None)
        # With mixed_float16, the workers' optimizer scales the loss and has more variables than this one.
        if state is not None and [np.shape(array) for array in state] == shapes:
            write_optimizer(model, state)
        if progress.rates:
            write_rates(model, progress.rates[-1])

    def _end_epoch(self) -> RoundRecord:
        import keras

        progress = self._progress
        self._show()
        before, record = self._weights_and_rates(), progress.records[-1]
        merged = merged_metrics(progress.records[progress.reported_records :] or [record])
        logs = self._logs = dict(merged)
        for callback in self._list.callbacks:
            if isinstance(callback, keras.callbacks.TerminateOnNaN):
                callback.on_batch_end(self._list.params["steps"] - 1, logs)
        for callback in self._list.callbacks:
            callback.on_epoch_end(progress.epochs_done - 1, logs)
        progress.reported_records = len(progress.records)
        self._take(before)
        added = {name: value for name, value in logs.items() if name not in merged and isinstance(value, int | float)}
        return dataclasses.replace(record, metrics={**record.metrics, **scalars(added)})

    def _end(self, whole: bool) -> None:
        import keras

        model, progress = self._model, self._progress
        self._show()
        before = final_weights(model, local(progress.weights), self._optimizers)
        set_weights(model, before)
        for callback in self._list.callbacks:
            if not whole and isinstance(callback, keras.callbacks.BackupAndRestore):
                callback.delete_checkpoint = False  # a stopped training continues from it
        self._list.on_train_end(self._logs)
        after = model.get_weights()
        if differ(before, after):
            self.final = after
            progress.weights = after if whole else progress.weights
        progress.compiled = describe_optimizer(model.optimizer)

    @property
    def _has_weights(self) -> bool:
        """Whether the master's model has memory for its weights. With ``split`` it has none unless a callback reads it."""
        return all(map(is_made, self._model.weights))

    @property
    def _optimizers(self) -> Sequence[Weights | None]:
        return [self._progress.state.get("outer")] if self._steps else self._progress.optimizers

    def _weights_and_rates(self) -> tuple[Weights, list[float]]:
        return self._model.get_weights() if self._has_weights else [], read_rates(self._model)

    def _take(self, before: tuple[Weights, list[float]], rates: Sequence[list[float]] = ()) -> None:
        """Copy what the callbacks have changed into the progress, and store the callbacks' states for a checkpoint."""
        progress, (weights, rate) = self._progress, before
        after, now = self._weights_and_rates()
        if differ(weights, after):
            progress.weights = after
        rates = rates or [now]
        if progress.rates or any(rates_of_epoch != rate for rates_of_epoch in rates):
            progress.rates = list(rates)
        if self._steps:
            progress.state["outer"] = read_optimizer(self._model)
        if self._keeps:
            progress.callbacks = self._states.read()
        progress.compiled = describe_optimizer(self._model.optimizer)


def merged_metrics(records: Sequence[RoundRecord]) -> dict[str, float]:
    """Return the metrics of several records as one mean, weighted by samples; one record's metrics are unchanged."""
    if len(records) == 1:
        return dict(records[0].metrics)
    merged = {}
    for name in dict.fromkeys(name for record in records for name in record.metrics):
        values = [(record.metrics[name], record.samples) for record in records if name in record.metrics]
        merged[name] = sum(value * samples for value, samples in values) / sum(samples for _, samples in values)
    return merged


def differ(weights: Weights, other: Weights) -> bool:
    """Return whether any of the weights differ in bits; equal NaN values do not differ."""
    return any(a.tobytes() != b.tobytes() for a, b in zip(weights, other, strict=True))


def callbacks_of(app: App, rule: RateDecay | Plateau) -> list[Any]:
    """Return a list with the callback that lowers learning rates by the setting ``rate_decay``; empty for ``never``.

    Raises:
        AppError: The rule needs validation data that is missing, or a learning rate that can be set.
    """
    if isinstance(rule, Never):
        return []
    import keras

    name, data = f"rate_decay={str(rule)!r}", app.run_context.data
    hint = f"set x_val, y_val in {data.evaluated_in}"
    validates = data.has_data(app, "val")
    if isinstance(rule, Plateau):
        check_rates(app.model, name)
        if not validates and data.hides_metrics:
            raise AppError(
                f"{name} looks at the loss, but workers report no metrics, which have neither noise nor masks",
                hint=hint,
            )
        monitor = "val_loss" if validates else "loss"
        more = {"min_delta": rule.delta, "cooldown": rule.cooldown, "min_lr": rule.least}
        return [keras.callbacks.ReduceLROnPlateau(monitor, rule.factor, rule.patience, mode="min", **more)]
    decay: RateDecay = rule
    if not validates:
        raise AppError(f"{name} looks at validation data, but there is no x_val", hint=hint)
    check_rates(app.model, name)

    class RateDecays(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_begin(self, logs: Any = None) -> None:
            # Lists, since a checkpoint stores a callback's non-empty lists.
            self.first: list[float] = []
            self.accuracies: list[float] = []
            self.losses: list[float] = []

        def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
            now = read_rates(self.model)
            self.first = self.first or now
            val_accuracy = accuracy({name: value for name, value in logs.items() if name.startswith("val_")})
            if not 0 <= val_accuracy <= 1:
                raise AppError(
                    f"{name} looks at the accuracy of validation data, and the model reports "
                    + ("none" if val_accuracy != val_accuracy else f"{val_accuracy}"),
                    hint="compile it with metrics=['accuracy']",
                )
            self.accuracies.append(val_accuracy)
            self.losses.append(logs["val_loss"])
            lower = [decay.rate(first, self.accuracies, self.losses) for first in self.first]
            write_rates(self.model, [low if 0 < low < rate else rate for low, rate in zip(lower, now, strict=True)])
            logs["learning_rate"] = read_rates(self.model)[0]

    return [RateDecays()]
