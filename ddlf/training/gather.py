"""From the slots of a round that are being carried to one merged update. Runs on the master.

With the policy ``"stop"`` each update is merged as it comes, and one that cannot be used ends the run. The other policies compare all updates of a
round: what is rejected is computed again on another worker, which gives the same bits if the first one was broken, and is left out if that is
rejected, too, or there is no other worker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ddlf.algorithms.check import Verdict, judge, scaled
from ddlf.errors import BadUpdate
from ddlf.events import UpdateClipped

if TYPE_CHECKING:
    from ddlf.roles.task import Reply
    from ddlf.training.slots import Job

Weights = list[np.ndarray[Any, Any]]
Carry = Callable[[int, frozenset[int]], Coroutine[Any, Any, "Reply"]]


@dataclass(frozen=True, slots=True)
class Gathered:
    """One round's updates.

    Args:
        merged: All as one.
        results: Of the slots that count, in slot order.
        verdicts: A line for each update that was not simply accepted.
        arrived: When the last one did, by ``time.perf_counter``.
    """

    merged: Weights
    results: dict[int, Reply]
    verdicts: tuple[str, ...]
    arrived: float


async def gather(job: Job, tasks: Sequence[asyncio.Task[Reply]], carry: Carry) -> Gathered:
    """Wait for all updates of a round and merge them, in slot order.

    Args:
        job: The run.
        tasks: One for each slot.
        carry: Has a slot carried again, not by the given workers.

    Raises:
        BadUpdate: An update cannot be used (policy ``"stop"``), or none of the round can.
    """
    return await (_as_they_come(job, tasks) if job.update_policy == "stop" else _compared(job, tasks, carry))


async def _as_they_come(job: Job, tasks: Sequence[asyncio.Task[Reply]]) -> Gathered:
    merge = job.rule.start(job.slots, job.progress.weights, job.names)
    slots = {task: slot for slot, task in enumerate(tasks)}
    waiting = set(tasks)
    arrived = time.perf_counter()
    while waiting:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        arrived = time.perf_counter()
        for task in sorted(done, key=slots.__getitem__):
            result = task.result()
            job.check(slots[task], result)
            merge.add(slots[task], result.update, result.samples, checked=True)
    return Gathered(merge.result(), {slot: task.result() for slot, task in enumerate(tasks)}, (), arrived)


async def _compared(job: Job, tasks: Sequence[asyncio.Task[Reply]], carry: Carry) -> Gathered:
    results = dict(enumerate(await asyncio.gather(*tasks)))
    lines: list[str] = []
    refused: dict[int, frozenset[int]] = {}
    said: dict[int, tuple[Reply, str]] = {}  # of each slot the result that was judged last, and how
    while True:
        verdicts = verdict_of(job, results)
        again = []
        for slot, verdict in verdicts.items():
            worker = results[slot].worker
            if verdict.action == "accept":
                job.crew.trust(worker)
                continue
            before, action = said.get(slot, (None, ""))
            said[slot] = results[slot], verdict.action
            if before is results[slot] and action == verdict.action:
                continue  # it was looked at again because others were computed again
            lines.append(f"{verdict} (worker {worker})")
            if verdict.action == "clip":
                tell_clipped(job, slot, results[slot], verdict)
            if verdict.action == "reject":
                refused[slot] = refused.get(slot, frozenset()) | {worker}
                job.crew.distrust(slot, worker, str(verdict))
                if len(refused[slot]) == 1 and job.crew.others_than(refused[slot]):
                    again.append(slot)
        if not again:
            break
        computed = await asyncio.gather(*(carry(slot, refused[slot]) for slot in again))
        results.update(zip(again, computed, strict=True))
    arrived = time.perf_counter()
    fit = {slot: results[slot] for slot in sorted(results) if verdicts[slot].action != "reject"}
    if not fit:
        raise BadUpdate("no update of this round can be used: " + "; ".join(lines))
    merge = job.rule.start(len(fit), job.progress.weights, job.names)
    for place, (slot, result) in enumerate(fit.items()):
        merge.add(place, scaled(result.update, verdicts[slot].factor), result.samples, checked=True)
    return Gathered(merge.result(), fit, tuple(dict.fromkeys(lines)), arrived)


def tell_clipped(job: Job, slot: int, result: Reply, verdict: Verdict) -> None:
    """Let the app know that an update counts for less than was sent."""
    number = job.progress.slot_rounds[slot] if job.progress.slot_rounds else job.progress.round
    facts = {"round": number + 1, "slot": slot + 1, "worker": result.worker}
    job.crew.emit(UpdateClipped(**facts, factor=verdict.factor, why=str(verdict)))


def verdict_of(job: Job, results: dict[int, Reply]) -> dict[int, Verdict]:
    """The verdicts on some slots' updates, by slot; their texts count slots from 1."""
    found = judge(
        {slot + 1: (result.update, result.samples) for slot, result in results.items()},
        job.progress.weights,
        job.update_policy,
        names=job.names,
        trainable=job.trainable,
    )
    return {number - 1: verdict for number, verdict in found.items()}
