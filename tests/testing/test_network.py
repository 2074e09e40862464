"""Tests of each fault of the proxy, with raw sockets at both ends."""

import asyncio
import itertools
import socket
import struct
import time

import numpy as np
import pytest

from ddlf.rpc.dial import open_socket, receive_exactly
from ddlf.rpc.handshake import Role, new_hello
from ddlf.rpc.listen import listening_socket
from ddlf.testing.network import Fault, FaultProxy
from tests.patience import PATIENCE_S

PREAMBLE = b"x" * 8
RESET = "ECONNRESET"
LINGER_0 = struct.pack("ii", 1, 0)


class Line:
    """A proxy between two raw sockets. ``carry`` sends bytes from one to the other, and returns the received bytes."""

    def __init__(self):
        self.loop = asyncio.get_running_loop()
        self.listener = listening_socket("127.0.0.1", 0)
        self.proxy = FaultProxy("127.0.0.1", self.listener.getsockname()[1], seed=1)
        self.sockets = []

    async def connect(self, first=PREAMBLE):
        """Open a connection through the proxy. Return the master's end and the worker's end."""
        master = await open_socket("127.0.0.1", self.proxy.port)
        await self.loop.sock_sendall(master, first)
        async with asyncio.timeout(PATIENCE_S):
            worker, _ = await self.loop.sock_accept(self.listener)
            assert await receive_exactly(worker, len(first)) == first
        self.sockets += [master, worker]
        return master, worker

    async def carry(self, sender, receiver, data):
        """Send all data. Return the received bytes and the seconds that this took."""
        begin = time.monotonic()
        async with asyncio.timeout(PATIENCE_S):
            _, got = await asyncio.gather(self.loop.sock_sendall(sender, data), receive_exactly(receiver, len(data)))
        return got, time.monotonic() - begin

    async def nothing(self, sock, seconds=0.2):
        """Check that a socket receives neither a byte nor an end for some seconds."""
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.loop.sock_recv(sock, 1)
        return True

    async def rest(self, sock):
        """Return all remaining bytes and the kind of end: b"" or a reset."""
        data = b""
        async with asyncio.timeout(PATIENCE_S):
            try:
                while chunk := await self.loop.sock_recv(sock, 65536):
                    data += chunk
            except ConnectionResetError:
                return data, RESET
        return data, "FIN"


@pytest.fixture
async def line():
    opened = Line()
    async with opened.proxy:
        yield opened
    for sock in (opened.listener, *opened.sockets):
        sock.close()


def random_bytes(count):
    return np.random.default_rng(0).bytes(count)


async def test_without_a_fault_every_byte_passes_in_both_directions(line):
    master, worker = await line.connect()
    data = random_bytes(5_000_000)
    outward, returned = await asyncio.gather(line.carry(master, worker, data), line.carry(worker, master, data[::-1]))
    assert (outward[0], returned[0]) == (data, data[::-1])
    assert line.proxy.bytes == {"to_worker": len(data) + 8, "to_master": len(data)}
    assert line.proxy.connections == 1


async def test_a_half_closed_connection_stays_open_in_the_other_direction(line):
    master, worker = await line.connect()
    master.shutdown(socket.SHUT_WR)
    assert await line.rest(worker) == (b"", "FIN")
    assert (await line.carry(worker, master, b"still here"))[0] == b"still here"


async def test_delay_makes_each_byte_late_without_reducing_the_bandwidth(line):
    master, worker = await line.connect()
    line.proxy.set(Fault(delay_s=0.5), "to_worker")
    _, seconds = await line.carry(master, worker, b"one")
    assert seconds >= 0.5
    _, seconds = await line.carry(worker, master, b"two")
    assert seconds < 0.5
    begin = time.monotonic()
    for _ in range(10):  # all chunks are on their way at once
        await line.loop.sock_sendall(master, b"x")
        await asyncio.sleep(0.01)
    await receive_exactly(worker, 10)
    assert 0.5 <= time.monotonic() - begin < 10 * 0.5


async def test_jitter_is_random_and_keeps_the_order(line):
    master, worker = await line.connect()
    line.proxy.set(Fault(delay_s=0.01, jitter_s=0.1))
    times = []
    for number in range(20):
        got, seconds = await line.carry(master, worker, bytes([number]))
        assert got == bytes([number])
        times.append(seconds)
    assert max(times) - min(times) > 0.03


async def test_throttle_bounds_the_bytes_per_second(line):
    master, worker = await line.connect()
    line.proxy.set(Fault(bytes_per_s=1_000_000), "to_worker")
    got, seconds = await line.carry(master, worker, random_bytes(500_000))
    assert got == random_bytes(500_000)
    assert seconds > 0.45


async def test_a_slow_drip_sends_single_bytes(line):
    master, worker = await line.connect()
    line.proxy.set(Fault(bytes_per_s=50, piece_bytes=1))
    begin = time.monotonic()
    await line.loop.sock_sendall(master, b"slow drip")
    assert await receive_exactly(worker, 1) == b"s"
    assert line.proxy.bytes["to_worker"] < len(PREAMBLE) + 9
    assert await receive_exactly(worker, 8) == b"low drip"
    assert time.monotonic() - begin > 7 / 50


