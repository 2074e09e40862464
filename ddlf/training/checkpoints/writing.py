"""Writes a checkpoint in slices: each worker writes the part of the model that it holds. Runs on the master.

So the master never receives the whole model. If a worker cannot see or write the checkpoint's folder, the master gets
its slice in pieces and writes it. The resulting files are the same in both cases. They count only after the master has
written the manifest, with one rename.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddlf.algorithms.ranges import PIECE, Slice, pieces
from ddlf.algorithms.weights import Weights
from ddlf.training.checkpoints.slices import OUTER, WEIGHTS, Slices, parts_of, write
from ddlf.training.checkpoints.stored import left_of
from ddlf.training.crew.recovery import LOSS

if TYPE_CHECKING:
    from ddlf.training.exchanges.members import Member, Members

There = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
"""Has a worker write its slice at a place. Returns the answer of ``write_if_seen``, ``by`` (the worker), and more."""
Here = Callable[[], Awaitable[tuple[dict[str, Any], dict[str, Any]]]]
"""Brings the arrays of a slice to the master, by ``part_name``, and the same additional facts."""


AT_ONCE = 8 * PIECE
"""Number of values that the master requests at a time."""


class Writing:
    """One checkpoint whose slices are being written.

    Args:
        slices: The slices of the checkpoint so far.

    Attributes:
        after: The number of slices with weights, which come first.
        mean: Lengths of the parts that are a mean of all slots, stored as the state of the first slot.
    """

    def __init__(self, slices: Slices) -> None:
        self.slices = slices
        self.after = 0
        self.mean: dict[str, int] = {}

    async def slice(self, number: int, there: There, here: Here) -> dict[str, Any]:
        """Write one slice, on a worker or on the master.

        Args:
            number: The slice, from 0.
            there: Has a worker write the slice.
            here: Brings the slice's arrays to the master.

        Returns:
            The additional facts.

        Raises:
            CheckpointError: The slice cannot be written.
        """
        place = self.slices.place()
        told = await there(place)
        by = told.get("by", 0)
        if "sha256" not in told:
            if told.get("why"):
                self.slices.through[by] = told["why"] if told.get("seen") else ""
            arrays, more = await here()
            if not arrays:
                return more
            place, by = self.slices.place(), 0
            told = {**more, **await asyncio.to_thread(write, place, arrays)}
        await asyncio.to_thread(self.slices.add, number, place, told, by)
        return told


@dataclass(frozen=True, slots=True)
class OnWorkers:
    """Weights of the sharded exchange and the outer optimizer's state for them, in slices on the workers.

    Args:
        there: Locates the slices.
        generation: Number of this set of weights.
        like: Arrays with the shapes and types of the weights.
        kept: Number of state arrays that workers keep for each weight.
        coded: Whether the last of these arrays is the exact weight, before encoding.
    """

    there: Members
    generation: int
    like: Weights
    kept: int
    coded: bool

    async def write(
        self,
        names: Sequence[str],
        writers: Callable[[Collection[Member]], list[tuple[Slice, Member]]],
        writing: Writing,
    ) -> None:
        """Have workers write the slices that they hold. If a worker is lost meanwhile, start again with the others.

        Args:
            names: Paths of the weights.
            writers: Assigns the slices to the reachable workers.
            writing: The checkpoint.
        """
        slices, n = writing.slices, len(self.like)
        listed = [(w.dtype.name, list(w.shape)) for w in self.like]
        slices.sliced[WEIGHTS] = [(f"{i:04d} {names[i]}", *one) for i, one in enumerate(listed)]
        if self.kept > self.coded:
            slices.sliced[OUTER] = [(f"{i:04d}", *listed[i % n]) for i in range((self.kept - self.coded) * n)]
        alive = self.there.members()

        async def write(number: int, part: Slice, member: Member) -> None:
            worker = alive[member]

            async def ask(verb: str, part: Slice, *more: Any) -> Any:
                return await worker.call(self.there.holder, verb, self.generation, *part, *more)

            async def there(at: dict[str, Any]) -> dict[str, Any]:
                return dict(await ask("write", part, names, at))

            async def here() -> tuple[dict[str, Any], dict[str, Any]]:
                arrays: dict[str, Any] = {}
                for piece in pieces(part, AT_ONCE):
                    kept = list(await ask("kept", piece)) if self.kept else []
                    values = kept.pop() if self.coded else await ask("values", piece)
                    arrays |= parts_of(self.like, piece, names, values, kept)
                return arrays, {}

            try:
                await writing.slice(number, there, here)
            except LOSS:
                alive.pop(member, None)
                raise

        while True:
            parts = writers(alive)
            found = await asyncio.gather(*(write(i, *one) for i, one in enumerate(parts)), return_exceptions=True)
            errors = [one for one in found if isinstance(one, BaseException)]
            if not errors:
                writing.after = len(parts)
                return
            if others := [one for one in errors if not isinstance(one, LOSS)]:
                raise others[0]
            slices.clear()


def reading_left(slices: Slices, number: int, group: str) -> Callable[[], list[Any]]:
    """Return a function that reads a part of the first slot's state from its slice, numbered from 0."""

    def read() -> list[Any]:
        return left_of(0, {group: slices.left[0][group]}, slices.read_one(number))[group]

    return read
