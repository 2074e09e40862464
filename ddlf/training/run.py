"""The training run that a strategy's loop works with: ``Run``. Runs on the master.

The loop sends tasks to slots and commits new weights. It sees tasks and replies, never workers. The run does the rest
for every loop alike: it chooses workers, replaces lost, slow or distrusted workers, counts samples, writes records and
checkpoints, evaluates and displays.

With the update policy ``"stop"``, each update is merged when it arrives, and an unusable one ends the run. The other
policies compare all updates of a round. Another worker recomputes a rejected update, and gives the right bits if the
first worker was broken. The update is left out if it is rejected again, or if there is no other worker.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from ddlf.algorithms.merge import Merge
from ddlf.algorithms.partition import sizes_by_speed, smooth_speed
from ddlf.algorithms.reading_order import SHUFFLE, Global, SlotSamples
from ddlf.algorithms.weights import Weights
from ddlf.cluster.cluster import Cluster
from ddlf.cluster.proxy import ProxyWorker
from ddlf.errors import BadUpdate, BudgetSpent, ClusterTooSmall
from ddlf.events import (
    Converged,
    GradientsOverflowed,
    SlotMissed,
    SlotsChanged,
    UpdateArrived,
    Warned,
)
from ddlf.events.record import RoundRecord
from ddlf.privacy.accountant import Cost
from ddlf.training.checkpoints.keeper import Keeper
from ddlf.training.checkpoints.releases import ReleaseAccount
from ddlf.training.crew.crew import Crew, SlotLeftOut, Work
from ddlf.training.crew.recovery import end_all
from ddlf.training.exchanges.carrier import Carrier
from ddlf.training.external_weights import Outside
from ddlf.training.judging import UpdateJudge, as_merged, stays
from ddlf.training.progress import Progress, WeightsRef, shapes
from ddlf.training.reporter import Reporter
from ddlf.training.samples.files import Nearby, left_out, use_newest_version
from ddlf.training.samples.partitions import LEAST_SHARE
from ddlf.training.samples.policy import CommonData
from ddlf.training.slot.task import Reply, Task

STOP_S = 2.0
"""Longest wait for workers to answer STOP at the end of a run. A worker that does not answer holds nothing useful."""


class RunMustEnd(Exception):
    """Error: the run must end, for a reason that appeared during the round. ``Run.all`` raises it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The facts about a run that do not change while it trains.

    Args:
        samples: n, the number of samples in every node's data set.
        names: Paths of the weights.
        trainable: For each weight, whether it is trained; the others are simply averaged.
        batch_size: Samples in a batch of each worker.
        seed: Seed of the partitions and of all random numbers on the workers.
        update_policy: What to do with a suspicious update.
        local: The local rule, which changes the gradients of local training, as text.
        local_weights: Indices of the weights that each slot keeps to itself.
        statistics: Indices of the moving statistics that are recalibrated after each merge.
        files: The data set of partition files, as the master has opened it; None for arrays.
        shuffle: The shuffle rule for rows of partition files, as text.
        grows: Whether workers that join later get their own slots.
        data: The policy of the training data.
    """

    samples: int
    names: list[str]
    trainable: list[bool]
    batch_size: int
    seed: int
    update_policy: str
    local: str
    grows: bool
    local_weights: tuple[int, ...] = ()
    statistics: tuple[int, ...] = ()
    files: Any = None
    shuffle: str = ""
    data: CommonData = field(default_factory=CommonData)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round of training, in which each slot has a task.

    Args:
        number: Number of the round, from 0.
        tasks: The task of each slot, in slot order, with its samples and the current weights. At the end of an epoch
            that is cut into rounds (``worker_steps``), fewer samples than slots may remain; then only the first slots
            have a task.
        last: Whether no further round is planned.
    """

    number: int
    tasks: list[Task]
    last: bool


