"""The layout of a training's progress in a checkpoint, and its layout in older versions. Runs on the master."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ddlf.training.checkpoints.contents import Checkpoint
from ddlf.training.slot.task import HELD, OPTIMIZER, RESIDUAL, SlotState

KEPT, SLOTS = "state_", "slots_"
"""Prefixes of file names in a checkpoint: of the arrays that a strategy's loop keeps, and of slot states."""


def with_states(
    checkpoint: Checkpoint, states: Sequence[SlotState], left: Sequence[Mapping[str, int]] = ()
) -> Checkpoint:
    """Return a checkpoint with the slots' states added.

    Each part of the states has a file. The facts contain, for each slot, the number of tensors in each part.

    Args:
        checkpoint: The checkpoint without slot states.
        states: The state of each slot.
        left: For each slot, the lengths of the parts that are in slices.
    """
    arrays: dict[str, dict[str, Any]]
    arrays = {name: dict(group) for name, group in checkpoint.arrays.items() if not name.startswith(SLOTS)}
    for slot, groups in enumerate(states):
        for name, group in groups.items():
            arrays.setdefault(SLOTS + name, {}).update(
                {f"slot {slot:04d} {number}": array for number, array in numbered(group).items()}
            )
    lengths: list[dict[str, int]] = [{name: len(group) for name, group in groups.items()} for groups in states]
    for slot, more in enumerate(left):
        lengths[slot].update(more)
    return dataclasses.replace(checkpoint, arrays=arrays, facts={**checkpoint.facts, "states": lengths})


def numbered(group: Sequence[Any]) -> dict[str, Any]:
    return {f"{i:04d}": array for i, array in enumerate(group) if array is not None}


def upgrade_layout(arrays: Mapping[str, Any], facts: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return arrays and facts of a checkpoint in the old format 1 under their current names."""
    names = {"outer": KEPT + "outer", "optimizer": SLOTS + OPTIMIZER, "held": SLOTS + HELD, "lost": SLOTS + RESIDUAL}
    arrays = {names.get(name, name): group for name, group in arrays.items()}
    states: list[dict[str, int]] = [{OPTIMIZER: 0} if begun else {} for begun in facts["begun"]]
    for name in (OPTIMIZER, HELD, RESIDUAL):
        for key in arrays[SLOTS + name]:
            _, slot, i = key.split(" ")
            length = len(arrays["weights"]) if name == RESIDUAL else int(i) + 1
            states[int(slot)][name] = max(length, states[int(slot)].get(name, 0))
    facts = {**facts, "states": states}
    if "records" in facts:
        facts["records"] = [{**record, "recomputed": record["lost"]} for record in facts["records"]]
    return arrays, facts
