"""The slot states between rounds, and where they are. Runs on the master; ``slot/task.py`` defines the data.

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
from ddlf.training.checkpoints.restoring import Restoring
from ddlf.training.checkpoints.slices import Slices
from ddlf.training.checkpoints.stored import left_of, left_parts
from ddlf.training.checkpoints.writing import Writing
from ddlf.training.context import App
from ddlf.training.crew.crew import Crew
from ddlf.training.crew.recovery import LOSS
from ddlf.training.roles import EXCHANGE, REPLICA
from ddlf.training.slot.parts import PARTS, Kept, Left, SlotPlan, kept_parts
from ddlf.training.slot.task import HELD, Reply, SlotState

if TYPE_CHECKING:
    from ddlf.training.progress import Progress
    from ddlf.training.spec import RunSpec

AT_HOME = tuple(part.name for part in PARTS if not part.travels)
"""Parts that the master computes itself, so they never travel."""
FETCH_S = 30.0
"""Time limit for a worker to send a slot's state. It sends beside its training, so only the network takes that long."""


class SlotStates:
    """The state of each slot.

    Args:
        run: Name of the training run.
        crew: The workers of the run.
        known: The initial state of each slot, from a checkpoint or an earlier run. Its entries are replaced as the
            master learns more.
        parts: How slots keep their parts, by name.
        codec: Name of the codec of updates, for the event that reports a lost state.
        on_workers: Whether the weights are on the workers. Then the means that rounds begin with, and the parts behind
            these means, are there, too.
        restoring: Restores slot states that are in slices of a checkpoint.

    Attributes:
        keep: Parts that stay on a slot's worker.
        back: Parts that come back with each reply.
        shared: Parts that every slot begins its next round with, instead of its own.
        copied: Parts that do not come back, but that other workers keep copies of.
        parts: The argument of this name.
        averaged: Name of the part whose mean each round begins with; "" for none.
        mean: Fetches that mean if it is on workers. ``mean_is`` sets it.
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
        self.parts, self._codec, self._on_workers = parts, codec, on_workers
        self._known = known
        self._on: dict[int, tuple[int, int, int]] = {}  # slot -> worker, its number of openings, round that left it
        self._coming: dict[int, asyncio.Future[SlotState]] = {}
        self.keep = tuple(parts)
        self.back = tuple(name for name, part in parts.items() if part.back)
        self.averaged = next((name for name, part in parts.items() if part.shared), "")
        self.shared: SlotState = {}
        self.mean: Callable[[], Weights] | None = None
        if begun := [state[self.averaged] for state in known if self.averaged in state]:
            # After an interrupted training all are the mean already; averaging equal numbers may round them.
            begun = begun[:1] if len(set(map(digest, begun))) == 1 else begun
            self._share(begun, [1] * len(begun))
        if on_workers and self.shared:
            mean, self.shared = self.shared[self.averaged], {}
            self.mean_is(lambda: mean)
        # The parts behind a mean that is on the workers are not needed any more.
        self._fetched = tuple(
            name
            for name, part in parts.items()
            if not part.back and name not in AT_HOME and not (on_workers and part.shared)
        )
        self.copied = self._fetched if on_workers and any(part.copied for part in parts.values()) else ()
        self._copies: dict[int, tuple[int, int, int]] = {}  # slot -> the same facts about the last copy
        self._stored: dict[
            int, tuple[int, dict[str, int], Slices, int]
        ] = {}  # slot -> round, lengths, slice of a checkpoint

        self._restoring = restoring
        self._unread = {} if restoring is None else restoring.left  # slot -> lengths, slice of a checkpoint

    async def restored(self, slot: int, number: int, worker: ProxyWorker) -> bool:
        """Let a worker read a slot state that is still only in a slice of the checkpoint being resumed.

        Args:
            slot: The slot, from 0.
            number: The round that left the state, from 0.
            worker: The worker that carries the slot's next round.

        Returns:
            Whether the worker now has the whole state.
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

    def check(self, reply: Reply, worker: str) -> None:
        """Check the arrays that came back from a worker; see ``SlotPart.check``."""
        for name in self.back:
            if (part := self.parts[name].part) is not None:
                part.check(reply.state[name], reply.task.weights, worker)

    def left(self, reply: Reply) -> None:
        """Record that a slot's update was accepted, and store the slot state of that round."""
        slot = reply.slot
        self._coming.pop(slot, None)
        self._on.pop(slot, None)
        self._known[slot] = {name: group for name, group in self._known[slot].items() if name in AT_HOME} | reply.state
        if self._fetched:
            self._on[slot] = self._left_by(reply)

    def _left_by(self, reply: Reply) -> tuple[int, int, int]:
        member = self._crew.member(reply.worker)
        # If the worker is already lost, fetching will fail, and the loss is reported when the state is needed.
        return reply.worker, member[1] if member else -1, reply.task.round

    def copy(self, slot: int, number: int, worker: int) -> None:
        """Record that a worker has a copy of the state that stayed on the slot's worker after a round, from 0."""
        member = self._crew.member(worker)
        self._copies[slot] = worker, member[1] if member else -1, number

    def at(self, slot: int, holds: bool) -> tuple[int, ...]:
        """Return the workers that have the state that did not come back after a slot's last round.

        Args:
            slot: The slot, from 0.
            holds: Whether the worker that will carry it has this state.

        Returns:
            The numbers of reachable workers; empty if the task need not name any.
        """
        return (
            () if holds or not self.copied else tuple(worker.id for worker in self._holders(slot, self._on.get(slot)))
        )

    def round_over(self, replies: Sequence[Reply]) -> None:
        """Compute the mean that the next round begins with, after all accepted replies of a round were stored."""
        if self.averaged and not self._on_workers:
            self._share([reply.state[self.averaged] for reply in replies], [reply.samples for reply in replies])

    def _share(self, left: Sequence[Left], samples: Sequence[int]) -> None:
        """Make all slots, and slots that join later, begin with the mean of what slots have left."""
        if (mean := self.parts[self.averaged].mean) is not None:
            self.shared = {self.averaged: mean(left, samples)}
        for slot, state in enumerate(self._known):
            self._known[slot] = state | self.shared

    def mean_is(self, mean: Callable[[], Weights] | None) -> None:
        """Set how to fetch the mean of ``averaged`` from the workers; None if it cannot be fetched."""
        if not (self.averaged and self._on_workers):
            return
        self.mean = mean
        for slot, state in enumerate(self._known):
            self._known[slot] = {name: group for name, group in state.items() if name != self.averaged}

    def fetch_mean(self) -> None:
        """Fetch the mean of ``averaged``, if it is on workers, as the state of every slot."""
        if self.mean is not None:
            mean = self.mean()
            for slot, state in enumerate(self._known):
                self._known[slot] = state | {self.averaged: mean}

    async def means(self) -> SlotState:
        """Return the means that the next round begins with, for workers that get them from the master."""
        means = {name: part for name, part in self.parts.items() if part.mean is not None}
        states = await self.all() if means else []
        found = SlotState()
        for name, part in means.items():
            left = [state.get(name) for state in states]
            known = [one for one in left if one is not None]
            if known and part.mean is not None:
                found[name] = known[0] if part.shared else part.mean(left, [1] * len(left))  # shared: each is the mean
        return found

    def where(self, slot: int, group: str) -> tuple[int, int] | list[Any] | None:
        """Return where a part of a slot's state is.

        Returns:
            A pair of worker and round; the part itself if the master has it; None if it is lost.
        """
        if (left := self._on.get(slot)) is None:
            return self._known[slot].get(group)
        holders = self._holders(slot, left)
        return (holders[0].id, left[2]) if holders else None

    def holds(self, slot: int, weights: Weights) -> None:
        """Store the weights that a slot holds when weights travel as differences."""
        self._known[slot] = {**self._known[slot], HELD: weights}

    async def of(self, slot: int, holds: bool) -> SlotState | None:
        """Return the state to send along with a slot's next round.

        Args:
            slot: The slot, from 0.
            holds: Whether the worker that will carry it still holds the state of the slot's last round.

        Returns:
            The state; None if the worker needs none.
        """
        if holds and self.keep:
            return None
        coming = None if self.at(slot, holds) else self._coming_of(slot)
        whole = self._known[slot] | (await asyncio.shield(coming) if coming else {})
        return {name: group for name, group in whole.items() if name not in AT_HOME}

    def set_back(self, states: list[SlotState]) -> None:
        """Replace all states, and forget what workers hold. The list is used and changed from now on."""
        self._known = states
        self._coming, self._on, self._copies = {}, {}, {}

    def all(self) -> asyncio.Future[list[SlotState]]:
        """Return a future with the state of every slot at the time of this call, not of its await."""
        mean = {} if self.mean is None else {self.averaged: self.mean()}
        return asyncio.ensure_future(
            _collected([(known | mean, self._coming_of(slot)) for slot, known in enumerate(self._known)])
        )

    async def written(self, writing: Writing, replies: Sequence[Reply]) -> list[dict[str, int]]:
        """Have workers write the slot states that they hold into a checkpoint.

        Args:
            writing: The checkpoint.
            replies: The replies that are about to be committed.

        Returns:
            For each slot, the lengths of the parts that were written.
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
                return {"why": ""}  # the code that fetches the state reports the loss

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
        """Cancel the fetches that are still running."""
        coming = list(self._coming.values())
        for future in coming:
            future.cancel()
        await asyncio.gather(*coming, return_exceptions=True)

    def _coming_of(self, slot: int) -> asyncio.Future[SlotState] | None:
        """Return a future with the parts that are only on the slot's worker; None without any. Asks at most once."""
        if slot not in self._coming and slot in self._on:
            self._coming[slot] = asyncio.ensure_future(self._fetch(slot, *self._on[slot]))
        elif slot not in self._coming and slot in self._unread:
            self._coming[slot] = asyncio.ensure_future(self._read(slot))
        return self._coming.get(slot)

    def _holders(self, slot: int, left: tuple[int, int, int] | None) -> list[ProxyWorker]:
        """Return the reachable workers with the state of a slot's last round: its own one, and one with a copy."""
        on = [
            one for one in (left, self._copies.get(slot)) if one is not None and left is not None and one[2] == left[2]
        ]
        found = [(self._crew.member(worker), openings) for worker, openings, _ in on]
        return list(
            dict.fromkeys(member[0] for member, openings in found if member is not None and member[1] == openings)
        )

    async def _read(self, slot: int) -> SlotState:
        """Return a slot's state from the checkpoint that no worker has read yet."""
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
    # Shielded, since other callers may wait for the same fetch.
    return [{**known, **(await asyncio.shield(coming) if coming else {})} for known, coming in parts]


def states_of(
    app: App, crew: Crew, progress: Progress, spec: RunSpec, *, differences: bool, restoring: Restoring | None
) -> SlotStates:
    """Return the states of the slots of a run.

    Args:
        app: The user's ``IApp``.
        crew: The workers.
        progress: The progress that the run continues from.
        spec: The run.
        differences: Whether weights travel as differences.
        restoring: Lets workers read slices of a checkpoint, if they hold the weights.
    """
    plan = SlotPlan(
        spec=spec,
        optimizer=app.run_context.optimizer,
        differences=differences,
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
        restoring=restoring,
    )