class SlotLoops(Protocol):
    """The interface of slots that each train in their own round, for strategies without common rounds.

    ``Arrivals`` implements it.

    Attributes:
        paced: Whether faster slots get more steps in a round.
    """

    paced: bool

    def ends_epoch(self, number: int) -> bool:
        """Return whether the merge of a slot's round completes one more epoch over all samples by all slots."""

    def will_end_epoch(self, number: int) -> bool:
        """Return what ``ends_epoch`` will return when a slot's next round is committed.

        Not for slots with different numbers of steps.
        """

    def committed(
        self,
        replies: Sequence[Reply],
        reporting: asyncio.Task[bool],
        keeping: asyncio.Future[None] | None,
        *,
        remote: bool = False,
    ) -> None:
        """Make some slots wait for the checkpoint and the user's hooks, after their updates were merged."""

    def turn(self) -> None:
        """Wake all waiting slots, so that they check again whether they may begin their next round."""

    async def close(self) -> None:
        """Cancel the training of all slots, and wait until it has ended."""


class Run:
    """One training run, as a strategy's loop sees it: the loop sends tasks, gets replies and commits weights.

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
        judge: Judges the updates by the update policy.
        outside: The membership in a training with peers; None without one.
        account: Counts the releases of updates with noise; None without noise.
        cost: Returns the cost of the update that answers a task; None if updates cost nothing.
        stopping: Whether the run is ending. It ignores replies that arrive from now on.
        loops: The slots that train in their own rounds; None in synchronous training.
    """

    def __init__(
        self,
        facts: Facts,
        cluster: Cluster,
        crew: Crew,
        progress: Progress,
        exchange: Carrier,
        nearby: Nearby | None,
        merge_metrics: Callable[[Sequence[Any]], dict[str, float]],
        reporter: Reporter,
        keeper: Keeper | None = None,
    ) -> None:
        self.facts = facts
        self.crew = crew
        self.progress = progress
        self.judge = UpdateJudge(
            facts.update_policy,
            facts.names,
            facts.trainable,
            crew,
            lambda: self.weights,
            lambda sentence: self.verdicts.append(sentence),
        )
        self.stopping = False
        self.verdicts: list[str] = []  # suspicious updates since the last commit
        self.arrived = 0.0  # when the last update arrived
        self.began: dict[int, float] = {}  # slot -> when its round began
        self.read: dict[int, dict[str, Weights]] = {}  # slot -> the loop's state when the slot received its weights
        self.tries: dict[int, int] = {}  # asynchronous slot -> how often its round was started
        self._cluster, self.exchange, self.nearby = cluster, exchange, nearby
        self._partitions = facts.data.partitions(facts.seed, progress.owners, facts.files, facts.shuffle)
        self._merge_metrics = merge_metrics
        self.reporter, self.keeper = reporter, keeper
        self.outside: Outside | None = None
        self.account: ReleaseAccount | None = None
        self.cost: Callable[[Task], Cost | None] = lambda task: None
        self._counting = threading.Lock()
        self._before: tuple[int, int, int] | None = None  # bytes out, bytes back and losses before the round
        self._reporting: asyncio.Task[bool] | None = None
        self.loops: SlotLoops | None = None
        self.reported_files: set[tuple[int, int]] = set()  # (version, number) of the damaged files already reported
        # Slot and worker, from 1, and number of samples of each slot left out since the last commit.
        self.left_out_slots: list[tuple[int, int, int]] = []
        self._missed_rounds: dict[int, tuple[int, str]] = {}  # slot -> the last round, from 0, that it missed, and why

    # -- for loops ---------------------------------------------------------------------------------------------------

    @property
    def weights(self) -> Weights:
        """The global weights. Do not change these arrays in place: they may be on their way to a worker.

        Raises:
            ConfigError: Only workers have them.
        """
        weights = self.progress.weights
        return weights.read() if isinstance(weights, WeightsRef) else weights

    @property
    def version(self) -> int:
        """The number of commits (replacements of the global weights) so far."""
        return self.progress.version

    @property
    def merges(self) -> int:
        """The number of commits so far that changed the weights."""
        return self.progress.merges

    @property
    def slots(self) -> int:
        """K, the number of slots, of the current round or, between two rounds, of the last one."""
        return len(self.progress.states)

    @property
    def state(self) -> dict[str, Weights]:
        """The arrays that the strategy's loop keeps between commits, by name.

        Every checkpoint contains it. Replace its arrays, do not change them in place.
        """
        return self.progress.state

    async def rounds(self, balance: str = "equal") -> AsyncIterator[Round]:
        """Yield the remaining rounds of synchronous training. Each one begins after the commit of the round before.

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
                await use_newest_version(self.facts.files, progress, self.crew.emit, lambda: progress.round)
            self.began = dict.fromkeys(range(self.slots), begin)
            speeds = speeds_in(progress, number, balance, self.facts)
            partitions = await self._partitions.of_round(
                progress.span(number), self.slots, speeds, self.facts.batch_size
            )
            means = self.exchange.states.means_for_tasks(shapes(progress.weights))
            tasks = [self.task(slot, number, partition, means) for slot, partition in enumerate(partitions)]
            yield Round(number=number, tasks=tasks, last=number + 1 == len(progress.epochs))

    async def all(self, tasks: Sequence[Task], *, into: Merge | None = None) -> list[Reply]:
        """Have workers carry out tasks, all at the same time, and return their replies.

        Args:
            tasks: At most one task for each slot.
            into: Receives each accepted update as it arrives, under its place in ``tasks``.

        Returns:
            The replies with accepted updates, in the order of the tasks.

        Raises:
            BadUpdate: An update is unusable and the policy is ``"stop"``, or all updates are unusable.
            Ended: The run ends before the replies arrive.
        """
        carrying = [asyncio.ensure_future(self.carry_task(task)) for task in tasks]
        try:
            await self.report_previous_round()
            return await gather(self, tasks, carrying, into)
        except BaseException:
            await end_all(carrying)
            raise

    def leave_out(self, absence: SlotLeftOut) -> None:
        """Note that the current round of all slots is merged without one, because the worker that has its samples is away."""
        self.facts.data.leave_out(self.progress.ledger, absence.slot, self.progress.round)
        self.report_missed(absence, self.progress.round)

    def report_missed(self, absence: SlotLeftOut, number: int) -> None:
        """Report that the run continues without a slot in its round, numbered from 0, until its worker is back."""
        samples = self.progress.ledger.shares[absence.slot].samples
        self.left_out_slots.append((absence.slot + 1, absence.worker, samples))
        facts = {"round": number + 1, "slot": absence.slot + 1, "worker": absence.worker}
        is_said = self._missed_rounds.get(absence.slot) == (number - 1, absence.reason)
        self._missed_rounds[absence.slot] = number, absence.reason
        self.crew.emit(SlotMissed(**facts, samples=samples, why="" if is_said else absence.reason))

    def end_slot_early(self, slot: int, rounds: range) -> None:
        """End an asynchronous slot before its last rounds, numbered from 0, because its worker stays away."""
        for number in rounds:
            self.facts.data.leave_out(self.progress.ledger, slot, number)
        self.progress.slot_rounds[slot] = rounds.stop
        sentence = f"slot {slot + 1} ends without its last {len(rounds)} of {rounds.stop} rounds: its worker stays away"
        self.crew.emit(Warned(about="data", why=sentence))

    async def report_previous_round(self) -> None:
        """Do what can be done while the workers compute a round: report the previous round, and order the next one.

        Raises:
            Ended: The report of the previous round ends the run.
        """
        if await self.reported():  # wait for the evaluation of the previous round
            raise RunMustEnd
        if self.progress.round + 1 < len(self.progress.epochs):
            await self._partitions.order(self.progress.span(self.progress.round + 1).order)

    def is_last(self, reply: Reply) -> bool:
        """Return whether an asynchronous training is complete after this reply is merged."""
        rounds, ends = self.progress.slot_rounds, len(self.progress.epochs)
        following = self.progress.following(reply.slot, reply.task.round + 1)
        return following == ends and all(n == ends for slot, n in enumerate(rounds) if slot != reply.slot)

    async def commit(self, weights: Weights | WeightsRef, replies: Sequence[Reply], **shown: float) -> bool:
        """Make new weights the global ones, and do what follows from that: records, checkpoint, evaluation and hooks.

        Args:
            weights: The new arrays, or ``self.weights`` if no update was merged; a reference if workers have them.
            replies: The replies that were merged into them, at least one.
            shown: Numbers for the record, by name, in addition to the training metrics.

        Returns:
            Whether the run is already known to end here.

        Raises:
            BadUpdate: The new weights contain NaN or infinity, though no update does. The old weights stay.
        """
        return await self._commit(weights, replies, replies, shown)

    async def commit_void(self, replies: Sequence[Reply]) -> bool:
        """End a round whose updates were dropped, as ``commit`` does. The weights stay, and no sample counts.

        Args:
            replies: The replies of the round, at least one. The caller has noted their slots as left out.
        """
        return await self._commit(self.progress.weights, replies, (), {})

    async def _commit(
        self,
        weights: Weights | WeightsRef,
        replies: Sequence[Reply],
        counted: Sequence[Reply],
        shown: dict[str, float],
    ) -> bool:
        """Do what ``commit`` describes. Only the samples of the ``counted`` replies count; a void round has none."""
        progress = self.progress
        if weights is not progress.weights:
            self.judge.check_weights(weights, replies[0].task.round)
        staleness = progress.merges - min(reply.task.version for reply in replies)
        before = progress.weights
        progress.merges += weights is not before
        progress.weights = weights
        self._note(counted)
        progress.version += 1
        record = self._record(replies, staleness, shown)
        progress.records.append(dataclasses.replace(record, **replies[0].of_shards()))
        self.verdicts, self.left_out_slots = [], []
        if self.outside is not None:
            weights = await self._from_outside(self.outside, weights, counted=weights is not before)
        # Each time all samples were trained on, the validation data is evaluated.
        validate = (self.loops or progress).ends_epoch(replies[0].task.round)
        remote = isinstance(weights, WeightsRef) and any(
            self.reporter.due(validate=validate, last=progress.is_complete)
        )
        reporting = await self.reporter.report(weights, validate=validate, last=progress.is_complete)
        keeping = self.keeper.keep(progress, self.exchange.states) if self.keeper is not None else None
        if self.loops is not None:
            self.loops.committed(replies, reporting, keeping, remote=remote)
            return self.stopping
        self._reporting = reporting
        if keeping is not None:
            await keeping
        if not self.reporter.is_testing:
            self.stopping = await reporting
        return self.stopping

    async def count(self, release: Cost) -> None:
        """Count a release of updates with noise, before it may leave.

        If its members cannot be in another one, the run ends after the next commit.

        Raises:
            Ended: It would exceed the privacy budget, so it must not leave.
            CheckpointError: The disk refuses, so it must not leave.
        """
        if self.account is None:
            return
        await self._count(self.account, release)
        if reason := await asyncio.to_thread(self.account.spent, release):
            self.progress.spent = True
            self.converge(reason)

    async def _count(self, account: ReleaseAccount, release: Cost) -> None:
        def counted() -> None:
            with self._counting:  # the thread of a cancelled call may still count
                account.count(release)
                account.accountant.epsilons()  # the record then has them at once

        try:
            await asyncio.to_thread(counted)
        except BudgetSpent as error:
            self.progress.spent = True
            self.converge(error.message)
            raise RunMustEnd from None

    async def afford(self, tasks: Sequence[Task]) -> None:
        """End the run if the answers to the tasks of a round would exceed the privacy budget.

        Raises:
            Ended: They would. None has left.
        """
        for cost in filter(None, map(self.cost, tasks)):
            if self.account is not None and (reason := await asyncio.to_thread(self.account.spent, cost)):
                self.progress.spent = True
                self.converge(reason)
                raise RunMustEnd

    async def _send(self, make: Callable[[], Task], worker: ProxyWorker, holds: bool) -> Reply:
        """Send a task to a worker, and return the reply. An update that costs something counts before, in each try."""
        task = make()
        if self.account is not None and (cost := self.cost(task)) is not None:
            await self._count(self.account, cost)
        openings = self.crew.openings(worker.id)
        return dataclasses.replace(await self.exchange.send(lambda: task, worker, holds), openings=openings)

    async def _from_outside(
        self, outside: Outside, weights: Weights | WeightsRef, *, counted: bool
    ) -> Weights | WeightsRef:
        """Let peers have the weights of a commit, and take over their sets. Return the global weights then."""
        on_master = None if isinstance(weights, WeightsRef) else weights
        exchanged = await outside.exchanged(on_master)
        if exchanged is not None and exchanged is not on_master:
            self.progress.merges += not counted
            self.progress.weights = weights = exchanged
        if outside.over and not self.converged:
            self.converge(outside.over)
        return weights

    async def reported(self) -> bool:
        """Wait until the app's hooks have received the last commit. Return whether the run ends here."""
        if self._reporting is not None and await self._reporting:
            self.stopping = True
        return self.stopping

    async def go_back(self, earlier: Progress) -> None:
        """Return to an earlier state of this run, because a later one was lost. Its rounds are trained again."""
        self._reporting, self.stopping = None, False
        await self.reporter.close()
        if self.keeper is not None:
            self.keeper.drop()
            await self.keeper.finish()
        self.progress.go_back(earlier)
        await self.reporter.go_back(earlier)

    def converge(self, reason: str) -> None:
        """Note that the loop ends the training before all its epochs are done, and why, as a sentence."""
        self.reporter.converged, self.progress.reason = True, reason

    @property
    def converged(self) -> bool:
        """Whether the app's ``is_convergent`` or another rule has ended the training."""
        return self.reporter.converged

    # -- for the code that starts a run ------------------------------------------------------------------------------

    async def finish(self) -> None:
        """Wait for the last evaluation, and stop the training that still runs on workers."""
        if self._reporting is not None:
            await self._reporting
        if self.loops is None or not self.stopping:
            await self.stop_workers()
        if self.converged and not self.progress.is_complete:
            progress, unit = self.progress, "rounds" if self.loops is None else "updates"
            self.crew.emit(
                Converged(version=progress.version, epochs=progress.planned_epochs, why=progress.reason, unit=unit)
            )

    async def close(self) -> None:
        """Stop everything that still runs, whether the run succeeded or failed."""
        try:
            if self.loops is not None:
                await self.loops.close()
        finally:
            try:
                await self.reporter.close()
            finally:
                if self.outside is not None:
                    await self.outside.close()

    async def keep_last(self, *, again: bool = False) -> None:
        """Fetch the slot states that only workers have, and write the last checkpoint.

        ``again`` writes it even if the last merge has one.
        """
        try:
            self.progress.states = await self.exchange.states.fetch_all()
        finally:
            try:
                await self.exchange.states.close()
            finally:
                if self.keeper is not None:
                    await self.keeper.last(self.progress, again=again)

    # -- for the run's own parts -------------------------------------------------------------------------------------

    async def partition(self, slot: int, number: int) -> SlotSamples:
        """Return the samples that a slot trains on in a round, numbered from 0.

        All slots shuffle alike, so the partitions are disjoint and complete.
        """
        progress = self.progress
        return (
            await self._partitions.of_round(progress.span(number), progress.slots_in(number), progress.parts_in(number))
        )[slot]

    def task(self, slot: int, number: int, indices: SlotSamples, means: Mapping[str, Any] | None = None) -> Task:
        """Return the task of a slot for a round, numbered from 0, with the current global weights.

        Args:
            slot: Number of the slot, from 0.
            number: Number of the round, from 0.
            indices: The slot's partition.
            means: Fields of the task with means over all slots, by name.
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
            apart=self.facts.local_weights,
            before=progress.preceding(slot, number),
            rates=progress.rates,
            **(means or {}),
        )

    async def carry(
        self,
        slot: int,
        number: int,
        partition: SlotSamples,
        make: Callable[[], Task],
        avoid: frozenset[int] = frozenset(),
    ) -> Reply:
        """Have a worker train a slot for one round. If the worker is lost, another one takes over.

        Args:
            slot: Number of the slot, from 0.
            number: Number of the slot's round, from 0.
            partition: The slot's samples.
            make: Makes a new task for each worker that tries.
            avoid: Workers that may train it only if there are no others.
        """
        reply: Reply = await self.carry_near_data(slot, number, partition, partial(self._send, make), avoid=avoid)
        self.crew.emit(arrived(reply))
        if reply.overflow:
            steps, scale = reply.overflow
            self.crew.emit(
                GradientsOverflowed(
                    round=reply.task.round + 1, slot=reply.slot + 1, worker=reply.worker, steps=int(steps), scale=scale
                )
            )
        return reply

    async def carry_near_data(
        self,
        slot: int,
        number: int,
        partition: SlotSamples,
        work: Work,
        *,
        avoid: frozenset[int] = frozenset(),
        is_round: bool = True,
    ) -> Any:
        """Have a worker do some work on a slot's samples, if possible a worker that has the samples on its disks.

        Args:
            slot: Number of the slot, from 0.
            number: Number of the slot's round, from 0.
            partition: The slot's samples.
            work: Function that does the work on a given worker.
            avoid: Workers that may do it only if there are no others.
            is_round: Whether the work is the slot's round, so that it leaves the slot state on its worker.
        """
        if self.nearby is None:
            return await self.crew.carry(slot, number, work, avoid=avoid, is_round=is_round)
        work, local_bytes = self.nearby.after_files(partition, work), self.nearby.bytes_on_disks(partition)
        return await self.crew.carry(slot, number, work, avoid=avoid, is_round=is_round, local_bytes=local_bytes)

    async def use_newest_files(self, first: Callable[[], int]) -> None:
        """Switch to the newest version of the partition files, at the beginning of an epoch, as ``go_over`` does."""
        if self.facts.files is not None:
            await use_newest_version(self.facts.files, self.progress, self.crew.emit, first)

    def grow(self, number: int) -> range:
        """Add a slot for each worker that exceeds the number of slots, if the run may grow.

        The number of slots never decreases.

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
        """Tell workers that still train to stop after their current batch.

        The run does not wait for a worker that does not answer.
        """
        await self.exchange.stop(self._cluster.workers, STOP_S)

    async def carry_task(self, task: Task, avoid: frozenset[int] = frozenset()) -> Reply:
        """Have a task carried out, for the first time or after its update was rejected.

        Args:
            task: The task.
            avoid: Workers that may carry it only if there are no others.
        """
        return await self.carry(task.slot, task.round, task.indices, lambda: task, avoid)

    def _note(self, replies: Sequence[Reply]) -> None:
        """Store what the replies say about their slots: states, sample counts and speeds.

        Only slots whose updates count are given.
        """
        progress = self.progress
        self.exchange.count(replies, whole_round=self.loops is None)
        for reply in replies:
            task = reply.task
            skipped = left_out(reply, self.facts.files, self.reported_files, self.crew.emit) if reply.skipped else ()
            self.facts.data.count(progress.ledger, reply, *skipped)
            if self.loops is not None:
                progress.slot_rounds[task.slot] = progress.following(task.slot, task.round + 1)
            if self.loops is None or (self.loops.paced and task.round > 0):
                speed = reply.samples * task.epochs / max(reply.compute_s, 1e-9)
                progress.speeds[task.slot] = smooth_speed(progress.speeds[task.slot], speed)
        progress.round += self.loops is None

    def _record(self, replies: Sequence[Reply], staleness: int, shown: dict[str, float]) -> RoundRecord:
        end = time.perf_counter()
        first = replies[0].task
        slowest = max(reply.elapsed_s for reply in replies)
        bytes_out, bytes_back = sum(r.bytes_out for r in replies), sum(r.bytes_back for r in replies)
        recomputed = sum(self.tries.get(reply.slot, 1) - 1 for reply in replies)
        if self._before is not None:  # counts all traffic of the round, such as lost attempts and backups
            moved = *self._bytes_moved(), self.crew.losses
            bytes_out, bytes_back, recomputed = (now - before for now, before in zip(moved, self._before, strict=True))
        metrics = self._merge_metrics([(reply.metrics, reply.samples, reply.counted) for reply in replies])
        epsilons = {} if self.account is None else self.account.accountant.epsilons()
        if epsilons:
            metrics = {**metrics, "epsilon": max(epsilons.values())}
        return RoundRecord(
            round=first.round + 1,
            rounds=len(self.progress.epochs),
            slot=None if self.loops is None else first.slot + 1,
            version=self.version,
            staleness=staleness,
            base=None if self.loops is None else first.version,
            rates=() if self.loops is None else tuple(map(tuple, first.rates)),
            epochs=first.epochs,
            samples=sum(reply.samples for reply in replies),
            seconds=end - min(self.began[reply.slot] for reply in replies),
            compute_s=max(reply.compute_s for reply in replies),
            transfer_s=max(reply.elapsed_s - reply.compute_s for reply in replies),
            merge_s=end - self.arrived,
            wait_s=sum(slowest - reply.elapsed_s for reply in replies) / len(replies),
            wait_data_s=max(reply.wait_data_s for reply in replies),
            bytes_out=bytes_out,
            bytes_back=bytes_back,
            error=sum(reply.codec_error for reply in replies) / len(replies),
            slots=self.progress.slots_in(first.round),
            workers=tuple(reply.worker for reply in replies),
            verdicts=tuple(dict.fromkeys(self.verdicts)),
            without=tuple(sorted(self.left_out_slots)),
            recomputed=recomputed,
            skipped=tuple(sorted((file + 1, samples) for reply in replies for file, samples in reply.skipped)),
            metrics=metrics | shown,
            epsilons=epsilons,
        )

    def _bytes_moved(self) -> tuple[int, int]:
        """Return the bytes sent to and received from all workers so far."""
        workers = self._cluster.workers
        return sum(worker.bytes_sent for worker in workers), sum(worker.bytes_received for worker in workers)


