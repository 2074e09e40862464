"""Synchronous training that exchanges one fragment of the weights in each round. Runs on the master.

``Synchronous`` uses it for the outer optimizer ``streaming``. ``ddlf.algorithms.streaming`` has the rule.
``ddlf.training.slot.parts.fragments`` has the slot's side, which keeps its own weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

import numpy as np

from ddlf.algorithms.merge import Rule
from ddlf.algorithms.streaming import Streaming, deal, tensors_of
from ddlf.algorithms.weights import Weights
from ddlf.events import Warned
from ddlf.training.recalibration import recalibrated
from ddlf.training.rounds import Ended, Round
from ddlf.training.run import Run
from ddlf.training.slot.task import Task


class Fragments:
    """The fragments of one run, round by round. ``run.state["merged"]`` has the last round that merged each fragment.

    Args:
        run: The run.
        rule: Defines the fragments.
        like: Arrays with the shapes and types of the weights.

    Attributes:
        tensors: Numbers of the tensors that are exchanged in the current round.

    Raises:
        ConfigError: There are more fragments than tensors.
    """

    def __init__(self, run: Run, rule: Streaming, like: Weights) -> None:
        deal(like, run.facts.trainable, rule.fragments)  # raises before the state is allocated
        self._run, self._rule, self._like = run, rule, like
        run.state.setdefault("outer", rule.init(run.weights))
        run.state.setdefault("merged", [np.full(rule.fragments, -1)])
        self.tensors: list[int] = []
        self._parts: Sequence[int] = ()

    def tasks(self, round: Round) -> list[Task]:
        """Return the tasks of a round, with the fragments to exchange."""
        run, rule = self._run, self._rule
        self._parts = range(rule.fragments) if round.last else [round.number % rule.fragments]
        self.tensors = tensors_of(self._parts, self._like, run.facts.trainable, rule.fragments)
        known, wanted = tuple(run.state["merged"][0].tolist()), tuple(self._parts)
        return [dataclasses.replace(task, merged=known, wanted=wanted, alpha=rule.alpha) for task in round.tasks]

    def were_merged(self, number: int) -> None:
        """Record that the fragments of a round, from 0, are merged."""
        merged = self._run.state["merged"][0]
        self._run.state["merged"] = [np.where(np.isin(np.arange(len(merged)), self._parts), number, merged)]

    def tell_late(self) -> None:
        """Warn if some of the slots' learning is not in the model when training ends."""
        merged = self._run.state["merged"][0]
        if late := int(np.count_nonzero(merged < merged.max())):
            why = (
                f"what slots have learned since {late} of {len(merged)} fragments were merged is not in the model: "
                "training that goes on to its last round merges it"
            )
            self._run.crew.emit(Warned(about="streaming", why=why))


async def train(run: Run, merge: Rule, rule: Streaming, balance: str) -> None:
    """Train until all rounds are done or the run has to end.

    Args:
        run: The run.
        merge: The merge rule for the updates of a round.
        rule: Defines the fragments, and changes them with their merged update.
        balance: ``"equal"`` partitions, or partitions in proportion to each slot's measured ``"speed"``.

    Raises:
        ConfigError: There are more fragments than tensors.
    """
    fragments = Fragments(run, rule, run.weights)
    with contextlib.suppress(Ended):
        async for round in run.rounds(balance):
            tasks = fragments.tasks(round)
            into = merge.start(len(tasks), run.weights, run.facts.names)
            replies = await run.all(tasks, into=into)
            run.state["outer"], weights = rule.update(
                run.state["outer"], run.weights, into.result(), run.facts.trainable, fragments.tensors
            )
            fragments.were_merged(round.number)
            if run.facts.statistics:
                weights = await recalibrated(run, weights, replies, merge)
            await run.commit(weights, replies)
    fragments.tell_late()
