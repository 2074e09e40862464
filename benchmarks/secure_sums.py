"""Measure what secure aggregation costs one peer or worker in one round: processor seconds, and bytes up beside a plain round.

    python -m benchmarks.secure_sums [--members 3,8,50] [--values 1000000] [--lost 2] [--repeats 5]

Peers, private workers, and private workers with noise take turns. All members and the part of the server or master run in
this process, without sockets and training. The processor seconds are those of the first member: its keys, the numbers of its
update, its masks, its signature and its answer. The bytes are those of the messages that it sends. A plain round sends its
update. The sums are compared with the exact ones, except with noise. A sum has three members at least, so of three, none is
lost.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.measure import Spread, table, turns
from ddlf.algorithms.weights import Weights
from ddlf.peers import frames
from ddlf.peers.entries import Arrived, Began, Invited, Joined, Left
from ddlf.peers.frames import Message, Post
from ddlf.peers.ledger import Reply
from ddlf.peers.plan import Plan
from ddlf.peers.secure_ledger import SecureLedger
from ddlf.peers.secure_peer import SecurePeer
from ddlf.peers.secure_rounds import AddUp, SecureRounds, Tell
from ddlf.peers.secure_updates import numbers_of, terms_of
from ddlf.peers.sets import layout_of
from ddlf.privacy.secure_sum import LEAST, Answer, Identity, Numbers, Offer, Share, unmasked
from ddlf.rpc.messages import dumps
from ddlf.training.exchanges.masked.rule import BySamples, Noised, Rule, rule_of

MEASURED = 1
SAMPLES = 100
RULES: dict[str, Rule] = {
    "workers": rule_of(limit=None, clip=None, noise=None),
    "workers with noise": rule_of(limit=None, clip=1.0, noise=1.0),
}
WAYS = ("peers", *RULES)


class Measured:
    """Counts the processor time and the sent bytes of the first member.

    Args:
        size: Returns the bytes of an answer.

    Attributes:
        cpu_s: Processor seconds of the member.
        bytes_up: Bytes that it has sent.
    """

    def __init__(self, size: Callable[[Any], int]) -> None:
        self._size = size
        self.cpu_s, self.bytes_up = 0.0, 0

    def step(self, member: int, act: Callable[[], Any]) -> Any:
        """Let a member make a step, and return its answer."""
        began = time.process_time()
        answer = act()
        sent = self._size(answer)
        if member == MEASURED:
            self.cpu_s += time.process_time() - began
            self.bytes_up += sent
        return answer


def frame_size(message: Message | None) -> int:
    """Return the bytes of a message of a peer."""
    return 0 if message is None else len(frames.encode(message))


def answer_size(answer: Any) -> int:
    """Return the bytes of an answer of a worker on the wire, without the head of its message."""
    return sum(memoryview(part).nbytes for part in dumps(answer))


class Round:
    """One round of peers around a server, without sockets.

    Attributes:
        measured: Counts what the measured peer needs and sends.
        work: The sum that the server can unmask.
    """

    def __init__(self, peers: int, values: int) -> None:
        self.plan = Plan(way="rounds", merge="mean", quorum=3, secure_aggregation=True)
        self.ledger = SecureLedger(self.plan)
        self.ledger.apply(Began(at=1.0, set=1, run="run"))
        self.rounds = SecureRounds(self.ledger, values, lambda base, most: terms_of(self.plan, most, "", self.set))
        self.base: Weights = [np.zeros(values, np.float32)]
        self.set = self.base[0].tobytes()
        self.peers: dict[int, SecurePeer] = {}
        self.measured = Measured(frame_size)
        self.work: AddUp | None = None
        for number in range(1, peers + 1):
            self.ledger.apply(Invited(at=1.0, code=f"{number}", until=1e12))
            self.ledger.apply(Joined(at=1.0, peer=number, code=f"{number}", key=""))
            self.ledger.apply(Arrived(at=1.0, peer=number, name="", samples=SAMPLES, keeps=False))
            self.peers[number] = SecurePeer(self.plan, "run", number, SAMPLES, lambda line: None)
            self.peers[number].begin(1, self.base, self.set)

    def follow(self, instructions: Any) -> None:
        """Deliver messages until no message is left."""
        for instruction in instructions:
            if isinstance(instruction, Tell):
                receive = partial(self.peers[instruction.peer].received, instruction.message)
                answer = self.measured.step(instruction.peer, receive)
                if answer is not None:
                    self.follow(self.rounds.received(instruction.peer, answer, 2.0))
            elif isinstance(instruction, AddUp):
                self.work = instruction
            elif isinstance(instruction, Reply):
                raise AssertionError(instruction)

    def run(self, updates: dict[int, Weights], lost: int) -> None:
        """Add up the updates of all peers except the last ones."""
        self.follow(self.rounds.step(2.0))
        for number in list(self.peers)[len(self.peers) - lost :]:
            self.ledger.apply(Left(at=2.0, peer=number, why="gone"))
            del self.peers[number]
        for number, peer in self.peers.items():
            live = [old - new for old, new in zip(self.base, updates[number], strict=True)]
            masked = self.measured.step(number, lambda peer=peer, live=live: peer.masked(live, 1, 20))
            assert masked is not None
            self.follow(self.rounds.received(number, masked, 2.0))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The costs of one round.

    Args:
        cpu_s: Processor seconds of the measured member.
        server_s: Processor seconds of the server or master, to unmask the sum.
        bytes_up: Bytes that the member has sent.
    """

    cpu_s: float
    server_s: float
    bytes_up: int