@pytest.mark.parametrize("stopped", ["to_worker", "to_master", None])
async def test_a_partition_is_silent_and_sent_bytes_arrive_when_it_heals(line, stopped):
    master, worker = await line.connect()
    line.proxy.partition(stopped)
    for direction, sender, receiver in (("to_worker", master, worker), ("to_master", worker, master)):
        if stopped in (direction, None):
            await line.loop.sock_sendall(sender, b"held")
            assert await line.nothing(receiver)
        else:
            assert (await line.carry(sender, receiver, b"goes"))[0] == b"goes"
    line.proxy.heal()
    if stopped in ("to_worker", None):
        assert await receive_exactly(worker, 4) == b"held"
    if stopped in ("to_master", None):
        assert await receive_exactly(master, 4) == b"held"


async def test_a_partition_hides_the_end_of_a_connection_too(line):
    for end in ("FIN", RESET):
        master, worker = await line.connect()
        line.proxy.partition("to_worker")
        if end == RESET:
            master.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_0)
        master.close()
        # The master's kernel answers the worker's bytes with RST, which does not arrive either.
        await line.loop.sock_sendall(worker, b"is anybody there?")
        assert await line.nothing(worker)
        line.proxy.heal()
        assert (await line.rest(worker))[0] == b""


async def test_new_connection_hears_nothing_until_a_partition_heals(line):
    line.proxy.partition()
    master = await open_socket("127.0.0.1", line.proxy.port)
    line.sockets.append(master)
    await line.loop.sock_sendall(master, PREAMBLE)
    assert await line.nothing(master)
    with pytest.raises(BlockingIOError):
        line.listener.accept()
    line.proxy.heal()
    async with asyncio.timeout(PATIENCE_S):
        worker, _ = await line.loop.sock_accept(line.listener)
    line.sockets.append(worker)
    assert await receive_exactly(worker, 8) == PREAMBLE


async def test_flip_changes_one_bit_of_every_so_many_bytes(line):
    master, worker = await line.connect()
    line.proxy.set(Fault(flip_every=1000), "to_worker")
    data = random_bytes(100_000)
    got, _ = await line.carry(master, worker, data)
    bits = np.unpackbits(np.frombuffer(data, np.uint8) ^ np.frombuffer(got, np.uint8)).reshape(100, 8000)
    assert bits.sum(axis=1).tolist() == [1] * 100
    assert (await line.carry(worker, master, data))[0] == data


@pytest.mark.parametrize("by", ["fin", "rst"])
async def test_a_connection_can_end_after_an_exact_number_of_bytes(line, by):
    master, worker = await line.connect()
    line.proxy.set(Fault(end_after=12_345, end_by=by), "to_master")
    data = random_bytes(100_000)
    await line.loop.sock_sendall(worker, data)
    got, end = await line.rest(master)
    assert end == ("FIN" if by == "fin" else RESET)
    assert data.startswith(got)
    assert len(got) == 12_345 if by == "fin" else len(got) <= 12_345  # a reset may overtake unread bytes


async def test_reset_and_cut_end_both_sides_at_once(line):
    for end, name in ((line.proxy.reset, RESET), (line.proxy.cut, "FIN")):
        master, worker = await line.connect()
        assert end() == 1
        assert await line.rest(master) == await line.rest(worker) == (b"", name)


async def test_a_reset_of_one_end_reaches_the_other(line):
    master, worker = await line.connect()
    worker.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_0)
    worker.close()
    assert await line.rest(master) == (b"", RESET)


async def test_a_connection_without_a_listener_is_reset(line):
    line.listener.close()
    master = await open_socket("127.0.0.1", line.proxy.port)
    line.sockets.append(master)
    await line.loop.sock_sendall(master, PREAMBLE)
    assert await line.rest(master) == (b"", RESET)


async def test_a_fault_can_be_for_control_or_for_data_alone(line):
    ends = {role: await line.connect(new_hello(role, 100, b"key").encode()) for role in (Role.CONTROL, Role.DATA)}
    line.proxy.partition(kind="data")
    master, worker = ends[Role.CONTROL]
    assert (await line.carry(master, worker, b"ping"))[0] == b"ping"
    master, worker = ends[Role.DATA]
    await line.loop.sock_sendall(master, b"held")
    assert await line.nothing(worker)
    assert line.proxy.reset(kind="control") == 1


async def test_the_sender_waits_when_the_buffers_are_full(line):
    master, _ = await line.connect()
    line.proxy.partition()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await line.loop.sock_sendall(master, bytes(64_000_000))


async def test_faults_can_change_while_bytes_flow(line):
    master, worker = await line.connect()
    data = random_bytes(3_000_000)
    carrying = asyncio.ensure_future(line.carry(master, worker, data))
    faults = [Fault(delay_s=0.05), Fault(stopped=True), Fault(bytes_per_s=2e6), Fault(piece_bytes=100)]
    for fault in itertools.islice(itertools.cycle(faults), 20):
        line.proxy.set(fault)
        await asyncio.sleep(0.01)
    line.proxy.heal()
    assert (await carrying)[0] == data


async def test_the_port_can_be_used_again_after_the_end(line):
    master, _ = await line.connect()
    port = line.proxy.port
    await line.proxy.close()
    assert await line.rest(master) == (b"", RESET)
    with pytest.raises(ConnectionRefusedError):
        await open_socket("127.0.0.1", port)
    assert await line.proxy.start() == port
    await line.connect()
