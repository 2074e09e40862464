"""Measure the start of training, the restart of a killed executor, and the memory of idle workers on one machine.

    python -m benchmarks.start [--workers 1,4] [--memory 8] [--repeats 3] [--json FILE]

- *Begins*: the time from the start of ``ddlf run apps/digits_cnn.py --local N`` to the first task. It is compared with
  a plain Python script that imports Keras, loads the same data and builds the same model. Both run in turns, and the
  output has medians.
- *Again*: ``kill -9`` ends an executor that trains the published MNIST CNN. The time ends when its worker gets the next
  task.
- *Memory*: the proportional set sizes (each shared page counts once) of all processes of N local workers with Keras
  imported, before they load data. The workers are forks of one process, or separate processes with ``DDLF_FORK=0``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import machine, run_child, table
from ddlf.training.roles import PRELOADED

ROOT = Path(__file__).parents[1]
LIMIT_S = 600.0
MAX_BEGIN, MAX_FOUR, MAX_AGAIN_S, MAX_MEMORY = 1.3, 1.2, 1.0, 1 / 3
"""The promised limits on two quiet cores."""


# -- in separate processes ---------------------------------------------------------------------------------------------


def plain() -> dict[str, float]:
    """Do the work of a plain script before its training, and return the time of its end."""
    from apps.digits_cnn import DigitsCNN

    app = DigitsCNN()
    asyncio.run(app.load_dataset())
    asyncio.run(app.create_model())
    return {"began": time.time()}


def begins(workers: int) -> dict[str, float]:
    """Return the time at which ``ddlf run`` sends its first task."""
    command = [sys.executable, "-m", "ddlf.cli.main", "run", "benchmarks/start_app.py", "--local", str(workers)]
    done = subprocess.run(
        [*command, "--master-epochs", "1", "--quiet"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=LIMIT_S,
    )
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))  # type: ignore[no-any-return]


def again(samples: int) -> dict[str, float]:
    """Return the seconds from the end of an executor in training to the next task of its worker."""
    from apps.mnist_cnn import MNISTCNN
    from ddlf.events import Event, SlotStarted
    from ddlf.testing import local_cluster

    class App(MNISTCNN):
        verbose = False
        master_epochs, worker_epochs = 100, 1  # enough rounds: the other worker continues alone

        async def load_dataset(self) -> None:
            await super().load_dataset()
            self.x_train, self.y_train = self.x_train[:samples], self.y_train[:samples]

    async def train() -> float:
        async with local_cluster(2) as cluster:
            app, moments = App(cluster), []

            def follow(event: Event) -> None:
                if not isinstance(event, SlotStarted) or event.worker != 2:
                    return
                if not moments and event.round == 1:  # the second one: nothing is new any more
                    asyncio.get_running_loop().call_later(0.05, kill)
                elif len(moments) == 1:
                    moments.append(time.monotonic())
                    app.stop_training()

            def kill() -> None:
                moments.append(time.monotonic())
                cluster.machine(2).kill()

            app.subscribe(follow)
            await app.train_sync()
            return moments[1] - moments[0]

    return {"seconds": asyncio.run(train())}


def memory(workers: int, *modules: str) -> dict[str, float]:
    """Return the MB of all processes of local workers after these imports."""
    import psutil

    from ddlf import Cluster

    def import_them(names: list[str]) -> None:
        import importlib

        for name in names:
            importlib.import_module(name)

    async def measure() -> float:
        cluster = Cluster.local(workers)
        await cluster.connect(modules=modules)
        async with cluster:
            await asyncio.gather(*(worker.preload(*modules) for worker in cluster.workers))
            await cluster.run_method(import_them, names=list(modules))
            return sum(
                int(line.split()[1])
                for process in psutil.Process().children(recursive=True)
                for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()  # noqa: ASYNC240
                if line.startswith("Pss:")
            )

    return {"megabytes": asyncio.run(measure()) / 1024}


# -- here ---------------------------------------------------------------------------------------------------------------


def timed(*arguments: str) -> float:
    """Return the seconds from the start of a child to the time that it prints."""
    begin = time.time()
    return float(run_child("benchmarks.start", *arguments, timeout_s=LIMIT_S)["began"]) - begin


def megabytes(workers: int, modules: list[str], fork: str) -> float:
    """Return the result of ``memory`` with ``DDLF_FORK`` set to a value."""
    before = os.environ.get("DDLF_FORK")
    os.environ["DDLF_FORK"] = fork
    try:
        return float(run_child("benchmarks.start", "memory", str(workers), *modules, timeout_s=LIMIT_S)["megabytes"])
    finally:
        if before is None:
            del os.environ["DDLF_FORK"]
        else:
            os.environ["DDLF_FORK"] = before


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure everything."""
    counts = [int(count) for count in options.workers.split(",")]
    begin: dict[str, list[float]] = {"plain": [], **{str(count): [] for count in counts}}
    seconds_again = []
    for _ in range(options.repeats):
        begin["plain"].append(timed("plain"))
        for count in counts:
            begin[str(count)].append(timed("begins", str(count)))
        seconds_again.append(
            float(run_child("benchmarks.start", "again", str(options.samples), timeout_s=LIMIT_S)["seconds"])
        )
    return {
        "machine": machine(),
        "begins_s": begin,
        "again_s": seconds_again,
        "workers_in_memory": options.memory,
        "forked_mb": megabytes(options.memory, options.modules, "1"),
        "own_mb": megabytes(options.memory, options.modules, "0"),
    }


