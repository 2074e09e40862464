"""One control connection: heartbeats, the lease, and the commands that end or restart running methods. Runs in the
daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from ddlf.errors import LeaseError, ProtocolError
from ddlf.rpc.connection import Connection
from ddlf.rpc.frame import CONTROL_LIMITS, Frame
from ddlf.rpc.liveness import Liveness, Timing
from ddlf.rpc.messages import Kind, describe, read_arguments
from ddlf.rpc.silence import end_when_silent
from ddlf.rpc.values import dumps, loads
from ddlf.worker.executor_process import ExecutorProcess
from ddlf.worker.lease import MASTER_ID_BYTES, Holder, Lease

ORPHAN_GRACE_S = 30.0
"""Time between interrupt and kill for a method whose master is gone. Nobody waits, and a kill loses data that the next
master would use.
"""
SILENT_GRACE_S = 30.0
"""Seconds of silence before a master is given up. It may lose its lease long before, but only to another master that
wants it. A master that was stopped, or was blocked by a download or an import, simply continues.
"""
CLAIMED_IDS = 2**32
SLOW = ("cancel", "restart", "give", "preload", "machine")
"""Commands that are not answered at once."""
MAX_PROBE_BYTES = 512 * 1024
MAX_QUEUED_BYTES = 1024**2
"""Bytes of answers that a master has not read yet. Above this limit, its requests are not read until it has read the
answers.
"""


class ControlledDaemon(Protocol):
    """The parts of a daemon that a control connection uses; ``ddlf.worker.daemon.Daemon`` describes them."""

    process: ExecutorProcess
    log: Callable[[str], None]

    def status(self) -> dict[str, Any]: ...
    def addresses(self) -> dict[str, Any]: ...
    def hear(self, master_id: bytes) -> None: ...
    def interfere(self, control: Control, doing: str, *, who: str = "", force: bool = False) -> str: ...
    def stop(self) -> None: ...
    def grant(self, control: Control, master: Holder, known_epoch: int, takeover: bool) -> int: ...
    def drop(self, control: Control) -> None: ...
    async def preload(self, modules: list[str], *, replace: bool = False) -> dict[str, Any]: ...
    async def machine(self, needs: Sequence[str] = ()) -> dict[str, Any]: ...
    async def give(self, control: Control, id: int, piece: bytes, last: bool) -> None: ...


class Control:
    """One control connection. It answers a few commands at once.

    Args:
        daemon: Carries out the commands.
        sock: An authenticated socket.

    Attributes:
        claimed: The ids of the requests that the same master sends to the executor.
        master_id: The random bytes that identify the master; empty if it wants no lease.
        who: Name of the master, for people.
        orphan_grace_s: Seconds between interrupt and kill for its methods that still run when this connection ends.
    """

    def __init__(self, daemon: ControlledDaemon, sock: socket.socket) -> None:
        self._daemon = daemon
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self.claimed = range(0)
        self.master_id = b""
        self.who = ""
        self.orphan_grace_s = ORPHAN_GRACE_S
        self._liveness: Liveness | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._held_back = False
        self._connection = Connection(sock, self._on_frame, self._on_close, limits=CONTROL_LIMITS)

    def event(self, name: str, facts: dict[str, Any]) -> None:
        """Send an event to the master."""
        with contextlib.suppress(ConnectionError):
            self._connection.send(Kind.EVENT, 0, name, dumps(facts))

    @property
    def queued_bytes(self) -> int:
        """The number of bytes that the master has not accepted yet."""
        return self._connection.queued_bytes

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def hear(self) -> None:
        """Note that the master is alive."""
        if self._liveness is not None:
            self._liveness.heard(self._loop.time())

    def judge(self) -> str:
        """Return whether the master is alive. A master that promised no heartbeats always counts as alive."""
        return self._liveness.judge(self._loop.time()) if self._liveness is not None else "alive"

    @property
    def dead_after_s(self) -> float:
        """Seconds that this master waits for a silent worker."""
        return (self._liveness.timing if self._liveness is not None else Timing()).dead_after_s

    def facts(self, lease: Lease) -> dict[str, Any]:
        """Return the lease of this master as data."""
        silent_s = self._liveness.silent_s(self._loop.time()) if self._liveness is not None else 0.0
        since = lease.holder.since if lease.holder else ""
        return {"holder": self.who, "since": since, "epoch": lease.epoch, "state": self.judge(), "silent_s": silent_s}

    def _on_frame(self, frame: Frame) -> None:
        self.hear()
        if self._connection.queued_bytes > MAX_QUEUED_BYTES and not self._held_back:
            self._hold_back()
        if frame.kind == Kind.CANCEL:
            return  # its request is answered already, or ends with this connection
        if frame.kind != Kind.REQUEST:
            raise ProtocolError(f"a worker expects requests, not messages of kind {frame.kind}")
        args, kwargs = read_arguments(loads(frame.buffers))
        if frame.name in SLOW:
            self._spawn(self._slow(frame, args, kwargs))
            return
        result: Any = None
        if frame.name == "ping":
            pass
        elif frame.name == "status":
            result = self._daemon.status()
        elif frame.name == "addresses":
            result = self._daemon.addresses()
        elif frame.name == "claim":
            try:
                result = {"epoch": self._claim(*args, **kwargs)}
            except LeaseError as error:
                self._fail(frame.id, error)
                return
            except (TypeError, ValueError) as error:
                self._fail(frame.id, ProtocolError(f"claim cannot be read: {error}"))
                return
        elif frame.name == "probe":
            try:
                result = _probe(*args)
            except (TypeError, ValueError) as error:
                self._fail(frame.id, ProtocolError(f"probe cannot be read: {error}"))
                return
        elif frame.name == "flush":
            self._daemon.process.lines.flush()
        elif frame.name == "beat":
            self._daemon.hear(args[0] if args else b"")
        elif frame.name == "shutdown":
            try:
                self._daemon.interfere(self, "stopped", **kwargs)
            except (LeaseError, TypeError) as error:
                self._fail(frame.id, error)
                return
            self._daemon.stop()
        else:
            self._fail(frame.id, ProtocolError(f"unknown control command {frame.name!r}"))
            return
        self._connection.send(Kind.RESULT, frame.id, "", dumps(result))

    def _claim(
        self,
        first_id: int,
        *,
        session: bytes = b"",
        epoch: int = 0,
        takeover: bool = False,
        who: str = "",
        job: str = "",
        heartbeat_s: float | None = None,
        dead_after_s: float | None = None,
    ) -> int:
        """Record a master: the ids of its requests, its lease and its heartbeat interval. Return the epoch of the
        lease. A guest gives no session and gets no lease.
        """
        if session and len(session) != MASTER_ID_BYTES:
            raise ValueError(f"a session is {MASTER_ID_BYTES} bytes")
        timing = Timing.of(heartbeat_s, None, dead_after_s) if heartbeat_s and dead_after_s else None
        claimed = range(first_id, first_id + CLAIMED_IDS)
        granted = 0
        if session:
            self.master_id, self.who = session, str(Holder(session, str(who), str(job)))
            holder = Holder(session, str(who), str(job), time.strftime("%H:%M"))
            granted = self._daemon.grant(self, holder, int(epoch), bool(takeover))
        self.claimed = claimed
        if timing is not None:
            end_when_silent(self._sock, timing.dead_after_s)
            self._liveness = Liveness(timing, self._loop.time())
            self._look()
        return granted

    def _look(self) -> None:
        """Watch the master. It is given up only after a silence much longer than the one that can cost it the lease."""
        if self._timer is not None:
            self._timer.cancel()
        if self._liveness is None or self._connection.closed:
            return
        now = self._loop.time()
        timing = self._liveness.timing
        self._liveness.judge(now)
        if self._liveness.silent_s(now) >= max(SILENT_GRACE_S, 2 * timing.dead_after_s):
            self._connection.abort()
            return
        self._timer = self._loop.call_later(self._liveness.next_look_s(now), self._look)

    async def _slow(self, frame: Frame, args: list[Any], kwargs: dict[str, Any]) -> None:
        try:
            result: Any = None
            if frame.name == "cancel":
                result = await self._daemon.process.cancel(*args, **kwargs)
            elif frame.name == "preload":
                result = await self._daemon.preload(*args, **kwargs)
            elif frame.name == "machine":
                result = await self._daemon.machine(*args)
            elif frame.name == "give":
                await self._daemon.give(self, *args)
            else:
                await self._daemon.process.restart(self._daemon.interfere(self, "restarted", **kwargs))
            self._connection.send(Kind.RESULT, frame.id, "", dumps(result))
        except ConnectionError:
            return
        except Exception as error:
            self._fail(frame.id, error)

    def _fail(self, id: int, error: Exception) -> None:
        with contextlib.suppress(ConnectionError):
            self._connection.send(Kind.ERROR, id, "", dumps(describe(error)))

    def _hold_back(self) -> None:
        self._held_back = True
        self._connection.pause_reading()
        self._spawn(self._wait_for_reader())

    async def _wait_for_reader(self) -> None:
        """Read requests again after the master has read the answers. A master that never reads them is silent and is
        given up for this reason.
        """
        with contextlib.suppress(ConnectionError):
            await self._connection.drain()
        self._held_back = False
        self._connection.resume_reading()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_close(self, reason: BaseException | None) -> None:
        if isinstance(reason, ProtocolError):
            self._daemon.log(f"closed a connection: {reason}")
        if self._timer is not None:
            self._timer.cancel()
        self._daemon.drop(self)


def _probe(data: bytes = b"", size: int = 0) -> dict[str, Any]:
    """Receive some bytes and return ``size`` bytes, with the time of this machine's clock."""
    if not 0 <= size <= MAX_PROBE_BYTES:
        raise ValueError(f"size must be 0-{MAX_PROBE_BYTES}")
    return {"time": time.time(), "data": bytes(size)}
