"""Computes with updates that stay on their workers, and survives the loss of workers. Runs on the master.

Some rules and policies need the lengths, distances and angles of whole updates. The worker that has an update computes
its length. Each owner of a range computes its blocks' part of a distance or an angle, and the master adds the parts
exactly. So the bits are the same as on a master with all updates (``algorithms/pairwise.py``).
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ddlf.algorithms.merge import WholeRule
from ddlf.algorithms.pairwise import Vector, added
from ddlf.algorithms.update_check import Comparison, Limits, Verdict, compared, verdicts_of
from ddlf.algorithms.weights import Fault, Weights, is_float
from ddlf.cluster.proxy import ProxyWorker
from ddlf.errors import BadUpdate, ClusterTooSmall, ConnectError, DDLFError
from ddlf.training.crew.recovery import LOSS, end_all
from ddlf.training.exchanges.members import Member, Members
from ddlf.training.exchanges.recalibration import carried, measuring
from ddlf.training.exchanges.sharded.pairs import Pairs, Sent
from ddlf.training.exchanges.sharded.plan import HeldWeights, Unanswered, Unmergeable, Unusable
from ddlf.training.exchanges.sharded.ranges import PIECE
from ddlf.training.judging import unusable_weights
from ddlf.training.run import Run
from ddlf.training.slot.task import Reply, Task

NOTICED_S = 10.0
"""Time in which the loss of an unreachable worker is noticed. After that, the link between the two has failed."""
TRIES = 6
"""Attempts at one exchange. Each failed attempt has lost another worker."""

WorkerLoss = tuple[ProxyWorker, DDLFError | None] | None
"""A worker that was lost and the error; or, with None, a worker that another worker cannot reach."""
Retrain = Callable[[list[Reply]], Awaitable[list[Reply]]]
Work = Callable[[list[Reply], list[Member], dict[int, ProxyWorker]], Awaitable[WorkerLoss]]
"""Receives replies, the owners of ranges, and all workers by number. Returns the worker that was lost, if any."""


class RemoteUpdates:
    """Computes with the updates of several slots while these stay on their workers.

    Args:
        run: The run.
        members: Where the run's tasks find their weights.
        like: Arrays with shapes and types of the weights.
        now: Returns the generation that rounds begin with.
        base: The generation that the updates begin with; None for the generation of ``now``.
        retrain: Has other workers make replies again, and returns them in the same order.

    Attributes:
        run, members, like: The arguments.
        tensors: Numbers of the tensors that this round exchanges; None for all. Updates of other tensors are zero.
        factors: Scales of the updates that were too long, by slot.
    """

    def __init__(
        self,
        run: Run,
        members: Members,
        like: Weights,
        now: Callable[[], int],
        base: int | None = None,
        retrain: Retrain | None = None,
    ) -> None:
        self.run, self.members, self.like = run, members, like
        self._now, self._base, self._retrain = now, base, retrain or self._train_again
        self.tensors: Sequence[int] | None = None
        self.factors: dict[int, float] = {}
        self._size = sum(w.size for w in like)

    @property
    def base(self) -> int:
        """Number of the generation (version of the weights) that the updates were computed from."""
        return self._now() if self._base is None else self._base

    def locations(self, replies: Sequence[Reply]) -> list[Sent]:
        """Return where the updates of replies are, in the form that plans and comparisons have."""
        return [(reply.slot, reply.worker, reply.weight, self.factors.get(reply.slot, 1.0)) for reply in replies]

    async def carry_out(self, replies: list[Reply], work: Work) -> list[Reply]:
        """Run some work on the workers that have updates.

        If a worker is lost, have its slots trained again elsewhere, and try again.

        Args:
            replies: Replies of the updates.
            work: The function to run.

        Returns:
            The replies of the successful attempt.

        Raises:
            BadUpdate: An update cannot be merged.
            ConnectError: A worker reaches another one, but does not get its data.
            ClusterTooSmall: Too many workers were lost.
        """
        losses = 0
        while losses < TRIES:
            alive = self.members.members()
            if lost := [reply for reply in replies if _holder(reply) not in alive]:
                retrained = await self._retrained(lost)
                replies = [retrained.get(reply.slot, reply) for reply in replies]
                continue
            await self.members.reach()
            if self.members.members().keys() != alive.keys():
                continue  # a worker was lost or joined meanwhile
            holders = sorted(set(map(_holder, replies)))
            worker_loss = await work(
                replies, holders[: self._size], {number: proxy for (number, _), proxy in alive.items()}
            )
            if worker_loss is None:
                return replies
            worker, error = worker_loss
            losses += error is not None  # broken links need no limit: their number is small, and few workers return
            if error is not None and self.members.member(worker.id) in alive:
                slot = next((reply.slot for reply in replies if reply.worker == worker.id), replies[0].slot)
                self.run.crew.lose(worker, slot, error)
        raise ClusterTooSmall(
            f"workers were lost {TRIES} times while they exchanged one round", hint="look at the workers' terminals"
        )

    async def call_owners(
        self, verb: str, message: dict[str, Any], owners: Sequence[int], workers: Mapping[int, ProxyWorker]
    ) -> tuple[list[Any], WorkerLoss]:
        """Have all owners of ranges carry out one method of the sharded exchange.

        Args:
            verb: Name of the method.
            message: The method's argument, the same for all owners.
            owners: Numbers of the owners.
            workers: All workers, by number.

        Returns:
            The answers in the order of the owners; and a lost worker with the error, or None if all is done.

        Raises:
            BadUpdate: An update cannot be merged, or the new weights cannot be used.
            ConnectError: A worker reaches another one, but does not get its data.
        """
        calls = {
            asyncio.ensure_future(workers[owner].call(self.members.holder, verb, message)): workers[owner]
            for owner in owners
        }
        waiting = set(calls)
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for call in done:
                    try:
                        answer = call.result()
                    except LOSS as error:
                        return [], (calls[call], error)
                    if lost := await self._reported_loss(answer, calls[call], workers):
                        return [], lost
            return [call.result() for call in calls], None
        finally:
            await end_all(list(calls))

    # -- parts --------------------------------------------------------------------------------------------------------

    async def _retrained(self, replies: list[Reply]) -> dict[int, Reply]:
        """Have the rounds of some replies trained again.

        Their updates get the same bits and the same weight as before.
        """
        new_replies = await self._retrain(replies)
        return {reply.slot: reply for reply in new_replies}

    async def _train_again(self, replies: list[Reply]) -> list[Reply]:
        """Have the rounds of some replies trained again, and check the new replies."""
        trainings = [asyncio.ensure_future(self.run.carry_task(reply.task)) for reply in replies]
        try:
            new_replies = await asyncio.gather(*trainings)
        finally:
            await end_all(trainings)
        for reply in new_replies:
            self.run.judge.check(reply)
        return new_replies

    async def _reported_loss(self, answer: Any, worker: ProxyWorker, workers: Mapping[int, ProxyWorker]) -> WorkerLoss:
        """Return the lost or unreachable worker that an owner's answer reports, or None.

        If the answer reports an unusable update, raise this error.
        """
        match answer:
            case Unmergeable(reason):
                raise BadUpdate(reason)
            case Unusable(fault):
                raise unusable_weights(fault, self.run.progress.round)
        if not isinstance(answer, Unanswered):
            return None
        other = workers[answer.other]
        if (lost := await self._loss_of(other)) is not None:
            return other, lost
        if answer.link:
            await self.members.cut(answer.worker, answer.other, answer.reason)
            return other, None
        raise ConnectError(
            f"{worker.name} does not get its part of the round from {other.name}: {answer.reason}",
            hint="check the network between the two workers, or use exchange='star'",
        )

    async def _loss_of(self, worker: ProxyWorker) -> DDLFError | None:
        """Return the error that told the master of the loss of a worker; None if the worker still answers.

        It is called when another worker cannot reach that worker.
        """
        try:
            async with asyncio.timeout(NOTICED_S):
                await worker.call(self.members.holder, "values", self._now(), 0, 0)
        except LOSS as error:
            return error
        except TimeoutError:
            pass
        return None


def _holder(reply: Reply) -> Member:
    """Return the worker that has the update of a reply."""
    return reply.worker, reply.openings


async def verdicts(remote_updates: RemoteUpdates, replies: dict[int, Reply]) -> dict[int, Verdict]:
    """Return whether each slot's update of a round is usable, as ``judge`` does. Messages count slots from 1.

    The updates that are too long are scaled from now on.

    Args:
        remote_updates: The updates, which stay on workers.
        replies: Replies by slot. A reply that was carried again, because its worker was lost, replaces its entry.
    """
    facts, like, remote_updates.factors = remote_updates.run.facts, remote_updates.like, {}
    first_verdicts = verdicts_of(
        {slot + 1: reply.update if isinstance(reply.update, Fault) else None for slot, reply in replies.items()}
    )
    usable = [replies[number - 1] for number, verdict in first_verdicts.items() if not verdict.fault]
    groups = compared(like, facts.trainable)
    usable, norms = await lengths(remote_updates, usable, groups)
    by_slot = [
        {reply.slot + 1: reply_norms[group] for reply, reply_norms in zip(usable, norms, strict=True)}
        for group in (0, 1)
    ]
    check = Comparison(by_slot, {reply.slot + 1: reply.weight for reply in usable}, facts.update_policy, Limits())
    pointing = [reply for reply in usable if reply.slot + 1 in check.pointing]
    compared_replies, cosine = await pairs(
        remote_updates, pointing, groups[0], [by_slot[0][reply.slot + 1] for reply in pointing]
    )
    replies.update({reply.slot: reply for reply in [*usable, *compared_replies]})
    verdicts = {number - 1: verdict for number, verdict in (first_verdicts | check.verdicts(cosine)).items()}
    remote_updates.factors = {slot: verdict.factor for slot, verdict in verdicts.items()}
    return verdicts


async def weighed(
    remote_updates: RemoteUpdates, replies: list[Reply], rule: WholeRule
) -> tuple[list[Reply], list[float]]:
    """Compute the weights of updates for a merge rule that compares whole updates.

    Returns:
        The replies, with new ones for slots carried again; and a weight for each, followed by the sum's divisor.
    """
    floats = [i for i, w in enumerate(remote_updates.like) if is_float(w)]
    if rule.by_length:
        replies, norms = await lengths(remote_updates, replies, [floats])
        comparison: Vector = np.array([length for (length,) in norms])
    else:
        replies, comparison = await pairs(remote_updates, replies, floats)
    weights, divisor = rule.weigh(comparison, np.array([reply.weight for reply in replies], np.float64))
    return replies, [*map(float, weights), divisor]


async def lengths(
    remote_updates: RemoteUpdates, replies: list[Reply], groups: Sequence[Sequence[int]]
) -> tuple[list[Reply], list[list[float]]]:
    """Return the replies, and for each update the norms of some groups of tensors."""
    norms: list[list[float]] = []

    async def ask(replies: list[Reply], owners: list[Member], workers: dict[int, ProxyWorker]) -> WorkerLoss:
        holders = [workers[reply.worker] for reply in replies]
        calls = [
            asyncio.ensure_future(
                worker.call(
                    remote_updates.members.holder, "lengths", remote_updates.base, slot, [*map(list, groups)], factor
                )
            )
            for (slot, _, _, factor), worker in zip(remote_updates.locations(replies), holders, strict=True)
        ]
        try:
            for worker, answer in zip(holders, calls, strict=True):
                try:
                    await answer
                except LOSS as error:
                    return worker, error
        finally:
            await end_all(calls)
        norms[:] = [list(answer.result()) for answer in calls]
        return None

    return await remote_updates.carry_out(replies, ask), norms


async def pairs(
    remote_updates: RemoteUpdates, replies: list[Reply], tensors: Sequence[int], norms: Sequence[float] = ()
) -> tuple[list[Reply], Vector]:
    """Return the replies and a matrix (S, S) that compares their updates.

    It has the squared distances over some tensors, or with ``norms`` the cosines.
    """
    sums: list[Vector] = []
    if not replies:
        return [], np.zeros((0, 0))

    async def ask(replies: list[Reply], owners: list[Member], workers: dict[int, ProxyWorker]) -> WorkerLoss:
        request = Pairs(
            base=remote_updates.base,
            updates=remote_updates.locations(replies),
            owners=[number for number, _ in owners],
            tensors=[i for i in tensors if remote_updates.tensors is None or i in remote_updates.tensors],
            norms=list(norms),
            piece=PIECE,
        )
        answers, worker_loss = await remote_updates.call_owners(
            "compare", request.to_message(), request.owners, workers
        )
        sums[:] = [matrix for answer in answers for matrix in answer]
        return worker_loss

    replies = await remote_updates.carry_out(replies, ask)
    return replies, added(sums, len(replies))


async def measured(run: Run, reference: Callable[[], HeldWeights], replies: Sequence[Reply]) -> list[Reply]:
    """Have slots compute batch normalization's moving statistics for weights that workers hold.

    The differences to the merged statistics stay on the workers, like updates.

    Args:
        run: The run.
        reference: Returns the weights and the means of slot states that belong to them, or raises an error if they are
            lost. It is called before each attempt of a slot, because workers may be lost meanwhile.
        replies: The replies that were merged.

    Returns:
        Replies of the same slots, in the same order, whose updates are these differences.

    Raises:
        BadUpdate: Statistics are unusable.
    """
    begin = time.perf_counter()
    tasks = [measuring(reference().to_message(), reply) for reply in replies]
    results = await carried(run, tasks, partial(_measure, reference))
    for reply, (worker, _, problem) in zip(replies, results, strict=True):
        if problem is not None:
            raise problem.error(reply.slot + 1, f"worker {worker}")
    run.arrived += time.perf_counter() - begin
    return [
        dataclasses.replace(reply, task=task, worker=worker, openings=openings)
        for reply, task, (worker, openings, _) in zip(replies, tasks, results, strict=True)
    ]


async def _measure(reference: Callable[[], HeldWeights], run: Run, task: Task, worker: ProxyWorker, holds: bool) -> Any:
    task, openings = dataclasses.replace(task, weights=reference().to_message()), run.crew.openings(worker.id)
    return worker.id, openings, await run.exchange.measure(task, worker)
