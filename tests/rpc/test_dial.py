"""Tests of dialling: an error names the program at the other end, and says what to do."""

import asyncio
import contextlib
import http.server
import socket
import struct
import threading

import pytest

from ddlf.errors import AuthError, ConnectError, VersionError
from ddlf.rpc import dial as dial_module
from ddlf.rpc.dial import dial, open_socket
from ddlf.rpc.handshake import PREAMBLE, Role, Verdict, WorkerHandshake, short_answer
from ddlf.rpc.listen import answer, listening_socket
from ddlf.rpc.stream import receive_exactly
from ddlf.rpc.tokens import loopback_tokens
from tests.sockets import socket_pair

TOKEN = b"t" * 43
LIMIT = 1024**2


@contextlib.asynccontextmanager
async def listening(handle):
    """Listen on loopback and run ``handle(sock)`` for each connection; yield the port."""
    listener = listening_socket("127.0.0.1", 0)
    loop = asyncio.get_running_loop()
    served = []
    accepted = contextlib.ExitStack()

    async def serve(sock):
        with sock:
            await handle(sock)

    async def accept():
        while True:
            sock, _ = await loop.sock_accept(listener)
            served.append(loop.create_task(serve(accepted.enter_context(sock))))

    accepting = loop.create_task(accept())
    try:
        yield listener.getsockname()[1]
    finally:
        for task in (accepting, *served):
            task.cancel()
        await asyncio.gather(accepting, *served, return_exceptions=True)
        accepted.close()
        listener.close()


async def worker(sock, token=TOKEN):
    """Answer like a daemon, and send nothing after the handshake."""
    await answer(sock, await receive_exactly(sock, PREAMBLE.size), (token,), 12345, delay_s=0)
    await asyncio.Event().wait()


def server_that_sends(data: bytes, *, then_close=False):
    """Return a handler that sends ``data`` to each caller."""

    async def handle(sock):
        await asyncio.get_running_loop().sock_sendall(sock, data)
        if not then_close:
            await asyncio.Event().wait()
        sock.shutdown(socket.SHUT_WR)
        await receive_exactly(sock, 64)

    return handle


async def call(port, token=TOKEN, **options):
    return await dial("127.0.0.1", port, Role.DATA, token, max_message_bytes=LIMIT, **options)


async def refusal(handle, **options) -> str:
    async with listening(handle) as port:
        with pytest.raises(ConnectError) as caught:
            await call(port, **options)
        return str(caught.value).replace(str(port), "PORT")


async def test_a_worker_with_the_same_token_is_reached():
    async with listening(worker) as port:
        sock, hello = await call(port)
        with sock:
            assert (hello.role, hello.max_message_bytes) == (Role.DATA, 12345)
            assert not sock.getblocking()
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_dialling_reads_no_byte_after_the_handshake():
    async def eager(sock):
        loop = asyncio.get_running_loop()
        handshake = WorkerHandshake((TOKEN,), LIMIT)
        _, reply = handshake.answer(await receive_exactly(sock, 64))
        await loop.sock_sendall(sock, reply)
        assert handshake.accepts(await receive_exactly(sock, 32))
        await loop.sock_sendall(sock, bytes([Verdict.ACCEPTED]) + b"first frame")
        await asyncio.Event().wait()

    async with listening(eager) as port:
        sock, _ = await call(port)
        with sock:
            assert await receive_exactly(sock, 11) == b"first frame"


async def test_an_error_without_a_listener_says_how_to_start_a_worker():
    with listening_socket("127.0.0.1", 0) as listening_sock:
        port = listening_sock.getsockname()[1]
    with pytest.raises(ConnectError) as caught:
        await call(port)
    assert str(caught.value) == (
        f"127.0.0.1:{port}: connection refused, nothing listens there; start the worker there with: ddlf-worker --port {port}"
    )


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("no-such-host.invalid", r"\(.+\)"),
        ("a" * 70 + ".com", r"\(not a valid name\)"),
        ("two..dots", r"\(not a valid name\)"),
    ],
)
async def test_a_name_that_does_not_resolve_is_named(host, reason):
    with pytest.raises(ConnectError, match=rf"^the name '{host}' cannot be resolved {reason}; check its spelling$"):
        await dial(host, 9000, Role.DATA, TOKEN, max_message_bytes=LIMIT, timeout_s=20)


async def test_dialling_a_silent_machine_ends_after_the_given_time(monkeypatch):
    async def never(host, port):
        await asyncio.Event().wait()

    monkeypatch.setattr(dial_module, "open_socket", never)
    with pytest.raises(ConnectError) as caught:
        await call(9000, timeout_s=0.05)
    assert str(caught.value) == (
        "127.0.0.1:9000 does not answer within 0.05 s; "
        "check the address, that the machine is on, and that no firewall blocks the port"
    )


ANOTHER = "127.0.0.1:PORT: another program listens there, not a DDLF worker; check the port"


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n",
        b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n",
        b"-ERR unknown command\r\n",
        b"\x15\x03\x03\x00\x02\x02\x46\x00",
        bytes(200),
        b"\xff" * 200,
    ],
)
async def test_another_program_is_recognised_by_its_first_bytes_without_waiting(data):
    assert await refusal(server_that_sends(data)) == ANOTHER
    assert await refusal(server_that_sends(data, then_close=True)) == ANOTHER


