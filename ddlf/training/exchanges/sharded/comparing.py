"""What updates that stay on their workers are as wholes: their lengths, distances and angles. Runs on the master.

A length is said by the worker that has the update. What two are to each other is computed by those who have a slice of all, block by block, and
added here exactly: the bits that the master has when it has the updates (``algorithms/pairwise.py``).
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

import numpy as np

from ddlf.algorithms.merge import WholeRule
from ddlf.algorithms.pairwise import Vector, added
from ddlf.algorithms.ranges import PIECE
from ddlf.algorithms.update_check import Comparison, Fault, Limits, Verdict, compared, verdicts_of
from ddlf.algorithms.weights import is_float
from ddlf.cluster.proxy import ProxyWorker
from ddlf.training.exchanges.members import Member
from ddlf.training.exchanges.sharded.pairs import Pairs
from ddlf.training.exchanges.sharded.updates import Gone, Together
from ddlf.training.recovery import LOSS
from ddlf.training.rounds import end_all
from ddlf.training.slot.task import Reply


async def verdicts(among: Together, replies: dict[int, Reply]) -> dict[int, Verdict]:
    """The verdicts on a round's updates, by slot, as ``judge`` has them; their texts count slots from 1.

    Args:
        among: The workers that have them.
        replies: By slot. What had to be carried again since its worker was lost takes the place of what it was.
    """
    facts, like = among.run.facts, among.like
    found = verdicts_of(
        {slot + 1: one.update if isinstance(one.update, Fault) else None for slot, one in replies.items()}
    )
    usable = [replies[number - 1] for number, verdict in found.items() if not verdict.fault]
    groups = compared(like, facts.trainable)
    usable, norms = await lengths(among, usable, groups)
    by_slot = [{one.slot + 1: own[group] for one, own in zip(usable, norms, strict=True)} for group in (0, 1)]
    check = Comparison(by_slot, {one.slot + 1: one.weight for one in usable}, facts.update_policy, Limits())
    pointing = [one for one in usable if one.slot + 1 in check.pointing]
    again, cosine = await pairs(among, pointing, groups[0], [by_slot[0][one.slot + 1] for one in pointing])
    replies.update({one.slot: one for one in [*usable, *again]})
    return {number - 1: verdict for number, verdict in (found | check.verdicts(cosine)).items()}


async def weighed(among: Together, replies: list[Reply], rule: WholeRule) -> tuple[list[Reply], list[float]]:
    """What a rule makes of updates as wholes.

    Returns:
        The replies, some of which may have been carried again; a weight for each, and behind these what their sum is divided by.
    """
    floats = [i for i, w in enumerate(among.like) if is_float(w)]
    if rule.by_length:
        replies, norms = await lengths(among, replies, [floats])
        found: Vector = np.array([one for (one,) in norms])
    else:
        replies, found = await pairs(among, replies, floats)
    weights, divisor = rule.weigh(found, np.array([reply.weight for reply in replies], np.float64))
    return replies, [*map(float, weights), divisor]


async def lengths(
    among: Together, replies: list[Reply], groups: Sequence[Sequence[int]]
) -> tuple[list[Reply], list[list[float]]]:
    """The norms of some groups of tensors of each update."""
    found: list[list[float]] = []

    async def ask(replies: list[Reply], owners: list[Member], workers: dict[int, ProxyWorker]) -> Gone:
        there = [workers[reply.worker] for reply in replies]
        asking = [
            asyncio.ensure_future(
                worker.call(among.there.holder, "lengths", among.base, one.slot, [*map(list, groups)], one.factor)
            )
            for one, worker in zip(replies, there, strict=True)
        ]
        try:
            for worker, answer in zip(there, asking, strict=True):
                try:
                    await answer
                except LOSS as error:
                    return worker, error
        finally:
            await end_all(asking)
        found[:] = [list(answer.result()) for answer in asking]
        return None

    return await among.on(replies, ask), found


async def pairs(
    among: Together, replies: list[Reply], tensors: Sequence[int], norms: Sequence[float] = ()
) -> tuple[list[Reply], Vector]:
    """The squared distances of each two updates, or with their norms the cosines, over some tensors, shape (S, S)."""
    found: list[Vector] = []
    if not replies:
        return [], np.zeros((0, 0))

    async def ask(replies: list[Reply], owners: list[Member], workers: dict[int, ProxyWorker]) -> Gone:
        asked = Pairs(
            base=among.base,
            updates=[(one.slot, one.worker, one.weight, one.factor) for one in replies],
            owners=[number for number, _ in owners],
            tensors=[i for i in tensors if among.tensors is None or i in among.tensors],
            norms=list(norms),
            piece=PIECE,
        )
        answers, gone = await among.carried_out("compare", dataclasses.asdict(asked), asked.owners, workers)
        found[:] = [one for answer in answers for one in answer.get("sums", ())]
        return gone

    replies = await among.on(replies, ask)
    return replies, added(found, len(replies))
