"""The small process that always answers. Runs on every worker's machine, on one port.

It accepts every connection, reads eight bytes, and either serves it (control) or hands the socket to the executor (data). It imports neither NumPy
nor Keras and never runs user code, so it answers whatever the executor does: trains, loops forever, holds the GIL, or crashes. Then it says how
the executor ended, and starts another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import re
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ddlf.errors import AuthError, ConfigError, ConnectError, DDLFError, LeaseError, ProtocolError, VersionError
from ddlf.liveness import Liveness, Timing
from ddlf.net.admission import Admission
from ddlf.net.connection import Connection
from ddlf.net.listen import HTTP_ANSWER, answer, listening_socket, refusal_of_preamble
from ddlf.net.silence import end_when_silent
from ddlf.net.stream import receive_exactly, send_all
from ddlf.net.tls import Security, make_certificate, worker_tls
from ddlf.wire.frame import CONTROL_LIMITS, MAX_BODY_BYTES, Frame
from ddlf.wire.handshake import HANDSHAKE_TIMEOUT_S, PREAMBLE, Role, is_http, read_preamble, short_answer
from ddlf.wire.messages import Kind, describe, read_arguments
from ddlf.wire.values import dumps, loads
from ddlf.worker.activity import Activity
from ddlf.worker.folder import DaemonFolder, remove_abandoned
from ddlf.worker.lease import SESSION_BYTES, Holder, Lease
from ddlf.worker.process import UNKNOWN, Forked, Template, can_fork, child_environment, executor_name
from ddlf.worker.questions import MAX_QUESTION_BYTES, Questions
from ddlf.worker.stopped import LOOK_S, StoppedFor

HAND_OVER = struct.Struct("<8sd")
"""What goes to the executor with a socket: its preamble, and the deadline of its handshake."""
MAX_START_FAILURES = 5
"""So many executors in a row that ended before they served anybody: no other one is started until somebody asks for it."""
START_RETRY_S = 0.5
CANCEL_GRACE_S = 5.0
INTERRUPT_EVERY_S = 0.5
ORPHAN_GRACE_S = 30.0
"""Between interrupt and kill for a method whose master is gone: nobody waits, and a kill loses the data that the next master would use."""
SILENT_GRACE_S = 30.0
"""A master that is silent for so long is gone for good. It loses its lease long before, but only to another master that wants it: one whose process
is stopped, or held up by a download or an import, goes on as if nothing had been."""
STDOUT = 1
CLAIMED_IDS = 2**32
LEASE_CHANGED = b"LEASE".ljust(HAND_OVER.size)
"""Tells the executor to look at its page for who may ask it."""
SLOW = ("cancel", "restart", "give", "preload")
"""Commands of a control connection that are not answered at once."""
MODULE = re.compile(r"\w+(\.\w+)*")
STDERR_TAIL_BYTES = 8192
STDERR_TAIL_LINES = 40
"""A fatal error in native code prints its kind first, then the stack: some 30 lines in all."""
MAX_QUEUED_BYTES = 1024**2
"""Answers that a master has not taken; above it none of its requests is read until it has."""
NO_DESCRIPTORS_S = 0.1
"""How long to leave newcomers to the kernel when this process has no descriptor for them."""


@dataclass(slots=True)
class Options:
    """How a worker is started.

    Args:
        host: Address to listen on.
        port: 0 for any free one.
        tokens: Accepted ones, the one to prove with first.
        state_dir: Folder for what survives the daemon, and for the executor's log; None if nothing is to survive it.
        security: Certificates, and whether to encrypt nothing; None on loopback, where nothing needs to be encrypted.
        max_message_bytes: The largest message body accepted.
        template_fd: Socket of a template that others have, too; None for one of its own, when a master wants something preloaded.
    """

    host: str
    port: int
    tokens: tuple[bytes, ...] = field(repr=False)
    state_dir: Path | None
    security: Security | None = None
    max_message_bytes: int = MAX_BODY_BYTES
    template_fd: int | None = None


class Daemon:
    """One worker's daemon.

    Args:
        options: How it was started.
        log: Takes a line for the person who looks at the terminal.
    """

    def __init__(self, options: Options, log: Callable[[str], None] = lambda line: None) -> None:
        self._options = options
        self.log = log
        self._listener = listening_socket(options.host, options.port)
        self.host, self.port = self._listener.getsockname()[:2]
        self._session = DaemonFolder()
        self._session_dir = self._session.path
        remove_abandoned()
        try:
            state_dir = self._make_state_dir()
            self._certificate = own = self._make_certificate()
            self._encryption = worker_tls(own, options.security) if own and options.security else None
        except (OSError, ConfigError) as error:
            self._listener.close()
            self._session.remove()
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"the state folder {options.state_dir} cannot be used: {error.strerror}",
                hint="choose another with --state-dir",
            ) from None
        self._executor = self._make_executor(state_dir)
        self._sessions: set[ControlSession] = set()
        self._questions = Questions()
        self._executor.on_question = lambda question, descriptor: self._questions.put(
            question, descriptor, self._holder.event if self._holder else None
        )
        self._lease = Lease()
        self._holder: ControlSession | None = None
        self._admission = Admission(log, lambda: len(self._sessions))
        self._orphans: set[asyncio.Task[None]] = set()
        self._started = time.monotonic()
        self._stop = asyncio.Event()

    def _make_executor(self, state_dir: Path) -> Executor:
        return Executor(self._options, self._session_dir, state_dir, self._announce, self.log, self._certificate)

    def _make_state_dir(self) -> Path:
        """The folder of this worker's own state: that of its port, since a restarted worker has the same."""
        folder = (self._options.state_dir or self._session_dir) / f"port-{self.port}"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return folder

    def _make_certificate(self) -> Path | None:
        """The file with this worker's own certificate, made at the first start; None when nothing is encrypted."""
        security = self._options.security
        if security is None or security.insecure_plaintext:
            return None
        path = (self._options.state_dir or self._session_dir) / "certificate.pem"
        if security.tls_cert is None:
            make_certificate(path)
        return path

    @property
    def encrypts(self) -> bool:
        """Whether other machines can connect with TLS."""
        return self._encryption is not None

    @property
    def insecure_plaintext(self) -> bool:
        """Whether other machines can connect without."""
        return self._options.security is not None and self._options.security.insecure_plaintext

    async def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until ``stop`` is called.

        Args:
            ready: Called once, when the executor has started or was given up.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                forever = self._executor.keep_running(), self._accept(), self._end_stopped_executors()
                running = [tasks.create_task(coroutine) for coroutine in forever]
                waiting = tasks.create_task(self._executor.settled.wait())
                waiting.add_done_callback(lambda task: None if task.cancelled() else ready())
                await self._stop.wait()
                for task in (*running, waiting, *self._admission.tasks, *self._orphans):
                    task.cancel()
        finally:
            self._listener.close()
            for session in list(self._sessions):
                session.close()
            await self._executor.end()
            self._session.remove()

    async def _end_stopped_executors(self) -> None:
        """End an executor that was stopped for so long that its master would have given up a silent machine; another one takes its place."""
        stopped = StoppedFor()
        while True:
            await asyncio.sleep(LOOK_S)
            if self._holder is None:
                continue  # nobody waits for it
            seconds = stopped.look(self._executor.pid)
            if seconds >= self._holder.dead_after_s:
                self._executor.end_stopped(seconds)

    @property
    def failure(self) -> str:
        """Why there is no executor and none will be started; empty while all is well."""
        return self._executor.given_up

    def stop(self) -> None:
        """End ``run``."""
        self._stop.set()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(self._listener)
            except OSError as error:  # no descriptors left: what is open goes on, new ones wait in the kernel
                self._admission.log_refusal("a connection", f"cannot accept it: {error.strerror}")
                await asyncio.sleep(NO_DESCRIPTORS_S)
                continue
            self._admission.start(self._greet(sock, address[0]), address[0])
            await asyncio.sleep(0)  # it begins, so that it closes its socket when it has to go

    async def _greet(self, sock: socket.socket, address: str) -> None:
        """Find out who is there; nothing is parsed before the handshake has succeeded."""
        owned = True
        preamble = b""
        deadline = asyncio.get_running_loop().time() + HANDSHAKE_TIMEOUT_S
        try:
            async with asyncio.timeout_at(deadline):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                preamble = await receive_exactly(sock, PREAMBLE.size)
                try:
                    role = read_preamble(preamble)
                except VersionError:
                    await send_all(sock, short_answer(tls=self.encrypts))
                    raise
                if refusal := refusal_of_preamble(
                    sock, preamble, encrypts=self.encrypts, insecure_plaintext=self.insecure_plaintext
                ):
                    await send_all(sock, short_answer(tls=self.encrypts))
                    raise ProtocolError(refusal)
                if role is Role.DATA:
                    await self._executor.hand_over(sock, preamble, deadline)
                    return
                sock, _ = await answer(
                    sock,
                    preamble,
                    self._options.tokens,
                    self._options.max_message_bytes,
                    self._encryption,
                    has_place=lambda: self._admission.has_place,
                )
            self._sessions.add(ControlSession(self, sock))
            owned = False
        except (ProtocolError, AuthError) as error:
            if is_http(preamble):
                with contextlib.suppress(OSError):
                    sock.send(HTTP_ANSWER)
                    sock.shutdown(socket.SHUT_WR)
            self._admission.log_refusal(address, error.message)
        except DDLFError as error:
            self._admission.log_refusal(address, str(error))
        except TimeoutError:
            self._admission.log_refusal(address, f"handshake timed out ({HANDSHAKE_TIMEOUT_S:g} s)")
        except OSError:
            self._admission.log_refusal(address, "closed during the handshake")
        finally:
            if owned:
                sock.close()

    def _announce(self, facts: dict[str, Any]) -> None:
        for session in list(self._sessions):
            session.event("executor_exited", facts)

    def drop(self, session: ControlSession) -> None:
        """Forget a session that ended: its lease is free, and what runs of its master's requests ends."""
        self._sessions.discard(session)
        if session is self._holder:
            self._holder = None
            self._questions.end()
            self._lease.release()
            self._executor.grant(b"")
        if session.claimed and not self._stop.is_set():
            task = asyncio.get_running_loop().create_task(self._end_orphans(session.claimed, session.orphan_grace_s))
            self._orphans.add(task)
            task.add_done_callback(self._orphans.discard)

    def grant(self, session: ControlSession, master: Holder, known_epoch: int, takeover: bool) -> int:
        """Give the worker to a master, or say who has it.

        Returns:
            The epoch of the lease.

        Raises:
            LeaseError: Another master has it, or had it since this one did.
        """
        before = self._holder
        silent = before is not None and before.judge() == "dead"
        epoch = self._lease.claim(master, known_epoch, takeover=takeover, silent=silent)
        self._holder = session
        if before is not session:
            self._questions.end()
        self._executor.grant(self._lease.key)
        if before is not None and before is not session:
            if before.master != master.session:
                before.event("lease_lost", {"by": str(master), "since": master.since, "epoch": epoch})
                before.orphan_grace_s = CANCEL_GRACE_S  # somebody waits now
                self.log(f"{master} takes over from {before.who}")
            before.close()
        return epoch

    def hear(self, master: bytes) -> None:
        """Note that a master lives, of whom another connection says so."""
        if self._holder is not None and self._holder.master == master:
            self._holder.hear()

    async def _end_orphans(self, claimed: range, grace_s: float) -> None:
        # A few times: the executor may start a waiting request before it reads that the connection has ended.
        for _ in range(5):
            running = self._executor.activity.running()
            if running is not None and running.id in claimed:
                await self._executor.cancel(running.id, grace_s)
            await asyncio.sleep(0.1)

    # -- the commands of a control connection -----------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """What this worker is and does, as data."""
        running = self._executor.activity.running()
        return {
            "host": platform.node(),
            "pid": os.getpid(),
            "executor_pid": self._executor.pid,
            "executor": self._executor.state,
            "restarts": self._executor.restarts,
            "last_exit": self._executor.last_exit or None,
            "busy": None if running is None else {"id": running.id, "method": running.name, "seconds": running.seconds},
            "uptime_s": time.monotonic() - self._started,
            "masters": len(self._sessions),
            "datasets": dict(zip(("count", "bytes"), self._executor.activity.held, strict=True)),
            "methods": self._executor.methods,
            "lease": self._holder.facts(self._lease) if self._holder else None,
            "python": platform.python_version(),
            "tls": self.encrypts,
            "insecure_plaintext": self.insecure_plaintext,
        }

    async def cancel(self, id: int, grace_s: float = CANCEL_GRACE_S) -> str:
        """End a request that blocks the executor: SIGINT, and after the grace SIGKILL and a new executor.

        Args:
            id: Of the request.
            grace_s: Between the two, in seconds.

        Returns:
            ``"idle"`` when it does not run (if it comes yet, it does not start), ``"interrupted"`` or ``"killed"``.
        """
        return await self._executor.cancel(id, grace_s)

    async def give(self, session: ControlSession, id: int, piece: bytes, last: bool) -> None:
        """Pass on what the executor asked for, from the master that has the worker."""
        if session is self._holder:
            await self._questions.give(id, piece, last)

    async def restart(self, who: str) -> None:
        """Start the executor anew, also one that was given up.

        Args:
            who: Who wants it, for people.
        """
        await self._executor.restart(who)

    def interfere(self, session: ControlSession, doing: str, *, who: str = "", force: bool = False) -> str:
        """Let a session end what runs here, if nobody else's is or it is forced; then its master is told.

        Args:
            session: Whose connection it came over.
            doing: What it does, for people: ``"stopped"`` or ``"restarted"``.
            who: It, for people.
            force: Whether to do so also while another master has the worker.

        Returns:
            Who it was, for people.

        Raises:
            LeaseError: Another master has the worker.
        """
        who = "".join(letter if letter.isprintable() else "?" for letter in str(who)[:100]) or session.who or "somebody"
        holder = self._holder
        if holder is not None and holder is not session:
            if not force and holder.judge() != "dead":
                since = self._lease.holder.since if self._lease.holder else ""
                raise LeaseError(f"in use by {holder.who} since {since}", hint="--force ends that run")
            if doing == "stopped":  # of a restarted executor its end says so
                holder.event("stopped_by", {"by": who})
        self.log(
            f"{doing} by {who}" + (f", while {holder.who} had this worker" if holder not in (None, session) else "")
        )
        return who

    async def preload(self, modules: list[str], *, replace: bool = False) -> dict[str, Any]:
        """Let executors come with modules imported, and wait until they do.

        Args:
            modules: Their full names.
            replace: Whether to start the executor anew for that, if it has not imported them in this way and holds nothing.

        Returns:
            ``reason``, why executors come without; empty if they do. ``replaceable``, whether ``replace`` has or would have an effect.
        """
        if not isinstance(modules, list) or not all(
            isinstance(name, str) and MODULE.fullmatch(name) for name in modules
        ):
            raise TypeError("preload takes a list of names of modules")
        return await self._executor.preload(tuple(modules), replace=replace)


