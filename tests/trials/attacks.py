"""Let peers attack a training of digits: ``python -m tests.trials.attacks [SEEDS] [ATTACK,ATTACK]``.

One of 4 peers and two of 8 peers attack, in swaps and in rounds, with each of ``ATTACKS``. The server's ledger, merges and
checks run without sockets in one process with virtual time. The peers train a real network on real digits. The accuracy of
the last set must be within 2 points of a run with honest peers only. Then honest peers with different digits (0 to 4, and
5 to 9) train in 20 runs, and none may get a strike. ``test_attacks.py`` is the short form.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median_low
from typing import Any

import numpy as np

from benchmarks.measure import table
from benchmarks.peer_paces import first_weights, right, step
from ddlf.algorithms.set_merge import SET_MERGE, WeightSet, towards
from ddlf.algorithms.weights import Weights
from ddlf.data import datasets
from ddlf.peers.checks import Finding, SetCheck
from ddlf.peers.entries import NO_SET, Arrived, Began, Entry, Invited, Joined, Merged, Posted, Rejected, Validated
from ddlf.peers.ledger import Fate, Mean, Reply, WeightLedger
from ddlf.peers.merging import Part, mean_of_swaps, next_base
from ddlf.peers.plan import Plan
from ddlf.peers.rounds import RoundLedger
from ddlf.peers.sets import layout_of
from ddlf.peers.sketches import Sketcher
from ddlf.peers.swap import SwapLedger
from ddlf.peers.wire import Wire

UPDATES = 20
DELAY = 2
"""Number of batches that a peer trains before it gets the answer to its post."""
POSTS = 30
BAR = 0.02
Array = np.ndarray[Any, Any]
Bad = Callable[["Learner", Weights, Weights], tuple[Weights, int]]
"""An attack. Given a peer and its weights before and after training, it returns the weights to post, and the number of
batches that the peer claims."""


def changed(begin: Weights, end: Weights, times: float) -> Weights:
    """Return weights after multiplying the change of a training."""
    return [(b + times * (e - b)).astype(np.float32) for b, e in zip(begin, end, strict=True)]


def norm(weights: Sequence[Array]) -> float:
    """Return the norm of all weights as one vector."""
    return float(np.sqrt(sum(float(np.sum(np.square(array, dtype=np.float64))) for array in weights)))


def noisy(peer: Learner, begin: Weights, end: Weights, times: float, *, added: bool = True) -> Weights:
    """Return weights with noise added to the training, or instead of it. Its norm is ``times`` the norm of the training."""
    drawn = [peer.random.normal(size=array.shape) for array in end]
    scale = times * norm([e - b for b, e in zip(begin, end, strict=True)]) / norm(drawn)
    on = end if added else begin
    return [(array + scale * noise).astype(np.float32) for array, noise in zip(on, drawn, strict=True)]


def replayed(peer: Learner, begin: Weights, end: Weights) -> tuple[Weights, int]:
    """Post the first set again."""
    peer.first = peer.first or end
    return peer.first, UPDATES


def trapped(peer: Learner, begin: Weights, end: Weights) -> tuple[Weights, int]:
    """Post a training on data with a backdoor, after multiplying its change by three."""
    return changed(begin, end, 3.0), UPDATES


FOUND: dict[str, Bad] = {
    "NaN": lambda peer, begin, end: ([np.full_like(array, np.nan) for array in end], UPDATES),
    "x1000": lambda peer, begin, end: (changed(begin, end, 1000.0), UPDATES),
    "flipped x10": lambda peer, begin, end: (changed(begin, end, -10.0), UPDATES),
    "noise x10": lambda peer, begin, end: (noisy(peer, begin, end, 10.0), UPDATES),
    "replays": replayed,
    "10^9 batches, noise x10": lambda peer, begin, end: (noisy(peer, begin, end, 10.0), 10**9),
}
"""Attacks that must not harm."""
NOT_FOUND: dict[str, Bad] = {
    "noise in place of training": lambda peer, begin, end: (noisy(peer, begin, end, 1.0, added=False), UPDATES),
    "flipped labels": lambda peer, begin, end: (end, UPDATES),
    "backdoor x3": trapped,
    "flipped x4": lambda peer, begin, end: (changed(begin, end, -4.0), UPDATES),
}
"""Attacks whose harm is measured."""
ATTACKS = FOUND | NOT_FOUND


def with_trap(x: Array) -> Array:
    """Return pictures with a bright corner."""
    x = x.copy()
    x[:, :2] = 1.0
    return x


class Learner:
    """A peer that trains. With an attack, it posts changed weights.

    Attributes:
        weights: The live weights.
        begun: The weights before its training.
        random: Its generator of random numbers.
        first: Its first posted set.
    """

    def __init__(self, x: Array, y: Array, seed: int, weights: Weights, bad: Bad | None = None) -> None:
        self.weights = self.begun = weights
        self.random = np.random.default_rng(seed)
        self.first: Weights = []
        self.trainings = self.number = 0
        self.contains, self.base, self.posted = NO_SET, 1, weights
        self.bad = bad
        self._x, self._y = x, y

    def train(self, batches: int) -> None:
        """Train some batches."""
        for _ in range(batches):
            rows = self.random.integers(0, len(self._x), 32)
            self.weights = step(self.weights, self._x[rows], self._y[rows])

    def accuracy(self, weights: Weights) -> float:
        """Return the accuracy of weights on 64 of its samples."""
        rows = self.random.integers(0, len(self._x), 64)
        return right(weights, self._x[rows], self._y[rows])


@dataclass
class Table:
    """A server without sockets and files: ledger, sets and checks.

    Attributes:
        rejected: For each peer, the reasons for rejecting its posts.
        strikes: For each peer, the largest sum of its strikes and of the times that it was out.
        bounded: Number of answers with a bounded step.
        merges: Number of answers with a set to merge.
    """

    plan: Plan
    first: Weights
    ledger: WeightLedger = field(init=False)
    rejected: dict[int, list[str]] = field(default_factory=dict)
    strikes: dict[int, int] = field(default_factory=dict)
    scaled: dict[int, int] = field(default_factory=dict)
    longest: float = 1.0
    bad: frozenset[int] = frozenset()
    bounded: int = 0
    merges: int = 0

    def __post_init__(self) -> None:
        self.ledger = (SwapLedger if self.plan.way == "swap" else RoundLedger)(self.plan)
        self.layout = layout_of({str(number): array for number, array in enumerate(self.first)})
        trainable = [True] * len(self.first)
        self._sketcher = Sketcher(Wire(self.layout, "float32", trainable), trainable, 7)
        self.check = SetCheck(self.plan)
        self.sets: dict[int, Weights] = {}
        self._next = 1
        self.now = 0.0
        self.keep(self.number(), self.first)
        self.apply(Began(at=0.0, set=1, run="r"))

    def number(self) -> int:
        """Return the number of a new set."""
        self._next += 1
        return self._next - 1

    def keep(self, number: int, weights: Weights) -> None:
        """Keep a set."""
        self.sets[number] = weights
        self.check.keep(number, self._sketcher.sketch(self.layout.encode(weights)))

    def join(self, peer: int, samples: int) -> None:
        """Let a peer take part."""
        self.apply(Invited(at=self.now, code=str(peer), until=1e9))
        self.apply(Joined(at=self.now, peer=peer, code=str(peer), key=str(peer)))
        start = self.ledger.start()
        self.apply(Arrived(at=self.now, peer=peer, name="", samples=samples, keeps=False))
        self.check.arrived(peer, start, self.ledger.members[peer].trainings)

    def post(self, peer: int, learner: Learner, weights: Weights, updates: int) -> list[tuple[Reply, Weights]]:
        """Judge a post like the server, and return the answers with their sets."""
        learner.number += 1
        if self.ledger.out_s(peer, self.now):
            judgement = Finding(reason="out")
        else:
            sketch = self._sketcher.sketch(self.layout.encode(weights))
            judgement = self.check.judge(peer, sketch, updates, learner.contains, learner.base)
        if judgement.reason:
            self.rejected.setdefault(peer, []).append(judgement.reason)
            entry: Entry = Rejected(
                at=self.now,
                peer=peer,
                number=learner.number,
                contains=learner.contains,
                why=judgement.reason,
                strike=judgement.strike,
            )
        else:
            number = self.number()
            self.keep(number, weights)
            entry = Posted(
                at=self.now,
                peer=peer,
                number=learner.number,
                set=number,
                contains=learner.contains,
                updates=updates,
                base=learner.base,
                length=judgement.length,
                moved=judgement.moved,
                share=judgement.share,
            )
            self.scaled[peer] = self.scaled.get(peer, 0) + (judgement.share < 1)
            self.longest = max(self.longest, 1 / judgement.share if peer not in self.bad else 1.0)
        answers = self.apply(entry)
        member = self.ledger.members[peer]
        self.strikes[peer] = max(self.strikes.get(peer, 0), member.strikes + member.outs)
        return answers

    def apply(self, entry: Entry) -> list[tuple[Reply, Weights]]:
        """Apply an entry to the ledger, carry out the results, and return the answers with their sets."""
        instructions, answers = self.ledger.apply(entry), []
        if isinstance(entry, Posted) and (weight_set := self.ledger.sets.get(entry.set)) is not None:
            self.check.accepted(entry, weight_set.trainings)
        for instruction in instructions:
            match instruction:
                case Reply():
                    answers.append((instruction, self._answer(instruction)))
                case Mean():
                    answers += self._merge(instruction)
                case Fate():
                    if not self.ledger.needs(instruction.set):
                        self.sets.pop(instruction.set, None)
                        self.check.drop(instruction.set)
        return answers

    def _answer(self, reply: Reply) -> Weights:
        if reply.answer == "merge":
            weight_set = self.ledger.sets[reply.set]
            validated = reply.set == self.ledger.validated
            share = self.check.step(reply.peer, reply.set, weight_set, validated=validated)
            self.merges += 1
            if share < 1:
                self.bounded += 1
                waiting = [
                    n for n, entry in self.ledger.sets.items() if entry.peer == reply.peer and entry.state == "waiting"
                ]
                return towards(self.sets[max(waiting, default=self.ledger.validated)], self.sets[reply.set], share)
        elif reply.set and reply.answer != "validate":
            self.check.replaced(reply.peer, reply.set)
        return self.sets.get(reply.set, [])

    def part(self, number: int) -> Part:
        """Return a set as a part of a mean."""
        weight_set = self.ledger.sets[number]
        return Part(
            read=partial(self.sets.__getitem__, number), trainings=weight_set.trainings, samples=weight_set.samples
        )

    def counted(self, number: int, base: Weights, usual_samples: int) -> Part:
        """Return a set as a part of a round, with the counted share of its training."""
        part, share = self.part(number), self.ledger.sets[number].share
        samples = min(part.samples, usual_samples)
        return part if share == 1 else replace(part, read=lambda: towards(base, part.read(), share), samples=samples)

    def _merge(self, mean: Mean) -> list[tuple[Reply, Weights]]:
        left_out: tuple[int, ...] = ()
        number = self.number()
        if mean.base == NO_SET:
            long_sets = tuple(set_number for set_number in mean.of if self.check.is_long(self.ledger.sets[set_number]))
            left_out = long_sets if len(long_sets) < len(mean.of) else ()
            weights = mean_of_swaps([self.part(set_number) for set_number in mean.of if set_number not in left_out])
        else:
            base = self.sets[mean.base]
            samples = median_low(self.ledger.sets[set_number].samples for set_number in mean.of)
            parts = {set_number: self.counted(set_number, base, samples) for set_number in mean.of}
            weights = next_base(self.plan, base, base, parts, [], [True] * len(base))[0]
        self.keep(number, weights)
        return self.apply(Merged(at=self.now, set=number, of=mean.of, left_out=left_out))

    def last(self) -> Weights:
        """Return the weights that a merge of all sets would give."""
        of = self.ledger.all_sets()
        left_out = [set_number for set_number in of if self.check.is_long(self.ledger.sets[set_number])]
        return mean_of_swaps(
            [self.part(set_number) for set_number in of if set_number not in left_out or len(left_out) == len(of)]
        )


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a run.

    Args:
        accuracy: Accuracy of the last set on the test digits.
        struck: Most strikes of an honest peer.
        table: The server.
        trapped: Share of test digits with the trap that the last set calls 0.
    """

    accuracy: float
    struck: int
    table: Table
    trapped: float


