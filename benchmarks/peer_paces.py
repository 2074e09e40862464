"""Merges of two peers of unequal speed: the accuracy on the half of the digits that only the slow peer has.

    python -m benchmarks.peer_paces [--seconds 60] [--seeds 5] [--rules average,weighted,rounds] [--count posts,batches,samples]

The ledger and the merges are those of ``ddlf peers``. Time is virtual, so a run takes seconds and has no noise of the
machine: a peer trains a batch each ``1 / pace`` seconds, posts after ``--updates`` batches, and has the answer after
``--answer-s``. One peer has the digits 0 to 4, the other 5 to 9. A cluster has two workers that train two batches of 16
each before a commit, and a commit is an update. ``rounds`` stands for ``--way rounds --merge mean``.

The counts of a post in ``weighted``:

| count | a post counts |
|---|---|
| posts | 1 |
| batches | its updates, at most those of the plan |
| samples | its updates times the samples of each |

The accuracies are those of the mean of all sets at the end, as ``ddlf peers stop`` saves it, on the test digits of each
half; and of the waiting set, which a server tests, as a mean over the last third of the time.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.measure import table
from ddlf.algorithms.set_merge import SET_MERGE, WeightSet
from ddlf.algorithms.weights import Weights
from ddlf.data import datasets
from ddlf.peers.entries import NO_SET, Arrived, Began, Entry, Invited, Joined, Merged, Posted
from ddlf.peers.ledger import Instruction, Mean, Member, Reply, WeightLedger
from ddlf.peers.merging import Part, mean_of_swaps, next_base
from ddlf.peers.plan import Plan
from ddlf.peers.rounds import RoundLedger
from ddlf.peers.swap import SwapLedger

HIDDEN, RATE = 32, 0.1
ROUNDS = "rounds"
COUNTED = ("weighted", "mimic")
"""The rules that use the numbers of trainings."""
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of peer.

    Args:
        pace: Updates per second.
        batch: Samples of each batch.
        workers: Workers whose updates are averaged in each update.
        steps: Batches of each worker in an update.
    """

    pace: float
    batch: int = 32
    workers: int = 1
    steps: int = 1

    @property
    def samples(self) -> int:
        """Samples of an update."""
        return self.batch * self.workers * self.steps


CLUSTER = {"batch": 16, "workers": 2, "steps": 2}
PAIRS = {
    "equal": (Kind(pace=15), Kind(pace=15)),
    "one 5 times as fast": (Kind(pace=15), Kind(pace=75)),
    "one 20 times as fast": (Kind(pace=5), Kind(pace=100)),
    "a cluster, and a peer of its speed": (Kind(pace=15, **CLUSTER), Kind(pace=15)),
    "a cluster, and a peer 20 times as fast": (Kind(pace=5, **CLUSTER), Kind(pace=100)),
}
"""The peer with the digits 0 to 4, and the one with 5 to 9."""
COUNTS: dict[str, Callable[[int, int, int], int]] = {
    "posts": lambda updates, most, samples: 1,
    "batches": lambda updates, most, samples: min(updates, most),
    "samples": lambda updates, most, samples: min(updates, most) * samples,
}


class Counting(SwapLedger):
    """A ledger of swaps that counts trainings in another way."""

    def __init__(self, plan: Plan, count: Callable[[int, int, int], int], samples: dict[int, int]) -> None:
        super().__init__(plan)
        self._count_of, self._samples_of = count, samples

    def _on_posted(self, entry: Posted, member: Member) -> list[Instruction]:
        instructions = super()._on_posted(entry, member)
        more = self.counted(entry) - (entry.updates > 0)
        member.trainings += more
        self.sets[entry.set].trainings += more
        return instructions

    def counted(self, entry: Posted) -> int:
        """Return what a post counts."""
        return self._count_of(entry.updates, self.plan.updates, self._samples_of[entry.peer])


# -- a model that trains ----------------------------------------------------------------------------------------------------


def first_weights(seed: int) -> Weights:
    """Return the weights of a network with one hidden layer."""
    random = np.random.default_rng(seed)

    def glorot(rows: int, columns: int) -> Array:
        limit = (6 / (rows + columns)) ** 0.5
        return random.uniform(-limit, limit, (rows, columns)).astype(np.float32)

    return [glorot(64, HIDDEN), np.zeros(HIDDEN, np.float32), glorot(HIDDEN, 10), np.zeros(10, np.float32)]


