"""The executor, the process of a worker that runs user code. The daemon starts it and passes it every data connection
over a local channel.

The channel first carries the settings once, as a length and JSON. The settings contain the tokens, so that no argument
list and no environment shows them. Then the channel carries each socket with its preamble and the deadline of its
handshake, or ``LEASE_CHANGED`` without a socket. The executor answers one byte when it is ready. It ends with its
daemon: the kernel kills it when the daemon dies. Where the kernel cannot do this, the end of the channel ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import gc
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ddlf.data.array_cache import ArrayCache
from ddlf.errors import DDLFError
from ddlf.extras import hooks
from ddlf.rpc.admission import Admission
from ddlf.rpc.buffers import POOL
from ddlf.rpc.code import CodeCache, unpickle
from ddlf.rpc.handshake import Role, read_preamble
from ddlf.rpc.listen import answer
from ddlf.rpc.messages import Limits
from ddlf.rpc.tls import Security, worker_tls
from ddlf.worker.activity import Activity
from ddlf.worker.calls import Calls, Hosting, Method, Methods, Session
from ddlf.worker.executor_process import HAND_OVER, LEASE_CHANGED
from ddlf.worker.imports import MasterFinder, ask_daemon, leave_current_folder
from ddlf.worker.options import ExecutorOptions
from ddlf.worker.output_capture import Written
from ddlf.worker.peers import Dialling
from ddlf.worker.worker import Worker

READY = b"R"
LENGTH = struct.Struct("<I")

IN_TURN = ("run_code", "load_mnist", "load_cifar10", "clean")
"""Commands that wait for their turn like methods. They run user code, or change data that a running method uses."""
KEPT = ("set_variable", "delete_variable")
"""Commands that run at once and change state that a new executor would lack."""
AT_ONCE = ("connect", "close", "add_method", "remove_method", "list_methods", "get_variable", "list_variables", *KEPT)
OF_PEERS = ("introduce", "meet")
"""Commands that ``Peers`` handles. They also run at once."""


class Executor:
    """Runs user code. It has the worker, the order of the calls, and the connections of masters and peers.

    Args:
        session_dir: Folder for methods that live as long as the daemon.
        persist_dir: Folder for methods that outlive the daemon.
        activity: The page in which the daemon sees the running method; None without a daemon.
        load: Makes an object from its pickled bytes.
        kind: Class of the worker.
        free: Frees memory after a role has ended; see ``Hosting``.

    Attributes:
        worker: The object that methods receive as ``self``.
        calls: Runs the calls in turn.
        sessions: The open data connections.
        commands: The commands by name, in addition to ``run``, ``run_method`` and ``call``.
    """

    def __init__(
        self,
        session_dir: Path,
        persist_dir: Path,
        activity: Activity | None = None,
        *,
        load: Callable[[bytes], Any] = unpickle,
        kind: type[Worker] = Worker,
        free: Callable[[], object] = gc.collect,
    ) -> None:
        self.sessions: set[Session] = set()
        self._activity = activity
        methods = Methods(session_dir, persist_dir, load)
        self._code = CodeCache(load)
        self._finder: MasterFinder | None = None
        self._master_id, self._gives_modules = b"", False
        datasets = ArrayCache(tell=activity.show_datasets if activity is not None else None)
        self.worker = worker = kind(methods, datasets)
        self.calls = Calls(worker, methods, self.sessions, activity)
        self.peers = worker.peers
        if activity is not None:
            self.peers.lease = activity.read_lease
            worker.on_shard = activity.show_shard
            worker.on_part = activity.show_part
        self.peers.changed = self.end_sessions_without_lease
        self.peers.lost = lambda id, reason: self._tell({"what": "silent", "worker": id, "why": reason})
        self._hosting = worker.roles = methods.roles = Hosting(worker, free, over=self.peers.forget)
        worker.on_tell = self._tell
        self.commands = methods.commands = {
            name: Method(name, getattr(worker, name), skip=0, at_once=name in AT_ONCE, stateful=name in KEPT)
            for name in (*IN_TURN, *AT_ONCE)
        }
        self.commands["clean"].function = self._clean
        for name in OF_PEERS:
            self.commands[name] = Method(name, getattr(self.peers, name), skip=0, at_once=True)

    def import_from_master(self, ask: Callable[..., Any]) -> None:
        """Let methods import modules from below the script's folder on the master; see ``imports``."""
        self._finder = MasterFinder(ask, lambda: self.calls.running.id if self.calls.running else None)
        self._finder.enabled = self._may_ask_master
        sys.meta_path.append(self._finder)
        for begin in hooks("begin_executor"):
            begin(lambda kind, name: ask(kind, name) if self._may_ask_master() else None)

    async def serve(self, sock: socket.socket, limits: Limits, peer_limits: Limits) -> None:
        """Answer the requests of one data connection until it ends.

        Args:
            sock: An authenticated socket.
            limits: The sizes that this side accepts.
            peer_limits: The sizes that the other side accepts.
        """
        session = Session(
            sock,
            limits,
            peer_limits,
            calls=self.calls,
            load=self._code.load,
            begin=self._begin,
            peers=self.peers,
            activity=self._activity,
        )
        self.sessions.add(session)
        await session.closed
        self.sessions.discard(session)
        POOL.clear()
        session.cancel_all()

    def end_sessions_without_lease(self) -> None:
        """End the connections of masters that no longer have this worker, and of other workers that may no longer call
        it.
        """
        self.peers.end_without_lease()
        for session in list(self.sessions):
            session.end_without_lease()

    async def _clean(self) -> None:
        """Free data and variables like ``Worker.clean``, and end all roles."""
        self._hosting.close_all()
        await self.worker.clean()

    def _tell(self, facts: dict[str, Any]) -> None:
        """Send the caller of the running method a report about its progress. Any thread may call this."""
        call = self.calls.running
        if call is not None:
            call.session.tell(call, facts)

    def _begin(self, master_id: bytes, gives_modules: bool) -> None:
        """Record which master has the worker. For a new master, end all roles and forget the imported modules of the
        previous one.
        """
        if master_id != self._master_id:
            self._hosting.close_all()
            if self._finder is not None:
                self._finder.forget()
        self._master_id, self._gives_modules = master_id, gives_modules

    def _may_ask_master(self) -> bool:
        """Return whether imports may ask the master. A guest's methods may not, because the modules belong to the
        master that has the worker.
        """
        running = self.calls.running
        return self._gives_modules and not (running is not None and running.session.is_guest)


