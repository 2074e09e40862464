"""``FaultProxy``, a proxy between a master and a worker that simulates a bad network. Runs on the master's event loop.

Both sides use TCP, so faults look the same as in a real network. There is one exception: if the proxy is stopped, it
still accepts a new connection and then stays silent. A real network would not complete the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import socket
import struct
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Literal, Self

from ddlf.rpc.dial import open_socket
from ddlf.rpc.handshake import MAGIC, PREAMBLE, Role
from ddlf.rpc.listen import listening_socket

Direction = Literal["to_worker", "to_master"]
Kind = Literal["control", "data"]

End = Literal["fin", "rst"]

DIRECTIONS: tuple[Direction, Direction] = ("to_worker", "to_master")
KINDS: tuple[Kind, Kind] = ("control", "data")
READ_BYTES = 256 * 1024
QUEUE_BYTES = 1024 * 1024
"""Maximum bytes in the buffer of each direction. If the buffer is full, the sender has to wait, as on a congested
network."""
TICK_S = 0.02
LINGER_0 = struct.pack("ii", 1, 0)
"""The value of the socket option SO_LINGER that makes the kernel end a connection with RST instead of FIN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault in one direction. Its parts can be combined; ``Fault()`` has no effect.

    Args:
        delay_s: Delay of each byte, in seconds. The order is kept.
        jitter_s: Maximum of an additional random delay, in seconds.
        bytes_per_s: Maximum bandwidth.
        piece_bytes: Maximum bytes in one packet. 1 with a low ``bytes_per_s`` is a slow drip.
        flip_every: Flips one random bit in each block of this number of bytes; 0 for none.
        stopped: Holds all bytes silently, without FIN and RST. They arrive when the fault ends.
        end_after: Ends each connection after this number of bytes since the fault began; None for never.
        end_by: How the connection ends: ``"fin"`` or ``"rst"``.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float = math.inf
    piece_bytes: int = READ_BYTES
    flip_every: int = 0
    stopped: bool = False
    end_after: int | None = None
    end_by: End = "fin"


NONE = Fault()


