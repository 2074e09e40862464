"""Lets a worker join its master by dialling it, because the master cannot reach it. Runs in the daemon.

It always offers the master's gate one connection that is not in use. When the master uses it, the daemon serves it like
one that it has accepted, and the worker offers the next one. While no gate answers, it tries again after growing
pauses, so a master that starts later, or starts again, finds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from ddlf.errors import AuthError, ConnectError, DDLFError, LeaseError, ProtocolError
from ddlf.rpc.dial import connect_to
from ddlf.rpc.handshake import HANDSHAKE_TIMEOUT_S, PREAMBLE
from ddlf.rpc.heartbeats import end_when_silent
from ddlf.rpc.join import ANY_PLACE, DEAD_CONNECTION_S, KEPT, Offer, RunOver, is_over, offer
from ddlf.rpc.stream import ready, send_all

CONNECT_TIMEOUT_S = 5.0
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
JOIN_FOR_S = 600.0


@dataclass(frozen=True, slots=True)
class Join:
    """The options of a worker that joins its master by dialling it.

    Args:
        addresses: Hosts and ports of the gate. All are tried at once.
        place: The worker's place from 0, or ``ANY_PLACE``.
        incarnation: Rises with each start of a worker at this place.
        for_s: The worker ends after so many seconds without a master. 0 gives up if the first try fails.
    """

    addresses: tuple[tuple[str, int], ...]
    place: int = ANY_PLACE
    incarnation: int = field(default_factory=time.time_ns)
    for_s: float = JOIN_FOR_S

    @property
    def place_name(self) -> str:
        """The place as a text, ``"any"`` for any place."""
        return "any" if self.place == ANY_PLACE else str(self.place)

    def __str__(self) -> str:
        return ", ".join(f"{host}:{port}" for host, port in self.addresses)


class Joining:
    """Offers connections to a gate, the port where a master accepts workers, until it is cancelled.

    Args:
        join: How to join.
        token: This worker's token.
        serve: Serves a connection that the master uses, and closes it. The second argument is the gate's address.
        is_used: Returns whether a master is connected.
        say: Receives a line for people when the worker has joined, or was left.
        final: The errors that end the tries.
    """

    def __init__(
        self,
        join: Join,
        token: bytes,
        serve: Callable[[socket.socket, str], Awaitable[None]],
        is_used: Callable[[], bool],
        say: Callable[[str], None],
        final: tuple[type[DDLFError], ...] = (LeaseError,),
    ) -> None:
        self._final = final
        self._join = join
        self._token = token
        self._serve = serve
        self._is_used = is_used
        self._say = say
        self._offer = Offer(join.place, join.incarnation)
        self._addresses = join.addresses  # after a success only its address, until it fails
        self._serving: set[asyncio.Task[None]] = set()

    async def run(self) -> DDLFError | None:
        """Offer connections to the gate, one after the other.

        Returns:
            The reason why this ended: no master came for ``Join.for_s`` seconds, or a later worker has this place. None
            if the master said that the run is over.
        """
        loop = asyncio.get_running_loop()
        pause, heard, joined = FIRST_PAUSE_S, loop.time(), ""
        while True:
            try:
                sock, address = await self._reach()
            except RunOver:
                return None
            except DDLFError as error:
                if isinstance(error, self._final):
                    return error
                if joined:
                    self._say(f"left      the master at {joined} is gone; trying again for {self._join.for_s:g} s")
                joined = ""
                if self._is_used():
                    heard = loop.time()
                elif loop.time() - heard > self._join.for_s:
                    if self._join.for_s:
                        error.message = f"no master at {self._join} for {self._join.for_s:g} s: {error.message}"
                    return error
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, LONGEST_PAUSE_S)
                continue
            if not joined:
                self._say(f"joined    {address}")
            pause, heard, joined = FIRST_PAUSE_S, loop.time(), address
            if await self._wait_until_used(sock, address):
                return None
            heard = loop.time()

    async def _wait_until_used(self, sock: socket.socket, address: str) -> bool:
        """Wait until the master uses an offered connection, which its first bytes show, and serve it then. Return
        whether these bytes say that the run is over.
        """
        try:
            end_when_silent(sock, DEAD_CONNECTION_S)
            await ready(sock, to_send=False)
            first = sock.recv(PREAMBLE.size, socket.MSG_PEEK)
        except OSError:
            first = b""
        except BaseException:
            sock.close()
            raise
        if is_over(first):
            sock.close()
            return True
        if not first:
            sock.close()
            await asyncio.sleep(FIRST_PAUSE_S * random.random())  # a gate that closes at once does not make this spin
            return False
        task = asyncio.ensure_future(self._serve(sock, address.rpartition(":")[0]))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        return False

    async def _reach(self) -> tuple[socket.socket, str]:
        """Offer a connection at all addresses of the gate at once. Return the first connection that a gate accepts, and
        its address.

        Raises:
            DDLFError: No gate took it. The error is that of a gate that answered, else the first address's.
        """
        addresses, self._addresses = self._addresses, self._join.addresses
        tries = [asyncio.ensure_future(self._try(host, port)) for host, port in addresses]
        chosen: asyncio.Task[socket.socket] | None = None
        try:
            waiting = set(tries)
            while waiting and chosen is None:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                chosen = next((task for task in tries if task in done and task.exception() is None), None)
            if chosen is None:
                errors = [error for task in tries if isinstance(error := task.exception(), DDLFError)]
                raise min(errors, key=_rank)
            with contextlib.suppress(OSError):  # if it is lost already, the wait for its use ends at once
                await send_all(chosen.result(), KEPT)
            address = addresses[tries.index(chosen)]
            self._addresses = (address,)
            return chosen.result(), "{}:{}".format(*address)
        finally:
            await _close_others(tries, chosen)

    async def _try(self, host: str, port: int) -> socket.socket:
        address = f"{host}:{port}"
        try:
            sock = await connect_to(host, port, CONNECT_TIMEOUT_S)
        except ConnectError as error:
            error.hint = "start the master with --listen, and check the address and the firewall"
            raise
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await offer(sock, self._token, self._offer)
            return sock
        except BaseException as error:
            sock.close()
            if isinstance(error, DDLFError):
                error.message = f"{address}: {error.message}"
            elif isinstance(error, TimeoutError):
                raise ConnectError(f"{address}: no answer within {HANDSHAKE_TIMEOUT_S:g} s") from None
            elif isinstance(error, OSError):
                raise ConnectError(f"{address}: closed during the greeting") from None
            raise


def _rank(error: DDLFError) -> int:
    """Return a number that sorts errors by importance: an error that a gate has sent matters more than an address that
    does not answer.
    """
    return next((rank for rank, kind in enumerate((RunOver, LeaseError, AuthError)) if isinstance(error, kind)), 3)


async def _close_others(
    tries: Sequence[asyncio.Task[socket.socket]], chosen: asyncio.Task[socket.socket] | None
) -> None:
    """End all tries but one, and close the connections of the others that succeeded."""
    unused = [task for task in tries if task is not chosen]
    for task in unused:
        task.cancel()
    await asyncio.gather(*unused, return_exceptions=True)
    for task in unused:
        if not task.cancelled() and task.exception() is None:
            task.result().close()


class Dialled:
    """The other workers that this worker dials, because they cannot dial it. It offers them connections, as to a gate.

    Args:
        tokens: This worker's tokens.
        serve: Serves a connection that another worker uses, and closes it.
    """

    def __init__(self, tokens: tuple[bytes, ...], serve: Callable[[socket.socket, str], Awaitable[None]]) -> None:
        self._tokens = tokens
        self._serve = serve
        self._tasks: dict[Join, asyncio.Task[DDLFError | None]] = {}

    async def begin(self, join: Join) -> str:
        """Offer connections to one worker until ``end``, or until it wants no more. Return why this worker has not
        reached it; empty if it has, perhaps earlier.
        """
        task = self._tasks.get(join)
        if task is None or task.done():
            joined = asyncio.Event()
            # A worker without callees answers like any other daemon. It does not change its mind without a new ``begin``.
            final = LeaseError, ProtocolError
            joining = Joining(join, self._tokens[0], self._serve, joined.is_set, lambda line: joined.set(), final)
            self._tasks[join] = task = asyncio.ensure_future(joining.run())
            waiting = asyncio.ensure_future(joined.wait())
            await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
        if not task.done():
            return ""
        error = None if task.cancelled() else task.result()
        return error.message if error else "it wants no connection any more"

    def end(self) -> None:
        """Offer no connection any more. Connections that are in use stay."""
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()
