"""The user's Keras callbacks: where each can run, and what it keeps in itself, as data. Runs on the master and where
training runs.

``callbacks`` run on the master, once for each epoch (``ddlf.training.callbacks``); ``worker_callbacks`` run where
``fit`` runs.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, Self

import numpy as np

from ddlf.algorithms.weights import Weights
from ddlf.data.parts import has
from ddlf.errors import AppError, DDLFError
from ddlf.rpc.values import dumps, loads
from ddlf.training.slot.app import App
from ddlf.training.slot.model import TrainableModel
from ddlf.training.slot.part import Kept, Left, SlotPart, SlotPlan, SlotRound
from ddlf.training.slot.task import CALLBACKS
from ddlf.training.spec import installed

PER_PART = "sees one worker's part only"
IN_CALLBACKS = (
    *("EarlyStopping", "ReduceLROnPlateau", "ModelCheckpoint", "BackupAndRestore"),
    *("CSVLogger", "TensorBoard", "RemoteMonitor", "SwapEMAWeights"),
)
"""Callbacks of Keras that would mislead on a worker."""
OF_BATCHES = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
OF_TESTS = ("on_test_begin", "on_test_end", "on_test_batch_begin", "on_test_batch_end")
BY_EPOCHS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "ModelCheckpoint": (lambda one: one.save_freq == "epoch", "give it save_freq='epoch'"),
    "BackupAndRestore": (lambda one: one.save_freq == "epoch", "give it save_freq='epoch'"),
    "TensorBoard": (
        lambda one: one.update_freq == "epoch" and not one._should_trace,
        "give it update_freq='epoch' and profile_batch=0",
    ),
    "TerminateOnNaN": (lambda one: True, ""),  # a loss that is NaN in a batch is NaN in the epoch's mean
}
"""Keras's own that look at batches: whether one of them can do without, and what to write otherwise."""
SET_RATES = ("LearningRateScheduler", "ReduceLROnPlateau")
NOT_STATE = frozenset({"model", "_model", "params", "_params"})


def warnings(callbacks: Iterable[Any]) -> list[str]:
    """A sentence for each of ``worker_callbacks`` that means something else on a worker than in a ``fit`` of the whole
    run."""
    found = []
    for callback in callbacks:
        names = _names(callback)
        monitor = str(getattr(callback, "monitor", ""))
        if any(name in IN_CALLBACKS for name in names):
            found.append(f"{names[0]} {PER_PART}; put it into callbacks, which run on the master")
        elif monitor.startswith("val_"):
            found.append(f"{names[0]} looks at {monitor}, which is known on the master only; put it into callbacks")
    return list(dict.fromkeys(found))


def warnings_of_master(app: Any, mode: str) -> list[str]:
    """A sentence for each of ``callbacks`` that will look or act in vain, or of which a checkpoint cannot have
    everything.

    Args:
        app: Has the callbacks.
        mode: The name of the run's strategy.
    """
    found, about_rates = [], installed()[mode].about_rates
    for callback in app.callbacks:
        name, monitor = type(callback).__name__, str(getattr(callback, "monitor", ""))
        if monitor.startswith("val_") and not has(app, "val"):
            found.append(f"{name} looks at {monitor}, but there is no x_val")
        better = getattr(callback, "mode", None)
        if better in ("min", "max") and _better(monitor) not in ("", better):
            found.append(
                f"{name} takes a {'smaller' if better == 'min' else 'larger'} {monitor} for better (mode={better!r})"
            )
        if about_rates and name in ("LearningRateScheduler", "ReduceLROnPlateau"):
            found.append(f"the learning rate that {name} sets {about_rates}")
        own = not type(callback).__module__.startswith("keras.")
        if own and (app.checkpoint is not None or app.resume is not None):
            found += [
                f"{name} keeps a {kind} in {attribute!r}, which is no data: no checkpoint has it"
                for attribute, kind in _no_data(callback).items()
            ]
    return list(dict.fromkeys(found))


def _better(monitor: str) -> str:
    """Which way a metric is better, by its name; empty if that is not known."""
    name = monitor.removeprefix("val_").lower()
    if name.endswith(("loss", "error", "mae", "mse", "rmse")):
        return "min"
    return "max" if name.endswith(("accuracy", "acc", "auc", "precision", "recall", "f1_score", "iou")) else ""


KEPT_APART = {"batchnorm": "local", "local_rule": "scaffold", "outer": "streaming"}
"""Settings with which slots keep what is no state of an optimizer, and the beginnings of such values."""


