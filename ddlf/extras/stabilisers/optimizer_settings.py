"""Applies the settings ``schedule``, ``clip`` and ``multipliers`` to the optimizer of a compiled model.

Runs on master and workers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddlf.algorithms.clipping import CLIP
from ddlf.algorithms.multipliers import MULTIPLIERS, ByName
from ddlf.algorithms.schedules import SCHEDULE
from ddlf.errors import AppError, ConfigError
from ddlf.training.context import App
from ddlf.training.slot.optimizers import chain, innermost, unwrapped

MARK = "_ddlf_stabilised"
"""The attribute of a model that stores the settings applied to its optimizer."""


def ready_model(app: App, model: Any) -> None:
    """Apply the app's settings ``schedule``, ``clip`` and ``multipliers`` to the optimizer of its model."""
    stabilised(model, *(getattr(app, name, None) for name in ("schedule", "clip", "multipliers")))


def stabilised(model: Any, schedule: Any, clip: Any, multipliers: Any = None) -> None:
    """Apply these settings to a model's optimizer. Calling this again with the same settings changes nothing.

    Args:
        model: A compiled model.
        schedule: The setting's value. None keeps the learning rate that the model was compiled with.
        clip: The setting's value. None keeps the clipping that the model was compiled with.
        multipliers: The setting's value. None keeps the multipliers that the model was compiled with.

    Raises:
        AppError: The model has no optimizer, or its optimizer already has its own schedule, clipping or multipliers.
        ConfigError: Other settings were applied to this model before, or a multiplier names a layer that the model
            lacks.
    """
    values = {"schedule": schedule, "clip": clip, "multipliers": multipliers}
    rules = {name: str(value) for name, value in values.items() if value is not None and value != "none"}
    applied = vars(model).get(MARK, {})
    if applied == rules:
        return
    if applied:
        before, now = (", ".join(f"{name}={settings.get(name)!r}" for name in values) for settings in (applied, rules))
        raise ConfigError(
            f"the model's optimizer has {before}, and now they are {now}",
            hint="make a new app, so that its model is compiled again",
        )
    if model.optimizer is None:
        name, rule = next(iter(rules.items()))
        raise AppError(f"{name}={rule!r} has no effect: the model is compiled without an optimizer")
    if "schedule" in rules:
        _follow(innermost(model.optimizer), rules["schedule"])
    if "clip" in rules:
        _clip(model, rules["clip"])
    if "multipliers" in rules:
        _multiply(model, rules["multipliers"])
    vars(model)[MARK] = rules
    model.train_function = None  # Keras may have built a training function for the previous optimizer


def _follow(optimizer: Any, rule: str | None) -> None:
    from ddlf.extras.stabilisers.schedules import RunSchedule

    rate: Any = getattr(optimizer, "_learning_rate", None)
    if not hasattr(rate, "assign") or hasattr(optimizer, "optimizers"):
        raise AppError(
            f"schedule={rule!r} sets the learning rate, but the model's optimizer already has its own schedule",
            hint="compile the model with a number as its learning rate, or leave schedule out",
        )
    optimizer.learning_rate = RunSchedule(float(str(rate.numpy())), str(SCHEDULE.read(str(rule))))


def _clip(model: Any, rule: str | None) -> None:
    from ddlf.extras.stabilisers.agc import AGC
    from ddlf.extras.stabilisers.rolling import RollingClip

    clipping = CLIP.read(str(rule))
    kinds = {"rolling": RollingClip, "agc": AGC}
    kind = kinds[str(clipping).partition(":")[0]]
    if any(isinstance(optimizer, kind) for optimizer in chain(model.optimizer)):
        raise AppError(
            f"clip={rule!r} is in the model's optimizer already: it is compiled with {kind.__name__}",
            hint="leave one of the two out",
        )
    options = {name: getattr(clipping, name) for name in type(clipping).__dataclass_fields__}
    _wrap_optimizer(model, lambda inner: kind(inner, **options))


def _multiply(model: Any, rule: str) -> None:
    from ddlf.extras.stabilisers.freezing import Unfreezing, frozen_to
    from ddlf.extras.stabilisers.multipliers import Multipliers

    kinds = (Multipliers, Unfreezing)
    if present := next((optimizer for optimizer in chain(model.optimizer) if isinstance(optimizer, kinds)), None):
        raise AppError(
            f"multipliers={rule!r}: the model's optimizer has some already, of {type(present).__name__}",
            hint="leave one of the two out; lrm= in a text is one of them",
        )
    multipliers = MULTIPLIERS.read(rule)

    def wrap(inner: Any) -> Any:
        if isinstance(multipliers, ByName):
            return Multipliers(inner, dict(multipliers.factors))
        if len(multipliers.shares) == 1:
            return frozen_to(unwrapped(model), multipliers.shares[0], inner)
        return Unfreezing.of(unwrapped(model), inner, multipliers.shares)

    _wrap_optimizer(model, wrap)
    for optimizer in chain(model.optimizer):
        if isinstance(optimizer, Multipliers):  # refuse an unknown layer name before training begins
            optimizer.begin(list(model.trainable_variables))


def _wrap_optimizer(model: Any, wrap: Callable[[Any], Any]) -> None:
    """Replace the optimizer of a model by a wrapper around it, which ``wrap`` creates. A loss scaling optimizer stays
    outermost, so that the wrapper gets gradients without the scale.
    """
    import keras

    if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        model.optimizer.inner_optimizer = wrap(model.optimizer.inner_optimizer)
    else:
        model.optimizer = wrap(model.optimizer)
