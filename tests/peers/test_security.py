"""Tests of the security of a server of peers: strangers, other pages and the network get no access."""

import asyncio
import logging
import socket
import ssl

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from ddlf.errors import AuthError, ConfigError, ConnectError
from ddlf.peers import front
from ddlf.peers.peer import Peer
from ddlf.peers.running_server import server_at
from ddlf.peers.serving import protection
from ddlf.peers.sessions import link_of
from ddlf.rpc.tls import make_certificate
from tests.patience import PATIENCE_S
from tests.peers.light import get
from tests.peers.test_server import Added, Running
from tests.tls import Authority


@pytest.fixture(autouse=True)
def state(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))


def peer(link, lines=None):
    return Peer(link, lambda welcome: Added(), say=[].append if lines is None else lines.append)


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1"])
async def test_a_foreign_page_with_the_cookie_of_a_peer_gets_no_websocket(tmp_path, origin):
    async with Running(tmp_path) as running:
        [code] = await running.server.invite()
        _, headers, _ = await get(running.port, "/join", {"X-DDLF-Code": code})
        cookie = headers["Set-Cookie"].partition(";")[0]
        with pytest.raises(InvalidStatus) as refused:
            await connect(
                f"ws://127.0.0.1:{running.port}/live", additional_headers={"Cookie": cookie}, origin=origin, proxy=None
            )
        assert refused.value.response.status_code == 403
        assert not running.server.ledger.members[1].present


async def test_a_foreign_page_cannot_use_a_code_or_a_command(tmp_path):
    """A foreign page can send a request although it cannot read the answer, so the request must have no effect."""
    async with Running(tmp_path) as running:
        [code] = await running.server.invite()
        origin = {"Origin": "http://evil.example"}
        assert (await get(running.port, "/join", {"X-DDLF-Code": code} | origin))[0] == 403
        assert (await get(running.port, "/control/stop", {"Authorization": "Bearer secret"} | origin))[0] == 403
        assert not running.server.ledger.members
        assert not running.server.ledger.ended


async def test_no_log_and_no_file_of_the_run_has_a_code_or_a_key(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    async with Running(tmp_path) as running:
        [code] = await running.server.invite()
        lines = []
        client = peer(f"http://127.0.0.1:{running.port}/#{code}", lines)
        await asyncio.to_thread(client.run, most_updates=25)
        written = "".join(path.read_bytes().decode(errors="replace") for path in tmp_path.iterdir() if path.is_file())
        assert lines
        for text in (caplog.text, "".join(lines), "".join(running.lines), written):
            assert not any(secret in text for secret in (code, client._connection._own_key.key))


async def over_tls(tmp_path, use, protected=None):
    """Run a server with its own certificate or with ``protected``, and call ``use`` in a thread."""
    context, pin = protected or protection("0.0.0.0", None, None, "")
    running = Running(tmp_path)
    ready, sock = asyncio.Event(), socket.create_server(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    task = asyncio.ensure_future(running.server.serve(sock, ready.set, context))
    await asyncio.wait_for(ready.wait(), PATIENCE_S)
    try:
        [code] = await running.server.invite()
        return await use(port, code, pin, running)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_link_beyond_loopback_pins_the_certificate(tmp_path):
    async def use(port, code, pin, running):
        origin = f"https://127.0.0.1:{port}"
        with pytest.raises(AuthError, match="another certificate"):
            await asyncio.to_thread(peer(link_of(origin, code, "0" * 64)).run, most_updates=1)
        with pytest.raises(ConfigError, match=r"the link is not whole: 64 letters .*, and there are 9; copy the whole"):
            await asyncio.to_thread(peer(link_of(origin, code, pin[:9])).run, most_updates=1)
        with pytest.raises(ConnectError, match=r"is not trusted here, and the link does not name it.*SSL_CERT_FILE"):
            await asyncio.to_thread(peer(link_of(origin, code, "")).run, most_updates=1)
        with pytest.raises(ConnectError, match=r"it has ended the connection; .* may begin with https://"):
            await asyncio.to_thread(peer(f"http://127.0.0.1:{port}/#{code}").run, most_updates=1)
        assert not running.server.ledger.members  # no request has used the code
        await asyncio.to_thread(peer(link_of(origin, code, pin)).run, most_updates=25)
        assert running.server.ledger.members[1].updates == 25

    await over_tls(tmp_path, use)


@pytest.mark.parametrize("with_tls", [False, True])
async def test_commands_reach_a_server_on_one_address_also_with_a_given_certificate(tmp_path, with_tls):
    certificate = tmp_path / "given.pem" if with_tls else None
    if certificate is not None:
        make_certificate(certificate)
    context, pin = protection("127.0.0.2", certificate, certificate, "")
    assert bool(pin) == with_tls
    server = Running(tmp_path).server
    ready, sock = asyncio.Event(), socket.create_server(("127.0.0.2", 0))  # no server listens on 127.0.0.1
    address = server_at(sock, tmp_path, origin="", pin=pin, control="secret", certificate=certificate)
    task = asyncio.ensure_future(server.serve(sock, ready.set, context))
    await asyncio.wait_for(ready.wait(), PATIENCE_S)
    try:
        assert (await asyncio.to_thread(address.overview)).peers == ()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("trusted", [False, True])
async def test_a_link_pins_a_given_certificate_unless_this_system_trusts_it(tmp_path, monkeypatch, trusted):
    authority = Authority(tmp_path)
    cert, key = authority.issue("server")
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))

    async def use(port, code, pin, running):
        assert bool(pin) == (not trusted)
        await asyncio.to_thread(peer(link_of(f"https://127.0.0.1:{port}", code, pin)).run, most_updates=25)
        assert running.server.ledger.members[1].updates == 25

    await over_tls(tmp_path, use, protection("127.0.0.1", cert, key, ""))
    assert protection("127.0.0.2", cert, key, "")[1]  # the certificate is for another host


