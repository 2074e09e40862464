"""Writes checkpoints while training continues. Runs on the master."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from ddlf.errors import CheckpointError, LeaseError
from ddlf.events import CheckpointFailed, CheckpointWritten, Event, Warned
from ddlf.events.phases import Phase
from ddlf.events.record import RoundRecord
from ddlf.training.checkpoints.checkpoint import CheckpointFolder
from ddlf.training.checkpoints.contents import Checkpoint
from ddlf.training.checkpoints.progress_layout import with_states
from ddlf.training.checkpoints.slices import Slices
from ddlf.training.exchanges.states import SlotStates
from ddlf.training.progress import Progress, is_unmade
from ddlf.training.slot.task import SlotState

RECENT = 256
"""Number of recent records that are checked for a late evaluation; at most as many as slots can be late."""
MAX_FAILURES = 3
"""The run ends after this many checkpoints in a row failed: it must not train for days without a checkpoint."""


class Keeper:
    """Takes a snapshot of the training when a checkpoint is due, and writes it on a thread.

    Args:
        folder: The folder of checkpoints, opened for writing.
        every: Write after this number of rounds (updates, in asynchronous training).
        names: Paths of the weights.
        emit: Receives an event for each checkpoint, whether its write succeeds or fails.
    """

    def __init__(
        self, folder: CheckpointFolder, every: int, names: Sequence[str], emit: Callable[[Event], None]
    ) -> None:
        self._folder = folder
        self._every = every
        self._names = names
        self._emit = emit
        self._writing: asyncio.Future[Any] | None = None
        self._one_at_a_time = asyncio.Lock()
        self._saved: tuple[int, bool] | None = None  # version of the last checkpoint, and whether it had converged
        self._reached = 0  # rounds complete at that time
        self._written = 0  # records in the folder's journal
        self._recent: dict[int, RoundRecord] = {}  # place -> record as written, for the recent ones
        self._failures = 0
        self._begun: Slices | None = None
        self._warned: set[int] = set()  # workers already reported as unable to see the folder

    def begin(self, version: int, training: str) -> Slices:
        """Begin the checkpoint after a number of merges. Workers write its slices, and ``keep`` completes it.

        Raises:
            CheckpointError: It cannot be created.
        """
        self.drop()
        began = time.perf_counter()
        self._begun = self._folder.begin(version, training)
        self._begun.began = began
        return self._begun

    async def sliced(
        self,
        progress: Progress,
        work: Callable[[Slices], Awaitable[None]],
    ) -> Slices | None:
        """Write the slices (files with parts of the model) of the checkpoint that belongs to the next commit.

        Args:
            progress: The training's progress before this commit.
            work: Writes the slices.

        Returns:
            The slices. None if they cannot be written: then the master writes the checkpoint, or reports the obstacle.
        """
        try:
            slices = await asyncio.to_thread(self.begin, progress.version + 1, progress.training)
            await work(slices)
        except CheckpointError:
            self.drop()
            return None
        except BaseException:
            self.drop()
            raise
        self._warn(slices)
        return slices

    def _warn(self, slices: Slices) -> None:
        """Warn once for each worker whose slices the master must write, with the reason."""
        new = {worker: reason for worker, reason in sorted(slices.through.items()) if worker not in self._warned}
        self._warned.update(new)
        sentences = [
            f"worker {worker} could not write its slice of a checkpoint, which the master has written: {reason}"
            for worker, reason in new.items()
            if reason
        ]
        if unseen := [str(worker) for worker, reason in new.items() if not reason]:
            blind_workers = f"worker{'s' * (len(unseen) > 1)} {', '.join(unseen)} do{'es' * (len(unseen) == 1)} not see the folder of the checkpoints"
            sentences.append(
                f"{blind_workers}, {slices.root}, so its slices of checkpoints go through the master; "
                "a network disk at the same path everywhere avoids this"
            )
        for sentence in sentences:
            self._emit(Warned(about="checkpoint", why=sentence))

    def drop(self) -> None:
        """Remove the files of a checkpoint that was begun but not completed."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.drop()

    def is_due(self, version: int) -> bool:
        """Return whether a checkpoint is written after this number of merges."""
        return version % self._every == 0

    def keep(self, progress: Progress, states: SlotStates) -> asyncio.Future[None] | None:
        """Take a snapshot if a checkpoint is due. It is written after the previous one.

        Returns:
            A future that ends when the turn of this checkpoint has come; None if no checkpoint is due. It raises
            LeaseError if another master took the job over, and CheckpointError if the third checkpoint in a row failed.
        """
        if not self.is_due(progress.version):
            return None
        if self._begun is not None and self._begun.identity.round == progress.version:
            slices, self._begun = self._begun, None
            return asyncio.ensure_future(self._keep(progress, slices=slices))
        return asyncio.ensure_future(self._keep(progress, states.fetch_all()))

    async def last(self, progress: Progress, *, again: bool = False) -> None:
        """Write everything that is not written yet, at the end of training, and let other processes use the folder.

        Args:
            progress: The current progress.
            again: Whether the weights have changed since the last merge.
        """
        self.drop()
        try:
            await self.finish()
            if is_unmade(progress.weights):  # the run has ended before its first round
                return
            if again or self._saved != (progress.version, progress.converged) or self._changed(progress.records):
                await self._keep(progress)
                await self.finish()
        finally:
            await asyncio.to_thread(self._folder.close)

    async def close(self) -> None:
        """Release the folder before the first checkpoint."""
        await asyncio.to_thread(self._folder.close)

    def resumed_at(self, version: int, converged: bool, records: int) -> None:
        """Note what the folder already contains when a run resumes: the state after some merges, and some records."""
        self._saved = version, converged
        self._written = records

    def _keep(
        self,
        progress: Progress,
        states: asyncio.Future[list[SlotState]] | None = None,
        slices: Slices | None = None,
    ) -> Coroutine[Any, Any, None]:
        # Take all of the state now: other slots of asynchronous training continue while this one waits for its turn.
        return self._save_in_turn(
            progress.to_checkpoint(self._names, slices),
            (progress.version, progress.converged),
            progress.reached,
            states,
            progress.records,
            len(progress.records),
        )

    async def _save_in_turn(
        self,
        checkpoint: Checkpoint,
        saved: tuple[int, bool],
        reached: int,
        states: asyncio.Future[list[SlotState]] | None,
        records: list[RoundRecord],
        count: int,
    ) -> None:
        async with self._one_at_a_time:
            await self.finish()
            self._saved, self._reached = saved, reached
            self._writing = asyncio.ensure_future(self._write(checkpoint, states, records, count))

    async def _write(
        self,
        checkpoint: Checkpoint,
        states: asyncio.Future[list[SlotState]] | None,
        records: list[RoundRecord],
        count: int,
    ) -> None:
        slices = checkpoint.slices
        begin = time.perf_counter() if slices is None else slices.began

        def save(checkpoint: Checkpoint) -> None:
            new = {**self._changed(records), **dict(enumerate(records[self._written : count], self._written))}
            self._folder.save(dataclasses.replace(checkpoint, records=list(new.values())))
            self._written = count
            self._recent = dict(sorted({**self._recent, **new}.items())[-RECENT:])

        with Phase(self._emit, "writing"):
            if states is not None:
                checkpoint = with_states(checkpoint, await states)
            try:
                await asyncio.to_thread(save, checkpoint)
            except Exception:
                if slices is not None:
                    slices.drop()
                raise
        took = time.perf_counter() - begin
        self._emit(
            CheckpointWritten(
                version=checkpoint.round,
                path=str(self._folder.path),
                seconds=took,
                slices=0 if slices is None else len(slices.files),
                through=() if slices is None else tuple(sorted(slices.through)),
            )
        )

    def _changed(self, records: list[RoundRecord]) -> dict[int, RoundRecord]:
        return {index: records[index] for index, before in self._recent.items() if records[index] is not before}

    async def finish(self) -> None:
        """Wait until the checkpoint that the thread is writing is on the disk."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            self._writing = writing
            raise
        except LeaseError:
            raise
        except CheckpointError as error:
            self._saved = None
            self._failures += 1
            if self._failures >= MAX_FAILURES:
                raise
            newest = self._folder.newest_round()
            self._emit(CheckpointFailed(round=self._reached, why=str(error), newest=newest))
        else:
            self._failures = 0
