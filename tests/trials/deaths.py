"""Kill a worker at a random moment of a run, and check that the run ends with the same bits.

    python -m tests.trials.deaths [--how in-process] [--runs 100] [--seed 0]     executors that are objects of this process
    python -m tests.trials.deaths --how local [--runs 100]                       processes of ``Cluster.local``
    python -m tests.trials.deaths --how command [--runs 100]                     ``ddlf-worker``, restarted when its daemon has died

At that moment the worker may be connecting, loading, building or training, or the master may be evaluating. Each run
trains a CNN with dropout, BatchNorm and Adam on scikit-learn's digits, on three workers. ``kill -9`` ends one executor
or daemon. The moment is drawn from the length of an undisturbed run. Every fifth run begins with new workers, so that
some kills also hit starting and connecting workers. The other runs use the workers of the run before. The exit code is
1 if a run does not end, if the bits of weights or optimizers differ, or if a sample was not trained on exactly once in
each epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import psutil

from ddlf import Cluster
from ddlf.testing import in_process_cluster
from ddlf.testing.cluster import FaultyCluster
from tests.trials.disturbed import App, digest
from tests.trials.options import read_options
from tests.trials.workers import Workers

WORKERS = 3
ROUNDS = 4
FRESH_EVERY = 5
HANG_S = 300.0
RESTART_S = 0.5
"""Seconds until a supervisor restarts a daemon."""

Kill = Callable[[random.Random], Awaitable[str]]
"""A function that kills a process. It returns the kind of process, or an empty text if it found no process."""


@dataclass
class Outcome:
    """The results of all runs.

    Args:
        killed: Number of kills by kind of process and phase of the run.
        problems: The problems, as sentences.
        ended: Number of ended runs, with or without problems.
    """

    killed: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    ended: int = 0


class Trained(App):
    """An app that knows the phase of its run, with a slot for each worker."""

    evaluate_every = 1

    def __init__(self, cluster: Cluster, workers: int, rounds: int) -> None:
        super().__init__(cluster)
        self.phase, self.slots, self.rounds = "connecting", workers, rounds

    async def load_dataset(self) -> None:
        """Load the data, and set the phase."""
        self.phase = "loading"
        await super().load_dataset()

    async def create_model(self) -> None:
        """Build the model, and set the phase."""
        self.phase = "building"
        await super().create_model()

    def on_event(self, event: Any) -> None:
        """Set the phase when a round begins."""
        self.phase = f"round {event.round}" if event.kind == "start" else self.phase

    async def run(self) -> Trained:
        """Connect, prepare, train and evaluate."""
        await self.train_sync(master_epochs=self.rounds, batch_size=128)
        self.phase = "evaluating"
        await self.evaluate_model()
        return self


async def turns(task: asyncio.Future[Any]) -> int:
    """Return the number of turns of the event loop until a task is done."""
    count = 0
    while not task.done():
        await asyncio.sleep(0)
        count += 1
    return count


async def deaths_in_process(runs: int, seed: int, workers: int = WORKERS, rounds: int = ROUNDS) -> Outcome:
    """Kill executors of this process at random turns of the event loop, which do not depend on a clock."""
    chance, outcome = random.Random(seed), Outcome()
    cluster: FaultyCluster = in_process_cluster(workers)
    length = {}
    for fresh in (True, False):
        running = asyncio.ensure_future(Trained(cluster, workers, rounds).run())
        length[fresh] = await turns(running)
        expected = digest(await running)
    for number in range(runs):
        fresh = number % FRESH_EVERY == 0
        if fresh:
            await cluster.close()
        app = Trained(cluster, workers, rounds)
        running = asyncio.ensure_future(app.run())
        for _ in range(chance.randrange(length[fresh])):
            await asyncio.sleep(0)
        if not running.done() and len(cluster.machines) == workers and chance.choice(cluster.machines).kill():
            outcome.killed[f"executor while {app.phase}"] += 1
        await check(running, app, expected, outcome)
    await cluster.close()
    return outcome


async def deaths_of_processes(runs: int, seed: int, how: str, workers: int = WORKERS, rounds: int = ROUNDS) -> Outcome:
    """Kill processes of this machine after random times."""
    chance, outcome = random.Random(seed), Outcome()
    length: dict[bool, float] = {}
    expected = ""
    async with contextlib.AsyncExitStack() as stack:
        cluster, supervisor = await new_cluster(how, workers, stack)
        for number in range(-2, runs):
            if number == -1 and runs == 1:
                continue  # a single run uses new workers only, so it needs no length of a run on used ones
            fresh = number % FRESH_EVERY == 0 or number == -2
            if fresh and number >= 0:
                await stack.aclose()
                cluster, supervisor = await new_cluster(how, workers, stack)
            app = Trained(cluster, workers, rounds)
            begin = time.monotonic()
            running = asyncio.ensure_future(app.run())
            if number >= 0:
                await asyncio.wait([running], timeout=chance.uniform(0, length[fresh]))
                kind = kill_one(chance)
                if kind and not running.done():
                    outcome.killed[f"{kind} while {app.phase}"] += 1
                if supervisor is not None:
                    await supervisor()
                await check(running, app, expected, outcome)
            else:
                await running
                length[fresh], expected = time.monotonic() - begin, digest(app)
    return outcome


def kill_one(chance: random.Random) -> str:
    """Kill a random daemon or executor below this process. Return the kind, or an empty text if none runs yet."""
    processes = {"daemon": [], "executor": []}  # type: dict[str, list[psutil.Process]]
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            words = " ".join([process.name(), *process.cmdline()])
            if "ddlf-exec" in words or "ddlf.worker.executor" in words:
                processes["executor"].append(process)
            elif "ddlf.cli.worker" in words:
                processes["daemon"].append(process)
    kind = chance.choice(sorted(processes))
    if not processes[kind]:
        return ""
    with contextlib.suppress(psutil.Error):
        chance.choice(processes[kind]).kill()
    return kind


async def new_cluster(
    how: str, count: int, stack: contextlib.AsyncExitStack
) -> tuple[Cluster, Callable[[], Awaitable[None]] | None]:
    """Return a cluster with new workers, and a function that restarts dead daemons; None if the cluster restarts them."""
    if how == "local":
        cluster = Cluster.local(count)
        stack.push_async_callback(cluster.close)
        return cluster, None
    workers = stack.enter_context(Workers())
    started = [workers.start() for _ in range(count)]

    async def restart() -> None:
        await asyncio.sleep(RESTART_S)
        for index, (process, port) in enumerate(started):
            if process.poll() is not None:
                started[index] = await asyncio.to_thread(workers.start, port=port)

    ports = [port for _, port in started]
    cluster = Cluster(
        ["127.0.0.1"] * count, ports, token_file=workers.token_file, connect_timeout_s=30, min_workers=count - 1
    )
    stack.push_async_callback(cluster.close)
    return cluster, restart


async def check(running: asyncio.Future[Any], app: Trained, expected: str, outcome: Outcome) -> None:
    """Wait for the end of a run, and note its problems."""
    try:
        async with asyncio.timeout(HANG_S):
            await running
    except TimeoutError:
        outcome.problems.append(f"did not end within {HANG_S:g} s")
    except Exception as error:
        outcome.problems.append(f"ended with {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    else:
        if digest(app) != expected:
            outcome.problems.append(f"other bits: {digest(app)[:16]} instead of {expected[:16]}")
        if not app.ledger.is_exact(app.rounds):
            outcome.problems.append("a sample was not trained on once an epoch")
    outcome.ended += 1
    print(f"\r{outcome.ended} runs ended", end="", file=sys.stderr, flush=True)


def main() -> int:
    """Run the trial and print its results. Return the exit code."""
    options = read_options(__doc__, how=("in-process", "local", "command"), runs=100, seed=0)
    begin = time.monotonic()
    if options.how == "in-process":
        outcome = asyncio.run(deaths_in_process(options.runs, options.seed))
    else:
        outcome = asyncio.run(deaths_of_processes(options.runs, options.seed, options.how))
    print(
        f"{options.how}: {options.runs} runs, {outcome.killed.total()} workers killed, {time.monotonic() - begin:.0f} s"
    )
    for kind, count in sorted(outcome.killed.items()):
        print(f"  {count:>4} {kind}")
    print("\n".join(outcome.problems) or "all runs ended with the same bits, every sample once an epoch")
    return bool(outcome.problems)


if __name__ == "__main__":
    sys.exit(main())
