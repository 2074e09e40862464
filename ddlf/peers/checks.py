"""Checks of posted sets before anybody else gets them. Pure, as the ledger is.

``SetCheck`` follows the posts of each peer and the sets that it is given. So it knows the weights that a peer must have
begun with, and how long its *training* is: the difference between its post and these weights. In swaps they are its
last post, merged with the set that it was given; in rounds they are the base.

| a post | verdict | strike |
|---|---|---|
| has NaN or infinite values, or other shapes | rejected | if the post before was rejected, too |
| has a training over 100 times as long as is usual among the other peers | rejected | yes |
| has statistics (weights that are not trained) that moved that far | rejected | yes |
| has a training over ``longest`` times as long as is usual | counts as one of half the usual length | no |
| in swaps, is another such post in a row | rejected | no |
| has a training over half of that, and opposite to the others | the same | no |
| has a training that is 100 times shorter than usual and than its last one, such as an old set again | rejected | no |

Usual is the median of the last training of each other peer, so a minority cannot move it. It needs two other peers. The
trainings of peers that converge become ever shorter, and any other training would be long. So usual is at least a fifth
of the median of their longest trainings.
Before, and in the first posts, only a training that is over 10 times as long as the weights themselves is rejected.

A long training is not always a wrong one. That of an honest peer with other labels than all others was up to 15 times as
long as usual (``tests.trials.attacks``), and goes against them. So it does not count as a strike, and it counts, but not more than
others. In rounds it has the usual number of samples at most. In swaps, others get only a step of half the usual length
towards the set. A peer whose training was rejected begins again with the others' weights, so that its next training is long,
too. So the first one of such posts is accepted.

In swaps, a peer gets only a part of the way to a set that is further away than ``longest`` usual trainings, unless a
validation has seen the set: see ``step``.

These checks do not find an attacker who knows them and stays within the limits, flipped labels, a backdoor, and peers
that agree among themselves and are half of all.

Source:
    Bounding the norm of updates: Sun et al. 2019, arXiv:1911.07963. The median as reference: Yin et al. 2018,
    arXiv:1803.01498.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

import numpy as np

from ddlf.algorithms.set_merge import SET_MERGE
from ddlf.peers.entries import NO_SET, Posted, Strike
from ddlf.peers.ledger import LedgerSet
from ddlf.peers.plan import Plan
from ddlf.peers.sketches import WIDTH, Sketch, Vector, is_finite, length

OUTRIGHT = 100.0
"""A training over so many times as long as usual is rejected."""
COUNTED = 0.5
"""Length of a long training as it counts in a round, and of a step to its set in swaps, as a multiple of the usual one."""
LONG_POSTS = 1
"""In swaps, so many long trainings of a peer in a row are accepted: an honest peer with other labels has one at times."""
SHORTEST = 0.01
"""Least length of a training, as a multiple of the usual one, or of the peer's last one if that is shorter."""
LEAST_USUAL = 0.2
"""The usual length is at least this share of the median of the longest training of each peer."""
OPPOSITE = 0.5
"""A training is opposite if its cosine with the mean direction of the others is below minus this value."""
AGREE = 0.5
"""Directions agree if the mean of their unit vectors is longer than this."""
FIRST = 10.0
"""Most length of a training while no length is usual, as a multiple of the length of the weights."""
LAST_PEERS = 31
"""Number of peers whose last trainings say what is usual."""
MANY, FRESH = 12, 8
"""With more peers than ``MANY``, medians are computed once in ``FRESH`` accepted posts."""
LEAST_OTHERS = 2
"""Number of other peers that must have posted before a length is usual."""
KEPT = 0.9
"""Share of the mean direction that stays with each accepted post."""


