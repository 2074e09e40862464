"""The gate, the port where a master accepts workers that dial it, and the launcher for such workers. Runs on the
master.

A worker that has joined always offers one connection that is not in use. The master takes it when it needs one: for
control, for data, and for heartbeats while its event loop is blocked. The worker then offers the next one. The gate has
its own thread and event loop, so it answers however long user code blocks the master's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ddlf.cluster.launch.launcher import Address, Incarnation, Launcher, Way
from ddlf.errors import ConfigError, ConnectError, DDLFError, ProtocolError
from ddlf.rpc.admission import Admission
from ddlf.rpc.handshake import HANDSHAKE_TIMEOUT_S, PREAMBLE, Role, is_http, read_preamble
from ddlf.rpc.join import ANY_PLACE, GateVerdict, Offer, receive_offer
from ddlf.rpc.listen import accepted, answer_http, close_if_cancelled, listening_socket, refusal
from ddlf.rpc.offers import Offers
from ddlf.rpc.stream import receive_exactly
from ddlf.rpc.tls import is_loopback
from ddlf.rpc.tokens import Tokens, find_tokens, loopback_tokens
from ddlf.worker.machine import addresses_in, addresses_of

log = logging.getLogger(__name__)

MOST_GREETINGS = 64
"""Greetings from one address at the same time: so many workers may share the address of a NAT."""
LEFT_AFTER_S = 5.0
"""Seconds without a waiting connection; then a worker that takes any place may have this one. A worker whose
connection was cut off offers the next one sooner.
"""
LAST_OFFERS_S = 2.0
"""Seconds at the end for workers that have no connection waiting, because they just dial."""
LOOK_S = 0.5
"""Seconds between two looks at the connections of a worker that may be gone."""
START_TIMEOUT_S = 600.0
ANY_HOST = "0.0.0.0"
LOOPBACK_HOST = "127.0.0.1"
ASK_S = 3.0
"""Longest time to ask an engine why a worker has not come, in seconds."""
SAY_AFTER_S = 3.0
"""Seconds until the first line about places whose workers have not joined."""

T = TypeVar("T")


class PlaceState(Offers):
    """The state of one place, a numbered position that one worker at a time can take by joining.

    Attributes:
        is_told: Whether its worker knows that the run is over.
        never: Why no worker comes any more, in the engine's words; empty if one may come.
    """

    is_told = False
    never = ""

    def keep(self, sock: socket.socket, incarnation: int) -> None:
        self.never = ""
        super().keep(sock, incarnation)


class Gate:
    """Accepts workers that dial this master. Each joins at a place, a number from 0.

    Args:
        host: An address of this machine, or a wildcard.
        port: The port; 0 for any free one.
        tokens: Accepted tokens.
        count: Number of places.

    Attributes:
        port: The port that it listens on.
        came: Set when a worker has joined; the launcher waits for it. Belongs to the gate's loop.
        has_begun: Whether the run has begun, perhaps without some workers.
        absent_at_start: Places without a worker when the run began, and the engine's reason for each. The first
            attempt to connect to one fails at once, so that the run can begin. Later attempts wait for its worker.
            Belongs to the gate's loop.

    Raises:
        ListenError: The address is taken, or not permitted.
    """

    def __init__(self, host: str, port: int, tokens: tuple[bytes, ...], count: int) -> None:
        self._tokens = tokens
        self._listener = listening_socket(host, port)
        self.host, self.port = self._listener.getsockname()[:2]
        self._states = [PlaceState() for _ in range(count)]
        self._loop = asyncio.new_event_loop()
        self._admission = Admission(log.info, lambda: 0, per_address=MOST_GREETINGS)
        self._thread = threading.Thread(target=self._run, name="ddlf-gate", daemon=True)
        self.came = asyncio.Event()
        self.has_begun = False
        self.absent_at_start: dict[int, str] = {}
        self._is_over = False
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        accepting = self._loop.create_task(self._accept())
        self._loop.run_forever()
        tasks = [accepting, *self._admission.tasks]
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        for state in self._states:
            state.close()
        self._listener.close()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    def addresses(self, network: str | None = None) -> str:
        """Return the addresses where workers may reach the gate, with commas, as ``ddlf-worker --join`` takes them.

        Args:
            network: An interface or a network of this machine; None for all.

        Raises:
            ConfigError: This machine has no address in the network.
        """
        hosts = addresses_of(self.host) if network is None else addresses_in(network)
        return ",".join(f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}" for host in hosts)

    def close(self) -> None:
        """End all waiting connections, and the thread. Connections that were taken stay. Safe to call again."""
        with contextlib.suppress(RuntimeError):  # it is closed already
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    @property
    def is_over(self) -> bool:
        """Whether the run is over, so that no worker must start again."""
        return self._is_over

    def incarnation(self, place: int) -> int:
        """Return the incarnation of the last worker that has joined at a place; 0 if none has."""
        return self._states[place].incarnation

    async def end_workers(self) -> None:
        """Tell each joined worker that the run is over, also a worker that offers its next connection only now. Runs in
        the gate's loop.
        """
        self._is_over = True
        for state in self._states:
            state.is_told = state.tell_over() or state.is_told
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_OFFERS_S):
                while not all(state.is_told or not state.incarnation for state in self._states):
                    self.came.clear()
                    await self.came.wait()

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the gate's loop, from any other loop.

        Raises:
            ConnectError: The gate is closed.
        """
        try:
            running = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:
            coroutine.close()
            raise ConnectError("the gate is closed", hint="connect the cluster again") from None
        return await asyncio.wrap_future(running)

    async def take(self, place: int, timeout_s: float) -> socket.socket:
        """Return a connection to the worker at a place, connected and not in use. Called in any loop.

        Raises:
            ConnectError: The place has no worker now, and none joined in time.
        """
        return await self.run(self._take(self._states[place], place, timeout_s))

    async def _take(self, state: PlaceState, place: int, timeout_s: float) -> socket.socket:
        if not state.waiting and place in self.absent_at_start:
            reason = self.absent_at_start.pop(place)
            raise ConnectError(f"place {place}: no worker has joined there yet" + (f": {reason}" if reason else ""))
        if state.never and not state.waiting:
            raise ConnectError(f"place {place}: {state.never}")
        try:
            return await state.take(timeout_s)
        except TimeoutError:
            problem = "the worker there offers no connection" if state.incarnation else "no worker has joined there"
            raise ConnectError(
                f"place {place}: {problem} within {timeout_s:.3g} s",
                hint=f"start one with: ddlf-worker --join HOST:{self.port}" if not state.incarnation else "",
            ) from None

    def give_up(self, place: int, reason: str) -> None:
        """End all waits for a worker at a place, because its engine starts none any more. Runs in the gate's loop."""
        state = self._states[place]
        state.never = reason
        state.fail(ConnectError(f"place {place}: {reason}"))

    async def wait(self, least: int) -> list[int]:
        """Wait until at least this number of places have a worker; return the places without one. In the gate's loop."""
        while True:
            self.came.clear()
            absent = [place for place, state in enumerate(self._states) if not state.incarnation]
            if len(self._states) - len(absent) >= least:
                return absent
            await self.came.wait()

    async def wait_until_gone(self, place: int, former: int, for_s: float) -> None:
        """Wait until a worker has joined at a place and has offered no connection for some seconds. Runs in the gate's loop.

        Args:
            place: The place.
            former: The worker's incarnation is not this one.
            for_s: So many seconds. A worker that has only lost its connection offers the next one in less than a second.
        """
        state = self._states[place]
        while state.incarnation == former or not self._is_left(state, for_s):  # noqa: ASYNC110 - time alone
            await asyncio.sleep(LOOK_S)

    async def absent(self) -> list[int]:
        """Return the places that no worker has joined yet. Runs in the gate's loop."""
        return await self.wait(0)

    # -- workers ------------------------------------------------------------------------------------------------------

    async def _accept(self) -> None:
        while True:
            try:
                sock, address = await accepted(self._listener)
            except OSError as error:
                self._admission.log_refusal("a connection", f"cannot accept it: {error.strerror}")
                await asyncio.sleep(0.1)
                continue
            greeting = self._admission.start(self._greet(sock, address[0]), address[0])
            greeting.add_done_callback(partial(close_if_cancelled, sock))
            await asyncio.sleep(0)

    async def _greet(self, sock: socket.socket, address: str) -> None:
        is_owned = True
        opening = b""
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                opening = await receive_exactly(sock, PREAMBLE.size)
                if read_preamble(opening) is not Role.JOIN:
                    raise ProtocolError("a master dials here, but this is the gate of another master")
                offer = await receive_offer(sock, opening, self._tokens, lambda offer: self._judge(offer)[0])
                if offer is not None:
                    self._states[self._judge(offer)[1]].keep(sock, offer.incarnation)
                    self.came.set()
                    is_owned = False
        except (DDLFError, OSError) as error:
            if is_http(opening):
                answer_http(sock)
            self._admission.log_refusal(address, refusal(error, HANDSHAKE_TIMEOUT_S))
        finally:
            if is_owned:
                sock.close()

    def _judge(self, offer: Offer) -> tuple[GateVerdict, int]:
        place = offer.place
        if self._is_over:
            for state in self._states:
                state.is_told = state.is_told or state.incarnation == offer.incarnation
            self.came.set()
            return GateVerdict.OVER, 0
        if place == ANY_PLACE:
            former = [i for i, state in enumerate(self._states) if state.incarnation == offer.incarnation]
            free = former or [i for i, state in enumerate(self._states) if not state.incarnation]
            free = free or [i for i, state in enumerate(self._states) if self._is_left(state)]
            if not free:
                return GateVerdict.FULL, 0
            place = free[0]
        if place >= len(self._states):
            return GateVerdict.NO_SUCH_PLACE, 0
        if offer.incarnation < self._states[place].incarnation:
            return GateVerdict.REPLACED, place
        return GateVerdict.WELCOME, place

    def _is_left(self, state: PlaceState, for_s: float = LEFT_AFTER_S) -> bool:
        return state.left_at is not None and self._loop.time() - state.left_at >= for_s