async def test_a_real_http_server_is_recognised_as_another_program(monkeypatch):
    monkeypatch.setattr(dial_module, "HANDSHAKE_TIMEOUT_S", 0.3)
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    serving.start()
    try:
        with pytest.raises(ConnectError) as caught:
            await call(server.server_port)
    finally:
        await asyncio.to_thread(server.shutdown)
        serving.join()
        server.server_close()
    assert "another program listens there" in str(caught.value)


async def test_dialling_a_silent_listener_ends_within_the_time_of_a_handshake(monkeypatch):
    monkeypatch.setattr(dial_module, "HANDSHAKE_TIMEOUT_S", 0.1)
    assert await refusal(server_that_sends(b"")) == (
        "127.0.0.1:PORT: connected, but no DDLF handshake within 0.1 s; "
        "another program listens there, or the worker is suspended or busy"
    )


async def test_dialling_a_listener_that_drips_bytes_ends_within_the_time_of_a_handshake(monkeypatch):
    monkeypatch.setattr(dial_module, "HANDSHAKE_TIMEOUT_S", 0.2)

    async def drip(sock):
        for byte in short_answer() + bytes(90):
            await asyncio.get_running_loop().sock_sendall(sock, bytes([byte]))
            await asyncio.sleep(0.05)

    assert "no DDLF handshake within 0.2 s" in await refusal(drip)


@pytest.mark.parametrize("length", [0, 1, 8, 95])
async def test_a_listener_that_closes_during_the_handshake_is_named_as_such(length):
    reply = WorkerHandshake((TOKEN,), LIMIT)
    data = reply.answer(short_answer() + bytes(56))[1][:length]
    assert await refusal(server_that_sends(data, then_close=True)) == (
        "127.0.0.1:PORT: connected, but the other side closed the connection during the handshake; "
        "it is not a DDLF worker, or it runs another version"
    )


async def test_a_reset_during_the_handshake_is_named_as_such():
    async def reset(sock):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    assert "the other side closed the connection during the handshake" in await refusal(reset)


async def test_another_token_is_an_error_of_authentication_with_advice_and_without_the_token():
    async with listening(worker) as port:
        with pytest.raises(AuthError) as caught:
            await call(port, token=b"o" * 43)
    assert str(caught.value) == (
        f"127.0.0.1:{port}: the worker has another token than this side; "
        "copy the same token file to both machines (ddlf token show), or restart the worker"
    )


async def test_an_error_without_a_given_token_does_not_mention_another_token():
    async with listening(worker) as port:
        with pytest.raises(AuthError) as caught:
            await call(port, token=loopback_tokens().primary)
    assert str(caught.value) == (
        f"127.0.0.1:{port}: the worker was started with a token or by another user, but this side has no token; "
        "use the worker's token: --token-file FILE, or copy it to the place that ddlf token show prints"
    )


@pytest.mark.parametrize(
    ("verdict", "kind", "text"),
    [
        (Verdict.REFUSED, AuthError, "the worker refused this side's token; copy the same token file to both machines"),
        (Verdict.BUSY, ConnectError, "the worker accepts no more connections; close other masters"),
    ],
)
async def test_the_error_gives_the_verdict_of_the_worker(verdict, kind, text):
    async def refuse(sock):
        loop = asyncio.get_running_loop()
        _, reply = WorkerHandshake((TOKEN,), LIMIT).answer(await receive_exactly(sock, 64))
        await loop.sock_sendall(sock, reply)
        await receive_exactly(sock, 32)
        await loop.sock_sendall(sock, bytes([verdict]))

    async with listening(refuse) as port:
        with pytest.raises(kind) as caught:
            await call(port)
    assert f"127.0.0.1:{port}: {text}" in str(caught.value)


async def test_a_worker_of_another_version_is_an_error_that_names_both():
    async with listening(server_that_sends(PREAMBLE.pack(b"DDLF", 2, 1, 1, 0))) as port:
        with pytest.raises(VersionError) as caught:
            await call(port)
    assert str(caught.value) == (
        f"127.0.0.1:{port}: the other side speaks protocol 2.1, this side 1.1; install the same version of ddlf on both"
    )


async def test_a_failed_call_leaves_no_socket_behind(monkeypatch):
    socks = []
    opened = asyncio.Event()
    original = dial_module.open_socket

    async def remember(host, port):
        socks.append(await original(host, port))
        opened.set()
        return socks[-1]

    monkeypatch.setattr(dial_module, "open_socket", remember)
    await refusal(server_that_sends(bytes(200)))
    async with listening(server_that_sends(b"")) as port:
        opened.clear()
        calling = asyncio.create_task(call(port))
        await opened.wait()
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
    assert [sock.fileno() for sock in socks] == [-1, -1]


async def test_the_next_address_of_a_name_is_tried_when_one_does_not_answer(monkeypatch):
    async with listening(worker) as port:
        with listening_socket("127.0.0.1", 0) as listening_sock:
            closed = listening_sock.getsockname()[1]

        async def two(host, port_, **more):
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", p)) for p in (closed, port)]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", two)
        (await open_socket("two-addresses", port)).close()


async def test_exactly_the_requested_bytes_are_read():
    left, right = socket_pair()
    with left, right:
        left.send(b"abcdef")
        assert await receive_exactly(right, 4) == b"abcd"
        assert right.recv(10) == b"ef"
        left.close()
        with pytest.raises(ConnectionResetError, match="closed after 0 of 5 bytes"):
            await receive_exactly(right, 5)
