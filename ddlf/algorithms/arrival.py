"""The rules of asynchronous training: how one arrived update changes the global weights. Runs on the master.

An arrival rule is a value with pure functions::

    init(weights) -> state
    begin(state, weights, slot) -> the first weights of a slot's next round
    arrive(state, weights, arrived) -> (the changed parts of the state, the new weights)

The state is a dict of lists of arrays, so that a checkpoint can store it. A rule never modifies its arguments. A rule
that does not merge yet returns ``weights`` itself. This does not count as a merge, so other updates do not become
staler.

Only floats are merged; tensors of integers or booleans stay as they are on the master. Momentum and compensation do not
apply to untrained tensors (BatchNorm's moving mean and variance).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite, isnan
from typing import ClassVar

import numpy as np

from ddlf.algorithms import set_merge
from ddlf.algorithms.outer import OuterOptimizer
from ddlf.algorithms.rule_text import Family, Named
from ddlf.algorithms.set_merge import SetMerge, WeightSet
from ddlf.algorithms.weights import Weights, difference, divided, is_float
from ddlf.errors import ConfigError

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
        """Apply an update with the outer optimizer.

        Return the changed parts of the rule's state, and the new weights.
        """
        outer, weights = self.outer.update(state["outer"], weights, merged, self.trainable)
        return {"outer": outer}, weights


class Arrival(Named, ABC):
    """Base of all arrival rules: each says how an arrived update changes the global weights."""

    __slots__ = ()
    ignores: ClassVar[tuple[str, ...]] = ()
    """Settings without effect in this rule. A run that changes their defaults is refused."""

    def init(self, weights: Weights) -> State:
        """Return the rule's state before the first update."""
        return {}

    def begin(self, state: State, weights: Weights, slot: int) -> Weights:
        """Return the weights that a slot begins its round with: by default the global weights."""
        return weights

    @abstractmethod
    def arrive(self, state: State, weights: Weights, arrived: Arrived) -> tuple[State, Weights]:
        """Change the weights by an arrived update. Return the changed parts of the rule's state, and the new weights.

        The result is ``weights`` itself if the rule collects updates and has not merged this one yet.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Published(Arrival):
    """Merge each update on arrival, as one K-th of a round: ``w <- outer(w, s(tau) * g / K)``.

    The default outer optimizer subtracts the update. An outer optimizer with momentum has one velocity for all slots.
    Each update changes this velocity.

    Source:
        Phan, Do 2023, Algorithm 3, with ``s = 1``.
    """

    def arrive(self, state: State, weights: Weights, arrived: Arrived) -> tuple[State, Weights]:
        # Use the current weights, not the slot's starting weights: other updates may have been merged since.
        share = arrived.slots if arrived.factor == 1 else arrived.slots / arrived.factor
        return arrived.step(state, weights, divided(arrived.update, share))


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAsync(Arrival):
    """Mix the weights with a slot's final weights: ``w <- (1 - a) * w + a * w_i``, ``a = rate * s(tau)``.

    DDLF computes ``w <- w - a * (g + (w - v))``, with ``v`` the weights that the slot began with, and ``w_i = v - g``.
    Both formulas are equal, and this one is exact if no other slot's update was merged in between. The staleness scales
    the rate of this update only: if the scaling lasted, the rate would decay to zero over the rounds. The source uses
    the staleness ``polynomial:a=0.5``.

    Args:
        rate: Share of the slot's weights in the new weights, in (0, 1].

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
    """Collect ``size`` updates, then merge them: ``w <- outer(w, sum(s(tau_i) * g_i) / size)``.

    The weights stay the same between two merges, so a buffered update does not age other updates. The last update of
    a run merges the whole buffer, still divided by ``size``. The buffer holds the sum in float64, in order of arrival.
    Checkpoints contain the buffer.

    Args:
        size: Number of updates in a merge, 1 or more.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Compensated(Arrival):
    """Correct each update for later changes by other slots: ``w <- outer(w, s(tau) * g' / K)``, ``g' = g + strength * g * g * (w - v)``.

    ``v`` are the weights that the slot began with. ``g * g`` approximates the curvature, so ``g'`` approximates
    the update from the current weights. In the source ``g`` is a gradient. Here it is an update, in units of the
    weight. For one step of SGD with the rate ``r``, both rules are equal if ``strength`` is the source's lambda (0.04)
    divided by ``r``. Untrained tensors are not corrected.

    Args:
        strength: Factor of the correction, in 1 / units of the weight, >= 0. With 0 the rule equals ``published``.

    Raises:
        ConfigError: ``strength`` is out of range.

    Source:
        Zheng et al. 2016, DC-ASGD, arXiv:1609.08326, equation 10.
    """

    strength: float = 0.04

    def __post_init__(self) -> None:
        if not (isfinite(self.strength) and self.strength >= 0):
            raise ConfigError(f"strength must be finite and >= 0, got {self.strength}")

    def arrive(self, state: State, weights: Weights, arrived: Arrived) -> tuple[State, Weights]:
        facts = zip(weights, arrived.start, arrived.update, arrived.trainable, strict=True)
        update = [
            np.asarray(g + self.strength * g * g * (w - v), g.dtype) if learns and is_float(g) else g
            for w, v, g, learns in facts
        ]
        return arrived.step(state, weights, divided(update, arrived.slots / arrived.factor))


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayedNesterov(Arrival):
    """Apply each update at once, but change the velocity only after every K-th update, with K slots.

    Per tensor, with ``g`` the update times ``s(tau)`` and ``K`` slots::

        buffer <- buffer + g
        each K-th time:  m <- momentum * m + buffer / K,  buffer <- 0
                         w <- w - rate * ((1 - c * K + c) * momentum * m + g / K)
        else:            w <- w - rate * (c * momentum * m + g / K)

    So K updates from the same old weights change the velocity only once. For untrained tensors the rule subtracts only
    ``g / K``.

    Args:
        rate: Step size on updates, dimensionless, > 0, as in ``nesterov``.
        momentum: Share of the previous velocity to keep, in [0, 1).
        c: Share of the velocity in each step between two velocity changes, in [0, 1].

    Raises:
        ConfigError: A value is out of range.

    Source:
        Liu et al. 2024, arXiv:2401.09135, Algorithm 3, without its dynamic number of local steps (DyLU).
    """

    rate: float = 0.7
    momentum: float = 0.9
    c: float = 0.0

    ignores: ClassVar[tuple[str, ...]] = ("outer",)

    def __post_init__(self) -> None:
        if not (isfinite(self.rate) and self.rate > 0):
            raise ConfigError(f"rate must be finite and > 0, got {self.rate}")
        if not (0 <= self.momentum < 1 and 0 <= self.c <= 1):
            raise ConfigError(f"momentum must be in [0, 1) and c in [0, 1], got {self.momentum} and {self.c}")

    def init(self, weights: Weights) -> State:
        nothing = [np.zeros_like(w) for w in weights]
        return {"velocity": nothing, "delayed": nothing, "delayed_count": [np.asarray(0)]}

    def arrive(self, state: State, weights: Weights, arrived: Arrived) -> tuple[State, Weights]:
        slots, count = arrived.slots, int(state["delayed_count"][0]) + 1
        due = count >= slots
        c = 1 - self.c * slots + self.c if due else self.c
        velocity, delayed, after = [], [], []
        facts = zip(weights, arrived.update, state["velocity"], state["delayed"], arrived.trainable, strict=True)
        for w, u, m, b, learns in facts:
            rate = self.rate if learns else 1.0
            if is_float(w):
                u = arrived.factor * u
                if learns:
                    b = np.asarray(b + u, w.dtype)
                    if due:
                        m, b = np.asarray(self.momentum * m + b / slots, w.dtype), np.zeros_like(b)
                w = w - rate * (c * self.momentum * m + u / slots)
            velocity.append(m)
            delayed.append(b)
            after.append(np.array(w, m.dtype))
        return {"velocity": velocity, "delayed": delayed, "delayed_count": [np.asarray(0 if due else count)]}, after


@dataclass(frozen=True, slots=True, kw_only=True)
class Elastic(Arrival):
    """Pull the global weights and a slot's weights towards each other: ``e = alpha * (w_i - w)``, ``w <- w + e``, ``w_i <- w_i - e``.

    Each slot keeps its own weights ``w_i`` and begins its next round with them, so it explores further. The run's
    state and its checkpoints contain these weights: the size of the model for each slot. A new slot begins with the
    global weights.

    Args:
        alpha: Step of each side, as a share of the difference, in (0, 1]. The source uses 0.9 divided by the number of
            slots.

    Raises:
        ConfigError: ``alpha`` is out of range.

    Source:
        Zhang, Choromanska, LeCun 2015, EASGD, arXiv:1412.6651, Algorithm 1.
    """

    alpha: float = 0.2

    ignores: ClassVar[tuple[str, ...]] = ("outer", "staleness")

    def __post_init__(self) -> None:
        check_within("alpha", self.alpha)

    def begin(self, state: State, weights: Weights, slot: int) -> Weights:
        return state.get(_state_key(slot), weights)

    def arrive(self, state: State, weights: Weights, arrived: Arrived) -> tuple[State, Weights]:
        slot_weights, after = [], []
        for w, v, g in zip(weights, arrived.start, arrived.update, strict=True):
            e = np.asarray(self.alpha * (v - g - w), w.dtype) if is_float(w) else np.zeros_like(w)
            slot_weights.append(np.asarray(v - g - e, w.dtype) if is_float(w) else w.copy())
            after.append(np.asarray(w + e, w.dtype) if is_float(w) else w.copy())
        return {_state_key(arrived.slot): slot_weights}, after


def _state_key(slot: int) -> str:
    """Return the name under which a rule's state has a slot's own weights."""
    return f"own_{slot:04d}"


def moved(weights: Weights, arrived: Arrived, share: float) -> Weights:
    """Return the weights, moved towards a slot's final weights by this share of the difference."""
    ways = zip(weights, arrived.start, arrived.update, strict=True)
    return [np.asarray(w - share * (g + (w - v)), w.dtype) if is_float(w) else w.copy() for w, v, g in ways]


def floats(update: Weights) -> Weights:
    """Return an update in float64, with zeros for integer and boolean tensors, which are never merged."""
    return [u.astype(np.float64) if is_float(u) else np.zeros(u.shape) for u in update]


def check_within(name: str, value: float) -> None:
    """Raise ``ConfigError`` unless a value is in (0, 1]."""
    if not 0 < value <= 1:
        raise ConfigError(f"{name} must be in (0, 1], got {value}")


class SetRule(Arrival):
    """Base of the rules that merge two sets of weights: the master's set, and the set that a slot has trained.

    A set has weights, the number of local trainings that they went through, and the accuracy of the last training
    (``WeightSet`` of ``set_merge.py``)::

        merge(own_set, peer_set) -> own_set

    A slot's final weights are a set with one training more than its first weights. Only floats are merged. The rules
    use the numbers of trainings instead of outer optimizer and staleness.
    """

    __slots__ = ()
    ignores: ClassVar[tuple[str, ...]] = ("outer", "staleness")
    rule: ClassVar[SetMerge]

    def merge(self, own_set: WeightSet, peer_set: WeightSet) -> WeightSet:
        """Return ``own_set`` after a merge with ``peer_set``; ``own_set`` itself if the rule changes nothing."""
        return self.rule.merge(own_set, peer_set)

    def init(self, weights: Weights) -> State:
        return {"peer": [np.asarray(0), np.asarray(-inf)]}

    def arrive(self, state: State, weights: Weights, arrived: Arrived) -> tuple[State, Weights]:
        trainings, accuracy = state["peer"]
        own_set = WeightSet(weights=weights, trainings=int(trainings), accuracy=float(accuracy))
        peer_set = WeightSet(
            weights=difference(arrived.start, arrived.update),
            trainings=int(arrived.before["peer"][0]) + 1,
            accuracy=arrived.accuracy,
        )
        after = self.merge(own_set, peer_set)
        return {"peer": [np.asarray(after.trainings), np.asarray(after.accuracy)]}, after.weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Average(SetRule):
    """Take the mean of both weights: ``w <- (w + p) / 2``.

    The number of trainings stays. This rule suffers most from staleness.

    Source:
        Goin, Cotton, Zhao 2018, WebNN.
    """

    rule: ClassVar[SetMerge] = set_merge.Average()


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighted(SetRule):
    """Take the mean weighted by trainings: ``w <- (q * p + s * w) / (q + s)``, ``s <- max(s, q)``.

    If both are 0, it is the plain mean.

    In its source it was the best of the four rules.

    Source:
        Goin, Cotton, Zhao 2018, WebNN.
    """

    rule: ClassVar[SetMerge] = set_merge.Weighted()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mimic(SetRule):
    """Move towards a longer-trained set, else away: ``w <- w + (p - w) / (abs(d) + 1)``, with ``d = q - s``, and ``s <- max(s, q)``.

    The sign changes for ``d <= 0``, and ``abs(d)`` is 1 for ``d = 0``, like in the authors' code; their report prints
    the reversed sign. In the source it was the worst of the four rules.

    Source:
        Goin, Cotton, Zhao 2018, WebNN.
    """

    rule: ClassVar[SetMerge] = set_merge.Mimic()


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy(SetRule):
    """Take the weights of a more accurate set: ``w <- p`` where its accuracy is higher, else ``w`` stays. The trainings stay.

    The accuracy of a set is that of its last local epoch. The global weights keep the accuracy of the set that they
    came from. The source says that the rule equals a single client.

    Raises:
        ConfigError: The model has no accuracy metric.

    Source:
        Goin, Cotton, Zhao 2018, WebNN.
    """

    rule: ClassVar[SetMerge] = set_merge.Copy()

    def merge(self, own_set: WeightSet, peer_set: WeightSet) -> WeightSet:
        if isnan(peer_set.accuracy):
            raise ConfigError(
                "'copy' compares accuracies, but the model reports none", hint="compile it with metrics=['accuracy']"
            )
        return self.rule.merge(own_set, peer_set)


ARRIVAL: Family[Arrival] = Family(
    "arrival rule",
    published=Published,
    fedasync=FedAsync,
    fedbuff=FedBuff,
    dcasgd=Compensated,
    delayed=DelayedNesterov,
    elastic=Elastic,
    average=Average,
    weighted=Weighted,
    mimic=Mimic,
    copy=Copy,
)
"""Every arrival rule by name."""
