"""Tests of the quotas of a server of peers."""

import asyncio

import pytest

from ddlf.peers import quotas
from ddlf.peers.entries import Invited, Joined
from ddlf.peers.ledger import Unfit
from ddlf.peers.plan import Plan
from ddlf.peers.quotas import Quota, Quotas, counted_as, reading_s
from ddlf.peers.swap import SwapLedger
from ddlf.peers.turns import TurnConnection
from tests.peers.light import SCORE, frame, get
from tests.peers.test_server import Running, a_set


def test_a_quota_is_a_burst_and_a_rate():
    quota = Quota(3, 2)
    assert [quota.wait_s("a", 10.0) for _ in range(3)] == [0, 0, 0]
    assert quota.wait_s("a", 10.0) == quota.wait_s("a", 10.0) == pytest.approx(0.5)
    assert quota.wait_s("b", 10.0) == 0
    assert quota.wait_s("a", 10.5) == 0
    assert [quota.wait_s("a", 100.0) for _ in range(3)] == [0, 0, 0]


def test_a_use_beyond_a_quota_can_be_charged_later():
    quota = Quota(1, 2)
    assert [quota.owe_s("a", 10.0) for _ in range(3)] == pytest.approx([0, 0.5, 1.0])
    assert quota.owe_s("a", 11.0, uses=4) == pytest.approx(2.0)


def test_the_memory_of_a_quota_is_constant(monkeypatch):
    monkeypatch.setattr(quotas, "MOST_KEYS", 100)
    quota = Quota(1, 1)
    for address in range(1000):
        assert quota.wait_s(address, 1.0) == 0
    assert len(quota._paid_at) == 100
    assert quota.wait_s(999, 1.0) == 1.0


def test_many_bytes_and_many_messages_both_count():
    quotas = Quotas(messages=Quota(1, 10), bytes=Quota(100, 100))
    assert quotas.pace_s(1, 1.0, 10) == 0
    assert quotas.pace_s(1, 1.0, 10) == pytest.approx(0.1)
    assert quotas.pace_s(2, 1.0, 300) == pytest.approx(2.0)
    assert (reading_s(1000), reading_s(16_000_000)) == (30.0, 1000.0)


def test_a_code_admits_its_number_of_peers():
    ledger = SwapLedger(Plan())
    for code, peers in (("one", 1), ("three", 3)):
        ledger.apply(Invited(at=0.0, code=code, until=10.0, peers=peers))
    ledger.apply(Joined(at=1.0, peer=1, code="one", key="k1"))
    ledger.apply(Joined(at=1.0, peer=2, code="three", key="k2"))
    again = SwapLedger(Plan())
    again.restore(ledger.state())
    for peer in (3, 4):
        again.apply(Joined(at=1.0, peer=peer, code="three", key=f"k{peer}"))
    for code in ("one", "three"):
        with pytest.raises(Unfit, match="used already"):
            again.apply(Joined(at=1.0, peer=9, code=code, key="k9"))


async def test_refusals_name_the_quota_and_the_waiting_time(tmp_path):
    async with Running(tmp_path) as running:
        running.server._front.quotas = Quotas(refused_joins=Quota(1, 0.1), connections=Quota(1, 0.1))
        assert (await get(running.port, "/join", {"X-DDLF-Code": "wrong"}))[0] == 403
        status, headers, body = await get(running.port, "/join", {"X-DDLF-Code": "wrong"})
        assert (status, headers["Retry-After"]) == (429, "10")
        assert body == "too many wrong codes from your address: try again in 10 s\n"
        peer = await running.peer()  # the right code still works
        await peer.socket.close()
        status, headers, body = await get(running.port, "/live", {"Authorization": f"Bearer {peer.key}"})
        assert (status, body) == (429, "too many connections of peer 1: try again in 10 s\n")
        running.server._front.quotas = Quotas(requests=Quota(1, 0.1))
        assert (await get(running.port, "/"))[0] == 200
        assert (await get(running.port, "/"))[2] == "too many requests from your address: try again in 10 s\n"
        assert (await get(running.port, "/control/list", {"Authorization": "Bearer secret"}))[0] == 200