def main(argv: list[str] | None = None) -> None:
    """Run as ``python -m ddlf.worker.executor CHANNEL_FD ACTIVITY_FD``."""
    channel_fd, activity_fd = map(int, (argv or sys.argv)[1:3])
    die_with_parent()
    run(channel_fd, activity_fd)


def run(channel_fd: int, activity_fd: int) -> None:
    """Run the executor in the process that the daemon has started for it.

    Args:
        channel_fd: Descriptor of this process's end of the channel.
        activity_fd: Descriptor of the page.
    """
    faulthandler.enable()
    channel = socket.socket(fileno=channel_fd)
    # Processes that user code starts must not inherit this descriptor, because its connection has to end with this
    # process.
    channel.set_inheritable(False)
    activity = Activity(activity_fd)
    os.close(activity_fd)
    options = _read_options(channel)
    name_process(options.name)
    channel.setblocking(False)
    executor = Executor(Path(options.session_dir), Path(options.persist_dir), activity)
    signal.signal(signal.SIGINT, executor.calls.interrupt)
    # A scheduler sends SIGTERM to all processes of a task. The daemon decides when this one ends. A handler, unlike
    # SIG_IGN, is not passed on to programs that user code starts.
    signal.signal(signal.SIGTERM, lambda *_: None)
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_serve(executor, channel, activity, options))


