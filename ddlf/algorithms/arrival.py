"""One update that has arrived -> new weights: the rules of asynchronous training. Runs on the master.

An arrival rule is a value with pure functions::

    init(weights) -> state
    begin(state, weights, slot) -> the weights that a slot is to begin its round with
    arrive(state, weights, arrived) -> (what has changed of the state, weights)

The state is lists of arrays by name, so that a checkpoint can hold it. Arrays that went in are never modified. A rule that merges nothing yet
returns ``weights`` itself: that is no merge, and ages no other update.

Only floats are merged; tensors of integers or booleans stay as they are on the master. Tensors that are not trained (BatchNorm's moving mean and
variance) go through no momentum and no compensation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ddlf.algorithms.named import Family, Named
from ddlf.algorithms.outer import OuterOptimizer
from ddlf.algorithms.weights import Weights, divided

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


class Arrival(Named):
    """What every rule in this file is, and what most of them have in common."""

    __slots__ = ()
    ignores: ClassVar[tuple[str, ...]] = ()
    """Settings that have no effect with the rule; a run is refused that has others than their defaults."""

    def init(self, weights: Weights) -> State:
        """Return the state before the first update."""
        return {}

    def begin(self, state: State, weights: Weights, slot: int) -> Weights:
        """Return the weights that a slot is to begin its round with: the global ones."""
        return weights

    def arrive(self, state: State, weights: Weights, arrived: Arrived) -> tuple[State, Weights]:
        """Return the groups of the state that have changed, and the weights; ``weights`` itself if nothing was merged."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Published(Arrival):
    """Merge each update when it comes, by its share of a round: ``w <- outer(w, s(tau) * g / K)``.

    By default the outer optimizer subtracts. One with momentum has one velocity for all slots, which each update moves by its share.

    Source:
        Phan, Do 2023, Algorithm 3, with ``s = 1``.
    """

    def arrive(self, state: State, weights: Weights, arrived: Arrived) -> tuple[State, Weights]:
        # The current weights, not those that it started from: others may have been merged meanwhile.
        share = arrived.slots if arrived.factor == 1 else arrived.slots / arrived.factor
        return arrived.step(state, weights, divided(arrived.update, share))


ARRIVAL: Family[Arrival] = Family("arrival rule", published=Published)
"""Every arrival rule by name."""
