"""Replicas of Downpour that compute nothing and push distinguishable numbers. No Keras.

Trainings whose workers are killed use them, to check that each push counts once.
"""

from __future__ import annotations

import asyncio
import json
import time
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.stand_in import PushingStandIn, StandInRun, like, nothing, tensors
from ddlf.algorithms.flat_weights import Rows
from ddlf.algorithms.push_rules import Cadence
from ddlf.training.slot.task import Task
from ddlf.training.strategies.downpour.client import record, replicas_of
from ddlf.training.strategies.downpour.replica import batches_of
from ddlf.training.strategies.downpour.server import Server
from ddlf.worker.calls import concurrent
from ddlf.worker.peers import Unreached


class KilledStandIn(PushingStandIn):
    """A replica of Downpour without a model: one fetch and one push in each step.

    Args:
        worker: Worker that it is on.
        run: Name of the run.
        facts: ``parameters``, and ``log``: a file that gets a line of JSON for each shard whose copy took over here, when its first push was applied;
            none if it is empty.
    """

    def __init__(self, worker: Any, run: str, facts: dict[str, Any]) -> None:
        super().__init__(worker, run, [1])
        self._facts = facts
        sizes = tensors(facts["parameters"])
        self._stepper = SimpleNamespace(rows=Rows.of(like(sizes), [True] * len(sizes)))  # type: ignore[assignment]
        self._looking: set[asyncio.Future[None]] = set()
        take_over = self._servers.take_over

        @wraps(take_over)
        async def logged(epoch: int, shard: int, rollbacks: list[list[int]], whole: bool) -> list[list[int]]:
            rollbacks_now: list[list[int]] = await take_over(epoch, shard, rollbacks, whole)
            if self._facts["log"] and not whole:  # a worker that hands a shard on has not been lost
                looking = asyncio.ensure_future(self._log(shard, self._servers.shards[shard]))
                self._looking.add(looking)
                looking.add_done_callback(self._looking.discard)
            return rollbacks_now

        self._servers.take_over = logged  # type: ignore[method-assign]

    @concurrent
    async def copied(self) -> tuple[int, list[int], bool]:
        """Return the number of placements that the master has sent, the servers here, and whether all of them have a backup."""
        shards = {number: shard for number, shard in self._servers.shards.items() if not shard.closed}
        safe = all(shard.holders and shard._with.issuperset(shard.holders) for shard in shards.values())
        return self._servers.owners.arranged, [*shards], safe

    async def _log(self, number: int, shard: Server) -> None:
        begun = shard.received
        async with shard._news:
            await shard._news.wait_for(lambda: shard.closed or shard.received > begun)
        append(self._facts["log"], json.dumps([number, shard.epoch, time.monotonic()]))

    async def _replicas(self, task: Task) -> list[Any]:
        return list(await replicas_of(self._servers.owners, task, [batches_of(task)], Cadence()))

    async def train(self, task: dict[str, Any]) -> dict[str, Any]:
        """See ``Replica``."""
        request = Task.from_message(task)
        replicas: list[Any] = []
        unreached: Unreached | None = None
        try:
            replicas += await self._replicas(request)
            (replica,) = replicas
            while replica.done < replica.left:
                await replica.take(None, 0.0)
                value = np.float32(size_of_push(replica.id, request.round, replica.first + replica.done))
                replica.done += 1
                await replica.push(np.broadcast_to(value, (self._facts["parameters"],)), np.zeros(0, np.float32))
            await replica.pushed()
        except Unreached as error:
            unreached = error
        finally:
            for replica in replicas:
                replica.end()
        message: dict[str, Any] = nothing(request, pushed=record(replicas, unreached=unreached)).to_message()
        return message


def append(path: str, line: str) -> None:
    """Append a line to the log."""
    with Path(path).open("a") as file:
        print(line, file=file)


def size_of_push(replica: int, round: int, number: int) -> int:
    """Return the number that a push adds to each value. Pushes add different numbers, so the sum shows a missing or doubled push."""
    return 1 + (replica * 8191 + round * 131 + number * 17) % 61


class KilledRun(StandInRun):
    """A run of Downpour whose replicas compute nothing.

    Args:
        cluster: Real workers, which are connected.
        parameters: Number of parameters of the model.
        steps: Steps of each replica in a round.
        log: See ``KilledStandIn``.
        settings: Settings of ``FakeRun``.
    """

    batch_size = 1

    def __init__(self, cluster: Any, parameters: int, *, steps: int, log: str = "", **settings: Any) -> None:
        super().__init__(cluster, parameters, samples=steps * cluster.N, mode="downpour", **settings)
        self._worker_facts = {"parameters": parameters, "log": log}

    @property
    def stand_in(self) -> tuple[Any, Any]:
        """See ``StandInRun``."""
        return KilledStandIn, self._worker_facts
