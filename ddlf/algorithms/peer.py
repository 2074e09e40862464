"""Rules that merge the weights of two peers. Runs on the master, which is one peer; each slot is another.

Each peer has weights, the number of local trainings that they went through, and the accuracy of the last training::

    merge(mine, theirs) -> mine

These rules are also arrival rules: a slot's final weights are a peer with one training more than its first weights.
Only floats are merged. The rules use the numbers of trainings instead of outer optimizer and staleness.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from math import inf, isnan
from typing import ClassVar

import numpy as np

from ddlf.algorithms.arrival_rule import Arrival, Arrived, State
from ddlf.algorithms.weights import Weights, difference, is_float
from ddlf.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Peer:
    """One of two peers whose weights are merged.

    Args:
        weights: One array per tensor.
        trainings: Number of local trainings that the weights went through.
        accuracy: Accuracy of the last training; NaN if the model reports none.
    """

    weights: Weights
    trainings: int
    accuracy: float = -inf


class PeerRule(Arrival):
    """Base of the rules in this file."""

    __slots__ = ()
    ignores: ClassVar[tuple[str, ...]] = ("outer", "staleness")

    @abstractmethod
    def merge(self, mine: Peer, theirs: Peer) -> Peer:
        """Return the merged peer; ``mine`` itself if it does not change."""

    def init(self, weights: Weights) -> State:
        return {"peer": [np.asarray(0), np.asarray(-inf)]}

    def arrive(self, state: State, weights: Weights, arrived: Arrived) -> tuple[State, Weights]:
        trainings, accuracy = state["peer"]
        mine = Peer(weights=weights, trainings=int(trainings), accuracy=float(accuracy))
        theirs = Peer(
            weights=difference(arrived.start, arrived.update),
            trainings=int(arrived.before["peer"][0]) + 1,
            accuracy=arrived.accuracy,
        )
        after = self.merge(mine, theirs)
        return {"peer": [np.asarray(after.trainings), np.asarray(after.accuracy)]}, after.weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Average(PeerRule):
    """Take the mean of both weights: ``w <- (w + p) / 2``.

    The number of trainings stays. This rule suffers most from staleness.

    Source:
        Goin, Cotton, Zhao 2018, WebNN.
    """

    def merge(self, mine: Peer, theirs: Peer) -> Peer:
        return replace(mine, weights=towards(mine.weights, theirs.weights, 0.5))


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighted(PeerRule):
    """Take the mean weighted by trainings: ``w <- (q * p + s * w) / (q + s)``, ``s <- max(s, q)``.

    If both are 0, it is the plain mean.

    In its source it was the best of the four rules.

    Source:
        Goin, Cotton, Zhao 2018, WebNN.
    """

    def merge(self, mine: Peer, theirs: Peer) -> Peer:
        q, s = theirs.trainings, mine.trainings
        share = q / (q + s) if q + s else 0.5
        return replace(mine, weights=towards(mine.weights, theirs.weights, share), trainings=max(s, q))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mimic(PeerRule):
    """Move towards a longer-trained peer, else away: ``w <- w + (p - w) / (abs(d) + 1)``, with ``d = q - s``, and ``s <- max(s, q)``.

    The sign changes for ``d <= 0``, and ``abs(d)`` is 1 for ``d = 0``, like in the authors' code; their report prints
    the reversed sign. In the source it was the worst of the four rules.

    Source:
        Goin, Cotton, Zhao 2018, WebNN.
    """

    def merge(self, mine: Peer, theirs: Peer) -> Peer:
        d = theirs.trainings - mine.trainings
        share = (1 if d > 0 else -1) / ((abs(d) or 1) + 1)
        return replace(
            mine,
            weights=towards(mine.weights, theirs.weights, share),
            trainings=max(mine.trainings, theirs.trainings),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy(PeerRule):
    """Take the weights of a more accurate peer: ``w <- p`` where its accuracy is higher, else ``w`` stays. The trainings stay.

    The accuracy of a peer is that of its last local epoch. The global weights keep the accuracy of the peer that they
    came from. The model needs an accuracy metric. The source says that the rule equals a single client.

    Source:
        Goin, Cotton, Zhao 2018, WebNN.
    """

    def merge(self, mine: Peer, theirs: Peer) -> Peer:
        if isnan(theirs.accuracy):
            raise ConfigError(
                "arrival='copy' compares accuracies, but the model reports none",
                hint="compile it with metrics=['accuracy']",
            )
        if theirs.accuracy <= mine.accuracy:
            return mine
        weights = [p if is_float(p) else w for w, p in zip(mine.weights, theirs.weights, strict=True)]
        return replace(mine, weights=weights, accuracy=theirs.accuracy)


def towards(weights: Weights, others: Weights, share: float) -> Weights:
    """Return ``weights`` moved towards ``others`` by a share of the difference; a negative share moves them away."""
    both = zip(weights, others, strict=True)
    return [np.asarray(w + share * (p - w), w.dtype) if is_float(w) else w.copy() for w, p in both]