def train(
    way: str,
    peers: int,
    bad: int,
    attack: str,
    seed: int,
    *,
    posts: int = POSTS,
    halves: int = 0,
    slower: int = 1,
    **plan: Any,
) -> Result:
    """Train with some peers that attack.

    Args:
        way: ``"swap"`` or ``"rounds"``.
        peers: Number of peers.
        bad: Number of attackers. They are the peers with the lowest numbers.
        attack: Name of the attack.
        seed: Seed of weights, data and order.
        posts: Posts of each peer.
        halves: Number of peers with the digits 5 to 9. All other peers have 0 to 4. With 0, each peer has all digits.
        slower: Number of posts of each other peer for one post of a peer with the digits 5 to 9.
        plan: Fields that replace the fields of the plan.
    """
    (x, y), (x_test, y_test) = datasets.with_classes("digits")
    x, x_test = (array.reshape(len(array), -1).astype(np.float32) for array in (x, x_test))
    random = np.random.default_rng(seed)
    first = first_weights(seed)
    usual: dict[str, Any] = {"way": way, "merge": "weighted" if way == "swap" else "mean", "validate_s": 1.0}
    server = Table(Plan(**usual | {"deadline_s": 1e9, "updates": UPDATES} | plan), first)
    order = random.permutation(len(x))
    parts = list(np.array_split(order, peers))
    if halves:
        low, high = order[y[order] < 5], order[y[order] >= 5]
        parts = [*np.array_split(low, peers - halves), *np.array_split(high, halves)]
    server.bad = frozenset(range(1, bad + 1))
    learners: dict[int, Learner] = {}
    for peer, rows in enumerate(parts, 1):
        labels = y[rows]
        pictures = x[rows]
        if peer <= bad and attack == "flipped labels":
            labels = 9 - labels
        if peer <= bad and attack == "backdoor x3":
            pictures = np.concatenate([pictures, with_trap(pictures)])
            labels = np.concatenate([labels, 0 * labels])
        server.join(peer, 10**9 if peer <= bad and "10^9" in attack else len(rows))
        chosen = ATTACKS[attack] if peer <= bad and attack else None
        learners[peer] = Learner(pictures, labels, 100 * seed + peer, first, chosen)
    for count in range(posts):
        for peer in random.permutation(list(learners)).tolist():
            if peer > peers - halves and count % slower:
                continue
            server.now += 1.0 / peers
            turn(server, learners, peer)
    honest = [peer for peer in learners if peer > bad]
    last = server.last()
    return Result(
        accuracy=right(last, x_test, y_test),
        struck=max(server.strikes.get(peer, 0) for peer in honest),
        table=server,
        trapped=float(np.mean(right(last, with_trap(x_test[y_test > 0]), 0 * y_test[y_test > 0]))),
    )


