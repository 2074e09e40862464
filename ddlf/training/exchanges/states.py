"""The slot states between rounds, and where they are. Runs on the master; ``slot/task.py`` defines the data.

Some groups come back with each reply. Others, such as the residuals of biased codecs, are as large as the weights, so
they stay on their worker. The master fetches them when the slot moves to another worker, for a checkpoint, and at the
end of a run. If the worker is lost first, they are lost too: an event says so, and the run no longer has the bits of an
undisturbed one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ddlf.algorithms.weights import Weights, digest
from ddlf.cluster.proxy import ProxyWorker
from ddlf.errors import DDLFError
from ddlf.events import ResidualDropped
from ddlf.training.crew.crew import Crew
from ddlf.training.roles import REPLICA
from ddlf.training.slot.parts import PARTS, Kept, Left
from ddlf.training.slot.task import HELD, Reply, SlotState, Task

AT_HOME = tuple(part.name for part in PARTS if not part.travels)
"""Parts that the master computes itself, so they never travel."""
FETCH_S = 30.0
"""Time limit for a worker to send a slot's state. It sends beside its training, so only the network takes that long."""


class LeftBy(NamedTuple):
    """Tells which worker has the state of a slot after a round.

    Args:
        worker: Number of the worker.
        openings: How often the worker had received the app. A changed count means that it lost the state.
        round: The round, from 0.
    """

    worker: int
    openings: int
    round: int


