"""The sharded exchange: workers send each other updates, and each merges and steps one range. Runs on the master.

A round is a round of ``ddlf.training.strategies.sync.master``, with the same bits. But updates and new weights stay on the workers::

    tell each slot the generation of weights to begin with; wait for all replies, which contain no update
    plan: the worker of each update, and the owner of each range; have all these workers carry it out
    if a worker is lost meanwhile, have its slots carried again, and plan again

The master receives the weights when a callback needs them, and at the end. Workers write the checkpoints. Every worker
that stepped a range has all of the weights. It also has a copy of another range's outer optimizer state, so the loss
of one worker loses nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ddlf.algorithms.flat_weights import cut
from ddlf.algorithms.merge import Rule, WholeRule
from ddlf.algorithms.outer import OuterOptimizer, Subtract
from ddlf.algorithms.weights import Weights
from ddlf.cluster.proxy import ProxyWorker
from ddlf.errors import BadUpdate, ConfigError, DDLFError
from ddlf.events import Warned
from ddlf.training.checkpoints.slices import OUTER, WEIGHTS, Slices
from ddlf.training.crew.recovery import LOSS, first_line
from ddlf.training.evaluation.master import to_its_end
from ddlf.training.exchanges.members import Member, Members
from ddlf.training.exchanges.sharded.layout import Layout, RemoteWeights, means_of
from ddlf.training.exchanges.sharded.plan import EvaluatedWeights, HeldWeights, MeanPlan, Plan, left_of, numbers_of
from ddlf.training.exchanges.sharded.ranges import PIECE
from ddlf.training.exchanges.sharded.states import ShardedStates
from ddlf.training.exchanges.sharded.updates import RemoteUpdates, WorkerLoss, measured, verdicts, weighed
from ddlf.training.exchanges.streaming import fragments_of
from ddlf.training.progress import WeightsRef, local, shapes, slices_of
from ddlf.training.run import Round, Run, RunMustEnd
from ddlf.training.slot.task import Reply, Task

HOLDERS = 2
"""Number of workers that receive the first weights from the master. The other workers fetch them from these."""
PIECES = 32
"""Number of pieces of each range, unless they would be too small. A worker can send the last piece only after all
updates of it have arrived, so a larger last piece leaves links idle longer. ``docs/LAB.md`` has data."""
LEAST = 1 << 15
"""Minimum number of values in a piece. In a smaller piece, the cost of the request dominates."""
UNREAD = (
    "the weights of this round are on the workers: with exchange='sharded' the master has them after a checkpoint and the last round",
    "set checkpoint_every to have them here that often, or use exchange='star'",
)

Means = Callable[[list[Reply]], list[MeanPlan]]


@dataclasses.dataclass(frozen=True, slots=True)
class MasterCopy:
    """A generation (numbered version of the weights) that the master itself has, with its states.

    Args:
        generation: Number of the generation on the workers.
        weights: The weights.
        state: State of the outer optimizer.
        mean: Returns the mean of the slots' optimizers, if there is one.
    """

    generation: int
    weights: Weights | WeightsRef
    state: Weights | WeightsRef
    mean: Callable[[], Weights] | None = None


class Sharded:
    """The master's side of the sharded exchange of one run: it plans who computes what, and starts again after losses.

    Args:
        run: The run.
        members: Where the run's tasks find their weights.
        merge: The merge rule.
        outer: The outer optimizer.
        codec: Codec of weights between workers, as text.

    Raises:
        ConfigError: The model has no weights.
    """

    def __init__(self, run: Run, members: Members, merge: Rule, outer: OuterOptimizer, codec: str) -> None:
        self._run = run
        self._members = members
        self._merge, self._outer, self._codec = merge, outer, codec
        like = [np.broadcast_to(np.zeros((), w.dtype), w.shape) for w in shapes(run.progress.weights)]
        if not any(w.size for w in like):
            raise ConfigError(
                "exchange='sharded' gives each worker a slice of the weights, and this model has none",
                hint="use exchange='star'",
            )
        coded = codec != "float32"  # then exact weights follow the state, and workers decode theirs from them
        state = run.progress.group("outer")
        assert state is not None
        self._remote_weights = RemoteWeights(run, members, like, len(shapes(state)) // len(like) + coded, coded=coded)
        self._remote_updates = RemoteUpdates(run, members, like, lambda: self._layout.generation)
        assert isinstance(run.exchange.states, ShardedStates)
        self._states = run.exchange.states
        self._generations = itertools.count(1)
        self._layout = Layout(0)
        self._master_copy = MasterCopy(0, run.progress.weights, state, self._states.mean)
        self._snapshot = run.progress.snapshot()
        self._mean_slice = 0  # number of the last checkpoint's slice with the mean of the slots' optimizers
        self._handing_back = asyncio.Lock()
        run.crew.hand_back.append(self._hand_back)
        members.begin, members.says = self._begin, self._says
        members.compares = partial(verdicts, self._remote_updates)

    async def _begin(self) -> None:
        """Make sure that some workers have the weights and the state.

        If none has them, send the master's copy to some.

        Raises:
            ClusterTooSmall: All workers with the weights are lost, and the master has no copy.
        """
        alive = self._members.members()
        if (
            any(holder in alive for holder in self._layout.at)
            and self._remote_weights.parts(self._layout, alive) is not None
        ):
            return
        master_copy = self._master_copy
        if master_copy.generation != self._layout.generation:
            raise self._remote_weights.loss_error()
        means = await self._states.means()
        slices = None if means else slices_of(master_copy.weights)
        count = 0
        for member, proxy in alive.items():
            if count == HOLDERS:
                break
            try:
                arguments = self._codec, self._run.facts.trainable, *([means] if means else [])
                if slices is None:
                    contents = local(master_copy.weights), local(master_copy.state)
                    await proxy.call(self._members.holder, "hold", master_copy.generation, *contents, *arguments)
                else:
                    groups = (WEIGHTS, OUTER)
                    await self._members.checkpoints.give(proxy, slices, numbers_of(slices, groups))
                    listed = {group: slices.sliced[group] for group in groups if group in slices.sliced}
                    await proxy.call(self._members.holder, "hold_restored", master_copy.generation, listed, *arguments)
            except LOSS:
                continue  # the crew notices the loss
            count += 1
            state = [((0, self._remote_weights.size), member)] if self._remote_weights.arrays_per_weight else []
            at = [*self._layout.at, member]
            self._move(Layout(master_copy.generation, at, [*self._layout.state, *state], dict.fromkeys(means, False)))

    async def _hand_back(self, number: int) -> None:
        """Take the weights and their states to the master, if otherwise only workers that leave would have them. When
        workers come back, they get them from the master.

        Args:
            number: Number of a worker that leaves.
        """
        async with self._handing_back:
            layout, crew = self._layout, self._run.crew
            staying = {
                member for member in self._members.members() if member[0] != number and not crew.is_leaving(member[0])
            }
            have_all = (
                any(member in staying for member in layout.at)
                and self._remote_weights.parts(layout, staying) is not None
            )
            if have_all or self._master_copy.generation == layout.generation:
                return
            with contextlib.suppress(DDLFError):  # the worker has ended before; later errors tell that
                weights, state = await self._remote_weights.fetch(layout)
                mean: Callable[[], Weights] | None = None
                if (name := self._states.averaged) in layout.means:
                    values = await self._remote_weights.fetch_mean(layout, name)
                    mean = lambda: values  # noqa: E731
                self._master_copy = MasterCopy(layout.generation, weights, state, mean)
                self._states.set_mean(mean)

    @property
    def like(self) -> Weights:
        """Return arrays with the shapes and types of the weights."""
        return self._remote_weights.like

    async def all(self, tasks: Sequence[Task], tensors: Sequence[int] | None) -> list[Reply]:
        """Have workers train slots, and return their replies, which contain no updates.

        Args:
            tasks: Tasks of the round, as for ``Run.all``.
            tensors: Numbers of the tensors whose updates are exchanged; None for all.
        """
        self._remote_updates.tensors = tensors
        self._move(self._layout)  # the run may have more slots now
        return await self._run.all(tasks)

    async def merged(self, replies: list[Reply]) -> tuple[list[Reply], Layout]:
        """Have the workers compute the next weights from the updates of these replies.

        Args:
            replies: Replies whose updates are merged.

        Returns:
            The merged replies, with new ones for slots that were carried again; and the location of the weights.

        Raises:
            BadUpdate: An update cannot be merged.
            ConnectError: A worker reaches another one, but does not get its data.
            ClusterTooSmall: Too many workers were lost.
        """
        remote_updates = self._remote_updates
        means = partial(means_of, self._states, slots=self._run.slots, grows=self._run.facts.grows)
        replies, layout = await self._compute(remote_updates, lambda: self._layout, replies, self._outer, means)
        self._states.set_mean(None)
        return replies, layout

    async def recalibrated(self, layout: Layout, replies: list[Reply]) -> Layout:
        """Have workers measure batch normalization's moving statistics for merged weights, and merge them like updates.

        Args:
            layout: Location of the weights.
            replies: Replies that the weights were computed from.

        Returns:
            The location of the weights with these statistics.

        Raises:
            BadUpdate: Statistics are unusable.
            ClusterTooSmall: All workers with the merged weights are lost, or too many workers were lost.
        """
        run = self._run

        def reference() -> HeldWeights:
            alive = self._members.members()
            if not (holders := [member[0] for member in layout.at if member in alive]):
                raise self._remote_weights.loss_error()
            return HeldWeights(generation=layout.generation, at=holders, means=dict.fromkeys(layout.means, 0))

        measure = partial(measured, run, reference)
        remote_updates = RemoteUpdates(
            run, self._members, self.like, lambda: self._layout.generation, layout.generation, measure
        )
        remote_updates.tensors = run.facts.statistics
        _, following = await self._compute(remote_updates, lambda: layout, await measure(replies), Subtract())
        return following

    async def _compute(
        self,
        remote_updates: RemoteUpdates,
        base_layout: Callable[[], Layout],
        replies: list[Reply],
        outer: OuterOptimizer,
        means: Means | None = None,
    ) -> tuple[list[Reply], Layout]:
        """Have workers compute a new version of the weights (a generation) from an earlier one.

        Args:
            remote_updates: The updates, which stay on workers.
            base_layout: Returns the location of the generation that the updates begin with.
            replies: Replies of these updates.
            outer: Outer optimizer that changes the weights.
            means: Returns the means of slot state to compute for some replies; None if the slots keep no state.

        Returns:
            The merged replies, and the location of the new generation.
        """
        weights: list[float] = []
        if isinstance(self._merge, WholeRule):
            replies, weights = await weighed(remote_updates, replies, self._merge)
        layouts: list[Layout] = []
        remote_weights = self._remote_weights

        async def merge(replies: list[Reply], owners: list[Member], workers: dict[int, ProxyWorker]) -> WorkerLoss:
            base = base_layout()  # other workers may have it now, if some were lost
            if remote_weights.parts(base, self._members.members()) is None:
                raise remote_weights.loss_error()
            plan = Plan(
                base=base.generation,
                generation=next(self._generations),
                updates=remote_updates.locations(replies),
                owners=[number for number, _ in owners],
                tensors=remote_updates.tensors,
                kept=remote_weights.arrays_per_weight,
                state=remote_weights.holding(base),
                copies=len(owners) > 1 and remote_weights.arrays_per_weight > 0,
                left=[] if means is None else self._copied(replies, owners),
                groups=list(self._states.backed_up),
                means=[] if means is None else means(replies),
                merge=str(self._merge),
                weighed=weights,
                outer=str(outer),
                codec=self._codec,
                trainable=self._run.facts.trainable,
                names=self._run.facts.names,
                piece=min(PIECE, max(LEAST, remote_weights.size // (len(owners) * PIECES))),
            )
            _, worker_loss = await remote_updates.call_owners("merge", plan.to_message(), plan.owners, workers)
            if worker_loss is None:
                for slot, number, _, worker in plan.left:
                    self._states.note_backup(slot, number, worker)
                slices = cut(remote_weights.size, len(owners))
                state = [*zip(slices, owners, strict=True)] if remote_weights.arrays_per_weight else []
                state += [*zip(slices, [*owners[1:], owners[0]], strict=True)] if plan.copies else []
                groups = {mean.group: not mean.total for mean in plan.means}
                layouts.append(Layout(plan.generation, owners, state, {**base.means, **groups}))
            return worker_loss

        return await remote_updates.carry_out(replies, merge), layouts[0]

    async def committed(self, layout: Layout, replies: list[Reply], *, due: bool, shown: bool) -> None:
        """Make weights that are on the workers the current weights of the run.

        Args:
            layout: Location of the weights.
            replies: Replies that the weights were computed from.
            due: Whether to write them to a checkpoint.
            shown: Whether to bring them to the master.
        """
        remote_weights = self._remote_weights
        exact = remote_weights.holding(layout) if remote_weights.coded else []
        reference = EvaluatedWeights(generation=layout.generation, exact=exact).to_message()
        evaluated = partial(self._members.evaluated, layout.at, reference)
        bring = partial(self._weights_of, layout)
        weights: Weights | WeightsRef
        state: Weights | WeightsRef
        slices = None
        mean: Callable[[], Weights] | None = None
        name = self._states.averaged
        averaged = name in layout.means
        keeper, progress = self._run.keeper, self._run.progress
        if keeper is not None and due and not shown:
            slices = await keeper.sliced(progress, partial(self._write, layout, replies))
        is_fetched = due or shown
        weights_ref = partial(
            WeightsRef, like=remote_weights.like, group=WEIGHTS, from_workers=bring, evaluate=evaluated, unread=UNREAD
        )
        if slices is not None:
            weights, rows = weights_ref(slices=slices), remote_weights.arrays_per_weight - remote_weights.coded
            state = WeightsRef(like=remote_weights.like * rows, group=OUTER, slices=slices) if rows else []
            mean = partial(_mean_in, slices, self._mean_slice, name) if averaged else None
        elif is_fetched:
            weights, state = await remote_weights.fetch(layout)
            values = await remote_weights.fetch_mean(layout, name) if averaged else []
            mean = (lambda: values) if averaged else None
        else:
            weights = weights_ref()
        if is_fetched:
            self._master_copy = MasterCopy(layout.generation, weights, state, mean)
            self._states.set_mean(mean)
            self._run.progress.keep("outer", state)
        previous, version = self._layout, self._run.version
        self._move(layout)
        try:
            await self._run.commit(weights, replies)
        except BadUpdate:
            if self._run.version == version:
                self._move(previous)
            raise
        if is_fetched:
            changed = self._run.progress.weights
            if changed is not weights:  # a callback or a peer changed them: the workers receive them from the master
                self._master_copy = MasterCopy(next(self._generations), changed, state, mean)
                self._move(Layout(self._master_copy.generation))
            self._snapshot = self._run.progress.snapshot()

    async def fetch_final(self) -> None:
        """Fetch the final weights to the master.

        If they are lost, restore the master's last weights, and undo later rounds.
        """
        run, progress = self._run, self._run.progress
        if self._master_copy.generation == self._layout.generation:
            progress.weights = self._master_copy.weights
            progress.keep("outer", self._master_copy.state)
            progress.fetch()
            self._states.set_mean(self._master_copy.mean)
            self._states.fetch_mean()
            return
        try:
            progress.weights, state = await self._remote_weights.fetch(self._layout)
            progress.keep("outer", state)
            if (name := self._states.averaged) in self._layout.means:
                values = await self._remote_weights.fetch_mean(self._layout, name)
                self._states.set_mean(lambda: values)
                self._states.fetch_mean()
        except DDLFError as error:
            reached = progress.round
            progress.set_back(self._snapshot)
            self._states.set_back(progress.states)
            self._states.set_mean(self._master_copy.mean)
            self._states.fetch_mean()
            reason = f"the weights after round {reached} are unavailable ({first_line(error)}): the run returns to round {progress.round}"
            run.crew.emit(Warned(about="model", why=reason))

    # -- parts --------------------------------------------------------------------------------------------------------

    def _move(self, layout: Layout) -> None:
        self._layout, self._sums = layout, self._run.slots

    def _says(self, slot: int, number: int, holds: bool) -> dict[str, Any]:
        """Return the entry about weights in a slot's task: the generation, and the workers that have it.

        It also says how many slots each mean sums. If the slot's state is on other workers, it names them, too.
        """
        layout, present = self._layout, self._members.members()
        return HeldWeights(
            generation=layout.generation,
            at=[member[0] for member in layout.at if member in present],
            left=self._states.workers_with(slot, holds),
            means={group: self._sums if is_sum else 0 for group, is_sum in layout.means.items()},
        ).to_message()

    def _copied(self, replies: list[Reply], owners: list[Member]) -> list[tuple[int, int, int, int]]:
        """Return which workers keep backups of slot states: for each reply its slot, round, worker and backup.

        The backup is the owner of the next range. Return nothing if there is only one owner.
        """
        if not self._states.backed_up or len(owners) < 2:
            return []
        numbers = [number for number, _ in owners]
        following = dict(zip(numbers, [*numbers[1:], numbers[0]], strict=True))
        return [
            (reply.slot, reply.task.round, reply.worker, following.get(reply.worker, numbers[0])) for reply in replies
        ]

    async def _write(self, layout: Layout, replies: Sequence[Reply], slices: Slices) -> None:
        """Have workers write the slices (files) of a checkpoint: weights and their states, slot states, and their mean.

        The mean is stored as a part of the first slot's state.
        """
        remote_weights = self._remote_weights
        first = await remote_weights.write(layout, self._run.facts.names, slices)
        slices.left = await self._states.write(slices, first, replies)
        if (name := self._states.averaged) in layout.means:
            self._mean_slice = first + self._run.slots
            mean = await remote_weights.write_mean(layout, name, slices, self._mean_slice)
            slices.left[0] = slices.left[0] | mean  # a new dict, since the states use these lengths, too

    async def _weights_of(self, layout: Layout) -> Weights:
        if layout.generation == self._master_copy.generation:  # the workers have handed them back
            return local(self._master_copy.weights)
        return (await self._remote_weights.fetch(layout, state=False))[0]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShardedRounds:
    """The training loop of synchronous rounds whose updates stay on the workers.

    Args:
        merge, outer, balance: Merge rule, outer optimizer and balance, as for ``Synchronous``.
        codec: Codec of weights between workers, as text.
    """

    merge: Rule
    outer: OuterOptimizer
    balance: str
    codec: str

    def begin(self, run: Run) -> None:
        """Create the outer optimizer's initial state, unless a checkpoint has restored it."""
        if run.progress.group("outer") is None:
            run.state["outer"] = self.outer.init(run.weights)

    async def train(self, run: Run) -> None:
        """Train until the last round or the end of the run. Then fetch the final weights to the master."""
        members = run.exchange.weights_out
        assert isinstance(members, Members)
        self.begin(run)
        exchange = Sharded(run, members, self.merge, self.outer, self.codec)
        fragments = fragments_of(run, self.outer, exchange.like)
        try:
            with contextlib.suppress(RunMustEnd):
                async for round in run.rounds(self.balance):
                    tasks = round.tasks if fragments is None else fragments.tasks(round)
                    tensors = None if fragments is None else fragments.tensors
                    replies, layout = await exchange.merged(await exchange.all(tasks, tensors))
                    if fragments is not None:
                        fragments.were_merged(round.number)
                    if run.facts.statistics:
                        layout = await exchange.recalibrated(layout, replies)
                    await exchange.committed(layout, replies, due=_is_due(run), shown=_is_shown(run, round))
            if fragments is not None:
                fragments.tell_late()
        finally:
            await members.close()
            await to_its_end(exchange.fetch_final())


def _mean_in(slices: Slices, number: int, group: str) -> list[Any]:
    """Return the mean of slot states that ``Sharded._write`` has stored in a slice of a checkpoint, numbered from 0."""
    return left_of(0, {group: slices.left[0][group]}, slices.read_one(number))[group]


def _is_due(run: Run) -> bool:
    """Return whether the next commit writes a checkpoint."""
    return run.keeper is not None and run.keeper.is_due(run.version + 1)


def _is_shown(run: Run, round: Round) -> bool:
    """Return whether the master needs the weights after a round: for a callback, for peers, or as the last round.

    It does not need them for tests, which workers run.
    """
    if run.outside is not None and run.outside.needs_weights:
        return True
    return round.last or (run.reporter.shows and run.progress.ends_epoch(round.number))
