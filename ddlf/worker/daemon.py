"""The daemon, the small process of a worker that always answers. Runs on every worker's machine, on one port.

It accepts every connection and reads eight bytes. It then serves a control connection itself, or passes a data
connection's socket to the executor. It imports neither NumPy nor Keras and never runs user code. It therefore answers
while the executor trains, loops forever or holds the GIL. When the executor ends, the daemon reports how, and starts
another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import platform
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ddlf.errors import ConfigError, DDLFError, LeaseError, ProtocolError, VersionError, WorkerLost
from ddlf.rpc.admission import Admission
from ddlf.rpc.connection import Connection
from ddlf.rpc.handshake import HANDSHAKE_TIMEOUT_S, PREAMBLE, Role, is_http, read_preamble, short_answer
from ddlf.rpc.heartbeats import Liveness, Timing, end_when_silent
from ddlf.rpc.listen import (
    accepted,
    answer,
    answer_http,
    close_if_cancelled,
    listening_socket,
    refusal,
    refusal_of_preamble,
)
from ddlf.rpc.messages import CONTROL_LIMITS, Frame, Kind, describe, dumps, loads, read_arguments
from ddlf.rpc.stream import receive_exactly, send_all
from ddlf.rpc.tls import make_certificate, worker_tls
from ddlf.worker.assignment import Assignment
from ddlf.worker.card_watch import CardWatch, Reading
from ddlf.worker.cards import REPAIR
from ddlf.worker.events import NAMES, CardsRead, DaemonEvent, ExecutorExited, LeaseLost, Leaving, StoppedBy
from ddlf.worker.executor_process import CANCEL_GRACE_S, ExecutorProcess, Questions
from ddlf.worker.forwarding import LOOK_S
from ddlf.worker.introduction import Endpoint
from ddlf.worker.joining import Dialled, Join, Joining
from ddlf.worker.lease import MASTER_ID_BYTES, Holder, Lease
from ddlf.worker.lost_cards import remember_lost
from ddlf.worker.machine import addresses_of, cores, cpu_group, footprint, same_machine
from ddlf.worker.options import Options
from ddlf.worker.source import Source, source
from ddlf.worker.status import Busy, DataSets, LeaseStatus, Preloaded, WorkerStatus

FOLDER_PREFIX = "ddlf-"
LOCK = "lock"


class DaemonFolder:
    """A new temporary folder for one daemon: methods, the executor's log and its temporary files. Only this user can
    read it.

    It is removed when the daemon ends. A killed daemon cannot remove it, so each daemon has a lock on a file in its
    folder, which the system releases at its death. The next daemon of the same user removes the folders whose lock is
    free.

    Attributes:
        path: Path of the folder.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        new = self.path / f"{LOCK}.new"
        self._lock = os.open(new, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        new.rename(self.path / LOCK)  # Another daemon may examine the folder only after this line.

    def remove(self) -> None:
        """Remove the folder and its contents."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_abandoned() -> list[Path]:
    """Remove the folders of this user's dead daemons, and return their paths."""
    removed = []
    for path in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):  # the folder was removed already, is in use, or does not belong to a daemon
            facts = path.lstat()
            if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid():
                continue
            lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
            finally:
                os.close(lock)
    return removed


STOP_CHECK_S = 0.5
"""Seconds between two checks whether the executor is stopped."""
CARD_CHECK_S = 0.5
"""Seconds between two checks whether a card is lost."""
CARD_TELL_S = 10.0
"""Seconds between two reports of the state of cards to the master."""


def is_stopped(pid: int) -> bool:
    """Return whether Linux reports that a signal has stopped a process. Return False for a process in a debugger, and
    if the state is unknown.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b") ")[2][:1] == b"T"


class StoppedFor:
    """Measures how long a process has been stopped (SIGSTOP), by repeated checks.

    A computing process and a stopped process look alike: neither answers. Only the system can distinguish them. It
    never reports a healthy process as stopped, so native code may block the executor for any time.
    Time without checks does not count, because then this process was stopped, too.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._pid: int | None = None

    def check(self, pid: int | None) -> float:
        """Check whether a process is stopped, ``STOP_CHECK_S`` after the last check. Return for how many seconds it has
        been.
        """
        stopped = pid is not None and is_stopped(pid)
        self.seconds = self.seconds + STOP_CHECK_S if stopped and pid == self._pid else 0.0
        self._pid = pid
        return self.seconds


