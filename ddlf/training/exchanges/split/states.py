"""The slot state of a model in parts: the optimizer, which stays with the parts. Runs on the master."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from ddlf.algorithms.weights import Weights
from ddlf.training.checkpoints.progress_layout import SLOTS
from ddlf.training.checkpoints.sliced_resume import Restoring
from ddlf.training.checkpoints.slices import part_name
from ddlf.training.crew.crew import Crew
from ddlf.training.exchanges.states import LeftBy, SlotStates
from ddlf.training.slot.parts import Kept
from ddlf.training.slot.task import OPTIMIZER, SlotState


class SplitStates(SlotStates):
    """The states of the slots. The first one has the optimizer, which is on the workers of its parts, or in slices of a
    checkpoint.

    Args:
        run, crew, initial, parts, codec: Arguments of ``SlotStates``.
        restoring: Knows the slices of the checkpoint that the run resumes from.

    Attributes:
        bring: Fetches the optimizer from the workers.
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
        super().__init__(run, crew, initial, {name: replace(part, back=False) for name, part in parts.items()}, codec)
        self._restoring = restoring
        self.bring: Callable[[], Awaitable[Weights | None]] = _nothing

    def changed(self) -> None:
        """Note that the optimizer has changed on the workers."""
        self._states[0] = {name: group for name, group in self._states[0].items() if name != OPTIMIZER}
        self._fetches.clear()
        self._locations[0] = LeftBy(0, 0, 0)
        if self._restoring is not None:
            self._restoring.left.clear()

    def give(self, optimizer: Weights | None) -> None:
        """Receive the optimizer, which the master has now."""
        self.set_back(self._states)
        if optimizer is not None:
            self._states[0] = self._states[0] | {OPTIMIZER: optimizer}

    def _fetch_of(self, slot: int) -> asyncio.Future[SlotState] | None:
        if (
            slot not in self._fetches
            and slot not in self._locations
            and self._restoring is not None
            and self._restoring.left
        ):
            self._fetches[slot] = asyncio.ensure_future(asyncio.to_thread(self._read, slot))
        return super()._fetch_of(slot)

    def _read(self, slot: int) -> SlotState:
        """Return the optimizer from the slices of the checkpoint that the run resumes from."""
        assert self._restoring is not None
        slices = self._restoring.slices
        assert slices is not None
        lengths, _ = self._restoring.left[slot]
        names = {part_name(SLOTS + OPTIMIZER, 0, f"slot {slot:04d} {i:04d}"): i for i in range(lengths[OPTIMIZER])}
        variables: dict[int, Any] = {}
        for number, file in slices.by_number.items():
            if names.keys() & {*file.arrays}:
                arrays = slices.read_one(number)
                variables.update((names[name], arrays[name]) for name in names.keys() & arrays.keys())
        return {OPTIMIZER: [variables[i] for i in range(lengths[OPTIMIZER])]}

    async def _hand_back(self, worker: int) -> None:
        """Do nothing if a worker leaves: the group takes the states of its parts."""

    async def _fetch(self, slot: int, left: LeftBy) -> SlotState:
        optimizer = await self.bring()
        return {} if optimizer is None else {OPTIMIZER: optimizer}


async def _nothing() -> None:
    return None
