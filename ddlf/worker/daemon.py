"""The small process that always answers. Runs on every worker's machine, on one port.

It accepts every connection and reads eight bytes. It then serves a control connection itself, or passes a data
connection's socket to the executor. It imports neither NumPy nor Keras and never runs user code. It therefore answers
while the executor trains, loops forever or holds the GIL. When the executor ends, the daemon reports how, and starts
another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import re
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ddlf.errors import AuthError, ConfigError, DDLFError, LeaseError, ProtocolError, VersionError
from ddlf.rpc.admission import Admission
from ddlf.rpc.handshake import HANDSHAKE_TIMEOUT_S, PREAMBLE, Role, is_http, read_preamble, short_answer
from ddlf.rpc.interfaces import addresses_of, same_machine
from ddlf.rpc.listen import HTTP_ANSWER, accepted, answer, close_if_cancelled, listening_socket, refusal_of_preamble
from ddlf.rpc.stream import receive_exactly, send_all
from ddlf.rpc.tls import make_certificate, worker_tls
from ddlf.worker.control import Control
from ddlf.worker.executor_process import CANCEL_GRACE_S, ExecutorProcess
from ddlf.worker.folder import DaemonFolder, remove_abandoned
from ddlf.worker.footprint import footprint
from ddlf.worker.lease import Holder, Lease
from ddlf.worker.machine import cores
from ddlf.worker.options import Options
from ddlf.worker.questions import Questions
from ddlf.worker.stopped import LOOK_S, StoppedFor

MODULE = re.compile(r"\w+(\.\w+)*")
NO_DESCRIPTORS_S = 0.1
"""Time to leave new connections to the kernel when this process has no file descriptor for them."""


class Daemon:
    """The daemon of one worker.

    Args:
        options: How the worker was started.
        log: Receives each line for the person at the terminal.

    Attributes:
        process: The executor's process.
    """

    def __init__(self, options: Options, log: Callable[[str], None] = lambda line: None) -> None:
        self._options = options
        self.log = log
        self._listener = listening_socket(options.host, options.port)
        self.host, self.port = self._listener.getsockname()[:2]
        self._folder = DaemonFolder()
        remove_abandoned()
        try:
            state_dir = self._make_state_dir()
            self._certificate = own = self._make_certificate()
            self._encryption = worker_tls(own, options.security) if own and options.security else None
        except (OSError, ConfigError) as error:
            self._listener.close()
            self._folder.remove()
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"the state folder {options.state_dir} cannot be used: {error.strerror}",
                hint="choose another with --state-dir",
            ) from None
        self.process = self._make_process(state_dir)
        self._controls: set[Control] = set()
        self._questions = Questions()
        self.process.on_question = lambda question, descriptor: self._questions.put(
            question, descriptor, self._holder.event if self._holder else None
        )
        self.process.lines.master = lambda: self._holder
        self._lease = Lease()
        self._holder: Control | None = None
        self._written_for = b""  # the master that gets the output of user code
        self._admission = Admission(log, lambda: len(self._controls))
        self._orphans: set[asyncio.Task[None]] = set()
        self._started = time.monotonic()
        self._stop = asyncio.Event()

    def _make_process(self, state_dir: Path) -> ExecutorProcess:
        return ExecutorProcess(self._options, self._folder.path, state_dir, self._announce, self.log, self._certificate)

    def _make_state_dir(self) -> Path:
        """Create and return the folder of this worker's state. Its name contains the port, since a restarted worker has
        the same port.
        """
        folder = (self._options.state_dir or self._folder.path) / f"port-{self.port}"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return folder

    def _make_certificate(self) -> Path | None:
        """Return the file with this worker's own certificate; None if nothing is encrypted. The first start creates the
        file.
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
        """Whether other machines can connect with TLS."""
        return self._encryption is not None

    @property
    def insecure_plaintext(self) -> bool:
        """Whether other machines can connect without TLS."""
        return self._options.security is not None and self._options.security.insecure_plaintext

    async def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until ``stop`` is called.

        Args:
            ready: Called once, when the executor has started or was given up.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                forever = self.process.keep_running(), self._accept(), self._end_stopped_executors()
                running = [tasks.create_task(coroutine) for coroutine in forever]
                waiting = tasks.create_task(self.process.settled.wait())
                waiting.add_done_callback(lambda task: None if task.cancelled() else ready())
                await self._stop.wait()
                for task in (*running, waiting, *self._admission.tasks, *self._orphans):
                    task.cancel()
        finally:
            self._listener.close()
            for control in list(self._controls):
                control.close()
            await self.process.end()
            self._folder.remove()

    async def _end_stopped_executors(self) -> None:
        """End an executor that was stopped (SIGSTOP) for longer than a master waits for a silent machine. Another
        executor replaces it.
        """
        stopped = StoppedFor()
        while True:
            await asyncio.sleep(LOOK_S)
            if self._holder is None:
                continue  # nobody waits for it
            seconds = stopped.look(self.process.pid)
            if seconds >= self._holder.dead_after_s:
                self.process.end_stopped(seconds)

    @property
    def failure(self) -> str:
        """Return why there is no executor and why no other one is started; empty if all is well."""
        return self.process.given_up

    def stop(self, by: str = "") -> None:
        """End ``run``.

        Args:
            by: The person or signal that ended it. The master that has this worker receives this text, and need not
                search for the reason.
        """
        if by and self._holder is not None:
            self._holder.event("stopped_by", {"by": by, "hint": "start it there again"})
        self._stop.set()

    async def _accept(self) -> None:
        while True:
            try:
                sock, address = await accepted(self._listener)
            except OSError as error:  # no descriptors left: open connections continue, new ones wait in the kernel
                self._admission.log_refusal("a connection", f"cannot accept it: {error.strerror}")
                await asyncio.sleep(NO_DESCRIPTORS_S)
                continue
            greeting = self._admission.start(self._greet(sock, address[0]), address[0])
            greeting.add_done_callback(partial(close_if_cancelled, sock))
            await asyncio.sleep(0)  # however many connections arrive, other tasks get their turn

    async def _greet(self, sock: socket.socket, address: str) -> None:
        """Perform the handshake of a new connection. No bytes are parsed before it has succeeded."""
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
        for control in list(self._controls):
            control.event("executor_exited", facts)

    def drop(self, control: Control) -> None:
        """Forget a closed connection. Free its lease, and end the running requests of its master."""
        self._controls.discard(control)
        if control is self._holder:
            self._holder = None
            self._questions.end()
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
        before = self._holder
        silent = before is not None and before.judge() == "dead"
        epoch = self._lease.claim(master, known_epoch, takeover=takeover, silent=silent)
        self._holder = control
        if before is not control:
            self._questions.end()
            if self._written_for != master.master_id:
                self.process.lines.forget()
            self._written_for = master.master_id
            self.process.lines.wake()
        self.process.grant(self._lease.key)
        if before is not None and before is not control:
            if before.master_id != master.master_id:
                before.event("lease_lost", {"by": str(master), "since": master.since, "epoch": epoch})
                before.orphan_grace_s = CANCEL_GRACE_S  # a master waits now
                self.log(f"{master} takes over from {before.who}")
            before.close()
        return epoch

    def hear(self, master_id: bytes) -> None:
        """Note that a master is alive, because another of its connections reports it."""
        if self._holder is not None and self._holder.master_id == master_id:
            self._holder.hear()

    async def _end_orphans(self, claimed: range, grace_s: float) -> None:
        # Try a few times: the executor may start a waiting request before it reads that the connection has ended.
        for _ in range(5):
            running = self.process.activity.running()
            if running is not None and running.id in claimed:
                await self.process.cancel(running.id, grace_s)
            await asyncio.sleep(0.1)

    # -- the commands of a control connection -----------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Return this worker's description and present activity as data."""
        running = self.process.activity.running()
        return {
            "host": platform.node(),
            "pid": os.getpid(),
            "executor_pid": self.process.pid,
            "executor": self.process.state,
            "restarts": self.process.restarts,
            "last_exit": self.process.last_exit or None,
            "busy": None if running is None else {"id": running.id, "method": running.name, "seconds": running.seconds},
            "uptime_s": time.monotonic() - self._started,
            "cores": cores(),
            "memory": footprint(os.getpid(), self.process.pid),
            "masters": sum(1 for control in self._controls if control.claimed),  # not the workers that only listen
            "datasets": dict(zip(("count", "bytes"), self.process.activity.held, strict=True)),
            "shard": None if (shard := self.process.activity.shard) is None else shard._asdict(),
            "methods": self.process.methods,
            "lease": self._holder.facts(self._lease) if self._holder else None,
            "python": platform.python_version(),
            "tls": self.encrypts,
            "insecure_plaintext": self.insecure_plaintext,
        }

    def addresses(self) -> dict[str, Any]:
        """Return the addresses of this worker for connections from others, as data."""
        own = self._options.advertise
        advertised = [own[0], own[1] or self.port] if own else None
        listens = addresses_of(self.host)
        return {"machine": same_machine(), "port": self.port, "advertised": advertised, "addresses": listens}

    async def machine(self, needs: Sequence[str] = ()) -> dict[str, Any]:
        """Return a description of this machine and its installed packages, as data. A thread collects it, because the
        disk may be slow or remote.
        """
        from ddlf.worker.machine import about

        folders = [self._folder.path, *([self._options.state_dir] if self._options.state_dir else [])]
        return await asyncio.to_thread(about, folders, list(map(str, needs)))

    async def give(self, control: Control, id: int, piece: bytes, last: bool) -> None:
        """Pass an answer to the executor's question on, if it comes from the master that has the worker."""
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
        who = "".join(letter if letter.isprintable() else "?" for letter in str(who)[:100]) or control.who or "somebody"
        holder = self._holder
        if holder is not None and holder is not control:
            if not force and holder.judge() != "dead":
                since = self._lease.holder.since if self._lease.holder else ""
                raise LeaseError(f"in use by {holder.who} since {since}", hint="--force ends that run")
            if doing == "stopped":  # a restarted executor reports its own end
                holder.event("stopped_by", {"by": who})
        self.log(
            f"{doing} by {who}" + (f", while {holder.who} had this worker" if holder not in (None, control) else "")
        )
        return who

    async def preload(self, modules: list[str], *, replace: bool = False) -> dict[str, Any]:
        """Let executors start with modules imported, and wait until they do.

        Args:
            modules: Full names of the modules.
            replace: Whether to replace the present executor if it started without these modules and has no state to
                lose.

        Returns:
            ``reason``: why executors start without the modules; empty if they start with them. ``replaceable``: whether
                ``replace`` has or would have an effect.
        """
        if not isinstance(modules, list) or not all(
            isinstance(name, str) and MODULE.fullmatch(name) for name in modules
        ):
            raise TypeError("preload takes a list of names of modules")
        return await self.process.preload(tuple(modules), replace=replace)
