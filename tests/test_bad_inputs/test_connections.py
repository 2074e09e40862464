"""B60-B71: who comes to a worker's port without the token reaches no parser, hears no more than a hello, costs one line, and stops nobody.

Each row is said to a real port, on which masters get in afterwards: a control connection by the daemon, in this process, and a data connection by its
executor. Each bit of the handshake is altered in tests/rpc/test_handshake.py; tests/end_to_end/test_security.py looks into a worker's processes for
code that was sent without the token.
"""

import asyncio
import contextlib
import pickle
import socket
import threading

import msgpack
import pytest

from ddlf.errors import AuthError, VersionError
from ddlf.rpc import handshake
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
from ddlf.rpc.tls import TOKEN_ONLY
from ddlf.rpc.tokens import new_token
from tests.daemons import TOKEN, RunningDaemon
from tests.patience import PATIENCE_S
from tests.tls import far_apart

pytestmark = pytest.mark.asyncio(loop_scope="module")

OTHER = new_token().encode()
PING = b"".join(encode_frame(Kind.REQUEST, 7, "ping", dumps([[], {}]), limits=CONTROL_LIMITS))


@pytest.fixture(autouse=True)
def no_parser(monkeypatch):
    """Any use of a parser by this thread, in which the daemon runs, fails the test."""
    times = []

    def guarded(parser):
        def reached(*args, **kwargs):
            if threading.current_thread() is not threading.main_thread():
                return parser(*args, **kwargs)  # heartbeats of other tests' clusters
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
    """What the daemon logs from here on, with no line left out."""
    monkeypatch.setattr("ddlf.rpc.admission.LOG_EVERY_S", 0)
    before = len(running.lines)
    return lambda: running.lines[before:]


async def visit(port, first, then=None, *, leave=False):
    """Say ``first``, and what ``then`` makes of the worker's hello and proof.

    Returns:
        All that the worker said before it closed.
    """
    loop = asyncio.get_running_loop()
    said = b""
    with await open_socket("127.0.0.1", port) as sock:
        await loop.sock_sendall(sock, first)
        if then is not None:
            said = await receive_exactly(sock, HELLO.size + PROOF_BYTES)
            await loop.sock_sendall(sock, then(said))
        if leave:
            sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(PATIENCE_S):
                while data := await loop.sock_recv(sock, 4096):
                    said += data
    return said


async def lets_in_who_has_the_token(worker):
    """Both processes of the worker are those they were, and masters get in."""
    for role in Role:
        sock, _ = await dial("127.0.0.1", worker.port, role, TOKEN, max_message_bytes=1000)
        sock.close()
    assert worker.daemon.status()["restarts"] == 0
    return True


# -- B60-B65: what is no hello ------------------------------------------------------------------------------------------

NO_CLIENT = "not a DDLF client (%s)"
OLD = "the other side speaks protocol %s, this side 1.0; install the same version of ddlf on both"


@pytest.mark.parametrize(
    ("says", "hears", "line"),
    [
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", HTTP_ANSWER, NO_CLIENT % "looks like HTTP", id="B62"),
        pytest.param(b"POST /rpc HTTP/1.1\r\n\r\n", HTTP_ANSWER, NO_CLIENT % "looks like HTTP", id="B62 POST"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"", NO_CLIENT % "looks like TLS", id="B63 TLS"),
        pytest.param(
            PREAMBLE.pack(b"DDLF", 1, 0, Role.DATA, FLAG_TLS) + bytes(56),
            short_answer(),
            "the client wants TLS, this port is plain",
            id="B63 TLS flag",
        ),
        pytest.param(b"SSH-2.0-OpenSSH_9.2\r\n", b"", NO_CLIENT % "looks like SSH", id="B64 SSH"),
        pytest.param(b"\x00\x00\x00\x85\xffSMB", b"", NO_CLIENT % "first bytes 00 00 00 85 ff 53 4d 42", id="B64 SMB"),
        pytest.param(
            bytes.fromhex("030000130ee000000000000100080003000000"),
            b"",
            NO_CLIENT % "first bytes 03 00 00 13 0e e0 00 00",
            id="B64 RDP",
        ),
        pytest.param(b"*1\r\n$4\r\nPING\r\n", b"", NO_CLIENT % "first bytes 2a 31 0d 0a 24 34 0d 0a", id="B64 Redis"),
        pytest.param(bytes(5000), b"", NO_CLIENT % "first bytes 00 00 00 00 00 00 00 00", id="B64 zeros"),
        pytest.param(b"\xff" * 5000, b"", NO_CLIENT % "first bytes ff ff ff ff ff ff ff ff", id="B64 0xFF"),
        pytest.param(b"\x80\x05\x95random", b"", NO_CLIENT % "first bytes 80 05 95 72 61 6e 64 6f", id="B64 pickle"),
        pytest.param(PREAMBLE.pack(b"DDLF", 2, 0, 1, 0) + bytes(56), short_answer(), OLD % "2.0", id="B65"),
        pytest.param(PREAMBLE.pack(b"DDLF", 0, 9, 2, 0) + bytes(56), short_answer(), OLD % "0.9", id="B65 older"),
        pytest.param(
            PREAMBLE.pack(b"DDLF", 1, 0, 77, 0) + bytes(56), b"", "unknown role 77 in the preamble", id="role"
        ),
        pytest.param(
            PREAMBLE.pack(b"DDLF", 1, 0, 1, 0x80) + bytes(56), b"", "unknown flags 0x80 in the preamble", id="flags"
        ),
    ],
)
async def test_what_is_no_hello_is_named_and_closed(running, log, says, hears, line):
    assert await visit(running.port, says) == hears
    assert log() == [f"refused 127.0.0.1: {line}"]
    assert await lets_in_who_has_the_token(running)