async def answered(port, host, origin, code):
    """Return the status of a request with a code. The request accepts any certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    headers = f"Host: {host}\r\nOrigin: {origin}\r\nX-DDLF-Code: {code}"
    writer.write(f"GET /join HTTP/1.1\r\n{headers}\r\n\r\n".encode())
    answer = (await reader.read()).decode()
    writer.close()
    return int(answer.split()[1]), answer


async def test_a_link_works_with_the_address_of_the_server_instead_of_its_name(tmp_path):
    async def use(port, code, pin, running):
        running.server._front._url = f"https://vm:{port}"
        for host, origin in (
            (f"evil.example:{port}", f"https://evil.example:{port}"),
            (f"10.0.0.11:{port}", f"https://evil.example:{port}"),
            (f"10.0.0.11.evil.example:{port}", f"https://10.0.0.11.evil.example:{port}"),
        ):
            status, answer = await answered(port, host, origin, code)
            assert (status, "or with an address in place of its name" in answer) == (403, True)
        for host in (f"10.0.0.11:{port}", f"[fd00::11]:{port}", f"vm:{port}"):
            [code] = await running.server.invite()
            assert (await answered(port, host, f"https://{host}", code))[0] == 200

    await over_tls(tmp_path, use)


async def test_the_cookie_is_secure_over_tls(tmp_path):
    async def use(port, code, pin, running):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        writer.write(f"GET /join HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nX-DDLF-Code: {code}\r\n\r\n".encode())
        answer = (await reader.read()).decode()
        writer.close()
        assert "; Secure" in next(line for line in answer.split("\r\n") if line.startswith("Set-Cookie"))

    await over_tls(tmp_path, use)


async def test_behind_a_proxy_only_the_host_of_the_proxy_is_accepted(tmp_path):
    running = Running(tmp_path, url="https://peers.example")
    async with running:
        [code] = await running.server.invite()
        for host in ("other.example", "peers.example.evil.example"):
            assert (await get(running.port, "/join", {"Host": host, "X-DDLF-Code": code}))[0] == 403
        good = {"Host": "peers.example", "Origin": "https://peers.example", "X-DDLF-Code": code}
        status, headers, _ = await get(running.port, "/join", good)
        assert (status, "; Secure" in headers["Set-Cookie"]) == (200, True)


async def test_the_rpc_of_workers_on_the_port_of_peers_is_refused(tmp_path):
    async with Running(tmp_path) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(b"DDLF" + bytes(60) + b"\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), PATIENCE_S))[:12] in (b"HTTP/1.1 400", b"")
        writer.close()


async def test_a_link_to_a_port_that_speaks_another_protocol_is_refused_in_one_sentence():
    from ddlf.rpc.listen import HTTP_ANSWER

    async def worker(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HTTP_ANSWER)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(worker, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        with pytest.raises(ConnectError, match="does not answer as a server of peers: 400 This is a DDLF worker"):
            await asyncio.to_thread(peer(f"http://127.0.0.1:{port}/#code").run)


async def test_many_wrong_codes_do_not_stop_the_service_of_an_honest_peer(tmp_path, monkeypatch):
    monkeypatch.setattr(front, "WRONG_CODE_S", 0.05)
    async with Running(tmp_path) as running:
        honest = await running.peer()
        wrong = [get(running.port, "/join", {"X-DDLF-Code": f"{number:043}"}) for number in range(200)]
        tries = asyncio.gather(*wrong)
        while not tries.done():
            assert (await honest.post(honest.set))["answer"] == "continue"
        assert {status for status, _, _ in await tries} <= {403, 429}
        assert running.server._front._refusing == 0
        assert list(running.server.ledger.members) == [1]
