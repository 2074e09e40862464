"""Train on simulated cards: equal bits for any number of workers, and after a killed worker, a lost card or full memory.

    python -m tests.trials.cards [--backend jax ...] [--workers 1 2 4 8] [--faults 10]

A stand-in for NVML has eight cards, and the framework computes on the CPU. The first part trains eight slots on 1, 2, 4
and 8 workers, one card each. It compares the SHA-256 of the weights, and the masks of all executors. The second part
kills an executor, takes a card off the bus, lets a card hang, or fills its memory, each in a random round. A worker with a
lost card computes nothing until it ends, like with a real card. The exit code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ddlf
from ddlf.cluster.cluster import Cluster
from ddlf.errors import OutOfMemory
from ddlf.events import Event, SlotStarted, WorkerConnected, WorkerLost
from ddlf.worker.lost_cards import forget_lost, lost_cards
from tests.cards import Cards, card
from tests.training.models import Blobs, Quick

COUNT = 8
SLOTS = 8
DEAD_AFTER_S = 8.0
FAULTS = ("killed", "lost", "hung", "full")
CHANGES: dict[str, dict[str, Any]] = {"lost": {"xid": 79}, "hung": {"hangs": True}}


def uuid(number: int) -> str:
    """Return the UUID of a card of the stand-in."""
    return f"GPU-{number}0000000-0000"


class OnCards(Blobs):
    """An app that trains a small Keras model with eight slots."""

    slots = SLOTS
    optimizer = "adam"
    samples = 512
    master_epochs = 3
    deterministic = True


class Faulty(Quick):
    """An app that waits while its card is lost, and whose memory is full in the round ``full_in``."""

    slots = 4
    master_epochs = 6
    full_in = 0

    def train(self, weights: list[Any], worker_epochs: int, batch_size: int) -> Any:
        from ddlf.worker.frameworks import framework

        if self.full_in == self.replica.round:
            raise framework().full_error()
        self._compute()
        result = super().train(weights, worker_epochs, batch_size)
        self._compute()
        return result

    def _compute(self) -> None:
        def is_lost() -> bool:
            cards = json.loads(Path(os.environ["FAKE_NVML"]).read_text())["cards"]
            own_cards = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
            return any(entry["uuid"] in own_cards and ("xid" in entry or "hangs" in entry) for entry in cards)

        while is_lost():
            time.sleep(0.05)


def sha256(app: ddlf.IApp) -> str:
    """Return the SHA-256 of an app's weights."""
    return hashlib.sha256(b"".join(np.ascontiguousarray(w).tobytes() for w in app.model.get_weights())).hexdigest()