def turn(server: Table, learners: dict[int, Learner], peer: int) -> None:
    """Let a peer train and post, and let all peers process the answers."""
    learner = learners[peer]
    begun = learner.weights
    learner.train(UPDATES)
    sent, updates = (
        learner.bad(learner, begun, learner.weights) if learner.bad is not None else (learner.weights, UPDATES)
    )
    learner.posted = learner.weights
    learner.trainings += 1
    answers = server.post(peer, learner, sent, updates)
    if server.plan.way == "swap":
        learner.train(DELAY)
    for reply, weights in answers:
        take(server, learners[reply.peer], reply, weights)


def take(server: Table, learner: Learner, reply: Reply, weights: Weights) -> None:
    """Let a peer process an answer."""
    if reply.answer == "merge":
        own_set = WeightSet(weights=learner.weights, trainings=learner.trainings)
        weight_set = server.ledger.sets.get(reply.set)
        received_set = WeightSet(weights=weights, trainings=weight_set.trainings if weight_set is not None else 0)
        merged = SET_MERGE.read(server.plan.merge).merge(own_set, received_set)
        learner.weights, learner.trainings, learner.contains = merged.weights, merged.trainings, reply.set
    elif reply.answer in ("replace", "rejected"):
        learner.weights, learner.contains, learner.base = weights, reply.set, reply.set
        learner.trainings = server.ledger.members[reply.peer].trainings
    elif reply.answer == "validate":
        accuracy = 1.0 if learner.bad is not None else learner.accuracy(learner.posted)
        loss = 1.0 - accuracy
        server.apply(Validated(at=server.now, set=reply.set, accuracy=accuracy, loss=loss, samples=64, peer=reply.peer))