class ControlSession:
    """One control connection: requests of a few commands, answered at once.

    Attributes:
        claimed: The ids of the requests that the same master sends to the executor.
        master: The random bytes by which that master is known; empty if it wants no lease.
        who: That master, for people.
        orphan_grace_s: Between interrupt and kill for what still runs of it when this connection ends.
    """

    def __init__(self, daemon: Daemon, sock: socket.socket) -> None:
        self._daemon = daemon
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self.claimed = range(0)
        self.master = b""
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
        elif frame.name == "claim":
            try:
                result = {"epoch": self._claim(*args, **kwargs)}
            except LeaseError as error:
                self._fail(frame.id, error)
                return
            except (TypeError, ValueError) as error:
                self._fail(frame.id, ProtocolError(f"claim cannot be read: {error}"))
                return
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
        if session and len(session) != SESSION_BYTES:
            raise ValueError(f"a session is {SESSION_BYTES} bytes")
        timing = Timing.of(heartbeat_s, None, dead_after_s) if heartbeat_s and dead_after_s else None
        claimed = range(first_id, first_id + CLAIMED_IDS)
        granted = 0
        if session:
            self.master, self.who = session, str(Holder(session, str(who), str(job)))
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
                result = await self._daemon.cancel(*args, **kwargs)
            elif frame.name == "preload":
                result = await self._daemon.preload(*args, **kwargs)
            elif frame.name == "give":
                await self._daemon.give(self, *args)
            else:
                await self._daemon.restart(self._daemon.interfere(self, "restarted", **kwargs))
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


