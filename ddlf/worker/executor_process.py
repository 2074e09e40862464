"""The executor's process as its daemon sees it. The daemon restarts it whenever it ends, passes it connections, and
interrupts or kills it.

Runs in the daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

from ddlf.errors import ConnectError, ProtocolError
from ddlf.rpc.tls import Security
from ddlf.worker.activity import Activity
from ddlf.worker.events import DaemonEvent, ExecutorExited, Wanted
from ddlf.worker.forwarding import Forwarding
from ddlf.worker.options import ExecutorOptions
from ddlf.worker.output_capture import LINES
from ddlf.worker.process import UNKNOWN, Forked, Forks, child_environment, executor_name
from ddlf.worker.status import Preloaded

if TYPE_CHECKING:
    from ddlf.worker.options import Options


class Reason(NamedTuple):
    """Why a process ended, for people.

    Args:
        text: The event that ended the process.
        hint: Advice.
        gave_up: Whether the daemon ended the process after a ``cancel``.
    """

    text: str
    hint: str = ""
    gave_up: bool = False


def reason_of(code: int | None, name: str | None) -> Reason:
    """Return the reason for the end of a process, derived only from its exit code or the name of the signal."""
    if code == UNKNOWN:
        return Reason("has ended for an unknown reason, because the process that started it has ended, too")
    if name == "SIGKILL":
        return Reason(
            f"was ended by {name}",
            "somebody killed it, or the machine ran out of memory: see dmesg, use smaller batches or fewer workers",
        )
    if name:
        return Reason(f"was ended by {name}", "the fault is in native code that the method called")
    return Reason(f"ended with exit code {code}")


MAX_QUESTION_BYTES = 4096


class Questions:
    """The executor's open questions during imports. The daemon passes them to the master and does not interpret them.

    Each arrives with a socket for its answer. If the socket ends without data, there is no answer.
    """

    def __init__(self) -> None:
        self._open: dict[int, socket.socket] = {}
        self._ids = itertools.count(1)

    def put(self, question: bytes, descriptor: int, report: Callable[[DaemonEvent], None] | None) -> None:
        """Send a question of the executor, such as for a module to import, to the master.

        Args:
            question: ``[what, name, file]`` in JSON.
            descriptor: Descriptor of the socket.
            report: Sends an event to the master that has the worker; None if no master has it.
        """
        sock = socket.socket(fileno=descriptor)
        sock.setblocking(False)
        try:
            kind, name, file = json.loads(question)
        except ValueError:
            report = None
        if report is None:
            sock.close()
            return
        id = next(self._ids)
        self._open[id] = sock
        report(Wanted(id=id, kind=str(kind), name=str(name), file=str(file)))

    async def give(self, id: int, piece: bytes, is_last: bool) -> None:
        """Pass a part of the answer to the executor. The thread that asked may have ended."""
        sock = self._open.get(id)
        if sock is None:
            return
        try:
            await asyncio.get_running_loop().sock_sendall(sock, piece)
        except OSError:
            is_last = True
        if is_last and self._open.pop(id, None) is not None:
            sock.close()

    def end(self) -> None:
        """End all questions without an answer, because the master is gone."""
        for sock in self._open.values():
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # this also ends an answer that is being sent
            sock.close()
        self._open.clear()


HAND_OVER = struct.Struct("<8sd")
"""The message that accompanies a socket to the executor: its preamble, and the deadline of its handshake."""
LEASE_CHANGED = b"LEASE".ljust(HAND_OVER.size)
"""Tells the executor to read from its page which master may call it."""
CANCEL_GRACE_S = 5.0
"""Seconds between interrupt and kill for a cancelled method."""
MAX_START_FAILURES = 5
"""Maximum number of executors in a row that end before they serve a connection. After that, the daemon starts no other
executor until a master requests one.
"""
START_RETRY_S = 0.5
INTERRUPT_EVERY_S = 0.5
STDOUT = 1
STDERR_TAIL_BYTES = 8192
STDERR_TAIL_LINES = 40
"""Number of the last lines of standard error in a report. A fatal error in native code prints its kind first, then the
stack: about 30 lines in all."""


class ExecutorProcess:
    """The executor's process, as its daemon sees it.

    Args:
        options: How the worker was started.
        session_dir: Folder that lives as long as the daemon.
        state_dir: Folder for persistent methods and the executor's log.
        on_exit: Called with the facts whenever a process ended unexpectedly.
        log: Receives each line for the terminal.
        certificate: File with the worker's own certificate; None if the worker does not encrypt.
        environment: More environment variables of the process, such as the mask of its cards.

    Attributes:
        name: Name of the process, for ``ps`` and ``top``.
        state: ``"starting"``, ``"ready"`` or ``"failed"`` (it ended too often without serving a connection).
        settled: Set while the state is not ``"starting"``.
        restarts: Number of starts after the first.
        last_exit: How the last executor ended; None before the first end.
        lines: Forwards the output of user code to the master.
    """

    def __init__(
        self,
        options: Options,
        session_dir: Path,
        state_dir: Path,
        on_exit: Callable[[ExecutorExited], None],
        log: Callable[[str], None],
        certificate: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._options = options
        self.name = executor_name(state_dir.name.removeprefix("port-").replace("place-", "p")[:6])
        self._session_dir = session_dir
        self._certificate = certificate
        self._tmp_dir = session_dir / "tmp"
        self._environment = {"TMPDIR": str(self._tmp_dir), **(environment or {})}
        self._persist_dir = state_dir / "methods"
        self._log_path = state_dir / "executor.log"  # what native code writes, and Python before and after user code
        self._prints_path = state_dir / "prints.log"  # what user code writes
        self._on_exit = on_exit
        self._log = log
        self.on_question: Callable[[bytes, int], None] = lambda question, descriptor: os.close(descriptor)
        self._activity_fd = Activity.create()
        self.activity = Activity(self._activity_fd)
        self.lines = Forwarding(self.activity, options.tokens)
        self._process: asyncio.subprocess.Process | Forked | None = None
        self._forks = Forks(options.template_fd)
        self._is_replacing = False
        self._channel: socket.socket | None = None
        self._stderr: IO[bytes] | None = None
        self._start_failures = 0
        self._reason: Reason | None = None
        self._has_served = False
        self._may_start = asyncio.Event()
        self._may_start.set()
        self.state = "starting"
        self.settled = asyncio.Event()
        self.restarts = -1
        self.last_exit: ExecutorExited | None = None

    @property
    def given_up(self) -> str:
        """Return how the last executor ended, if the daemon starts no other one; otherwise an empty text."""
        if self.state != "failed" or self.last_exit is None:
            return ""
        return f"{self.last_exit.text}\n{self.last_exit.stderr_tail}"

    @property
    def pid(self) -> int | None:
        """The process id, while there is a process."""
        return self._process.pid if self._process else None

    @property
    def methods(self) -> list[str]:
        """The names of the methods that the worker hosts, from their files."""
        folders = (self._persist_dir, self._session_dir)
        return sorted({path.stem.rpartition("-")[2] for folder in folders for path in folder.glob("*.method")})

    async def keep_running(self) -> None:
        """Start the process, and start another one whenever it ends."""
        while True:
            await self._may_start.wait()
            try:
                await self._start()
                end = self._exited(await self._wait(), self.pid)
            except OSError as error:  # no memory or no process number is free, which may be temporary
                self._close_channel()
                self._reason = Reason(f"could not be started: {error.strerror}")
                end = self._exited(None, None)
                await asyncio.sleep(START_RETRY_S)
            if self._is_replacing:
                self._is_replacing = False
                self.restarts -= 1
                self.activity.clear()
                continue
            self.settled.clear()
            self.activity.clear()
            self.state = "starting"
            self._start_failures = 0 if self._has_served else self._start_failures + 1
            if self._start_failures < MAX_START_FAILURES:
                self._log(f"executor {end.text}; starting a new one")
            else:
                self.state = "failed"
                self._may_start.clear()
                self.settled.set()
                self._log(
                    f"executor {end.text}; {MAX_START_FAILURES} executors in a row ended at their start, so no other one "
                    f"is started. Its last output:\n{end.stderr_tail}"
                )
            self.last_exit = replace(end, state=self.state)
            self._on_exit(self.last_exit)

    async def _start(self) -> None:
        self.restarts += 1
        self._has_served = False
        # Killed executors leave temporary files, such as TensorFlow's generated code.
        shutil.rmtree(self._tmp_dir, ignore_errors=True)
        self._tmp_dir.mkdir(mode=0o700)
        self._channel, executor_end = socket.socketpair()
        self._channel.setblocking(False)
        # Opened again for each process, so that the tail belongs to it alone and the file cannot grow without limit.
        self._stderr = open(self._log_path, "w+b")  # noqa: SIM115, ASYNC230
        self._prints_path.write_bytes(b"")
        self.lines.watch(self._stderr)
        with executor_end:
            stdout = STDOUT if self._options.shows_native else self._stderr.fileno()
            descriptors = executor_end.fileno(), self._activity_fd, stdout, self._stderr.fileno()
            self._process = await self._forks.fork(self._environment, *descriptors) or await self._spawn(executor_end)
        security = self._options.security or Security()
        settings = ExecutorOptions(
            name=self.name,
            tokens=tuple(token.decode() for token in self._options.tokens),
            session_dir=str(self._session_dir),
            persist_dir=str(self._persist_dir),
            max_message_bytes=self._options.max_message_bytes,
            prints=str(self._prints_path),
            shows_prints=self._options.shows_prints,
            certificate=_text(self._certificate),
            tls_ca=_text(security.tls_ca),
            tls_cert=_text(security.tls_cert),
            tls_key=_text(security.tls_key),
            insecure_plaintext=security.insecure_plaintext,
        ).to_bytes()
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):  # it has already ended: ``_wait`` reports how
            await loop.sock_sendall(self._channel, len(settings).to_bytes(4, "little") + settings)
            if await loop.sock_recv(self._channel, 1):
                loop.add_reader(self._channel.fileno(), self._hear, self._channel)
                self.state = "ready"
                self.settled.set()

    async def _spawn(self, channel: socket.socket) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "ddlf.worker.executor", str(channel.fileno()), str(self._activity_fd)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=None if self._options.shows_native else self._stderr,
            stderr=self._stderr,
            pass_fds=(channel.fileno(), self._activity_fd),
            env=child_environment() | self._environment,
            # Its own process group: Ctrl-C in the terminal reaches only the daemon, and a kill includes the children of
            # user code.
            start_new_session=True,
        )

    async def preload(self, modules: tuple[str, ...], *, replace: bool) -> Preloaded:
        reason = await self._forks.preload(modules)
        await self.settled.wait()
        process = self._process
        has_them = isinstance(process, Forked) and process.modules >= set(modules)
        replaceable = not reason and not has_them and self.state == "ready" and not self.activity.used
        if replace and replaceable and not self._is_replacing:
            self._is_replacing, self.state = True, "starting"
            self.settled.clear()
            self._kill_group()
            await self.settled.wait()
        return Preloaded(reason=reason, replaceable=replaceable)

    async def _wait(self) -> int:
        assert self._process is not None
        code = await self._process.wait()
        self.lines.end()
        self._kill_group(also_ended=True)  # the processes that user code started
        if isinstance(self._process, Forked):
            self._process.release()
        self._close_channel()
        return code

    def _exited(self, code: int | None, pid: int | None) -> ExecutorExited:
        """Return how the executor's process ended."""
        name = signal.Signals(-code).name if code is not None and code < 0 else None
        reason, self._reason = self._reason or reason_of(code, name), None
        running = self.activity.running()
        return ExecutorExited(
            text=reason.text,
            hint=reason.hint,
            pid=pid,
            exit_code=None if name or code == UNKNOWN else code,
            signal=name,
            stderr_tail=self._tail(),
            begun=self.activity.begun,
            method=running.name if running else "",
            beside=self.activity.beside,
            gave_up=reason.gave_up,
        )

    def _tail(self) -> str:
        if self._stderr is None or self._stderr.closed:
            return ""
        self._stderr.close()
        # The file that was written last has the reason of the end, such as the stack of a fatal error.
        with contextlib.suppress(OSError):
            paths = sorted((self._log_path, self._prints_path), key=lambda path: path.stat().st_mtime_ns)
            return "\n".join([line for path in paths for line in _last_lines(path)][-STDERR_TAIL_LINES:])
        return ""

    async def hand_over(self, sock: socket.socket, preamble: bytes, deadline: float) -> None:
        """Pass a data connection to the executor, as soon as one is ready.

        Args:
            sock: The connection. The caller still closes its own descriptor.
            preamble: The bytes that were read from it.
            deadline: Deadline of its handshake, on the monotonic clock, which is the same in both processes.
        """
        while True:
            await self.settled.wait()
            if self.state == "failed" or self._channel is None:
                raise ProtocolError("there is no executor, see above")
            self._has_served = True
            try:
                socket.send_fds(self._channel, [HAND_OVER.pack(preamble, deadline)], [sock.fileno()])
            except BlockingIOError:
                raise ConnectError("the executor is busy, and too many connections are waiting for it") from None
            except (BrokenPipeError, ConnectionResetError):
                self.settled.clear()  # the executor has ended, which ``keep_running`` will soon notice
            else:
                return

    def grant(self, lease: bytes) -> None:
        """Let the executor run only the requests of this lease, and end the connections of other masters. With an empty
        key, end all connections.
        """
        self.activity.grant(lease)
        if self.state == "ready" and self._channel is not None:
            # the executor has ended, or reads the page soon because many messages wait for it
            with contextlib.suppress(OSError):
                self._channel.send(LEASE_CHANGED)

    async def cancel(self, id: int, grace_s: float = CANCEL_GRACE_S) -> str:
        """End a request that blocks the executor. Send SIGINT, and after ``grace_s`` seconds SIGKILL, which leads to a
        new executor.

        Returns:
            ``"idle"`` if the request does not run (it will not start later, either), ``"interrupted"`` or ``"killed"``.
        """
        self.activity.ask_end(id)
        if not self._runs(id):
            return "idle"
        deadline = time.monotonic() + grace_s
        signal_at = 0.0
        while (now := time.monotonic()) < deadline:
            if now >= signal_at and self._process is not None and self._process.returncode is None:
                # Repeat the signal, but not at once. An `except:` in the method's loop can swallow one signal, and a
                # `finally:` needs its time.
                self._process.send_signal(signal.SIGINT)
                signal_at = now + INTERRUPT_EVERY_S
            await asyncio.sleep(0.02)
            if not self._runs(id):
                return "interrupted"
        running = self.activity.running()
        name = running.name if running is not None else ""
        self._reason = Reason(
            f"was ended by its daemon: {name!r} continued for {grace_s:g} s after it was cancelled",
            "a cancellation ends only Python code and awaits, so split long native calls",
            gave_up=True,
        )
        self._kill_group()
        return "killed"

    def _runs(self, id: int) -> bool:
        running = self.activity.running()
        return running is not None and running.id == id

    async def restart(self, requester: str) -> None:
        """Kill the process if there is one, and wait for its end. ``keep_running`` starts another one, even after a
        failure.

        Args:
            requester: The person or process that wants it, for people.
        """
        if self.state == "failed":
            self.state = "starting"
            self.settled.clear()
        self._start_failures = 0
        self._may_start.set()
        if self._process is not None and self._process.returncode is None:
            self._reason = Reason(f"was restarted by {requester}", "ask that user whether they have finished")
        self._kill_group()
        if self._process is not None:
            await self._process.wait()

    def end_stopped(self, seconds: float) -> None:
        """End a stopped process. ``keep_running`` starts another one.

        Args:
            seconds: How long it has been stopped.
        """
        self._reason = Reason(
            f"was stopped (SIGSTOP) for {seconds:.0f} s, so its daemon ended it",
            "find out what stops processes on that machine; to slow a process down, lower its priority",
        )
        self._kill_group()

    async def end(self) -> None:
        """End the executor's process, and start no other one."""
        self._kill_group()
        if self._process is not None:
            await self._process.wait()
        if isinstance(self._process, Forked):
            self._process.release()
        self.lines.end()
        self._close_channel()
        await self._forks.close()
        if self._stderr is not None:
            self._stderr.close()
        self.activity.close()
        os.close(self._activity_fd)

    def _kill_group(self, *, also_ended: bool = False) -> None:
        # A graceful end would save no useful state, and TensorFlow may ignore SIGTERM. Long after the end of the
        # process, its number may belong to another user's process.
        if self._process is not None and (also_ended or self._process.returncode is None):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _close_channel(self) -> None:
        if self._channel is not None:
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            self._channel.close()
            self._channel = None

    def _hear(self, channel: socket.socket) -> None:
        """Receive a question that the executor asks its master. It arrives with the socket for the answer."""
        try:
            question, descriptors, _, _ = socket.recv_fds(channel, MAX_QUESTION_BYTES, 1)
        except BlockingIOError:
            return
        except OSError:
            question, descriptors = b"", []
        if not question:  # the executor has ended
            asyncio.get_running_loop().remove_reader(channel.fileno())
        for descriptor in descriptors:
            if question == LINES:
                self.lines.listen(descriptor)
            else:
                self.on_question(question, descriptor)


def _last_lines(path: Path) -> list[str]:
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - STDERR_TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()


def _text(file: Path | None) -> str | None:
    return None if file is None else str(file)