async def test_behind_a_proxy_the_server_uses_the_address_that_the_proxy_names(tmp_path):
    async with Running(tmp_path) as running:
        running.server._front._proxied = True
        running.server._front.quotas = Quotas(requests=Quota(1, 0.1))
        for address, expected in (("1.2.3.4", 200), ("9.9.9.9, 1.2.3.4", 429), ("1.2.3.5", 200)):
            headers = {"Host": "127.0.0.1", "X-Forwarded-For": address}
            assert (await get(running.port, "/", headers))[0] == expected


async def test_without_a_proxy_a_request_cannot_choose_its_address(tmp_path):
    async with Running(tmp_path) as running:
        running.server._front._url = f"http://127.0.0.1:{running.port}"  # the form that `ddlf peers serve` uses
        running.server._front.quotas = Quotas(requests=Quota(1, 0.1))
        for address, expected in (("1.2.3.4", 200), ("1.2.3.5", 429)):
            assert (await get(running.port, "/", {"X-Forwarded-For": address}))[0] == expected


def test_a_network_of_ipv6_counts_as_one_address():
    network = counted_as("2001:db8::1:2:3:4")
    assert network == counted_as("2001:db8::ffff") == "2001:db8::"
    assert counted_as("2001:db8:0:1::1") != network
    assert counted_as("::ffff:1.2.3.4") == counted_as("1.2.3.4") == "1.2.3.4"
    assert counted_as("fe80::1%eth0") == "fe80::"
    assert counted_as("a name") == "a name"


async def test_connections_beyond_the_quota_of_an_address_are_closed_before_tls(tmp_path, monkeypatch):
    monkeypatch.setattr("ddlf.peers.front.is_loopback", lambda address: address == "127.0.0.2")
    async with Running(tmp_path) as running:
        running.server._front.quotas = Quotas(arrivals=Quota(2, 1e-3), refused_joins=Quota(1, 1e-3))
        for address, accepted in (("127.0.0.1", 2), ("127.0.0.2", 5), ("127.0.0.3", 2)):
            answered = [await answers(running.port, address) for _ in range(5)]
            assert answered == [True] * accepted + [False] * (5 - accepted)
        for _ in range(2):
            await running.server._front._wrong_code(Unfit("wrong"), "127.0.0.4")
        assert not await answers(running.port, "127.0.0.4")
        running.server._front._proxied = True
        assert await answers(running.port, "127.0.0.1")


async def answers(port, address):
    """Return whether the server answers a request from an address."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
    try:
        writer.write(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
        return (await reader.read()).startswith(b"HTTP/1.1 200")
    except ConnectionError:
        return False
    finally:
        writer.close()


async def test_a_peer_beyond_its_quota_waits_without_delaying_another_one(tmp_path):
    async with Running(tmp_path) as running:
        running.server.quotas = Quotas(messages=Quota(2, 1e-3))
        greedy, other = await running.peer(), await running.peer()
        for value in (1.0, 2.0, 3.0):
            await greedy.post(a_set(value))  # the third post is still answered
        await greedy.send_post(a_set(4.0))
        await running.until(lambda: any("more than its quota" in line for line in running.lines))
        assert (await other.post(a_set(1.0)))["answer"] == "merge"
        assert running.server.ledger.members[1].number == 3
        assert running.server.ledger.members[1].present


async def test_a_peer_that_does_not_read_is_cut(tmp_path, monkeypatch):
    async with Running(tmp_path) as running:
        peer = await running.peer()
        monkeypatch.setattr("ddlf.peers.peer_connection.reading_s", lambda size: 0.01)
        monkeypatch.setattr(TurnConnection, "send_alive", lambda self, pieces: self.wait_closed())
        await peer.send_post(a_set(1.0))
        await running.until(lambda: any(line.startswith("cut ") for line in running.lines))
        assert running.lines[-1].startswith("cut       peer 1 (light): it has not read")
        await peer.socket.wait_closed()


async def test_an_unrequested_validation_does_not_count(tmp_path):
    async with Running(tmp_path, validate_s=3600.0) as running:
        peer = await running.peer()
        tested = {"set_number": 2, "accuracy": 1.0, "loss": 0.0, "samples": 64}
        assert (await peer.post(a_set(1.0)))["answer"] == "validate"
        for _ in range(3):
            await peer.socket.send(frame(SCORE, tested))
        await running.until(lambda: sum("not asked for" in line for line in running.lines) == 2)
        assert running.server.ledger.validation_count == 1
