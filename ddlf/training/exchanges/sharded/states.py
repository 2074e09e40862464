"""The slot states of the sharded exchange, which has more places for them. Runs on the master.

Parts as large as the weights stay on the workers. So do the means that rounds begin with. Another worker keeps a copy
of what is expensive to lose, and the next worker of a slot fetches its state from one of the two. Workers write the
states that they have into checkpoints, and read them from there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ddlf.algorithms.weights import Tensor, Weights
from ddlf.cluster.proxy import ProxyWorker
from ddlf.errors import CheckpointError
from ddlf.training.checkpoints.sliced_resume import Restoring
from ddlf.training.checkpoints.slices import Destination, Slices, Written
from ddlf.training.crew.crew import Crew
from ddlf.training.crew.recovery import LOSS
from ddlf.training.exchanges.sharded.plan import EXCHANGE, left_of, left_parts
from ddlf.training.exchanges.states import LeftBy, SlotStates
from ddlf.training.slot.parts import Kept
from ddlf.training.slot.task import Reply, SlotState, Task


class ShardedStates(SlotStates):
    """The states of all slots (shares of the training) between rounds. Large parts of them stay on workers.

    Args:
        run, crew, initial, parts, codec: Arguments of ``SlotStates``.
        restoring: Lets workers read slot states that are in slices of a checkpoint; None if the master has all states.

    Attributes:
        backed_up: Parts that do not come back, but that other workers keep copies of.
        mean: Fetches the mean of ``averaged``, if it is on workers. ``set_mean`` sets it.
    """

    def __init__(
        self,
        run: str,
        crew: Crew,
        initial: list[SlotState],
        parts: Mapping[str, Kept],
        codec: str,
        restoring: Restoring | None,
    ) -> None:
        parts = {name: replace(part, back=part.back and not part.large) for name, part in parts.items()}
        super().__init__(run, crew, initial, parts, codec)
        self._exchange = (run, EXCHANGE)
        self._backups: dict[int, LeftBy] = {}  # slot -> the worker with the last copy
        self._stored: dict[int, tuple[int, dict[str, int], Slices, int]] = {}  # slot -> round, lengths, slice
        self._restoring = restoring
        self._in_checkpoint = {} if restoring is None else restoring.left  # slot -> lengths, slice of a checkpoint
        self.mean: Callable[[], Weights] | None = None
        if self.shared:
            mean, self.shared = self.shared[self.averaged], {}
            self.set_mean(lambda: mean)
        # If the mean of a part is on the workers, the part itself is not needed any more.
        self._fetched = tuple(name for name in self._fetched if not parts[name].shared)
        self.backed_up = self._fetched if any(part.copied for part in parts.values()) else ()

    async def state_for(self, task: Task, worker: ProxyWorker, holds: bool) -> tuple[SlotState | None, bool]:
        """Return the state to send along with a slot's task, like ``SlotStates.state_for``.

        If the state is still in a checkpoint, let the worker read it there.
        """
        holds = await self._restored(task.slot, task.since, worker) or holds
        if not self.workers_with(task.slot, holds):
            return await super().state_for(task, worker, holds)
        return self._sent(task.slot, {}), holds

    async def _hand_back(self, worker: int) -> None:
        """Fetch the states that only a worker has, which is leaving, and keep them here: the workers may no longer have
        them when the next means are planned.
        """
        await super()._hand_back(worker)
        for slot, left in list(self._locations.items()):
            if left.worker == worker and slot in self._fetches and self._locations.get(slot) is left:
                self._states[slot] = self._states[slot] | await asyncio.shield(self._fetches[slot])
                del self._locations[slot], self._fetches[slot]

    async def _restored(self, slot: int, number: int, worker: ProxyWorker) -> bool:
        """Let a worker read a slot state that is still only in a slice of the checkpoint being resumed.

        Args:
            slot: Number of the slot, from 0.
            number: The round that left the state, from 0.
            worker: The worker that carries the slot's next round.

        Returns:
            Whether the worker now has the whole state.
        """
        if slot not in self._in_checkpoint or self._restoring is None or (slices := self._restoring.slices) is None:
            return False
        lengths, slice_number = self._in_checkpoint[slot]
        left = self._left_by(worker.id, number)
        await self._restoring.give(worker, slices, [slice_number])
        await worker.call(self._exchange, "left_restored", slot, number, self._sent(slot, {}), lengths, slice_number)
        self._locations[slot], self._stored[slot] = left, (number, lengths, slices, slice_number)
        self._fetches.pop(slot, None)
        self._in_checkpoint.pop(slot, None)
        return True

    def note_backup(self, slot: int, number: int, worker: int) -> None:
        """Note that a worker has a backup of a slot's state after a round, from 0.

        The state itself stayed on the worker that carried the slot.
        """
        self._backups[slot] = self._left_by(worker, number)

    def workers_with(self, slot: int, holds: bool) -> list[int]:
        """Return the workers that have those parts of a slot's state that stayed on workers after its last round.

        Args:
            slot: Number of the slot, from 0.
            holds: Whether the worker that will carry it has this state.

        Returns:
            The numbers of reachable workers; empty if the task need not name any.
        """
        if holds or not self.backed_up or slot not in self._locations:
            return []
        return [worker.id for worker in self._holders(slot, self._locations[slot])]

    def location_of(self, slot: int, group: str) -> tuple[int, int] | list[Any] | None:
        """Return where one part of a slot's state is.

        Returns:
            A pair of worker and round; the part itself if the master has it; None if it is lost.
        """
        if (left := self._locations.get(slot)) is None:
            return self._states[slot].get(group)
        holders = self._holders(slot, left)
        return (holders[0].id, left.round) if holders else None

    def end_round(self, replies: Sequence[Reply]) -> None:
        """Do nothing after a round, since the workers compute the means."""

    def means_for_tasks(self, like: Weights) -> dict[str, Any]:
        """Return no means to send with tasks, since the workers have the means."""
        return {}

    def set_mean(self, mean: Callable[[], Weights] | None) -> None:
        """Set the function that fetches the mean of ``averaged`` optimizer states from workers, or None."""
        if not self.averaged:
            return
        self.mean = mean
        for slot, state in enumerate(self._states):
            self._states[slot] = {name: group for name, group in state.items() if name != self.averaged}

    def fetch_mean(self) -> None:
        """Fetch the mean of ``averaged`` optimizer states, if it is on workers, as the state of every slot."""
        if self.mean is not None:
            mean = self.mean()
            for slot, state in enumerate(self._states):
                self._states[slot] = state | {self.averaged: mean}

    async def means(self) -> SlotState:
        """Return the means that the next round begins with, for workers that get them from the master."""
        means = {name: part for name, part in self.parts.items() if part.mean is not None}
        states = await self.fetch_all() if means else []
        values = SlotState()
        for name, part in means.items():
            left = [state.get(name) for state in states]
            present = [state for state in left if state is not None]
            if present and part.mean is not None:
                # If the part is shared, each value is the mean already.
                values[name] = present[0] if part.shared else part.mean(left, [1] * len(left))
        return values

    def set_back(self, states: list[SlotState]) -> None:
        """Replace the states of all slots, like ``SlotStates.set_back``, and forget the backups."""
        super().set_back(states)
        self._backups = {}

    def fetch_all(self) -> asyncio.Future[list[SlotState]]:
        """Return a future with the state of every slot, like ``SlotStates.fetch_all``, with the mean that workers have."""
        states = super().fetch_all()
        return states if self.mean is None else asyncio.ensure_future(_with_mean(states, {self.averaged: self.mean()}))

    async def write(self, slices: Slices, first: int, replies: Sequence[Reply]) -> list[dict[str, int]]:
        """Have workers write the slot states that they hold into a checkpoint.

        Args:
            slices: The slices of the checkpoint.
            first: Number of the slice of the first slot.
            replies: The replies that are about to be committed.

        Returns:
            For each slot, the lengths of the parts that were written.
        """
        lengths: list[dict[str, int]] = [{} for _ in self._states]
        now = {reply.slot: self._left_by(reply.worker, reply.task.round) for reply in replies}
        left = self._locations | now if self._fetched else {}

        async def write_slot(slot: int) -> None:
            async def write_remotely(
                destination: Destination,
            ) -> Written[dict[str, int]] | None:
                for holder in self._holders(slot, left[slot]):
                    with contextlib.suppress(*LOSS):
                        arguments = slot, left[slot].round, self._fetched, destination
                        answer: Written[dict[str, int]] = await holder.call(self._exchange, "write_left", *arguments)
                        return answer
                return None  # the code that fetches the state reports the loss

            async def fetch_arrays() -> tuple[dict[str, Tensor], dict[str, int]]:
                return left_parts(slot, await self._fetch(slot, left[slot]))

            lengths[slot] = await slices.write_one(first + slot, write_remotely, fetch_arrays)
            self._stored[slot] = left[slot].round, lengths[slot], slices, first + slot

        async def write_unread(slot: int) -> None:
            async def write_remotely(destination: Destination) -> None:
                return None

            async def fetch_arrays() -> tuple[dict[str, Tensor], dict[str, int]]:
                return left_parts(slot, await self._read(slot))

            lengths[slot] = await slices.write_one(first + slot, write_remotely, fetch_arrays)

        await asyncio.gather(*map(write_slot, left), *map(write_unread, self._in_checkpoint.keys() - left.keys()))
        return lengths

    def _fetch_of(self, slot: int) -> asyncio.Future[SlotState] | None:
        if slot not in self._fetches and slot not in self._locations and slot in self._in_checkpoint:
            self._fetches[slot] = asyncio.ensure_future(self._read(slot))
        return super()._fetch_of(slot)

    def _holders(self, slot: int, left: LeftBy) -> list[ProxyWorker]:
        """Return the reachable workers that have a slot's last state.

        One has trained the slot, and one may have a backup.
        """
        backup = self._backups.get(slot)
        backup_holders = super()._holders(slot, backup) if backup is not None and backup.round == left.round else []
        return list(dict.fromkeys([*super()._holders(slot, left), *backup_holders]))

    async def _read(self, slot: int) -> SlotState:
        """Return a slot's state from the checkpoint, if no worker has read it yet."""
        assert self._restoring is not None
        assert self._restoring.slices is not None
        lengths, slice_number = self._in_checkpoint[slot]
        return left_of(slot, lengths, await asyncio.to_thread(self._restoring.slices.read_one, slice_number))

    async def _stored_state(self, slot: int, number: int) -> SlotState | None:
        """Return a slot's state after a round, read from the last checkpoint that contains it."""
        if slot in self._stored and self._stored[slot][0] == number:
            _, lengths, slices, slice_number = self._stored[slot]
            with contextlib.suppress(CheckpointError):
                return left_of(slot, lengths, await asyncio.to_thread(slices.read_one, slice_number))
        return None


async def _with_mean(states: asyncio.Future[list[SlotState]], mean: SlotState) -> list[SlotState]:
    return [state | mean for state in await states]
