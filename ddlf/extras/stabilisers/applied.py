"""The settings ``schedule``, ``clip`` and ``multipliers``, put into the optimizer that a model was compiled with. Runs on master and workers."""

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
"""Where a model has the settings that are in its optimizer."""


def ready_model(app: App, model: Any) -> None:
    """Have the optimizer of an app's model follow the app's settings; see ``stabilised``."""
    stabilised(model, *(getattr(app, name, None) for name in ("schedule", "clip", "multipliers")))


def stabilised(model: Any, schedule: Any, clip: Any, multipliers: Any = None) -> None:
    """Have a model's optimizer follow these settings. What is in it already is not put there again.

    Args:
        model: Compiled.
        schedule: Value of the setting; None for the rate that the model was compiled with.
        clip: Value of the setting; None for what the model was compiled with.
        multipliers: Likewise.

    Raises:
        AppError: The model has no optimizer, or one that says itself what a setting says.
        ConfigError: The settings were others when the model was made, or the model has no such layer.
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
            hint="make a new app, whose model is compiled anew",
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
    model.train_function = None  # one may have been made for the optimizer as it was


def _follow(optimizer: Any, rule: str | None) -> None:
    from ddlf.extras.stabilisers.schedules import RunSchedule

    rate: Any = getattr(optimizer, "_learning_rate", None)
    if not hasattr(rate, "assign") or hasattr(optimizer, "optimizers"):
        raise AppError(
            f"schedule={rule!r} says how the learning rate goes, and the model's optimizer follows a schedule of its own",
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
        if isinstance(one, Multipliers):  # a name that is no layer's is refused before anything begins
            one.begin(list(model.trainable_variables))


def _around(model: Any, made: Callable[[Any], Any]) -> None:
    """Put an optimizer around that of a model; inside of one that scales the loss, since it is to see gradients without the scale."""
    import keras

    if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        model.optimizer.inner_optimizer = made(model.optimizer.inner_optimizer)
    else:
        model.optimizer = made(model.optimizer)
