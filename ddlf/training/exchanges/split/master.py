"""Training of a model whose parts are on several workers. Runs on the master.

A round of s parts::

    the crew finds a worker for each part, and replaces a lost one
    when all s workers are there: introduce them, and send each its task, with the part's state if it lacks it
    the workers train the round together; each keeps the state of its part, and another worker keeps a copy

If a worker is lost, all others stop, and the round begins again from its first weights. The samples, the seeds and the
cut are the same, so the result has the same bits. If a part and its copy are lost together, the run goes back to its
last checkpoint. The master has no weights until the end, unless a callback or a hook
reads them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar

from ddlf.algorithms.weights import Weights
from ddlf.cluster.proxy import ProxyWorker
from ddlf.data.app_data import samples_of
from ddlf.errors import BadUpdate, ClusterTooSmall, ConfigError, ConnectError, DDLFError, ProtocolError
from ddlf.events import PartTrained, SlotFinished, SlotMoved, SlotStarted, Warned
from ddlf.training.checkpoints.slices import WEIGHTS
from ddlf.training.context import App
from ddlf.training.crew.recovery import end_all, first_line
from ddlf.training.evaluation.master import to_its_end
from ddlf.training.evaluation.model import EVALUATION_BATCH, fitting
from ddlf.training.evaluation.workers import NAMES, fingerprints, reason_for_master
from ddlf.training.exchanges.members import NOTICED_S, Link, Member, Members
from ddlf.training.exchanges.split.orders import (
    BadTensor,
    EvaluatedPart,
    PartEvaluation,
    PartOrder,
    PartRefused,
    PartSource,
    PartStopped,
    PartTask,
    PartUnreached,
    TrainedPart,
    UnusableWeights,
)
from ddlf.training.exchanges.split.part_states import PartLost, PartStates, Source
from ddlf.training.exchanges.split.plan import Plan
from ddlf.training.exchanges.split.states import SplitStates
from ddlf.training.judging import unusable_weights
from ddlf.training.progress import WeightsRef, shapes
from ddlf.training.run import Run, RunMustEnd
from ddlf.training.slot.task import OPTIMIZER, Reply, Task

NUMBERS = itertools.count(1)
"""Numbers of attempts, in the order in which they begin."""
UNREAD = (
    "the weights of this round are on the workers: with split the master has them after a checkpoint and the last round",
    "read self.model in on_round itself, not in a function that it calls; or set checkpoint_every",
)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The master's training loop for a model in parts.

    Args:
        plan: How the model is cut.
        reads: Whether a hook of the app reads the model after each round.
    """

    plan: Plan
    reads: bool

    def begin(self, run: Run) -> None:
        """Do nothing before training: each part has its optimizer."""

    async def train(self, run: Run) -> None:
        """Train until all rounds are done or the run has to end. Then fetch the parts to the master."""
        group = Group(run, self.plan)
        try:
            with contextlib.suppress(RunMustEnd):
                while (lost := await self._rounds(run, group)) is not None:
                    await group.go_back(lost)
        finally:
            await to_its_end(group.fetch_final())

    async def _rounds(self, run: Run, group: Group) -> PartLost | None:
        """Train the remaining rounds. Return an error if a part and its copy were lost."""
        try:
            async for round in run.rounds():
                if run.reporter.is_testing and await run.reported():  # the parts evaluate the round before first
                    break
                training = asyncio.ensure_future(group.carry(round.tasks))
                try:
                    await run.report_previous_round()
                    replies, idle = await training
                finally:
                    await end_all([training])
                run.arrived = time.perf_counter()
                shown = round.last or self.reads or (run.reporter.shows and run.progress.ends_epoch(round.number))
                metrics = {"idle": idle} if len(self.plan.parts) > 1 else {}
                await group.commit(replies, metrics, shown=shown)
            await run.reported()
        except PartLost as error:
            return error
        return None


Result = TypeVar("Result", TrainedPart, EvaluatedPart)


@dataclass(slots=True)
class _Job(Generic[Result]):
    """Something that all parts do together.

    Args:
        verb: The verb of the replica.
        round: The round that it belongs to, from 0.
        message_of: Returns the second argument of the verb for a part.
        on_progress: Receives reports of the progress from the workers, with the number of the part; None for nobody.
        check: Raises an error if a result does not fit.
        refusal: Why a worker cannot take part, if its data differs.
        lost: The error if the state of a part is lost.
    """

    verb: str
    round: int
    message_of: Callable[[int], dict[str, Any]]
    on_progress: Callable[[int, dict[str, Any]], None] | None = None
    check: Callable[[int, Result, ProxyWorker], None] | None = None
    refusal: str = ""
    lost: PartLost | None = None


