"""Measure the cost of an engine: its rounds compared with workers that were started by hand, and its first round.

    python -m tests.trials.engines.cost ENGINE [--repeats 5] [--rounds 300] [--places 2]

ENGINE is a name in ``rig.RIGS``. Each repeat trains the app of the series in three ways, in random order: on running workers
(``--hosts``), with ``--local``, and on the engine. It also starts an empty program at all places with the engine's own
command. The trial prints medians with the smallest and the largest repeat:

- the time of a round on the engine, divided by the time with ``--hosts``
- the seconds from the command to the first round on the engine, minus the seconds with ``--local``
- the seconds of the empty program, which show the engine's own part of the start
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.trials.engines.here import HostsRig, LocalRig
from tests.trials.engines.rig import RIGS, Rig, Run, load
from tests.trials.engines.series import BEGIN_S

FIRST = 10
"""Number of rounds for the warm-up, which are not timed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the costs. Return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=RIGS)
    for name, count in {"repeats": 5, "rounds": 300, "places": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=count)
    options = parser.parse_args(argv)
    paces, firsts, empty = list[float](), list[float](), list[float]()
    with tempfile.TemporaryDirectory(prefix="ddlf-cost-") as name:
        top = Path(name)
        top.chmod(0o755)
        for kind in ("hosts", "local", "engine"):
            (top / kind).mkdir()
        hosts, local, engine = HostsRig(top / "hosts"), LocalRig(top / "local"), load(options.engine, top / "engine")
        rigs: list[Rig] = [hosts, local, engine]
        for rig in rigs:
            rig.places = options.places
        with hosts, local, engine:
            for repeat in range(options.repeats):
                measured = {}
                random.Random(repeat).shuffle(rigs)
                for rig in rigs:
                    measured[rig] = train(rig, top / f"run-{repeat}-{rig.name}", options.rounds)
                paces.append(measured[engine][1] / measured[hosts][1])
                firsts.append(measured[engine][0] - measured[local][0])
                empty.append(time_empty(engine, top))
                figures = ", ".join(
                    f"{rig.name} {times[0]:.2f} s {1000 * times[1]:.1f} ms" for rig, times in measured.items()
                )
                print(f"  {repeat + 1}: {figures}, empty program {empty[-1]:.2f} s", flush=True)
    print(f"{options.engine}: round {spread(paces)} of --hosts; first round {spread(firsts)} s after that of --local")
    print(f"{options.engine}: an empty program takes {spread(empty)} s")
    return 0


def train(rig: Rig, folder: Path, rounds: int, options: Sequence[str] = ("-p", "pace=0")) -> tuple[float, float]:
    """Train with these options. Return the seconds until the first round, and the median seconds of the later rounds."""
    run = Run(rig, folder, [*options, "--master-epochs", str(rounds)])
    try:
        run.wait_for("Result", within_s=BEGIN_S)
        run.process.wait(BEGIN_S)
    finally:
        rig.clean(run)
    at = [event["at"] for event in run.of("Committed")]
    gaps = [after - before for before, after in zip(at[FIRST:], at[FIRST + 1 :], strict=False)]
    return at[0] - run.began, statistics.median(gaps)


def time_empty(rig: Rig, folder: Path) -> float:
    """Return the seconds that the engine needs for an empty program at all places."""
    words = rig.empty()
    if not words:
        return 0.0
    start = time.monotonic()
    subprocess.run(words, check=True, env=rig.environment(), cwd=folder, stdin=subprocess.DEVNULL, capture_output=True)
    return time.monotonic() - start


def spread(values: Sequence[float]) -> str:
    """Return the median, the smallest and the largest value as text."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    sys.exit(main())
