"""The base of arrival rules, and the update that they receive. Runs on the master; ``arrival`` has the rules."""

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
    """An update that has arrived at the master, with the weights that its slot began with.

    Args:
        update: Weights before local training minus weights after it, one array per tensor.
        start: Weights that the slot began with.
        before: State of the rule when the slot received these weights.
        slot: Number of the slot, from 0.
        slots: K, the number of slots.
        factor: Weight of the update at its staleness, in (0, 1].
        trainable: Per tensor, whether it is trained.
        outer: Outer optimizer, whose state is the group ``"outer"``.
        accuracy: Accuracy of local training; NaN without one.
        last: Whether this is the last update of the run.
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
        """Apply an update with the outer optimizer, and return the changed state groups and the new weights."""
        outer, weights = self.outer.update(state["outer"], weights, merged, self.trainable)
        return {"outer": outer}, weights


class Arrival(Named, ABC):
    """Base of all arrival rules."""

    __slots__ = ()
    ignores: ClassVar[tuple[str, ...]] = ()
    """Settings without effect in this rule. A run that changes their defaults is refused."""

    def init(self, weights: Weights) -> State:
        """Return the state before the first update."""
        return {}

    def begin(self, state: State, weights: Weights, slot: int) -> Weights:
        """Return the weights that a slot begins its round with: by default the global weights."""
        return weights

    @abstractmethod
    def arrive(self, state: State, weights: Weights, arrived: Arrived) -> tuple[State, Weights]:
        """Return the changed state groups and the new weights, or ``weights`` itself if the rule has not merged yet."""
