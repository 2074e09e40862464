"""Measure what secure aggregation costs one peer in one round: processor seconds, and bytes up beside a plain round.

    python -m benchmarks.secure_sums [--peers 8] [--values 1000000] [--lost 2] [--repeats 5]

All peers and the server's part run in this process, without sockets and training. The processor seconds are those of the
first peer: its keys, the numbers of its update, its masks, its signature and its answer. The bytes are those of the frames
that it sends. A plain round sends one post. The sum is compared with the exact one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np

from benchmarks.measure import table
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
from ddlf.privacy.secure_sum import unmasked

MEASURED = 1
SAMPLES = 100


class Round:
    """One round of peers around a server, without sockets.

    Attributes:
        cpu_s: Processor seconds of the measured peer.
        bytes_up: Bytes that it has sent.
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
        self.cpu_s, self.bytes_up = 0.0, 0
        self.work: AddUp | None = None
        for number in range(1, peers + 1):
            self.ledger.apply(Invited(at=1.0, code=f"{number}", until=1e12))
            self.ledger.apply(Joined(at=1.0, peer=number, code=f"{number}", key=""))
            self.ledger.apply(Arrived(at=1.0, peer=number, name="", samples=SAMPLES, keeps=False))
            self.peers[number] = SecurePeer(self.plan, "run", number, SAMPLES, lambda line: None)
            self.peers[number].begin(1, self.base, self.set)

    def measured(self, peer: int, act: Any) -> Message | None:
        """Let a peer act, and count what the measured one needs and sends."""
        began = time.process_time()
        message: Message | None = act()
        sent = frames.encode(message) if message is not None else b""
        if peer == MEASURED:
            self.cpu_s += time.process_time() - began
            self.bytes_up += len(sent)
        return message

    def follow(self, made: Any) -> None:
        """Pass messages on until nothing is left to do."""
        for one in made:
            if isinstance(one, Tell):
                answer = self.measured(one.peer, lambda one=one: self.peers[one.peer].received(one.message))
                if answer is not None:
                    self.follow(self.rounds.received(one.peer, answer, 2.0))
            elif isinstance(one, AddUp):
                self.work = one
            elif isinstance(one, Reply):
                raise AssertionError(one)

    def run(self, updates: dict[int, Weights], lost: int) -> None:
        """Add up the updates of all peers except the last ones."""
        self.follow(self.rounds.step(2.0))
        for number in list(self.peers)[len(self.peers) - lost :]:
            self.ledger.apply(Left(at=2.0, peer=number, why="gone"))
            del self.peers[number]
        for number, peer in self.peers.items():
            live = [old - new for old, new in zip(self.base, updates[number], strict=True)]
            masked = self.measured(number, lambda peer=peer, live=live: peer.masked(live, 1, 20))
            assert masked is not None
            self.follow(self.rounds.received(number, masked, 2.0))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--values", type=int, default=1_000_000, help="parameters of the model")
    parser.add_argument("--lost", type=int, default=2, help="peers that are lost before their post")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    random = np.random.default_rng(0)
    updates = {
        number: [random.normal(0, 0.01, options.values).astype(np.float32)] for number in range(1, options.peers + 1)
    }
    layout = layout_of({"dense/kernel": np.zeros(options.values, np.float32)})
    plain = len(frames.encode(Post(number=1, contains=0, updates=20, set=layout.encode(updates[1]))))
    cpu, server, sent = [], [], 0
    for _ in range(options.repeats):
        one = Round(options.peers, options.values)
        one.run(updates, options.lost)
        assert one.work is not None
        began = time.process_time()
        total = unmasked({peer: post.set for peer, post in one.work.posts.items()}, one.work.answers)
        server.append(time.process_time() - began)
        numbers = [numbers_of(one.plan, one.base, [-updates[peer][0]], 1.0) for peer in one.work.posts]
        assert (total == np.sum(numbers, axis=0, dtype=np.uint32)).all(), "the sum is not exact"
        cpu.append(one.cpu_s)
        sent = one.bytes_up
    print(
        f"{options.peers} peers, {options.lost} lost, {options.values:,} parameters, {options.repeats} repeats; sums are exact"
    )
    rows = [
        ["processor seconds of a peer", f"{statistics.median(cpu):.3f}", f"{min(cpu):.3f} to {max(cpu):.3f}"],
        [
            "processor seconds of the server",
            f"{statistics.median(server):.3f}",
            f"{min(server):.3f} to {max(server):.3f}",
        ],
        ["bytes up of a peer", f"{sent:,}", f"{sent / plain:.4f} times the {plain:,} of a plain round"],
    ]
    print(table([["one round", "median", "range"], *rows]))


if __name__ == "__main__":
    main()