def arrived(reply: Reply) -> UpdateArrived:
    """Return the event that reports the arrival of a reply."""
    return UpdateArrived(
        round=reply.task.round + 1,
        slot=reply.slot + 1,
        worker=reply.worker,
        samples=reply.samples,
        epochs=reply.task.epochs,
        compute_s=reply.compute_s,
        transfer_s=reply.elapsed_s - reply.compute_s,
        bytes_out=reply.bytes_out,
        bytes_back=reply.bytes_back,
        files=tuple(file + 1 for file in reply.files),
        swapped=reply.swapped,
    )


def speeds_in(progress: Progress, number: int, balance: str, facts: Facts) -> Sequence[float | None]:
    """Return the numbers that determine how a round's samples are divided among slots: their speeds, or fixed sizes.
    When an epoch of files begins, fix its sizes in ``progress``.

    An epoch of files is shared out as a whole. So if rounds are parts of it, they use the speeds that were measured
    before the epoch began.

    Args:
        progress: Has the speeds; receives the sizes when an epoch begins.
        number: Number of the round, from 0.
        balance: ``"equal"`` or ``"speed"``.
        facts: The facts of the run.

    Returns:
        One number for each slot; empty if parts are equal.
    """
    by_speed = balance == "speed"
    whole = facts.files is None or isinstance(SHUFFLE.read(facts.shuffle), Global)
    if whole or not (progress.together or progress.parts_from):
        return progress.speeds if by_speed else ()
    if progress.begins_epoch(number):
        speeds, slots = [speed for speed in progress.speeds if speed is not None], len(progress.speeds)
        parts: tuple[int, ...] = ()
        if by_speed and len(speeds) == slots:
            parts = tuple(sizes_by_speed(facts.samples, speeds, max(facts.samples // slots // LEAST_SHARE, 1)))
        if parts != progress.parts_in(number):
            progress.parts_from.append((number, parts))
    return progress.parts_in(number)


async def gather(
    run: Run, tasks: Sequence[Task], carrying: Sequence[asyncio.Task[Reply]], into: Merge | None = None
) -> list[Reply]:
    """Wait for all updates of a round, check them by the update policy, and return the replies that count.

    Args:
        run: The run.
        tasks: The tasks of the round.
        carrying: For each task, the asyncio task that returns its reply.
        into: Receives the accepted updates, under the places of their tasks.

    Returns:
        The replies with accepted updates, in the order of the tasks.

    Raises:
        BadUpdate: An update is unusable and the policy is ``"stop"``, or all updates are unusable.
        ClusterTooSmall: The workers of all slots are away, and the slots belong to them.
    """
    if run.judge.policy == "stop":
        return await _gather_on_arrival(run, carrying, into)
    return await _gather_compared(run, tasks, carrying, into)


async def _gather_on_arrival(run: Run, carrying: Sequence[asyncio.Task[Reply]], into: Merge | None) -> list[Reply]:
    positions = {carried: index for index, carried in enumerate(carrying)}
    waiting = set(carrying)
    accepted: dict[int, Reply] = {}
    while waiting:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        run.arrived = time.perf_counter()
        for carried in sorted(done, key=positions.__getitem__):
            try:
                accepted[positions[carried]] = reply = carried.result()
            except SlotLeftOut as absence:
                run.leave_out(absence)
                if into is not None:
                    into.leave_out(positions[carried])
                continue
            run.judge.check(reply)
            if into is not None:
                into.add(positions[carried], reply.update, reply.weight, checked=True)
    if not accepted and carrying:
        raise all_workers_away(run)
    return [accepted[index] for index in sorted(accepted)]


async def _gather_compared(
    run: Run, tasks: Sequence[Task], carrying: Sequence[asyncio.Task[Reply]], into: Merge | None
) -> list[Reply]:
    replies: dict[int, Reply] = {}
    for outcome in await asyncio.gather(*map(_reply_or_absence, carrying)):
        if isinstance(outcome, SlotLeftOut):
            run.leave_out(outcome)
        else:
            replies[outcome.slot] = outcome
    if not replies:
        raise all_workers_away(run)
    answered = [task for task in tasks if task.slot in replies]
    refused: dict[int, frozenset[int]] = {}
    judged: dict[int, tuple[Reply, str]] = {}  # slot -> the reply that was judged last, and the verdict
    while True:
        compares = run.exchange.weights_out.compares if any(map(stays, replies.values())) else None
        verdicts = run.judge.compare(replies) if compares is None else await compares(replies)
        retried = []
        for task in answered:
            slot, reply, verdict = task.slot, replies[task.slot], verdicts[task.slot]
            if verdict.action == "accept":
                run.crew.trust(reply.worker)
                continue
            before, action = judged.get(slot, (None, ""))
            judged[slot] = reply, verdict.action
            if before is reply and action == verdict.action:
                continue  # judged again only because other updates were recomputed, with the same verdict
            run.verdicts.append(f"{verdict} (worker {reply.worker})")
            if verdict.action == "clip":
                run.judge.report_clipped(reply, verdict)
            if verdict.action == "reject":
                refused[slot] = refused.get(slot, frozenset()) | {reply.worker}
                run.crew.distrust(slot, reply.worker, str(verdict))
                if len(refused[slot]) == 1 and run.crew.others_than(refused[slot]):
                    retried.append(task)
        if not retried:
            break
        computed = await asyncio.gather(*(run.carry_task(task, refused[task.slot]) for task in retried))
        replies.update({reply.slot: reply for reply in computed})
    run.arrived = time.perf_counter()
    accepted = []
    for index, task in enumerate(tasks):
        if task.slot in replies and verdicts[task.slot].action != "reject":
            accepted.append(as_merged(replies[task.slot], verdicts[task.slot]))
            if into is not None:
                into.add(index, accepted[-1].update, accepted[-1].weight, checked=True)
        elif into is not None:
            into.leave_out(index)
    if not accepted:
        raise BadUpdate("no update of this round can be used: " + "; ".join(run.verdicts))
    return accepted


async def _reply_or_absence(carrying: asyncio.Task[Reply]) -> Reply | SlotLeftOut:
    try:
        return await carrying
    except SlotLeftOut as absence:
        return absence


def all_workers_away(run: Run) -> ClusterTooSmall:
    """Return the error for a run whose slots all belong to workers that are away."""
    slots = ", ".join(str(slot) for slot, *_ in run.left_out_slots)
    return ClusterTooSmall(
        f"the workers of all slots ({slots}) are away, and nobody else has their data",
        hint="start them again, and continue with resume",
    )
