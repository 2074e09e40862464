"""Slices of a checkpoint, on the workers that resume a run from it. Runs in the executor."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ddlf.algorithms.flat_weights import Rows
from ddlf.algorithms.ranges import Slice, overlapped
from ddlf.algorithms.weights import Tensor
from ddlf.training.checkpoints.durable import damaged
from ddlf.training.checkpoints.restored import found_at
from ddlf.training.checkpoints.slices import OUTER, PUSHED, WEIGHTS, assembled, part_name, slice_name
from ddlf.training.exchanges.sharded.plan import Generation
from ddlf.worker.methods import concurrent


class Restored:
    """The checkpoint slices that one worker has received. Roles that hold weights extend this class and use the slices.

    Attributes:
        restored: Arrays by slice number and ``part_name``, until ``taken`` returns them.
    """

    def __init__(self) -> None:
        self.restored: dict[int, dict[str, Tensor]] = {}

    @concurrent
    async def look_at(self, place: dict[str, Any]) -> dict[str, Any]:
        """Check a slice in this worker's file system against its hash. Return ``found_at``'s answer."""
        return (await asyncio.to_thread(found_at, place, load=False))[0]

    @concurrent
    async def read_slice(self, number: int, place: dict[str, Any]) -> dict[str, Any]:
        """Read a slice from this worker's file system, if it is visible here. Return ``found_at``'s answer."""
        answer, arrays = await asyncio.to_thread(found_at, place, load=True)
        if arrays:
            self.restored[number] = arrays
        return answer

    @concurrent
    async def take_slice(self, number: int, arrays: dict[str, Tensor]) -> None:
        """Receive a slice from the master, which has read it because this worker cannot."""
        self.restored[number] = arrays

    def taken(self) -> dict[int, dict[str, Tensor]]:
        """Return all received slices, and forget them."""
        found, self.restored = self.restored, {}
        return found


def generation_of(
    parts: Mapping[int, Mapping[str, Tensor]], listed: Mapping[str, Any], codec: str, trainable: Sequence[bool]
) -> Generation:
    """Return the weights and the outer optimizer's state of a checkpoint.

    Args:
        parts: Slices of the checkpoint, from ``Restored``.
        listed: The checkpoint's list of slices, as ``Slices.sliced``.
        codec, trainable: Arguments of ``Generation.whole``.
    """
    contents = ((Path(slice_name(number)), arrays) for number, arrays in sorted(parts.items()))
    groups = assembled(contents, listed, {}, Path("the checkpoint"))
    weights, state = (list(groups.get(name, {}).values()) for name in (WEIGHTS, OUTER))
    return Generation.whole(weights, state, codec, trainable)


def shard_of_parts(
    rows: Rows, part: tuple[Slice, Slice], names: Sequence[str], arrays: Mapping[str, Tensor], kept: int
) -> dict[str, Any]:
    """Return the values of a Downpour server and the state of its push rule, from a slice that ``shard_parts`` made.

    Args:
        rows: Layout of the model's weights.
        part: The server's ranges of both rows.
        names: Paths of the weights.
        arrays: Arrays of the server's slice of the checkpoint.
        kept: Number of rows that the push rule keeps.

    Returns:
        ``weights``, ``rest`` and ``state``, as in ``Server.snapshot``.

    Raises:
        CheckpointCorrupt: A part is missing, or has the wrong size.
    """

    def of(name: str, length: int) -> Tensor:
        found = arrays.get(name)
        if found is None or found.shape != (length,):
            got = "nothing" if found is None else f"{found.dtype} {found.shape}"
            raise damaged(Path("a slice of the checkpoint"), f"{length:,} values of {name!r}", got)
        return np.asarray(found, np.float32)

    found: dict[str, Any] = {}
    for name, places, one in zip(("weights", "rest"), (rows.trained, rows.rest), part, strict=True):
        like = [rows.like[i] for i in places]
        values = [
            of(part_name(WEIGHTS, low, f"{places[at]:04d} {names[places[at]]}"), high - low)
            for at, low, high in overlapped(like, one)
        ]
        found[name] = np.concatenate(values) if values else np.zeros(0, np.float32)
    (begin, end), _ = part
    found["state"] = [of(part_name(PUSHED, begin, f"{number:04d}"), end - begin) for number in range(kept)]
    return found
