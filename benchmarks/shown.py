"""Measure the cost of watching a run: training with all displays and files, beside training without any.

    python -m benchmarks.shown [--data digits|mnist] [--rounds N] [--samples N] [--repeats 5]

With everything on, there are the live display in a pseudo-terminal that is read, the web page with a viewer in its own
process, the run folder with its report, and TensorBoard. The time is from the first task to the last merge. The
trainings run in turns on the same two workers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from apps.digits_cnn import DigitsCNN
from benchmarks.measure import Spread, turns
from benchmarks.unequal import App as MNISTCNN
from ddlf import Cluster
from ddlf.events import Event, RunEnded, TrainingBegan

VIEWER = """
import sys
from websockets.sync.client import connect
with connect(f"ws://127.0.0.1:{sys.argv[1]}/live", subprotocols=["ddlf", sys.argv[2]], proxy=None, max_size=None) as page:
    for message in page:
        pass
"""
ROUNDS = {"digits": 60, "mnist": 6}


@contextlib.contextmanager
def terminal() -> Any:
    """Make standard output a pseudo-terminal. A thread reads its output and drops it."""
    ours, terminal_end = os.openpty()

    def read() -> None:
        with contextlib.suppress(OSError):
            while os.read(ours, 65536):
                pass

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    before, sys.stdout = sys.stdout, os.fdopen(terminal_end, "w")
    try:
        yield
    finally:
        sys.stdout.close()
        sys.stdout = before
        reader.join()
        os.close(ours)


@contextlib.asynccontextmanager
async def everything(app: Any, folder: Path) -> AsyncIterator[None]:
    """Turn on everything that shows or keeps a run."""
    app.ui, app.verbose, app.out, app.trackers = "rich", True, folder, ["tensorboard"]
    with terminal():
        async with app.cluster.dashboard(app) as page:
            viewer = await asyncio.create_subprocess_exec(
                sys.executable, "-c", VIEWER, str(page.port), page.url.partition("#")[2]
            )
            try:
                yield
            finally:
                viewer.terminate()
                await viewer.wait()


async def train(cluster: Cluster, options: argparse.Namespace, seed: int, folder: Path | None) -> float:
    """Train once, and return the seconds from the first task to the last merge.

    Args:
        cluster: Two workers.
        options: Options of the command line.
        seed: Seed of the training.
        folder: Folder of runs; None for a training that shows and keeps nothing.
    """
    app: Any = {"digits": DigitsCNN, "mnist": MNISTCNN}[options.data](cluster)
    app.ui, app.out, app.verbose, app.samples = "none", None, False, options.samples
    times: dict[type[Event], float] = {}
    app.subscribe(lambda event: times.setdefault(type(event), time.perf_counter()))
    async with everything(app, folder) if folder else contextlib.nullcontext():
        await app.train_sync(master_epochs=options.rounds, worker_epochs=1, seed=seed)
    return times[RunEnded] - times[TrainingBegan]


async def main(options: argparse.Namespace) -> dict[str, list[float]]:
    """Measure in turns; print and return seconds of each training."""
    options.rounds = options.rounds or ROUNDS[options.data]
    seconds: dict[str, list[float]] = {"nothing": [], "everything": []}
    with tempfile.TemporaryDirectory() as folder:
        async with Cluster.local(2) as cluster:
            await train(cluster, options, 0, Path(folder))  # all is imported, and compiled
            for repeat, name in turns(list(seconds), options.repeats):
                seconds[name].append(
                    await train(cluster, options, repeat, Path(folder) if name == "everything" else None)
                )
    ratios = [shown / quiet for shown, quiet in zip(seconds["everything"], seconds["nothing"], strict=True)]
    for name, values in seconds.items():
        print(f"{name:<11}{Spread.of(values).text()} s")
    print(f"everything takes {Spread.of(ratios).text('.3f')} times as long ({options.data}, {options.rounds} rounds)")
    return seconds


def parser() -> argparse.ArgumentParser:
    """The options."""
    result = argparse.ArgumentParser(prog="python -m benchmarks.shown", description=__doc__.partition("\n")[0])
    result.add_argument("--data", choices=list(ROUNDS), default="digits")
    result.add_argument("--rounds", type=int, help="by default 60 of digits, 6 of MNIST")
    result.add_argument("--samples", type=int, default=60_000, help="of MNIST's training data, the first so many")
    result.add_argument("--repeats", type=int, default=5)
    return result


if __name__ == "__main__":
    asyncio.run(main(parser().parse_args()))
