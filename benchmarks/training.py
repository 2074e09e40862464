"""Compare the speed of training with alternatives: ``python -m benchmarks.training [--quick]``.

Every run of a contender is a separate process. The contenders run in turns. Repeat r trains all of them with seed r,
from the same initial weights. All times are measured in the same way. A time begins when all processes are ready, with
data loaded and the model built, but nothing traced. It ends with the last merge; see ``benchmarks.workload``. Only the
limit has traced its training step before: its time is that of ``fit`` alone. Shares of the limit are computed within a
repeat.

``--quick`` takes under 3 minutes on two cores, with fewer samples, two rounds and one repeat. Its figures are mostly
first traces: it only shows that everything runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.contender import CONTENDERS, LIMIT
from benchmarks.measure import Spread, machine, mean_and_deviation, run_child, table, turns
from benchmarks.workload import APPS, Workload

OURS, SINGLE = "sync", "sync-1"
LIMITS = {OURS: LIMIT, SINGLE: "limit-1"}
"""The bare ``fit`` to compare each contender with: as many processes, one thread each. Both count their first trace."""
ON_REQUEST = (SINGLE, LIMITS[SINGLE])
QUICK = [name for name in CONTENDERS if name not in (*ON_REQUEST, "limit-arrays", "plain-dataset", "spark-tuned")]
FULL = [name for name in CONTENDERS if name not in ON_REQUEST]
DISTURBED_CORES = 0.1
"""A value above this shows that other programs used the machine during a run."""

Run = dict[str, Any]
"""The output of ``benchmarks.contender`` for one run, with ``name``, ``repeat`` and ``seed``."""


def available(names: Sequence[str]) -> list[str]:
    """Return the contenders that can run here. For each other one, print the reason."""
    reasons = {name: CONTENDERS[name].missing() for name in names}
    for name, reason in reasons.items():
        if reason:
            print(f"{name:<16} left out: {reason}", flush=True)
    return [name for name in names if not reasons[name]]


def run_all(names: Sequence[str], workload: Workload, repeats: int) -> list[Run]:
    """Run each contender once in every repeat, interleaved; print a line for each run. A run that fails is printed and left out.

    Args:
        names: In ``CONTENDERS``.
        workload: What to train; its seed is added to the number of the repeat.
        repeats: 1 or more.
    """
    runs = []
    for repeat, name in turns(names, repeats):
        seeded = dataclasses.replace(workload, seed=workload.seed + repeat)
        timeout_s = 300 + 60 * workload.epochs
        try:
            result = run_child("benchmarks.contender", name, seeded.dump(), timeout_s=timeout_s)
        except RuntimeError as error:  # the runs of an hour are worth more than stopping here
            print(f"repeat {repeat + 1}/{repeats}  {name:<16} FAILED: {error}", flush=True)
            continue
        runs.append({"name": name, "repeat": repeat, "seed": seeded.seed, **result})
        reached = "" if result["accuracy"] is None else f"  accuracy {result['accuracy']:.4f}"
        other_cores = 0.0 if CONTENDERS[name].leaves_orphans else result["others_cores"] or 0.0
        disturbed = f"  DISTURBED: others used {other_cores:.1f} cores" if other_cores > DISTURBED_CORES else ""
        print(
            f"repeat {repeat + 1}/{repeats}  {name:<16} {result['seconds']:7.2f} s  "
            f"(start-up {result['startup_s']:.1f} s){reached}{disturbed}",
            flush=True,
        )
    return runs


def ratios(runs: Sequence[Run], name: str, base: str) -> list[float]:
    """Return the time of ``name`` divided by the time of ``base``, for each repeat in which both ran."""
    seconds = {(run["name"], run["repeat"]): run["seconds"] for run in runs}
    repeats = sorted({run["repeat"] for run in runs})
    return [
        seconds[name, repeat] / seconds[base, repeat]
        for repeat in repeats
        if (name, repeat) in seconds and (base, repeat) in seconds
    ]


def results_table(runs: Sequence[Run]) -> str:
    """Return the table of all contenders: medians with the range over repeats, accuracy as mean and standard deviation."""
    rows = [["contender", "time s", "of the limit", f"time / {OURS}", "accuracy %", "MB out", "MB back", "start-up s"]]
    for name in dict.fromkeys(run["name"] for run in sorted(runs, key=lambda run: list(CONTENDERS).index(run["name"]))):
        own_runs = [run for run in runs if run["name"] == name]
        to_limit = [100 / ratio for ratio in ratios(runs, name, LIMIT)]
        to_ours = ratios(runs, name, OURS)
        reached = [100 * run["accuracy"] for run in own_runs if run["accuracy"] is not None]
        rows.append(
            [
                f"{name}: {CONTENDERS[name].about}",
                Spread.of([run["seconds"] for run in own_runs]).text(),
                f"{Spread.of(to_limit).text('.0f')} %" if to_limit else "-",
                Spread.of(to_ours).text() if to_ours else "-",
                mean_and_deviation(reached) if reached else "-",
                _megabytes(own_runs, "bytes_out"),
                _megabytes(own_runs, "bytes_back"),
                Spread.of([run["startup_s"] for run in own_runs]).text(".1f"),
            ]
        )
    return table(rows)


def _megabytes(runs: Sequence[Run], key: str) -> str:
    counts = [run[key] for run in runs if run[key] is not None]
    return f"{statistics.median(counts) / 1e6:.2f}" if counts else "-"


def trace_notes(runs: Sequence[Run]) -> Iterator[str]:
    """Yield the share of the speed of bare ``fit`` that DDLF reaches. Both count their first trace, like all contenders."""
    for name, limit in LIMITS.items():
        bare = {run["repeat"]: run["seconds"] + run["notes"]["trace_s"] for run in runs if run["name"] == limit}
        shares = [
            100 * bare[run["repeat"]] / run["seconds"] for run in runs if run["name"] == name and run["repeat"] in bare
        ]
        if shares:
            trace = statistics.median(run["notes"]["trace_s"] for run in runs if run["name"] == limit)
            yield (
                f"{limit} leaves out its first trace of {trace:.2f} s, which the others' times hold. With it counted, "
                f"{name} reaches {Spread.of(shares).text('.1f')} % of {limit}."
            )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="12,000 samples, 2 rounds, 1 repeat: under 3 minutes")
    parser.add_argument("--data", choices=list(APPS), default="mnist")
    parser.add_argument("--samples", type=int, metavar="N", help="of the training set; default all")
    parser.add_argument("--rounds", type=int, metavar="N", help="default 3")
    parser.add_argument("--batch-size", type=int, default=64, metavar="N", help="of each worker; default 64")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="default 2")
    parser.add_argument("--repeats", type=int, metavar="N", help="with as many seeds; default 3")
    parser.add_argument("--only", metavar="NAME,...", help=f"of {', '.join(CONTENDERS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every single run")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write time to accuracy and speed-up as PNG")
    options = parser.parse_args(arguments)
    options.samples = options.samples or (12_000 if options.quick else None)
    options.rounds = options.rounds or (2 if options.quick else 3)
    options.repeats = options.repeats or (1 if options.quick else 3)
    options.names = options.only.split(",") if options.only else [*(QUICK if options.quick else FULL)]
    unknown = [name for name in options.names if name not in CONTENDERS]
    if unknown:
        parser.error(f"there is no contender {', '.join(unknown)}; there are: {', '.join(CONTENDERS)}")
    if options.plots and OURS in options.names and SINGLE not in options.names:
        options.names.append(SINGLE)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the command line says."""
    options = parse(arguments)
    if options.plots:
        from benchmarks import plots  # says at once that matplotlib is not installed
    workload = Workload(
        data=options.data,
        samples=options.samples,
        rounds=options.rounds,
        batch_size=options.batch_size,
        workers=options.workers,
        curve=bool(options.plots),
    )
    facts = machine()
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    print(
        f"{workload.data}, {workload.rounds} rounds of {workload.local_epochs} local epoch, batch {workload.batch_size}, "
        f"{workload.workers} workers, {options.repeats} repeats with a seed each\n"
    )
    names = available(options.names)
    runs = run_all(names, workload, options.repeats)
    print(f"\n{results_table(runs)}")
    for note in trace_notes(runs):
        print(f"\n{note}")
    if options.json:
        options.json.write_text(json.dumps({"machine": facts, "workload": json.loads(workload.dump()), "runs": runs}))
    if options.plots:
        for path in plots.write(runs, options.plots, OURS, SINGLE, workload.workers):
            print(f"wrote {path}")
    if len(runs) < len(names) * options.repeats:
        sys.exit("some runs failed, see above")


if __name__ == "__main__":
    main()