def mask() -> str:
    """Return the visible cards of this executor."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "none")


async def on_workers(workers: int) -> tuple[str, list[str]]:
    """Train on some workers, one card each, and return the SHA-256 of the weights and the masks."""
    async with Cluster.local(workers, gpus=list(range(workers))) as cluster:
        app = OnCards(cluster)
        await app.train_sync()
        return sha256(app), await cluster.run_method(mask)


def widths(workers: Sequence[int]) -> Iterator[str]:
    """Yield a line for each number of workers. It begins with ``WRONG`` if the bits or a mask differ."""
    expected = ""
    for count in workers:
        sha, masks = asyncio.run(on_workers(count))
        expected = expected or sha
        right = sha == expected and masks == [uuid(number) for number in range(count)]
        yield f"{'right' if right else 'WRONG'} {count} workers: SHA-256 {sha[:16]}, masks {', '.join(masks)}"


@dataclass
class Outcome:
    """The outcome of a run with a fault.

    Args:
        kind: The fault.
        sha: The SHA-256 of the weights; empty if the run ended with an error.
        reason: The reason of the loss, or the error.
        moved: Whether the worker returned on another card.
    """

    kind: str
    sha: str = ""
    reason: str = ""
    moved: bool = False


async def with_fault(cards: Cards, kind: str, chance: random.Random, workers: int = 2) -> Outcome:
    """Train with one fault on a random worker in a random round. An empty ``kind`` causes no fault."""
    outcome, number, worker = Outcome(kind), chance.randint(2, 5), chance.randint(1, workers)
    doing: list[asyncio.Task[None]] = []
    async with Cluster.local(workers, gpus=list(range(workers)), dead_after_s=DEAD_AFTER_S) as cluster:
        app = Faulty(cluster)
        app.full_in = number if kind == "full" else 0

        async def kill() -> None:
            os.kill((await cluster.workers[worker - 1].status()).executor_pid, signal.SIGKILL)

        def look(event: Event) -> None:
            if isinstance(event, SlotStarted) and (event.round, event.worker) == (number, worker) and not doing:
                if kind == "killed":
                    doing.append(asyncio.get_running_loop().create_task(kill()))
                elif kind in CHANGES:
                    change = CHANGES[kind]
                    cards.has(*(card(at, **(change if at == worker - 1 else {})) for at in range(COUNT)))
                    doing.append(asyncio.get_running_loop().create_task(asyncio.sleep(0)))
            elif isinstance(event, WorkerLost) and event.worker == worker:
                outcome.reason = outcome.reason or event.why
            elif isinstance(event, WorkerConnected) and event.worker == worker and event.again:
                outcome.moved = event.gpus != (f"{worker - 1} (Test Card)",)

        app.subscribe(look)
        app.cluster.subscribe(look)
        try:
            await app.train_sync()
            outcome.sha = sha256(app) if app.ledger.is_exact(app.master_epochs) else "samples were lost"
        except OutOfMemory as error:
            outcome.reason = error.message
        if doing:
            await asyncio.gather(*doing)
    return outcome


def is_right(outcome: Outcome, expected: str) -> bool:
    """Return whether a run with a fault has the promised result."""
    if outcome.kind == "full":
        return "does not fit into the memory of the card" in outcome.reason
    reason = {"killed": "SIGKILL", "lost": "has fallen off the bus (Xid 79)", "hung": "hangs: it has not answered"}
    return outcome.sha == expected and reason[outcome.kind] in outcome.reason


def faults(cards: Cards, count: int, kinds: Sequence[str] = FAULTS, seed: int = 0) -> Iterator[str]:
    """Yield a line for each run with a fault. It begins with ``WRONG`` if the run misses the promised result.

    The runs of a kind have two workers and one, in turns.
    """
    chance = random.Random(seed)
    expected = asyncio.run(with_fault(cards, "", chance)).sha
    for kind in kinds:
        for run in range(count):
            try:
                outcome = asyncio.run(with_fault(cards, kind, chance, 2 - run % 2))
            finally:
                avoided = [*lost_cards()]
                for name in avoided:
                    forget_lost(name)
                cards.has(*map(card, range(COUNT)))
            right = is_right(outcome, expected) and bool(avoided) == (kind in CHANGES)
            yield f"{'right' if right else 'WRONG'} {kind}: SHA-256 {outcome.sha[:16] or 'none'}, {outcome.reason}" + (
                ", came again on another card" if outcome.moved else ""
            )


def main() -> int:
    """Run the trial. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", nargs="*", default=["tensorflow", "jax"])
    parser.add_argument("--workers", nargs="*", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--faults", type=int, default=10)
    parser.add_argument("--kinds", nargs="*", default=FAULTS)
    options = parser.parse_args()
    wrong = 0
    for backend in options.backend:
        with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
            cards = Cards(Path(folder), patch)
            cards.compute_with(backend)
            cards.has(*map(card, range(COUNT)))
            print(f"== {backend}", flush=True)
            if options.workers:
                for line in widths(options.workers):
                    print(line, flush=True)
                    wrong += line.startswith("WRONG")
            if options.faults and backend == options.backend[0]:
                for line in faults(cards, options.faults, options.kinds):
                    print(line, flush=True)
                    wrong += line.startswith("WRONG")
    print(f"{wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
