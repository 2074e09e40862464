"""Shapes of what takes, writes and cuts at indices. Pure."""

from __future__ import annotations

from typing import Any

from ddlf.extras.text.language.graph import Node
from ddlf.extras.text.language.known import Known, Misfit, axis_of, shown, unified
from ddlf.extras.text.language.values import Number


def gather(node: Node, options: dict[str, Any], ins: list[Known], out: Known) -> tuple[list[Known], Known]:
    """Slices along an axis at the indices of a layer, or at one number; ``gatherElements`` a value for each index."""
    before = ins[0]
    indices: Known = () if len(ins) == 1 else ins[1]
    if before is None or indices is None:
        return ins, out
    if node.operator == "gatherND":
        return ins, unified(out, _nd(before, indices)[0])
    axis = axis_of(options.get("axis", 0), len(before))
    at, whole = node.operands[0] if node.operands else None, before[axis]
    if isinstance(at, Number) and whole is not None and not -whole <= at.value < whole:
        raise Misfit(f"there is no {at.written} among {whole}, counted from 0")
    if node.operator == "gather":
        return ins, unified(out, (*before[:axis], *indices, *before[axis + 1 :]))
    return [before, unified(indices, _along(before, axis))], unified(out, indices)


def scatter(node: Node, options: dict[str, Any], ins: list[Known], out: Known) -> tuple[list[Known], Known]:
    """What comes in, with values written to it at indices: two layers that ``to`` names."""
    before, indices, updates = ins
    before = out = unified(before, out)
    if before is not None and node.operator == "scatterElements":
        axis = axis_of(options.get("axis", 0), len(before))
        indices = updates = unified(unified(indices, updates), _along(before, axis))
    elif before is not None and indices is not None:
        updates = unified(updates, _nd(before, indices)[0])
    return [before, indices, updates], out


def split(node: Node, options: dict[str, Any], ins: list[Known], out: Known) -> tuple[list[Known], Known]:
    """One of the parts of what comes in."""
    splits, index = options.get("splits"), options.get("index", 0)
    if splits is None:
        raise Misfit("split needs splits=, how many parts or their sizes")
    if not 0 <= index < (splits if isinstance(splits, int) else len(splits)):
        raise Misfit(f"there is no part {index}, counted from 0, with splits={splits}")
    if ins[0] is None:
        return ins, out
    axis = axis_of(options.get("axis", 0), len(ins[0]))
    whole = ins[0][axis]
    if isinstance(splits, int):
        if whole is not None and whole % splits:
            raise Misfit(f"{whole} cannot be split into {splits} equal parts; write their sizes")
        part = None if whole is None else whole // splits
    else:
        if whole is not None and sum(splits) != whole:
            raise Misfit(f"the sizes {splits} are {sum(splits)} together, and {shown(ins[0])} has {whole}")
        part = splits[index]
    return ins, unified(out, (*ins[0][:axis], part, *ins[0][axis + 1 :]))


def _along(before: tuple[int | None, ...], axis: int) -> tuple[int | None, ...]:
    """The shape of indices of single values: as many axes, of one of them any size."""
    return tuple(None if each == axis else size for each, size in enumerate(before))


def _nd(before: tuple[int | None, ...], indices: tuple[int | None, ...]) -> tuple[Known, int]:
    """The shape of what lies at indices, each of which is a row of numbers of the first axes."""
    if not indices or indices[-1] is None:
        raise Misfit(f"indices have a last axis with a number for each axis that they go into, got {shown(indices)}")
    if indices[-1] > len(before):
        raise Misfit(f"indices of {indices[-1]} numbers go into {len(before)} axes of {shown(before)}")
    return (*indices[:-1], *before[indices[-1] :]), indices[-1]
