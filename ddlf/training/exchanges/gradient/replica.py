"""The worker of the gradient exchange: a round is the gradient of one batch. Runs in the executor."""

from __future__ import annotations

from typing import ClassVar

from ddlf.training.exchanges.gradient.settings import Gradient
from ddlf.training.slot.gradients import GradientModel
from ddlf.training.slot.keras_model import KerasModel
from ddlf.training.slot.parts import parts_named
from ddlf.training.slot.replica import Replica


class GradientReplica(Replica):
    """One worker's copy of an app and its model, for the gradient exchange."""

    PARTS = parts_named(Gradient.slot_parts)
    MODEL: ClassVar[type[KerasModel]] = GradientModel
    ONE_CARD: ClassVar[str] = "exchange='gradient'"