def check_of_workers(callbacks: Iterable[Any]) -> None:
    """Refuse ``worker_callbacks`` that ``fit`` cannot call.

    Raises:
        AppError: Names the first of them.
    """
    for callback in callbacks:
        _check_is_one(callback, "worker_callbacks", hasattr(callback, "set_model"))


def _check_is_one(callback: Any, where: str, can_be_called: bool) -> None:
    if isinstance(callback, type):
        raise AppError(f"{where} has the class {callback.__name__}", hint=f"write {callback.__name__}()")
    if not can_be_called:
        raise AppError(f"{where} has a {type(callback).__name__}, which is no Keras callback")


def check(app: Any) -> None:
    """Refuse ``callbacks`` that cannot do on the master what ``fit`` would have them do.

    Raises:
        AppError: Names the first of them.
    """
    import keras

    for callback in app.callbacks:
        names = _names(callback)
        _check_is_one(callback, "callbacks", isinstance(callback, keras.callbacks.Callback))
        if "SwapEMAWeights" in names:
            raise AppError(
                f"{names[0]} has no averages to swap on the master: each slot's optimizer has its own",
                hint="leave it out: with use_ema they take the place of the weights when the run ends",
            )
        if (why := _batches_hint(callback)) is not None:
            raise AppError(f"{names[0]} in callbacks looks at batches, which are on the workers only", hint=why)
        if any(name in SET_RATES for name in names):
            check_rates(app.model, names[0])
        if "BackupAndRestore" in names and (app.checkpoint is not None or app.resume is not None):
            raise AppError(
                f"{names[0]} and checkpoints both say where a run goes on from",
                hint="leave out one of the two; checkpoint and resume bring every slot's state back",
            )
        kept = [name for name, values in KEPT_APART.items() if str(getattr(app, name)).startswith(values)]
        if "BackupAndRestore" in names and kept:
            raise AppError(
                f"{names[0]} has weights and optimizer only, but with {kept[0]}={str(getattr(app, kept[0]))!r} each slot keeps more",
                hint="use checkpoint and resume, which have all of it",
            )


def check_rates(model: Any, name: str) -> None:
    """Refuse what sets learning rates where none can be set.

    Args:
        model: Model of this side.
        name: What sets them, as in the error.

    Raises:
        AppError: The model has no optimizer, or one that follows a schedule.
    """
    from ddlf.training.roles.optimizer_state import rate_variables

    if model.optimizer is None:
        raise AppError(
            f"{name} sets the optimizer's learning rate, but the model {model.name!r} is compiled without an optimizer",
            hint=f"compile it with one, or leave {name} out",
        )
    if not rate_variables(model):
        raise AppError(
            f"{name} sets the optimizer's learning rate, which follows a schedule",
            hint=f"compile the model with a number, or leave {name} out",
        )


def _names(callback: Any) -> list[str]:
    return [kind.__name__ for kind in type(callback).__mro__]


def _batches_hint(callback: Any) -> str | None:
    """What to do about a callback that needs to see batches; None if it does not."""
    for name in OF_BATCHES:
        owner = type(callback) if name in vars(callback) else _owner(callback, name)
        if owner.__name__ == "Callback":
            continue
        by_epochs, hint = BY_EPOCHS.get(owner.__name__, (lambda one: False, "put it into worker_callbacks"))
        if name in vars(callback) or not by_epochs(callback):
            return hint or "put it into worker_callbacks"
    return None


def _owner(callback: Any, name: str) -> type:
    return next(kind for kind in type(callback).__mro__ if name in vars(kind))


def look_at_batches(callbacks: Iterable[Any]) -> bool:
    """Whether one of them may look at single batches."""
    return _override(callbacks, OF_BATCHES)


def look_at_tests(callbacks: Iterable[Any]) -> bool:
    """Whether one of them may look at how validation data is evaluated."""
    return _override(callbacks, OF_TESTS)


def _override(callbacks: Iterable[Any], names: Sequence[str]) -> bool:
    import keras

    plain = keras.callbacks.Callback
    return any(
        not isinstance(callback, plain)
        or any(name in vars(callback) or getattr(type(callback), name) is not getattr(plain, name) for name in names)
        for callback in callbacks
    )


class WorkerCallbacks(SlotPart):
    """The attributes of the slot's ``worker_callbacks``.

    Raises:
        AppError: ``fit`` cannot call one of them, or one keeps something that cannot move with the slot.
    """

    name = CALLBACKS

    def __init__(self, app: App, model: TrainableModel) -> None:
        check_of_workers(app.worker_callbacks)
        self._states = CallbackStates(app.worker_callbacks).checked()

    def begin(self, round: SlotRound, weights: Weights, left: Left | None) -> Weights:
        self._states.begin(left)
        return weights

    def end(self, round: SlotRound, update: Weights) -> tuple[Weights, Left | None]:
        return update, self._states.read()

    def fit_begins(self) -> Callable[[], None]:
        return self._states.go_on()

    @classmethod
    def kept(cls, plan: SlotPlan) -> Kept | None:
        return Kept(back=True) if plan.callbacks else None


