"""The published algorithm as its authors coded it, in a new implementation.

The source is Phan and Do 2023, Algorithms 2 (synchronous) and 3 (asynchronous). This program does the following as the
authors do, unlike DDLF:

- A message is a zlib-compressed pickle after its length of 4 bytes, over asyncio streams. The worker computes on its
  event loop.
- In each round every worker receives the whole permutation of the n samples. It copies the whole data set in that
  order, and uses its part.
- The data is float64. ``fit`` receives arrays, and can stall at its end (see ``benchmarks.workload.batches``).
- With ``validation_split=0.1``, a tenth of each part is evaluated and not trained on. n mod K samples belong to no
  part.
- Workers divide their update by K, and the master subtracts the quotients. This is an unweighted mean.
- Each asynchronous worker gets its own permutation, so the parts of a round overlap.
- TensorFlow chooses the number of threads: in every worker, as many as the machine has cores.

One thing is left out, because training does not need it: the authors send source text to the workers. Here a peer
proves itself by a token before anything is unpickled, and all sockets are on loopback.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import pickle
import secrets
import sys
import time
import zlib
from typing import Any

import numpy as np

from benchmarks.workload import Outcome, Weights, Workload

TOKEN = "DDLF_BENCHMARK_TOKEN"


class Channel:
    """A connection that counts its bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.sent = self.received = 0

    async def send(self, message: Any) -> None:
        data = zlib.compress(pickle.dumps(message))
        self.writer.write(len(data).to_bytes(4, "big"))
        self.writer.write(data)
        await self.writer.drain()
        self.sent += 4 + len(data)

    async def receive(self) -> Any:
        size = int.from_bytes(await self.reader.readexactly(4), "big")
        data = await self.reader.readexactly(size)
        self.received += 4 + size
        return pickle.loads(zlib.decompress(data))

    async def call(self, command: str, **arguments: Any) -> Any:
        """Send a request and wait for its response."""
        await self.send((command, arguments))
        return await self.receive()


def subtract(a: Weights, b: Weights) -> Weights:
    """``a - b`` for lists of arrays."""
    return [x - y for x, y in zip(a, b, strict=True)]


# -- worker -----------------------------------------------------------------------------------------------------------


class Worker:
    """A process that trains.

    Args:
        workload: What to train.
        id: From 1.
    """

    def __init__(self, workload: Workload, id: int) -> None:
        self.id, self.N = id, workload.workers
        app = workload.load()
        self.model = app.model
        self.x_train, self.y_train = app.x_train.astype(np.float64), app.y_train

    def load_partition(self, permutation: np.ndarray[Any, Any]) -> None:
        """Copy the data in the given order and keep this worker's part of it."""
        size = len(self.x_train) // self.N
        partition = slice((self.id - 1) * size, self.id * size)
        self.x_part = self.x_train[permutation][partition]
        self.y_part = self.y_train[permutation][partition]

    def train(self, weights: Weights, epochs: int, batch_size: int) -> Weights:
        """Train on the part; return this worker's share of the mean update."""
        self.model.set_weights(weights)
        self.model.fit(self.x_part, self.y_part, epochs=epochs, batch_size=batch_size, validation_split=0.1, verbose=2)
        return [update / self.N for update in subtract(weights, self.model.get_weights())]


async def serve(worker: Worker) -> None:
    """Listen on a free port of loopback, print it, and answer one master until it disconnects."""
    token = os.environ[TOKEN].encode()
    done = asyncio.Event()

    async def control(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not hmac.compare_digest(await reader.readexactly(len(token)), token):
            writer.close()
            return
        channel = Channel(reader, writer)
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                command, arguments = await channel.receive()
                await channel.send(getattr(worker, command)(**arguments))
        done.set()

    server = await asyncio.start_server(control, "127.0.0.1", 0)
    print("port", server.sockets[0].getsockname()[1], flush=True)
    await done.wait()


# -- master -----------------------------------------------------------------------------------------------------------


class Master:
    """The process that merges.

    Args:
        workload: What to train.
        weights: The initial ones.
        workers: A channel to each.
    """

    def __init__(self, workload: Workload, weights: Weights, workers: list[Channel]) -> None:
        self.workload, self.weights, self.workers = workload, weights, workers
        self.random = np.random.default_rng(workload.seed)
        self.snapshots: list[tuple[float, Weights]] = []

    def merge(self, update: Weights) -> None:
        """Subtract one worker's share from the current weights."""
        self.weights = subtract(self.weights, update)

    def snapshot(self) -> None:
        if self.workload.curve:
            self.snapshots.append((time.monotonic(), self.weights))

    async def train_sync(self, samples: int) -> None:
        """Algorithm 2."""
        for _ in range(self.workload.rounds):
            permutation = self.random.permutation(samples)
            await asyncio.gather(*(w.call("load_partition", permutation=permutation) for w in self.workers))
            updates = await asyncio.gather(*(self._train(worker, self.weights) for worker in self.workers))
            for update in updates:
                self.merge(update)
            self.snapshot()

    async def train_async(self, samples: int) -> None:
        """Algorithm 3. The event loop runs one merge at a time, like their lock."""

        async def run(worker: Channel) -> None:
            for _ in range(self.workload.rounds):
                await worker.call("load_partition", permutation=self.random.permutation(samples))
                self.merge(await self._train(worker, self.weights))
                self.snapshot()

        await asyncio.gather(*(run(worker) for worker in self.workers))

    async def _train(self, worker: Channel, weights: Weights) -> Weights:
        update: Weights = await worker.call(
            "train", weights=weights, epochs=self.workload.local_epochs, batch_size=self.workload.batch_size
        )
        return update


def run(workload: Workload, *, mode: str) -> Outcome:
    """Measure it.

    Args:
        workload: What to train.
        mode: ``"sync"`` or ``"async"``.
    """
    return asyncio.run(_run(workload, mode))


async def _run(workload: Workload, mode: str) -> Outcome:
    token = secrets.token_hex(16)
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", __name__, workload.dump(), str(id)),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, TOKEN: token},
        )
        for id in range(1, workload.workers + 1)
    ]
    draining: list[asyncio.Task[bytes]] = []
    try:
        app = await asyncio.to_thread(workload.load)
        channels = []
        for process in processes:
            assert process.stdout is not None
            channels.append(await _connect(process.stdout, token))
            draining.append(asyncio.ensure_future(process.stdout.read()))  # what `fit` prints
        master = Master(workload, app.model.get_weights(), channels)
        ready = time.monotonic()
        await (master.train_sync if mode == "sync" else master.train_async)(len(app.x_train))
        end = time.monotonic()
        for channel in channels:
            channel.writer.close()
        await asyncio.gather(*draining, *(process.wait() for process in processes))
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
    return Outcome(
        ready=ready,
        end=end,
        weights=master.weights,
        bytes_out=sum(channel.sent for channel in channels),
        bytes_back=sum(channel.received for channel in channels),
        snapshots=master.snapshots,
    )


async def _connect(output: asyncio.StreamReader, token: str) -> Channel:
    """Wait for a worker's line with its port, and connect to it."""
    async for line in output:
        if line.startswith(b"port "):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(line.split()[1]))
            writer.write(token.encode())
            return Channel(reader, writer)
    raise RuntimeError("a worker of the published algorithm ended before it was ready")


if __name__ == "__main__":
    asyncio.run(serve(Worker(Workload.parse(sys.argv[1]), int(sys.argv[2]))))