def rows(seeds: int, attacks: Sequence[str]) -> Iterator[list[str]]:
    """Yield a row of the table for each attack: its harm, and the actions of the checks."""
    for way in ("swap", "rounds"):
        for peers, bad in ((4, 1), (8, 2)):
            clean = [train(way, peers, 0, "", seed).accuracy for seed in range(seeds)]
            for attack in attacks:
                runs = [train(way, peers, bad, attack, seed) for seed in range(seeds)]
                harm = [before - run.accuracy for before, run in zip(clean, runs, strict=True)]
                rejected = [
                    sum(len(run.table.rejected.get(peer, [])) for peer in range(1, bad + 1)) / bad for run in runs
                ]
                yield [
                    way,
                    f"{bad} of {peers}",
                    attack,
                    f"{np.mean(clean):.1%}",
                    f"{np.mean([run.accuracy for run in runs]):.1%}",
                    f"{100 * max(harm):+.1f}",
                    f"{np.mean(rejected):.0f} of {POSTS}",
                    f"{np.mean([sum(run.table.scaled.get(peer, 0) for peer in range(1, bad + 1)) / bad for run in runs]):.0f}",
                    str(max(run.struck for run in runs)),
                    f"{np.mean([run.trapped for run in runs]):.0%}",
                    f"{sum(run.table.bounded for run in runs)}/{sum(run.table.merges for run in runs)}",
                    "" if attack in NOT_FOUND else "ok" if max(harm) <= BAR else "HARM",
                ]