@pytest.mark.parametrize("role", list(Role))
async def test_B63_plaintext_from_another_machine_is_told_that_it_must_encrypt(tmp_path, role):
    other = RunningDaemon(tmp_path, security=TOKEN_ONLY)
    with far_apart():
        answer = await visit(other.port, ClientHandshake(role, TOKEN, 1000).hello)
    assert answer == short_answer(tls=True)
    assert other.lines == ["refused 127.0.0.1: the client speaks plaintext, other machines must encrypt"]
    await other.end()


async def test_B65_the_master_of_another_version_learns_both_versions(running, monkeypatch):
    original = handshake.read_preamble
    monkeypatch.setattr("ddlf.worker.daemon.read_preamble", lambda data: original(b"DDLF\x07" + data[5:]))
    monkeypatch.setattr("ddlf.worker.daemon.short_answer", lambda **_: b"DDLF\x09\x01\x01\x00")
    with pytest.raises(VersionError, match=r"the other side speaks protocol 9\.1, this side 1\.0"):
        await dial("127.0.0.1", running.port, Role.CONTROL, TOKEN, max_message_bytes=1000)


# -- B60, B61, B71: clients that do not go on ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "hears"),
    [
        pytest.param(0, 0, id="B60"),
        pytest.param(1, 0, id="B60 one byte"),
        pytest.param(HELLO.size - 1, 0, id="B60 all but one byte"),
        pytest.param(HELLO.size, HELLO.size + PROOF_BYTES, id="B71"),
    ],
)
async def test_who_stops_without_leaving_is_cut_when_the_time_of_a_handshake_is_over(
    running, log, monkeypatch, length, hears
):
    monkeypatch.setattr("ddlf.worker.daemon.HANDSHAKE_TIMEOUT_S", 0.3)
    hellos = [ClientHandshake(role, TOKEN, 1000).hello[:length] for role in Role]
    answers = await asyncio.gather(*(visit(running.port, hello) for hello in hellos))
    assert [len(answer) for answer in answers] == [hears] * len(Role)
    assert await lets_in_who_has_the_token(running)
    handed_over = length >= PREAMBLE.size  # the data connection, which is the executor's from then on
    assert log() == ["refused 127.0.0.1: handshake timed out (0.3 s)"] * (1 if handed_over else 2)
    assert not handed_over or "data connection: refused 127.0.0.1: handshake timed out" in running.executor_log


@pytest.mark.parametrize(
    "length", [0, 1, PREAMBLE.size, HELLO.size - 1, HELLO.size], ids=lambda length: f"B61 {length}"
)
async def test_who_leaves_during_the_handshake_is_named_as_such(running, log, length):
    hello = ClientHandshake(Role.CONTROL, TOKEN, 1000).hello[:length]
    assert len(await visit(running.port, hello, leave=True)) in (0, HELLO.size + PROOF_BYTES)
    assert log() == ["refused 127.0.0.1: closed during the handshake"]
    assert await lets_in_who_has_the_token(running)


# -- B66-B70: a hello without the token ---------------------------------------------------------------------------------


def wrong_proof(client, reply):
    _, given = client.read_hello(reply)
    return given[:-1] + bytes([given[-1] ^ 1])


