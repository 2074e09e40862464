"""Compare rounds of 2 to 16 workers with predictions from two workers. Linux, root.

    python -m benchmarks.many_workers [--cases 6] [--seed 1] [--repeats 3] [--workers 2,4,8,16]

Each machine, and also the master's, is a network namespace with its own limited link (``benchmarks.network``). Workers are
real daemons and executors, and the master runs a real training, so all bytes travel, and are encoded and merged. Only the
computation is made up: it takes time, but no processor (``benchmarks.elgato_links``).

A case is a model size, a codec, the rate of all links, and the seconds that one worker computes in a round. N workers
share the samples of a round, so each computes for an Nth of these seconds, but the exchange takes longer. So some number of
workers is the best. The cases are drawn before the first measurement, and all are printed. The planner's model of time gets
short and long rounds of one and two workers. Then all numbers of workers train some rounds, in turns; the truth is the
median of the repeats. Bars: the mean error of the predictions is 15 %, and the number of workers with the shortest
prediction takes at most 5 % longer than the best number. A case takes about 35 s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.distbelief import PORT, rate_of, started, workers_of
from benchmarks.elgato_links import BATCH, SlowRun
from benchmarks.measure import table, turns
from benchmarks.network import Network
from ddlf import Cluster
from ddlf.extras.planner import probe as probing
from ddlf.extras.planner.model import Measured, Setting, TimeModel, Way
from ddlf.extras.planner.probe import FIRST_ROUNDS, LONG_ROUND_S, MOST_ROUNDS, SHORT_STEPS, Rounds
from ddlf.rpc.tokens import new_token

PROBED = (1, 2)
STEPS = 192
"""Steps of all workers in a round."""
PARAMETERS = (40_000, 80_000, 160_000, 640_000)
RATES = ("20mbit", "100mbit", "1gbit")
SECONDS = (0.3, 1.0, 3.0)
LONGEST_S = 1.3
"""Maximum seconds that the bytes of a round need with the most workers. This keeps a case short."""
LEAST_ROUNDS, MEASURE_S = 3, 0.6
"""Rounds of a measurement, and their seconds."""
WITHIN, SLOWER = 0.15, 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A training to predict and to measure.

    Args:
        parameters: Values of the model.
        codec: The codec of updates.
        rate: The rate of each link.
        seconds: Seconds that one worker computes in a round.
    """

    parameters: int
    codec: str
    rate: str
    seconds: float

    def setting(self, workers: int, steps: float | None = None) -> Setting:
        """Return the setting of so many workers, which share the steps of a round, or have so many steps each."""
        way = Way("sync", "star", self.codec)
        return Setting(way=way, slots=workers, batch=BATCH, steps=STEPS / workers if steps is None else steps)

    def probes(self) -> list[Setting]:
        """Return the settings that are measured for the predictions."""
        long = max(4 * SHORT_STEPS, round(LONG_ROUND_S / self.step_s))
        return [self.setting(workers, steps) for workers in PROBED for steps in (long, SHORT_STEPS)]

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.seconds / STEPS


