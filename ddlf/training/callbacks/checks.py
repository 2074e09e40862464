"""Checks where Keras callbacks can run: ``callbacks`` on the master once per epoch, ``worker_callbacks`` in ``fit``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ddlf.errors import AppError
from ddlf.training.callbacks.states import check_is_one, no_data
from ddlf.training.context import App
from ddlf.training.registry import MODE
from ddlf.training.samples.policy import CommonData, data_of
from ddlf.training.slot.parts import PARTS

PER_PART = "sees one worker's part only"
IN_CALLBACKS = (
    *("EarlyStopping", "ReduceLROnPlateau", "ModelCheckpoint", "BackupAndRestore"),
    *("CSVLogger", "TensorBoard", "RemoteMonitor", "SwapEMAWeights"),
)
"""Callbacks of Keras that would give misleading results on a worker."""
OF_BATCHES = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
OF_TESTS = ("on_test_begin", "on_test_end", "on_test_batch_begin", "on_test_batch_end")
BY_EPOCHS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "ModelCheckpoint": (lambda callback: callback.save_freq == "epoch", "give it save_freq='epoch'"),
    "BackupAndRestore": (lambda callback: callback.save_freq == "epoch", "give it save_freq='epoch'"),
    "TensorBoard": (
        lambda callback: callback.update_freq == "epoch" and not callback._should_trace,
        "give it update_freq='epoch' and profile_batch=0",
    ),
    "TerminateOnNaN": (lambda _: True, ""),  # a NaN loss of one batch makes the epoch's mean NaN, too
}
"""Keras's own callbacks that observe batches. Each has a test whether the callback works without batches, and a hint if
it does not."""
SET_RATES = ("LearningRateScheduler", "ReduceLROnPlateau")


def warnings(callbacks: Iterable[Any]) -> list[str]:
    """Return a warning for each of ``worker_callbacks`` that works differently on a worker than in one ``fit``."""
    sentences = []
    for callback in callbacks:
        names = _names(callback)
        monitor = str(getattr(callback, "monitor", ""))
        if any(name in IN_CALLBACKS for name in names):
            sentences.append(f"{names[0]} {PER_PART}; put it into callbacks, which run on the master")
        elif monitor.startswith("val_"):
            sentences.append(f"{names[0]} looks at {monitor}, which is known on the master only; put it into callbacks")
    return list(dict.fromkeys(sentences))


def warnings_of_master(app: App, mode: str, data: CommonData | None = None) -> list[str]:
    """Return a warning for each of the app's ``callbacks`` that has no effect, or that a checkpoint cannot fully store.

    Args:
        app: The user's ``IApp``, which has the callbacks.
        mode: The name of the run's strategy.
        data: The policy of the run's data; None before a run.
    """
    sentences, about_rates = [], MODE.kind(mode).about_rates
    data = data or data_of(app)
    for callback in app.callbacks:
        name, monitor = type(callback).__name__, str(getattr(callback, "monitor", ""))
        if monitor.startswith("val_") and not data.has_data(app, "val"):
            sentences.append(f"{name} looks at {monitor}, but there is no x_val")
        elif monitor and not monitor.startswith("val_") and data.hides_metrics:
            sentences.append(
                f"{name} looks at {monitor}, but workers report no metrics, which have neither noise nor masks"
            )
        better = getattr(callback, "mode", None)
        if better in ("min", "max") and _better(monitor) not in ("", better):
            sentences.append(
                f"{name} takes a {'smaller' if better == 'min' else 'larger'} {monitor} for better (mode={better!r})"
            )
        if about_rates and name in ("LearningRateScheduler", "ReduceLROnPlateau"):
            sentences.append(f"the learning rate that {name} sets {about_rates}")
        is_users_own = not type(callback).__module__.startswith("keras.")
        if is_users_own and (app.checkpoint is not None or app.resume is not None):
            sentences += [
                f"{name} keeps a {kind} in {attribute!r}, which a checkpoint cannot store"
                for attribute, kind in no_data(callback).items()
            ]
    return list(dict.fromkeys(sentences))


def _better(monitor: str) -> str:
    """Return "min" if smaller values of a metric are better, and "max" if larger ones are; "" if unknown."""
    name = monitor.removeprefix("val_").lower()
    if name.endswith(("loss", "error", "mae", "mse", "rmse")):
        return "min"
    return "max" if name.endswith(("accuracy", "acc", "auc", "precision", "recall", "f1_score", "iou")) else ""


def check(app: App) -> None:
    """Raise an error for each of the app's ``callbacks`` that works in ``fit`` but cannot work on the master.

    Raises:
        AppError: A callback cannot work on the master. The error names the first one.
    """
    import keras

    for callback in app.callbacks:
        names = _names(callback)
        check_is_one(callback, "callbacks", isinstance(callback, keras.callbacks.Callback))
        if "SwapEMAWeights" in names:
            raise AppError(
                f"{names[0]} has no averages to swap on the master: each slot's optimizer has its own",
                hint="leave it out: with use_ema the averages replace the weights when the run ends",
            )
        if (hint := _batches_hint(callback)) is not None:
            raise AppError(f"{names[0]} in callbacks looks at batches, which are on the workers only", hint=hint)
        if any(name in SET_RATES for name in names):
            check_rates(app.model, names[0])
        if "BackupAndRestore" in names and (app.checkpoint is not None or app.resume is not None):
            raise AppError(
                f"{names[0]} and checkpoints both define where a run continues",
                hint="leave out one of the two; checkpoint and resume restore every slot's state",
            )
        stored_settings = [
            part.setting for part in PARTS if part.setting and part.kept_with(getattr(app, part.setting))
        ]
        if "BackupAndRestore" in names and stored_settings:
            setting = stored_settings[0]
            raise AppError(
                f"{names[0]} stores weights and optimizer only, but with {setting}={str(getattr(app, setting))!r} each slot keeps more",
                hint="use checkpoint and resume, which store the whole state",
            )


def check_rates(model: Any, name: str) -> None:
    """Raise an error if a rule or callback sets learning rates, but the model has none that can be set.

    Args:
        model: The master's model.
        name: Name of the rule or callback, for the error.

    Raises:
        AppError: The model has no optimizer, or one with a learning rate schedule.
    """
    from ddlf.training.slot.optimizers import rate_variables

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
    """Return a hint for a callback that needs to see single batches, which the master cannot show it; or None."""
    for name in OF_BATCHES:
        owner = type(callback) if name in vars(callback) else _owner(callback, name)
        if owner.__name__ == "Callback":
            continue
        by_epochs, hint = BY_EPOCHS.get(owner.__name__, (lambda _: False, "put it into worker_callbacks"))
        if name in vars(callback) or not by_epochs(callback):
            return hint or "put it into worker_callbacks"
    return None


def _owner(callback: Any, name: str) -> type:
    return next(kind for kind in type(callback).__mro__ if name in vars(kind))


def look_at_batches(callbacks: Iterable[Any]) -> bool:
    """Return whether a callback may need calls for single batches."""
    return _override(callbacks, OF_BATCHES)


def look_at_tests(callbacks: Iterable[Any]) -> bool:
    """Return whether a callback may need calls during the evaluation of validation data."""
    return _override(callbacks, OF_TESTS)


def _override(callbacks: Iterable[Any], names: Sequence[str]) -> bool:
    import keras

    plain = keras.callbacks.Callback
    return any(
        not isinstance(callback, plain)
        or any(name in vars(callback) or getattr(type(callback), name) is not getattr(plain, name) for name in names)
        for callback in callbacks
    )
