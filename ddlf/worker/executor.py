"""The process that runs user code. Started by the daemon, which hands it every data connection over a local channel.

The channel carries the settings once (a length and JSON; the tokens come this way, so that they are in no argument list and no environment), then
the preamble and the deadline of its handshake with each socket, or ``LEASE_CHANGED`` without one. The executor answers one byte when it is ready. It
ends with its daemon: the kernel kills it when the daemon dies, and the end of the channel ends it where the kernel cannot.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import io
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Awaitable
from functools import partial
from pathlib import Path
from typing import Any

from ddlf.errors import DDLFError
from ddlf.net.admission import Admission
from ddlf.net.listen import answer
from ddlf.net.tls import Security, worker_tls
from ddlf.wire.frame import Limits
from ddlf.worker.activity import Activity
from ddlf.worker.daemon import HAND_OVER, LEASE_CHANGED
from ddlf.worker.imports import ask_daemon, leave_current_folder
from ddlf.worker.worker import Worker

READY = b"R"
LENGTH = struct.Struct("<I")


def main(argv: list[str] | None = None) -> None:
    """Run as ``python -m ddlf.worker.executor CHANNEL_FD ACTIVITY_FD``."""
    channel_fd, activity_fd = map(int, (argv or sys.argv)[1:3])
    die_with_parent()
    run(channel_fd, activity_fd)


def run(channel_fd: int, activity_fd: int) -> None:
    """Be the executor, in a process of its own.

    Args:
        channel_fd: The end of the channel that is this process's.
        activity_fd: The page.
    """
    faulthandler.enable()
    channel = socket.socket(fileno=channel_fd)
    # What user code starts must not hold on to what belongs to this process: a connection ends with it.
    channel.set_inheritable(False)
    activity = Activity(activity_fd)
    os.close(activity_fd)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what a method printed is there even if it crashes
    settings = _read_settings(channel)
    name_process(settings["name"])
    channel.setblocking(False)
    worker = Worker(Path(settings["session_dir"]), Path(settings["persist_dir"]), activity)
    worker.install_interrupt()
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_serve(worker, channel, settings))


async def _serve(worker: Worker, channel: socket.socket, settings: dict[str, Any]) -> None:
    tokens = tuple(token.encode() for token in settings["tokens"])
    limits = Limits(max_body_bytes=settings["max_message_bytes"])
    own, ca, certificate, key = (Path(file) if file else None for file in settings["tls_files"])
    encryption = worker_tls(own, Security(ca, certificate, key)) if own else None
    ready: asyncio.Queue[tuple[socket.socket, Limits, Limits]] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def log(line: str) -> None:
        print(f"ddlf-worker: data connection: {line}", file=sys.stderr, flush=True)

    admission = Admission(log, lambda: worker.connections + ready.qsize())

    async def greet(sock: socket.socket, preamble: bytes, deadline: float, address: str) -> None:
        try:
            async with asyncio.timeout_at(deadline):
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
            os._exit(0)  # the daemon is gone
        if data == LEASE_CHANGED:
            worker.end_sessions_without_lease()
            return
        if not descriptors:  # the kernel had none left for it
            admission.log_refusal("a connection", "no descriptor left for it")
            return
        sock = socket.socket(fileno=descriptors[0])
        sock.set_inheritable(False)
        sock.setblocking(False)
        preamble, deadline = HAND_OVER.unpack(data)
        try:
            address = sock.getpeername()[0]
        except OSError:  # it has left already
            sock.close()
            return
        admission.start(greet(sock, preamble, deadline, address), address)

    leave_current_folder()
    worker.import_from_master(partial(ask_daemon, channel))
    loop.add_reader(channel.fileno(), handed_over)
    channel.send(READY)
    serve: Awaitable[None] = worker.start(ready.get)
    await serve


def _read_settings(channel: socket.socket) -> dict[str, Any]:
    with channel.makefile("rb", buffering=0) as stream:
        (length,) = LENGTH.unpack(_exactly(stream, LENGTH.size))
        settings: dict[str, Any] = json.loads(_exactly(stream, length))
        return settings


def _exactly(stream: Any, count: int) -> bytes:
    data = b""
    while len(data) < count:
        chunk = stream.read(count - len(data))
        if not chunk:
            os._exit(0)
        data += chunk
    return data


def die_with_parent(parent: int | None = None) -> None:
    """Ask Linux to kill this process when its parent dies, however it dies and whatever this process is doing.

    Args:
        parent: Its process id; by default who is the parent now.
    """
    if not sys.platform.startswith("linux"):
        return
    pr_set_pdeathsig = 1
    parent = parent or os.getppid()
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it died in between
        os._exit(0)


def name_process(name: str) -> None:
    """Give this process a name for ``ps`` and ``top``, where that can be done."""
    if sys.platform.startswith("linux"):
        pr_set_name = 15
        ctypes.CDLL(None).prctl(pr_set_name, name.encode(), 0, 0, 0)


if __name__ == "__main__":
    main()
