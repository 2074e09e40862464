"""Rules that merge two sets of weights. Runs on peers, and on the master for arrival rules of the same names.

A *set* is a full list of weights with the number of local trainings that they went through. A rule is a pure function
of two sets::

    merge(own_set, peer_set) -> own_set

Only floats are merged. Tensors of integers and booleans stay as they are in ``own_set``. A rule never modifies its
arguments. With ``w, s`` the weights and the trainings of ``own_set``, and ``p, q`` those of ``peer_set``:

| rule | weights | trainings |
|---|---|---|
| ``average`` | ``(w + p) / 2`` | ``s`` |
| ``weighted`` | ``(q p + s w) / (q + s)`` | ``max(s, q)`` |
| ``mimic`` | ``w + (p - w) / (abs(d) + 1)``, with ``d = q - s``; ``w - (p - w) / (abs(d) + 1)`` for ``d <= 0`` | ``max(s, q)`` |
| ``copy`` | ``p`` if its accuracy is higher, else ``w`` | ``s`` |
| ``elastic`` | ``w - alpha (w - p)`` | ``s`` |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isnan
from typing import Protocol

import numpy as np

from ddlf.algorithms.rule_text import Family, Named
from ddlf.algorithms.weights import Weights, is_float, mean_of
from ddlf.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightSet:
    """A full list of weights, with what the merges of two sets need to know about them.

    Args:
        weights: One array per tensor.
        trainings: Number of local trainings that the weights went through.
        accuracy: Accuracy of the last training; NaN if the model reports none.
    """

    weights: Weights
    trainings: int
    accuracy: float = -inf


class Trained(Protocol):
    """The facts about a set that rules use, as in ``WeightSet``."""

    @property
    def trainings(self) -> int: ...

    @property
    def accuracy(self) -> float: ...


class SetMerge(Named, ABC):
    """Base of all rules that merge two sets. A rule goes a share of the way from one set to the other."""

    __slots__ = ()

    @abstractmethod
    def share(self, own_set: Trained, peer_set: Trained) -> float:
        """Return the share of the way from ``own_set`` to ``peer_set`` that a merge goes; negative away from it."""

    def merge(self, own_set: WeightSet, peer_set: WeightSet) -> WeightSet:
        """Return ``own_set`` after a merge with ``peer_set``; ``own_set`` itself if the rule changes nothing."""
        return replace(
            own_set,
            weights=towards(own_set.weights, peer_set.weights, self.share(own_set, peer_set)),
            trainings=self.trainings(own_set.trainings, peer_set.trainings),
        )

    def trainings(self, own_trainings: int, peer_trainings: int) -> int:
        """Return the trainings of the peer's own set after a merge: by default the number stays."""
        return own_trainings


@dataclass(frozen=True, slots=True, kw_only=True)
class Average(SetMerge):
    """Take the mean of both weights: ``w <- (w + p) / 2``. The number of trainings stays.

    Source:
        Goin, Cotton, Zhao 2018, WebNN.
    """

    def share(self, own_set: Trained, peer_set: Trained) -> float:
        return 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighted(SetMerge):
    """Take the mean weighted by trainings: ``w <- (q * p + s * w) / (q + s)``, ``s <- max(s, q)``.

    If both are 0, it is the plain mean.

    Source:
        Goin, Cotton, Zhao 2018, WebNN.
    """

    def share(self, own_set: Trained, peer_set: Trained) -> float:
        q, s = peer_set.trainings, own_set.trainings
        return q / (q + s) if q + s else 0.5

    def trainings(self, own_trainings: int, peer_trainings: int) -> int:
        return max(own_trainings, peer_trainings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mimic(SetMerge):
    """Move towards a longer-trained set, else away: ``w <- w + (p - w) / (abs(d) + 1)``, with ``d = q - s``, and ``s <- max(s, q)``.

    The sign changes for ``d <= 0``, and ``abs(d)`` is 1 for ``d = 0``, like in the authors' code; their report prints
    the reversed sign.

    Source:
        Goin, Cotton, Zhao 2018, WebNN.
    """

    def share(self, own_set: Trained, peer_set: Trained) -> float:
        d = peer_set.trainings - own_set.trainings
        return (1 if d > 0 else -1) / ((abs(d) or 1) + 1)

    def trainings(self, own_trainings: int, peer_trainings: int) -> int:
        return max(own_trainings, peer_trainings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy(SetMerge):
    """Take the weights of a more accurate set: ``w <- p`` where its accuracy is higher, else ``w`` stays. The trainings stay.

    A set that nobody has tested, such as a new mean of sets, has no accuracy: then ``w`` stays, too.

    Source:
        Goin, Cotton, Zhao 2018, WebNN.
    """

    def share(self, own_set: Trained, peer_set: Trained) -> float:
        return 0.0 if isnan(peer_set.accuracy) or peer_set.accuracy <= own_set.accuracy else 1.0

    def merge(self, own_set: WeightSet, peer_set: WeightSet) -> WeightSet:
        if not self.share(own_set, peer_set):
            return own_set
        weights = [p if is_float(p) else w for w, p in zip(own_set.weights, peer_set.weights, strict=True)]
        return replace(own_set, weights=weights, accuracy=peer_set.accuracy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Elastic(SetMerge):
    """Pull the weights towards the other set: ``w <- w - alpha * (w - p)``. The trainings stay.

    The rule is symmetric: ``merge(peer_set, own_set)`` is the other side of the same elastic step.

    Args:
        alpha: Step of each side, as a share of the difference, in (0, 1].

    Raises:
        ConfigError: ``alpha`` is out of range.

    Source:
        Zhang, Choromanska, LeCun 2015, EASGD, arXiv:1412.6651, Algorithm 1, with a peer in place of the centre.
    """

    alpha: float = 0.25

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 1:
            raise ConfigError(f"alpha must be in (0, 1], got {self.alpha}")

    def share(self, own_set: Trained, peer_set: Trained) -> float:
        return self.alpha


SET_MERGE: Family[SetMerge] = Family(
    "merge of two sets", average=Average, weighted=Weighted, mimic=Mimic, copy=Copy, elastic=Elastic
)
"""Every merge of two sets by name."""


def towards(weights: Weights, targets: Weights, share: float) -> Weights:
    """Return ``weights`` moved towards ``targets`` by a share of the difference; a negative share moves them away."""
    pairs = zip(weights, targets, strict=True)
    return [np.asarray(w + share * (p - w), w.dtype) if is_float(w) else w.copy() for w, p in pairs]


def mean_by_trainings(sets: Sequence[WeightSet]) -> WeightSet:
    """Return the mean of sets, weighted by their trainings, with the most trainings of them.

    It is the plain mean if no set was trained. Sums are taken in float64, in the order of the sets. Integers take the
    maximum.
    """
    total = sum(weight_set.trainings for weight_set in sets)
    counted = [weight_set for weight_set in sets if weight_set.trainings] if total else list(sets)
    weights = mean_of(
        [weight_set.weights for weight_set in counted], [weight_set.trainings or 1 for weight_set in counted]
    )
    return WeightSet(weights=weights, trainings=max(weight_set.trainings for weight_set in sets))
