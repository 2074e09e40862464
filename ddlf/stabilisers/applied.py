"""The settings ``schedule`` and ``clip``, put into the optimizer that a model was compiled with. Runs on master and workers."""

from __future__ import annotations

from typing import Any

from ddlf.algorithms.clips import CLIP
from ddlf.algorithms.rates import SCHEDULE
from ddlf.errors import AppError, ConfigError
from ddlf.stabilisers.chain import chain, innermost

MARK = "_ddlf_stabilised"
"""Where a model has the settings that are in its optimizer."""


def stabilised(model: Any, schedule: Any, clip: Any) -> None:
    """Have a model's optimizer follow these settings. What is in it already is not put there again.

    Args:
        model: Compiled.
        schedule: Value of the setting; None for the rate that the model was compiled with.
        clip: Value of the setting; None for what the model was compiled with.

    Raises:
        AppError: The model has no optimizer, or one that says itself what a setting says.
        ConfigError: The settings were others when the model was made.
    """
    wanted = tuple(None if one is None else str(one) for one in (schedule, clip))
    there = vars(model).get(MARK, (None, None))
    if there == wanted:
        return
    if there != (None, None):
        raise ConfigError(
            f"the model's optimizer has schedule={there[0]!r} and clip={there[1]!r}, and now they are {wanted[0]!r} and {wanted[1]!r}",
            hint="make a new app, whose model is compiled anew",
        )
    if model.optimizer is None:
        name = "schedule" if schedule is not None else "clip"
        raise AppError(f"{name}={wanted[name == 'clip']!r} has no effect: the model is compiled without an optimizer")
    if schedule is not None:
        _follow(innermost(model.optimizer), wanted[0])
    if clip is not None:
        _clip(model, wanted[1])
    vars(model)[MARK] = wanted
    model.train_function = None  # one may have been made for the optimizer as it was


def _follow(optimizer: Any, rule: str | None) -> None:
    from ddlf.stabilisers.schedules import RunSchedule

    rate: Any = getattr(optimizer, "_learning_rate", None)
    if not hasattr(rate, "assign") or hasattr(optimizer, "optimizers"):
        raise AppError(
            f"schedule={rule!r} says how the learning rate goes, and the model's optimizer follows a schedule of its own",
            hint="compile the model with a number as its learning rate, or leave schedule out",
        )
    optimizer.learning_rate = RunSchedule(float(str(rate.numpy())), str(SCHEDULE.read(str(rule))))


def _clip(model: Any, rule: str | None) -> None:
    from ddlf.stabilisers.agc import AGC
    from ddlf.stabilisers.rolling import RollingClip

    found = CLIP.read(str(rule))
    kinds = {"rolling": RollingClip, "agc": AGC}
    kind = kinds[str(found).partition(":")[0]]
    if any(isinstance(one, kind) for one in chain(model.optimizer)):
        raise AppError(
            f"clip={rule!r} is in the model's optimizer already: it is compiled with {kind.__name__}",
            hint="leave one of the two out",
        )
    options = {name: getattr(found, name) for name in type(found).__dataclass_fields__}
    import keras

    if isinstance(
        model.optimizer, keras.optimizers.LossScaleOptimizer
    ):  # what is inside sees gradients without the scale
        model.optimizer.inner_optimizer = kind(model.optimizer.inner_optimizer, **options)
    else:
        model.optimizer = kind(model.optimizer, **options)