ORPHAN_GRACE_S = 30.0
"""Seconds between interrupt and kill for a method of a disconnected master. Nobody waits for this method, and a kill
would lose data that the next master can use.
"""
SILENT_GRACE_S = 30.0
"""Seconds of silence until the daemon disconnects a master. Another master that wants the lease may get it long before.
So a master that was suspended, or that a download or an import blocked, simply continues.
"""
CLAIMED_IDS = 2**32
"""Number of request ids that belong to a master, from the first one that it claims."""
SLOW = ("cancel", "restart", "give", "preload", "machine", "source", "dial")
"""Commands that are not answered at once. ``Control._slow`` carries them out."""
MAX_PROBE_BYTES = 512 * 1024
"""Maximum bytes of the answer to a measurement of the link."""
MAX_QUEUED_BYTES = 1024**2
"""Maximum bytes of answers that a master has not read. Above this limit, the daemon reads no requests of the master
until it has read the answers.
"""


class Control:
    """One control connection from a master to this daemon. It answers a few commands, such as ``status``, at once.

    Args:
        daemon: Carries out the commands.
        sock: An authenticated socket.

    Attributes:
        claimed: The ids of the requests that the same master sends to the executor.
        master_id: The random bytes that identify the master; empty if it wants no lease.
        master_name: Name of the master, for people.
        orphan_grace_s: Seconds between interrupt and kill for its methods that still run when this connection ends.
    """

    def __init__(self, daemon: Daemon, sock: socket.socket) -> None:
        self._daemon = daemon
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self.claimed = range(0)
        self.master_id = b""
        self.master_name = ""
        self.orphan_grace_s = ORPHAN_GRACE_S
        self._liveness: Liveness | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_held_back = False
        self._connection = Connection(sock, self._on_frame, self._on_close, limits=CONTROL_LIMITS)

    def report(self, event: DaemonEvent) -> None:
        """Send an event to the master."""
        with contextlib.suppress(ConnectionError):
            self._connection.send(Kind.EVENT, 0, NAMES[type(event)], dumps(event))

    @property
    def queued_bytes(self) -> int:
        """The number of bytes that wait to be sent to the master, because it has not accepted them yet."""
        return self._connection.queued_bytes

    def close(self) -> None:
        """End this control connection."""
        self._connection.close()

    def hear(self) -> None:
        """Record that the master of this connection is alive, because it has sent something."""
        if self._liveness is not None:
            self._liveness.heard(self._loop.time())

    def judge(self) -> str:
        """Return whether the master is alive. A master that sends no heartbeats always counts as alive."""
        return self._liveness.judge(self._loop.time()) if self._liveness is not None else "alive"

    @property
    def dead_after_s(self) -> float:
        """Seconds that this master waits for a silent worker."""
        return (self._liveness.timing if self._liveness is not None else Timing()).dead_after_s

    def lease_status(self, lease: Lease) -> LeaseStatus:
        """Return the state of this master's lease."""
        silent_s = self._liveness.silent_s(self._loop.time()) if self._liveness is not None else 0.0
        since = lease.holder.since if lease.holder else ""
        return LeaseStatus(
            holder=self.master_name, since=since, epoch=lease.epoch, state=self.judge(), silent_s=silent_s
        )

    def _on_frame(self, frame: Frame) -> None:
        self.hear()
        if self._connection.queued_bytes > MAX_QUEUED_BYTES and not self._is_held_back:
            self._hold_back()
        if frame.kind == Kind.CANCEL:
            return  # its request is answered already, or ends with this connection
        if frame.kind != Kind.REQUEST:
            raise ProtocolError(f"a worker expects requests, not messages of kind {frame.kind}")
        args, kwargs = read_arguments(loads(frame.buffers))
        if frame.name in SLOW:
            self._spawn(self._slow(frame, args, kwargs))
            return
        try:
            result = self._answer_to(frame.name, args, kwargs)
        except (LeaseError, ProtocolError) as error:
            self._fail(frame.id, error)
        except (TypeError, ValueError) as error:
            self._fail(frame.id, ProtocolError(f"{frame.name} cannot be read: {error}"))
        else:
            self._connection.send(Kind.RESULT, frame.id, "", dumps(result))

    def _answer_to(self, command: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        daemon = self._daemon
        match command:
            case "ping":
                return None
            case "status":
                return daemon.status()
            case "addresses":
                return daemon.addresses()
            case "claim":
                return {"epoch": self._claim(*args, **kwargs)}
            case "probe":
                return _probe(*args)
            case "flush":
                return daemon.process.lines.flush()
            case "beat":
                return daemon.hear(args[0] if args else b"")
            case "release":
                return daemon.released(self)
            case "shutdown":
                daemon.interfere(self, "stopped", **kwargs)
                return daemon.stop()
        raise ProtocolError(f"unknown control command {command!r}")

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
        lease.

        Args:
            first_id: The lowest id of the master's requests.
            session: The random bytes that identify the master (``master_id``); empty for a guest, which gets no lease.
            epoch: Epoch of the lease that the master had before; 0 without one.
            takeover: Whether to take the lease from another master.
            who: Name of the master, for people.
            job: Name of the master's program, for people.
            heartbeat_s: Promised seconds between two heartbeats; None for a master that sends none.
            dead_after_s: Longest silence of a living master, in seconds.
        """
        if session and len(session) != MASTER_ID_BYTES:
            raise ValueError(f"a session is {MASTER_ID_BYTES} bytes")
        timing = Timing.of(heartbeat_s, None, dead_after_s) if heartbeat_s and dead_after_s else None
        claimed = range(first_id, first_id + CLAIMED_IDS)
        granted = 0
        if session:
            self.master_id, self.master_name = session, str(Holder(session, str(who), str(job)))
            holder = Holder(session, str(who), str(job), time.strftime("%H:%M"))
            granted = self._daemon.grant(self, holder, int(epoch), bool(takeover))
        self.claimed = claimed
        if timing is not None:
            end_when_silent(self._sock, timing.dead_after_s)
            self._liveness = Liveness(timing, self._loop.time())
            self._check_master()
        return granted

    def _check_master(self) -> None:
        """Watch the master. The daemon disconnects it only after ``SILENT_GRACE_S``, which is much longer than the
        silence that allows another master to take the lease."""
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
        self._timer = self._loop.call_later(self._liveness.next_look_s(now), self._check_master)

    async def _slow(self, frame: Frame, args: list[Any], kwargs: dict[str, Any]) -> None:
        try:
            daemon = self._daemon
            result: Any = None
            match frame.name:
                case "cancel":
                    result = await daemon.process.cancel(*args, **kwargs)
                case "preload":
                    result = await daemon.preload(*args, **kwargs)
                case "machine":
                    result = await daemon.machine(*args)
                case "source":
                    result = (await daemon.source())._asdict()
                case "dial":
                    result = await daemon.dial(self, *args, **kwargs)
                case "give":
                    await daemon.give(self, *args)
                case "restart":
                    await daemon.process.restart(daemon.interfere(self, "restarted", **kwargs))
            self._connection.send(Kind.RESULT, frame.id, "", dumps(result))
        except ConnectionError:
            return
        except Exception as error:
            self._fail(frame.id, error)

    def _fail(self, id: int, error: Exception) -> None:
        with contextlib.suppress(ConnectionError):
            self._connection.send(Kind.ERROR, id, "", dumps(describe(error)))

    def _hold_back(self) -> None:
        self._is_held_back = True
        self._connection.pause_reading()
        self._spawn(self._wait_for_reader())

    async def _wait_for_reader(self) -> None:
        """Read requests again after the master has read the answers. A master that never reads them counts as silent,
        and the daemon disconnects it for this reason.
        """
        with contextlib.suppress(ConnectionError):
            await self._connection.drain()
        self._is_held_back = False
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
    """Answer a measurement of the link: receive some bytes, and return ``size`` bytes with the time of this machine's
    clock.
    """
    if not 0 <= size <= MAX_PROBE_BYTES:
        raise ValueError(f"size must be 0-{MAX_PROBE_BYTES}")
    return {"time": time.time(), "data": bytes(size)}


MODULE = re.compile(r"\w+(\.\w+)*")
NO_DESCRIPTORS_S = 0.1
"""Pause in seconds before the daemon accepts connections again, after this process had no file descriptor for them."""


class Daemon:
    """The daemon of one worker.

    Args:
        options: How the worker was started.
        log: Prints each line about a problem, for the person at the terminal.
        say: Prints each other line.

    Attributes:
        process: The executor's process.
        assignment: The worker's cards.
        host, port: Where the worker listens; empty and 0 without a port.
        is_leaving: Whether the worker has announced its end to its master.
        end_error: Why the worker ended by itself: no master that it could join, or a lost card. None otherwise.
    """

    def __init__(
        self,
        options: Options,
        log: Callable[[str], None] = lambda line: None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._options = options
        self._print = log
        self._say = say
        self._listener = None if options.port is None else listening_socket(options.host, options.port)
        self.host, self.port = "", 0
        if self._listener is not None:
            self.host, self.port = self._listener.getsockname()[:2]
        self._folder = DaemonFolder()
        remove_abandoned()
        try:
            self.assignment = Assignment.take(options.gpus)
            state_dir = self._make_state_dir()
            self._certificate = certificate = self._make_certificate()
            self._encryption = worker_tls(certificate, options.security) if certificate and options.security else None
        except (OSError, ConfigError) as error:
            self._stop_listening()
            self._folder.remove()
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"the state folder {options.state_dir} cannot be used: {error.strerror}",
                hint="choose another with --state-dir",
            ) from None
        self.process = self._make_process(state_dir)
        self._card_watch = CardWatch(self.assignment.cards) if self.assignment.cards else None
        self._controls: set[Control] = set()
        self._questions = Questions()
        self.process.on_question = lambda question, descriptor: self._questions.put(
            question, descriptor, self._holder.report if self._holder else None
        )
        self.process.lines.master = lambda: self._holder
        self._lease = Lease()
        self._holder: Control | None = None
        self.is_leaving = False
        self._written_for = b""  # the master that gets the output of user code
        self._admission = Admission(self.log, lambda: len(self._controls))
        self._orphans: set[asyncio.Task[None]] = set()
        self._dialled = Dialled(options.tokens, self._greet)
        self._started = time.monotonic()
        self._stop = asyncio.Event()
        self.end_error: DDLFError | None = None

    def log(self, line: str) -> None:
        """Tell the person at the terminal, and the master, about a problem."""
        self._print(line)
        self.process.lines.log(f"ddlf-worker: {line}")

    def _make_process(self, state_dir: Path) -> ExecutorProcess:
        return ExecutorProcess(
            self._options,
            self._folder.path,
            state_dir,
            self._announce,
            self.log,
            self._certificate,
            self.assignment.environment(),
        )

    def _make_state_dir(self) -> Path:
        """Create and return the folder of this worker's state. Its name contains the port, or the place of a worker that
        joins, since a restarted worker has the same.
        """
        join = self._options.join
        name = f"port-{self.port}" if self._listener or join is None else f"place-{join.place_name}"
        folder = (self._options.state_dir or self._folder.path) / name
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return folder

    def _make_certificate(self) -> Path | None:
        """Return the file with this worker's own certificate; None if the worker does not encrypt. The first start
        creates the file.
        """
        security = self._options.security
        if security is None or security.insecure_plaintext:
            return None
        path = (self._options.state_dir or self._folder.path) / "certificate.pem"
        if security.tls_cert is None:
            make_certificate(path)
        return path

    @property
    def encrypts(self) -> bool:
        """Whether this worker can encrypt, so that other machines can connect with TLS."""
        return self._encryption is not None

    @property
    def insecure_plaintext(self) -> bool:
        """Whether other machines can connect without TLS."""
        return self._options.security is not None and self._options.security.insecure_plaintext

    async def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Run the daemon: serve connections and keep an executor running, until ``stop`` is called.

        Args:
            ready: Called once, when the executor has started or has finally failed to start.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                forever = (
                    self.process.keep_running(),
                    self._accept(),
                    self._join(),
                    self._end_stopped_executors(),
                    self._forward_native_output(),
                    self._watch_cards(),
                    self.source(),  # now, because somebody may edit the files later
                )
                running = [tasks.create_task(coroutine) for coroutine in forever]
                waiting = tasks.create_task(self.process.settled.wait())
                waiting.add_done_callback(lambda task: None if task.cancelled() else ready())
                await self._stop.wait()
                for task in (*running, waiting, *self._admission.tasks, *self._orphans):
                    task.cancel()
        finally:
            self._stop_listening()
            self._dialled.end()
            for control in list(self._controls):
                control.close()
            await self.process.end()
            if self._card_watch is not None:
                self._card_watch.stop()
            self.assignment.release()
            self._folder.remove()

    async def _end_stopped_executors(self) -> None:
        """End an executor that was stopped (SIGSTOP) for longer than a master waits for a silent machine. Another
        executor replaces it.
        """
        stopped = StoppedFor()
        while True:
            await asyncio.sleep(STOP_CHECK_S)
            if self._holder is None:
                continue  # nobody waits for the result
            seconds = stopped.check(self.process.pid)
            if seconds >= self._holder.dead_after_s:
                self.process.end_stopped(seconds)

    async def _forward_native_output(self) -> None:
        """Send the output of native code to the master. No event reports that a file has grown."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.process.lines.look_at_native()

    async def _watch_cards(self) -> None:
        """End this worker if one of its cards is lost, so that other workers compute its slots. A worker without cards
        watches nothing.
        """
        if self._card_watch is None:
            return
        for sentence in await asyncio.to_thread(self.assignment.avoided):
            self.log(sentence)
        self._card_watch.start()
        told_at, problem = 0.0, ""
        while (loss := self._card_watch.loss(self._holder.dead_after_s if self._holder else None)) is None:
            if self._holder is not None and self._card_watch.readings and time.monotonic() - told_at >= CARD_TELL_S:
                told_at = time.monotonic()
                self._holder.report(CardsRead(cards=self._readings()))
            if self._card_watch.problem != problem:
                problem = self._card_watch.problem
                self.log(problem or "NVML reads the cards again")
            await asyncio.sleep(CARD_CHECK_S)
        await asyncio.to_thread(remember_lost, loss.card.uuid, loss.reason)
        self.log(f"{loss}; this worker ends")
        if self._holder is not None:
            self._holder.report(StoppedBy(by=f"its daemon, because {loss}", lost_card=str(loss), hint=REPAIR))
        self.end_error = WorkerLost(str(loss), hint=f"{REPAIR}; a new worker takes another card")
        self._stop.set()

    def _readings(self) -> list[Reading]:
        """Return the newest readings of the worker's cards."""
        return [] if self._card_watch is None else list(self._card_watch.readings)

    @property
    def failure(self) -> str:
        """Return the reason why the daemon has no executor and starts no new one; empty if the executor runs."""
        return self.process.given_up

    def leave(self, by: str, within_s: float) -> None:
        """End soon: tell the master that has this worker, and end when the master needs nothing more from it, or after
        the time. Without a master, end at once.

        Args:
            by: The person or signal that ends it.
            within_s: Seconds that are left.
        """
        if self._holder is None:
            self.stop(by)
            return
        self.is_leaving = True
        self._holder.report(Leaving(by=by, within_s=within_s))
        asyncio.get_running_loop().call_later(within_s, self.stop, by)

    def released(self, control: Control) -> None:
        """End, because the master needs nothing more from this worker, which is leaving."""
        if control is self._holder and self.is_leaving:
            self._stop.set()

    def stop(self, by: str = "") -> None:
        """Make ``run`` return, so that the daemon ends.

        Args:
            by: The person or signal that ended it. The master that has this worker receives this text, and need not
                search for the reason.
        """
        if by and self._holder is not None:
            self._holder.report(StoppedBy(by=by, hint="start it there again"))
        self._stop.set()

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()

    async def _join(self) -> None:
        """Connect to masters, if this worker was started with ``--join``. End the worker when no master comes, or when
        the run is over.
        """
        join = self._options.join
        if join is None:
            return
        await self.process.settled.wait()  # a master that finds this worker can use it at once
        joining = Joining(join, self._options.tokens[0], self._greet, lambda: bool(self._controls), self._say)
        self.end_error = await joining.run()
        self._stop.set()

    async def _accept(self) -> None:
        while self._listener is not None:
            try:
                sock, address = await accepted(self._listener)
            except OSError as error:  # no descriptors left: open connections continue, new ones wait in the kernel
                self._admission.log_refusal("a connection", f"cannot accept it: {error.strerror}")
                await asyncio.sleep(NO_DESCRIPTORS_S)
                continue
            greeting = self._admission.start(self._greet(sock, address[0]), address[0])
            greeting.add_done_callback(partial(close_if_cancelled, sock))
            await asyncio.sleep(0)  # lets other tasks run even if connections arrive without a pause

    async def _greet(self, sock: socket.socket, address: str) -> None:
        """Perform the handshake of a new connection. No bytes are parsed before it has succeeded."""
        is_owned = True
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
                if role is not Role.JOIN and (
                    reason := refusal_of_preamble(
                        sock, preamble, encrypts=self.encrypts, insecure_plaintext=self.insecure_plaintext
                    )
                ):
                    await send_all(sock, short_answer(tls=self.encrypts))
                    raise ProtocolError(reason)
                if role is not Role.CONTROL:
                    await self.process.hand_over(sock, preamble, deadline)
                    return
                sock, _ = await answer(
                    sock,
                    preamble,
                    self._options.tokens,
                    self._options.max_message_bytes,
                    self._encryption,
                    has_place=lambda: self._admission.has_place,
                )
            self._controls.add(Control(self, sock))
            is_owned = False
        except (DDLFError, OSError) as error:
            if is_http(preamble):
                answer_http(sock)
            self._admission.log_refusal(address, refusal(error, HANDSHAKE_TIMEOUT_S))
        finally:
            if is_owned:
                sock.close()

    def _announce(self, end: ExecutorExited) -> None:
        for control in list(self._controls):
            control.report(end)

    def drop(self, control: Control) -> None:
        """Forget a closed connection. Free its lease, and end the running requests of its master."""
        self._controls.discard(control)
        if control is self._holder:
            self._holder = None
            if self.is_leaving:
                self._stop.set()
            self._questions.end()
            self._dialled.end()
            self._lease.release()
            self.process.grant(b"")
        if control.claimed and not self._stop.is_set():
            task = asyncio.get_running_loop().create_task(self._end_orphans(control.claimed, control.orphan_grace_s))
            self._orphans.add(task)
            task.add_done_callback(self._orphans.discard)

    def grant(self, control: Control, master: Holder, known_epoch: int, takeover: bool) -> int:
        """Give the worker to a master.

        Returns:
            The epoch of the lease.

        Raises:
            LeaseError: Another master has the worker, or has had it since this master did.
        """
        former = self._holder
        silent = former is not None and former.judge() == "dead"
        epoch = self._lease.claim(master, known_epoch, takeover=takeover, silent=silent)
        self._holder = control
        if former is not control:
            self._questions.end()
            self._dialled.end()
            if self._written_for not in (b"", master.master_id):  # the first master gets the earlier lines
                self.process.lines.forget()
            self._written_for = master.master_id
            self.process.lines.wake()
        self.process.grant(self._lease.key)
        if former is not None and former is not control:
            if former.master_id != master.master_id:
                former.report(LeaseLost(by=str(master), since=master.since, epoch=epoch))
                former.orphan_grace_s = CANCEL_GRACE_S  # a master waits now
                self.log(f"{master} takes over from {former.master_name}")
            former.close()
        return epoch

    def hear(self, master_id: bytes) -> None:
        """Record that the master with this id is alive, because another of its connections reports it."""
        if self._holder is not None and self._holder.master_id == master_id:
            self._holder.hear()

    async def _end_orphans(self, claimed: range, grace_s: float) -> None:
        # Try a few times: the executor may start a waiting request before it notices the end of the connection.
        for _ in range(5):
            running = self.process.activity.running()
            if running is not None and running.id in claimed:
                await self.process.cancel(running.id, grace_s)
            await asyncio.sleep(0.1)

    # -- the commands of a control connection -----------------------------------------------------------------------

    def status(self) -> WorkerStatus:
        """Return the state of this worker."""
        activity = self.process.activity
        running = activity.running()
        return WorkerStatus(
            host=platform.node(),
            pid=os.getpid(),
            executor_pid=self.process.pid,
            executor=self.process.state,
            restarts=self.process.restarts,
            last_exit=self.process.last_exit,
            busy=None if running is None else Busy(running.id, running.name, running.seconds),
            uptime_s=time.monotonic() - self._started,
            cores=cores(),
            gpus=self.assignment.described(),
            gpu_uuids=[card.uuid for card in self.assignment.cards],
            cards=self._readings(),
            memory=footprint(os.getpid(), self.process.pid),
            masters=sum(1 for control in self._controls if control.claimed),  # leave out the listening sockets
            datasets=DataSets(*activity.datasets),
            shard=activity.shard,
            part=activity.part,
            methods=self.process.methods,
            lease=self._holder.lease_status(self._lease) if self._holder else None,
            python=platform.python_version(),
            tls=self.encrypts,
            insecure_plaintext=self.insecure_plaintext,
        )

    def addresses(self) -> Endpoint:
        """Return where other workers can call this worker."""
        advertise = self._options.advertise
        return Endpoint(
            machine=same_machine(),
            port=self.port,
            advertised=(advertise[0], advertise[1] or self.port) if advertise else None,
            addresses=addresses_of(self.host) if self._listener is not None else [],
            cpus=cpu_group(),
        )

    async def machine(self, needs: Sequence[str] = ()) -> dict[str, Any]:
        """Return a description of this machine and its installed packages, as data. A thread collects it, because the
        disk may be slow or remote.
        """
        from ddlf.worker.machine import machine_facts

        folders = [self._folder.path, *([self._options.state_dir] if self._options.state_dir else [])]
        return await asyncio.to_thread(machine_facts, folders, list(map(str, needs)))

    async def source(self) -> Source:
        """Return the source of DDLF that this process had at its start."""
        return await asyncio.to_thread(source)

    async def dial(self, control: Control, addresses: list[list[Any]], me: int, number: int) -> str:
        """Offer connections to another worker of the run, which may call this worker, and cannot dial it.

        Args:
            control: The connection of the master, which has this worker.
            addresses: Hosts and ports where this worker may reach the other one.
            me: Number of this worker in the cluster.
            number: The number that the other worker expects; see ``offer_number``.

        Returns:
            Why the other worker was not reached; empty if it was.

        Raises:
            LeaseError: The caller is not the master that has this worker.
        """
        if control is not self._holder:
            raise LeaseError("only the master with the lease can have this worker dial others")
        targets = tuple((str(host), int(port)) for host, port, *_ in addresses)
        return await self._dialled.begin(Join(targets, int(me), int(number), for_s=0.0))

    async def give(self, control: Control, id: int, piece: bytes, last: bool) -> None:
        """Pass the master's answer to a question of the executor, such as for a module to import, on to the executor.
        Ignore answers of masters that do not have the worker.
        """
        if control is self._holder:
            await self._questions.give(id, piece, last)

    def interfere(self, control: Control, doing: str, *, who: str = "", force: bool = False) -> str:
        """Check that a connection may stop or restart the work on this worker, and log it. A stop is also reported to
        the master that has the worker.

        Args:
            control: The connection that asked for it.
            doing: The action, for people: ``"stopped"`` or ``"restarted"``.
            who: Name of the other side, for people.
            force: Whether to do it even if another master has the worker.

        Returns:
            The name of the other side, for people.

        Raises:
            LeaseError: Another master has the worker, and ``force`` is false.
        """
        requester = (
            "".join(letter if letter.isprintable() else "?" for letter in str(who)[:100])
            or control.master_name
            or "somebody"
        )
        holder = self._holder
        if holder is not None and holder is not control:
            if not force and holder.judge() != "dead":
                since = self._lease.holder.since if self._lease.holder else ""
                raise LeaseError(f"in use by {holder.master_name} since {since}", hint="--force ends that run")
            if doing == "stopped":  # a restarted executor reports its own end
                holder.report(StoppedBy(by=requester))
        self.log(
            f"{doing} by {requester}"
            + (f", while {holder.master_name} had this worker" if holder not in (None, control) else "")
        )
        return requester

    async def preload(self, modules: list[str], *, replace: bool = False) -> Preloaded:
        """Let the executors that start from now on have these modules imported already, and wait until this is
        possible.

        Args:
            modules: Full names of the modules.
            replace: Whether to replace the present executor if it started without these modules and has no state to
                lose.

        """
        if not isinstance(modules, list) or not all(
            isinstance(name, str) and MODULE.fullmatch(name) for name in modules
        ):
            raise TypeError("preload takes a list of names of modules")
        return await self.process.preload(tuple(modules), replace=replace)
