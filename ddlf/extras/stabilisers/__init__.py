"""Schedules, optimizer wrappers and losses that keep training stable. Runs wherever a model is; loads Keras when used.

Each class has its own file. It is registered with ``keras.saving`` as ``ddlf>Name``, so that Keras can save and load a
model that uses it. Its state is in variables of the optimizer or the model. This state therefore travels with the slot,
is in checkpoints, and needs no callback.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ddlf.extras import Extra

if TYPE_CHECKING:
    from ddlf.extras.stabilisers.agc import AGC as AGC
    from ddlf.extras.stabilisers.freezing import Unfreezing as Unfreezing
    from ddlf.extras.stabilisers.freezing import frozen_to as frozen_to
    from ddlf.extras.stabilisers.from_data import class_weights as class_weights
    from ddlf.extras.stabilisers.from_data import focal as focal
    from ddlf.extras.stabilisers.from_data import huber as huber
    from ddlf.extras.stabilisers.masked import Masked as Masked
    from ddlf.extras.stabilisers.multipliers import Multipliers as Multipliers
    from ddlf.extras.stabilisers.rlion import Rlion as Rlion
    from ddlf.extras.stabilisers.rolling import RollingClip as RollingClip
    from ddlf.extras.stabilisers.schedules import RunSchedule as RunSchedule
    from ddlf.extras.stabilisers.uncertainty import Uncertain as Uncertain

_HOMES = {
    "AGC": "agc",
    "Masked": "masked",
    "Multipliers": "multipliers",
    "Rlion": "rlion",
    "RollingClip": "rolling",
    "RunSchedule": "schedules",
    "Uncertain": "uncertainty",
    "Unfreezing": "freezing",
    "class_weights": "from_data",
    "focal": "from_data",
    "frozen_to": "freezing",
    "huber": "from_data",
}

__all__ = sorted(_HOMES)

EXTRA = Extra(
    name="stabilisers",
    settings="schedule clip multipliers",
    ready_model="ddlf.extras.stabilisers.optimizer_settings:ready_model",
    provide="ddlf.extras.stabilisers:provide",
)


def provide(name: str) -> Any:
    """Return a public class or function of this package, or ``multiplied``, to another optional part that asks for it
    by name.
    """
    if name == "multiplied":
        from ddlf.extras.stabilisers.multipliers import multiplied

        return multiplied
    return __getattr__(name) if name in _HOMES else None


def __getattr__(name: str) -> Any:
    """Import the module of a public name when the name is first used, because it imports Keras."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ddlf.extras.stabilisers' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"ddlf.extras.stabilisers.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