def drawn(count: int, seed: int, most: int = 16) -> list[Case]:
    """Return different cases, drawn by a seed.

    Args:
        count: How many.
        seed: The seed.
        most: The most workers.
    """
    chance, cases = random.Random(seed), list[Case]()
    while len(cases) < count:
        candidate = Case(
            parameters=chance.choice(PARAMETERS),
            codec=chance.choice(("float32", "int8")),
            rate=chance.choice(RATES),
            seconds=chance.choice(SECONDS),
        )
        if candidate not in cases and 2 * 4 * candidate.parameters * most / rate_of(candidate.rate) <= LONGEST_S:
            cases.append(candidate)
    return cases


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Predictions and measurements of a case, by the number of workers.

    Args:
        case: The case.
        predicted: Predicted seconds of a round.
        measured: Measured seconds of a round.
    """

    case: Case
    predicted: dict[int, float]
    measured: dict[int, float]

    @property
    def errors(self) -> dict[int, float]:
        """Return the relative errors of predictions for more workers than the probe had."""
        return {n: self.predicted[n] / seconds - 1.0 for n, seconds in self.measured.items() if n > max(PROBED)}

    @property
    def best(self) -> int:
        """The fastest number of workers."""
        return min(self.measured, key=self.measured.__getitem__)

    @property
    def chosen(self) -> int:
        """The number of workers with the shortest prediction."""
        return min(self.predicted, key=self.predicted.__getitem__)

    @property
    def slower(self) -> float:
        """Return the ratio of the times of a round: with the chosen number of workers over the best number."""
        return self.measured[self.chosen] / self.measured[self.best]

    def cells(self) -> list[str]:
        """Return the cells of a table."""
        case = self.case
        cells = [f"{case.parameters:,}", case.codec, case.rate, f"{case.seconds:g}"]
        for workers, seconds in self.measured.items():
            error = f" ({self.errors[workers]:+.0%})" if workers in self.errors else ""
            cells.append(f"{1e3 * seconds:.0f}{error}")
        return [*cells, str(self.chosen), str(self.best), f"{self.slower:.2f}"]


def outcome_of(case: Case, probed: Sequence[Measured], rounds: Sequence[Measured]) -> Outcome:
    """Return the outcome of a case.

    Args:
        case: The case.
        probed: The rounds for the predictions.
        rounds: The rounds of each number of workers, in each repeat.
    """
    model, seconds = TimeModel(probed), dict[int, list[float]]()
    for measured in rounds:
        seconds.setdefault(measured.setting.slots, []).append(measured.median)
    return Outcome(
        case=case,
        predicted={workers: model.predict(case.setting(workers)).seconds for workers in seconds},
        measured={workers: statistics.median(all) for workers, all in seconds.items()},
    )


def bars(outcomes: Sequence[Outcome]) -> list[tuple[str, bool]]:
    """Return what the predictions must show, and whether these outcomes show it."""
    errors = [abs(error) for outcome in outcomes for error in outcome.errors.values()]
    mean, close = statistics.fmean(errors), sum(error <= WITHIN for error in errors)
    slowest = max(outcome.slower for outcome in outcomes)
    return [
        (
            f"mean error {mean:.0%}; {close} of {len(errors)} within 15 %, the largest is {max(errors):.0%}",
            mean <= WITHIN,
        ),
        (f"the chosen number of workers takes at most {slowest:.2f} times as long as the best one", slowest <= SLOWER),
    ]


# -- on the master's machine ----------------------------------------------------------------------------------------------


async def rounds_of(cluster: Cluster, case: Case, setting: Setting) -> Measured:
    """Return measured rounds of a setting."""
    some = cluster.options(workers=list(range(1, setting.slots + 1)))
    how: dict[str, Any] = {"batch_size": BATCH, "worker_steps": round(setting.steps), "codec": case.codec}
    run = SlowRun(some, case.parameters, master_epochs=1, **how)
    run.samples, run.seconds = round(setting.samples) * (FIRST_ROUNDS + MOST_ROUNDS), case.step_s
    heard = Rounds(setting, run.stop_training)
    run.subscribe(heard.hear)
    await run.train_model()
    measured = heard.result()
    assert measured is not None
    return measured


async def master(facts: dict[str, Any]) -> None:
    """For each case of standard input, measure, and print the outcome."""
    usual = probing.LEAST_ROUNDS, probing.MEASURE_S
    async with Cluster(facts["hosts"], PORT, insecure_plaintext=True, connect_timeout_s=60) as cluster:
        for line in iter(sys.stdin.readline, ""):
            case = Case(**json.loads(line))
            probing.LEAST_ROUNDS, probing.MEASURE_S = usual
            probed = [await rounds_of(cluster, case, setting) for setting in case.probes()]
            probing.LEAST_ROUNDS, probing.MEASURE_S = LEAST_ROUNDS, MEASURE_S
            rounds = []
            for _, workers in turns([str(count) for count in facts["workers"]], facts["repeats"]):
                rounds.append(await rounds_of(cluster, case, case.setting(int(workers))))
            outcome = outcome_of(case, probed, rounds)
            print(
                json.dumps([[count, outcome.predicted[count], outcome.measured[count]] for count in facts["workers"]]),
                flush=True,
            )


def main(argv: Sequence[str] | None = None) -> list[Outcome]:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=lambda text: [int(count) for count in text.split(",")], default=[2, 4, 8, 16])
    parser.add_argument("--master", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.master is not None:
        asyncio.run(master(options.master))
        return []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # not without taking the machines away
    cases, workers = drawn(options.cases, options.seed), sorted({1, *options.workers})
    head, outcomes = ["parameters", "codec", "link", "computing (s)"], list[Outcome]()
    print(
        table([head, *([f"{case.parameters:,}", case.codec, case.rate, f"{case.seconds:g}"] for case in cases)]),
        flush=True,
    )
    token = new_token()
    with (
        tempfile.TemporaryDirectory() as folder,
        Network(max(workers) + 1, RATES[-1]) as network,
        workers_of(network, token, tls=False, folder=Path(folder)),
    ):
        facts = {"hosts": network.addresses[1:], "workers": workers, "repeats": options.repeats}
        command = network.on(0, sys.executable, "-m", "benchmarks.many_workers", "--master", json.dumps(facts))
        with started([command], more={"DDLF_TOKEN": token}) as (child,):
            for case in cases:
                for number in range(max(workers) + 1):
                    network.limit(number, case.rate)
                print(json.dumps(asdict(case)), file=child.stdin, flush=True)
                rows = json.loads(child.stdout.readline())
                predicted, measured = ({row[0]: row[column] for row in rows} for column in (1, 2))
                outcomes.append(Outcome(case=case, predicted=predicted, measured=measured))
                print(" ".join(outcomes[-1].cells()), file=sys.stderr, flush=True)
    counts = [f"{count} (ms)" for count in workers]
    print("\n" + table([[*head, *counts, "chosen", "best", "times best"], *(outcome.cells() for outcome in outcomes)]))
    for text, holds in bars(outcomes):
        print(f"{'holds' if holds else 'DOES NOT HOLD'}: {text}")
    return outcomes


if __name__ == "__main__":
    main()
