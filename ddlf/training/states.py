"""The states that slots left for their next rounds, and where they are. Runs on the master; ``slot/task.py`` has the data.

Some groups come back with each reply. Others, such as the residuals of biased codecs, are as large as the weights, so
they stay on their worker. The master fetches them when the slot moves to another worker, for a checkpoint, and at the
end of a run. If the worker is lost first, they are lost too: an event says so, and the run no longer has the bits of an
undisturbed one. In the sharded exchange another worker can have a copy, which the next worker of the slot then gets.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddlf.algorithms.weights import Weights, digest
from ddlf.cluster.proxy import ProxyWorker
from ddlf.errors import CheckpointError, DDLFError
from ddlf.events import ResidualDropped
from ddlf.training.checkpoints.slices import Slices
from ddlf.training.context import App
from ddlf.training.crew import Crew
from ddlf.training.exchanges.sharded.copies import left_of, left_parts
from ddlf.training.recovery import LOSS
from ddlf.training.restoring import Restoring
from ddlf.training.roles import EXCHANGE, REPLICA
from ddlf.training.slices import Writing
from ddlf.training.slot.part import Kept, Left, SlotPlan
from ddlf.training.slot.parts import PARTS, kept_parts
from ddlf.training.slot.task import CONTROL, HELD, OPTIMIZER, Reply, SlotState

if TYPE_CHECKING:
    from ddlf.training.exchange import Outwards
    from ddlf.training.progress import Progress
    from ddlf.training.spec import RunSpec

AT_HOME = tuple(part.name for part in PARTS if not part.travels)
"""Parts that the master has by itself."""
FETCH_S = 30.0
"""Time limit for a worker to send a slot's state. It sends beside its training, so only the network takes that long."""


