"""Measure whether replicas of Downpour SGD compute while gradients and weights travel. Linux, root.

    python -m benchmarks.overlap

Each machine is a network namespace with a limited link (``benchmarks.network``). Workers are real daemons and
executors. Servers, fetches and pushes are real, with one fetch and one push for each step. Only the computation is
replaced: it takes time but no processor. There are three trainings::

    transfer     no replica computes; the time of a cycle is the time of its transfers
    both         each replica computes for as long as the transfers of ``transfer`` take
    one slow     like ``both``, but one replica computes three times as long; the cycles of the others are measured
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.distbelief import started, workers_of
from benchmarks.measure import table
from benchmarks.network import Network
from benchmarks.stand_in import PushingStandIn, StandInRun, nothing
from ddlf import Cluster
from ddlf.algorithms.push_rules import Cadence
from ddlf.rpc.tokens import new_token
from ddlf.training.slot.task import Task
from ddlf.training.strategies.downpour.client import ReplicaEntry, record, replicas_of
from ddlf.training.strategies.downpour.replica import batches_of, shares

SLOWER = 3
LEFT_OUT = 2
"""Cycles at the beginning and at the end that do not count, because not all replicas push then."""


class Paced(PushingStandIn):
    """Replicas without a model: each waits for the time of a step, and pushes the same update again.

    Args:
        worker: Its worker.
        run: Name of the run.
        sizes: Sizes of the model's tensors.
        seconds: Seconds of a step on each worker.
    """

    def __init__(self, worker: Any, run: str, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        super().__init__(worker, run, sizes)
        self._seconds = seconds[worker.id - 1]

    async def train(self, task: dict[str, Any]) -> dict[str, Any]:
        """See ``Replica``. The loss is the duration of a cycle, in seconds."""
        request = Task.from_message(task)
        steps = shares(batches_of(request), len(ReplicaEntry.from_message(request.weights).replicas))
        (replica,) = replicas = await replicas_of(self._servers.owners, request, steps, Cadence())
        ended = []
        while replica.done < replica.left:
            _, rest = await replica.take(None, 0.0)
            await asyncio.sleep(self._seconds)
            replica.done += 1
            await replica.push(self._gradient, rest)
            ended.append(time.monotonic())
        await replica.pushed()
        inner = ended[LEFT_OUT : len(ended) - LEFT_OUT]
        loss = {"loss": (inner[-1] - inner[0]) / (len(inner) - 1)}
        return nothing(request, metrics=loss, pushed=record(replicas)).to_message()


class PacedRun(StandInRun):
    """A run of these replicas."""

    seconds: Sequence[float]

    @property
    def stand_in(self) -> tuple[Any, ...]:
        """See ``StandInRun``."""
        from benchmarks.overlap import Paced  # by a name that workers know, too

        return Paced, self.sizes, self.seconds


async def cycles(cluster: Cluster, parameters: int, steps: int, seconds: Sequence[float]) -> list[float]:
    """Return the seconds of each replica's cycle, in the order of the workers."""
    run = PacedRun(
        cluster,
        parameters,
        mode="downpour",
        batch_size=1,
        master_epochs=1,
        warm_start=0,
        push_rule="sgd:rate=0.001",
        staleness="constant",
    )
    run.samples, run.seconds = steps * cluster.N, seconds
    records = await run.train_model()
    return [record.metrics["loss"] for record in sorted(records, key=lambda record: record.workers[0])]


async def train(facts: dict[str, Any]) -> None:
    """Run the master, and print the measurements."""
    async with Cluster(facts["hosts"], 9000, insecure_plaintext=True, connect_timeout_s=60) as cluster:
        parameters, steps = facts["parameters"], facts["steps"]
        for _ in range(facts["repeats"]):
            transfer = statistics.mean(await cycles(cluster, parameters, steps, [0.0] * cluster.N))
            both = statistics.mean(await cycles(cluster, parameters, steps, [transfer] * cluster.N))
            some = [transfer] * (cluster.N - 1)
            at_once_s = statistics.mean((await cycles(cluster, parameters, steps, [*some, SLOWER * transfer]))[:-1])
            print(json.dumps([transfer, both, at_once_s]), flush=True)


def main(argv: list[str] | None = None) -> list[list[float]]:
    """Run the benchmark. Return the seconds of a cycle in each training of each repeat."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=lambda text: int(float(text)), default=1_000_000, help="of the model")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rate", default="50mbit", help="of each link, in each direction (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=14, help="of each replica")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--master", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.master is not None:
        asyncio.run(train(options.master))
        return []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # not without taking the machines away
    token = new_token()
    with tempfile.TemporaryDirectory() as folder, Network(options.workers + 1, options.rate) as network:
        facts = {name: getattr(options, name) for name in ("parameters", "steps", "repeats")}
        facts["hosts"] = network.addresses[1:]
        command = network.on(0, sys.executable, "-m", "benchmarks.overlap", "--master", json.dumps(facts))
        with (
            workers_of(network, token, tls=False, folder=Path(folder)),
            started([command], more={"DDLF_TOKEN": token}) as (master,),
        ):
            results = [json.loads(line) for line in master.stdout]
    rows = [["transfer", "both", "of transfer", "one slow", "of both"]]
    for transfer, both, at_once_s in results:
        rows.append(
            [
                f"{transfer:.2f} s",
                f"{both:.2f} s",
                f"{both / transfer:.2f}",
                f"{at_once_s:.2f} s",
                f"{at_once_s / both:.2f}",
            ]
        )
    print(f"{options.workers} workers, {options.parameters:,} parameters, {options.rate}")
    print(table(rows))
    return results


if __name__ == "__main__":
    main()
