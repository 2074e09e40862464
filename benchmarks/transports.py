"""DDLF and its alternatives for calls. Each is one server process that returns its input. Runs on the master.

Every transport offers the same three calls, in the way that its documentation recommends. ``raw`` and ``streams`` are the
floor: they have no types, no errors, no cancellation and no method names.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.echo import GRPC_OPTIONS, LENGTH, receive_into, send

ROOT = Path(__file__).parents[1]


def echo(value: Any) -> Any:
    """The function that the workers run."""
    return value


class Transport:
    """One server process and a client of it.

    Attributes:
        name: In the table.
        needs: The module that must be installed.
        pipelines: Whether one connection can carry several calls at a time.
    """

    name: str
    needs = "asyncio"
    pipelines = True

    @classmethod
    def available(cls) -> bool:
        """Return whether the needed package is installed."""
        return importlib.util.find_spec(cls.needs) is not None

    async def start(self) -> None:
        """Start the server and connect."""
        raise NotImplementedError

    async def stop(self) -> None:
        """End the server."""
        raise NotImplementedError

    async def call(self, value: Any) -> Any:
        """Send bytes or an array, and return the answer."""
        raise NotImplementedError


class Server:
    """A subprocess of ``benchmarks.echo``."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    async def __aenter__(self) -> int:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.echo", self._kind, stdout=asyncio.subprocess.PIPE, cwd=ROOT
        )
        assert self._process.stdout is not None
        return int(await self._process.stdout.readline())

    async def __aexit__(self, *exc: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        await self._process.wait()


class DDLF(Transport):
    """A cluster of one worker with a hosted method."""

    name = "DDLF"
    needs = "ddlf"

    async def start(self) -> None:
        from ddlf import Cluster

        self._cluster = Cluster.local(1)
        await self._cluster.connect()
        await self._cluster.add_method(echo)
        self._worker = self._cluster.workers[0]

    async def stop(self) -> None:
        await self._cluster.close()

    async def call(self, value: Any) -> Any:
        return await self._cluster.run_at(self._worker, "echo", value)


class Raw(Transport):
    """A blocking socket and a reused buffer."""

    name = "raw blocking socket"
    pipelines = False

    async def start(self) -> None:
        self._server = Server("raw")
        self._sock = socket.create_connection(("127.0.0.1", await self._server.__aenter__()))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._head = bytearray(LENGTH.size)
        self._buffer = memoryview(bytearray(1))

    async def stop(self) -> None:
        self._sock.close()
        await self._server.__aexit__()

    async def call(self, value: Any) -> Any:
        view = memoryview(value).cast("B")
        if len(self._buffer) < len(view):
            self._buffer = memoryview(bytearray(len(view)))
        send(self._sock, LENGTH.pack(len(view)), view)
        receive_into(self._sock, memoryview(self._head))
        receive_into(self._sock, self._buffer[: len(view)])
        return self._buffer[: len(view)]


class Streams(Transport):
    """asyncio's streams."""

    name = "raw asyncio streams"
    pipelines = False

    async def start(self) -> None:
        self._server = Server("streams")
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", await self._server.__aenter__())

    async def stop(self) -> None:
        self._writer.close()
        await self._server.__aexit__()

    async def call(self, value: Any) -> Any:
        view = memoryview(value).cast("B")
        head = LENGTH.pack(len(view))
        self._writer.write(b"".join((head, view)) if len(view) <= 64 * 1024 else head)
        if len(view) > 64 * 1024:
            self._writer.write(view)
        await self._writer.drain()
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        return await self._reader.readexactly(length)


class Grpc(Transport):
    """gRPC's asyncio interface."""

    name = "gRPC aio"
    needs = "grpc"

    async def start(self) -> None:
        import grpc

        self._server = Server("grpc")
        port = await self._server.__aenter__()
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=GRPC_OPTIONS)
        self._echo = self._channel.unary_unary("/bench/echo")

    async def stop(self) -> None:
        await self._channel.close()
        await self._server.__aexit__()

    async def call(self, value: Any) -> Any:
        if isinstance(value, bytes):
            return await self._echo(value)
        return np.frombuffer(await self._echo(value.tobytes()), value.dtype).reshape(value.shape)


class Ray(Transport):
    """An actor."""

    name = "Ray actor"
    needs = "ray"

    async def start(self) -> None:
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")

        @ray.remote(num_cpus=1)
        class Echo:
            def echo(self, value: Any) -> Any:
                return value

        self._actor = Echo.remote()
        await self.call(b"")

    async def stop(self) -> None:
        import ray

        ray.shutdown()

    async def call(self, value: Any) -> Any:
        return await self._actor.echo.remote(value)


class Dask(Transport):
    """An actor."""

    name = "Dask actor"
    needs = "distributed"

    async def start(self) -> None:
        import dask
        from distributed import Client, LocalCluster

        dask.config.set({"distributed.admin.log-format": "%(message)s"})
        self._cluster = await LocalCluster(
            n_workers=1, threads_per_worker=1, processes=True, dashboard_address=None, asynchronous=True
        )
        self._client = await Client(self._cluster, asynchronous=True)
        self._actor = await self._client.submit(DaskEcho, actor=True)

    async def stop(self) -> None:
        await self._client.close()
        await self._cluster.close()

    async def call(self, value: Any) -> Any:
        return await self._actor.echo(value)


class DaskEcho:
    """Dask. Its worker must be able to import the class of the actor."""

    def echo(self, value: Any) -> Any:
        """Return what came."""
        return value


TRANSPORTS: tuple[type[Transport], ...] = (DDLF, Raw, Streams, Grpc, Ray, Dask)
ALWAYS: tuple[type[Transport], ...] = (DDLF, Raw, Streams)
