"""The parts of a slot's state, one in each file. To add one, write its file and add a line to ``PARTS``."""

from __future__ import annotations

from dataclasses import replace

from ddlf.training.slot.part import Kept, SlotPart, SlotPlan
from ddlf.training.slot.parts.batchnorm import LocalBatchNorm
from ddlf.training.slot.parts.callbacks import WorkerCallbacks
from ddlf.training.slot.parts.control import Controls
from ddlf.training.slot.parts.fragments import OwnFragments
from ddlf.training.slot.parts.optimizer import OptimizerState
from ddlf.training.slot.parts.transfer import ReceivedWeights, Residual

PARTS: tuple[type[SlotPart], ...] = (
    OptimizerState,
    WorkerCallbacks,
    Residual,
    ReceivedWeights,
    OwnFragments,
    LocalBatchNorm,
    Controls,
)
"""The parts, in the order in which they begin a round.

They end it in reverse order, so ``Residual``, which encodes the update, receives it in its final form.
"""


def kept_parts(plan: SlotPlan) -> dict[str, Kept]:
    """Return how the slots of a run keep their parts, by name of the part."""
    found = ((part, part.kept(plan)) for part in PARTS)
    return {part.name: replace(kept, part=part) for part, kept in found if kept is not None}


def part_of(name: str) -> type[SlotPart]:
    """Return the class of a part."""
    return next(part for part in PARTS if part.name == name)