def outputs(weights: Weights, x: Array) -> tuple[Array, Array]:
    """Return the hidden values and the probabilities."""
    hidden = np.maximum(x @ weights[0] + weights[1], 0)
    scores = hidden @ weights[2] + weights[3]
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    return hidden, scores / scores.sum(axis=1, keepdims=True)


def step(weights: Weights, x: Array, y: Array) -> Weights:
    """Return the weights after a step of SGD along the gradient of the cross-entropy."""
    hidden, delta = outputs(weights, x)
    delta[np.arange(len(y)), y] -= 1
    delta /= len(y)
    back = (delta @ weights[2].T) * (hidden > 0)
    gradients = [x.T @ back, back.sum(axis=0), hidden.T @ delta, delta.sum(axis=0)]
    return [(w - np.float32(RATE) * g).astype(np.float32) for w, g in zip(weights, gradients, strict=True)]


def right(weights: Weights, x: Array, y: Array) -> float:
    """Return the accuracy."""
    return float(np.mean(np.argmax(outputs(weights, x)[1], axis=1) == y))


class Learner:
    """A peer with weights and data, like in ``ddlf.peers.peer``.

    Attributes:
        weights: The live weights.
        trainings: Its own count, which is that of the ledger.
    """

    def __init__(self, kind: Kind, x: Array, y: Array, seed: int, weights: Weights) -> None:
        self.kind, self.weights, self.trainings = kind, weights, 0
        self.since = self.number = 0
        self.contains, self.base, self.waits = NO_SET, 1, False
        self._x, self._y, self._random = x, y, np.random.default_rng(seed)

    def train(self) -> None:
        """Make one update."""
        ends = []
        for _ in range(self.kind.workers):
            weights = self.weights
            for _ in range(self.kind.steps):
                rows = self._random.integers(0, len(self._x), self.kind.batch)
                weights = step(weights, self._x[rows], self._y[rows])
            ends.append(weights)
        self.weights = [np.mean(arrays, axis=0) for arrays in zip(*ends, strict=True)] if len(ends) > 1 else ends[0]
        self.since += 1


