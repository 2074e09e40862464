"""From the slots of a round that are being carried to one merged update. Runs on the master.

With the policy ``"stop"`` each update is merged as it comes, and one that cannot be used ends the run. The other policies compare all updates of a
round: what is rejected is computed again on another worker, which gives the same bits if the first one was broken, and is left out if that is
rejected, too, or there is no other worker.
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
from ddlf.training.rounds import Elsewhere
from ddlf.training.slot.task import Reply, Task

if TYPE_CHECKING:
    from ddlf.training.run import Run

Again = Callable[[Task, frozenset[int]], Coroutine[Any, Any, Reply]]


async def gather(
    run: Run, tasks: Sequence[Task], carrying: Sequence[asyncio.Task[Reply]], again: Again, into: Merge | None = None
) -> list[Reply]:
    """Wait for all updates of a round.

    Args:
        run: The run.
        tasks: What slots do in it.
        carrying: One for each task, which ends with its reply.
        again: Has a task carried again, not by the given workers.
        into: Takes the updates, by the places of their tasks.

    Returns:
        Replies whose updates count, in the order of the tasks.

    Raises:
        BadUpdate: An update cannot be used (policy ``"stop"``), or none of the round can.
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
    said: dict[int, tuple[Reply, str]] = {}  # of each slot the reply that was judged last, and how
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
                continue  # it was looked at again because others were computed again
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
    """Refuse an update that cannot be used whatever the others are.

    Raises:
        BadUpdate: Names the worker, the tensor and how many of its values are wrong.
    """
    found = reply.update if stays(reply) else fault(reply.update, reply.samples, run.weights, run.facts.names)
    if found is not None:
        raise found.error(reply.slot + 1, f"worker {reply.worker}")


def stays(reply: Reply) -> bool:
    """Whether an update is on its worker, which has looked at it and said what makes it unusable."""
    return reply.update is None or isinstance(reply.update, Fault)


def check_weights(run: Run, weights: Weights, replies: Sequence[Reply]) -> None:
    """Refuse new global weights that no slot could begin with. Their updates could be used, so it is the rule that took them too far.

    Raises:
        BadUpdate: Names the round, the tensor and how many of its values are wrong.
    """
    if weights is run.weights or isinstance(weights, Elsewhere):  # those who made them have looked
        return
    if (found := fault(weights, 1, weights, run.facts.names)) is not None:
        raise unfit(found, replies[0].task.round)


def unfit(found: Fault, number: int) -> BadUpdate:
    """The error for the weights after a round, from 0, that cannot be used."""
    return BadUpdate(
        f"the weights after round {number + 1} cannot be used: {found.reason}, and no update was",
        hint="lower the learning rate of the rule that applies updates: that of outer, or of the model's optimizer",
        tensor=found.tensor,
        count=found.count,
    )


def judged_alone(run: Run, reply: Reply, latest: dict[int, Reply]) -> Reply | None:
    """One reply as its update counts, compared with the last one of each other slot; None if it does not.

    Raises:
        BadUpdate: It cannot be used (policy ``"stop"``).
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
    """The reply with its update scaled, if that was too long."""
    if verdict.factor == 1:
        return reply
    if stays(reply):
        return dataclasses.replace(reply, factor=verdict.factor)
    return dataclasses.replace(reply, update=scaled(reply.update, verdict.factor))


def tell_clipped(run: Run, reply: Reply, verdict: Verdict) -> None:
    """Let the app know that an update counts for less than was sent."""
    facts = {"round": reply.task.round + 1, "slot": reply.slot + 1, "worker": reply.worker}
    run.crew.emit(UpdateClipped(**facts, factor=verdict.factor, why=str(verdict)))


def verdicts_on(run: Run, replies: dict[int, Reply]) -> dict[int, Verdict]:
    """The verdicts on some slots' updates, by slot; their texts count slots from 1."""
    found = judge(
        {slot + 1: (reply.update, reply.weight) for slot, reply in replies.items()},
        run.weights,
        run.facts.update_policy,
        names=run.facts.names,
        trainable=run.facts.trainable,
    )
    return {number - 1: verdict for number, verdict in found.items()}
