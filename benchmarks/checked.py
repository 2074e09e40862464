"""Count how often ``ddlf plan --check`` names a disturbance that began after the plan. Linux, root.

    python -m benchmarks.checked [--short] [--cases link,worker] [--repeats 10] [--rate 100mbit] [--slow 20mbit]

Three network namespaces are the machines of a master and two workers, with links of ``--rate``. An app with a dense model
of 2 MB is planned there. Its computing is made up: local training sleeps, and returns an update. Then each repeat trains
some rounds with one link of ``--slow``, or with one worker that needs three times as long. The kept measurements are the
same in each repeat. Then three such runs refine the measurements, and a fourth one is predicted from them. Bars: the
cause and its worker are named in 10 of 10, and the prediction after three runs is within 20 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.distbelief import PORT, started, workers_of
from benchmarks.measure import some_of, table
from benchmarks.network import Network
from ddlf import Cluster, IApp
from ddlf.events import Event
from ddlf.extras.planner import planning
from ddlf.extras.planner.explain import explain
from ddlf.extras.planner.measurement_files import read, write
from ddlf.extras.planner.planning import plan
from ddlf.extras.planner.probe import Budget
from ddlf.rpc.tokens import new_token

CAUSES = {"link": "link", "worker": "straggler"}
DISTURBED = 2
"""Number of the disturbed worker."""
SAMPLES, WIDTH, SAMPLE_S, SLOWER, ROUNDS = 4_000, 700, 2e-4, 3.0, 7
LEARNT = 3
"""Runs that refine the measurements before the last one."""
SHORT = 4
"""Measurements of the short form after the first one, however long they take: two of all workers, and two of one slot."""


class Paced(IApp):
    """An app whose local training sleeps."""

    verbose, batch_size = False, 50
    _slower = 1.0
    """How many times as long one worker needs. The underscore keeps this from being a parameter, which would need its own plan."""

    async def load_dataset(self) -> None:
        """Make random samples."""
        chance = np.random.default_rng(1)
        self.x_train = chance.normal(size=(SAMPLES, WIDTH)).astype("float32")
        self.y_train = chance.integers(0, 10, SAMPLES)

    async def create_model(self) -> None:
        """Make a model of 2 MB."""
        import keras

        self.model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(WIDTH), keras.layers.Dense(10)])
        self.model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    def train(self, weights: Any, worker_epochs: int, batch_size: int) -> Any:
        """Sleep as long as training takes, and return an update."""
        factor = self._slower if self.worker.id == DISTURBED else 1.0
        time.sleep(len(self.indices) * worker_epochs * SAMPLE_S * factor)
        return [0.001 * array for array in weights]


async def master(facts: dict[str, Any]) -> None:
    """Plan, then train with a disturbance for each line of standard input, and print the explanation.

    A line has the factor of the slower worker, and whether runs before refine the measurements.
    """
    lines = iter(sys.stdin.readline, "")
    async with Cluster(facts["hosts"], PORT, insecure_plaintext=True, connect_timeout_s=60) as cluster:
        app = Paced(cluster)
        if facts["short"]:
            room = iter((True,) * SHORT)
            Budget.has_room = lambda budget, needed: next(room, False)  # type: ignore[method-assign]
            planning.LEAST_S = math.inf  # no memory
        result = await plan(app, facts["budget"], say=lambda text: print(text, file=sys.stderr, flush=True))
        cached = read(app)
        assert cached is not None
        print(json.dumps({"round": result.now.epoch.seconds}), flush=True)
        for line in lines:
            slower, refined = json.loads(line)
            if not refined:
                write(app, cached)
            run, events = Paced(cluster), list[tuple[float, Event]]()
            run._slower, run.master_epochs = slower, ROUNDS
            run.subscribe(lambda event, events=events: events.append((time.time(), event)))
            await run.train_model(fresh=True)
            explained = explain(events)
            assert explained is not None
            print(json.dumps({**asdict(explained), "lines": explained.lines}), flush=True)


def main(argv: Sequence[str] | None = None) -> dict[str, int]:
    """Run the command; return how often each cause was named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--master", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--cases", type=some_of(CAUSES), default=list(CAUSES))
    parser.add_argument("--short", action="store_true", help="one repeat after few measurements, without refined ones")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--slow", default="20mbit")
    parser.add_argument("--budget", type=float, default=29.0)
    options = parser.parse_args(argv)
    if options.master is not None:
        asyncio.run(master(options.master))
        return {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # not without taking the machines away
    token, named = new_token(), dict.fromkeys(options.cases, 0)
    rows = [["case", "repeat", "cause", "worker", "said"]]
    with (
        tempfile.TemporaryDirectory() as folder,
        Network(3, options.rate) as network,
        workers_of(network, token, tls=False, folder=Path(folder)),
    ):
        facts = {"hosts": network.addresses[1:], "budget": options.budget, "short": options.short}
        if options.short:
            facts["budget"] = 600.0  # the number of measurements limits it, also on a slow machine
            options.repeats = 1
        command = (sys.executable, "-m", "benchmarks.checked", "--master", json.dumps(facts))
        with started([network.on(0, *command)], more={"DDLF_TOKEN": token, "XDG_STATE_HOME": folder}) as (child,):

            def trained(case: str, *, refined: bool) -> dict[str, Any]:
                network.limit(DISTURBED, options.slow if case == "link" else options.rate)
                print(json.dumps([SLOWER if case == "worker" else 1.0, refined]), file=child.stdin, flush=True)
                result: dict[str, Any] = json.loads(child.stdout.readline())
                print(case, result["lines"], file=sys.stderr, flush=True)
                return result

            print("planned", child.stdout.readline(), file=sys.stderr, flush=True)
            for repeat in range(options.repeats):
                for case in options.cases:
                    result = trained(case, refined=False)
                    named[case] += (result["cause"], result["worker"]) == (CAUSES[case], DISTURBED)
                    sentences = "; ".join(result["lines"][:2])
                    rows.append([case, f"{repeat + 1}", result["cause"], f"{result['worker']}", sentences])
            errors = {}
            for case in [] if options.short else options.cases:
                runs = [trained(case, refined=number > 0) for number in range(LEARNT + 1)]
                errors[case] = runs[-1]["predicted"] / runs[-1]["measured"] - 1.0
    print(table(rows))
    print("\n" + "; ".join(f"{case}: named in {count} of {options.repeats}" for case, count in named.items()))
    for case, error in errors.items():
        print(f"{case}: error after {LEARNT} runs {error:+.0%}")
    return named


if __name__ == "__main__":
    main()
