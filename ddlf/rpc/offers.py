"""Connections that a worker has opened to this side, and that wait for their use. Runs on a master's gate, and on a
worker that another worker has dialled.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque

from ddlf.rpc.heartbeats import end_when_silent
from ddlf.rpc.join import DEAD_CONNECTION_S, join_preamble

MOST_WAITING = 4
"""Connections that wait for one use. A worker offers one at a time; more come from a worker that was cut off."""


class Offers:
    """The connections that one worker has offered and nobody uses yet, and the requests for one. Belongs to one event
    loop.

    Attributes:
        incarnation: The number that the worker sent with its last offer; 0 before the first.
        left_at: When the worker ended its last waiting connection, by the loop's clock; None while one waits or is used.
        waiting: The connections, the oldest first.
    """

    def __init__(self) -> None:
        self.incarnation = 0
        self.left_at: float | None = None
        self.waiting: deque[socket.socket] = deque()
        self._takers: deque[asyncio.Future[socket.socket]] = deque()
        self._loop: asyncio.AbstractEventLoop  # known with the first connection

    def keep(self, sock: socket.socket, incarnation: int) -> None:
        """Let a connection wait until it is needed, or give it to a request that waits already."""
        self._loop = asyncio.get_running_loop()
        if incarnation != self.incarnation:
            for old in list(self.waiting):
                self.drop(old)
        self.incarnation, self.left_at = incarnation, None
        while self._takers:
            taker = self._takers.popleft()
            if not taker.done():
                taker.set_result(sock)
                return
        end_when_silent(sock, DEAD_CONNECTION_S)
        self.waiting.append(sock)
        # A waiting worker sends nothing: bytes or an end mean that this connection is of no use any more.
        self._loop.add_reader(sock, self.drop, sock)
        if len(self.waiting) > MOST_WAITING:
            self.drop(self.waiting[0])

    async def take(self, timeout_s: float) -> socket.socket:
        """Return a connection that is not in use. The caller owns it from now on.

        Raises:
            TimeoutError: The worker offered none in time.
        """
        if self.waiting:
            sock = self.waiting.popleft()
            self._loop.remove_reader(sock)
            return sock
        taker: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
        self._takers.append(taker)
        try:
            async with asyncio.timeout(timeout_s):
                return await taker
        except (TimeoutError, asyncio.CancelledError):
            if taker.done() and not taker.cancelled() and taker.exception() is None:
                taker.result().close()
            raise
        finally:
            with contextlib.suppress(ValueError):
                self._takers.remove(taker)

    def fail(self, error: Exception) -> None:
        """Let all requests end with an error, because no connection comes any more."""
        for taker in self._takers:
            if not taker.done():
                taker.set_exception(error)

    def drop(self, sock: socket.socket) -> None:
        """Close a connection that waits."""
        self._loop.remove_reader(sock)
        sock.close()
        with contextlib.suppress(ValueError):
            self.waiting.remove(sock)
        if not self.waiting:
            self.left_at = self._loop.time()

    def tell_over(self) -> bool:
        """Tell the worker that no connection is needed any more. Return whether a connection waits that can tell it."""
        if self.waiting:
            with contextlib.suppress(OSError):
                self.waiting[-1].send(join_preamble())
        return bool(self.waiting)

    def close(self) -> None:
        """Close all connections that wait, and refuse all requests."""
        for sock in list(self.waiting):
            self.drop(sock)
        for taker in self._takers:
            taker.cancel()
