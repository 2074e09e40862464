"""Tests of clients without the token at a worker's port.

Such a client reaches no parser, gets at most a hello, causes one line in the log, and disturbs no master. The tests use a
real port. After each one, masters can connect: the daemon in this process accepts control connections, and its executor
accepts data connections. ``tests/rpc/test_handshake.py`` alters each bit of the handshake.
``tests/end_to_end/test_security.py`` shows that worker processes never run code that comes without the token.
"""

import asyncio
import contextlib
import pickle
import socket
import threading

import msgpack
import pytest

from ddlf.rpc.admission import MAX_HALF_OPEN_PER_ADDRESS
from ddlf.rpc.dial import dial, open_socket
from ddlf.rpc.handshake import (
    FLAG_TLS,
    HELLO,
    PREAMBLE,
    PROOF_BYTES,
    ClientHandshake,
    Role,
    Verdict,
    auth_key,
    proof,
    short_answer,
)
from ddlf.rpc.listen import HTTP_ANSWER
from ddlf.rpc.messages import CONTROL_LIMITS, FrameDecoder, Kind, dumps, encode_frame
from ddlf.rpc.stream import receive_exactly
from ddlf.rpc.tokens import new_token
from tests.daemons import TOKEN
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.asyncio(loop_scope="module")

OTHER = new_token().encode()
PING = b"".join(encode_frame(Kind.REQUEST, 7, "ping", dumps([[], {}]), limits=CONTROL_LIMITS))


@pytest.fixture(autouse=True)
def no_parser(monkeypatch):
    """Fail the test if this thread, which runs the daemon, uses a parser."""
    times = []

    def guarded(parser):
        def reached(*args, **kwargs):
            if threading.current_thread() is not threading.main_thread():
                return parser(*args, **kwargs)  # a heartbeat of a cluster of another test
            times.append(parser)
            raise AssertionError("a parser was reached before the handshake had succeeded")

        return reached

    with monkeypatch.context() as patch:
        for module, name in ((msgpack, "unpackb"), (msgpack, "Unpacker"), (pickle, "loads")):
            patch.setattr(module, name, guarded(getattr(module, name)))
        yield patch
        assert times == []


@pytest.fixture
def log(running, monkeypatch):
    """Return a function that returns all lines that the daemon logs during the test. No line is suppressed."""
    monkeypatch.setattr("ddlf.rpc.admission.LOG_EVERY_S", 0)
    before = len(running.lines)
    return lambda: running.lines[before:]


async def visit(port, first, then=None, *, leave=False):
    """Send ``first``, then the result of ``then`` for the worker's hello and proof.

    Returns:
        All bytes that the worker sent before it closed the connection.
    """
    loop = asyncio.get_running_loop()
    received = b""
    with await open_socket("127.0.0.1", port) as sock:
        await loop.sock_sendall(sock, first)
        if then is not None:
            received = await receive_exactly(sock, HELLO.size + PROOF_BYTES)
            await loop.sock_sendall(sock, then(received))
        if leave:
            sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(PATIENCE_S):
                while data := await loop.sock_recv(sock, 4096):
                    received += data
    return received


async def accepts_masters(worker):
    """Connect to both processes of a worker as a master, and check that neither process has restarted."""
    for role in MASTERS:
        sock, _ = await dial("127.0.0.1", worker.port, role, TOKEN, max_message_bytes=1000)
        sock.close()
    assert worker.daemon.status().restarts == 0
    return True


NO_CLIENT = "not a DDLF client (%s)"
MASTERS = (Role.CONTROL, Role.DATA)
"""The roles of the connections that a master opens."""
OLD = "the other side speaks protocol %s, this side 1.1; install the same version of ddlf on both"


@pytest.mark.parametrize(
    ("says", "hears", "line"),
    [
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", HTTP_ANSWER, NO_CLIENT % "looks like HTTP", id="HTTP"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"", NO_CLIENT % "looks like TLS", id="TLS"),
        pytest.param(
            PREAMBLE.pack(b"DDLF", 1, 0, Role.DATA, FLAG_TLS) + bytes(56),
            short_answer(),
            "the client wants TLS, but this port is plaintext",
            id="TLS flag",
        ),
        pytest.param(b"SSH-2.0-OpenSSH_9.2\r\n", b"", NO_CLIENT % "looks like SSH", id="SSH"),
        pytest.param(b"\x80\x05\x95random", b"", NO_CLIENT % "first bytes 80 05 95 72 61 6e 64 6f", id="pickle"),
        pytest.param(PREAMBLE.pack(b"DDLF", 2, 0, 1, 0) + bytes(56), short_answer(), OLD % "2.0", id="version"),
        pytest.param(
            PREAMBLE.pack(b"DDLF", 1, 0, 77, 0) + bytes(56), b"", "unknown role 77 in the preamble", id="role"
        ),
        pytest.param(
            PREAMBLE.pack(b"DDLF", 1, 0, 1, 0x80) + bytes(56), b"", "unknown flags 0x80 in the preamble", id="flags"
        ),
    ],
)
async def test_wrong_first_bytes_are_logged_and_close_the_connection(running, log, says, hears, line):
    assert await visit(running.port, says) == hears
    assert log() == [f"refused 127.0.0.1: {line}"]
    assert await accepts_masters(running)