def report(result: dict[str, Any]) -> str:
    """Return the table."""
    medians = {name: statistics.median(values) for name, values in result["begins_s"].items()}
    first, *other_ways = [name for name in medians if name != "plain"]
    rows = [["what", "measured", "ratio", "promised"]]
    rows.append(["plain import, data and model", f"{medians['plain']:.2f} s", "1.00", ""])
    rows.append(
        [
            f"first task, local workers: {first}",
            f"{medians[first]:.2f} s",
            f"{medians[first] / medians['plain']:.2f}",
            f"{MAX_BEGIN:.2f}",
        ]
    )
    rows += [
        [
            f"first task, local workers: {name}",
            f"{medians[name]:.2f} s",
            f"{medians[name] / medians[first]:.2f} of {first}",
            f"{MAX_FOUR:.2f}",
        ]
        for name in other_ways
    ]
    rows.append(
        ["killed executor has a task again", f"{statistics.median(result['again_s']):.2f} s", "", f"{MAX_AGAIN_S:g} s"]
    )
    rows.append(
        [
            f"memory of {result['workers_in_memory']} workers",
            f"{result['forked_mb']:.0f} MB of {result['own_mb']:.0f} MB",
            f"{result['forked_mb'] / result['own_mb']:.2f}",
            f"{MAX_MEMORY:.2f}",
        ]
    )
    return table(rows)


def main(argv: list[str] | None = None) -> None:
    """Measure and print; or, as a child, one part of it."""
    argv = sys.argv[1:] if argv is None else argv
    parts = {"plain": plain, "begins": begins, "again": again, "memory": memory}
    if argv and argv[0] in parts:
        print(json.dumps(parts[argv[0]](*(int(text) if text.isdigit() else text for text in argv[1:]))))  # type: ignore[operator]
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="1,4", help="numbers of local workers (default: 1,4)")
    parser.add_argument(
        "--memory", type=int, default=8, metavar="N", help="workers whose memory is measured (default: 8)"
    )
    parser.add_argument("--modules", nargs="+", default=[*PRELOADED], help="that these have imported (default: Keras)")
    parser.add_argument("--samples", type=int, default=12_000, help="of MNIST, for the killed executor")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    options = parser.parse_args(argv)
    result = measure(options)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    print(report(result))


if __name__ == "__main__":
    main()
