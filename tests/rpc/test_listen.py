"""Tests of listening: an unusable address is named with its reason, and no client connects without a token."""

import asyncio
import os
import socket
from functools import partial

import pytest

from ddlf.errors import AuthError, ConfigError, ListenError
from ddlf.rpc import listen
from ddlf.rpc.dial import shake_hands
from ddlf.rpc.handshake import HELLO, PREAMBLE, ClientHandshake, Role, Verdict
from ddlf.rpc.listen import HTTP_ANSWER, accepted, answer, close_if_cancelled, listening_socket
from ddlf.rpc.stream import receive_exactly
from tests.sockets import socket_pair

TOKEN, OTHER = b"t" * 43, b"o" * 43
LIMIT = 1024**2


@pytest.fixture
def pair():
    client, worker = socket_pair()
    with client, worker:
        yield client, worker


async def serve(sock, tokens=(TOKEN,), delay_s=0.0):
    """Run the worker's side of one connection in the same way as the daemon."""
    return await answer(sock, await receive_exactly(sock, PREAMBLE.size), tokens, LIMIT, delay_s=delay_s)


# --- The handshake ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [(TOKEN,), (OTHER, TOKEN), (TOKEN, OTHER)])
async def test_a_client_with_a_token_of_the_worker_gets_in(pair, tokens):
    client, worker = pair
    (_, hello_of_client), (_, hello_of_worker) = await asyncio.gather(
        serve(worker, tokens), shake_hands(client, Role.DATA, TOKEN, 500)
    )
    assert (hello_of_client.role, hello_of_client.max_message_bytes) == (Role.DATA, 500)
    assert hello_of_worker.max_message_bytes == LIMIT


async def test_a_client_with_another_token_that_continues_is_refused_late_and_with_one_byte(pair):
    client, worker = pair
    loop = asyncio.get_running_loop()
    serving = asyncio.create_task(serve(worker, delay_s=0.2))
    begin = loop.time()
    await loop.sock_sendall(client, ClientHandshake(Role.DATA, OTHER, LIMIT).hello + bytes(32))
    await receive_exactly(client, HELLO.size + 32)
    assert await receive_exactly(client, 1) == bytes([Verdict.REFUSED])
    assert loop.time() - begin >= 0.2
    with pytest.raises(AuthError, match=r"^token mismatch$"):
        await serving
    assert listen.REFUSAL_DELAY_S == 0.5


def test_the_answer_to_a_browser_is_http_with_its_true_length():
    head, body = HTTP_ANSWER.split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert f"Content-Length: {len(body)}".encode() in head


# --- The address -----------------------------------------------------------------------------------------------------


def test_a_free_port_is_chosen_and_can_be_taken_again_at_once():
    with listening_socket("127.0.0.1", 0) as sock:
        host, port = sock.getsockname()
        assert host == "127.0.0.1"
        assert port > 0
        assert not sock.getblocking()
        with socket.create_connection((host, port)) as client:
            accepted, _ = sock.accept()
            accepted.close()  # this side first, which leaves the port in TIME_WAIT
            assert client.recv(1) == b""
    listening_socket("127.0.0.1", port).close()


def test_two_workers_cannot_have_one_port():
    with listening_socket("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ListenError) as caught:
            listening_socket("127.0.0.1", port)
    assert str(caught.value) == (
        f"port {port} on 127.0.0.1 is in use; stop the program that uses it, or choose another with --port"
    )


def test_an_address_of_another_machine_is_named():
    with pytest.raises(
        ListenError,
        match=r"^192\.0\.2\.1 is not an address of this machine; choose an address of this machine with --host$",
    ):
        listening_socket("192.0.2.1", 0)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 70 + ".com", "two..dots"])
def test_a_name_that_does_not_resolve_is_named(host):
    with pytest.raises(ConfigError, match=f"--host '{host}' cannot be resolved; give an address of this machine"):
        listening_socket(host, 0)


def test_a_port_that_needs_root_is_explained(monkeypatch):
    def refuse(self, address):
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(listen.socket, "socket", type("Socket", (socket.socket,), {"bind": refuse}))
    with pytest.raises(ListenError) as caught:
        listening_socket("127.0.0.1", 80)
    assert str(caught.value) == "cannot listen on 127.0.0.1:80: permission denied; ports below 1024 need root, try 9000"


def test_any_other_reason_is_the_text_of_the_system(monkeypatch):
    def refuse(self, address):
        raise OSError(105, os.strerror(105))

    monkeypatch.setattr(listen.socket, "socket", type("Socket", (socket.socket,), {"bind": refuse}))
    with pytest.raises(ListenError, match=r"cannot listen on 127\.0\.0\.1:9000: No buffer space available"):
        listening_socket("127.0.0.1", 9000)


async def test_a_connection_that_arrives_while_accepting_is_cancelled_stays_with_the_listener():
    with listening_socket("127.0.0.1", 0) as listener:
        accepting = asyncio.create_task(accepted(listener))
        await asyncio.sleep(0)
        with socket.create_connection(listener.getsockname()):
            await asyncio.sleep(0)
            await asyncio.sleep(0)  # the event loop has noticed the connection, but the task has not run yet
            accepting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await accepting
            # This does not wait: the connection is there, or it raises BlockingIOError.
            waiting_sock, _ = listener.accept()
            waiting_sock.close()


async def test_a_task_that_is_cancelled_before_its_first_line_leaves_no_socket_open(pair):
    async def nothing():
        pass

    for sock, cancelled in zip(pair, (True, False), strict=True):
        task = asyncio.create_task(nothing())
        task.add_done_callback(partial(close_if_cancelled, sock))
        if cancelled:
            task.cancel()
        await asyncio.wait([task])
        await asyncio.sleep(0)
        assert (sock.fileno() == -1) is cancelled
