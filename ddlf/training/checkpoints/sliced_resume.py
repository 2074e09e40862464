"""Resumes a run from a checkpoint of slices: each worker reads the slices that it needs, and the master reads little.

Runs on the master. A worker that cannot see the folder receives its slices from the master. Before the run continues,
some worker compares each slice with its hash. A checkpoint with a damaged slice is replaced by the one before, as when
the master reads the checkpoint itself.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ddlf.cluster.proxy import ProxyWorker
from ddlf.events import Warned
from ddlf.training.checkpoints import tensors
from ddlf.training.checkpoints.contents import Checkpoint
from ddlf.training.checkpoints.progress_layout import KEPT, SLOTS
from ddlf.training.checkpoints.slice_reader import SliceLocation, SliceReport
from ddlf.training.checkpoints.slices import WEIGHTS, Slices
from ddlf.training.crew.crew import Crew
from ddlf.training.crew.recovery import LOSS
from ddlf.training.progress import Progress, WeightsRef


class Restoring:
    """Lets the workers of one run read the slices of the checkpoint that the run resumes from.

    Args:
        role: Name of the role on the workers that reads slices.
        workers: Returns the reachable workers.
        crew: Emits a warning for each worker that cannot see a folder.

    Attributes:
        slices: The slices of the checkpoint that the run continues from, if any.
        left: The slot states in these slices: for each slot, the lengths of its parts and the number of its slice.
    """

    def __init__(
        self,
        role: tuple[str, str],
        workers: Callable[[], Sequence[ProxyWorker]],
        crew: Crew,
    ) -> None:
        self._role, self._workers, self._crew = role, workers, crew
        self._one_at_a_time = asyncio.Lock()
        self._warned_workers: set[int] = set()
        self.slices: Slices | None = None
        self.left: dict[int, tuple[dict[str, int], int]] = {}

    async def check(self, slices: Slices) -> None:
        """Compare each slice of a checkpoint with its hash, on a worker that sees it or else on the master.

        Raises:
            CheckpointCorrupt: A slice is missing, damaged, or of another run.
        """
        waiting = deque(slices.by_number)

        async def look(worker: ProxyWorker) -> None:
            while waiting:
                number = waiting.popleft()
                try:
                    report: SliceReport = await worker.call(self._role, "look_at", SliceLocation.of(slices, number))
                except LOSS:  # the crew notices the loss, too
                    report = SliceReport(visible=False)
                report.check()
                if not report.visible:
                    waiting.append(number)
                    return

        outcomes = await asyncio.gather(*map(look, self._workers()), return_exceptions=True)
        if errors := [outcome for outcome in outcomes if isinstance(outcome, BaseException)]:
            raise errors[0]
        for number in waiting:
            await asyncio.to_thread(slices.look_at, number)

    async def give(self, worker: ProxyWorker, slices: Slices, numbers: Sequence[int]) -> None:
        """Make a worker read some slices of a checkpoint, or send them to it if it cannot.

        Raises:
            CheckpointCorrupt: A slice is missing, damaged, or of another run.
            WorkerLost: The worker is lost.
        """
        for number in numbers:
            location = SliceLocation.of(slices, number)
            report: SliceReport = await worker.call(self._role, "read_slice", number, location)
            report.check()
            if report.visible:
                continue
            if worker.id not in self._warned_workers:
                self._warned_workers.add(worker.id)
                blind = f"{worker.name} does not see {slices.final}, so the master sends it its slices"
                sentence = f"{blind}; a network disk at the same path everywhere avoids this"
                self._crew.emit(Warned(about="checkpoint", why=sentence))
            async with self._one_at_a_time:  # so that the master holds one slice at a time
                arrays = await asyncio.to_thread(slices.read_one, number)
                await worker.call(self._role, "take_slice", number, arrays)

    def begin(self, checkpoint: Checkpoint) -> Progress:
        """Return the progress of the training in a checkpoint. Arrays in slices stay there until a worker reads them.

        Args:
            checkpoint: The loaded checkpoint; without slices, all of it is in memory.
        """
        slices = self.slices = checkpoint.slices
        if slices is None:
            return Progress.from_checkpoint(checkpoint)
        like = {
            group: _arrays_like(listed, checkpoint.arrays.get(group, {})) for group, listed in slices.sliced.items()
        }
        groups = {SLOTS + name for left in checkpoint.facts["states"] for name in left}
        arrays = {**{group: {} for group in groups}, **checkpoint.arrays, **like}
        progress = Progress.from_checkpoint(dataclasses.replace(checkpoint, arrays=arrays))
        refs = {group: WeightsRef(group=group, slices=slices, like=list(of.values())) for group, of in like.items()}
        progress.weights = refs.pop(WEIGHTS)
        for group, ref in refs.items():
            progress.keep(group.removeprefix(KEPT), ref)
        for number, file in slices.by_number.items():
            self._leave(progress, number, file.arrays)
        return progress

    def _leave(self, progress: Progress, number: int, names: Sequence[str]) -> None:
        """Remove slot states that are in a slice from the progress in memory, and note which slice has them."""
        for name in names:
            group, _, kind, slot = (*name.split(" ", 4), "", "", "")[:4]
            if not (group.startswith(SLOTS) and kind == "slot"):
                continue
            part = group.removeprefix(SLOTS)
            lengths, _ = self.left.setdefault(int(slot), ({}, number))
            if part in progress.states[int(slot)]:
                lengths[part] = len(progress.states[int(slot)].pop(part))


def names_of(checkpoint: Checkpoint) -> list[str]:
    """Return number and path of each weight of a checkpoint, whether its values are in slices or not."""
    slices = checkpoint.slices
    return list(checkpoint.arrays[WEIGHTS]) if slices is None else [name for name, _, _ in slices.sliced[WEIGHTS]]


def _arrays_like(
    listed: Sequence[tuple[str, str, Sequence[int]]], beside: Mapping[str, tensors.Array]
) -> dict[str, np.ndarray[Any, Any]]:
    """Return arrays with these names, types and shapes.

    An array that is in ``beside`` is returned itself. Each other one takes no memory and shows only shape and type.
    """
    return {
        name: beside[name] if name in beside else np.broadcast_to(np.zeros((), tensors.dtype_of(kind)), tuple(shape))
        for name, kind, shape in listed
    }