def of_peers(updates: dict[int, Weights], lost: int) -> Cost:
    """Add up the updates of peers except the last ones, and return the cost."""
    round = Round(len(updates), updates[MEASURED][0].size)
    round.run(updates, lost)
    assert round.work is not None
    began = time.process_time()
    total = unmasked({peer: post.set for peer, post in round.work.posts.items()}, round.work.answers)
    server_s = time.process_time() - began
    check(total, [numbers_of(round.plan, round.base, [-updates[peer][0]], 1.0) for peer in round.work.posts])
    return Cost(cpu_s=round.measured.cpu_s, server_s=server_s, bytes_up=round.measured.bytes_up)


def of_workers(updates: dict[int, Weights], lost: int, rule: Rule) -> Cost:
    """Add up the updates of workers except the last ones, in the steps of ``MaskedReplica``, and return the cost."""
    measured = Measured(answer_size)
    identities = {worker: Identity() for worker in updates}
    shares: dict[int, Share] = {}

    def offer(worker: int) -> dict[str, Any]:
        shares[worker] = Share("run", "attempt", worker, identities[worker], LEAST)
        return dataclasses.asdict(shares[worker].offer)

    def mask(worker: int) -> Numbers:
        shares[worker].meet([Offer(**offer) for offer in offers], f"0 {SAMPLES} {rule.terms} base")
        return shares[worker].masked(rule.numbers(updates[worker], [True], SAMPLES, SAMPLES))

    def unmask(worker: int) -> dict[str, Any]:
        return dataclasses.asdict(shares[worker].answer(signatures))

    offers = [measured.step(worker, lambda worker=worker: offer(worker)) for worker in updates]
    survivors = list(updates)[: len(updates) - lost]
    vectors = {worker: measured.step(worker, lambda worker=worker: mask(worker)) for worker in survivors}
    signatures = {
        worker: measured.step(worker, lambda worker=worker: shares[worker].sign(survivors)) for worker in survivors
    }
    answers = {worker: measured.step(worker, lambda worker=worker: unmask(worker)) for worker in survivors}
    began = time.process_time()
    answer_of = {worker: Answer(**answer) for worker, answer in answers.items()}
    total = unmasked({worker: vector.tobytes() for worker, vector in vectors.items()}, answer_of)
    server_s = time.process_time() - began
    if isinstance(rule, BySamples):
        check(total, [rule.numbers(updates[worker], [True], SAMPLES, SAMPLES) for worker in survivors])
    else:
        assert isinstance(rule, Noised)  # its numbers differ each time
    return Cost(cpu_s=measured.cpu_s, server_s=server_s, bytes_up=measured.bytes_up)


def check(total: Numbers, numbers: list[Numbers]) -> None:
    """Compare a sum with the exact one."""
    exact = np.zeros_like(total)
    for vector in numbers:
        exact += vector
    assert (total == exact).all(), "the sum is not exact"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", default="3,8,50", help="numbers of peers or workers in a sum")
    parser.add_argument("--values", type=int, default=1_000_000, help="parameters of the model")
    parser.add_argument("--lost", type=int, default=2, help="members that are lost before their masked numbers")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    sizes = [int(text) for text in options.members.split(",")]
    random = np.random.default_rng(0)
    updates = {
        number: [random.normal(0, 0.01, options.values).astype(np.float32)] for number in range(1, max(sizes) + 1)
    }
    layout = layout_of({"dense/kernel": np.zeros(options.values, np.float32)})
    post = Post(number=1, contains=0, updates=20, set=layout.encode(updates[MEASURED]))
    plain = {way: answer_size(updates[MEASURED]) for way in RULES} | {"peers": frame_size(post)}
    rows = [["one round", "members", "lost", "processor seconds of a member", "of the server", "bytes up", "of plain"]]
    for size in sizes:
        costs: dict[str, list[Cost]] = {way: [] for way in WAYS}
        lost, some = min(options.lost, size - LEAST), {number: updates[number] for number in range(1, size + 1)}
        for _, way in turns(WAYS, options.repeats):
            costs[way].append(of_workers(some, lost, RULES[way]) if way in RULES else of_peers(some, lost))
        for way, cost_of_rounds in costs.items():
            cpu, server = (
                Spread.of([getattr(cost, name) for cost in cost_of_rounds]).text(".3f")
                for name in ("cpu_s", "server_s")
            )
            sent = cost_of_rounds[0].bytes_up
            rows.append([way, f"{size}", f"{lost}", cpu, server, f"{sent:,}", f"{sent / plain[way]:.4f}"])
    print(f"{options.values:,} parameters, {options.repeats} repeats, median (range); sums without noise are exact\n")
    print(table(rows))


if __name__ == "__main__":
    main()