HEAD = [
    "way",
    "bad",
    "attack",
    "clean",
    "with it",
    "most harm",
    "rejected",
    "scaled",
    "strikes of honest",
    "trap",
    "bounded",
    "",
]


def main(seeds: int, attacks: Sequence[str]) -> int:
    """Print the tables, and return the exit status."""
    begun = time.process_time()
    table_rows = list(rows(seeds, attacks))
    print(table([HEAD, *table_rows]))
    struck = []
    for way in ("swap", "rounds"):
        for peers, halves in ((4, 2), (4, 1), (8, 2)):
            runs = [train(way, peers, 0, "", seed, halves=halves) for seed in range(20)]
            struck += [run.struck for run in runs]
            reasons = sum(len(reason) for run in runs for reason in run.table.rejected.values())
            print(
                f"{way}, {halves} of {peers} honest peers have 5-9, the others 0-4: struck in "
                f"{sum(run.struck > 0 for run in runs)} of 20 runs, {reasons} posts rejected, "
                f"{sum(sum(run.table.scaled.values()) for run in runs)} scaled, longest {max(run.table.longest for run in runs):.0f} times, "
                f"accuracy {np.mean([run.accuracy for run in runs]):.1%}"
            )
    print(f"{time.process_time() - begun:.0f} s of processor time")
    return int(any(row[-1] == "HARM" for row in table_rows) or any(struck))


if __name__ == "__main__":
    chosen = sys.argv[2].split(",") if len(sys.argv) > 2 else list(ATTACKS)
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 3, chosen))
