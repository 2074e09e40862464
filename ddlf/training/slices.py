"""A checkpoint that those write who hold the model, each worker its slice, so that nothing of the model's size passes the master. Runs on the master.

A worker that does not see the checkpoint's folder, or cannot write there, has its slice written by the master, which gets it in pieces. What there is
to go on from is the same files in any case, and nothing of it counts before the master has written its manifest, by one rename.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddlf.algorithms.ranges import PIECE, Slice, pieces
from ddlf.algorithms.weights import Weights
from ddlf.errors import CheckpointError
from ddlf.events import Warned
from ddlf.training.checkpoints.slices import OUTER, WEIGHTS, Arrays, Slices, parts_of, write
from ddlf.training.exchanges.sharded.copies import left_of
from ddlf.training.recovery import LOSS

if TYPE_CHECKING:
    from ddlf.training.exchanges.members import Member, Members
    from ddlf.training.run import Run
    from ddlf.training.slot.task import Reply

There = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
"""Has a worker write its slice at a place: what ``write_if_seen`` returns, with the worker's number as ``by``, and more."""
Here = Callable[[], Awaitable[tuple[dict[str, Any], dict[str, Any]]]]
"""Brings the arrays of a slice to the master, by ``part_name``, and that more."""


AT_ONCE = 8 * PIECE
"""Values that the master asks for at a time."""


class Writing:
    """One checkpoint whose slices are being written.

    Args:
        slices: What is there of it.

    Attributes:
        after: Slices of the weights, which come first.
        mean: Lengths of groups that are a mean of all slots, and in there as what the first has left.
    """

    def __init__(self, slices: Slices) -> None:
        self.slices = slices
        self.after = 0
        self.mean: dict[str, int] = {}

    async def slice(self, number: int, there: There, here: Here) -> dict[str, Any]:
        """Have one written, there or here.

        Args:
            number: Which, from 0.
            there: As said above.
            here: As said above.

        Returns:
            What has come beside.

        Raises:
            CheckpointError: It cannot be written.
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


def _warn(run: Run, slices: Slices, warned: set[int]) -> None:
    """Say once of each worker that its slices go through the master, and why."""
    new = {worker: why for worker, why in sorted(slices.through.items()) if worker not in warned}
    warned.update(new)
    found = [
        f"worker {worker} could not write its slice of a checkpoint, which the master has written: {why}"
        for worker, why in new.items()
        if why
    ]
    if unseen := [str(worker) for worker, why in new.items() if not why]:
        who = f"worker{'s' * (len(unseen) > 1)} {', '.join(unseen)} do{'es' * (len(unseen) == 1)} not see the folder of the checkpoints"
        found.append(
            f"{who}, {slices.root}, so what checkpoints have of it goes through the master; a network disk, at the same path everywhere, spares that"
        )
    for why in found:
        run.crew.emit(Warned(about="checkpoint", why=why))


async def sliced(run: Run, replies: Sequence[Reply], work: Callable[[Writing], Awaitable[None]]) -> Slices | None:
    """Have the slices of the checkpoint written that comes with the next commit.

    Args:
        run: The run.
        replies: What that is of.
        work: Has those of the weights written, and of what the algorithm keeps.

    Returns:
        None if they cannot be, so that the checkpoint is the master's, as it says then what is in the way.
    """
    keeper = run.keeper
    assert keeper is not None
    try:
        slices = await asyncio.to_thread(keeper.begin, run.version + 1, run.progress.training)
        writing = Writing(slices)
        await work(writing)
        slices.left = await run.exchange.states.written(writing, replies)
        slices.left[0] = (
            slices.left[0] | writing.mean
        )  # not in place: these lengths are also those of what the slot has left
    except CheckpointError:
        keeper.drop()
        return None
    except BaseException:
        keeper.drop()
        raise
    _warn(run, slices, keeper.warned)
    return slices


@dataclass(frozen=True, slots=True)
class OnWorkers:
    """Weights of the sharded exchange, and what the outer optimizer keeps of them, each slice on a worker.

    Args:
        there: Where.
        generation: Which.
        like: Arrays with their shapes and types.
        kept: Arrays that workers keep of each weight.
        coded: Whether the last of these is the weight as it is stepped.
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
        """Have them written, each slice by who has it.

        Args:
            names: Paths of the weights.
            writers: Of those that are there, who is to write which slice.
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


def reading(slices: Slices, group: str) -> Callable[[], list[Any]]:
    """Reads a group of arrays from where it was written."""

    def read() -> list[Any]:
        found: Arrays = slices.read()
        return list(found[group].values())

    return read


def reading_left(slices: Slices, number: int, group: str) -> Callable[[], list[Any]]:
    """Reads a group of what the first slot has left from the slice, from 0, where it was written."""

    def read() -> list[Any]:
        return left_of(0, {group: slices.left[0][group]}, slices.read_one(number))[group]

    return read