def train(
    pair: Sequence[Kind], rule: str, count: str, seed: int, options: argparse.Namespace
) -> tuple[list[float], list[float]]:
    """Train one pair of peers, and return the accuracies on both halves: of the mean at the end, and of waiting sets."""
    (x, y), (x_test, y_test) = datasets.with_classes("digits")
    x, x_test = (array.reshape(len(array), -1).astype(np.float32) for array in (x, x_test))
    halves = [(x_test[of], y_test[of]) for of in (y_test < 5, y_test >= 5)]
    common: Any = {"updates": options.updates, "seconds": options.post_s, "validate_s": 0.0, "quorum": 2}
    ledger: WeightLedger
    if rule == ROUNDS:
        ledger = RoundLedger(plan := Plan(way="rounds", merge="mean", deadline_s=1e9, **common))
    else:
        samples = {number: kind.samples for number, kind in enumerate(pair, 1)}
        ledger = Counting(plan := Plan(merge=rule, **common), COUNTS[count], samples)
    first = first_weights(seed)
    sets = {1: first}
    ledger.apply(Began(at=0.0, set=1, run="r"))
    peers = {}
    for number, (kind, of) in enumerate(zip(pair, (y < 5, y >= 5), strict=True), 1):
        ledger.apply(Invited(at=0.0, code=str(number), until=1e9))
        ledger.apply(Joined(at=0.0, peer=number, code=str(number), key=str(number)))
        ledger.apply(Arrived(at=0.0, peer=number, name="", samples=int(of.sum()), keeps=False))
        peers[number] = Learner(kind, x[of], y[of], 100 * seed + number, first)
    turn = 0
    queue: list[tuple[float, int, int, Reply | None]] = []

    def push(at: float, peer: int, reply: Reply | None) -> None:
        nonlocal turn
        turn += 1
        heapq.heappush(queue, (at, turn, peer, reply))

    def part(number: int) -> Part:
        stored = ledger.sets[number]
        return Part(read=partial(sets.__getitem__, number), trainings=stored.trainings, samples=stored.samples)

    def take(entry: Entry, now: float) -> None:
        for instruction in ledger.apply(entry):
            match instruction:
                case Reply():
                    push(now + options.answer_s, instruction.peer, instruction)
                case Mean():
                    parts = [part(number) for number in instruction.of]
                    number = ledger.next_set
                    if instruction.base == NO_SET:
                        sets[number] = mean_of_swaps(parts)
                    else:
                        sets[number] = next_base(
                            plan, sets[instruction.base], sets[instruction.base], dict(enumerate(parts)), [], [True] * 4
                        )[0]
                    take(Merged(at=now, set=number, of=instruction.of), now)

    for number, learner in peers.items():
        push(1 / learner.kind.pace, number, None)
    posted_at = dict.fromkeys(peers, 0.0)
    waiting: list[list[float]] = []
    tested = 2 * options.seconds / 3
    while queue and queue[0][0] <= options.seconds:
        now, _, number, reply = heapq.heappop(queue)
        learner = peers[number]
        if now >= tested:
            waiting.append([right(sets[ledger.start()], *half) for half in halves])
            tested += options.seconds / 60
        if reply is not None:
            learner.waits = False
            if reply.answer == "merge":
                own_set = WeightSet(weights=learner.weights, trainings=learner.trainings)
                peer_set = WeightSet(weights=sets[reply.set], trainings=ledger.sets[reply.set].trainings)
                merged = SET_MERGE.read(rule).merge(own_set, peer_set)
                learner.weights, learner.trainings, learner.contains = merged.weights, merged.trainings, reply.set
            elif reply.answer == "replace":  # a new round
                learner.weights, learner.base = sets[reply.set], reply.set
                push(now + 1 / learner.kind.pace, number, None)
            continue
        learner.train()
        late = plan.seconds and now - posted_at[number] >= plan.seconds
        if (learner.since >= plan.updates or late) and not learner.waits:
            learner.number += 1
            entry = Posted(
                at=now,
                peer=number,
                number=learner.number,
                set=ledger.next_set,
                contains=learner.contains,
                updates=learner.since,
                base=learner.base if rule == ROUNDS else NO_SET,
            )
            learner.trainings += ledger.counted(entry) if isinstance(ledger, Counting) else 1
            learner.since, learner.waits, posted_at[number] = 0, True, now
            sets[entry.set] = learner.weights
            take(entry, now)
        if not (learner.waits and rule == ROUNDS):
            push(now + 1 / learner.kind.pace, number, None)
    final = mean_of_swaps([part(number) for number in ledger.all_sets()])
    return [right(final, *half) for half in halves], list(np.mean(waiting, axis=0))


def main(options: argparse.Namespace) -> None:
    """Print the table."""
    table_rows = [["peers", "rule", "count", "0-4, at the end", "5-9", "worst seed", "0-4, while it trains", "5-9"]]
    for name, pair in PAIRS.items():
        for rule in options.rules:
            for count in options.count if rule in COUNTED else options.count[:1]:
                runs = [train(pair, rule, count, seed, options) for seed in range(options.seeds)]
                ends, during = zip(*runs, strict=True)
                cells = [f"{statistics.fmean(accuracies[half] for accuracies in ends):.1%}" for half in (0, 1)]
                cells.append(f"{min(min(accuracies) for accuracies in ends):.1%}")
                cells += [f"{statistics.fmean(accuracies[half] for accuracies in during):.1%}" for half in (0, 1)]
                table_rows.append([name, rule, count if rule in COUNTED else "", *cells])
    print(table(table_rows))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rules", type=lambda text: text.split(","), default=["average", "weighted", "elastic:0.25", ROUNDS]
    )
    parser.add_argument("--count", type=lambda text: text.split(","), default=list(COUNTS))
    parser.add_argument("--seconds", type=float, default=60.0, help="virtual seconds")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=20, help="updates between two posts")
    parser.add_argument("--post-s", type=float, default=0.0, help="most seconds between two posts; 0 for no limit")
    parser.add_argument("--answer-s", type=float, default=0.01, help="seconds until a post is answered")
    return parser


if __name__ == "__main__":
    main(parser().parse_args())