class Joined(Launcher):
    """Workers that dial this master: ``ddlf-worker --join HOST:PORT``.

    A worker's number is its place + 1, in whatever order the workers come.

    Args:
        n: Number of places, 1 to 1,024.
        host: The address that the master listens on. With a token the default is all addresses, else only loopback.
        port: The port; 0 for any free one.
        least: How many workers are enough to begin. The others may come later. None waits for all.
        token_file: The argument of ``Cluster``.
        tokens: The secret of this run, instead of the file's.
        start_timeout_s: Seconds to wait for the workers.

    Attributes:
        ends_workers: Whether the workers end with the run. Workers that a user has started wait for the next one.

    Raises:
        ConfigError: The number or the time is invalid, or there is no token for other machines.
    """

    ends_workers = False
    fixed_places = True

    def __init__(
        self,
        n: int,
        host: str | None = None,
        port: int = 9100,
        *,
        least: int | None = None,
        token_file: str | Path | None = None,
        tokens: Tokens | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= 1024:
            raise ConfigError(f"the number of workers must be 1-1024, got {n!r}")
        if least is not None and (isinstance(least, bool) or not isinstance(least, int) or not 1 <= least <= n):
            raise ConfigError(f"least must be 1-{n}, the number of places, got {least!r}")
        if isinstance(start_timeout_s, bool) or not start_timeout_s > 0:
            raise ConfigError(f"start_timeout_s must be a number of seconds above 0, got {start_timeout_s!r}")
        tokens = tokens or find_tokens(token_file)
        self.host = host or (ANY_HOST if tokens else LOOPBACK_HOST)
        if tokens is None and not (self.host == "localhost" or _is_address_of_this_machine_only(self.host)):
            raise ConfigError(
                f"refusing to listen on {self.host} without a token",
                hint="run 'ddlf token new' and copy the file to the other machines",
            )
        self.tokens = tokens or loopback_tokens()
        self.port = port
        self.least = None if least == n else least
        self.addresses: list[Address] = [(f"place {index}", 0) for index in range(n)]
        self._start_timeout_s = start_timeout_s
        self._gate: Gate | None = None

    @property
    def gate(self) -> Gate:
        """The open gate of this launcher, where its workers join.

        Raises:
            ConnectError: The cluster is not connected.
        """
        if self._gate is None:
            raise ConnectError("the gate is closed", hint="connect the cluster again")
        return self._gate

    def open(self) -> Gate:
        """Open the gate: begin to listen for workers. Safe to call again.

        Raises:
            ListenError: The address is taken, or not permitted.
        """
        if self._gate is None:
            self._gate = Gate(self.host, self.port, self.tokens.all, len(self.addresses))
        return self._gate

    async def start(self, modules: Sequence[str] = ()) -> list[Address]:
        """Wait until all workers have joined, or ``least`` of them. After ``start_timeout_s`` continue without the
        others, if any has joined.
        """
        gate = self.open()
        count = len(self.addresses)
        coming = asyncio.ensure_future(gate.run(gate.wait(self.least or count)))
        failing = asyncio.ensure_future(self._failed())
        telling = asyncio.ensure_future(self._tell_who_is_missing(gate))
        tasks = coming, failing, telling
        try:
            await asyncio.wait({coming, failing}, timeout=self._start_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if failing.done() and not coming.done():
                raise failing.result()
            absent_places = await gate.run(gate.absent())
            absent = dict(zip(absent_places, await asyncio.gather(*map(self._reason_for, absent_places)), strict=True))
            if len(absent) == count:
                reasons = "; ".join(dict.fromkeys(filter(None, absent.values())))
                hint = "look at the output of its job"
                if not self.ends_workers:
                    hint = f"start one with: ddlf-worker --join HOST:{gate.port}"
                elif reasons:
                    hint = "correct that, or wait longer: start_timeout=SECONDS"
                raise ConnectError(
                    f"no worker joined at port {gate.port} within {self._start_timeout_s:g} s"
                    + (f": {reasons}" if reasons else ""),
                    hint=hint,
                )
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await gate.run(self._continue_without(gate, absent))
        return self.addresses

    async def _continue_without(self, gate: Gate, absent: Mapping[int, str]) -> None:
        gate.absent_at_start.update({index: reason for index, reason in absent.items() if not gate.incarnation(index)})
        gate.has_begun = True

    async def _failed(self) -> ConnectError:
        """Wait until it is certain that a place gets no worker, and return the error."""
        never: asyncio.Future[ConnectError] = asyncio.get_running_loop().create_future()
        return await never

    async def _reason_for(self, index: int) -> str:
        """Return why a worker has not come yet, also if the engine does not answer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ASK_S):
                return await self.waits(index)
        return ""

    async def _tell_who_is_missing(self, gate: Gate) -> None:
        """Print the places without a worker, each with the reason, after some seconds and at each change."""
        shown = ""
        while True:
            await asyncio.sleep(SAY_AFTER_S)
            absent = await gate.run(gate.absent())
            by_reason: dict[str, list[int]] = {}
            for index, reason in zip(absent, await asyncio.gather(*map(self._reason_for, absent)), strict=True):
                by_reason.setdefault(reason, []).append(index)
            lines = [
                f"{_numbered_places(numbers)}{f': {reason}' if reason else ''}" for reason, numbers in by_reason.items()
            ]
            advice = "" if self.ends_workers else f"; start them with: ddlf-worker --join HOST:{gate.port}"
            text = f"waiting for workers at {'; '.join(lines)}{advice}"
            if absent and text != shown:
                log.warning("%s", text)
                shown = text

    def incarnation(self, index: int) -> Incarnation:
        number = 0 if self._gate is None else self._gate.incarnation(index)
        return Incarnation(number, self.engine_name(index))

    def engine_name(self, index: int) -> str:
        """Return the name of what runs the worker of a place in its engine, such as a job; empty without one."""
        return ""

    def comes_later(self, index: int) -> bool:
        return self._gate is not None and not self._gate.incarnation(index) and not self.never(index)

    def way(self, index: int) -> Way:
        return lambda timeout_s: self.gate.take(index, timeout_s)

    async def stop(self) -> None:
        gate, self._gate = self._gate, None
        if gate is None:
            return
        try:
            if self.ends_workers:
                await gate.run(gate.end_workers())
        finally:
            try:
                await self._wait_for_workers_end(gate)
            finally:
                await asyncio.to_thread(gate.close)

    async def _wait_for_workers_end(self, gate: Gate) -> None:
        """Wait until the workers have ended. They know that the run is over."""


def _is_address_of_this_machine_only(host: str) -> bool:
    try:
        return is_loopback(host)
    except ValueError:  # a name
        return False


def _numbered_places(numbers: Sequence[int]) -> str:
    """Return the numbers of places in words, such as ``"places 0, 1 and 3"``, for a message."""
    *first, last = map(str, numbers)
    return f"places {', '.join(first)} and {last}" if first else f"place {last}"