class Executor:
    """The executor's process, as its daemon sees it.

    Args:
        options: How the worker was started.
        session_dir: Folder that lives as long as the daemon.
        state_dir: Folder for persistent methods and the executor's log.
        on_exit: Called with the facts whenever a process ended that was not told to.
        log: Takes a line for the terminal.
        certificate: File with the worker's own certificate; None when nothing is encrypted.

    Attributes:
        name: Of the process, for ``ps`` and ``top``.
        state: ``"starting"``, ``"ready"`` or ``"failed"`` (it ended too often without serving anybody).
        settled: Set while the state is not ``"starting"``.
        restarts: How often one was started after the first.
        last_exit: How the last one ended; empty before that.
    """

    def __init__(
        self,
        options: Options,
        session_dir: Path,
        state_dir: Path,
        on_exit: Callable[[dict[str, Any]], None],
        log: Callable[[str], None],
        certificate: Path | None = None,
    ) -> None:
        self._options = options
        self.name = executor_name(int(state_dir.name.removeprefix("port-")))
        self._session_dir = session_dir
        self._certificate = certificate
        self._tmp_dir = session_dir / "tmp"
        self._persist_dir = state_dir / "methods"
        self._log_path = state_dir / "executor.log"
        self._on_exit = on_exit
        self._log = log
        self.on_question: Callable[[bytes, int], None] = lambda question, descriptor: os.close(descriptor)
        self._activity_fd = Activity.create()
        self.activity = Activity(self._activity_fd)
        self._process: asyncio.subprocess.Process | Forked | None = None
        self._template = None if options.template_fd is None else Template(socket.socket(fileno=options.template_fd))
        self._replacing = False
        self._channel: socket.socket | None = None
        self._stderr: IO[bytes] | None = None
        self._start_failures = 0
        self._restarted_by = ""
        self._gave_up = ""
        self._served = False
        self._wanted = asyncio.Event()
        self._wanted.set()
        self.state = "starting"
        self.settled = asyncio.Event()
        self.restarts = -1
        self._stopped_s = 0.0
        self.last_exit: dict[str, Any] = {}

    @property
    def given_up(self) -> str:
        """How the last executor ended, if no other one is started; else empty."""
        return f"{self.last_exit['text']}\n{self.last_exit['stderr_tail']}" if self.state == "failed" else ""

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return self._process.pid if self._process else None

    @property
    def methods(self) -> list[str]:
        """Names of the hosted methods, which lie in files."""
        folders = (self._persist_dir, self._session_dir)
        return sorted({path.stem.rpartition("-")[2] for folder in folders for path in folder.glob("*.method")})

    async def keep_running(self) -> None:
        """Start the process, and start another one whenever it ends."""
        while True:
            await self._wanted.wait()
            try:
                await self._start()
                facts = self._facts(await self._wait())
            except OSError as error:  # no memory or no process number left, which may pass
                self._close_channel()
                facts = self._facts(None, f"could not be started: {error.strerror}")
                await asyncio.sleep(START_RETRY_S)
            if self._replacing:
                self._replacing = False
                self.restarts -= 1
                self.activity.clear()
                continue
            self.settled.clear()
            self.last_exit = facts
            self.activity.clear()
            self.state = "starting"
            self._start_failures = 0 if self._served else self._start_failures + 1
            if self._start_failures < MAX_START_FAILURES:
                self._log(f"executor {facts['text']}; starting a new one")
            else:
                self.state = "failed"
                self._wanted.clear()
                self.settled.set()
                self._log(
                    f"executor {facts['text']}, the {MAX_START_FAILURES}th one at its start: given up. "
                    f"Its last words:\n{facts['stderr_tail']}"
                )
            self._on_exit({**facts, "state": self.state})

    async def _start(self) -> None:
        self.restarts += 1
        self._served = False
        # Killed executors leave what they would have removed at their end, TensorFlow's generated code for instance.
        shutil.rmtree(self._tmp_dir, ignore_errors=True)
        self._tmp_dir.mkdir(mode=0o700)
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        # Opened anew for each process: the tail belongs to it alone, and the file cannot grow for ever.
        self._stderr = open(self._log_path, "w+b")  # noqa: SIM115, ASYNC230
        with theirs:
            self._process = await self._fork(theirs) or await self._spawn(theirs)
        settings = json.dumps(
            {
                "name": self.name,
                "tokens": [token.decode() for token in self._options.tokens],
                "session_dir": str(self._session_dir),
                "persist_dir": str(self._persist_dir),
                "max_message_bytes": self._options.max_message_bytes,
                "tls_files": [str(file) if file else None for file in self._tls_files()],
            }
        ).encode()
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):  # it ended already: ``_wait`` says how
            await loop.sock_sendall(self._channel, len(settings).to_bytes(4, "little") + settings)
            if await loop.sock_recv(self._channel, 1):
                loop.add_reader(self._channel.fileno(), self._hear, self._channel)
                self.state = "ready"
                self.settled.set()

    async def _fork(self, channel: socket.socket) -> Forked | None:
        if self._template is None:
            return None
        assert self._stderr is not None
        return await self._template.fork(
            {"TMPDIR": str(self._tmp_dir)},
            *(channel.fileno(), self._activity_fd, STDOUT, self._stderr.fileno()),
        )

    async def _spawn(self, channel: socket.socket) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "ddlf.worker.executor", str(channel.fileno()), str(self._activity_fd)),
            stdin=asyncio.subprocess.DEVNULL,
            stderr=self._stderr,
            pass_fds=(channel.fileno(), self._activity_fd),
            env=child_environment() | {"TMPDIR": str(self._tmp_dir)},
            # An own process group: Ctrl-C in the terminal reaches the daemon alone, and children of user code are killed with it.
            start_new_session=True,
        )

    async def preload(self, modules: tuple[str, ...], *, replace: bool) -> dict[str, Any]:
        """See ``Daemon.preload``."""
        reason = await self._preload(modules)
        await self.settled.wait()
        process = self._process
        has_them = isinstance(process, Forked) and process.modules >= set(modules)
        replaceable = not reason and not has_them and self.state == "ready" and not self.activity.used
        if replace and replaceable and not self._replacing:
            self._replacing, self.state = True, "starting"
            self.settled.clear()
            self._kill_group()
            await self.settled.wait()
        return {"reason": reason, "replaceable": replaceable}

    async def _preload(self, modules: tuple[str, ...]) -> str:
        if not can_fork():
            return "executors are forked on Linux only, and not with DDLF_FORK=0"
        if self._template is not None and self._template.ended:
            self._template.kill()
            self._template = None
        if self._template is None:
            try:
                self._template = Template.start(child_environment())
            except OSError as error:
                return f"no template could be started: {error.strerror}"
        return await self._template.preload(modules)

    def _tls_files(self) -> list[Path | None]:
        """The worker's own certificate, then those of an organisation."""
        security = self._options.security or Security()
        return [self._certificate, security.tls_ca, security.tls_cert, security.tls_key]

    async def _wait(self) -> int:
        assert self._process is not None
        code = await self._process.wait()
        self._kill_group(also_ended=True)  # what user code started
        self._release()
        self._close_channel()
        return code

    def _facts(self, code: int | None, text: str = "") -> dict[str, Any]:
        pid = None if code is None else self.pid
        if code == UNKNOWN:
            code, text = None, "has ended, and so has the process that could say how"
        name = signal.Signals(-code).name if code is not None and code < 0 else None
        tail = self._tail()
        text = text or (f"was ended by {name}" if name else f"ended with exit code {code}")
        hint = ""
        if self._restarted_by:
            text, self._restarted_by = f"was restarted by {self._restarted_by}", ""
            hint = "ask them whether they are done"
        elif self._stopped_s:
            text = f"was stopped (SIGSTOP) for {self._stopped_s:.0f} s, so its daemon ended it"
            hint, self._stopped_s = "find out who stops processes there; to slow one down use its priority", 0.0
        elif self._gave_up:
            text = self._gave_up
            hint = "cancel ends what runs Python code or awaits; let native code work in pieces"
        elif name == "SIGKILL":
            hint = (
                "somebody killed it, or the machine ran out of memory: see dmesg, use smaller batches or fewer workers"
            )
        elif name:
            hint = "the fault is in native code that the method called"
        gave_up, self._gave_up = bool(self._gave_up), ""
        running = self.activity.running()
        return {
            "text": text,
            "pid": pid,
            "exit_code": None if name else code,
            "signal": name,
            "stderr_tail": tail,
            "hint": hint,
            "id": running.id if running else 0,
            "method": running.name if running else "",
            "beside": self.activity.beside,
            "gave_up": gave_up,
        }

    def _tail(self) -> str:
        if self._stderr is None or self._stderr.closed:
            return ""
        with self._stderr as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - STDERR_TAIL_BYTES))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-STDERR_TAIL_LINES:])

    async def hand_over(self, sock: socket.socket, preamble: bytes, deadline: float) -> None:
        """Give a data connection to the executor, as soon as there is one.

        Args:
            sock: The connection; the caller still closes its own descriptor.
            preamble: What was read of it.
            deadline: When its handshake has to be complete, by the monotonic clock, which is the same in both processes.
        """
        while True:
            await self.settled.wait()
            if self.state == "failed" or self._channel is None:
                raise ProtocolError("there is no executor, see above")
            self._served = True
            try:
                socket.send_fds(self._channel, [HAND_OVER.pack(preamble, deadline)], [sock.fileno()])
            except BlockingIOError:
                raise ConnectError("the executor is busy, and too many connections wait for it already") from None
            except (BrokenPipeError, ConnectionResetError):
                self.settled.clear()  # it has ended, which ``keep_running`` is about to learn
            else:
                return

    def grant(self, lease: bytes) -> None:
        """Let the executor run the requests of one master alone, and end the connections of others; of all, if ``lease`` is empty."""
        self.activity.grant(lease)
        if self.state == "ready" and self._channel is not None:
            with contextlib.suppress(OSError):  # it has ended; or so much waits for it that it will look anyway
                self._channel.send(LEASE_CHANGED)

    async def cancel(self, id: int, grace_s: float) -> str:
        """See ``Daemon.cancel``."""
        self.activity.ask_end(id)
        if not self._runs(id):
            return "idle"
        deadline = time.monotonic() + grace_s
        signal_at = 0.0
        while (now := time.monotonic()) < deadline:
            if now >= signal_at and self._process is not None and self._process.returncode is None:
                # Again, but not at once: one signal can be swallowed by an `except:` in the method's loop, and a `finally:` needs its time.
                self._process.send_signal(signal.SIGINT)
                signal_at = now + INTERRUPT_EVERY_S
            await asyncio.sleep(0.02)
            if not self._runs(id):
                return "interrupted"
        running = self.activity.running()
        name = running.name if running is not None else ""
        self._gave_up = f"was ended by its daemon: {name!r} went on for {grace_s:g} s after it was cancelled"
        self._kill_group()
        return "killed"

    def _runs(self, id: int) -> bool:
        running = self.activity.running()
        return running is not None and running.id == id

    async def restart(self, who: str) -> None:
        """Kill the process if there is one and wait for its end; ``keep_running`` starts another.

        Args:
            who: Who wants it, for people.
        """
        if self.state == "failed":
            self.state = "starting"
            self.settled.clear()
        self._start_failures = 0
        self._wanted.set()
        if self._process is not None and self._process.returncode is None:
            self._restarted_by = who
        self._kill_group()
        if self._process is not None:
            await self._process.wait()

    def end_stopped(self, seconds: float) -> None:
        """End a process that is stopped; ``keep_running`` starts another.

        Args:
            seconds: For how long it has been.
        """
        self._stopped_s = seconds
        self._kill_group()

    async def end(self) -> None:
        """End the process for good."""
        self._kill_group()
        if self._process is not None:
            await self._process.wait()
            self._release()
        self._close_channel()
        if self._template is not None:
            await self._template.close()
        if self._stderr is not None:
            self._stderr.close()
        self.activity.close()
        os.close(self._activity_fd)

    def _kill_group(self, *, also_ended: bool = False) -> None:
        # Nothing of the executor's state is worth a farewell, and TensorFlow may ignore SIGTERM. Long after its end the
        # number may be that of somebody else's process.
        if self._process is not None and (also_ended or self._process.returncode is None):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _release(self) -> None:
        if isinstance(self._process, Forked):
            self._process.release()

    def _close_channel(self) -> None:
        if self._channel is not None:
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            self._channel.close()
            self._channel = None

    def _hear(self, channel: socket.socket) -> None:
        """Take a question of the executor, which comes with the socket for the answer."""
        try:
            question, descriptors, _, _ = socket.recv_fds(channel, MAX_QUESTION_BYTES, 1)
        except BlockingIOError:
            return
        except OSError:
            question, descriptors = b"", []
        if not question:  # it has ended
            asyncio.get_running_loop().remove_reader(channel.fileno())
        for descriptor in descriptors:
            self.on_question(question, descriptor)
