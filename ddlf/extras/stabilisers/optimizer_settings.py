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
    given = {"schedule": schedule, "clip": clip, "multipliers": multipliers}
    wanted = {name: str(one) for name, one in given.items() if one is not None and one != "none"}
    there = vars(model).get(MARK, {})
    if there == wanted:
        return
    if there:
        before, now = (", ".join(f"{name}={one.get(name)!r}" for name in given) for one in (there, wanted))
        raise ConfigError(
            f"the model's optimizer has {before}, and now they are {now}",
            hint="make a new app, so that its model is compiled again",
        )
    if model.optimizer is None:
        name, rule = next(iter(wanted.items()))
        raise AppError(f"{name}={rule!r} has no effect: the model is compiled without an optimizer")
    if "schedule" in wanted:
        _follow(innermost(model.optimizer), wanted["schedule"])
    if "clip" in wanted:
        _clip(model, wanted["clip"])
    if "multipliers" in wanted:
        _multiply(model, wanted["multipliers"])
    vars(model)[MARK] = wanted
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

    found = CLIP.read(str(rule))
    kinds = {"rolling": RollingClip, "agc": AGC}
    kind = kinds[str(found).partition(":")[0]]
    if any(isinstance(one, kind) for one in chain(model.optimizer)):
        raise AppError(
            f"clip={rule!r} is in the model's optimizer already: it is compiled with {kind.__name__}",
            hint="leave one of the two out",
        )
    options = {name: getattr(found, name) for name in type(found).__dataclass_fields__}
    _around(model, lambda inner: kind(inner, **options))


def _multiply(model: Any, rule: str) -> None:
    from ddlf.extras.stabilisers.freezing import Unfreezing, frozen_to
    from ddlf.extras.stabilisers.multipliers import Multipliers

    kinds = (Multipliers, Unfreezing)
    if found := next((one for one in chain(model.optimizer) if isinstance(one, kinds)), None):
        raise AppError(
            f"multipliers={rule!r}: the model's optimizer has some already, of {type(found).__name__}",
            hint="leave one of the two out; lrm= in a text is one of them",
        )
    asked = MULTIPLIERS.read(rule)

    def made(inner: Any) -> Any:
        if isinstance(asked, ByName):
            return Multipliers(inner, dict(asked.factors))
        if len(asked.shares) == 1:
            return frozen_to(unwrapped(model), asked.shares[0], inner)
        return Unfreezing.of(unwrapped(model), inner, asked.shares)

    _around(model, made)
    for one in chain(model.optimizer):
        if isinstance(one, Multipliers):  # refuse an unknown layer name before training begins
            one.begin(list(model.trainable_variables))


def _around(model: Any, made: Callable[[Any], Any]) -> None:
    """Replace the optimizer of a model by a wrapper around it, which ``made`` creates. A loss scaling optimizer stays
    outermost, so that the wrapper gets gradients without the scale.
    """
    import keras

    if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        model.optimizer.inner_optimizer = made(model.optimizer.inner_optimizer)
    else:
        model.optimizer = made(model.optimizer)
