"""Repeat the comparison of the published paper in its form: ``python -m benchmarks.paper --epochs 10,20``.

Phan and Do 2023 train for 10 to 100 epochs with Spark, and with their synchronous and asynchronous algorithms. They
report the time and accuracy of each. This benchmark does the same with today's DDLF (``sync``, ``async``), with the
algorithms as the authors coded them (``published-sync``, ``published-async``) and with Spark. The systems run in turns,
and each repeat has its own seed. ``benchmarks.training`` defines the times.

Spark runs in its usual form, whose ``fit`` on arrays can stall. ``--systems spark-tuned,sync,async`` uses the tuned
form.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.contender import CONTENDERS
from benchmarks.measure import Spread, machine, mean_and_deviation, table
from benchmarks.training import Run, available, run_all
from benchmarks.workload import APPS, Workload

SYSTEMS = "spark,sync,async"


def results_table(runs: dict[int, list[Run]], systems: Sequence[str]) -> str:
    """One row for each number of epochs: of every system the time (median and range) and the accuracy (mean and deviation)."""
    rows = [["epochs", *(f"{system} {quantity}" for quantity in ("time s", "accuracy %") for system in systems)]]
    for epochs, measured in runs.items():
        by_system = [[run for run in measured if run["name"] == system] for system in systems]
        times = [
            Spread.of([run["seconds"] for run in own_runs]).text(".1f") if own_runs else "failed"
            for own_runs in by_system
        ]
        reached = [
            mean_and_deviation([100 * run["accuracy"] for run in own_runs]) if own_runs else "-"
            for own_runs in by_system
        ]
        rows.append([str(epochs), *times, *reached])
    return table(rows)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", default="10,20", metavar="N,...", help="default 10,20; the paper has 10,20,...,100")
    parser.add_argument("--worker-epochs", type=int, default=2, metavar="N", help="local epochs in a round; default 2")
    parser.add_argument("--systems", default=SYSTEMS, metavar="NAME,...", help=f"default {SYSTEMS}")
    parser.add_argument("--data", choices=list(APPS), default="mnist")
    parser.add_argument("--samples", type=int, metavar="N", help="of the training set; default all")
    parser.add_argument("--batch-size", type=int, default=64, metavar="N")
    parser.add_argument("--workers", type=int, default=2, metavar="N")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="with as many seeds; default 3")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every single run")
    options = parser.parse_args(arguments)
    options.epochs = [int(part) for part in options.epochs.split(",")]
    options.systems = options.systems.split(",")
    uneven = [epochs for epochs in options.epochs if epochs < 1 or epochs % options.worker_epochs]
    if uneven:
        parser.error(f"{uneven[0]} epochs are not a multiple of a round of {options.worker_epochs}")
    unknown = [name for name in options.systems if name not in CONTENDERS or name.startswith("limit")]
    if unknown:
        parser.error(f"there is no system {', '.join(unknown)}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark. It prints the table again after each number of epochs."""
    options = parse(arguments)
    facts = machine()
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    systems = available(options.systems)
    runs: dict[int, list[Run]] = {}
    for epochs in options.epochs:
        workload = Workload(
            data=options.data,
            samples=options.samples,
            rounds=epochs // options.worker_epochs,
            local_epochs=options.worker_epochs,
            batch_size=options.batch_size,
            workers=options.workers,
        )
        print(f"\n{options.data}, {epochs} epochs in rounds of {options.worker_epochs}", flush=True)
        runs[epochs] = run_all(systems, workload, options.repeats)
        print(f"\n{results_table(runs, systems)}", flush=True)
        if options.json:
            options.json.write_text(json.dumps({"machine": facts, "runs": runs}))


if __name__ == "__main__":
    main()
