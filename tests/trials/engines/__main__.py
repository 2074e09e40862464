"""Lose workers, warn them, and end runs at random moments on a real engine, and check the results.

    python -m tests.trials.engines ENGINE [--losses 10] [--notices 20] [--ends 20] [--rounds 20] [--places 3] [--gone]
        [--stuck] [--seed 0] [--light] [--alone]

ENGINE is a name in ``rig.RIGS``. The trial starts the engine on this machine, and ends it afterwards. A small CNN with
dropout and momentum trains with four slots. These statements must be true:

- An undisturbed run ends with the same SHA-256 of weights and optimizers as with ``--local 2``, and it trains on each
  sample once in each epoch. ``--rounds`` is its length.
- ``--losses``: executors, daemons, their supervisors and nodes are lost at random moments of one run. The event of each
  loss has the engine's reason. The place works again within the engine's own time, the time that a worker needs to
  start, and 3 s. The bits are the same.
- ``--notices``: workers get a warning 10 s before their end, in the way of the engine. They hand their work back: no slot
  is computed twice, no round is repeated, and the bits are the same.
- ``--ends``: Ctrl-C, SIGTERM, ``kill -9`` of the master, and the engine's own command end runs at random moments of
  their start and training. After 35 s no process, job, actor, Secret, token file or forward remains.
- ``--gone``: the engine's head, such as a scheduler or an API server, is killed during a run. The training continues with
  the same bits, and the master reports the loss. If the workers end with the head, the run ends within 120 s.
- ``--stuck``: the engine cannot start the run now, or never. After 5 s, the run prints the reason in the engine's words. It
  ends with exit code 3, at its ``start_timeout`` or before.

With ``--alone``, the trial does not compare bits with ``--local 2``. With ``--light``, losses and ends disturb an app that
calls its workers instead of training. Its workers start fast because they do not need Keras, so a slow machine can do more
losses and ends.

The trial prints each problem as a sentence. The exit code is 1 if it has found a problem.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.trials.engines import series
from tests.trials.engines.gone import lose_head
from tests.trials.engines.rig import APP, CALLS, RIGS, load
from tests.trials.engines.series import Report
from tests.trials.engines.stuck import stuck


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chosen series on one engine, and return the number of problems."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=RIGS)
    for name, count in {"losses": 10, "notices": 20, "ends": 20, "rounds": 20, "places": 3, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument("--gone", action="store_true")
    parser.add_argument("--stuck", action="store_true")
    parser.add_argument("--light", action="store_true")
    parser.add_argument("--alone", action="store_true")
    options = parser.parse_args(argv)
    chance, start, reports = random.Random(options.seed), time.monotonic(), dict[str, Report]()

    def say(text: str) -> None:
        print(f"  {time.monotonic() - start:6.0f} s  {text}", flush=True)

    with tempfile.TemporaryDirectory(prefix="ddlf-series-") as name:
        folder, runs = Path(name) / "engine", Path(name) / "runs"
        Path(name).chmod(0o755)
        for path in (folder, runs):
            path.mkdir()
        rig = load(options.engine, folder)
        rig.places = options.places
        with rig:
            if options.rounds:
                reports["same"] = series.same(rig, runs, options.rounds, say, not options.alone)
                print(f"{options.engine} same: {reports['same'].line()}", flush=True)
            if options.gone:
                reports["gone"] = lose_head(rig, runs, say)
                print(f"{options.engine} gone: {reports['gone'].line()}", flush=True)
            if options.stuck:
                rig.app = CALLS
                reports["stuck"] = stuck(rig, runs, say)
                print(f"{options.engine} stuck: {reports['stuck'].line()}", flush=True)
            for kind in ("losses", "notices", "ends"):
                if count := getattr(options, kind):
                    rig.app = CALLS if options.light and kind != "notices" else APP
                    reports[kind] = getattr(series, kind)(rig, runs, count, chance, say)
                    print(f"{options.engine} {kind}: {reports[kind].line()}", flush=True)
    problems = [problem for report in reports.values() for problem in report.problems]
    print("\n".join(problems) or f"{options.engine}: no problem", flush=True)
    return len(problems)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
