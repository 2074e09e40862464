"""Axes of a text, which count without the batch, as axes of tensors. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def behind_batch(axis: int) -> int:
    """An axis as tensors have it: what counts from the last one stays."""
    return axis + 1 if axis >= 0 else axis


def of_options(axes: Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """Some axes as tensors have them; all but the batch's if they are not written."""
    return tuple(range(1, rank)) if axes is None else tuple(behind_batch(each) for each in axes)
