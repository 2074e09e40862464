"""A worker's daemon in the process of a test, on a real port. The test can await lines of its log and change its limits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from ddlf.cluster.cluster import Cluster
from ddlf.cluster.proxy import ProxyWorker
from ddlf.errors import DDLFError
from ddlf.rpc.tokens import new_token
from ddlf.testing.in_process import InProcessDaemon
from ddlf.worker.daemon import Daemon
from ddlf.worker.options import Options
from tests.patience import PATIENCE_S

TOKEN = new_token().encode()


class RunningDaemon:
    """A daemon in this process, with an executor in another one, and the lines it logged."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self._folder = folder
        self.lines: list[str] = []
        self.logged = asyncio.Event()
        settings = dict(host="127.0.0.1", port=0, tokens=(TOKEN,), state_dir=folder) | options
        self.daemon = Daemon(Options(**settings), self._log)
        self.port = self.daemon.port
        self.ready = asyncio.Event()
        self.task = asyncio.create_task(self.daemon.run(self.ready.set))

    def _log(self, line: str) -> None:
        self.lines.append(line)
        self.logged.set()

    @property
    def executor_log(self) -> str:
        """The output of the executor up to now. An executor prints it before it serves the next connection."""
        return next(self._folder.glob("port-*/executor.log")).read_text()

    async def line_with(self, text: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not any(text in line for line in self.lines):
                self.logged.clear()
                await self.logged.wait()

    async def end(self) -> None:
        self.daemon.stop()
        await asyncio.wait_for(self.task, PATIENCE_S)


class DaemonWithoutProcesses:
    """A daemon and its executor in this process: no process starts, and all such daemons share one import of Keras."""

    def __init__(self, token: bytes, port: int = 0) -> None:
        self._daemon = InProcessDaemon(Options(host="127.0.0.1", port=port, tokens=(token,), state_dir=None))
        self.port = self._daemon.port
        self._task = asyncio.create_task(self._daemon.run(lambda: None))

    async def end(self) -> None:
        """Stop the daemon. Its masters lose their connections."""
        self._daemon.stop()
        await self._task


@contextlib.asynccontextmanager
async def connected(port: int, **options: Any) -> AsyncIterator[ProxyWorker]:
    """Connect to a daemon of this machine as its master, or with ``guest=True`` as a guest."""
    worker = ProxyWorker("127.0.0.1", port, TOKEN, **options)
    await worker.connect()
    try:
        yield worker
    finally:
        await worker.close()


async def preload(cluster: Cluster, *modules: str) -> None:
    """Let the executors of all workers import modules before their first use. Ignore lost workers."""
    outcomes = await asyncio.gather(*(worker.preload(*modules) for worker in cluster.workers), return_exceptions=True)
    for outcome in outcomes:
        if outcome is not None and not isinstance(outcome, DDLFError):
            raise outcome
