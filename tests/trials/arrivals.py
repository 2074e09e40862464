"""Let workers join their master in random orders, and compare the bits of the runs.

    python -m tests.trials.arrivals [--orders 30] [--most 4] [--rounds 4] [--seed 0]

Each run trains a CNN with dropout, BatchNorm and Adam on scikit-learn's digits, with four slots. These are the runs:

- In ``--orders`` runs, 2 to ``--most`` workers start in a random order, with random pauses.
- 1, 2, 3, 4 and 6 workers run with one core each, and with two cores each.
- A run for 2 to 4 workers begins with two workers. Another one joins in round 3.

All runs must end with the same SHA-256 of weights and optimizers, and with an exact ledger. The number of each worker must
be its place + 1. The exit code is 1 otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddlf import Cluster
from ddlf.cluster.launch.gate import Joined
from ddlf.rpc.tokens import new_token
from ddlf.worker.machine import CORES_VARIABLE
from tests.templates import Standing
from tests.trials.disturbed import App, digest
from tests.trials.options import read_options

SLOTS = 4
COUNTS = (1, 2, 3, 4, 6)
CORES = (1, 2)
LATEST_S = 1.0
"""The longest pause before a worker starts."""
LATE_ROUND = 3
START_S = 300.0


class Trained(App):
    """An app with four slots for any number of workers, and one thread for any number of cores."""

    slots, threads, batch_size = SLOTS, 1, 128


@dataclass(frozen=True, slots=True)
class Arrival:
    """The arrival of a worker.

    Args:
        place: The place of the worker.
        after_s: Seconds until it starts.
        cores: Number of cores that it may use; None for all.
    """

    place: int
    after_s: float = 0.0
    cores: int | None = None


class Workers:
    """Processes of ``ddlf-worker`` that join a gate.

    Args:
        token_file: The file with their token.
        port: The port of the gate.
        template: The template process that forks their executors.
    """

    def __init__(self, token_file: Path, port: int, template: Standing) -> None:
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        options = ("--join", f"127.0.0.1:{port}", "--token-file", str(token_file), "--quiet", "--join-for", "60")
        self._command = (sys.executable, "-m", "ddlf.cli.worker", *options)
        self._template = template

    def start(self, arrival: Arrival) -> None:
        """Start a worker."""
        fd = self._template.fileno()
        cores_variable = {} if arrival.cores is None else {CORES_VARIABLE: str(arrival.cores)}
        self.processes[arrival.place] = subprocess.Popen(
            [*self._command, "--place", str(arrival.place), f"--template-fd={fd}"],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(fd,),
            env={**os.environ, **cores_variable},
        )

    async def come(self, arrivals: Sequence[Arrival]) -> None:
        """Start workers, each after its pause."""
        begin = time.monotonic()
        for arrival in sorted(arrivals, key=lambda item: item.after_s):
            await asyncio.sleep(max(0.0, begin + arrival.after_s - time.monotonic()))
            self.start(arrival)

    def end(self) -> None:
        """End all workers."""
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.wait()


async def train(
    arrivals: Sequence[Arrival], places: int, rounds: int, template: Standing, late: Arrival | None = None
) -> tuple[str, list[str]]:
    """Train with these arrivals of workers. Return the SHA-256 and the problems.

    Args:
        arrivals: The arrivals of the first workers of the run.
        places: Number of places.
        rounds: Number of rounds.
        template: The template process that forks executors.
        late: A worker that joins in round ``LATE_ROUND``.
    """
    problems = []

    with tempfile.TemporaryDirectory(prefix="ddlf-arrivals-") as folder:
        token_file = Path(folder) / "token"
        token_file.write_text(f"{new_token()}\n")
        token_file.chmod(0o600)
        least = None if len(arrivals) == places else len(arrivals)
        launcher = Joined(places, "127.0.0.1", 0, least=least, token_file=token_file, start_timeout_s=START_S)
        workers = Workers(token_file, launcher.open().port, template)
        coming = asyncio.ensure_future(workers.come(arrivals))
        try:
            async with Cluster(launcher) as cluster:
                await coming
                app = Trained(cluster)

                async def on_round(record: Any) -> None:
                    if late is not None and record.round == LATE_ROUND - 1:
                        workers.start(late)
                        problems.extend(await _until_joined(cluster, late))

                app.on_round = on_round  # type: ignore[method-assign]
                await app.train_sync(master_epochs=rounds)
                problems += await _wrong_numbers(cluster, workers)
                if not app.ledger.is_exact(rounds):
                    problems.append("the ledger is not exact")
                return digest(app), problems
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
            workers.end()


async def _until_joined(cluster: Cluster, late: Arrival) -> list[str]:
    """Wait until a worker has joined the run. Return the problems."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(START_S):
            while all(worker.id != late.place + 1 for worker in cluster.workers):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            return []
    return ["the late worker has not joined"]


async def _wrong_numbers(cluster: Cluster, workers: Workers) -> list[str]:
    """Return a sentence for each worker whose number is not its place + 1."""
    place_by_pid = {process.pid: place for place, process in workers.processes.items()}
    statuses = {worker.id: await worker.status() for worker in cluster.workers}
    return [
        f"worker {number} is at place {place_by_pid.get(about.pid)}"
        for number, about in statuses.items()
        if place_by_pid.get(about.pid) != number - 1
    ]


def orders(count: int, most: int, chance: random.Random) -> Iterator[tuple[str, list[Arrival]]]:
    """Yield random orders of arrival, each with a name."""
    for number in range(1, count + 1):
        places = list(range(chance.randint(2, most)))
        chance.shuffle(places)
        arrivals = [Arrival(place, chance.uniform(0, LATEST_S)) for place in places]
        first_to_last = sorted(arrivals, key=lambda item: item.after_s)
        yield f"order {number}: places {' '.join(str(item.place) for item in first_to_last)}", arrivals


async def run(orders_: int, most: int, rounds: int, seed: int, counts: Sequence[int] = COUNTS) -> int:
    """Train all runs. Return the number of runs with a problem."""
    cases: list[tuple[str, list[Arrival], int, Arrival | None]] = [
        (name, arrivals, len(arrivals), None) for name, arrivals in orders(orders_, most, random.Random(seed))
    ]
    for cores in CORES:
        for count in counts:
            name = f"{count} worker{'s' * (count > 1)} with {cores} core{'s' * (cores > 1)} each"
            cases.append((name, [Arrival(place, cores=cores) for place in range(count)], count, None))
    cases.append(("2..4, one comes in round 3", [Arrival(1), Arrival(3)], SLOTS, Arrival(2)))
    template = Standing.of_keras()
    expected, wrong = "", 0
    try:
        for name, arrivals, places, late in cases:
            begin = time.monotonic()
            sha, problems = await train(arrivals, places, rounds, template, late)
            expected = expected or sha
            if sha != expected:
                problems.append(f"other bits: {sha[:16]} instead of {expected[:16]}")
            wrong += bool(problems)
            print(
                f"{name}: {sha[:16]}, {time.monotonic() - begin:.1f} s" + "".join(f"; {p}" for p in problems),
                flush=True,
            )
    finally:
        template.end()
    print(f"{len(cases) - wrong} of {len(cases)} runs with the same bits, numbers and an exact ledger", flush=True)
    return wrong


def main() -> int:
    """Read the command line and run the trial. Return the exit code."""
    options = read_options(__doc__, orders=30, most=4, rounds=4, seed=0)
    return int(asyncio.run(run(options.orders, options.most, options.rounds, options.seed)) > 0)


if __name__ == "__main__":
    sys.exit(main())