class SlotStates:
    """The state of each slot.

    Args:
        run: Name of the training run.
        crew: Workers.
        known: State of each slot to begin with, from a checkpoint or the run before. Its entries are replaced as the
            master learns more.
        parts: How slots keep their parts, by name.
        codec: Name of the codec of updates, for the event that something was lost.
        on_workers: Whether the weights are on the workers. Then so are the means that rounds begin with, and the parts
            behind these means.
        restoring: Has what slots have left that is in slices of a checkpoint.

    Attributes:
        keep: Parts that stay on a slot's worker.
        back: Parts that come back with each reply.
        shared: Parts that every slot begins its next round with, instead of its own.
        copied: Parts that do not come back, but that other workers keep copies of.
        averages: Whether each round begins with the mean of the slots' optimizers.
        controls: Whether slots have controls.
        mean: Brings the mean of slots' optimizers here, where it is on workers; see ``mean_is``.
    """

    def __init__(
        self,
        run: str,
        crew: Crew,
        known: list[SlotState],
        parts: Mapping[str, Kept],
        codec: str = "float32",
        *,
        on_workers: bool = False,
        restoring: Restoring | None = None,
    ) -> None:
        self._role, self._exchange = (run, REPLICA), (run, EXCHANGE)
        self._crew = crew
        self._parts, self._codec, self._on_workers = parts, codec, on_workers
        self._known = known
        self._on: dict[int, tuple[int, int, int]] = {}  # slot -> worker, its number of openings, round that left it
        self._coming: dict[int, asyncio.Future[SlotState]] = {}
        self.keep = tuple(parts)
        self.back = tuple(name for name, part in parts.items() if part.back)
        self._averaged = tuple(name for name, part in parts.items() if part.shared)
        self.averages, self.controls = OPTIMIZER in self._averaged, CONTROL in parts
        self.shared: SlotState = {}
        self.mean: Callable[[], Weights] | None = None  # that of slots' optimizers, where it is not shared from here
        for name in self._averaged:
            if begun := [state[name] for state in known if name in state]:
                # After a training that was stopped each is the mean already, and the mean of equal numbers may be rounded.
                begun = begun[:1] if len(set(map(digest, begun))) == 1 else begun
                self._share(name, begun, [1] * len(begun))
        if on_workers and self.shared:
            mean, self.shared = self.shared[OPTIMIZER], {}
            self.mean_is(lambda: mean)
        # The parts behind a mean that is on the workers are not needed any more.
        self._fetched = tuple(
            name
            for name, part in parts.items()
            if not part.back and name not in AT_HOME and not (on_workers and part.shared)
        )
        self.copied = self._fetched if on_workers and any(part.copied for part in parts.values()) else ()
        self._copies: dict[int, tuple[int, int, int]] = {}  # as _on, of the last copy
        self._stored: dict[
            int, tuple[int, dict[str, int], Slices, int]
        ] = {}  # slot -> round, lengths, slice of a checkpoint

        self._restoring = restoring
        self._unread = {} if restoring is None else restoring.left  # slot -> lengths, slice of a checkpoint

    async def restored(self, slot: int, number: int, worker: ProxyWorker) -> bool:
        """Have a worker read what a slot has left, if that is still in a slice of the checkpoint that the run goes on
        from.

        Args:
            slot: Which.
            number: Of the round that left it, from 0.
            worker: The one that carries the next.

        Returns:
            Whether it has all of it now.
        """
        if slot not in self._unread or self._restoring is None or (slices := self._restoring.slices) is None:
            return False
        lengths, place = self._unread[slot]
        member = self._crew.member(worker.id)
        await self._restoring.give(worker, slices, [place])
        known = {name: group for name, group in self._known[slot].items() if name not in AT_HOME}
        await worker.call(self._exchange, "left_restored", slot, number, known, lengths, place)
        self._on[slot] = worker.id, member[1] if member else -1, number
        self._stored[slot] = number, lengths, slices, place
        self._coming.pop(slot, None)
        self._unread.pop(slot, None)
        return True

    def left(self, reply: Reply) -> None:
        """Say that a slot's update counts, and with it what the slot has left."""
        slot = reply.slot
        self._coming.pop(slot, None)
        self._on.pop(slot, None)
        self._known[slot] = {name: group for name, group in self._known[slot].items() if name in AT_HOME} | reply.state
        if self._fetched:
            self._on[slot] = self._left_by(reply)

    def _left_by(self, reply: Reply) -> tuple[int, int, int]:
        member = self._crew.member(reply.worker)
        # A worker that is lost already can be asked in vain: then the loss is told when it matters.
        return reply.worker, member[1] if member else -1, reply.task.round

    def copy(self, slot: int, number: int, worker: int) -> None:
        """Say that a worker has a copy of what a round of a slot, from 0, has left and not sent back."""
        member = self._crew.member(worker)
        self._copies[slot] = worker, member[1] if member else -1, number

    def at(self, slot: int, holds: bool) -> tuple[int, ...]:
        """Workers that have what a slot's round before left and did not send back.

        Args:
            slot: Which.
            holds: Whether the worker that is to carry it has it.

        Returns:
            Those that are there; none where the task need say none.
        """
        return (
            () if holds or not self.copied else tuple(worker.id for worker in self._holders(slot, self._on.get(slot)))
        )

    def round_over(self, replies: Sequence[Reply]) -> None:
        """Say that the replies of a round have all been taken in: what slots share follows from them."""
        for name in () if self._on_workers else self._averaged:
            self._share(name, [reply.state[name] for reply in replies], [reply.samples for reply in replies])

    def _share(self, name: str, left: Sequence[Left], samples: Sequence[int]) -> None:
        """Let all slots begin with the mean of these parts, those that join later, too."""
        if (mean := self._parts[name].mean) is not None:
            self.shared = {**self.shared, name: mean(left, samples)}
        for slot, state in enumerate(self._known):
            self._known[slot] = state | self.shared

    def mean_is(self, mean: Callable[[], Weights] | None) -> None:
        """Say how the mean of slots' optimizers, which is on the workers, can be had here; None where it cannot."""
        if not (self.averages and self._on_workers):
            return
        self.mean = mean
        for slot, state in enumerate(self._known):
            self._known[slot] = {name: group for name, group in state.items() if name != OPTIMIZER}

    def come_home(self) -> None:
        """Have the mean of slots' optimizers here, as what each has left, if there is one."""
        if self.mean is not None:
            mean = self.mean()
            for slot, state in enumerate(self._known):
                self._known[slot] = state | {OPTIMIZER: mean}

    async def means(self) -> SlotState:
        """The means that the next round begins with, where they are to be given to workers from here."""
        means = {name: part for name, part in self._parts.items() if part.mean is not None}
        states = await self.all() if means else []
        found = SlotState()
        for name, part in means.items():
            left = [state.get(name) for state in states]
            known = [one for one in left if one is not None]
            if known and part.mean is not None:
                found[name] = known[0] if part.shared else part.mean(left, [1] * len(left))  # shared: each is the mean
        return found

    def where(self, slot: int, group: str) -> tuple[int, int] | list[Any] | None:
        """Where a group of what a slot has left is: a worker, and the round; or the group, if it is here; None if it is
        nowhere."""
        if (left := self._on.get(slot)) is None:
            return self._known[slot].get(group)
        holders = self._holders(slot, left)
        return (holders[0].id, left[2]) if holders else None

    def holds(self, slot: int, weights: Weights) -> None:
        """Say which weights a slot holds, which travel as differences."""
        self._known[slot] = {**self._known[slot], HELD: weights}

    async def of(self, slot: int, holds: bool) -> SlotState | None:
        """What to send along with a slot's next round.

        Args:
            slot: Which.
            holds: Whether the worker that is to carry it still holds what the slot's round before left.

        Returns:
            None where nothing need be sent.
        """
        if holds and self.keep:
            return None
        coming = None if self.at(slot, holds) else self._coming_of(slot)
        whole = self._known[slot] | (await asyncio.shield(coming) if coming else {})
        return {name: group for name, group in whole.items() if name not in AT_HOME}

    def set_back(self, states: list[SlotState]) -> None:
        """Say that slots have left this, and nothing since; the list is gone on with."""
        self._known = states
        self._coming, self._on, self._copies = {}, {}, {}

    def all(self) -> asyncio.Future[list[SlotState]]:
        """The state of every slot, as it is now and not when it is awaited."""
        mean = {} if self.mean is None else {OPTIMIZER: self.mean()}
        return asyncio.ensure_future(
            _collected([(known | mean, self._coming_of(slot)) for slot, known in enumerate(self._known)])
        )

    async def written(self, writing: Writing, replies: Sequence[Reply]) -> list[dict[str, int]]:
        """Have workers write into a checkpoint what slots have left there.

        Args:
            writing: The checkpoint.
            replies: Of the rounds that are about to count.

        Returns:
            Of each slot the lengths of the groups that they have written.
        """
        lengths: list[dict[str, int]] = [{} for _ in self._known]
        left = {**self._on, **{reply.slot: self._left_by(reply) for reply in replies}} if self._fetched else {}

        async def one(slot: int) -> None:
            async def there(place: dict[str, Any]) -> dict[str, Any]:
                for holder in self._holders(slot, left[slot]):
                    with contextlib.suppress(*LOSS):
                        told = slot, left[slot][2], self._fetched, place
                        found: dict[str, Any] = await holder.call(self._exchange, "write_left", *told)
                        return found
                return {"why": ""}  # what is told of that is told by who fetches it

            async def here() -> tuple[dict[str, Any], dict[str, Any]]:
                return left_parts(slot, await self._fetch(slot, *left[slot]))

            lengths[slot] = (await writing.slice(writing.after + slot, there, here))["lengths"]
            self._stored[slot] = left[slot][2], lengths[slot], writing.slices, writing.after + slot

        async def unread(slot: int) -> None:
            async def there(place: dict[str, Any]) -> dict[str, Any]:
                return {}

            async def here() -> tuple[dict[str, Any], dict[str, Any]]:
                return left_parts(slot, await self._read(slot))

            lengths[slot] = (await writing.slice(writing.after + slot, there, here))["lengths"]

        await asyncio.gather(*map(one, left), *map(unread, self._unread.keys() - left.keys()))
        return lengths

    async def close(self) -> None:
        """End what is still under way."""
        coming = list(self._coming.values())
        for future in coming:
            future.cancel()
        await asyncio.gather(*coming, return_exceptions=True)

    def _coming_of(self, slot: int) -> asyncio.Future[SlotState] | None:
        """Return the groups that are only on the slot's worker, if any. The worker is asked at once, and once."""
        if slot not in self._coming and slot in self._on:
            self._coming[slot] = asyncio.ensure_future(self._fetch(slot, *self._on[slot]))
        elif slot not in self._coming and slot in self._unread:
            self._coming[slot] = asyncio.ensure_future(self._read(slot))
        return self._coming.get(slot)

    def _holders(self, slot: int, left: tuple[int, int, int] | None) -> list[ProxyWorker]:
        """Workers that have what a slot's last round left: its own, and one with a copy, if they are there."""
        on = [
            one for one in (left, self._copies.get(slot)) if one is not None and left is not None and one[2] == left[2]
        ]
        found = [(self._crew.member(worker), openings) for worker, openings, _ in on]
        return list(
            dict.fromkeys(member[0] for member, openings in found if member is not None and member[1] == openings)
        )

    async def _read(self, slot: int) -> SlotState:
        """What a slot has left that no worker has read yet."""
        assert self._restoring is not None
        assert self._restoring.slices is not None
        lengths, place = self._unread[slot]
        return left_of(slot, lengths, await asyncio.to_thread(self._restoring.slices.read_one, place))

    async def _fetch(self, slot: int, worker: int, openings: int, number: int) -> SlotState:
        why = "it was lost"
        for holder in self._holders(slot, (worker, openings, number)):
            try:
                give = (slot, number, self._fetched)
                state: SlotState = await holder.call(self._role, "give", *give, timeout_s=FETCH_S)
                return state
            except DDLFError as error:
                why = str(error).partition("\n")[0]
        if slot in self._stored and self._stored[slot][0] == number:  # a checkpoint has it
            with contextlib.suppress(CheckpointError):
                _, lengths, slices, place = self._stored[slot]
                return left_of(slot, lengths, await asyncio.to_thread(slices.read_one, place))
        self._crew.emit(
            ResidualDropped(
                round=number + 1, slot=slot + 1, worker=worker, codec=self._codec, why=why, groups=self._fetched
            )
        )
        return {}


async def _collected(parts: list[tuple[SlotState, asyncio.Future[SlotState] | None]]) -> list[SlotState]:
    # Shielded: others may wait for the same.
    return [{**known, **(await asyncio.shield(coming) if coming else {})} for known, coming in parts]


def states_of(app: App, crew: Crew, progress: Progress, spec: RunSpec, how: Outwards) -> SlotStates:
    """Return the states of the slots of a run.

    Args:
        app: The user's ``IApp``.
        crew: Workers.
        progress: Progress that the run continues from.
        spec: The run.
        how: How weights travel.
    """
    plan = SlotPlan(
        spec=spec,
        optimizer=app.run_context.optimizer,
        differences=how.differences,
        callbacks=bool(app.worker_callbacks),
    )
    codec = spec.exchange.codec.name
    return SlotStates(
        app.run_context.name,
        crew,
        progress.states,
        kept_parts(plan),
        codec,
        on_workers=plan.sharded,
        restoring=how.restoring,
    )
