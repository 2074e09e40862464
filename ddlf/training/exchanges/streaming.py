"""The fragments of a run that exchanges one fragment of the weights in each round. Runs on the master.

The loops of synchronous training use it for the outer optimizer ``streaming``. ``ddlf.algorithms.outer`` has the rule.
``ddlf.training.slot.parts`` has the slot's side, which keeps its own weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ddlf.algorithms.outer import OuterOptimizer, Streaming, divide_into_fragments, tensors_of
from ddlf.algorithms.weights import Weights
from ddlf.events import Warned
from ddlf.training.run import Round, Run
from ddlf.training.slot.task import Task


class Fragments:
    """Chooses which fragment of the weights a run exchanges in each round.

    ``run.state["merged"]`` has the last round that merged each fragment.

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
        divide_into_fragments(like, run.facts.trainable, rule.fragments)  # raises before the state is allocated
        self._run, self._rule, self._like = run, rule, like
        run.state.setdefault("outer", rule.init(run.weights))
        run.state.setdefault("merged", [np.full(rule.fragments, -1)])
        self.tensors: list[int] = []
        self._parts: Sequence[int] = ()

    def tasks(self, round: Round) -> list[Task]:
        """Return the tasks of a round. They name the fragments (parts of the weights) that the round exchanges."""
        run, rule = self._run, self._rule
        self._parts = range(rule.fragments) if round.last else [round.number % rule.fragments]
        self.tensors = tensors_of(self._parts, self._like, run.facts.trainable, rule.fragments)
        merged, fragments = tuple(run.state["merged"][0].tolist()), tuple(self._parts)
        return [dataclasses.replace(task, merged=merged, wanted=fragments, alpha=rule.alpha) for task in round.tasks]

    def update(self, merged: Weights) -> Weights:
        """Apply the merged update of the round's fragments, and return the new weights."""
        run = self._run
        run.state["outer"], weights = self._rule.update(
            run.state["outer"], run.weights, merged, run.facts.trainable, self.tensors
        )
        return weights

    def were_merged(self, number: int) -> None:
        """Note that the fragments (parts of the weights) of a round, numbered from 0, are merged."""
        merged = self._run.state["merged"][0]
        self._run.state["merged"] = [np.where(np.isin(np.arange(len(merged)), self._parts), number, merged)]

    def tell_late(self) -> None:
        """Warn when training ends if the model lacks the last local training of some slots."""
        merged = self._run.state["merged"][0]
        if late := int(np.count_nonzero(merged < merged.max())):
            reason = (
                f"what slots have learned since {late} of {len(merged)} fragments were merged is not in the model: "
                "training that continues to its last round merges it"
            )
            self._run.crew.emit(Warned(about="streaming", why=reason))


def fragments_of(run: Run, outer: OuterOptimizer, like: Weights) -> Fragments | None:
    """Return the object that chooses a run's fragments; None if its outer optimizer exchanges whole weights.

    Args:
        run: The run.
        outer: The outer optimizer.
        like: Arrays with the shapes and types of the weights.

    Raises:
        ConfigError: There are more fragments than tensors.
    """
    return Fragments(run, outer, like) if isinstance(outer, Streaming) else None
