"""What an arrival rule is, and what it is handed with an update. Runs on the master; ``arrival`` has the rules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ddlf.algorithms.named import Named
from ddlf.algorithms.outer import OuterOptimizer
from ddlf.algorithms.weights import Weights

State = dict[str, Weights]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrived:
    """An update, and what it was made from.

    Args:
        update: Weights before local training minus weights after it, one array per tensor.
        start: Weights that the slot began with.
        before: State of the rule when the slot was given them.
        slot: Number of the slot, from 0.
        slots: K, slots of its round.
        factor: How much it counts at its staleness, in (0, 1].
        trainable: Per tensor, whether it is trained.
        outer: Outer optimizer, whose state is the group ``"outer"``.
        accuracy: Accuracy of local training; NaN when the model reports none.
        last: Whether no further update is to come in this run.
    """

    update: Weights
    start: Weights
    before: State
    slot: int
    slots: int
    factor: float
    trainable: Sequence[bool]
    outer: OuterOptimizer
    accuracy: float = float("nan")
    last: bool = False

    def step(self, state: State, weights: Weights, merged: Weights) -> tuple[State, Weights]:
        """Have the outer optimizer apply an update; returns what that has changed of the state, and the weights."""
        outer, weights = self.outer.update(state["outer"], weights, merged, self.trainable)
        return {"outer": outer}, weights


class Arrival(Named, ABC):
    """What every arrival rule is, and what most of them have in common."""

    __slots__ = ()
    ignores: ClassVar[tuple[str, ...]] = ()
    """Settings that have no effect with the rule; a run is refused that has others than their defaults."""

    def init(self, weights: Weights) -> State:
        """Return the state before the first update."""
        return {}

    def begin(self, state: State, weights: Weights, slot: int) -> Weights:
        """Return the weights that a slot is to begin its round with: the global ones."""
        return weights

    @abstractmethod
    def arrive(self, state: State, weights: Weights, arrived: Arrived) -> tuple[State, Weights]:
        """Return the groups of the state that have changed, and the weights; ``weights`` itself if nothing was merged."""