class FaultProxy:
    """A proxy in front of a worker's port. Faults can be set and removed while connections are open.

    Args:
        host: Host of the worker.
        port: Port of the worker.
        seed: Seed of jitter and of the flipped bits.

    Attributes:
        port: Port of the proxy, on 127.0.0.1.
        connections: Number of accepted connections so far.
        bytes: Number of forwarded bytes so far, by direction.

    Example::

        async with FaultProxy("127.0.0.1", 9000) as proxy:
            cluster = Cluster(["127.0.0.1"], [proxy.port])
            ...
            proxy.set(Fault(delay_s=0.2, bytes_per_s=125_000))  # a thin link
            proxy.partition("to_master")                        # the master hears nothing, the worker everything
            proxy.partition(kind="data")                        # heartbeats still pass
            proxy.heal()
            proxy.reset()
    """

    def __init__(self, host: str, port: int, *, seed: int = 0) -> None:
        self._target = host, port
        self._seed = seed
        self._faults: dict[tuple[Direction, Kind | None], Fault] = {}
        self._changed = asyncio.Event()
        self._open: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        self.port = 0
        self.connections = 0
        self.bytes: dict[Direction, int] = {"to_worker": 0, "to_master": 0}

    async def start(self) -> int:
        """Listen, and return the port. A restarted proxy has the same port."""
        if self._listener is None:
            self._listener = listening_socket("127.0.0.1", self.port)
            self.port = self._listener.getsockname()[1]
            self._spawn(self._accept(self._listener))
        return self.port

    async def close(self) -> None:
        """Free the port and reset all open connections. Safe to call again."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # -- faults -----------------------------------------------------------------------------------------------------

    def set(self, fault: Fault, direction: Direction | None = None, *, kind: Kind | None = None) -> None:
        """Apply a fault to open and new connections from now on.

        Args:
            fault: Replaces the last fault of the same direction and kind.
            direction: Direction of the fault; None for both.
            kind: Kind of connections: ``"control"`` to the daemon, ``"data"`` to the executor; None for all.
        """
        for way in DIRECTIONS if direction is None else (direction,):
            for link_kind in (*KINDS, None) if kind is None else (kind,):
                self._faults[way, link_kind] = fault
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def partition(self, direction: Direction | None = None, *, kind: Kind | None = None) -> None:
        """Silently hold all bytes until ``heal``."""
        self.set(Fault(stopped=True), direction, kind=kind)

    def heal(self) -> None:
        """Remove all faults, and forward the held bytes."""
        self.set(NONE)

    def reset(self, *, kind: Kind | None = None) -> int:
        """End open connections with RST on both sides, also within a message, and return their number."""
        return self._end("rst", kind)

    def cut(self, *, kind: Kind | None = None) -> int:
        """End open connections with FIN on both sides, and return their number."""
        return self._end("fin", kind)

    def _end(self, end: End, kind: Kind | None) -> int:
        ended = [connection for connection in self._open if kind in (None, connection.kind)]
        for connection in ended:
            connection.end(end)
        return len(ended)

    # -- for its connections ----------------------------------------------------------------------------------------

    def fault(self, direction: Direction, kind: Kind | None) -> Fault:
        """Return the present fault for a direction and a kind of connection. Connections of other protocols have the
        fault that is set for all kinds.
        """
        return self._faults.get((direction, kind), NONE)

    async def wait_for_change(self, timeout_s: float | None = None) -> None:
        """Return when another fault is set, or after ``timeout_s``."""
        changed = self._changed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await changed.wait()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            sock, _ = await loop.sock_accept(listener)
            self.connections += 1
            self._spawn(self._serve(sock, random.Random(f"{self._seed} {self.connections}")))

    async def _serve(self, master: socket.socket, chance: random.Random) -> None:
        connection = _Connection(self, master, chance)
        self._open.add(connection)
        try:
            await connection.run(*self._target)
        finally:
            self._open.discard(connection)


class _Connection:
    """One connection of the master, with its connection to the worker."""

    def __init__(self, proxy: FaultProxy, master: socket.socket, chance: random.Random) -> None:
        self.kind: Kind | None = None
        self._proxy = proxy
        self._master = master
        self._worker: socket.socket | None = None
        self._chance = chance
        self._task = asyncio.current_task()
        self._end_by: End = "rst"

    def end(self, end: End) -> None:
        """End the connection on both sides, to the master and to the worker."""
        self._end_by = end
        if self._task is not None:
            self._task.cancel()

    async def run(self, host: str, port: int) -> None:
        """Forward bytes until both directions have ended, or one side has reset the connection."""
        try:
            await self._run(host, port)
            self._end_by = "fin"
        except OSError:
            self._end_by = "rst"
        finally:
            for sock in (self._master, self._worker):
                if sock is not None:
                    if self._end_by == "rst":
                        with contextlib.suppress(OSError):
                            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_0)
                    sock.close()

    async def _run(self, host: str, port: int) -> None:
        loop = asyncio.get_running_loop()
        first = b""
        while len(first) < PREAMBLE.size and (more := await loop.sock_recv(self._master, PREAMBLE.size - len(first))):
            first += more
        if len(first) == PREAMBLE.size and first.startswith(MAGIC):
            self.kind = {int(Role.CONTROL): KINDS[0], int(Role.DATA): KINDS[1]}.get(PREAMBLE.unpack(first)[3])
        while self._proxy.fault("to_worker", self.kind).stopped:
            await self._proxy.wait_for_change()  # the worker must not notice the attempt to connect
        self._worker = await open_socket(host, port)
        forth = _Way(self._proxy, self, "to_worker", self._master, self._worker, self._chance)
        back = _Way(self._proxy, self, "to_master", self._worker, self._master, self._chance)
        forth.other, back.other = back, forth
        forth.put(first)
        tasks = [loop.create_task(part) for way in (forth, back) for part in (way.read(), way.write())]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class _Way:
    """One direction of one connection. Received bytes wait in a queue until the faults let them pass."""

    other: _Way

    def __init__(
        self,
        proxy: FaultProxy,
        connection: _Connection,
        direction: Direction,
        source: socket.socket,
        target: socket.socket,
        chance: random.Random,
    ) -> None:
        self._proxy, self._connection, self._direction = proxy, connection, direction
        self._source, self._target, self._chance = source, target, chance
        self._loop = asyncio.get_running_loop()
        # the time of arrival, the random share of the jitter, and the bytes
        self._queue: deque[tuple[float, float, bytes | End]] = deque()
        self._queued = self._sent = 0
        self._moved = asyncio.Event()
        self._last = NONE
        self._fault_began = self._next_flip = 0

    def put(self, item: bytes | End) -> None:
        """Queue bytes, or the way in which their sender ended the connection."""
        self._queue.append((self._loop.time(), self._chance.random(), item))
        self._queued += len(item)
        self._moved.set()

    async def read(self) -> None:
        """Receive bytes from the source."""
        try:
            while data := await self._loop.sock_recv(self._source, READ_BYTES):
                self.put(data)
                while self._queued >= QUEUE_BYTES:
                    await self._wait_for_move()
            self.put("fin")
        except OSError:
            self.put("rst")

    async def write(self) -> None:
        """Send queued bytes to the target, as the faults allow."""
        while True:
            while not self._queue:
                await self._wait_for_move()
            came_at, share, item = self._queue[0]
            fault = self._fault()
            due = came_at + fault.delay_s + share * fault.jitter_s
            if fault.stopped or due > self._loop.time():
                await self._proxy.wait_for_change(None if fault.stopped else due - self._loop.time())
                continue
            self._queue.popleft()
            self._queued -= len(item)
            if isinstance(item, bytes):
                remaining = item[await self._send(item, fault) :]
                if remaining:
                    self._queue.appendleft((came_at, share, remaining))
                    self._queued += len(remaining)
                self._moved.set()
            elif item == "fin":
                with contextlib.suppress(OSError):
                    self._target.shutdown(socket.SHUT_WR)
                return
            else:
                raise ConnectionResetError

    async def _wait_for_move(self) -> None:
        self._moved.clear()
        await self._moved.wait()

    def _fault(self) -> Fault:
        """Return the present fault of this direction. Counts of bytes restart with each new fault."""
        fault = self._proxy.fault(self._direction, self._connection.kind)
        if fault is not self._last:
            self._last, self._fault_began = fault, self._sent
            self._next_flip = self._sent + self._chance.randrange(fault.flip_every or 1)
        return fault

    async def _send(self, data: bytes, fault: Fault) -> int:
        """Send as many bytes as one step may, and return their number."""
        count = min(len(data), fault.piece_bytes)
        if fault.bytes_per_s < math.inf:
            count = min(count, max(1, int(fault.bytes_per_s * TICK_S)))
        if fault.end_after is not None:
            count = min(count, self._fault_began + fault.end_after - self._sent)
        piece = self._flip(data[:count], fault.flip_every) if fault.flip_every else data[:count]
        try:
            await self._loop.sock_sendall(self._target, piece)
        except OSError:
            self.other.put("rst")  # the target has ended the connection, so pass that on in the other direction
        self._sent += count
        self._proxy.bytes[self._direction] += count
        if fault.end_after is not None and self._sent >= self._fault_began + fault.end_after:
            self._connection.end(fault.end_by)
            await self._loop.create_future()  # wait for the cancellation that ``end`` causes
        if fault.bytes_per_s < math.inf:
            await self._proxy.wait_for_change(count / fault.bytes_per_s)
        return count

    def _flip(self, data: bytes, every: int) -> bytes:
        flipped = bytearray(data)
        while self._next_flip < self._sent + len(data):
            flipped[self._next_flip - self._sent] ^= 1 << self._chance.randrange(8)
            block = (self._next_flip - self._fault_began) // every + 1
            self._next_flip = self._fault_began + block * every + self._chance.randrange(every)
        return bytes(flipped)
