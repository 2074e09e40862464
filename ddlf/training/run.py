"""The training run that a strategy's loop works with: ``Run``. Runs on the master.

The loop sends tasks to slots and commits new weights. It sees tasks and replies, never workers. The run does the rest
for every loop alike: it chooses workers, replaces lost, slow or distrusted ones, counts samples, records, stores,
evaluates and displays.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

from ddlf.algorithms.local_rules import Control, mean_control
from ddlf.algorithms.merge import Merge
from ddlf.algorithms.partition import smooth_speed
from ddlf.algorithms.weights import Weights
from ddlf.cluster.cluster import Cluster
from ddlf.events import Converged, SlotsChanged
from ddlf.events.record import RoundRecord
from ddlf.training.arrivals import Arrivals, Begin, Gate, always, global_weights
from ddlf.training.crew import Crew, Work
from ddlf.training.exchanges.carrier import Carrier
from ddlf.training.gather import check_weights, gather
from ddlf.training.keeper import Keeper
from ddlf.training.nearby import Nearby
from ddlf.training.parts import parts_of, speeds_in
from ddlf.training.progress import Progress
from ddlf.training.reading import left_out
from ddlf.training.reporting import Reporter
from ddlf.training.roles.metrics import MetricMerge
from ddlf.training.rounds import Ended, Facts, Round, arrived, end_all
from ddlf.training.slot.task import CONTROL, Reply, Task
from ddlf.training.versions import go_over
from ddlf.training.weights_ref import WeightsRef, local, shapes

STOP_S = 2.0
"""Longest wait for workers to answer STOP at the end of a run. A worker that does not answer holds nothing useful."""


class Run:
    """One training run, as a strategy's loop sees it.

    Args:
        facts: The facts that do not change during the run.
        cluster: The cluster whose workers carry slots.
        crew: The workers of the run, which may come and go.
        progress: The state of the training so far.
        exchange: Sends tasks to workers, and brings back replies and slot states.
        nearby: Knows which workers have partition files on their disks; None if all workers can read all data.
        merge_metrics: Merges the metrics of several slots.
        reporter: Passes each record to the app's hooks.
        keeper: Writes checkpoints; None writes none.

    Attributes:
        exchange, keeper, nearby, reporter: The arguments of these names.
        stopping: Whether the run is ending. It ignores replies that arrive from now on.
    """

    def __init__(
        self,
        facts: Facts,
        cluster: Cluster,
        crew: Crew,
        progress: Progress,
        exchange: Carrier,
        nearby: Nearby | None,
        merge_metrics: MetricMerge,
        reporter: Reporter,
        keeper: Keeper | None = None,
    ) -> None:
        self.facts = facts
        self.crew = crew
        self.progress = progress
        self.stopping = False
        self.verdicts: list[str] = []  # suspicious updates since the last commit
        self.arrived = 0.0  # when the last update arrived
        self.began: dict[int, float] = {}  # slot -> when its round began
        self.read: dict[int, dict[str, Weights]] = {}  # slot -> the loop's state when the slot received its weights
        self.tries: dict[int, int] = {}  # asynchronous slot -> how often its round was started
        self._cluster, self.exchange, self.nearby = cluster, exchange, nearby
        self._parts = parts_of(facts.samples, facts.seed, progress.owners, facts.files, facts.shuffle)
        self._merge_metrics = merge_metrics
        self.reporter, self.keeper = reporter, keeper
        self._before: tuple[int, int, int] | None = None  # bytes out, bytes back and losses before the round
        self._reporting: asyncio.Task[bool] | None = None
        self._arrivals: Arrivals | None = None
        self.left_out: set[tuple[int, int]] = set()  # (version, number) of the damaged files already reported

    # -- for loops ---------------------------------------------------------------------------------------------------

    @property
    def weights(self) -> Weights:
        """The global weights. Do not change these arrays in place: they may be on their way to a worker.

        Raises:
            ConfigError: Only workers have them.
        """
        return local(self.progress.weights)

    @property
    def version(self) -> int:
        """The number of commits so far."""
        return self.progress.version

    @property
    def merges(self) -> int:
        """The number of commits so far that changed the weights."""
        return self.progress.merges

    @property
    def slots(self) -> int:
        """K of the current or, between two rounds, the last round."""
        return len(self.progress.states)

    @property
    def state(self) -> dict[str, Weights]:
        """The arrays that the loop keeps between commits, by name.

        Every checkpoint contains it. Replace its arrays, do not change them in place.
        """
        return self.progress.state

    async def rounds(self, balance: str = "equal") -> AsyncIterator[Round]:
        """Yield the remaining rounds. Each round begins when the one before is committed.

        Args:
            balance: ``"equal"`` partitions, or partitions in proportion to each slot's measured ``"speed"``.
        """
        progress = self.progress
        progress.begin_sync()
        while progress.round < len(progress.epochs) and not self.stopping:
            number, begin = progress.round, time.perf_counter()
            self._before = (*self._bytes_moved(), self.crew.losses)
            self.crew.begin_round()
            self.grow(number)
            if self.facts.files is not None:
                await go_over(self, lambda: progress.round)
            self.began = dict.fromkeys(range(self.slots), begin)
            speeds = speeds_in(progress, number, balance, self.facts)
            parts = await self._parts.of(progress.span(number), self.slots, speeds, self.facts.batch_size)
            control = None
            if CONTROL in self.exchange.states.keep:
                control = mean_control([state.get(CONTROL) for state in progress.states])
            tasks = [self.task(slot, number, part, control) for slot, part in enumerate(parts)]
            yield Round(number=number, tasks=tasks, last=number + 1 == len(progress.epochs))

    async def all(self, tasks: Sequence[Task], *, into: Merge | None = None) -> list[Reply]:
        """Have workers carry tasks, all at the same time.

        Args:
            tasks: At most one task for each slot.
            into: Receives each accepted update as it arrives, under its place in ``tasks``.

        Returns:
            The replies with accepted updates, in the order of the tasks.

        Raises:
            BadUpdate: An update is unusable and the policy is ``"stop"``, or all updates are unusable.
            Ended: The run ends before the replies arrive.
        """
        carrying = [asyncio.ensure_future(self.again(task)) for task in tasks]
        try:
            # Everything here happens while the workers compute.
            if self._reporting is not None and await self._reporting:  # waits for the evaluation of the round before
                self.stopping = True
                raise Ended
            if self.progress.round + 1 < len(self.progress.epochs):
                await self._parts.order(self.progress.span(self.progress.round + 1).order)
            return await gather(self, tasks, carrying, self.again, into)
        except BaseException:
            await end_all(carrying)
            raise

    def arrivals(
        self,
        begin: Begin = global_weights,
        bound: int | None = None,
        *,
        paced: bool = False,
        gate: Gate = always,
    ) -> AsyncIterator[Reply]:
        """Yield the replies of all slots with accepted updates, in the order of arrival.

        Every slot begins its next round as soon as the loop has handled its reply.

        Args:
            begin: Computes a slot's initial weights for a round from the loop's state, the global weights and the slot.
            bound: Rounds that a slot may be ahead of the slowest one; None for no limit.
            paced: Whether faster slots get more steps in a round.
            gate: Whether a slot may begin a round, both numbered from 0. The run calls it again after each reply and
                after ``look_again``.
        """
        self.progress.begin_async()
        self._arrivals = Arrivals(self, begin, bound, paced, gate)
        return self._arrivals.replies()

    @property
    def loops(self) -> Arrivals | None:
        """The slots of ``arrivals``, each in its own round; None before ``arrivals`` was called."""
        return self._arrivals

    def is_last(self, reply: Reply) -> bool:
        """Return whether no slot has a remaining round after the commit of this reply of ``arrivals``."""
        rounds, ends = self.progress.slot_rounds, len(self.progress.epochs)
        following = self.progress.following(reply.slot, reply.task.round + 1)
        return following == ends and all(n == ends for slot, n in enumerate(rounds) if slot != reply.slot)

    async def commit(self, weights: Weights | WeightsRef, replies: Sequence[Reply], **shown: float) -> bool:
        """Replace the global weights.

        Args:
            weights: The new arrays, or ``self.weights`` if no update was merged; a reference if workers have them.
            replies: The replies that were merged into them, at least one.
            shown: Numbers for the record, by name, in addition to the training metrics.

        Returns:
            Whether the run is already known to end here.

        Raises:
            BadUpdate: The new weights contain NaN or infinity, though no update does. The old weights stay.
        """
        progress = self.progress
        check_weights(self, weights, replies)
        staleness = progress.merges - min(reply.task.version for reply in replies)
        progress.merges += weights is not progress.weights
        progress.weights = weights
        self._note(replies)
        progress.version += 1
        record = self._record(replies, staleness, shown)
        progress.records.append(dataclasses.replace(record, **replies[0].of_shards()))
        self.verdicts = []
        # Each time all samples were trained on, the validation data is evaluated.
        last = replies[0].task.round
        validate = (self._arrivals or progress).ends_epoch(last)
        remote = isinstance(weights, WeightsRef) and any(
            self.reporter.due(validate=validate, last=progress.is_complete)
        )
        reporting = await self.reporter.report(weights, validate=validate, last=progress.is_complete)
        keeping = self.keeper.keep(progress, self.exchange.states) if self.keeper is not None else None
        if self._arrivals is not None:
            self._arrivals.committed(replies, reporting, keeping, remote=remote)
            return self.stopping
        self._reporting = reporting
        if keeping is not None:
            await keeping
        if not self.reporter.is_testing:
            self.stopping = await reporting
        return self.stopping

    @property
    def converged(self) -> bool:
        """Whether the app's ``is_convergent`` has ended the training."""
        return self.reporter.converged

    # -- for the code that starts a run ------------------------------------------------------------------------------

    async def finish(self) -> None:
        """Wait for the last evaluation, and stop the training that still runs on workers."""
        if self._reporting is not None:
            await self._reporting
        if self._arrivals is None or not self.stopping:
            await self.stop_workers()
        if self.converged and not self.progress.is_complete:
            self.crew.emit(Converged(version=self.progress.version, epochs=self.progress.asked))

    async def close(self) -> None:
        """Stop everything that still runs, whether the run succeeded or failed."""
        try:
            if self._arrivals is not None:
                await self._arrivals.close()
        finally:
            await self.reporter.close()

    async def keep_last(self, *, again: bool = False) -> None:
        """Fetch the slot states that only workers have, and write the last checkpoint; ``again`` rewrites it."""
        try:
            self.progress.states = await self.exchange.states.all()
        finally:
            try:
                await self.exchange.states.close()
            finally:
                if self.keeper is not None:
                    await self.keeper.last(self.progress, again=again)

    # -- for the run's own parts -------------------------------------------------------------------------------------

    async def part(self, slot: int, number: int) -> Any:
        """Return a slot's part of the samples in a round, numbered from 0.

        All slots shuffle alike, so the parts are disjoint and complete.
        """
        progress = self.progress
        return (await self._parts.of(progress.span(number), progress.slots_in(number), progress.parts_in(number)))[slot]

    def task(self, slot: int, number: int, indices: Any, control: Control | None = None) -> Task:
        """Return a slot's task for a round, numbered from 0, with the current global weights.

        Args:
            slot: The slot, from 0.
            number: The round, from 0.
            indices: The slot's part of the samples.
            control: The mean of all control variates, if the local rule uses them.
        """
        progress = self.progress
        return Task(
            slot=slot,
            round=number,
            slots=progress.tasks_in(number),
            first_epoch=progress.starts[number],
            epochs=progress.epochs[number],
            batch_size=self.facts.batch_size,
            seed=self.facts.seed,
            indices=indices,
            weights=shapes(progress.weights),
            version=progress.merges,
            local=self.facts.local,
            control=control,
            apart=self.facts.apart,
            before=progress.preceding(slot, number),
            rates=progress.rates,
        )

    async def carry(
        self, slot: int, number: int, part: Any, make: Callable[[], Task], avoid: frozenset[int] = frozenset()
    ) -> Reply:
        """Have a worker carry a slot's round; another worker takes over if the first one is lost.

        Args:
            slot: The slot, from 0.
            number: The slot's round, from 0.
            part: The slot's samples.
            make: Makes a new task for each worker that tries.
            avoid: Workers that may carry it only if there are no others.
        """
        reply: Reply = await self.near(slot, number, part, partial(self.exchange.send, make), avoid=avoid)
        self.crew.emit(arrived(reply))
        return reply

    async def near(
        self,
        slot: int,
        number: int,
        part: Any,
        work: Work,
        *,
        avoid: frozenset[int] = frozenset(),
        leaves: bool = True,
    ) -> Any:
        """Have a worker do some work on a slot's samples, if possible a worker that has them on its disks.

        Args:
            slot: The slot, from 0.
            number: The slot's round, from 0.
            part: The slot's samples.
            work: The work.
            avoid: Workers that may do it only if there are no others.
            leaves: Whether the work leaves a slot state on its worker.
        """
        if self.nearby is None:
            return await self.crew.carry(slot, number, work, avoid=avoid, leaves=leaves)
        work, near = self.nearby.around(part, work), self.nearby.of(part)
        return await self.crew.carry(slot, number, work, avoid=avoid, leaves=leaves, near=near)

    def grow(self, number: int) -> range:
        """Add a slot for each additional worker, if the run may grow. The number of slots never decreases.

        Args:
            number: A round, from 0, that no slot has begun. Slots are added only between epochs: within an epoch,
                samples would be trained on twice.

        Returns:
            The new slots. Each begins without a slot state.
        """
        before, workers = self.slots, min(self.crew.size, self.facts.samples)
        if not self.facts.grows or workers <= before or not self.progress.begins_epoch(number):
            return range(0)
        self.progress.add_slots(number, workers)
        self.crew.emit(SlotsChanged(round=number + 1, slots=workers))
        return range(before, workers)

    async def stop_workers(self) -> None:
        """Send STOP: workers that still train stop after their current batch.

        The run does not wait for a worker that does not answer.
        """
        await self.exchange.stop(self._cluster.workers, STOP_S)

    async def again(self, task: Task, avoid: frozenset[int] = frozenset()) -> Reply:
        """Have a task carried again, if possible by a worker outside of ``avoid``."""
        return await self.carry(task.slot, task.round, task.indices, lambda: task, avoid)

    def _note(self, replies: Sequence[Reply]) -> None:
        """Store the slot states, sample counts and speeds of the slots whose updates count."""
        progress = self.progress
        self.exchange.count(replies, whole_round=self._arrivals is None)
        for reply in replies:
            task = reply.task
            skipped = left_out(self, reply) if reply.skipped else ()
            progress.ledger.add(task.indices, task.epochs, reply.fed, *skipped)
            if self._arrivals is not None:
                progress.slot_rounds[task.slot] = progress.following(task.slot, task.round + 1)
            if self._arrivals is None or (self._arrivals.paced and task.round > 0):
                speed = reply.samples * task.epochs / max(reply.compute_s, 1e-9)
                progress.speeds[task.slot] = smooth_speed(progress.speeds[task.slot], speed)
        progress.round += self._arrivals is None

    def _record(self, replies: Sequence[Reply], staleness: int, shown: dict[str, float]) -> RoundRecord:
        end = time.perf_counter()
        first = replies[0].task
        slowest = max(reply.elapsed_s for reply in replies)
        out, back = sum(r.bytes_out for r in replies), sum(r.bytes_back for r in replies)
        recomputed = sum(self.tries.get(reply.slot, 1) - 1 for reply in replies)
        if self._before is not None:  # counts all traffic of the round, such as lost attempts and backups
            moved = *self._bytes_moved(), self.crew.losses
            out, back, recomputed = (now - before for now, before in zip(moved, self._before, strict=True))
        metrics = self._merge_metrics([(reply.metrics, reply.samples, reply.counted) for reply in replies])
        return RoundRecord(
            round=first.round + 1,
            rounds=len(self.progress.epochs),
            slot=None if self._arrivals is None else first.slot + 1,
            version=self.version,
            staleness=staleness,
            base=None if self._arrivals is None else first.version,
            rates=() if self._arrivals is None else tuple(map(tuple, first.rates)),
            epochs=first.epochs,
            samples=sum(reply.samples for reply in replies),
            seconds=end - min(self.began[reply.slot] for reply in replies),
            compute_s=max(reply.compute_s for reply in replies),
            transfer_s=max(reply.elapsed_s - reply.compute_s for reply in replies),
            merge_s=end - self.arrived,
            wait_s=sum(slowest - reply.elapsed_s for reply in replies) / len(replies),
            wait_data_s=max(reply.wait_data_s for reply in replies),
            bytes_out=out,
            bytes_back=back,
            error=sum(reply.codec_error for reply in replies) / len(replies),
            slots=self.progress.slots_in(first.round),
            workers=tuple(reply.worker for reply in replies),
            verdicts=tuple(dict.fromkeys(self.verdicts)),
            recomputed=recomputed,
            skipped=tuple(sorted((file + 1, samples) for reply in replies for file, samples in reply.skipped)),
            metrics=metrics | shown,
        )

    def _bytes_moved(self) -> tuple[int, int]:
        """Return the bytes sent to and received from all workers so far."""
        workers = self._cluster.workers
        return sum(worker.bytes_sent for worker in workers), sum(worker.bytes_received for worker in workers)
