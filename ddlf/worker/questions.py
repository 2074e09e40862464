"""Passes the executor's questions during imports through the daemon to the master. Runs in the daemon, which does not
interpret them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
from collections.abc import Callable
from typing import Any

MAX_QUESTION_BYTES = 4096


class Questions:
    """The open questions. Each arrives with a socket for its answer. If the socket ends without data, there is no
    answer.
    """

    def __init__(self) -> None:
        self._open: dict[int, socket.socket] = {}
        self._ids = itertools.count(1)

    def put(self, question: bytes, descriptor: int, event: Callable[[str, dict[str, Any]], None] | None) -> None:
        """Pass a question on.

        Args:
            question: ``[what, name, file]`` in JSON.
            descriptor: Descriptor of the socket.
            event: Sends an event to the master that has the worker; None if no master has it.
        """
        sock = socket.socket(fileno=descriptor)
        sock.setblocking(False)
        try:
            what, name, file = json.loads(question)
        except ValueError:
            event = None
        if event is None:
            sock.close()
            return
        id = next(self._ids)
        self._open[id] = sock
        event("wanted", {"id": id, "what": what, "name": name, "file": file})

    async def give(self, id: int, piece: bytes, last: bool) -> None:
        """Pass a part of the answer on. The thread that asked may be gone."""
        sock = self._open.get(id)
        if sock is None:
            return
        try:
            await asyncio.get_running_loop().sock_sendall(sock, piece)
        except OSError:
            last = True
        if last and self._open.pop(id, None) is not None:
            sock.close()

    def end(self) -> None:
        """End all questions without an answer, because the master is gone."""
        for sock in self._open.values():
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # also ends an answer that is being sent
            sock.close()
        self._open.clear()
