"""A checkpoint after each of 10,000 asynchronous updates: ``python -m tests.trials.snapshots [--json FILE]``.

Each update adds 1 to every weight, so weights tell how many are in them. In each checkpoint, rounds of all slots, updates in the weights, samples in
the ledger and records must be of the same moment. From every tenth a run goes on in another folder, and must end with every sample trained on exactly
once in each epoch. Workers and model are made up; the master, its checkpoints and the disk are real.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import shutil
import statistics
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.measure import Spread, table
from ddlf.testing import FakeRun
from ddlf.training.checkpoints import journal
from ddlf.training.checkpoints.checkpoint import Checkpoint, CheckpointFolder
from ddlf.training.checkpoints.journal import JOURNAL

SLOTS = 2
SHARE = 0.1  # of the updates: the first ones and the last ones, whose cost is compared


class Counting(FakeRun):
    """Its workers add 1 to every weight in each update."""

    mode = "async"
    slots = SLOTS

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.trains = asyncio.Event()
        for worker in self.cluster.workers:
            worker.asked = deque(
                maxlen=1
            )  # all tasks of all updates would be a process that only grows, as no master does
            worker.fit = lambda task, weights, momentum: ([np.full_like(w, -SLOTS) for w in weights], [])

    def on_event(self, event: Any) -> None:
        """Keep none."""

    def on_round(self, record: Any) -> None:
        """Print nothing."""
        self.trains.set()


def faults(checkpoint: Checkpoint, lines: int) -> list[str]:
    """What in a checkpoint is not of the same moment.

    Args:
        checkpoint: Without its records.
        lines: How many of them belong to it.
    """
    number = checkpoint.round
    weights = list(checkpoint.arrays["weights"].values())
    counts = checkpoint.arrays["ledger"]["counts"]
    rounds = checkpoint.facts["slot_rounds"]
    # Slot j has part j of each round; equal parts differ by one sample at most.
    low, high = ((len(counts) + extra) // SLOTS * number for extra in (0, SLOTS - 1))
    found = {
        f"{sum(rounds)} rounds of slots": sum(rounds) == number,
        f"{weights[0].flat[0]:g} updates in the weights": all((array == number).all() for array in weights),
        f"{int(counts.sum())} samples in the ledger": low <= int(counts.sum()) <= high,
        f"ledger from {counts.min()} to {counts.max()}": min(rounds) <= counts.min() and counts.max() <= max(rounds),
        f"{lines} records": lines == number,
    }
    return [f"round {number}: {what}" for what, right in found.items() if not right]


async def watch(trains: asyncio.Event, held: list[float], computed: list[float]) -> None:
    """Note how long the event loop was held up each time, and how long its thread computed: beside other programs only that is its own."""
    await trains.wait()  # what is imported and read before has nothing to do with checkpoints
    while True:
        begin, processor = time.perf_counter(), time.thread_time()
        await asyncio.sleep(0.001)
        held.append(time.perf_counter() - begin - 0.001)
        computed.append(time.thread_time() - processor)


async def train(path: Path, updates: int, every: int) -> dict[str, Any]:
    """The run, and what each of its checkpoints was like.

    Args:
        path: A new folder.
        updates: How many there are to be.
        every: Each of these is put aside to be resumed from.
    """
    aside = path / "aside"
    aside.mkdir(parents=True)
    wrong: list[str] = []
    seconds: list[float] = []
    usual = CheckpointFolder.save

    def save(self: CheckpointFolder, checkpoint: Checkpoint) -> Path:
        begin = time.perf_counter()
        written = usual(self, checkpoint)
        seconds.append(time.perf_counter() - begin)
        found = self.load(written)
        wrong.extend(faults(found, found.extent.lines))
        if checkpoint.round % every == 0:
            shutil.copytree(written, aside / written.name)
        return written

    held: list[float] = []
    computed: list[float] = []
    app = Counting(master_epochs=updates // SLOTS, checkpoint=path / "run")
    gc.collect()  # what was imported is looked through now, and not in the middle
    watching = asyncio.ensure_future(watch(app.trains, held, computed))
    begin = time.perf_counter()
    # Their share of the records is looked at when they are resumed from: all of them each time would be the square of their number.
    with (
        mock.patch.object(CheckpointFolder, "save", save),
        mock.patch.object(journal, "read", read_nothing),
    ):
        await app.train_model()
    whole = time.perf_counter() - begin
    watching.cancel()
    os.symlink(path / "run" / JOURNAL, aside / JOURNAL)
    return {
        "wrong": wrong,
        "save_s": seconds,
        "held_s": held,
        "computed_s": computed,
        "seconds": whole,
        "bytes": _sizes(path / "run"),
    }


def read_nothing(*_: Any) -> list[Any]:
    """In place of reading all records; a mock would remember each call."""
    return []


def _sizes(folder: Path) -> dict[str, int]:
    newest = max(folder.glob("round-*"))
    return {path.name: path.stat().st_size for path in sorted([*newest.iterdir(), folder / JOURNAL])}


async def resume(path: Path) -> list[str]:
    """Go on from each checkpoint that was put aside, to the end of the round after; returns what was wrong."""
    wrong = []
    for number, source in enumerate(sorted((path / "aside").glob("round-*"))):
        facts = CheckpointFolder(source.parent).load(source).facts
        epochs = max(facts["slot_rounds"]) + 1
        app = Counting(
            master_epochs=epochs, checkpoint=path / f"resumed-{number}", resume=source, checkpoint_every=1000
        )
        await app.train_model()
        weights = app.model.get_weights()[0].flat[0]
        if not app.ledger.is_exact(epochs) or weights != SLOTS * epochs or len(app.history) != SLOTS * epochs:
            wrong.append(f"{source.name}: {weights:g} updates, {len(app.history)} records, {epochs} epochs")
        shutil.rmtree(app.checkpoint)
    return wrong


def measure(path: Path, updates: int, every: int = 10) -> dict[str, Any]:
    """Both, one after the other."""
    found = asyncio.run(train(path, updates, every))
    begin = time.perf_counter()
    found["wrong_resumed"] = asyncio.run(resume(path))
    found["resumed"] = len(list((path / "aside").glob("round-*")))
    found["resumed_s"] = time.perf_counter() - begin
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run, print, and say with the exit code whether every promise was kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=10, metavar="N", help="resume from every Nth")
    parser.add_argument("--folder", type=Path, help="on the disk to try; default: where temporary files are")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        found = measure(Path(name) / "snapshots", options.updates, options.every)
    print(report(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 1 if found["wrong"] or found["wrong_resumed"] else 0


def report(found: dict[str, Any]) -> str:
    """The tables."""
    saves, held = found["save_s"], np.array(found["held_s"])
    part = max(1, int(SHARE * len(saves)))
    rows = [["checkpoints", "each, ms: median (lowest-highest)"]]
    for name, some in ((f"first {part:,}", saves[:part]), (f"last {part:,}", saves[-part:])):
        rows.append([name, Spread.of([1e3 * s for s in some]).text(".2f")])
    lines = [
        f"{len(saves):,} checkpoints of {sum(array.size for array in Counting.start.values()):,} weights in {found['seconds']:.0f} s, "
        f"{len(found['wrong'])} of them not of one moment",
        f"resumed from {found['resumed']:,} of them, {len(found['wrong_resumed'])} times with a ledger that was not exact",
        *(f"  wrong: {what}" for what in (found["wrong"] + found["wrong_resumed"])[:20]),
        f"event loop held up: longest {1e3 * held.max():.1f} ms, in 999 of 1,000 cases below {1e3 * np.quantile(held, 0.999):.1f} ms, "
        f"median {1e3 * statistics.median(held):.2f} ms; longest computation of its thread meanwhile {1e3 * max(found['computed_s']):.1f} ms",
        "",
        table(rows),
        "",
        "bytes of the last one: " + ", ".join(f"{name} {size:,}" for name, size in found["bytes"].items()),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
