"""Collects the updates of a round and merges the accepted ones. Runs on the master.

With the policy ``"stop"``, each update is merged when it arrives, and an unusable one ends the run. The other policies
compare all updates of a round. Another worker recomputes a rejected update, and gives the right bits if the first
worker was broken. The update is left out if it is rejected again, or if there is no other worker.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from ddlf.algorithms.merge import Merge
from ddlf.algorithms.update_check import Fault, Verdict, fault, judge, scaled
from ddlf.algorithms.weights import Weights
from ddlf.errors import BadUpdate
from ddlf.events import UpdateClipped
from ddlf.training.slot.task import Reply, Task
from ddlf.training.weights_ref import WeightsRef

if TYPE_CHECKING:
    from ddlf.training.run import Run

Again = Callable[[Task, frozenset[int]], Coroutine[Any, Any, Reply]]


async def gather(
    run: Run, tasks: Sequence[Task], carrying: Sequence[asyncio.Task[Reply]], again: Again, into: Merge | None = None
) -> list[Reply]:
    """Wait for all updates of a round, and return the replies that count.

    Args:
        run: The run.
        tasks: The tasks of the round.
        carrying: For each task, the asyncio task that returns its reply.
        again: Has a task carried again, by a worker that is not in the given set.
        into: Receives the accepted updates, under the places of their tasks.

    Returns:
        The replies with accepted updates, in the order of the tasks.

    Raises:
        BadUpdate: An update is unusable and the policy is ``"stop"``, or all updates are unusable.
    """
    if run.facts.update_policy == "stop":
        return await _as_they_come(run, carrying, into)
    return await _compared(run, tasks, carrying, again, into)


async def _as_they_come(run: Run, carrying: Sequence[asyncio.Task[Reply]], into: Merge | None) -> list[Reply]:
    places = {one: place for place, one in enumerate(carrying)}
    waiting = set(carrying)
    while waiting:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        run.arrived = time.perf_counter()
        for one in sorted(done, key=places.__getitem__):
            reply = one.result()
            check(run, reply)
            if into is not None:
                into.add(places[one], reply.update, reply.weight, checked=True)
    return [one.result() for one in carrying]


async def _compared(
    run: Run, tasks: Sequence[Task], carrying: Sequence[asyncio.Task[Reply]], again: Again, into: Merge | None
) -> list[Reply]:
    replies = {reply.slot: reply for reply in await asyncio.gather(*carrying)}
    refused: dict[int, frozenset[int]] = {}
    said: dict[int, tuple[Reply, str]] = {}  # slot -> the reply that was judged last, and the verdict
    while True:
        compares = run.exchange.weights_out.compares if any(map(stays, replies.values())) else None
        verdicts = verdicts_on(run, replies) if compares is None else await compares(replies)
        retried = []
        for task in tasks:
            slot, reply, verdict = task.slot, replies[task.slot], verdicts[task.slot]
            if verdict.action == "accept":
                run.crew.trust(reply.worker)
                continue
            before, action = said.get(slot, (None, ""))
            said[slot] = reply, verdict.action
            if before is reply and action == verdict.action:
                continue  # judged again only because other updates were recomputed, with the same verdict
            run.verdicts.append(f"{verdict} (worker {reply.worker})")
            if verdict.action == "clip":
                tell_clipped(run, reply, verdict)
            if verdict.action == "reject":
                refused[slot] = refused.get(slot, frozenset()) | {reply.worker}
                run.crew.distrust(slot, reply.worker, str(verdict))
                if len(refused[slot]) == 1 and run.crew.others_than(refused[slot]):
                    retried.append(task)
        if not retried:
            break
        computed = await asyncio.gather(*(again(task, refused[task.slot]) for task in retried))
        replies.update({reply.slot: reply for reply in computed})
    run.arrived = time.perf_counter()
    fit = []
    for place, task in enumerate(tasks):
        if verdicts[task.slot].action != "reject":
            fit.append(as_it_counts(replies[task.slot], verdicts[task.slot]))
            if into is not None:
                into.add(place, fit[-1].update, fit[-1].weight, checked=True)
        elif into is not None:
            into.leave_out(place)
    if not fit:
        raise BadUpdate("no update of this round can be used: " + "; ".join(run.verdicts))
    return fit


def check(run: Run, reply: Reply) -> None:
    """Refuse an update that is unusable by itself, whatever the other updates are.

    Raises:
        BadUpdate: Names the worker, the tensor and the number of wrong values.
    """
    found = reply.update if stays(reply) else fault(reply.update, reply.samples, run.weights, run.facts.names)
    if found is not None:
        raise found.error(reply.slot + 1, f"worker {reply.worker}")


def stays(reply: Reply) -> bool:
    """Return whether an update stays on its worker, which has checked it and reported any fault."""
    return reply.update is None or isinstance(reply.update, Fault)


def check_weights(run: Run, weights: Weights | WeightsRef, replies: Sequence[Reply]) -> None:
    """Refuse new global weights that contain NaN or infinity. The updates were usable, so the rule went too far.

    Raises:
        BadUpdate: Names the round, the tensor and the number of wrong values.
    """
    if isinstance(weights, WeightsRef) or weights is run.progress.weights:  # the workers have checked remote weights
        return
    if (found := fault(weights, 1, weights, run.facts.names)) is not None:
        raise unfit(found, replies[0].task.round)


def unfit(found: Fault, number: int) -> BadUpdate:
    """Return the error for unusable weights after a round, numbered from 0."""
    return BadUpdate(
        f"the weights after round {number + 1} cannot be used: {found.reason}, and no update was",
        hint="lower the learning rate of the rule that applies updates: that of outer, or of the model's optimizer",
        tensor=found.tensor,
        count=found.count,
    )


def judged_alone(run: Run, reply: Reply, latest: dict[int, Reply]) -> Reply | None:
    """Judge one update against the last one of each other slot.

    Returns:
        The reply, with its update scaled if it was too long; None if the update is rejected.

    Raises:
        BadUpdate: The update is unusable, and the policy is ``"stop"``.
    """
    if run.facts.update_policy == "stop" or run.exchange.weights_out.stays:
        check(run, reply)
        return reply
    verdict = verdicts_on(run, {**latest, reply.slot: reply})[reply.slot]
    if verdict.action == "reject":
        run.crew.distrust(reply.slot, reply.worker, str(verdict))
        return None
    run.crew.trust(reply.worker)
    if verdict.action == "clip":
        run.verdicts.append(str(verdict))
        tell_clipped(run, reply, verdict)
    return as_it_counts(reply, verdict)


def as_it_counts(reply: Reply, verdict: Verdict) -> Reply:
    """Return the reply with its update scaled, if the update was too long."""
    if verdict.factor == 1:
        return reply
    if stays(reply):
        return dataclasses.replace(reply, factor=verdict.factor)
    return dataclasses.replace(reply, update=scaled(reply.update, verdict.factor))


def tell_clipped(run: Run, reply: Reply, verdict: Verdict) -> None:
    """Emit the event that an update was scaled down."""
    facts = {"round": reply.task.round + 1, "slot": reply.slot + 1, "worker": reply.worker}
    run.crew.emit(UpdateClipped(**facts, factor=verdict.factor, why=str(verdict)))


def verdicts_on(run: Run, replies: dict[int, Reply]) -> dict[int, Verdict]:
    """Return the verdicts on the updates of some slots, by slot. Their texts number slots from 1."""
    found = judge(
        {slot + 1: (reply.update, reply.weight) for slot, reply in replies.items()},
        run.weights,
        run.facts.update_policy,
        names=run.facts.names,
        trainable=run.facts.trainable,
    )
    return {number - 1: verdict for number, verdict in found.items()}
