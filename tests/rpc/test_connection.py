"""Tests of a connection: frames arrive whole and without copies, memory is limited, and each end has a reason."""

import asyncio
import contextlib
import gc
import socket
import ssl
import tracemalloc
import weakref

import numpy as np
import pytest

from ddlf.errors import FrameTooLarge, ProtocolError
from ddlf.rpc.admission import Budget
from ddlf.rpc.connection import Connection
from ddlf.rpc.messages import PREFIX, Frame, Limits, dumps, encode_frame, loads
from tests.patience import PATIENCE_S
from tests.sockets import socket_pair
from tests.tls import encrypted_pair

LIMITS = Limits()
MIB = 1024**2


class End:
    """One end of a connection, which records the frames and the end that it receives."""

    def __init__(self, sock: socket.socket, **options):
        self.frames: list[Frame] = []
        self.ends: list[BaseException | None] = []
        self.news = asyncio.Event()
        self.on_frame = lambda frame: None
        self.connection = Connection(sock, self._frame, self._end, **{"limits": LIMITS, **options})

    async def post(self, *frame):
        self.connection.send(*frame)
        await self.connection.drain()

    def _frame(self, frame):
        self.frames.append(frame)
        self.news.set()
        self.on_frame(frame)

    def _end(self, reason):
        self.ends.append(reason)
        self.news.set()

    async def until(self, condition):
        """Wait until ``condition`` holds; it is checked after each frame and after the end."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self.news.clear()
                await self.news.wait()

    async def receive(self, count: int) -> list[Frame]:
        await self.until(lambda: len(self.frames) >= count)
        return self.frames

    async def end(self) -> BaseException | None:
        await self.until(lambda: self.ends)
        return self.ends[0]


@pytest.fixture(params=["plain", "encrypted"])
async def ends(request):
    """Yield two connected ends, and close them after the test."""
    left, right = map(End, socket_pair() if request.param == "plain" else await encrypted_pair())
    yield left, right
    for end in (left, right):
        end.connection.close()


@pytest.fixture
async def raw():
    """Yield a connection, and the bare socket at its other end."""
    sock, peer = socket_pair()
    end = End(sock)
    with peer:
        yield end, peer
    end.connection.close()


def message(*buffers, id=1) -> bytes:
    return b"".join(encode_frame(1, id, "run", list(buffers), limits=LIMITS))


async def settle():
    """Let the event loop run its ready callbacks."""
    for _ in range(3):
        await asyncio.sleep(0)


# --- Sending and receiving -------------------------------------------------------------------------------------------


async def test_frames_arrive_whole_and_in_order_in_both_directions(ends):
    left, right = ends
    for number in range(1000):
        left.connection.send(1, number, "run", [b"v" * (number % 50)], 0.5)
        right.connection.send(2, number, "", [])
    assert await right.receive(1000) == [Frame(1, n, "run", 0.5, [b"v" * (n % 50)]) for n in range(1000)]
    assert await left.receive(1000) == [Frame(2, n, "", None, []) for n in range(1000)]


async def test_small_and_large_buffers_arrive_in_one_frame(ends):
    left, right = ends
    buffers = [b"tree", b"x" * 3 * MIB, b"", b"y" * 100, b"z" * 20_000]
    await left.post(1, 1, "run", buffers)
    (frame,) = await right.receive(1)
    assert [bytes(buffer) for buffer in frame.buffers] == buffers


async def test_thousands_of_buffers_arrive_in_one_frame(ends):
    left, right = ends
    buffers = [bytes([number % 256]) * 17_000 for number in range(2000)]
    await left.post(1, 1, "run", buffers)
    (frame,) = await right.receive(1)
    assert frame.buffers == buffers


async def test_a_thousand_frames_in_one_segment_all_arrive(raw):
    end, peer = raw
    peer.send(b"".join(message(b"", id=number) for number in range(1000)))
    assert [frame.id for frame in await end.receive(1000)] == list(range(1000))


async def test_a_frame_that_comes_byte_by_byte_arrives(raw):
    end, peer = raw
    for byte in message(b"value"):
        assert not end.frames
        peer.send(bytes([byte]))
        await settle()
    assert (await end.receive(1))[0].buffers == [b"value"]


async def test_every_byte_is_counted_on_both_sides(ends):
    left, right = ends
    total = 0
    for buffers in ([], [b"a"], [b"b" * 100_000], [b"c" * 5 * MIB, b"d"]):
        total += sum(len(piece) for piece in encode_frame(1, 1, "run", buffers, limits=LIMITS))
        await left.post(1, 1, "run", buffers)
    await right.receive(4)
    assert (left.connection.bytes_sent, left.connection.bytes_received) == (total, 0)
    assert (right.connection.bytes_sent, right.connection.bytes_received) == (0, total)


# --- Copies ----------------------------------------------------------------------------------------------------------


async def test_an_array_is_not_copied_to_be_sent():
    left, right = socket_pair()
    end = End(left)
    array = np.ones(8 * MIB, np.uint8)
    gc.collect()
    tracemalloc.start()
    try:
        end.connection.send(2, 1, "", dumps(array))
        assert end.connection.queued_bytes > 7 * MIB, "the kernel holds a part, the rest waits"
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MIB, "what the encoder needs for itself, whatever the size of the array"
    end.connection.close()
    right.close()


async def test_an_array_is_received_into_the_memory_that_it_keeps():
    allocated = []

    def allocate(size):
        allocated.append(np.empty(size, np.uint8))
        return allocated[-1]

    left, right = socket_pair()
    sender, receiver = End(left), End(right, allocate=allocate)
    array = np.arange(MIB, dtype=np.float32)
    await sender.post(2, 1, "", dumps({"w": array, "small": np.arange(3)}))
    (frame,) = await receiver.receive(1)
    value = loads(frame.buffers)
    assert [len(memory) for memory in allocated] == [array.nbytes]
    assert np.shares_memory(value["w"], allocated[0])
    np.testing.assert_array_equal(value["w"], array)
    sender.connection.close()
    receiver.connection.close()


# --- Backpressure ----------------------------------------------------------------------------------------------------


async def test_drain_returns_only_when_the_kernel_has_taken_everything(raw):
    end, peer = raw
    end.connection.send(1, 1, "run", [b"x" * 10 * MIB])
    drained = asyncio.create_task(end.connection.drain())
    await settle()
    assert not drained.done()
    assert end.connection.queued_bytes > 0
    total_bytes = end.connection.queued_bytes + end.connection.bytes_sent
    while not drained.done():
        assert peer.recv(MIB)
        await settle()
    assert end.connection.queued_bytes == 0
    assert end.connection.bytes_sent == total_bytes


async def test_drain_does_not_wait_for_messages_queued_after_it(raw):
    end, peer = raw
    end.connection.send(1, 1, "run", [b"x" * 3 * MIB])
    target = end.connection.queued_bytes + end.connection.bytes_sent
    drained = asyncio.create_task(end.connection.drain())
    await settle()
    end.connection.send(1, 2, "run", [b"y" * 30 * MIB])
    received = 0
    while not drained.done():
        received += len(peer.recv(MIB))
        await settle()
    assert end.connection.queued_bytes > 20 * MIB
    assert received <= target


async def test_drain_can_return_with_some_bytes_queued(raw):
    end, peer = raw
    end.connection.send(1, 1, "run", [b"x" * 10 * MIB])
    drained = asyncio.create_task(end.connection.drain(leave=4 * MIB))
    await settle()
    while not drained.done():
        assert end.connection.queued_bytes > 4 * MIB
        assert peer.recv(MIB // 4)
        await settle()
    assert 3 * MIB < end.connection.queued_bytes <= 4 * MIB
    await end.connection.drain(leave=4 * MIB)


async def test_a_detached_message_may_change_and_is_copied_once(raw):
    end, peer = raw
    data = bytearray(b"x" * 8 * MIB)
    end.connection.send(1, 1, "run", [data])
    tracemalloc.start()
    end.connection.detach()
    memory_of_one, _ = tracemalloc.get_traced_memory()
    end.connection.detach()
    twice, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert memory_of_one > 4 * MIB
    assert twice - memory_of_one < MIB
    data[:] = b"y" * len(data)
    received = b""
    while len(received) < len(data):
        received += peer.recv(MIB)
        await settle()
    assert b"y" not in received[-MIB:]


async def test_abort_resets_a_tcp_connection_instead_of_sending_the_queue():
    with socket.create_server(("127.0.0.1", 0)) as server:
        sock = socket.create_connection(server.getsockname())
        peer, _ = server.accept()
        sock.setblocking(False)
        end = End(sock)
        end.connection.send(1, 1, "run", [b"x" * 20 * MIB])
        end.connection.abort()
        end.connection.abort()
        assert end.ends == [None]
        received = []
        with peer, pytest.raises(ConnectionResetError):
            received.extend(iter(lambda: peer.recv(MIB), b""))


async def test_drain_returns_at_once_when_nothing_waits(ends):
    await ends[0].connection.drain()
    ends[0].connection.send(1, 1, "run", [b"small"])
    await asyncio.wait_for(ends[0].connection.drain(), PATIENCE_S)


async def test_a_peer_that_stops_reading_stops_a_sender_that_drains(raw):
    end, _ = raw
    sent = 0

    async def send_indefinitely():
        nonlocal sent
        while True:
            await end.post(1, 1, "run", [b"x" * 100_000])
            sent += 1

    task = asyncio.create_task(send_indefinitely())
    before = -1
    while sent != before:
        before = sent
        await settle()
    assert 0 < end.connection.queued_bytes <= 100_100, "one message waits, whatever comes after it"
    task.cancel()


async def test_a_cancelled_drain_does_not_disturb_other_drains(raw):
    end, peer = raw
    end.connection.send(1, 1, "run", [b"x" * 4 * MIB])
    first, second = (asyncio.create_task(end.connection.drain()) for _ in range(2))
    await settle()
    first.cancel()
    while not second.done():
        assert peer.recv(MIB)
        await settle()
    assert first.cancelled()
    await second


async def test_nothing_is_read_while_reading_is_paused(raw):
    end, peer = raw
    end.connection.pause_reading()
    end.connection.pause_reading()
    peer.send(message(b"value"))
    await settle()
    assert end.frames == []
    assert end.connection.bytes_received == 0
    end.connection.resume_reading()
    end.connection.resume_reading()
    assert len(await end.receive(1)) == 1


async def test_a_paused_receiver_makes_the_sender_wait(ends):
    left, right = ends
    right.connection.pause_reading()
    sending = asyncio.create_task(left.post(1, 1, "run", [b"x" * 20 * MIB]))
    await settle()
    assert not sending.done()
    right.connection.resume_reading()
    await asyncio.wait_for(sending, PATIENCE_S)
    await right.receive(1)


async def test_the_callback_can_pause_reading_while_a_large_buffer_arrives(raw):
    end, peer = raw
    end.on_frame = lambda frame: end.connection.pause_reading()
    peer.send(message(b"first"))
    await end.receive(1)
    peer.send(message(b"second"))
    await settle()
    assert len(end.frames) == 1
    end.connection.resume_reading()
    assert len(await end.receive(2)) == 2


async def test_the_event_loop_stays_responsive_while_a_large_message_arrives(ends):
    left, right = ends
    turns = 0

    async def count():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    sending = asyncio.create_task(left.post(1, 1, "run", [bytearray(64 * MIB)]))
    await right.receive(1)
    await sending
    counting.cancel()
    assert turns >= 10


# --- Ends ------------------------------------------------------------------------------------------------------------


async def test_an_end_between_messages_has_no_reason(raw):
    end, peer = raw
    peer.send(message(b"last"))
    peer.close()
    assert await end.end() is None
    assert len(end.frames) == 1, "what came before is delivered first"
    assert end.connection.closed


@pytest.mark.parametrize("length", [1, 15, 16, 20, 30, 100, 20_000])
async def test_an_end_in_the_middle_of_a_message_has_this_reason(raw, length):
    end, peer = raw
    data = message(b"tree", b"x" * 30_000)
    peer.send(data[:length])
    peer.close()
    reason = await end.end()
    assert isinstance(reason, ConnectionResetError)
    assert str(reason) == "the other side closed the connection in the middle of a message"
    assert end.frames == []


async def test_mid_frame_is_true_when_a_message_has_begun(raw):
    end, peer = raw
    assert not end.connection.mid_frame
    data = message(b"value")
    peer.send(data[:5])
    await settle()
    assert end.connection.mid_frame
    peer.send(data[5:])
    await end.receive(1)
    assert not end.connection.mid_frame


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (PREFIX.pack(0, 0, 0), "empty header"),
        (PREFIX.pack(2**32 - 1, 0, 0), "header 4294967295 > 65536 bytes"),
        (PREFIX.pack(5, 0, 2**64 - 1), "message 18446744073709551615 > 4294967296 bytes"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "header 542393671 > 65536 bytes"),
    ],
)
async def test_an_invalid_frame_ends_the_connection_after_the_valid_ones(raw, data, sentence):
    end, peer = raw
    peer.send(message(b"good") + data)
    reason = await end.end()
    assert isinstance(reason, ProtocolError)
    assert str(reason) == sentence
    assert len(end.frames) == 1
    await settle()
    assert peer.recv(1) == b""


async def test_nothing_is_allocated_for_a_message_above_the_limit():
    sock, peer = socket_pair()
    end = End(sock, limits=Limits(max_body_bytes=1000), allocate=lambda size: pytest.fail("allocated"))
    peer.send(message(b"x" * 30_000)[:100])
    assert str(await end.end()) == "message 30000 > 1000 bytes"
    peer.close()


async def test_a_protocol_error_of_the_callback_ends_the_connection(raw):
    end, peer = raw

    def refuse(frame):
        raise ProtocolError("not this one")

    end.on_frame = refuse
    peer.send(message(b"one") + message(b"two"))
    assert str(await end.end()) == "not this one"
    assert len(end.frames) == 1


async def test_any_other_error_of_the_callback_ends_the_connection_and_is_reported(raw):
    end, peer = raw
    reported = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context["exception"]))

    def fail(frame):
        raise ZeroDivisionError("a bug")

    end.on_frame = fail
    peer.send(message(b"one"))
    assert isinstance(await end.end(), ZeroDivisionError)
    await settle()
    assert [str(error) for error in reported] == ["a bug"]


async def test_no_frame_is_delivered_after_the_callback_closed_the_connection(raw):
    end, peer = raw
    end.on_frame = lambda frame: end.connection.close()
    peer.send(message(b"one") + message(b"two"))
    await end.end()
    await settle()
    assert len(end.frames) == 1


async def test_closing_twice_has_no_further_effect(ends):
    left, right = ends
    left.connection.close()
    left.connection.close()
    assert left.ends == [None]
    assert await right.end() is None
    left.connection.resume_reading()
    left.connection.pause_reading()


async def test_closing_drops_the_queue_and_ends_waiting_drains(raw):
    end, _ = raw
    end.connection.send(1, 1, "run", [b"x" * 5 * MIB])
    waiting = asyncio.create_task(end.connection.drain())
    await settle()
    end.connection.close()
    with pytest.raises(ConnectionResetError, match="the connection was closed"):
        await waiting
    with pytest.raises(ConnectionResetError, match="the connection is closed"):
        await end.connection.drain()


async def test_sending_on_a_closed_connection_is_an_error(ends):
    left, _ = ends
    left.connection.close()
    for size in (10, 100_000):
        with pytest.raises(ConnectionError, match="the connection is closed"):
            left.connection.send(1, 1, "run", [b"x" * size])


@pytest.mark.parametrize("size", [10, 100_000])
async def test_sending_to_a_closed_peer_is_an_error_and_ends_the_connection_once(raw, size):
    end, peer = raw
    end.connection.pause_reading()  # so that only the sender notices the end
    peer.close()
    with pytest.raises(ConnectionError):
        await end.post(1, 1, "run", [b"x" * size])
    assert end.connection.closed
    assert len(end.ends) == 1
    assert isinstance(end.ends[0], BrokenPipeError | ConnectionResetError)


async def test_waiting_drains_fail_when_the_peer_closes(raw):
    end, peer = raw
    sending = asyncio.create_task(end.post(1, 1, "run", [b"x" * 10 * MIB]))
    await settle()
    peer.close()
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(sending, PATIENCE_S)
    assert len(end.ends) == 1


async def test_a_message_above_the_peers_limit_is_refused_before_a_byte_is_sent():
    sock, peer = socket_pair()
    end = End(sock, peer_limits=Limits(max_body_bytes=1000))
    with peer:
        with pytest.raises(FrameTooLarge, match="a message of 1,001 bytes is over the receiver's limit of 1,000"):
            end.connection.send(1, 1, "run", [b"x" * 1001])
        assert (end.connection.bytes_sent, end.connection.queued_bytes) == (0, 0)
        end.connection.send(1, 1, "run", [b"x" * 1000])
        assert len(peer.recv(9999)) == end.connection.bytes_sent
        end.connection.close()


async def test_a_closed_connection_leaves_nothing_in_the_loop(ends):
    left, right = ends
    left.connection.send(1, 1, "run", [b"x" * 5 * MIB])
    left.connection.close()
    await right.end()
    selector = asyncio.get_running_loop()._selector
    assert not [key for key in selector.get_map().values() if key.fd in (-1,)]
    assert left.connection._sock.fileno() == -1


# --- Encrypted -------------------------------------------------------------------------------------------------------


async def test_memory_of_an_ended_connection_is_freed_without_garbage_collection(ends):
    left, right = ends
    left.connection.send(1, 1, "run", [b"x" * 40_000])
    await right.receive(1)
    references = [weakref.ref(referent) for referent in (right.connection, right.connection._decoder)]
    gc.collect()
    gc.disable()
    try:
        right.connection.close()
        right.connection = left.connection  # the last reference is gone
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()


async def test_an_encrypted_queued_message_arrives_unchanged_after_a_detach():
    client, worker = await encrypted_pair()
    sender, receiver = End(client), End(worker)
    receiver.connection.pause_reading()
    array = np.arange(4 * MIB, dtype=np.uint32)
    before = array.copy()
    sender.connection.send(2, 1, "", dumps(array))
    await settle()
    assert sender.connection.queued_bytes > 10 * MIB
    sender.connection.detach()  # moves the buffer that OpenSSL has begun to encrypt
    array[:] = 0
    receiver.connection.resume_reading()
    (frame,) = await receiver.receive(1)
    np.testing.assert_array_equal(loads(frame.buffers), before)
    await sender.connection.drain()
    sender.connection.close()
    receiver.connection.close()


async def test_frames_that_tls_has_decrypted_arrive_without_a_further_event():
    client, worker = await encrypted_pair()
    with client:
        # One TLS record has the end of a large frame, which is read into separate memory, and two small frames.
        large = message(b"L" * (33 * 1024))
        client.send(large[:-100])
        await asyncio.sleep(0)
        client.send(large[-100:] + message(b"a", id=2) + message(b"b", id=3))
        receiver = End(worker)
        frames = await receiver.receive(3)
        assert [frame.id for frame in frames] == [1, 2, 3]
        receiver.connection.close()


async def test_frames_that_came_with_the_end_of_the_handshake_arrive():
    client, worker = await encrypted_pair()
    with client:
        client.send(b"proof" + message(b"a") + message(b"b", id=2))
        while not worker.pending():
            with contextlib.suppress(ssl.SSLWantReadError):
                assert worker.recv(5) == b"proof"
        receiver = End(worker)
        assert [frame.id for frame in await receiver.receive(2)] == [1, 2]
        receiver.connection.close()


async def test_decrypted_frames_wait_while_reading_is_paused():
    client, worker = await encrypted_pair()
    with client:
        receiver = End(worker)
        receiver.on_frame = lambda frame: receiver.connection.pause_reading()
        client.send(message(b"L" * 20_000) + message(b"a", id=2) + message(b"b", id=3))
        for count in (1, 2, 3):
            while len(receiver.frames) < count:
                receiver.connection.resume_reading()
                await settle()
        assert [frame.id for frame in receiver.frames] == [1, 2, 3]
        receiver.connection.close()


async def test_a_flipped_bit_ends_an_encrypted_connection():
    client, worker = await encrypted_pair()
    receiver = End(worker)
    with client:
        client.send(message(b"weights"))
        await receiver.receive(1)
        # Below the TLS layer, this is a well-formed record with a wrong authentication tag.
        plain = socket.socket(fileno=client.fileno())
        plain.send(b"\x17\x03\x03\x00\x20" + bytes(32))
        plain.detach()
        assert isinstance(await receiver.end(), ssl.SSLError)
    assert len(receiver.frames) == 1


async def test_memory_for_receiving_is_counted_and_released(raw, monkeypatch):
    end, peer = raw
    budget = Budget(10 * MIB)
    monkeypatch.setattr("ddlf.rpc.connection.RECEIVING", budget)
    data = message(b"x" * 100_000)
    peer.send(data[:50_000])
    while not budget.used_bytes:
        await settle()
    assert budget.used_bytes == 100_000
    peer.send(data[50_000:])
    await end.receive(1)
    assert budget.used_bytes == 0, "what has arrived is its owner's"
    peer.send(data[:50_000])
    while not budget.used_bytes:
        await settle()
    peer.close()
    await end.end()
    assert budget.used_bytes == 0, "what will never arrive is nobody's"


async def test_a_message_above_the_memory_for_receiving_ends_its_connection(monkeypatch):
    monkeypatch.setattr("ddlf.rpc.connection.RECEIVING", Budget(10 * MIB))
    sizes = []
    (first, first_end), (second, second_end) = socket_pair(), socket_pair()
    with first, second:
        ends = [
            End(sock, allocate=lambda size: sizes.append(size) or bytearray(size)) for sock in (first_end, second_end)
        ]
        for sock, end in zip((first, second), ends, strict=True):
            sock.send(message(b"x" * 6 * MIB)[:100_000])
            await settle()
            assert end.connection.mid_frame or end.connection.closed
        reason = await ends[1].end()
        assert str(reason) == (
            "no room for an array of 6,291,456 bytes: 6,291,456 of at most 10,485,760 are being received already; "
            "send less at once"
        )
        assert not ends[0].connection.closed
        assert sizes == [6 * MIB]
        ends[0].connection.close()
