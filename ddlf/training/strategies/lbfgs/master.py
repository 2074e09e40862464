"""Sandblaster L-BFGS. Runs on the master, which has no vector while it trains (Dean et al. 2012, section 4.2).

An iteration, with the commands of ``shards.py``::

    direction: coefficients from dot products; aim
    line search: workers enter a pass, compute all portions at weights + step * direction, and add gradients; sums
    repeat with other steps until the strong Wolfe conditions hold
    stage, settle: the trial becomes the weights; dots of the new vectors

Each portion of the samples counts once in a pass, and sums do not depend on who computed what. If a worker is lost, its
portions are computed elsewhere, and the backups of its shards become their owners. The iteration may begin again, with
the same bits. If a shard and its backup are lost, all iterations since the last checkpoint are computed again.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import starmap
from typing import Any, TypeVar

import numpy as np

from ddlf.algorithms.flat_weights import Rows
from ddlf.algorithms.lbfgs import (
    Array,
    FixedPoint,
    Point,
    WolfeSearch,
    cut,
    direction,
    exact_mean,
    is_kept,
    unpacked,
    unpacked_row,
)
from ddlf.algorithms.weights import Weights, digest
from ddlf.cluster.proxy import ProxyWorker
from ddlf.errors import (
    AppMissing,
    BadUpdate,
    ClusterTooSmall,
    ConfigError,
    DDLFError,
    ExecutorCrashed,
    WorkerLost,
)
from ddlf.events import PassEnded, PortionCounts, SlotFinished, SlotStarted, Warned
from ddlf.training.checkpoints.progress_layout import KEPT
from ddlf.training.checkpoints.slices import WEIGHTS, Destination, Slices, Written
from ddlf.training.context import App
from ddlf.training.crew.recovery import LOSS, end_all, first_line
from ddlf.training.evaluation.master import to_its_end
from ddlf.training.evaluation.model import EVALUATION_BATCH
from ddlf.training.exchanges.members import Member, Members
from ddlf.training.progress import WeightsRef, local, shapes, slices_of
from ddlf.training.run import Round, Run, arrived
from ddlf.training.slot.gradients import ONE_FOR_EACH, is_apart, not_a_mean_message
from ddlf.training.slot.task import Reply
from ddlf.training.strategies.lbfgs.portions import Computed, Pool, Portion, Tally, portions_of
from ddlf.training.strategies.lbfgs.shards import Aimed, NotReached, PassSums, Staged
from ddlf.training.strategies.lbfgs.state import VECTORS, ShardState, StoredShard

AHEAD = 2
"""Portions that a worker has at once, so that it receives the next one while it computes."""
TOGETHER = 8
"""Portions whose gradients a worker pushes together."""
ATTEMPTS = 10
"""The run ends after this number of failures of one iteration."""
PORTIONS = 8
"""Portions of a slot by default."""
KEPT_BYTES = 1 << 28
"""The master keeps the vectors after training, for the next training of the app, if they are at most this large, or
if there are checkpoints."""
NUMBERS = "lbfgs_numbers"
"""Group of the run's state in checkpoints, besides the vectors: the numbers of ``State``, the number of shards and of
pairs; and the digest of the weights, empty in a checkpoint of slices."""
UNREAD = (
    "the current weights are on the workers: with mode='lbfgs' the master has them after a checkpoint and at the end",
    "set checkpoint_every: the master then gets the weights with each checkpoint",
)
Result = TypeVar("Result")


class Again(Exception):
    """Error: a worker is lost or cannot be reached, so the iteration must begin again."""


@dataclass(frozen=True, slots=True)
class Iterations:
    """The master's training loop of L-BFGS.

    Args:
        history, tolerance, portion, shards: The settings of these names in ``LBFGS``.
    """

    history: int
    tolerance: float
    portion: int | None
    shards: int | None

    def begin(self, run: Run) -> None:
        """Do nothing before training: the shards have the state."""

    async def train(self, run: Run) -> None:
        """Make iterations until all are done, the gradient is small, or no step lowers the loss."""
        members = run.exchange.weights_out
        assert isinstance(members, Members)
        coordinator = Coordinator(run, members, self)
        try:
            async for round in run.rounds():
                iteration = await coordinator.iterate(round)
                if iteration is None:
                    run.converge(coordinator.ended)
                    break
                await coordinator.committed(iteration)
                await run.reported()
        finally:
            await members.close()
            await to_its_end(coordinator.finish())


@dataclass(frozen=True, slots=True)
class Tried:
    """The result of a pass.

    Args:
        at: The step, and the loss and the slope there.
        replies: The result of each portion.
        before: The largest absolute value of the gradient before the step.
        verdict: A sentence about an unusual step; "" for a usual one.
    """

    at: Point
    replies: Sequence[Reply]
    before: float = math.inf
    verdict: str = ""


@dataclass(frozen=True, slots=True)
class Iteration:
    """A finished iteration.

    Args:
        tried: The pass whose step was taken.
        gradient: The largest absolute value of the gradient after the step.
        passes: Number of passes over all samples.
        left_out: Whether the pair of the step was left out.
        verdicts: Sentences about unusual events.
    """

    tried: Tried
    gradient: float
    passes: int
    left_out: bool
    verdicts: Sequence[str]


@dataclass(slots=True)
class Home:
    """Where a shard is: its owner, and the worker with the backup."""

    owner: Member
    backup: Member | None = None


@dataclass(frozen=True, slots=True)
class State:
    """The numbers that the master has about the minimization.

    Args:
        version: The version of all shards.
        loss: Loss at the current weights; None before the first pass.
        peak: Largest absolute value of a portion's gradient there.
        pair_kept: Whether the last step's pair was kept.
        afresh: Whether older pairs were dropped at the last step.
        passes: Number of passes that led to version 1, which count for the first iteration; 0 in other versions.
        dots: Dot products of ``s_1..s_k, y_1..y_k, g``; None if they must be asked for.
    """

    version: int = 0
    loss: float | None = None
    peak: float = 0.0
    pair_kept: bool = False
    afresh: bool = False
    passes: int = 0
    dots: np.ndarray[Any, Any] | None = None


@dataclass(frozen=True, slots=True)
class Saved:
    """A state that all shards can take on to begin again.

    Args:
        state: The numbers, without ``dots``.
        weights: The weights.
        vectors: ``s_1..s_k, y_1..y_k, g``; None before the first pass.
        shards: Number of shards in the checkpoint's slices; 0 if the values are on the master.
        pairs: k.
    """

    state: State
    weights: Weights | WeightsRef
    vectors: Weights | WeightsRef | None
    shards: int
    pairs: int


class Coordinator:
    """Makes the iterations of one run.

    Args:
        run: The run.
        members: Reaches the workers of the run.
        settings: The settings of L-BFGS.

    Attributes:
        ended: Why there are no more iterations; "" while there are.

    Raises:
        ConfigError: No weight is trained, types of weights differ, or portions are larger than the data.
    """

    def __init__(self, run: Run, members: Members, settings: Iterations) -> None:
        self._run, self._members, self._settings = run, members, settings
        weights = shapes(run.progress.weights)
        rows = Rows.of(weights, run.facts.trainable)
        self._rows = Rows(rows.like, rows.trained, [])
        if not rows.sizes[0]:
            raise ConfigError(
                "mode='lbfgs' steps weights by gradients, and this model has none that are trained",
                hint="make sure that a layer with weights has trainable=True",
            )
        types = sorted({weights[index].dtype.name for index in rows.trained})
        if types not in (["float32"], ["float64"]):
            raise ConfigError(
                f"mode='lbfgs' needs weights of one type, float32 or float64, but the trained weights have {' and '.join(types)}",
                hint="give all layers the same dtype, or train in mode 'sync'",
            )
        self._type = np.dtype(types[0])
        trained, samples = set(rows.trained), run.facts.samples
        self._untrained = [None if i in trained else weight for i, weight in enumerate(weights)]
        if settings.portion is not None and settings.portion > samples:
            raise ConfigError(
                f"portion={settings.portion:,} is larger than the data, which has {samples:,} samples",
                hint=f"leave portion out, or set it to at most {samples:,}",
            )
        self._portions = portions_of(samples, run.slots, settings.portion or math.ceil(samples / run.slots / PORTIONS))
        self._homes: list[Home] = []
        self._parts: list[tuple[int, int]] = []
        most = len(cut(rows.sizes[0], settings.shards or 1))
        if settings.shards is not None and settings.shards > most:
            has = f"this model has {rows.sizes[0]:,} trained values, which make no more than {most}"
            self._warn(f"shards={settings.shards}, but {has}")
        self._saved = _saved_in(run)
        if self._saved.vectors is None and (reason := _dropped(run)):
            self._warn(f"{reason}, so L-BFGS begins with an empty history of changes")
        self._state = self._saved.state
        self._first = self._iterations = max(0, self._state.version - 1)  # iterations so far
        self._last: Iteration | None = None
        self._number = 0  # of the last pass
        # what workers receive when they enter it: the arguments of ``LbfgsReplica.enter`` after its number
        self._entering: tuple[list[int], list[list[int]], int, float, list[int]]
        self._passes = 0  # of the current iteration
        self._carried: dict[int, int] = {}  # slot -> the worker that has computed portions for it in this iteration
        self._peak = 0.0
        self._round: Round
        self._prepared: set[Member] = set()
        self._is_whole = False  # whether all owners and backups have the same state, as far as the master knows
        self._brought_at, self._before = run.version, run.progress.snapshot()  # when the master had the weights last
        self._begun = run.version
        self._warned = False
        self._handing_back = asyncio.Lock()
        run.crew.hand_back.append(self._hand_back)
        self.ended = ""

    @property
    def _committed(self) -> int:
        """Number of iterations that were committed, with those before this training."""
        return self._first + self._run.version - self._begun

    # -- for the loop -------------------------------------------------------------------------------------------------

    async def iterate(self, round: Round) -> Iteration | None:
        """Make one iteration. Return it, or None if training is over.

        Raises:
            ClusterTooSmall: All workers are lost, and none came back in time.
            BadUpdate: The loss of the first weights is NaN or infinite, or it has no lower bound.
            ConfigError: The loss depends on chance, or the model changes weights that are not trained.
        """
        self._round = round
        failures = 0
        while True:
            before = self._state.version
            try:
                await self._heal()
                while self._state.version < self._iterations + 2:
                    if not await self._iterated():
                        return None
                self._iterations += 1
                for slot, worker in self._carried.items():
                    self._run.crew.emit(SlotFinished(round=self._now, slot=slot + 1, worker=worker))
                self._carried.clear()
                return self._last
            except Again as error:
                self._is_whole = False
                failures = failures + 1 if self._state.version <= before else 1
                if failures == ATTEMPTS:
                    raise ClusterTooSmall(
                        f"iteration {self._iterations + 1} has failed {ATTEMPTS} times, the last time because {error}",
                        hint="look at the workers' terminals, and check the network between them: ddlf doctor --pairs",
                    ) from error
                self._warn(f"iteration {self._iterations + 1} begins again: {error}")

    async def committed(self, iteration: Iteration) -> None:
        """Commit an iteration: its portions count as trained on, and its numbers go into the record."""
        run = self._run
        due = run.keeper is not None and run.keeper.is_due(run.version + 1)
        shown = run.reporter.shows
        remote = partial(
            WeightsRef,
            like=list(self._rows.like),
            group=WEIGHTS,
            from_workers=partial(self._until_done, self._brought),
            evaluate=self._evaluated,
            unread=UNREAD,
        )
        slices = None
        if run.keeper is not None and due and not shown:
            slices = await run.keeper.sliced(run.progress, self._written)
        weights: Weights | WeightsRef
        if slices is not None:
            weights = remote(slices=slices)
            like = [np.broadcast_to(np.zeros((), self._type), self._rows.sizes[0])] * len(slices.sliced[KEPT + VECTORS])
            run.progress.keep(VECTORS, WeightsRef(like=like, group=KEPT + VECTORS, slices=slices))
        elif due or shown:
            weights = await self._until_done(partial(self._brought, vectors=due))
        else:
            weights = remote()
        run.verdicts += iteration.verdicts
        shown_numbers = {
            "loss": iteration.tried.at.loss,
            "gradient": iteration.gradient,
            "step": iteration.tried.at.step,
            "passes": iteration.passes,
            "left_out": int(iteration.left_out),
        }
        await run.commit(weights, iteration.tried.replies, **shown_numbers)
        if shown and run.progress.weights is not weights and not self._warned:
            self._warned = True
            sentence = "callbacks have set weights, which has no effect before training is over: workers continue with the weights of the shards"
            run.crew.emit(Warned(about="callback", why=sentence))
        if due or shown:
            self._brought_at, self._before = run.version, run.progress.snapshot()
        saved = _saved_in(run) if due else None
        if saved is not None and saved.state.version == self._state.version:
            self._saved = saved

    async def finish(self) -> None:
        """Bring the final weights to the master. If they are lost, return to the last ones that the master had."""
        run, progress = self._run, self._run.progress
        try:
            if self._state.version > self._committed + 1 and self._last is not None:  # interrupted before its commit
                self._iterations = self._committed + 1
                await self.committed(self._last)
            saved, is_saved = self._saved, self._saved.state.version == self._committed + 1
            if is_saved and saved.vectors is not None:  # the next training of this app can begin with the vectors
                progress.weights = saved.weights
                progress.keep(VECTORS, saved.vectors)
                progress.fetch()
                self._keep_numbers(saved.state, 0, saved.pairs, digest(local(progress.weights)))
                return
            size = (2 * self._settings.history + 1) * self._rows.sizes[0] * self._type.itemsize
            keeps = run.keeper is not None or size <= KEPT_BYTES
            if self._brought_at == progress.version and (not keeps or self._begun == progress.version):
                progress.fetch()
            else:
                progress.weights = await self._until_done(partial(self._brought, vectors=keeps))
            if not keeps:  # the next training can say that it begins without the vectors
                progress.drop(VECTORS)
                self._keep_numbers(self._state, 0, 0, digest(local(progress.weights)))
        except DDLFError as error:
            reached = progress.version
            progress.set_back(self._before)
            run.exchange.states.set_back(progress.states)
            self._warn(
                f"the weights after iteration {reached} are unavailable ({first_line(error)}): the run returns to iteration {progress.version}",
                about="model",
            )

    @property
    def _now(self) -> int:
        """The number of the current round, from 1."""
        return self._run.progress.round + 1

    # -- an iteration -------------------------------------------------------------------------------------------------

    async def _iterated(self) -> bool:
        """Make one more version of the shards, if possible. Return whether there is one."""
        self._passes, self._peak = self._state.passes, self._state.peak
        if self._state.version == 0:
            await self._first_pass()
        dots = await self._dots()
        pairs = len(dots) // 2
        directions = [(list(direction(dots, pairs)), "")]
        if pairs:
            alone = "no step along the direction of the pairs lowers the loss, so they were dropped"
            directions.append(([0.0] * (2 * pairs) + [-1.0], alone))
        for coefficients, verdict in directions:
            is_first = not pairs or bool(verdict)
            tried = await self._searched(coefficients, is_first=is_first)
            if tried is not None and await self._settled(tried, verdict, afresh=is_first):
                return True
            if self.ended:
                return False
        self.ended = (
            f"no step along the direction of iteration {self._state.version} lowers the loss, so the best weights stay"
        )
        return False

    async def _searched(self, coefficients: list[float], *, is_first: bool) -> Tried | None:
        """Search for a step along a direction.

        Args:
            coefficients: Coefficients of the direction in the vectors.
            is_first: Whether the direction is the negative gradient, whose length says nothing about that of the step.

        Returns:
            The pass to take; None if no step lowers the loss, or if the gradient is small.

        Raises:
            BadUpdate: The loss has no lower bound.
        """
        slope, sizes, peak = await self._aim(coefficients)
        if peak <= self._settings.tolerance:
            self.ended = f"the largest value of the gradient is {peak:.3g}, and tolerance={self._settings.tolerance:g}"
            return None
        if not slope < 0:
            return None
        loss, version = self._state.loss, self._state.version
        assert loss is not None
        first = min(1.0, 1.0 / sizes) if is_first else 1.0
        search = WolfeSearch(loss, slope, first, noise=64 * float(np.finfo(self._type).eps))
        outcome = "try"
        while outcome == "try":
            tried = await self._pass(search.step)
            outcome = search.tell(tried.at.loss, tried.at.slope)
        if outcome == "unbounded":
            falls = f"along the direction of iteration {version} it falls from {loss:.6g} to {tried.at.loss:.6g} and further"
            raise BadUpdate(
                f"the loss has no lower bound: {falls}",
                hint="check the loss for a sign error, and the model for terms that can become negative without limit",
            )
        if outcome == "failed":
            if not search.best.step:
                return None
            if tried.at.step != search.best.step:
                tried = await self._pass(search.best.step)
            verdict = "no step satisfies the strong Wolfe conditions, so the one with the least loss was taken"
            tried = replace(tried, verdict=verdict)
        return replace(tried, before=peak)

    async def _settled(self, tried: Tried, verdict: str = "", *, first: bool = False, afresh: bool = False) -> bool:
        """Make the weights of the last pass the current ones, on owners and backups.

        Return False, and do nothing, if it has changed neither the loss nor the gradient for the better.
        """
        calls = (self._call(shard, "stage", self._number, self._backup(shard)) for shard in range(len(self._homes)))
        staged = []
        for shard, answer in enumerate(await asyncio.gather(*calls)):
            if isinstance(answer, NotReached):
                raise await self._diagnose(self._homes[shard].owner[0], answer)
            staged.append(Staged(*answer))
        ss = float(sum(unpacked(of_shard.ss) for of_shard in staged))
        sy = float(sum(unpacked(of_shard.sy) for of_shard in staged))
        yy = float(sum(unpacked(of_shard.yy) for of_shard in staged))
        peak, loss = max(of_shard.peak for of_shard in staged), self._state.loss
        if loss is not None and tried.at.loss >= loss and peak >= tried.before:
            return False
        # From here on the version counts: if a worker is lost, another one has the values.
        pair_kept, before = not first and is_kept(ss, sy, yy), self._state.dots
        passes = self._passes if first else 0
        self._state = State(self._state.version + 1, tried.at.loss, self._peak, pair_kept, afresh, passes)
        if not first:
            self._last = Iteration(
                tried, peak, self._passes, not pair_kept, tuple(filter(None, [verdict, tried.verdict]))
            )
        indices, dots = self._new_dots(None if first or afresh else before)
        self._is_whole = False  # if this is interrupted, some may have the step and others not
        rows = await self._settle(indices)
        if rows is None:
            raise Again("a shard has lost its last step")
        self._is_whole, self._state = True, replace(self._state, dots=_filled(dots, indices, rows))
        return True

    async def _first_pass(self) -> None:
        """Compute the loss and the gradient at the first weights, after a check that the loss is a function of them."""
        await self._check_chance()
        tried = await self._pass(0.0)
        if not math.isfinite(tried.at.loss):
            losses = (reply.metrics.get("loss", math.nan) for reply in tried.replies)
            bad = next((value for value in losses if not math.isfinite(value)), None)
            problem = "the gradient at the first weights has NaN or infinite values"
            raise BadUpdate(
                problem if bad is None else f"the loss of the first weights is {bad}",
                hint="check the data for NaN, and the first weights; or begin with weights that were trained before",
            )
        await self._settled(tried, first=True)

    async def _check_chance(self) -> None:
        """Compute a portion twice, then its two halves.

        Raises:
            ConfigError: The two losses differ, or the model changed weights that are not trained, or the loss is not
                the mean of the losses of the halves.
        """
        self._begin(0.0, FixedPoint(0, 1))
        answers: list[list[Any] | NotReached] = []
        first = self._portions[0]
        half = first.begin + first.samples // 2
        parts = [(first.begin, first.end)] * 2
        parts += [(first.begin, half), (half, first.end)] if first.samples > 1 else []

        async def work(worker: ProxyWorker, holds: bool) -> None:
            await self._prepare(worker)
            requests = [[first.number, begin, end] for begin, end in parts]
            answers[:] = [await worker.call(self._members.role, "portions", self._number, [], [], requests)]

        await self._run.crew.carry(0, self._run.progress.round, work, is_round=False)
        (answer,) = answers
        if isinstance(answer, NotReached):
            raise await self._diagnose(0, answer)
        computed, *repeated = map(Computed.of_message, answer)
        losses = [result.metrics.get("loss", math.nan) for result in (computed, *repeated)]
        if losses[0] != losses[1] and not all(map(math.isnan, losses[:2])):
            raise ConfigError(
                f"mode='lbfgs' needs a loss without chance, but the same samples gave {losses[0]:.7g} and then {losses[1]:.7g}",
                hint="remove dropout, noise and random augmentation from the model, or train in mode 'sync'",
            )
        if computed.moved:
            raise ConfigError(
                f"mode='lbfgs' needs a loss that only depends on the trained weights, but the model changes {computed.moved} when it trains",
                hint="freeze batch normalization (layer.trainable = False), or train in mode 'sync'",
            )
        mean = (
            sum(loss * (end - begin) for loss, (begin, end) in zip(losses[2:], parts[2:], strict=True)) / first.samples
        )
        if losses[2:] and is_apart(losses[0], mean):
            raise ConfigError(not_a_mean_message("mode='lbfgs'", losses[0], mean), hint=ONE_FOR_EACH)
        self._peak = computed.peak

    async def _pass(self, step: float) -> Tried:
        """Compute the loss and its gradient over all samples, at a step along the direction."""
        while True:
            self._passes += 1
            begin = time.perf_counter()
            format = FixedPoint.fitting(self._peak if math.isfinite(self._peak) else 0.0, len(self._portions))
            self._begin(step, format)
            pool = Pool[tuple[Computed, Reply]](self._portions, time.perf_counter)
            carry, number = self._run.crew.carry, self._run.progress.round
            streams = [
                asyncio.ensure_future(carry(slot, number, partial(self._stream, slot, pool), is_round=False))
                for slot in range(self._run.slots)
            ]
            try:
                await asyncio.gather(*streams)
            except BaseException as error:
                pool.fail(Again(first_line(error)))
                await end_all(streams)
                raise
            if pool.failure is not None:
                raise pool.failure
            computed, replies = zip(*(pool.results[portion.number] for portion in self._portions), strict=True)
            loss = exact_mean((reply.metrics.get("loss", math.nan), reply.samples) for reply in replies)
            peak = max((result.peak for result in computed), key=lambda value: (math.isnan(value), value))
            is_finite = math.isfinite(loss) and math.isfinite(peak)
            self._report_pass(step, loss if is_finite else math.inf, time.perf_counter() - begin, pool.tallies)
            if not is_finite:
                return Tried(Point(step, loss if loss == -math.inf else math.inf, math.nan), replies)
            self._peak = peak
            if peak <= format.limit:
                break
        slopes = []
        for sums in starmap(PassSums, await self._call_shards("sums", self._number)):
            if sums.added != len(self._portions):
                raise Again(f"a shard has the gradient of {sums.added} of {len(self._portions)} portions")
            if sums.slope is not None:
                slopes.append(unpacked(sums.slope))
        return Tried(Point(step, loss, float(sum(slopes)) if slopes else 0.0), replies)

    def _report_pass(self, step: float, loss: float, seconds: float, tallies: Mapping[int, Tally]) -> None:
        """Emit an event about a pass that has ended."""
        portions = tuple(PortionCounts(worker=worker, **asdict(tally)) for worker, tally in sorted(tallies.items()))
        event = PassEnded(
            round=self._now, number=self._passes, step=step, loss=loss, seconds=seconds, portions=portions
        )
        self._run.crew.emit(event)

    def _begin(self, step: float, format: FixedPoint) -> None:
        """Begin a pass, which workers then enter."""
        self._number += 1
        owners, parts = [home.owner[0] for home in self._homes], [list(part) for part in self._parts]
        self._entering = owners, parts, self._run.facts.samples, step, [format.fraction_bits, format.most]

    # -- portions -----------------------------------------------------------------------------------------------------

    async def _stream(self, slot: int, pool: Pool[tuple[Computed, Reply]], worker: ProxyWorker, holds: bool) -> None:
        """Have a worker compute portions, and push their gradients, until all of the pass are pushed.

        If the pass must begin again, note it in the pool, and return.
        """
        calls: dict[asyncio.Task[Any], list[Portion]] = {}  # a push has no portions
        dropped: list[int] = []
        pushing: asyncio.Task[Any] | None = None

        def ask(portions: list[Portion]) -> asyncio.Task[Any]:
            verb, arguments = "push", list[Any]()
            if portions:
                verb, arguments = "portions", [[[portion.number, portion.begin, portion.end] for portion in portions]]
            asking = worker.call(self._members.role, verb, self._number, pool.unpushed(slot), list(dropped), *arguments)
            dropped.clear()
            calls[task := asyncio.ensure_future(asking)] = portions
            return task

        if self._carried.get(slot) != worker.id:
            self._carried[slot] = worker.id
            self._run.crew.emit(SlotStarted(round=self._now, slot=slot + 1, worker=worker.id))
        try:
            preparing = asyncio.ensure_future(self._prepare(worker))
            while not pool.is_over and not preparing.done():
                await _first(preparing, pool.news.wait())
            if preparing.done():
                preparing.result()
            else:
                preparing.cancel()
            while not pool.is_over:
                while len(calls) - (pushing is not None) < AHEAD and (portions := pool.take(slot)):
                    ask(portions)
                wait_s = None
                if len(calls) == (pushing is not None):
                    portions, wait_s = pool.second(slot)
                    if portions:
                        pool.tally(worker.id).backup += len(portions)
                        ask(portions)
                ready = len(pool.unpushed(slot))
                is_idle = len(calls) == (pushing is not None) or pool.is_counted
                if pushing is None and ready and (ready >= TOGETHER or (is_idle and not pool.waits)):
                    pushing = ask([])
                await _first(*calls, pool.news.wait(), timeout_s=wait_s)
                for task in [task for task in calls if task.done()]:
                    portions, answer = calls.pop(task), task.result()
                    if isinstance(answer, NotReached):
                        pool.fail(await self._diagnose(worker.id, answer))
                    elif not portions:
                        pushing = None
                        pool.pushed(slot, answer)
                    else:
                        dropped += self._counted(pool, slot, worker.id, portions, answer)
        finally:
            if pushing is not None:
                pool.fail(Again(f"worker {worker.id} was lost while it pushed gradients"))
            pool.give_back(slot)
            await end_all([preparing, *calls])

    def _counted(
        self, pool: Pool[tuple[Computed, Reply]], slot: int, worker: int, portions: list[Portion], messages: list[Any]
    ) -> list[int]:
        """Note the results of portions from a worker. Return the numbers of the portions that do not count."""
        computed = [Computed.of_message(message) for message in messages]
        results = [
            (result, self._reply(portion, worker, result)) for portion, result in zip(portions, computed, strict=True)
        ]
        counts, tally = pool.done(portions, slot, results), pool.tally(worker)
        tally.done += sum(counts)
        tally.dropped += len(counts) - sum(counts)
        for (_, reply), is_first in zip(results, counts, strict=True):
            if is_first:
                self._run.crew.emit(arrived(reply))
        return [portion.number for portion, is_first in zip(portions, counts, strict=True) if not is_first]

    async def _prepare(self, worker: ProxyWorker) -> None:
        """Let a worker take part in the pass. Before its first one, send it the weights that are not trained."""
        await self._members.reach(worker)
        member = self._members.member(worker.id)
        if member is not None and member not in self._prepared:
            await worker.call(self._members.role, "prepare", self._untrained)
            self._prepared.add(member)
        await worker.call(self._members.role, "enter", self._number, *self._entering)

    async def _diagnose(self, worker: int, answer: NotReached) -> Again:
        """Find out why a worker does not reach another one. If only their link has failed, leave one of them out.

        Args:
            worker: Number of the worker.
            answer: Its answer.

        Returns:
            The error for the iteration.
        """
        peer = self._members.member(answer.worker)
        if peer is not None:
            other = self._members.members()[peer]
            try:
                await other.call(self._members.holder, "here")
            except LOSS as error:
                self._run.crew.lose_if_free(other, error)
            else:
                if answer.link and worker:
                    await self._members.cut(worker, answer.worker, answer.reason)
        return Again(f"worker {answer.worker} did not answer another worker ({answer.reason})")

    def _reply(self, portion: Portion, worker: int, computed: Computed) -> Reply:
        task = replace(self._round.tasks[0], slot=portion.slot, indices=np.arange(portion.begin, portion.end))
        return Reply(
            task=task,
            update=[],
            codec_error=0.0,
            samples=portion.samples,
            fed=None,
            metrics=computed.metrics,
            counted=computed.counted,
            compute_s=computed.seconds,
            wait_data_s=0.0,
            files=(),
            stopped=False,
            state={},
            worker=worker,
            elapsed_s=computed.seconds,
        )

    # -- shards -------------------------------------------------------------------------------------------------------

    async def _heal(self) -> None:
        """Make sure that each shard has an owner and a backup on workers of the run, and that all have the same state.

        Raises:
            Again: A worker was lost meanwhile.
            ClusterTooSmall: All workers are lost, and none came back in time.
        """
        if not self._members.members():
            await self._run.crew.carry(0, self._run.progress.round, _nothing, is_round=False)  # waits for a worker
        try:
            await self._members.reach()
        except (
            WorkerLost,
            ExecutorCrashed,
            AppMissing,
        ) as error:  # others show that the workers do not reach each other
            raise Again(first_line(error)) from error
        members = self._members.members()
        for home in self._homes:
            if home.backup not in members:
                home.backup = None
        if self._is_whole and all(home.owner in members and (home.backup or len(members) == 1) for home in self._homes):
            return
        lost = [(shard, home) for shard, home in enumerate(self._homes) if home.owner not in members]
        for shard, home in lost:
            sentence = f"shard {shard + 1} of {len(self._homes)} was on worker {home.owner[0]}, which is lost"
            if home.backup is None:
                self._begin_again(sentence)
                break
            self._warn(f"{sentence}: worker {home.backup[0]} continues with its copy")
            home.owner, home.backup = home.backup, None
        if not self._homes:
            await self._give()
        elif await self._settle([]) is None:
            self._begin_again("a shard has lost its last step")
            await self._give()
        await self._back_up()
        self._is_whole = True

    async def _back_up(self) -> None:
        """Give each shard a backup, if there is another worker. Then have all workers drop shards of earlier owners."""
        members = self._members.members()
        load = Counter(member for home in self._homes for member in (home.owner, home.backup))
        is_changed = False
        for shard, home in enumerate(self._homes):
            candidates = [member for member in members if member != home.owner]
            if home.backup is None and candidates:
                to = min(candidates, key=lambda member: (load[member], member))
                load[to] += 1
                failure = await self._call(shard, "send", to[0])
                if failure:
                    raise await self._diagnose(home.owner[0], failure)
                home.backup, is_changed = to, True
        if is_changed:
            await asyncio.gather(*(self._keep(member, worker) for member, worker in members.items()))

    async def _keep(self, member: Member, worker: ProxyWorker) -> None:
        owned = [shard for shard, home in enumerate(self._homes) if home.owner == member]
        backups = [shard for shard, home in enumerate(self._homes) if home.backup == member]
        try:
            await worker.call(self._members.holder, "keep", owned, backups)
        except LOSS as error:
            self._run.crew.lose_if_free(worker, error)
            raise Again(first_line(error)) from error

    def _begin_again(self, reason: str) -> None:
        """Go back to the last state that does not need the workers. The iterations since are then computed again."""
        self._homes, self._state = [], self._saved.state
        first = max(1, self._state.version)
        if self._iterations >= first:
            iterations = (
                f"iteration {first} is"
                if first == self._iterations
                else f"iterations {first} to {self._iterations} are"
            )
            self._warn(f"{reason}, and there is no copy: {iterations} computed again, with the same result")
        else:
            self._warn(f"{reason}, and there is no copy: the iteration begins again")

    async def _give(self) -> None:
        """Give each shard to a worker, with the values of the last saved state."""
        members = self._members.members()
        owners, saved, settings = sorted(members), self._saved, self._settings
        slices = slices_of(saved.weights) if saved.shards and settings.shards in (None, saved.shards) else None
        parts = cut(self._rows.sizes[0], saved.shards if slices is not None else settings.shards or len(owners))
        if slices is not None and len(parts) != saved.shards:
            slices = None
        homes = [Home(owners[shard % len(owners)]) for shard in range(len(parts))]
        states: list[ShardState] | list[StoredShard]
        if slices is None:
            states, verb = [self._saved_shard(*part) for part in parts], "own"
        else:
            states, verb = [self._stored_shard(*part) for part in parts], "own_stored"
            for shard, home in enumerate(homes):
                try:
                    await self._members.checkpoints.give(members[home.owner], slices, [shard])
                except LOSS as error:
                    self._run.crew.lose_if_free(members[home.owner], error)
                    raise Again(first_line(error)) from error
        self._homes, self._parts = homes, parts
        try:
            await asyncio.gather(*(self._call(shard, verb, state.to_message()) for shard, state in enumerate(states)))
        except BaseException:
            self._homes = []
            raise

    def _saved_shard(self, begin: int, end: int) -> ShardState:
        """Return a shard of the saved state, whose vectors are on the master."""
        saved, pairs = self._saved, self._saved.pairs
        weights, vectors = local(saved.weights), local(saved.vectors or [])
        row = np.concatenate([np.asarray(weights[index], self._type).reshape(-1) for index in self._rows.trained])
        cut_out = [np.asarray(vector[begin:end], self._type) for vector in vectors]
        return ShardState(
            first=begin,
            version=saved.state.version,
            weights=row[begin:end],
            gradient=cut_out[-1] if vectors else None,
            s=cut_out[:pairs],
            y=cut_out[pairs : 2 * pairs],
            history=self._settings.history,
        )

    def _stored_shard(self, begin: int, end: int) -> StoredShard:
        """Return a shard of the saved state, whose vectors are in a slice of a checkpoint."""
        return StoredShard(
            first=begin,
            end=end,
            version=self._saved.state.version,
            history=self._settings.history,
            names=self._run.facts.names,
            pairs=self._saved.pairs,
            dtype=str(self._type),
        )

    async def _until_done(self, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Do some work on the shards between two iterations. If a worker is lost, do it again with the backups.

        Raises:
            ClusterTooSmall: The iteration that the work needs cannot be restored now.
        """
        for _ in range(ATTEMPTS):
            try:
                await self._heal()
                while self._state.version < self._iterations + 1:
                    await self._iterated()
                return await work()
            except Again as error:
                self._is_whole, reason = False, str(error)
        raise ClusterTooSmall(f"the shards cannot be read: {reason}", hint="look at the workers' terminals")

    async def _brought(self, *, vectors: bool = False) -> Weights:
        """Return the current weights. With ``vectors``, put the vectors into the run's state, for a checkpoint."""
        states = await self._whole_shards()
        weights = self._weights_in(states)
        if vectors:
            self._run.progress.keep(VECTORS, _joined(states))
            self._keep_numbers(self._state, 0, len(states[0].s), digest(weights))
        return weights

    async def _whole_shards(self) -> list[ShardState]:
        """Return the states of all shards."""
        return list(map(ShardState.from_message, await self._call_shards("whole")))

    def _weights_in(self, states: Sequence[ShardState]) -> Weights:
        """Return the model's weights from the states of all shards."""
        row = np.concatenate([state.weights for state in states])
        return self._rows.weights(row, row[:0], list(self._untrained))

    async def _hand_back(self, number: int) -> None:
        """Take all vectors to the master, if otherwise only workers that leave would have a shard.

        Args:
            number: Number of a worker that leaves.
        """
        async with self._handing_back:
            crew, state = self._run.crew, self._state
            staying = {
                member for member in self._members.members() if member[0] != number and not crew.is_leaving(member[0])
            }
            if self._saved.state.version == state.version or all(
                {home.owner, home.backup} & staying for home in self._homes
            ):
                return
            try:
                shards = await self._whole_shards()
            except Again:
                return  # the worker has ended before
            if {shard.version for shard in shards} != {state.version}:
                return
            weights, pairs = self._weights_in(shards), len(shards[0].s)
            self._saved = Saved(replace(state, dots=None), weights, _joined(shards), 0, pairs)

    def _keep_numbers(self, state: State, shards: int, pairs: int, weights_digest: str) -> None:
        numbers = [state.version, state.loss, state.peak, shards, pairs]
        self._run.state[NUMBERS] = [np.array(numbers, np.float64), np.array([*bytes.fromhex(weights_digest)], np.uint8)]

    async def _written(self, slices: Slices) -> None:
        """Have the workers that own shards write them into a checkpoint."""
        await self._until_done(partial(self._write, slices))

    async def _write(self, slices: Slices) -> None:
        names, rows = self._run.facts.names, self._rows
        slices.clear()

        async def write_shard(shard: int) -> None:
            async def write_on_worker(destination: Destination) -> Written[None]:
                answer: Written[None] = await self._call(shard, "write", names, destination)
                return answer

            async def bring_to_master() -> tuple[dict[str, Array], None]:
                state = ShardState.from_message(await self._call(shard, "whole"))
                return state.to_arrays(rows, names), None

            await slices.write_one(shard, write_on_worker, bring_to_master)

        dots = await self._dots()
        await asyncio.gather(*(write_shard(shard) for shard in range(len(self._homes))))
        called = [f"{i:04d} {name}" for i, name in enumerate(names)]
        slices.sliced[WEIGHTS] = [(called[i], w.dtype.name, list(w.shape)) for i, w in enumerate(rows.like)]
        slices.sliced[KEPT + VECTORS] = [
            (f"{i:04d}", np.dtype(self._type).name, [rows.sizes[0]]) for i in range(len(dots))
        ]
        slices.arrays[WEIGHTS] = {called[i]: weight for i, weight in enumerate(self._untrained) if weight is not None}
        self._keep_numbers(self._state, len(self._homes), len(dots) // 2, "")

    async def _evaluated(self, app: App, part: str, batch_size: int = EVALUATION_BATCH) -> dict[str, float] | None:
        """Have workers evaluate the current weights on a part of the data, like ``Members.evaluated``."""
        owners = [home.owner[0] for home in self._homes]
        source = {"version": self._state.version, "owners": owners, "others": self._untrained}
        return await self._members.evaluated(sorted(self._members.members()), source, app, part, batch_size)

    async def _aim(self, coefficients: list[float]) -> tuple[float, float, float]:
        """Set the direction. Return its slope, and the sum and the maximum of the gradient's absolute values.

        Args:
            coefficients: Coefficients of the direction in the vectors.
        """
        answers = await self._call_shards("aim", np.array(coefficients, np.float64))
        aimed = list(starmap(Aimed, answers))
        slope, size = sum(unpacked(of.slope) for of in aimed), sum(unpacked(of.size) for of in aimed)
        return float(slope), float(size), max(of.peak for of in aimed)

    async def _dots(self) -> np.ndarray[Any, Any]:
        """Return the dot products of ``s_1..s_k, y_1..y_k, g`` with each other."""
        if self._state.dots is None:
            count = len(unpacked_row((await self._call_shards("dots", [0]))[0][0]))
            rows = await self._call_shards("dots", list(range(count)))
            self._state = replace(self._state, dots=_filled(np.zeros((count, count)), range(count), rows))
        assert self._state.dots is not None
        return self._state.dots

    def _new_dots(self, before: np.ndarray[Any, Any] | None) -> tuple[list[int], np.ndarray[Any, Any]]:
        """Return which rows of the dot products are new after a step, and the matrix with the others.

        Args:
            before: The products before the step, since most of them stay; None if there is at most the last pair.
        """
        old, added = 0 if before is None else len(before) // 2, int(self._state.pair_kept)
        pairs = min(old + added, self._settings.history)
        dots, dropped = np.zeros((2 * pairs + 1, 2 * pairs + 1)), old + added - pairs
        stay = [(i + dropped, i) for i in range(old - dropped)]
        moves = [(a, b) for a, b in stay] + [(old + a, pairs + b) for a, b in stay]
        if before is not None:
            for a, b in moves:
                for c, d in moves:
                    dots[b, d] = before[a, c]
        new = [pairs - 1, 2 * pairs - 1] if added else []
        return [*new, 2 * pairs], dots

    async def _settle(self, indices: Sequence[int]) -> list[Any] | None:
        """Let owners and backups have the current version.

        Args:
            indices: The vectors whose dot products the owners return.

        Returns:
            The answers of the owners; None if one of them does not have the version.
        """
        command = self._state.version, self._state.pair_kept, self._state.afresh
        answers = await self._call_shards("settle", *command, list(indices))
        for shard, home in enumerate(self._homes):
            worker = self._members.members().get(home.backup) if home.backup is not None else None
            if worker is None:
                home.backup = None
                continue
            try:
                if await worker.call(self._members.holder, "settle", shard, *command, []) is None:
                    home.backup = None
            except LOSS as error:
                self._run.crew.lose_if_free(worker, error)
                home.backup = None
        return None if None in answers else answers

    def _backup(self, shard: int) -> int:
        """Return the number of the worker with the backup of a shard; 0 for none."""
        backup = self._homes[shard].backup
        return 0 if backup is None else backup[0]

    async def _call_shards(self, verb: str, *arguments: Any) -> list[Any]:
        return list(await asyncio.gather(*(self._call(shard, verb, *arguments) for shard in range(len(self._homes)))))

    async def _call(self, shard: int, verb: str, *arguments: Any) -> Any:
        """Call a verb of a shard on its owner.

        Raises:
            Again: The owner is lost.
        """
        owner = self._homes[shard].owner
        worker = self._members.members().get(owner)
        if worker is None:
            raise Again(f"worker {owner[0]} is lost")
        try:
            return await worker.call(self._members.holder, verb, shard, *arguments)
        except LOSS as error:
            self._run.crew.lose_if_free(worker, error)
            raise Again(first_line(error)) from error

    def _warn(self, sentence: str, about: str = "shards") -> None:
        self._run.crew.emit(Warned(about=about, why=sentence))


def _saved_in(run: Run) -> Saved:
    """Return the state in a run's progress, which a checkpoint or an earlier training has left there.

    Without one, or if the weights have changed since, begin with the weights alone.
    """
    progress = run.progress
    numbers, vectors = progress.group(NUMBERS), progress.group(VECTORS)
    if numbers is not None and vectors is not None:
        (version, loss, peak, shards, pairs), weights_digest = (array.tolist() for array in local(numbers))
        if (weights_digest and digest(local(progress.weights)) == bytes(weights_digest).hex()) or (
            not weights_digest and slices_of(progress.weights)
        ):
            state = State(int(version), loss, peak)
            return Saved(state, progress.weights, vectors, int(shards) if not weights_digest else 0, int(pairs))
    return Saved(State(), progress.weights, None, 0, 0)


def _dropped(run: Run) -> str:
    """Return why a run cannot use the pairs of the L-BFGS training before; "" if there was none."""
    numbers = run.progress.group(NUMBERS)
    if numbers is None:
        return ""
    _, weights_digest = (array.tolist() for array in local(numbers))
    if weights_digest and digest(local(run.progress.weights)) != bytes(weights_digest).hex():
        return "the weights have changed since the last L-BFGS training"
    return (
        "the changes of the last L-BFGS training were too large for the master to keep them without a checkpoint folder"
    )


def _joined(states: Sequence[ShardState]) -> Weights:
    """Return ``s_1..s_k, y_1..y_k, g`` as whole vectors, from the states of all shards."""
    return [np.concatenate(parts) for parts in zip(*(state.vectors for state in states), strict=True)]


def _filled(
    dots: np.ndarray[Any, Any], indices: Sequence[int], answers: Sequence[Sequence[bytes]]
) -> np.ndarray[Any, Any]:
    """Set some rows and columns of a symmetric matrix of dot products.

    Args:
        dots: The matrix.
        indices: The rows.
        answers: For each shard, its part of each of these rows, packed.
    """
    for row, i in enumerate(indices):
        parts = [unpacked_row(answer[row]) for answer in answers]
        for j, of_shards in enumerate(zip(*parts, strict=True)):
            dots[i, j] = dots[j, i] = float(sum(of_shards, Fraction(0)))
    return dots


async def _first(*waiting: Any, timeout_s: float | None = None) -> None:
    """Wait until the first of some tasks ends, or a time is over. Coroutines among them are cancelled then."""
    tasks = [
        awaitable if isinstance(awaitable, asyncio.Task) else asyncio.ensure_future(awaitable) for awaitable in waiting
    ]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for awaitable, task in zip(waiting, tasks, strict=True):
            if awaitable is not task:
                task.cancel()


async def _nothing(worker: ProxyWorker, holds: bool) -> None: ...
