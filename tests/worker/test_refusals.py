"""What a daemon answers to clients that it cannot serve, over its real port. Its executor takes no part."""

import asyncio
import contextlib

import pytest

from ddlf.errors import VersionError
from ddlf.net.connection import Connection
from ddlf.net.dial import dial, open_socket
from ddlf.net.listen import HTTP_ANSWER
from ddlf.net.stream import receive_exactly
from ddlf.wire import handshake
from ddlf.wire.frame import CONTROL_LIMITS
from ddlf.wire.handshake import Role
from ddlf.wire.messages import Kind
from ddlf.wire.values import dumps
from ddlf.worker.daemon import Daemon, Options

TOKEN = b"t" * 43


@pytest.fixture
async def daemon(tmp_path):
    lines = []
    daemon = Daemon(Options("127.0.0.1", 0, (TOKEN,), tmp_path), lines.append)
    daemon.lines = lines
    running = asyncio.create_task(daemon.run())
    yield daemon
    daemon.stop()
    await running


async def say(daemon, data: bytes) -> bytes:
    """What the daemon answers before it closes the connection."""
    sock = await open_socket("127.0.0.1", daemon.port)
    answer = b""
    with sock, contextlib.suppress(ConnectionResetError):
        await asyncio.get_running_loop().sock_sendall(sock, data)
        while byte := await receive_exactly(sock, 1):
            answer += byte
    return answer


async def control(daemon):
    """An authenticated control connection; gives it and the future of its end."""
    sock, _ = await dial("127.0.0.1", daemon.port, Role.CONTROL, TOKEN, max_message_bytes=1000)
    frames: asyncio.Queue = asyncio.Queue()
    ended = asyncio.get_running_loop().create_future()
    return Connection(sock, frames.put_nowait, ended.set_result, limits=CONTROL_LIMITS), frames, ended


async def test_a_client_of_another_version_is_told_the_workers(daemon):
    assert await say(daemon, b"DDLF\x07\x03\x01\x00" + bytes(56)) == b"DDLF\x01\x00\x01\x00"
    assert daemon.lines == [
        "refused 127.0.0.1: the other side speaks protocol 7.3, this side 1.0; install the same version of ddlf on both"
    ]


async def test_the_master_of_another_version_learns_both_versions(daemon, monkeypatch):
    original = handshake.read_preamble
    monkeypatch.setattr("ddlf.worker.daemon.read_preamble", lambda data: original(b"DDLF\x07" + data[5:]))
    monkeypatch.setattr("ddlf.worker.daemon.short_answer", lambda **_: b"DDLF\x09\x01\x01\x00")
    with pytest.raises(VersionError, match=r"the other side speaks protocol 9\.1, this side 1\.0"):
        await dial("127.0.0.1", daemon.port, Role.CONTROL, TOKEN, max_message_bytes=1000)


async def test_a_browser_is_told_that_this_is_no_web_server(daemon):
    assert await say(daemon, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") == HTTP_ANSWER


@pytest.mark.parametrize("value", [None, [], [[]], [[], {1: 2}], [(), {}], {"a": 1}])
async def test_a_request_that_is_none_ends_its_connection_and_nothing_else(daemon, value):
    reported = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
    connection, _, ended = await control(daemon)
    connection.send(Kind.REQUEST, 1, "ping", dumps(value))
    assert await asyncio.wait_for(ended, 10) is None
    connection, frames, _ = await control(daemon)
    connection.send(Kind.REQUEST, 1, "ping", dumps([[], {}]))
    assert (await asyncio.wait_for(frames.get(), 10)).kind == Kind.RESULT
    connection.close()
    assert reported == []
