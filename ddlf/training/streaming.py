"""Synchronous training that exchanges a fragment of the weights in each round. Runs on the master; ``Synchronous`` goes this way with ``streaming``.

``ddlf.algorithms.streaming`` is the rule, ``ddlf.roles.fragments`` what a slot does with weights of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import numpy as np

from ddlf.algorithms.merge import Rule
from ddlf.algorithms.streaming import Streaming, deal, tensors_of
from ddlf.events import Warned
from ddlf.training.recalibration import recalibrated
from ddlf.training.rounds import Ended
from ddlf.training.run import Run


async def train(run: Run, merge: Rule, rule: Streaming, balance: str) -> None:
    """Train until all rounds are over or the run is to end.

    Args:
        run: The run. Of what it keeps, ``merged`` is the number of the round in which each fragment was merged last.
        merge: How the updates of a round become one.
        rule: Which fragments there are, and how their merged update changes them.
        balance: ``"equal"`` partitions, or sizes that follow each slot's measured ``"speed"``.

    Raises:
        ConfigError: There are more fragments than tensors.
    """
    deal(run.weights, run.facts.trainable, rule.fragments)  # refused before anything is made as long as that
    run.state.setdefault("outer", rule.init(run.weights))
    run.state.setdefault("merged", [np.full(rule.fragments, -1)])
    with contextlib.suppress(Ended):
        async for round in run.rounds(balance):
            parts = range(rule.fragments) if round.last else [round.number % rule.fragments]
            tensors = tensors_of(parts, run.weights, run.facts.trainable, rule.fragments)
            merged = run.state["merged"][0]
            into = merge.start(len(round.tasks), run.weights, run.facts.names)
            wanted, known = tuple(parts), tuple(merged.tolist())
            more: dict[str, Any] = dict(merged=known, wanted=wanted, alpha=rule.alpha, overlap=rule.overlap)
            ahead = await _ahead(run, round.number + 1, rule.overlap)
            tasks = [dataclasses.replace(task, **more, ahead=ahead.get(task.slot)) for task in round.tasks]
            replies = await run.all(tasks, into=into)
            run.state["outer"], weights = rule.update(
                run.state["outer"], run.weights, into.result(), run.facts.trainable, tensors
            )
            run.state["merged"] = [np.where(np.isin(np.arange(rule.fragments), parts), round.number, merged)]
            await run.commit(await recalibrated(run, weights, replies, merge), replies)
    merged = run.state["merged"][0]
    if late := int(np.count_nonzero(merged < merged.max())):
        why = (
            f"what slots have learned since {late} of {rule.fragments} fragments were merged is not in the model: "
            "training that goes on to its last round merges it"
        )
        run.crew.emit(Warned(about="streaming", why=why))


async def _ahead(run: Run, number: int, steps: int) -> dict[int, Any]:
    """Of each slot that trains in a round, from 0, the first local epoch, and the samples of its first steps."""
    if not steps or number == len(run.progress.epochs):
        return {}
    epoch, samples = run.progress.starts[number], steps * run.facts.batch_size
    return {slot: (epoch, (await run.part(slot, number))[:samples]) for slot in range(run.progress.tasks_in(number))}