@dataclass(frozen=True, slots=True)
class Done(Generic[Result]):
    """The result of a part, and the workers of the part.

    Args:
        result: The result.
        worker: Number of the worker that has done the part.
        holders: The workers that have the state of the part afterwards.
    """

    result: Result
    worker: int
    holders: list[Member]


@dataclass(slots=True)
class Attempt:
    """One attempt of a group at a job.

    Args:
        number: Its number, which it gets when all parts have workers. It is larger than the numbers of all earlier
            attempts of all groups: a worker drops tensors of earlier attempts, and can come from another group.
        workers: The worker of each part, by number.
        results: The results of the parts that have ended.
        ready: Set when all parts have workers.
        ended: Set when the attempt has failed, or all parts have ended.
        links: Pairs of workers that call each other in it, apart from the pairs of the plan.
    """

    number: int = 0
    workers: dict[int, ProxyWorker] = field(default_factory=dict)
    results: dict[int, Done[Any]] = field(default_factory=dict)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    links: set[Link] = field(default_factory=set)


class Group:
    """The workers that together train one copy of a model, each a part of it.

    Args:
        run: The run.
        plan: How the model is cut.
        slot: Number of its first slot, from 0.
        groups: The number of groups in the run.
    """

    def __init__(self, run: Run, plan: Plan, slot: int = 0, groups: int = 1) -> None:
        members = run.exchange.weights_out
        assert isinstance(members, Members)
        self._run, self._plan, self._members = run, plan, members
        self._first = slot * len(plan.parts)  # the crew's number of its first part
        self._groups = groups
        self._attempt = Attempt()
        self._reached = asyncio.Lock()
        self._holders: dict[int, list[Member]] = {}  # part -> workers with its state after the last trained round
        source = Source(run.progress.weights, None)
        self._part_states = PartStates(plan, members, run.facts.names, run.facts.seed, source)
        states = run.exchange.states
        assert isinstance(states, SplitStates)
        self._states = states
        states.bring = self._optimizer
        # The last state that is not only on workers.
        self._snapshot, self._last_source = run.progress.snapshot(), source
        self._waits = False  # whether a warning has said that the run waits for workers
        run.crew.hand_back.append(self._hand_back)

    async def carry(self, tasks: Sequence[Task]) -> tuple[list[Reply], float]:
        """Train a round.

        Args:
            tasks: The task of each replica.

        Returns:
            The reply of each replica; and the mean share of the time that parts have waited for each other.
        """
        run, begin = self._run, time.perf_counter()
        if (source := self._part_states.source) is not None and source.optimizer is None:
            optimizer = run.progress.states[0].get(OPTIMIZER)
            self._part_states.source = self._last_source = Source(source.weights, optimizer)
        tasks = [run.exchange.completed(task) for task in tasks]
        samples = [len(task.indices) for task in tasks]
        messages = [PartTask(replace(task, weights=None, state=None), samples).to_message() for task in tasks]
        replica = self._plan.replica
        job = _Job[TrainedPart](
            "step",
            tasks[0].round,
            lambda part: messages[replica(part)],
            lambda part, report: self._moved(tasks[replica(part)], part, report),
            lambda part, result, worker: self._check(tasks[replica(part)], result, worker),
        )
        parts = await self._run_job(job)
        for part, done in enumerate(parts):
            origin = dict(round=tasks[0].round + 1, slot=self._first + part + 1, worker=done.worker)
            result = done.result
            run.crew.emit(PartTrained(**origin, seconds=float(result.compute_s), idle_s=float(result.idle_s)))
            run.crew.emit(SlotFinished(**origin))
        idle = sum(done.result.idle_s / max(done.result.compute_s, 1e-9) for done in parts) / len(parts)
        count = self._plan.parts_of_replica
        replies = [self._make_reply(task, parts[slot * count :][:count], begin) for slot, task in enumerate(tasks)]
        return replies, idle

    async def commit(self, replies: Sequence[Reply], metrics: dict[str, float], *, shown: bool) -> None:
        """Make the weights after a round, which are on the workers, the weights of the run.

        Args:
            replies: The reply of each replica.
            metrics: Numbers for the record of the round.
            shown: Whether the master needs the weights.
        """
        run, part_states, holders = self._run, self._part_states, self._holders
        keeper, slices = run.keeper, None
        due = keeper is not None and keeper.is_due(run.version + 1)
        if keeper is not None and due and not shown:
            slices = await keeper.sliced(run.progress, partial(part_states.write, holders, part_states.version + 1))
        part_states.accept(holders)
        self._states.changed()
        source: Source | None = None
        if shown or (due and slices is None):
            source = await part_states.fetch()
            weights = source.weights
        else:
            weights = WeightsRef(
                like=shapes(run.progress.weights),
                group=WEIGHTS,
                slices=slices,
                from_workers=partial(self._weights, part_states.version),
                evaluate=partial(self._evaluated, part_states.version),
                unread=UNREAD,
            )
        await run.commit(weights, replies, **metrics)
        changed = run.progress.weights
        if changed is not weights:  # a callback has changed them: the workers receive them from the master
            source = Source(changed, await self._optimizer())
            part_states.begin_with(source)
        if shown or due:
            self._snapshot, self._last_source = run.progress.snapshot(), source or Source(changed, None)

    async def go_back(self, lost: PartLost) -> None:
        """Return to the last checkpoint, or to a later round whose weights the master has.

        Raises:
            PartLost: There is no checkpoint.
        """
        run, reached = self._run, self._run.progress.round
        if run.keeper is None or not self._snapshot.version:
            raise lost
        await run.go_back(self._snapshot)
        self._states.set_back(run.progress.states)
        self._part_states.begin_with(self._last_source)
        reason = f"a part of the model and its copy were lost after round {reached}: the run continues after round {run.progress.round}"
        run.crew.emit(Warned(about="model", why=reason))

    async def fetch_final(self) -> None:
        """Fetch the final state to the master. If it is lost, restore the last state that the master can read."""
        progress = self._run.progress
        try:
            source = await self._part_states.fetch()
            if self._part_states.source is None:
                progress.weights = source.weights
                self._states.give(source.optimizer)
        except DDLFError as error:
            reached = progress.round
            progress.set_back(self._snapshot)
            self._states.set_back(progress.states)
            reason = f"the weights after round {reached} are unavailable ({first_line(error)}): the run returns to round {progress.round}"
            self._run.crew.emit(Warned(about="model", why=reason))
        if isinstance(progress.weights, WeightsRef) and progress.weights.first is None:
            progress.fetch()

    async def _hand_back(self, number: int) -> None:
        crew = self._run.crew
        with contextlib.suppress(DDLFError):  # the worker has ended before; later errors tell that
            await self._part_states.hand_back(lambda worker: worker == number or crew.is_leaving(worker))

    async def _weights(self, version: int) -> Weights:
        """Return the weights of a version.

        Raises:
            ConfigError: The workers have later weights.
        """
        if version != self._part_states.version:
            raise ConfigError(UNREAD[0], hint=UNREAD[1])
        weights = (await self._part_states.fetch()).weights
        return await weights.fetch() if isinstance(weights, WeightsRef) else weights

    async def _optimizer(self) -> Weights | None:
        """Return the variables of the optimizer."""
        return (await self._part_states.fetch()).optimizer

    async def _evaluated(
        self, version: int, app: App, part: str, batch_size: int = EVALUATION_BATCH
    ) -> dict[str, float] | None:
        """Have the parts evaluate the weights of a version. Return None if the master must do it."""
        if version != self._part_states.version:
            return None
        samples, size = samples_of(app, part), fitting(app, part, batch_size)
        refusal, parts = reason_for_master(app, part), list[Done[EvaluatedPart]]()
        if not refusal:
            content = await asyncio.to_thread(fingerprints, app, part)
            message = PartEvaluation(part, size, samples, content).to_message()
            job = _Job[EvaluatedPart]("evaluate", self._run.progress.round, lambda part: message)
            parts, refusal = await self._run_job(job), job.refusal
        if refusal:
            self._run.crew.emit(Warned(about="data", why=f"the master evaluates the {NAMES[part]}: {refusal}"))
            return None
        return _metrics([done.result for done in parts[: self._plan.parts_of_replica]], samples)

    # -- one part -----------------------------------------------------------------------------------------------------

    async def _run_job(self, job: _Job[Result]) -> list[Done[Result]]:
        """Have the workers of all parts do a job. Return the results in the order of the parts; none after a refusal."""
        parts = range(len(self._plan.parts))
        carry, first = self._run.crew.carry, self._first
        works = [carry(first + part, job.round, partial(self._work, part, job), is_round=False) for part in parts]
        results: list[Done[Result] | None] = list(await asyncio.gather(*works))
        if job.lost is not None:
            raise job.lost
        return [done for done in results if done is not None]

    async def _work(self, part: int, job: _Job[Result], worker: ProxyWorker, holds: bool) -> Done[Result] | None:
        """Have a worker do its part of a job, as often as the other parts need it. Return the result.

        Return None if the job has failed or was refused.
        """
        try:
            while not job.refusal and job.lost is None:
                attempt = self._attempt
                attempt.workers[part] = worker
                if len(attempt.workers) == len(self._plan.parts) and not attempt.ready.is_set():
                    attempt.number = next(NUMBERS)
                    attempt.ready.set()
                done = await self._try(attempt, part, job, worker)
                if done is not None:
                    return done
            return None
        except BaseException:
            self._fail(part)
            raise

    async def _try(self, attempt: Attempt, part: int, job: _Job[Result], worker: ProxyWorker) -> Done[Result] | None:
        """Take part in an attempt. Return the result; None if the attempt has failed because of another part."""
        ended = asyncio.ensure_future(attempt.ended.wait())
        work = asyncio.ensure_future(self._do_part(attempt, part, job, worker))
        try:
            await asyncio.wait([ended, work], return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                try:
                    done = work.result()
                except PartLost as error:
                    job.lost = error
                    self._again(attempt)
                    return None
                if isinstance(done, PartUnreached):
                    await self._wait_for_loss(attempt, worker, done)
                    return None
                if isinstance(done, PartRefused):
                    job.refusal = done.reason
                    self._again(attempt)
                    return None
                attempt.results[part] = done
                if len(attempt.results) == len(self._plan.parts):
                    if job.verb == "step":
                        self._holders = {number: other.holders for number, other in attempt.results.items()}
                    self._again(attempt)
                await ended
            return attempt.results.get(part) if len(attempt.results) == len(self._plan.parts) else None
        finally:
            await end_all([ended, work])

    def _again(self, attempt: Attempt) -> None:
        """End an attempt, and begin the next one."""
        self._attempt = Attempt()
        attempt.ended.set()

    async def _do_part(
        self, attempt: Attempt, part: int, job: _Job[Result], worker: ProxyWorker
    ) -> Done[Result] | PartUnreached | PartRefused:
        """Wait for the workers of all parts, have this one do its part, and return its checked result."""
        import keras

        await self._wait_for_workers(attempt, part)
        copy = self._copy_of(attempt, part)
        source, entry = await self._prepare_worker(attempt, part, worker, job.round)
        order = PartOrder(
            part=part,
            plan=self._plan.arguments,
            workers=[attempt.workers[number].id for number in range(len(self._plan.parts))],
            attempt=attempt.number,
            backend=keras.backend.backend(),
            version=self._part_states.version,
            copy=None if copy is None else copy.id,
            source=source,
            entry=entry,
        )
        if job.on_progress is not None:
            slot = self._first + part + 1
            self._run.crew.emit(SlotStarted(round=job.round + 1, slot=slot, worker=worker.id))
        hear = None if job.on_progress is None else partial(job.on_progress, part)
        arguments = order.to_message(), job.message_of(part)
        result = await worker.call(self._members.role, job.verb, *arguments, hear=hear)
        match result:
            case PartUnreached() | PartRefused():
                return result
            case BadTensor(message, hint):
                raise BadUpdate(message, hint=hint)
            case UnusableWeights(fault):
                raise unusable_weights(fault, job.round)
            case PartStopped():
                raise ConnectError("its training was stopped", worker=worker.name)
        if job.check is not None:
            job.check(part, result, worker)
        holders = [self._members.member(proxy.id) for proxy in (worker, copy) if proxy is not None]
        return Done(result, worker.id, [member for member in holders if member is not None])

    async def _prepare_worker(
        self, attempt: Attempt, part: int, worker: ProxyWorker, number: int
    ) -> tuple[PartSource | None, dict[str, Any] | None]:
        """Introduce the workers, and return the ``source`` and the ``entry`` of a part's order.

        Args:
            attempt: The attempt.
            part: Number of the part.
            worker: Its worker.
            number: Number of the round.
        """
        copy, source = self._copy_of(attempt, part), await self._part_states.state_for(part, worker)
        numbers = [None if copy is None else copy.id, None if source is None else source.worker]
        attempt.links.update(frozenset((worker.id, other)) for other in numbers if other is not None)
        async with self._reached:
            await self._members.reach(worker, self._links_of(attempt))
        return source, None

    def _links_of(self, attempt: Attempt) -> set[Link]:
        """Return the pairs of workers that call each other in an attempt."""
        workers = {number: proxy.id for number, proxy in attempt.workers.items()}
        planned = (link for link in self._plan.links() if link <= workers.keys())
        return attempt.links | {frozenset(map(workers.__getitem__, link)) for link in planned}

    def _copy_of(self, attempt: Attempt, part: int) -> ProxyWorker | None:
        """Return the worker that keeps a copy of a part's state after a round; None if there is no other worker."""
        following = attempt.workers[self._plan.following(part)]
        if following is not attempt.workers[part]:
            return following
        crew = self._run.crew
        candidates = [proxy for (number, _), proxy in sorted(self._members.members().items()) if number != following.id]
        return next((proxy for proxy in candidates if not crew.is_leaving(proxy.id)), None)

    async def _wait_for_workers(self, attempt: Attempt, part: int) -> None:
        """Wait until each part has a worker.

        Raises:
            ClusterTooSmall: Too few workers are there, and no more come in time.
        """
        wait_s, needed = self._run.crew.wait_s, self._groups * len(self._plan.parts)
        has = f"the model has {len(self._plan.parts)} parts" + f" in {self._groups} slots" * (self._groups > 1)
        if self._run.crew.size < needed and not self._waits:
            self._waits = True
            reason = f"{has}, and {_count_of_workers(self._run.crew.size)}: the run waits {wait_s:g} s for others"
            self._run.crew.emit(Warned(about="workers", why=reason))
        while not attempt.ready.is_set():
            try:
                async with asyncio.timeout(wait_s):
                    await attempt.ready.wait()
            except TimeoutError:
                if self._run.crew.size < needed:
                    raise ClusterTooSmall(
                        f"{has}, and {_count_of_workers(self._run.crew.size)} after {wait_s:g} s",
                        hint="start more workers, and continue with resume; or cut the model into fewer parts",
                    ) from None
        self._waits = False

    def _fail(self, part: int) -> None:
        """Begin a new attempt without the worker of a part, and let all other parts join it."""
        attempt = self._attempt
        if part not in attempt.workers:
            return
        self._again(attempt)

    async def _wait_for_loss(self, attempt: Attempt, worker: ProxyWorker, unreached: PartUnreached) -> None:
        """Wait until the crew notices the loss of a worker that another one has not reached.

        Raises:
            ConfigError: The worker is there, so the link between the two has failed.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(NOTICED_S):
                await attempt.ended.wait()
                return
        raise ConfigError(
            f"{worker.name} does not reach worker {unreached.worker}: {unreached.reason}",
            hint="check the network between the two workers, or set the address of that worker: ddlf-worker --advertise HOST:PORT",
        )

    def _moved(self, task: Task, part: int, report: dict[str, Any]) -> None:
        """Tell the progress that the last part of a replica reports. All parts of the replica are as far."""
        if report["what"] != "training":
            return
        loss = None if report["loss"] is None else float(report["loss"])
        done = {name: int(report[name]) for name in ("done", "total", "epoch")}
        replica = self._plan.replica(part)
        for number, member in sorted(self._attempt.workers.items()):
            if self._plan.replica(number) == replica:
                origin = dict(round=task.round + 1, slot=self._first + number + 1, worker=member.id)
                self._run.crew.emit(SlotMoved(**origin, **done, loss=loss if number == part else None))

    def _check(self, task: Task, result: TrainedPart, worker: ProxyWorker) -> None:
        """Check a part's result, since it comes from another machine.

        Raises:
            ProtocolError: It does not fit the part.
        """
        if not isinstance(result, TrainedPart) or result.digest != task.digest():
            raise ProtocolError("trained on other samples than it was given", worker=worker.name)

    def _make_reply(self, task: Task, parts: Sequence[Done[TrainedPart]], begin: float) -> Reply:
        """Return the reply of a replica to its task, from the results of its parts."""
        results, samples = [done.result for done in parts], len(task.indices)
        return Reply(
            task=task,
            update=None,
            codec_error=0.0,
            samples=samples,
            fed=None,
            metrics=_metrics(results, samples),
            counted=results[-1].counted,
            compute_s=max(result.compute_s for result in results),
            wait_data_s=max(result.wait_data_s for result in results),
            files=(),
            stopped=False,
            state={},
            worker=parts[-1].worker,
            elapsed_s=time.perf_counter() - begin,
        )


def _metrics(results: Sequence[TrainedPart] | Sequence[EvaluatedPart], samples: int) -> dict[str, float]:
    """Return the metrics of a replica, from the results of its parts. The last part has all but their own losses."""
    metrics = dict(results[-1].metrics)
    if "loss" in metrics:
        metrics["loss"] += sum(result.losses for result in results) / samples
    return metrics


def _count_of_workers(workers: int) -> str:
    return f"{workers} worker{' is' if workers == 1 else 's are'} there"
