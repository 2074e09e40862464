"""One control connection: heartbeats, the lease, and what ends or restarts what runs. Runs in the daemon."""

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
"""Between interrupt and kill for a method whose master is gone: nobody waits, and a kill loses the data that the next master would use."""
SILENT_GRACE_S = 30.0
"""A master that is silent for so long is gone for good. It loses its lease long before, but only to another master that wants it: one whose process
is stopped, or held up by a download or an import, goes on as if nothing had been."""
CLAIMED_IDS = 2**32
SLOW = ("cancel", "restart", "give", "preload", "machine")
"""Commands that are not answered at once."""
MAX_PROBE_BYTES = 512 * 1024
MAX_QUEUED_BYTES = 1024**2
"""Answers that a master has not taken; above it none of its requests is read until it has."""


class ControlledDaemon(Protocol):
    """What a control connection asks of its daemon; ``ddlf.worker.daemon.Daemon`` says what each does."""

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
    """One control connection: requests of a few commands, answered at once.

    Args:
        daemon: Does what is asked.
        sock: Authenticated.

    Attributes:
        claimed: The ids of the requests that the same master sends to the executor.
        master_id: The random bytes by which that master is known; empty if it wants no lease.
        who: Name of that master, for people.
        orphan_grace_s: Between interrupt and kill for what still runs of it when this connection ends.
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
        """Tell the master that something happened."""
        with contextlib.suppress(ConnectionError):
            self._connection.send(Kind.EVENT, 0, name, dumps(facts))

    @property
    def queued_bytes(self) -> int:
        """What the master has not taken yet."""
        return self._connection.queued_bytes

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def hear(self) -> None:
        """Note that the master lives."""
        if self._liveness is not None:
            self._liveness.heard(self._loop.time())

    def judge(self) -> str:
        """Whether the master lives: always, if it promised no heartbeats."""
        return self._liveness.judge(self._loop.time()) if self._liveness is not None else "alive"

    @property
    def dead_after_s(self) -> float:
        """For how long this master waits for a silent worker."""
        return (self._liveness.timing if self._liveness is not None else Timing()).dead_after_s

    def facts(self, lease: Lease) -> dict[str, Any]:
        """The lease that this master has, as data."""
        silent_s = self._liveness.silent_s(self._loop.time()) if self._liveness is not None else 0.0
        since = lease.holder.since if lease.holder else ""
        return {"holder": self.who, "since": since, "epoch": lease.epoch, "state": self.judge(), "silent_s": silent_s}

    def _on_frame(self, frame: Frame) -> None:
        self.hear()
        if self._connection.queued_bytes > MAX_QUEUED_BYTES and not self._held_back:
            self._hold_back()
        if frame.kind == Kind.CANCEL:
            return  # of a request that is answered already, or ends with this connection
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
        """Take note of a master: its requests, its lease, and how often it promises to be heard. A guest gives no session and gets no lease."""
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
        """Watch the master, which is given up only when its silence has lasted much longer than it takes to lose the lease."""
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
        """Read requests again when the master has taken the answers; one that never does is silent, and given up as such."""
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
    """Take some bytes and give some back, with the time of this machine's clock."""
    if not 0 <= size <= MAX_PROBE_BYTES:
        raise ValueError(f"size must be 0-{MAX_PROBE_BYTES}")
    return {"time": time.time(), "data": bytes(size)}