async def _serve(executor: Executor, channel: socket.socket, activity: Activity, options: ExecutorOptions) -> None:
    tokens = tuple(token.encode() for token in options.tokens)
    limits = Limits(max_body_bytes=options.max_message_bytes)
    ca, certificate, key = (
        Path(file) if file else None for file in (options.tls_ca, options.tls_cert, options.tls_key)
    )
    encryption = worker_tls(Path(options.certificate), Security(ca, certificate, key)) if options.certificate else None
    ready: asyncio.Queue[tuple[socket.socket, Limits, Limits]] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def log(line: str) -> None:
        print(f"ddlf-worker: data connection: {line}", file=sys.__stderr__, flush=True)

    admission = Admission(log, lambda: len(executor.sessions) + ready.qsize())

    async def greet(sock: socket.socket, preamble: bytes, deadline: float, address: str) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                if read_preamble(preamble) is Role.JOIN:
                    await executor.peers.receive(sock, preamble)
                    return
                sock, hello = await answer(
                    sock,
                    preamble,
                    tokens,
                    limits.max_body_bytes,
                    encryption,
                    has_place=lambda: admission.has_place,
                )
        except (DDLFError, OSError) as error:
            admission.log_refusal(address, str(error) or "handshake timed out")
        else:
            ready.put_nowait((sock, limits, Limits(max_body_bytes=hello.max_message_bytes)))

    def handed_over() -> None:
        data, descriptors, _, _ = socket.recv_fds(channel, HAND_OVER.size, 1)
        if not data:
            os._exit(0)  # the daemon has ended
        if data == LEASE_CHANGED:
            executor.end_sessions_without_lease()
            return
        if not descriptors:  # the kernel had no descriptors left for this socket
            admission.log_refusal("a connection", "no file descriptor is free")
            return
        sock = socket.socket(fileno=descriptors[0])
        sock.set_inheritable(False)
        sock.setblocking(False)
        preamble, deadline = HAND_OVER.unpack(data)
        try:
            address = sock.getpeername()[0]
        except OSError:  # the client has already left
            sock.close()
            return
        admission.start(greet(sock, preamble, deadline, address), address)

    executor.peers.dialling = Dialling(
        tokens, limits.max_body_bytes, Security(ca, certificate, key, options.insecure_plaintext)
    )
    leave_current_folder()
    executor.import_from_master(partial(ask_daemon, channel))
    loop.add_reader(channel.fileno(), handed_over)
    channel.send(READY)
    prints = os.open(options.prints, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    executor.calls.on_turn_over = Written(activity, channel, 1 if options.shows_prints else prints, prints).end_line
    async with asyncio.TaskGroup() as connections:
        while True:
            connections.create_task(executor.serve(*await ready.get()))


def _read_options(channel: socket.socket) -> ExecutorOptions:
    with channel.makefile("rb", buffering=0) as stream:
        (length,) = LENGTH.unpack(_exactly(stream, LENGTH.size))
        return ExecutorOptions.from_bytes(_exactly(stream, length))


def _exactly(stream: Any, count: int) -> bytes:
    data = b""
    while len(data) < count:
        chunk = stream.read(count - len(data))
        if not chunk:
            os._exit(0)
        data += chunk
    return data


def die_with_parent(parent: int | None = None) -> None:
    """Ask Linux to kill this process when its parent dies, however the parent dies and whatever this process is doing.

    Args:
        parent: Process id of the parent; the present parent by default.
    """
    if not sys.platform.startswith("linux"):
        return
    pr_set_pdeathsig = 1
    parent = parent or os.getppid()
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the request
        os._exit(0)


def name_process(name: str) -> None:
    """Set the name of this process for ``ps`` and ``top``, on Linux."""
    if sys.platform.startswith("linux"):
        pr_set_name = 15
        ctypes.CDLL(None).prctl(pr_set_name, name.encode(), 0, 0, 0)


if __name__ == "__main__":
    main()