def reflected(client, reply):
    return reply[HELLO.size :]


def of_another_token(client, reply):
    return proof(auth_key(OTHER), "C", client.hello, reply[: HELLO.size])


def with_frames_after_it(client, reply):
    return wrong_proof(client, reply) + PING * 100


@pytest.mark.parametrize(
    ("token", "answers"),
    [
        pytest.param(TOKEN, wrong_proof, id="B66"),
        pytest.param(TOKEN, reflected, id="B68"),
        pytest.param(OTHER, of_another_token, id="B69"),
        pytest.param(TOKEN, with_frames_after_it, id="B70"),
    ],
)
async def test_a_proof_that_is_none_gets_one_byte_whatever_is_wrong_with_it(running, log, token, answers):
    async def knock(role):
        client = ClientHandshake(role, token, 1000)
        return await visit(running.port, client.hello, lambda reply: answers(client, reply))

    for said in await asyncio.gather(*(knock(role) for role in Role)):
        assert said[HELLO.size + PROOF_BYTES :] == bytes([Verdict.REFUSED])
    assert await lets_in_who_has_the_token(running)
    assert log() == ["refused 127.0.0.1: token mismatch"]
    assert "data connection: refused 127.0.0.1: token mismatch\n" in running.executor_log


async def test_B67_a_recorded_handshake_is_refused_when_it_is_played_back(running, log):
    async def record_and_replay(role):
        client = ClientHandshake(role, TOKEN, 1000)
        recorded = []

        def prove(reply):
            recorded.append(client.read_hello(reply)[1])
            return recorded[0]

        first = await visit(running.port, client.hello, prove, leave=True)
        second = await visit(running.port, client.hello + recorded[0])
        return first[HELLO.size + PROOF_BYTES :], second[HELLO.size + PROOF_BYTES :]

    for verdicts in await asyncio.gather(*(record_and_replay(role) for role in Role)):
        assert verdicts == (bytes([Verdict.ACCEPTED]), bytes([Verdict.REFUSED]))
    assert log() == ["refused 127.0.0.1: token mismatch"]
    assert await lets_in_who_has_the_token(running)


@pytest.mark.parametrize("role", list(Role))
async def test_B69_who_holds_another_token_learns_it_from_the_worker_and_shows_nothing_of_it(running, log, role):
    with pytest.raises(AuthError, match="it holds another token than this side; copy the same token file"):
        await dial("127.0.0.1", running.port, role, OTHER, max_message_bytes=1000)
    if role is Role.CONTROL:
        await running.line_with("refused 127.0.0.1: token mismatch: the client holds another token")
    assert await lets_in_who_has_the_token(running)


async def test_B70_a_frame_in_the_same_segment_as_the_right_proof_is_the_first_of_the_session(running, no_parser):
    no_parser.undo()  # from the proof on there is one
    client = ClientHandshake(Role.CONTROL, TOKEN, 1000)
    said = await visit(running.port, client.hello, lambda reply: client.read_hello(reply)[1] + PING, leave=True)
    verdict, answer = said[HELLO.size + PROOF_BYTES :][:1], said[HELLO.size + PROOF_BYTES + 1 :]
    assert verdict == bytes([Verdict.ACCEPTED])
    decoder = FrameDecoder(CONTROL_LIMITS)
    decoder.wants()[: len(answer)] = answer
    assert [(frame.kind, frame.id) for frame in decoder.received(len(answer))] == [(Kind.RESULT, 7)]


# -- many of them -------------------------------------------------------------------------------------------------------


async def test_of_connections_that_say_nothing_the_oldest_go_and_a_master_still_gets_in(running):
    idle = [await asyncio.open_connection("127.0.0.1", running.port) for _ in range(MAX_HALF_OPEN_PER_ADDRESS + 3)]
    for reader, _ in idle[:3]:
        assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
    assert not any(reader.at_eof() for reader, _ in idle[3:])
    assert await lets_in_who_has_the_token(running)
    await running.line_with("too many handshakes at once, the oldest had to go")
    for _, writer in idle:
        writer.close()


async def test_a_scanner_that_comes_a_hundred_times_with_other_bytes_costs_one_line(tmp_path):
    other = RunningDaemon(tmp_path)
    for number in range(100):
        await visit(other.port, b"scan" + number.to_bytes(4, "big"))
    assert sum("first bytes 73 63 61 6e" in line for line in other.lines) == 1
    await other.end()