class Last(NamedTuple):
    """The last accepted training of a peer.

    Attributes:
        length: Its length.
        updates: Its updates.
        moved: Length of the move of weights that are not trained.
        longest: Length of the longest training of this peer.
    """

    length: float
    updates: int
    moved: float
    longest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of a check of a post.

    Args:
        reason: Why the set is rejected; empty if it is accepted.
        strike: Whether this is a strike.
        length: Length of its training; 0 if it is unknown.
        moved: Length of the move of its weights that are not trained.
        share: Share of its training that counts in a round, in (0, 1].
    """

    reason: str = ""
    strike: Strike = "no"
    length: float = 0.0
    moved: float = 0.0
    share: float = 1.0


@dataclass(slots=True)
class Course:
    """The weights of a peer, as far as the server knows them.

    Attributes:
        posted: Sketch of its last accepted post, or of the set that it began with.
        trainings: Trainings that this set went through.
        accuracy: Accuracy of its training.
        handed: Number of the set that it was given since; ``NO_SET`` without one.
        merged: Sketch of its weights if it has taken that set.
        training: Its training that was judged last.
    """

    posted: Sketch
    trainings: int = 0
    accuracy: float = float("nan")
    handed: int = NO_SET
    merged: Sketch | None = None
    training: Vector | None = None

    def begin(self, contains: int) -> Sketch:
        """Return the sketch of the weights that its next training begins with, if its post contains a set."""
        return self.posted if self.merged is None or contains != self.handed else self.merged


class Usual:
    """The last trainings of the peers that have posted last.

    Args:
        most_updates: More updates of a post are not believed.
    """

    def __init__(self, most_updates: int) -> None:
        self._most_updates = most_updates
        self._last: OrderedDict[int, Last] = OrderedDict()
        self._medians = (0.0, 0, 0.0)  # of all, and not of the very last trainings if there are many peers
        self._since = FRESH

    def note(self, peer: int, last: Last) -> None:
        """Take the accepted training of a peer."""
        longest = max(last.longest, self._last[peer].longest if peer in self._last else 0.0)
        self._last[peer] = Last(last.length, self.believed(last.updates), last.moved, longest)
        self._last.move_to_end(peer)
        self._since += 1
        if len(self._last) > LAST_PEERS:
            self._last.popitem(last=False)

    def believed(self, updates: int) -> int:
        """Return the updates of a post, as far as the server believes them."""
        return min(updates, self._most_updates)

    def medians_of_others(self, peer: int) -> tuple[float, float, float] | None:
        """Return the medians of the lengths, the updates and the moves of the other peers; None if too few have posted."""
        if len(self._last) > MANY:  # then its own training makes no difference
            return self._medians_of_all()
        trainings = [last for number, last in self._last.items() if number != peer]
        return medians(trainings) if len(trainings) >= LEAST_OTHERS else None

    def last_length(self, peer: int) -> float:
        """Return the length of the last training of a peer; infinite before."""
        return self._last[peer].length if peer in self._last else inf

    @property
    def is_known(self) -> bool:
        """Whether enough peers have posted to say what is usual."""
        return len(self._last) > LEAST_OTHERS

    def median_length(self) -> float:
        """Return the median length of all of them; 0 without any."""
        return self._medians_of_all()[0] if self._last else 0.0

    def _medians_of_all(self) -> tuple[float, int, float]:
        if self._since >= FRESH or len(self._last) <= MANY:
            self._medians, self._since = medians(list(self._last.values())), 0
        return self._medians


def medians(lasts: Sequence[Last]) -> tuple[float, int, float]:
    """Return the usual length, updates and moves: medians, but the length is not far below that of the longest trainings.

    A median is the larger one of two, so that one bad peer of three harms no other.
    """
    middle = len(lasts) // 2
    length, updates, moves, longest = (sorted(column)[middle] for column in zip(*lasts, strict=True))
    return max(length, LEAST_USUAL * longest), int(updates), moves


class SetCheck:
    """Judges posts, and limits the steps of swaps.

    Args:
        plan: How the peers work together.
    """

    def __init__(self, plan: Plan) -> None:
        self._longest = 0.0 if plan.mechanism is not None else plan.longest  # with noise, each update is judged alone
        self._in_rounds = plan.way == "rounds"
        self._rule = SET_MERGE.read(plan.merge) if plan.way == "swap" else None
        self._usual = Usual(plan.updates)
        self._sets: dict[int, Sketch] = {}
        self._courses: dict[int, Course] = {}
        self._direction: Vector = np.zeros(WIDTH)
        self._long: dict[int, int] = {}  # by peer: its long trainings in a row

    # -- what happens -------------------------------------------------------------------------------------------------

    def keep(self, number: int, sketch: Sketch) -> None:
        """Take the sketch of a set that the server has."""
        self._sets[number] = sketch

    def has(self, number: int) -> bool:
        """Return whether the sketch of a set is here."""
        return number in self._sets

    def drop(self, number: int) -> None:
        """Forget a set."""
        self._sets.pop(number, None)

    def arrived(self, peer: int, start: int, trainings: int) -> None:
        """Take that a peer begins with a set."""
        if start in self._sets:
            self._courses[peer] = Course(self._sets[start], trainings)

    def recall(self, lasts: Mapping[int, Last]) -> None:
        """Take the last trainings of peers from a ledger that was read from the journal."""
        for peer, last in lasts.items():
            self._usual.note(peer, last)

    def accepted(self, entry: Posted, trainings: int) -> None:
        """Take an accepted post, whose set is kept.

        Args:
            entry: The post.
            trainings: Trainings that its set went through.
        """
        earlier = self._courses.get(entry.peer)
        if entry.length:
            self._usual.note(entry.peer, Last(entry.length, entry.updates, entry.moved, entry.length))
            if earlier is not None and earlier.training is not None:
                self._direction *= KEPT
                self._direction += (1 - KEPT) / entry.length * earlier.training
        self._courses[entry.peer] = Course(self._sets[entry.set], trainings, entry.accuracy)

    def replaced(self, peer: int, number: int) -> None:
        """Take that a peer was given a set that replaces its weights."""
        if (course := self._courses.get(peer)) is not None and number in self._sets:
            course.handed, course.merged = number, self._sets[number]

    def step(self, peer: int, number: int, ledger_set: LedgerSet, *, validated: bool) -> float:
        """Take that a peer is given a set to merge, and return how much of the difference it may get.

        A step is at most ``longest`` times as long as a usual training. The rest of the difference stays away, unless a
        validation has seen the set.

        Args:
            peer: The peer, which has posted.
            number: The set.
            ledger_set: The set in the ledger.
            validated: Whether it is the last validated set.

        Returns:
            1, or the share of the difference between its post and this set.
        """
        course, sketch = self._courses.get(peer), self._sets.get(number)
        if course is None or sketch is None or self._rule is None:
            return 1.0
        merge_share = self._rule.share(course, ledger_set)
        difference = sketch[0] - course.posted[0]
        merge_length = abs(merge_share) * length(difference)
        longest = (self._longest if ledger_set.share == 1 else COUNTED) * self._usual.median_length()
        share = longest / merge_length if 0 < longest < merge_length and not validated else 1.0
        trained, untrained = course.posted[0] + share * merge_share * difference, course.posted[1]
        if untrained.size:
            untrained = untrained + share * merge_share * (sketch[1] - untrained)
        course.handed, course.merged = number, (trained, untrained)
        return share

    # -- verdicts -----------------------------------------------------------------------------------------------------

    def judge(self, peer: int, sketch: Sketch, updates: int, contains: int, base: int) -> Finding:
        """Return the finding about a post.

        Args:
            peer: The peer.
            sketch: Sketch of its set.
            updates: Batches that it has trained, by its own account.
            contains: The set that it was given and has taken.
            base: In rounds, the base that it began with.
        """
        if not is_finite(sketch):
            return Finding(reason="its values are not finite, or too large", strike="again")
        if self._in_rounds and base not in self._sets:  # the ledger refuses it, since its round is over
            return Finding()
        begin = self._begin(peer, sketch, contains, base)
        training = sketch[0] - begin[0]
        long, moved = length(training), length(sketch[1] - begin[1]) if begin[1].size else 0.0
        if (course := self._courses.get(peer)) is not None:
            course.training = training
        if not self._longest:
            return Finding(length=long, moved=moved)
        return self._judge_length(peer, training, updates, begin, Finding(length=long, moved=moved))

    def is_long(self, ledger_set: LedgerSet) -> bool:
        """Return whether the training of a set is long, also if it was accepted before enough peers had posted."""
        return self._usual.is_known and 0 < self._longest * self._usual.median_length() < ledger_set.length

    def _judge_length(self, peer: int, training: Vector, updates: int, begin: Sketch, finding: Finding) -> Finding:
        """Return the finding about a training, from one that has its length only."""
        usual = self._usual.medians_of_others(peer)
        if usual is None:
            weights = length(begin[0])
            if weights and finding.length > FIRST * weights:
                reason = f"its training is {finding.length / weights:,.0f} times as long as the weights themselves"
                return replace(finding, reason=reason, strike="yes")
            return finding
        lengths, their_updates, moves = usual
        believed = self._usual.believed(updates) / max(their_updates, 1)
        share = max(1.0, believed)
        if moves and finding.moved > OUTRIGHT * moves * share:
            reason = f"its statistics moved {finding.moved / moves:,.0f} times as far as is usual"
            return replace(finding, reason=reason, strike="yes")
        if not lengths:
            return finding
        times = finding.length / lengths
        if times > OUTRIGHT * share:
            return replace(finding, reason=f"its training is {times:,.0f} times as long as is usual", strike="yes")
        if finding.length < SHORTEST * min(1.0, believed) * min(lengths, self._usual.last_length(peer)):
            return replace(finding, reason="it has trained nothing: these are the weights that it had before")
        cosine = self._cosine(training, finding.length) if times > self._longest / 2 * share else 0.0
        if cosine >= -OPPOSITE and times <= self._longest * share:
            self._long.pop(peer, None)
            return finding
        self._long[peer] = self._long.get(peer, 0) + 1
        if self._in_rounds or self._long[peer] <= LONG_POSTS:
            return replace(finding, share=COUNTED / times)
        opposite = f" (cosine with the others {cosine:.2f})" if cosine < -OPPOSITE else ""
        reason = f"its training is {times:,.1f} times as long as is usual, and the one before was long, too{opposite}"
        return replace(finding, reason=reason)

    def _cosine(self, training: Vector, long: float) -> float:
        """Return the cosine of a training with the mean direction of the others; 0 if they do not agree."""
        agreement = length(self._direction)
        return float(training @ self._direction) / (long * agreement) if agreement > AGREE else 0.0

    def _begin(self, peer: int, sketch: Sketch, contains: int, base: int) -> Sketch:
        """Return the sketch of the weights that a training has begun with."""
        if self._in_rounds:
            return self._sets.get(base, sketch)
        course = self._courses.get(peer)
        if course is None:  # an earlier server knew it: its last post is probably one of the sets
            distances = [(length(sketch[0] - candidate[0]), candidate) for candidate in self._sets.values()]
            return min(distances, key=lambda pair: pair[0])[1] if distances else sketch
        return course.begin(contains)
