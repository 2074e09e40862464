"""Train one app with each way to get workers, and compare the bits.

    python -m tests.trials.engines.ways [WAY...] [--rounds 6] [--places 2]

A WAY is a name in ``rig.RIGS``. Without a WAY, the trial uses all of them. The app is a small CNN with dropout, momentum and
four slots. The trial prints a table: the SHA-256 of the weights and of the optimizers' states, and whether the ledger is
exact. Like in the tests, a variable can name a Python with the packages of an engine: DDLF_RAY_PYTHON=/path/to/python. A
missing engine counts as a difference. The exit code is 1 if any way differs.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence

from tests.engines.needs import NEEDS, PATH
from tests.trials.engines.rig import RIGS, ROOT

ENGINES = {"k8s": "kubernetes", "mpich": "mpi", **{f"slurm-{way}": "slurm" for way in ("array", "steps", "tasks")}}
"""Names in ``NEEDS`` that differ from the name of the rig."""
NONE = "nothing".ljust(16)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and return the number of ways that differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", choices=[*RIGS, []], metavar="WAY")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--places", type=int, default=2)
    options = parser.parse_args(argv)
    first, wrong = "", 0
    for way in options.ways or RIGS:
        sha, problem = train(way, options.rounds, options.places)
        first = first or sha
        is_same = bool(sha) and sha == first and not problem
        wrong += not is_same
        print(f"{way:<12} {sha or NONE}  {'exact, the same' if is_same else problem or 'other bits'}", flush=True)
    return wrong


def train(way: str, rounds: int, places: int) -> tuple[str, str]:
    """Train in one way. Return the SHA-256 and the problem; both may be empty."""
    needs = NEEDS.get(ENGINES.get(way, way))
    if needs is not None and (missing := needs.missing()):
        return "", missing
    nothing = ("--losses", "0", "--notices", "0", "--ends", "0")
    words = [way, "--alone", "--rounds", str(rounds), "--places", str(places), *nothing]
    done = subprocess.run(
        [needs.python if needs else sys.executable, "-m", "tests.trials.engines", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PATH": PATH},
        capture_output=True,
        text=True,
        check=False,
    )
    match = re.search(r"\bSHA-256 ([0-9a-f]+)", done.stdout)
    problem = "" if done.returncode == 0 else (done.stdout + done.stderr)[-2000:].strip()
    return match[1] if match else "", problem


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
