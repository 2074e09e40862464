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

import numpy as np

from ddlf.algorithms.named import Family, Named
from ddlf.algorithms.outer import OuterOptimizer
from ddlf.algorithms.weights import Weights, divided, is_float
from ddlf.errors import ConfigError

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


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAsync(Arrival):
    """Mix the weights with those that a slot ended with: ``w <- (1 - a) * w + a * w_i``, ``a = rate * s(tau)``.

    Here as ``w <- w - a * (g + (w - v))`` with ``v`` the weights that the slot began with and ``w_i = v - g``: the same, and exact where nobody
    came in between. The rate is that of this update alone; scaled for good it would decay to zero over the rounds. The source's own staleness
    is ``polynomial:a=0.5``.

    Args:
        rate: Share of the slot's weights in the new ones, in (0, 1].

    Raises:
        ConfigError: ``rate`` is out of range.

    Source:
        Xie et al. 2019, arXiv:1903.03934, Algorithm 1.
    """

    rate: float = 0.6

    ignores: ClassVar[tuple[str, ...]] = ("outer",)

    def __post_init__(self) -> None:
        check_within("rate", self.rate)

    def arrive(self, state: State, weights: Weights, arrived: Arrived) -> tuple[State, Weights]:
        return {}, moved(weights, arrived, self.rate * arrived.factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class FedBuff(Arrival):
    """Collect updates, and merge them when there are ``size``: ``w <- outer(w, sum(s(tau_i) * g_i) / size)``.

    Between two merges the weights stay, so what came into the buffer ages no other update. The last update of a run has all merged that is there,
    still divided by ``size``. The sum is in float64, in the order of arrival, and in checkpoints.

    Args:
        size: Updates of a merge, 1 or more.

    Raises:
        ConfigError: ``size`` is out of range.

    Source:
        Nguyen et al. 2021, arXiv:2106.06639, Algorithm 1.
    """

    size: int = 10

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"size must be 1 or more, got {self.size}")

    def init(self, weights: Weights) -> State:
        return {"buffer": [np.zeros(w.shape) for w in weights], "buffered": [np.asarray(0)]}

    def arrive(self, state: State, weights: Weights, arrived: Arrived) -> tuple[State, Weights]:
        count = int(state["buffered"][0]) + 1
        updates = zip(state["buffer"], floats(arrived.update), strict=True)
        total = [np.asarray(b + arrived.factor * u) for b, u in updates]
        if count < self.size and not arrived.last:
            return {"buffer": total, "buffered": [np.asarray(count)]}, weights
        mean = [np.asarray(b / self.size, w.dtype) for b, w in zip(total, weights, strict=True)]
        changed, weights = arrived.step(state, weights, mean)
        return {**changed, **self.init(weights)}, weights


def moved(weights: Weights, arrived: Arrived, share: float) -> Weights:
    """Weights that have gone a share of their way to those that a slot ended with."""
    ways = zip(weights, arrived.start, arrived.update, strict=True)
    return [np.asarray(w - share * (g + (w - v)), w.dtype) if is_float(w) else w.copy() for w, v, g in ways]


def floats(update: Weights) -> Weights:
    """An update in float64, zero where nothing is merged."""
    return [u.astype(np.float64) if is_float(u) else np.zeros(u.shape) for u in update]


def check_within(name: str, value: float) -> None:
    """Refuse what is not in (0, 1]."""
    if not 0 < value <= 1:
        raise ConfigError(f"{name} must be in (0, 1], got {value}")


ARRIVAL: Family[Arrival] = Family("arrival rule", published=Published, fedasync=FedAsync, fedbuff=FedBuff)
"""Every arrival rule by name."""
