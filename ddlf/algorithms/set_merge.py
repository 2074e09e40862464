"""Rules that merge two sets of weights. Runs on peers, and on the master for arrival rules of the same names.

A *set* is a full list of weights with the number of local trainings that they went through. A rule is a pure function
of two sets::

    merge(mine, theirs) -> mine

Only floats are merged. Tensors of integers and booleans stay as they are in ``mine``. A rule never modifies its
arguments. With ``w, s`` the weights and the trainings of ``mine`` and ``p, q`` the weights and trainings of ``theirs``:

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
    def share(self, mine: Trained, theirs: Trained) -> float:
        """Return the share of the way from ``mine`` to ``theirs`` that a merge goes; negative away from it."""

    def merge(self, mine: WeightSet, theirs: WeightSet) -> WeightSet:
        """Return the set ``mine`` after a merge with ``theirs``; ``mine`` itself if the rule changes nothing."""
        return replace(
            mine,
            weights=towards(mine.weights, theirs.weights, self.share(mine, theirs)),
            trainings=self.trainings(mine.trainings, theirs.trainings),
        )

    def trainings(self, mine: int, theirs: int) -> int:
        """Return the number of trainings of ``mine`` after a merge with ``theirs``: by default it stays."""
        return mine


@dataclass(frozen=True, slots=True, kw_only=True)
class Average(SetMerge):
    """Take the mean of both weights: ``w <- (w + p) / 2``. The number of trainings stays.

    Source:
        Goin, Cotton, Zhao 2018, WebNN.
    """

    def share(self, mine: Trained, theirs: Trained) -> float:
        return 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighted(SetMerge):
    """Take the mean weighted by trainings: ``w <- (q * p + s * w) / (q + s)``, ``s <- max(s, q)``.

    If both are 0, it is the plain mean.

    Source:
        Goin, Cotton, Zhao 2018, WebNN.
    """

    def share(self, mine: Trained, theirs: Trained) -> float:
        q, s = theirs.trainings, mine.trainings
        return q / (q + s) if q + s else 0.5

    def trainings(self, mine: int, theirs: int) -> int:
        return max(mine, theirs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mimic(SetMerge):
    """Move towards a longer-trained set, else away: ``w <- w + (p - w) / (abs(d) + 1)``, with ``d = q - s``, and ``s <- max(s, q)``.

    The sign changes for ``d <= 0``, and ``abs(d)`` is 1 for ``d = 0``, like in the authors' code; their report prints
    the reversed sign.

    Source:
        Goin, Cotton, Zhao 2018, WebNN.
    """

    def share(self, mine: Trained, theirs: Trained) -> float:
        d = theirs.trainings - mine.trainings
        return (1 if d > 0 else -1) / ((abs(d) or 1) + 1)

    def trainings(self, mine: int, theirs: int) -> int:
        return max(mine, theirs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy(SetMerge):
    """Take the weights of a more accurate set: ``w <- p`` where its accuracy is higher, else ``w`` stays. The trainings stay.

    A set that nobody has tested, such as a new mean of sets, has no accuracy: then ``w`` stays, too.

    Source:
        Goin, Cotton, Zhao 2018, WebNN.
    """

    def share(self, mine: Trained, theirs: Trained) -> float:
        return 0.0 if isnan(theirs.accuracy) or theirs.accuracy <= mine.accuracy else 1.0

    def merge(self, mine: WeightSet, theirs: WeightSet) -> WeightSet:
        if not self.share(mine, theirs):
            return mine
        weights = [p if is_float(p) else w for w, p in zip(mine.weights, theirs.weights, strict=True)]
        return replace(mine, weights=weights, accuracy=theirs.accuracy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Elastic(SetMerge):
    """Pull the weights towards the other set: ``w <- w - alpha * (w - p)``. The trainings stay.

    The rule is symmetric: ``merge(theirs, mine)`` is the other side of the same elastic step.

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

    def share(self, mine: Trained, theirs: Trained) -> float:
        return self.alpha


SET_MERGE: Family[SetMerge] = Family(
    "merge of two sets", average=Average, weighted=Weighted, mimic=Mimic, copy=Copy, elastic=Elastic
)
"""Every merge of two sets by name."""


def towards(weights: Weights, others: Weights, share: float) -> Weights:
    """Return ``weights`` moved towards ``others`` by a share of the difference; a negative share moves them away."""
    both = zip(weights, others, strict=True)
    return [np.asarray(w + share * (p - w), w.dtype) if is_float(w) else w.copy() for w, p in both]


def mean_by_trainings(sets: Sequence[WeightSet]) -> WeightSet:
    """Return the mean of sets, weighted by their trainings, with the most trainings of them.

    It is the plain mean if no set was trained. Sums are taken in float64, in the order of the sets. Integers take the
    maximum.
    """
    total = sum(one.trainings for one in sets)
    counted = [one for one in sets if one.trainings] if total else list(sets)
    weights = mean_of([one.weights for one in counted], [one.trainings or 1 for one in counted])
    return WeightSet(weights=weights, trainings=max(one.trainings for one in sets))