async def test_worker_that_wants_to_join_a_worker_without_a_run_is_refused(running):
    assert await visit(running.port, PREAMBLE.pack(b"DDLF", 1, 1, Role.JOIN, 0) + bytes(32)) == short_answer()
    assert await accepts_masters(running)


@pytest.mark.parametrize(
    ("length", "hears"),
    [
        pytest.param(0, 0, id="nothing"),
        pytest.param(1, 0, id="one byte"),
        pytest.param(HELLO.size - 1, 0, id="all but one byte"),
        pytest.param(HELLO.size, HELLO.size + PROOF_BYTES, id="whole hello"),
    ],
)
async def test_silent_client_is_cut_when_the_handshake_times_out(running, log, monkeypatch, length, hears):
    monkeypatch.setattr("ddlf.worker.daemon.HANDSHAKE_TIMEOUT_S", 0.3)
    hellos = [ClientHandshake(role, TOKEN, 1000).hello[:length] for role in MASTERS]
    answers = await asyncio.gather(*(visit(running.port, hello) for hello in hellos))
    assert [len(answer) for answer in answers] == [hears] * len(MASTERS)
    assert await accepts_masters(running)
    handed_over = length >= PREAMBLE.size  # the daemon has handed the data connection to the executor
    assert log() == ["refused 127.0.0.1: handshake timed out (0.3 s)"] * (1 if handed_over else 2)
    assert not handed_over or "data connection: refused 127.0.0.1: handshake timed out" in running.executor_log


@pytest.mark.parametrize("length", [0, 1, PREAMBLE.size, HELLO.size - 1, HELLO.size], ids=str)
async def test_client_that_leaves_during_the_handshake_is_named(running, log, length):
    hello = ClientHandshake(Role.CONTROL, TOKEN, 1000).hello[:length]
    assert len(await visit(running.port, hello, leave=True)) in (0, HELLO.size + PROOF_BYTES)
    assert log() == ["refused 127.0.0.1: closed during the handshake"]
    assert await accepts_masters(running)


def wrong_proof(client, reply):
    _, proof = client.read_hello(reply)
    return proof[:-1] + bytes([proof[-1] ^ 1])


def reflected(client, reply):
    return reply[HELLO.size :]


def of_another_token(client, reply):
    return proof(auth_key(OTHER), "C", client.hello, reply[: HELLO.size])


def with_frames_after_it(client, reply):
    return wrong_proof(client, reply) + PING * 100


@pytest.mark.parametrize(
    ("token", "answers"),
    [
        pytest.param(TOKEN, wrong_proof, id="wrong"),
        pytest.param(TOKEN, reflected, id="reflected"),
        pytest.param(OTHER, of_another_token, id="other token"),
        pytest.param(TOKEN, with_frames_after_it, id="frames after it"),
    ],
)
async def test_wrong_proof_gets_one_byte(running, log, token, answers):
    async def knock(role):
        client = ClientHandshake(role, token, 1000)
        return await visit(running.port, client.hello, lambda reply: answers(client, reply))

    for received in await asyncio.gather(*(knock(role) for role in MASTERS)):
        assert received[HELLO.size + PROOF_BYTES :] == bytes([Verdict.REFUSED])
    assert await accepts_masters(running)
    assert log() == ["refused 127.0.0.1: token mismatch"]
    assert "data connection: refused 127.0.0.1: token mismatch\n" in running.executor_log


async def test_frame_behind_the_proof_is_the_first_of_the_session(running, no_parser):
    no_parser.undo()  # after the proof, the daemon may parse frames
    client = ClientHandshake(Role.CONTROL, TOKEN, 1000)
    received = await visit(running.port, client.hello, lambda reply: client.read_hello(reply)[1] + PING, leave=True)
    verdict, answer = received[HELLO.size + PROOF_BYTES :][:1], received[HELLO.size + PROOF_BYTES + 1 :]
    assert verdict == bytes([Verdict.ACCEPTED])
    decoder = FrameDecoder(CONTROL_LIMITS)
    decoder.wants()[: len(answer)] = answer
    assert [(frame.kind, frame.id) for frame in decoder.received(len(answer))] == [(Kind.RESULT, 7)]


async def test_oldest_silent_connections_go_and_a_master_gets_in(running):
    idle = [await asyncio.open_connection("127.0.0.1", running.port) for _ in range(MAX_HALF_OPEN_PER_ADDRESS + 3)]
    for reader, _ in idle[:3]:
        assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
    assert not any(reader.at_eof() for reader, _ in idle[3:])
    assert await accepts_masters(running)
    await running.line_with("too many handshakes at once, so the oldest connection was closed")
    for _, writer in idle:
        writer.close()
