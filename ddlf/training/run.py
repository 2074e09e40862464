"""What a training algorithm is handed: a run, whose slots carry tasks and whose weights it commits. Runs on the master.

An algorithm sees tasks and replies, never workers. Who carries a slot, is lost, slow or distrusted; which samples were trained on; what is recorded,
stored, tested and shown: all that is behind the run, for every algorithm alike.
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
from ddlf.training.crew import Crew
from ddlf.training.exchange import Exchange
from ddlf.training.gather import check_weights, gather
from ddlf.training.keeper import Keeper
from ddlf.training.nearby import Nearby
from ddlf.training.parts import parts_of, speeds_in
from ddlf.training.progress import Progress
from ddlf.training.reading import left_out
from ddlf.training.reporting import Reporter
from ddlf.training.roles.metrics import MetricMerge
from ddlf.training.rounds import Elsewhere, Ended, Facts, Round, arrived, end_all
from ddlf.training.slot.task import CONTROL, Reply, Task
from ddlf.training.versions import go_over

STOP_S = 2.0
"""How long a run waits at its end for workers to take STOP: one that is coming back, or is stopped, has nothing that counts any more."""


class Run:
    """One training run, as an algorithm sees it.

    Args:
        facts: What does not change.
        cluster: The cluster whose workers carry slots.
        crew: These workers, as they come and go.
        progress: What the run has come to.
        exchange: Brings tasks to workers and replies back, with what slots leave.
        nearby: Knows which workers have partition files on their disks.
        merge_metrics: Makes one of the metrics of several slots.
        reporter: Gives each record to the app's hooks.
        keeper: Writes checkpoints, if any are wanted.

    Attributes:
        exchange, keeper, nearby, reporter: As they were given.
        stopping: Whether it is to end: nothing that comes now counts any more.
    """

    def __init__(
        self,
        facts: Facts,
        cluster: Cluster,
        crew: Crew,
        progress: Progress,
        exchange: Exchange,
        nearby: Nearby,
        merge_metrics: MetricMerge,
        reporter: Reporter,
        keeper: Keeper | None = None,
    ) -> None:
        self.facts = facts
        self.crew = crew
        self.progress = progress
        self.stopping = False
        self.verdicts: list[str] = []  # on updates since the last commit that were not simply accepted
        self.arrived = 0.0  # when the last update did
        self.began: dict[int, float] = {}  # slot -> when its round did
        self.read: dict[int, dict[str, Weights]] = {}  # slot -> what the algorithm kept when the slot was given weights
        self.tries: dict[int, int] = {}  # slot of asynchronous training -> how often its round was begun
        self._cluster, self.exchange, self.nearby = cluster, exchange, nearby
        self._parts = parts_of(facts.samples, facts.seed, progress.owners, facts.files, facts.shuffle)
        self._merge_metrics = merge_metrics
        self.reporter, self.keeper = reporter, keeper
        self._before: tuple[int, int, int] | None = None  # bytes out and back, and losses, before it of all slots
        self._reporting: asyncio.Task[bool] | None = None
        self._arrivals: Arrivals | None = None
        self.left_out: set[tuple[int, int]] = set()  # versions and numbers of damaged files that were told of

    # -- for algorithms ----------------------------------------------------------------------------------------------

    @property
    def weights(self) -> Weights:
        """The global weights. Arrays in them are never changed in place: they may be on their way to a worker."""
        return self.progress.weights

    @property
    def version(self) -> int:
        """Commits so far."""
        return self.progress.version

    @property
    def merges(self) -> int:
        """Commits so far that brought other weights."""
        return self.progress.merges

    @property
    def slots(self) -> int:
        """K of the round that begins, or began last."""
        return len(self.progress.states)

    @property
    def state(self) -> dict[str, Weights]:
        """What the algorithm keeps between commits, by name. Every checkpoint has it; arrays in it are replaced, never changed in place."""
        return self.progress.state

    async def rounds(self, balance: str = "equal") -> AsyncIterator[Round]:
        """The rounds that are left. Each begins when the one before was committed.

        Args:
            balance: ``"equal"`` partitions, or sizes that follow each slot's measured ``"speed"``.
        """
        progress = self.progress
        progress.begin_sync()
        while progress.round < len(progress.epochs) and not self.stopping:
            number, begin = progress.round, time.perf_counter()
            self._before = (*self._bytes_moved(), self.crew.losses)
            self.crew.begin_round()
            self.grow(number)
            await go_over(self, lambda: progress.round)
            self.began = dict.fromkeys(range(self.slots), begin)
            speeds = speeds_in(progress, number, balance, self.facts)
            parts = await self._parts.of(progress.span(number), self.slots, speeds, self.facts.batch_size)
            control = mean_control([state.get(CONTROL) for state in progress.states])
            tasks = [self.task(slot, number, part, control) for slot, part in enumerate(parts)]
            yield Round(number=number, tasks=tasks, last=number + 1 == len(progress.epochs))

    async def all(self, tasks: Sequence[Task], *, into: Merge | None = None) -> list[Reply]:
        """Have tasks carried, all at once.

        Args:
            tasks: At most one for each slot.
            into: Takes their updates as they come, by their places in ``tasks``; those that do not count are left out of it.

        Returns:
            Replies whose updates count, in the order of the tasks.

        Raises:
            BadUpdate: An update cannot be used (policy ``"stop"``), or none can.
            Ended: The run is to end without them.
        """
        carrying = [asyncio.ensure_future(self.again(task)) for task in tasks]
        try:
            # Everything here happens while the workers compute.
            if self._reporting is not None and await self._reporting:  # it waits for the test of the round before
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
        """The replies of all slots as they come, of those whose updates count; every slot goes on with its next round when its own was looked at.

        Args:
            begin: From the algorithm's state, the global weights and a slot to the weights that this one is to begin its round with.
            bound: Rounds that a slot may be ahead of the slowest one; None for no limit.
            paced: Whether each slot has as many steps in a round as it is fast.
            gate: Whether a slot may begin a round, both from 0; asked again after each reply and ``look_again``.
        """
        self.progress.begin_async()
        self._arrivals = Arrivals(self, begin, bound, paced, gate)
        return self._arrivals.replies()

    @property
    def loops(self) -> Arrivals | None:
        """The slots of ``arrivals``, each in its own round."""
        return self._arrivals

    def is_last(self, reply: Reply) -> bool:
        """Whether no slot has a round left when this reply, of ``arrivals``, is committed."""
        rounds, ends = self.progress.slot_rounds, len(self.progress.epochs)
        following = self.progress.following(reply.slot, reply.task.round + 1)
        return following == ends and all(n == ends for slot, n in enumerate(rounds) if slot != reply.slot)

    async def commit(self, weights: Weights, replies: Sequence[Reply], **shown: float) -> bool:
        """Make these the global weights.

        Args:
            weights: New arrays; ``self.weights`` if nothing was merged.
            replies: What they came of, at least one.
            shown: Numbers by name for the record, beside the metrics of training.

        Returns:
            Whether the run is known to end here.

        Raises:
            BadUpdate: They hold a NaN or an infinity, though no update does; those of before stay.
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
        # As often as all samples were trained on, the validation data is evaluated.
        last = replies[0].task.round
        validate = (self._arrivals or progress).ends_epoch(last)
        there = isinstance(weights, Elsewhere) and any(self.reporter.due(validate=validate, last=progress.is_complete))
        reporting = await self.reporter.report(weights, validate=validate, last=progress.is_complete)
        keeping = self.keeper.keep(progress, self.exchange.states) if self.keeper is not None else None
        if self._arrivals is not None:
            self._arrivals.committed(replies, reporting, keeping, there=there)
            return self.stopping
        self._reporting = reporting
        if keeping is not None:
            await keeping
        if not self.reporter.is_testing:
            self.stopping = await reporting
        return self.stopping

    @property
    def converged(self) -> bool:
        """Whether the app has said so."""
        return self.reporter.converged

    # -- for who starts it ---------------------------------------------------------------------------------------------

    async def finish(self) -> None:
        """Wait for the last test, and end what workers still train."""
        if self._reporting is not None:
            await self._reporting
        if self._arrivals is None or not self.stopping:
            await self.stop_workers()
        if self.converged and not self.progress.is_complete:
            self.crew.emit(Converged(version=self.progress.version, epochs=self.progress.asked))

    async def close(self) -> None:
        """End all that still goes on, however the run has ended."""
        try:
            if self._arrivals is not None:
                await self._arrivals.close()
        finally:
            await self.reporter.close()

    async def keep_last(self, *, again: bool = False) -> None:
        """Fetch what workers still hold of slots, and write what is not written yet, or all of it again."""
        try:
            self.progress.states = await self.exchange.states.all()
        finally:
            try:
                await self.exchange.states.close()
            finally:
                if self.keeper is not None:
                    await self.keeper.last(self.progress, again=again)

    # -- for its parts ---------------------------------------------------------------------------------------------------

    async def part(self, slot: int, number: int) -> Any:
        """A slot's part of the samples in a round, from 0. All slots shuffle alike, so the parts are disjoint and complete."""
        progress = self.progress
        return (await self._parts.of(progress.span(number), progress.slots_in(number), progress.parts_in(number)))[slot]

    def task(self, slot: int, number: int, indices: Any, control: Control | None = None) -> Task:
        """What a slot does in a round, from 0, with its part of the samples, the mean of all controls, and the global weights of now."""
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
            weights=progress.weights,
            version=progress.merges,
            local=str(self.facts.local),
            control=control,
            apart=self.facts.apart,
            before=progress.preceding(slot, number),
            rates=progress.rates,
        )

    async def carry(
        self, slot: int, number: int, part: Any, make: Callable[[], Task], avoid: frozenset[int] = frozenset()
    ) -> Reply:
        """Have a slot's round carried by some worker, by another one if that is lost.

        Args:
            slot: Which, from 0.
            number: Number of its round, from 0.
            part: Its samples.
            make: Makes the task, anew for each worker.
            avoid: Workers that are not to carry it, as long as there is another one.
        """
        work = self.nearby.around(part, partial(self.exchange.send, make))
        reply: Reply = await self.crew.carry(slot, number, work, avoid=avoid, near=self.nearby.of(part))
        self.crew.emit(arrived(reply))
        return reply

    def grow(self, number: int) -> range:
        """Have as many slots as there are workers from a round on, if they may become more; they never become fewer.

        Args:
            number: Number of a round, from 0, that no slot has begun. In the middle of an epoch they do not: samples would be trained on twice.

        Returns:
            The new slots. Each begins with nothing left from before.
        """
        before, workers = self.slots, min(self.crew.size, self.facts.samples)
        if not self.facts.grows or workers <= before or not self.progress.begins_epoch(number):
            return range(0)
        self.progress.add_slots(number, workers)
        self.crew.emit(SlotsChanged(round=number + 1, slots=workers))
        return range(before, workers)

    async def stop_workers(self) -> None:
        """Send STOP: what still trains ends at its next batch. The run does not wait for a worker that does not take it."""
        await self.exchange.stop(self._cluster.workers, STOP_S)

    async def again(self, task: Task, avoid: frozenset[int] = frozenset()) -> Reply:
        """Have a task carried, by others than the given workers."""
        return await self.carry(task.slot, task.round, task.indices, lambda: task, avoid)

    def _note(self, replies: Sequence[Reply]) -> None:
        """Take note of what rounds have left whose updates count."""
        progress = self.progress
        self.exchange.count(replies, whole_round=self._arrivals is None)
        for reply in replies:
            task = reply.task
            progress.ledger.add(task.indices, task.epochs, reply.fed, *left_out(self, reply))
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
        if self._before is not None:  # whatever else moved in this round, too
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
        """Bytes sent and received so far, by all workers."""
        workers = self._cluster.workers
        return sum(worker.bytes_sent for worker in workers), sum(worker.bytes_received for worker in workers)
