"""Turns of large messages, so that the memory of the server does not depend on how many peers send at once.

Few peers at a time send a large message. The server reads from the others when a turn is free, the longest waiting one
first. A turn lasts until the set is on the disk. A peer on a slow line does not hold up others: after ``SLOW_S`` its
message still arrives, but its turn is free for the next peer.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from typing import Any

from websockets.asyncio.server import ServerConnection
from websockets.frames import Frame

from ddlf.peers import clock

LARGE_BYTES = 32 * 2**10
"""A message of more bytes needs a turn."""
READ_BYTES = {False: LARGE_BYTES, True: 2**18}
"""Most bytes in one read without and with a turn."""
MOST_TURNS = 4
SLOW_S = 1.0
"""A message that still arrives after these seconds gives its turn to the next peer."""


ACKNOWLEDGED = struct.Struct("=120xQ")
"""The bytes that the other side has acknowledged (``tcpi_bytes_acked``), in Linux's ``struct tcp_info``."""


class TurnConnection(ServerConnection):
    """A connection that takes a turn for each large message.

    Attributes:
        heard_at: Time of the last sign of life, in seconds since 1970: a byte, or a part of a set that has reached the peer.
    """

    def __init__(self, turns: Turns, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.heard_at = clock.now()
        self._turns, self._arrived, self._acknowledged = turns, 0, 0

    @property
    def waits_for_turn(self) -> bool:
        """Whether the server does not read from it now, because others have all turns."""
        return self._turns.waits(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.read_much(False)

    def read_much(self, reads_much: bool) -> None:
        """Set how many bytes one read takes, if the transport has this number."""
        if hasattr(self.transport, "max_size"):
            self.transport.max_size = READ_BYTES[reads_much]

    def note_acknowledged(self) -> None:
        """Take bytes that have reached the peer since the last call for a sign of life: on a slow line, a fragment of a set
        needs longer than a lease. Only Linux counts them.
        """
        sock = self.transport.get_extra_info("socket")
        if not hasattr(socket, "TCP_INFO") or sock is None or self.transport.is_closing():
            return
        facts = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, ACKNOWLEDGED.size)
        if len(facts) < ACKNOWLEDGED.size:  # an older kernel
            return
        [acknowledged] = ACKNOWLEDGED.unpack(facts)
        if acknowledged > self._acknowledged > 0:
            self.heard_at = clock.now()
        self._acknowledged = acknowledged

    async def send_alive(self, pieces: bytes | Iterator[bytes | memoryview]) -> None:
        """Send a frame or its fragments. The next fragment is sent when the peer reads, which shows that it is alive."""

        def noted(fragments: Iterator[bytes | memoryview]) -> Iterator[bytes | memoryview]:
            for fragment in fragments:
                self.heard_at = clock.now()
                yield fragment

        await self.send(pieces if isinstance(pieces, bytes) else noted(pieces))

    def data_received(self, data: bytes) -> None:
        self.heard_at = clock.now()
        self._arrived += len(data)
        super().data_received(data)
        if self._arrived > LARGE_BYTES:
            self._turns.begin(self)

    def process_event(self, event: Any) -> None:
        if self._arrived > LARGE_BYTES:
            self._turns.arrived(self)
        self._arrived = 0
        if isinstance(event, Frame) and len(event.data) > LARGE_BYTES:
            parsed, event = event, replace(event)
            parsed.data = b""  # the parser of websockets keeps its last frame until the next one comes
        super().process_event(event)


class Turns:
    """Connections that send large messages, and others that wait.

    Args:
        most: Number of turns.
    """

    def __init__(self, most: int = MOST_TURNS) -> None:
        self._most = most
        self._having: dict[TurnConnection, asyncio.TimerHandle | None] = {}
        self._waiting: dict[TurnConnection, None] = {}
        self._slow: set[TurnConnection] = set()

    def connection(self) -> Callable[..., TurnConnection]:
        """Return what makes the connections of a server."""

        def make(*args: Any, **named: Any) -> TurnConnection:
            return TurnConnection(self, *args, **named)

        return make

    def waits(self, connection: TurnConnection) -> bool:
        """Return whether the server does not read from a connection now."""
        return connection in self._waiting

    def begin(self, connection: TurnConnection) -> None:
        """Take a turn for a message whose end has not arrived, or stop to read until a turn is free."""
        if connection in self._having or connection in self._slow:
            return
        self._waiting[connection] = None
        connection.transport.pause_reading()
        self._give_turns()

    def arrived(self, connection: TurnConnection) -> None:
        """Keep the turn until ``end``: the message has arrived, and is no longer slow."""
        if (timer := self._having.get(connection)) is not None:
            timer.cancel()
            self._having[connection] = None

    def end(self, connection: TurnConnection) -> None:
        """End the turn of a connection, if it has one, and read from the next one."""
        if connection not in self._having and connection not in self._slow and connection not in self._waiting:
            return  # its message was small
        self._slow.discard(connection)
        self._waiting.pop(connection, None)
        if (timer := self._having.pop(connection, None)) is not None:
            timer.cancel()
        connection.read_much(False)
        self._give_turns()

    def _give_turns(self) -> None:
        while self._waiting and len(self._having) < self._most:
            connection = next(iter(self._waiting))
            del self._waiting[connection]
            self._having[connection] = asyncio.get_running_loop().call_later(SLOW_S, self._mark_slow, connection)
            connection.read_much(True)
            connection.transport.resume_reading()

    def _mark_slow(self, connection: TurnConnection) -> None:
        del self._having[connection]
        self._slow.add(connection)
        self._give_turns()


class Copies:
    """Large sets that are made for one peer each. Few exist at a time, unless peers read them slowly.

    Args:
        most: Number of sets.
    """

    def __init__(self, most: int = MOST_TURNS) -> None:
        self._free = asyncio.Semaphore(most)

    def turn(self, size: int) -> AbstractAsyncContextManager[None]:
        """Wait until another set of this number of bytes may exist. After ``SLOW_S`` it no longer holds up others."""
        return self._turn() if size > LARGE_BYTES else nullcontext()

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        await self._free.acquire()
        semaphores = [self._free]

        def end() -> None:
            if semaphores:
                semaphores.pop().release()

        timer = asyncio.get_running_loop().call_later(SLOW_S, end)
        try:
            yield
        finally:
            timer.cancel()
            end()