class SlotStates:
    """The states of all slots between rounds, and which worker has which parts of them.

    A slot is a share of the training. Its state, such as that of its optimizer, passes from round to round.

    Args:
        run: Name of the training run.
        crew: The workers of the run.
        initial: The initial state of each slot, from a checkpoint or an earlier run. Its entries are replaced as the
            master learns more.
        parts: How slots keep their parts, by name.
        codec: Name of the codec of updates, for the event that reports a lost state.

    Attributes:
        keep: Parts that stay on a slot's worker.
        back: Parts that come back with each reply.
        shared: Parts that every slot begins its next round with, instead of its own parts.
        parts: The argument of this name.
        averaged: Name of the part whose mean each round begins with; "" for none.
    """

    def __init__(
        self, run: str, crew: Crew, initial: list[SlotState], parts: Mapping[str, Kept], codec: str = "float32"
    ) -> None:
        self._role = (run, REPLICA)
        self._crew = crew
        self.parts, self._codec = parts, codec
        self._states = initial
        self._locations: dict[int, LeftBy] = {}  # slot -> where the parts are that did not come back
        self._fetches: dict[int, asyncio.Future[SlotState]] = {}
        self.keep = tuple(parts)
        self.back = tuple(name for name, part in parts.items() if part.back)
        self.averaged = next((name for name, part in parts.items() if part.shared), "")
        self.shared: SlotState = {}
        if means := [state[self.averaged] for state in initial if self.averaged in state]:
            # After an interrupted training all are the mean already; averaging equal numbers may round them.
            means = means[:1] if len(set(map(digest, means))) == 1 else means
            self._share(means, [1] * len(means))
        self._fetched = tuple(name for name, part in parts.items() if not part.back and name not in AT_HOME)
        crew.hand_back.append(self._hand_back)

    def check(self, reply: Reply, worker: str) -> None:
        """Check the arrays of slot state that came back from a worker, as ``SlotPart.check`` does."""
        for name in self.back:
            if (part := self.parts[name].part) is not None:
                part.check(reply.state[name], reply.task.weights, worker)

    def accept(self, reply: Reply) -> None:
        """Note that a slot's update was accepted, and store the slot state of that round."""
        slot = reply.slot
        self._fetches.pop(slot, None)
        self._locations.pop(slot, None)
        self._states[slot] = {
            name: group for name, group in self._states[slot].items() if name in AT_HOME
        } | reply.state
        if self._fetched:
            self._locations[slot] = self._left_by(reply.worker, reply.task.round)

    def _left_by(self, worker: int, number: int) -> LeftBy:
        member = self._crew.member(worker)
        # If the worker is already lost, fetching will fail, and the loss is reported when the state is needed.
        return LeftBy(worker, member[1] if member else -1, number)

    def end_round(self, replies: Sequence[Reply]) -> None:
        """Compute the mean that the next round begins with, after all accepted replies of a round were stored."""
        if self.averaged:
            self._share([reply.state[self.averaged] for reply in replies], [reply.samples for reply in replies])

    def _share(self, left: Sequence[Left], samples: Sequence[int]) -> None:
        """Make all slots, including later ones, begin with the mean of the states that slots have left."""
        if (mean := self.parts[self.averaged].mean) is not None:
            self.shared = {self.averaged: mean(left, samples)}
        for slot, state in enumerate(self._states):
            self._states[slot] = state | self.shared

    def means_for_tasks(self, like: Weights) -> dict[str, Any]:
        """Return the entries of a round's tasks with means of slot states, by name.

        These are means of parts that each slot also has for itself.

        Args:
            like: Arrays with the types of the weights.
        """
        entries: dict[str, Any] = {}
        for name, part in self.parts.items():
            left = [state.get(name) for state in self._states]
            if part.mean is not None and part.part is not None and not part.shared and any(left):
                entries |= part.part.begins_with(part.mean(left, [1] * len(left)), 0, like)
        return entries

    def store_weights(self, slot: int, weights: Weights) -> None:
        """Store the weights that a slot's worker has, if weights travel as differences to them."""
        self._states[slot] = {**self._states[slot], HELD: weights}

    async def state_for(self, task: Task, worker: ProxyWorker, holds: bool) -> tuple[SlotState | None, bool]:
        """Return the state to send along with a slot's next round.

        Args:
            task: The round to train, with the slot and its samples.
            worker: The worker that trains it.
            holds: Whether the worker still holds the state of the slot's last round.

        Returns:
            The state, or None if the worker needs none; and whether the worker holds the state now.
        """
        if holds and self.keep:
            return None, holds
        fetch = self._fetch_of(task.slot)
        return self._sent(task.slot, await asyncio.shield(fetch) if fetch else {}), holds

    def _sent(self, slot: int, fetched: SlotState) -> SlotState:
        """Return a slot's state to send to its worker: the parts on the master that travel, and more parts."""
        return {name: state for name, state in (self._states[slot] | fetched).items() if name not in AT_HOME}

    def set_back(self, states: list[SlotState]) -> None:
        """Replace the states of all slots, and forget what workers hold.

        The list is used and changed from now on.
        """
        self._states = states
        self._fetches, self._locations = {}, {}

    def fetch_all(self) -> asyncio.Future[list[SlotState]]:
        """Return a future with the state of every slot.

        It is the state at the time of this call, not of the ``await``.
        """
        return asyncio.ensure_future(
            _collected([(state, self._fetch_of(slot)) for slot, state in enumerate(self._states)])
        )

    async def close(self) -> None:
        """Cancel the fetches of slot states that are still running."""
        fetches = list(self._fetches.values())
        for future in fetches:
            future.cancel()
        await asyncio.gather(*fetches, return_exceptions=True)

    def _fetch_of(self, slot: int) -> asyncio.Future[SlotState] | None:
        """Return a future with the parts of a slot's state that are only on its worker; None without any.

        The worker is asked at most once.
        """
        if slot not in self._fetches and slot in self._locations:
            self._fetches[slot] = asyncio.ensure_future(self._fetch(slot, self._locations[slot]))
        return self._fetches.get(slot)

    def _holders(self, slot: int, left: LeftBy) -> list[ProxyWorker]:
        """Return the reachable workers that have the state of a slot's last round."""
        member = self._crew.member(left.worker)
        return [member[0]] if member is not None and member[1] == left.openings else []

    async def _hand_back(self, worker: int) -> None:
        """Fetch the states that only a worker has, which is leaving."""
        slots = [slot for slot, left in self._locations.items() if left.worker == worker]
        await asyncio.gather(*(asyncio.shield(fetch) for slot in slots if (fetch := self._fetch_of(slot))))

    async def _fetch(self, slot: int, left: LeftBy) -> SlotState:
        """Fetch the parts of a slot's state that did not come back with the reply.

        If they are lost, emit an event and return nothing.
        """
        reason = "it was lost"
        for holder in self._holders(slot, left):
            try:
                arguments = (slot, left.round, self._fetched)
                state: SlotState = await holder.call(self._role, "give", *arguments, timeout_s=FETCH_S)
                return state
            except DDLFError as error:
                reason = str(error).partition("\n")[0]
        if (stored := await self._stored_state(slot, left.round)) is not None:
            return stored
        origin, parts = {"round": left.round + 1, "slot": slot + 1, "worker": left.worker}, self._fetched
        self._crew.emit(ResidualDropped(**origin, codec=self._codec, why=reason, groups=parts))
        return {}

    async def _stored_state(self, slot: int, number: int) -> SlotState | None:
        """Return a slot's state after a round from another place than its workers, such as a checkpoint.

        Return None if it is lost.
        """
        return None


async def _collected(parts: list[tuple[SlotState, asyncio.Future[SlotState] | None]]) -> list[SlotState]:
    # Shielded, since other callers may wait for the same fetch.
    return [{**state, **(await asyncio.shield(fetch) if fetch else {})} for state, fetch in parts]
