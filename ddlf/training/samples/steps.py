"""The planned number of optimizer steps of each slot in a run. Pure; used on the master.

Parts by speed have unknown sizes in advance and count as equal here. A worker stretches its actual steps to the planned
ones.
"""

from __future__ import annotations

import itertools

import numpy as np

from ddlf.training.progress import Progress
from ddlf.training.slot.optimizers import Steps


class PlannedSteps:
    """The steps of each slot, counted once for each plan of the run.

    Args:
        progress: Has the plan.
        batch_size: Samples in a batch of each slot.
    """

    def __init__(self, progress: Progress, batch_size: int) -> None:
        self._progress, self._batch_size = progress, batch_size
        self._plan: tuple[object, ...] = ()
        self._owned: list[int] | None = None  # samples of each slot, if they are the same in the whole run
        self._before: dict[int, list[int]] = {}  # slot -> the steps before each round, and after the last one

    def of(self, slot: int, number: int) -> Steps:
        """Return the steps of a slot in a round, both numbered from 0."""
        progress = self._progress
        # These facts identify the plan. The completed rounds of an earlier plan stay the same.
        plan = (len(progress.epochs), progress.starts[-1], tuple(progress.slots_from), len(progress.parts_from))
        if plan != self._plan:
            self._plan, self._before = plan, {}
        if slot not in self._before:
            made = (self._in_round(slot, one) for one in range(len(progress.epochs)))
            self._before[slot] = [0, *itertools.accumulate(made)]
        before = self._before[slot]
        return Steps(before[number], before[number + 1], before[-1], progress.starts[-1])

    def _in_round(self, slot: int, number: int) -> int:
        progress = self._progress
        return progress.epochs[number] * -(-self._samples(slot, number) // self._batch_size)

    def _samples(self, slot: int, number: int) -> int:
        progress = self._progress
        span, slots = progress.span(number), progress.tasks_in(number)
        samples = span.end - span.begin
        if progress.owners is not None:
            if self._owned is None:
                self._owned = np.bincount(progress.owners, minlength=len(progress.states)).tolist()
            return round(self._owned[slot] * samples / progress.samples)
        if (parts := progress.parts_in(number)) and slot < len(parts):
            return round(parts[slot] * samples / sum(parts))
        return samples // slots + (slot < samples % slots) if slot < slots else 0