class CallbackStates:
    """The attributes of callbacks that are data and have changed since the beginning.

    Numbers, text, lists, dicts, sets and arrays are data. Functions are not, and belong to what a callback is. Files
    and other things that only this process has are made anew in ``on_train_begin``, which each ``fit`` calls.

    Args:
        callbacks: As they are at first.
    """

    def __init__(self, callbacks: Iterable[Any]) -> None:
        self._callbacks: dict[str, Any] = {}
        counts: dict[str, int] = {}
        for callback in callbacks:
            name = type(callback).__name__
            counts[name] = counts.get(name, 0) + 1
            self._callbacks[f"{name} {counts[name]}"] = callback
        self._first = {name: _encoded(callback) for name, callback in self._callbacks.items()}
        self._goes_on = False  # whether they keep something of before

    def checked(self) -> Self:
        """Itself, if all that they keep can move with a slot.

        Raises:
            AppError: Names the first.
        """
        for name, callback in self._callbacks.items():
            for attribute, kind in _no_data(callback).items():
                raise AppError(
                    f"{name.partition(' ')[0]} in worker_callbacks keeps a {kind} in {attribute!r}, which cannot move with a slot to another worker",
                    hint="keep numbers, text, lists, dicts or arrays, and make everything else in on_train_begin",
                )
        return self

    def read(self) -> list[np.ndarray[Any, Any]]:
        """Return the changed attributes: bytes in arrays of uint8, which nothing changes later."""
        changed = {}
        for name, callback in self._callbacks.items():
            first, now = self._first[name], _encoded(callback)
            changed[name] = {
                attribute: vars(callback)[attribute]
                for attribute, (_, digest) in now.items()
                if attribute not in first or first[attribute][1] != digest
            }
        return [np.frombuffer(bytes(part), np.uint8) for part in dumps(changed)]

    def write(self, state: Sequence[Any]) -> list[str]:
        """Have them keep again what ``read`` has given.

        Returns:
            Names of those that are not here, or of which another class is.
        """
        values = loads([bytearray(np.asarray(part, np.uint8)) for part in state])
        for name in values.keys() & self._callbacks.keys():
            vars(self._callbacks[name]).update(copy.deepcopy(values[name]))
        return [name.partition(" ")[0] for name in values if name not in self._callbacks]

    def begin(self, state: Sequence[Any] | None) -> None:
        """Make them the callbacks of a slot: as they were at first, or as its round before left them."""
        self.reset()
        if state is not None:
            self.write(state)
        self._goes_on = state is not None

    def go_on(self) -> Callable[[], None]:
        """Return a function that restores the attributes of now after ``on_train_begin`` of the next ``fit``, which may
        reset them."""
        kept, self._goes_on = self.read() if self._goes_on else None, True

        def begun() -> None:
            if kept is not None:
                self.write(kept)

        return begun

    def reset(self) -> None:
        """Restore the first attributes."""
        for name, callback in self._callbacks.items():
            first = self._first[name]
            for attribute in _encoded(callback).keys() - first.keys():
                del vars(callback)[attribute]
            vars(callback).update({attribute: _decoded(parts) for attribute, (parts, _) in first.items()})


def _encoded(callback: Any) -> dict[str, tuple[list[bytes], bytes]]:
    """The attributes of a callback that are data: each as bytes, and their digest."""
    found = {}
    for attribute, value in _attributes(callback).items():
        try:
            parts = [bytes(part) for part in dumps(value)]
        except DDLFError:
            continue
        found[attribute] = parts, hashlib.sha256(b"".join(parts)).digest()
    return found


def _decoded(parts: list[bytes]) -> Any:
    return copy.deepcopy(loads([bytearray(part) for part in parts]))


def _no_data(callback: Any) -> dict[str, str]:
    """The attributes of a callback that are neither data nor what it is made of, and what is in them."""
    there = {name: value for name, value in _attributes(callback).items() if not callable(value)}
    known = _encoded(callback)
    return {
        name: type(value).__name__
        for name, value in there.items()
        if name not in known and not isinstance(value, ModuleType)
    }


def _attributes(callback: Any) -> dict[str, Any]:
    # Which way a monitored value is to go is found out anew, with the sign of min_delta.
    left_out = NOT_STATE | ({"min_delta"} if hasattr(callback, "monitor_op") else set())
    return {name: value for name, value in vars(callback).items() if name not in left_out}
