"""Tests of the server of the page: access, messages, and viewers that must not delay a run."""

import asyncio
import contextlib
import json
import socket
import threading

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from ddlf.cli.stopping import StopRequest
from ddlf.errors import AuthError, ConnectError
from ddlf.monitor.dashboard import address
from ddlf.monitor.dashboard.board import Board
from ddlf.monitor.dashboard.server import Dashboard
from ddlf.monitor.dashboard.viewer import watch
from tests.monitor.dashboard.made_up import answers, beginning, one_round
from tests.patience import PATIENCE_S


async def look():
    return answers(2)


@contextlib.asynccontextmanager
async def page(**options):
    async with Dashboard(look, **{"port": 0, "title": "lab", **options}) as dashboard:
        dashboard.token = dashboard.url.partition("#")[2]
        yield dashboard


async def get(port, path="/", **headers):
    """Return status, headers and body of an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = [f"{name}: {value}" for name, value in ({"Host": f"127.0.0.1:{port}"} | headers).items()]
    writer.write("\r\n".join([f"GET {path} HTTP/1.1", *lines, "", ""]).encode())
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *rest = head.decode().split("\r\n")
    return int(status.split()[1]), dict(line.split(": ", 1) for line in rest), body


def live(dashboard, token=None, **options):
    protocols = ["ddlf", dashboard.token if token is None else token]
    return connect(f"ws://127.0.0.1:{dashboard.port}/live", subprotocols=protocols, proxy=None, **options)


async def shown(viewer, name):
    """Return the next message that contains the name."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            message = json.loads(await viewer.recv())
            if name in message:
                return message


async def test_the_page_loads_all_its_files_from_its_own_server():
    async with page() as dashboard:
        for path, kind in [("/", "text/html"), ("/page.js", "text/javascript"), ("/page.css", "text/css")]:
            status, headers, body = await get(dashboard.port, path)
            assert (status, headers["Content-Type"]) == (200, f"{kind}; charset=utf-8")
            assert b"http://" not in body.replace(b"http://www.w3.org/", b"")
            assert b"https://" not in body
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "connect-src 'self'" in headers["Content-Security-Policy"]


@pytest.mark.parametrize("path", ["/live", "/metrics", "/anything", "/../tokens.py"])
async def test_only_the_empty_page_is_shown_without_the_token(path):
    async with page() as dashboard:
        assert (await get(dashboard.port, path))[0] == 401
        assert (await get(dashboard.port, path, Authorization="Bearer wrong"))[0] == 401
        assert (await get(dashboard.port, f"{path}?token={dashboard.token}"))[0] == 401


@pytest.mark.parametrize("path", ["/", "/live", "/metrics"])
@pytest.mark.parametrize("header", [{"Host": "evil.example"}, {"Origin": "http://evil.example"}])
async def test_a_foreign_host_or_origin_is_refused_also_with_the_token(path, header):
    async with page() as dashboard:
        assert (await get(dashboard.port, path, Authorization=f"Bearer {dashboard.token}", **header))[0] == 403


async def test_a_socket_without_the_token_or_from_another_site_is_refused():
    async with page() as dashboard:
        for options, status in [({"token": "wrong"}, 401), ({"origin": "http://evil.example"}, 403)]:
            with pytest.raises(InvalidStatus) as refused:
                async with live(dashboard, **options):
                    pass
            assert refused.value.response.status_code == status


async def test_a_viewer_receives_all_data_first_and_then_the_changes():
    async with page() as dashboard:
        for at, event in beginning():
            dashboard.tell(event, at)
        async with live(dashboard) as viewer:
            assert viewer.subprotocol == "ddlf"
            first = await shown(viewer, "run")
            assert first["about"]["title"] == "lab"
            assert first["run"]["app"] == "MnistCNN"
            assert (await shown(viewer, "workers"))["workers"] == answers(2)
            for at, event in one_round(1):
                dashboard.tell(event, at)
            message = await shown(viewer, "series")
            assert message["series"]["from"] == 0
            assert message["series"]["x"] == [1]
            assert "about" not in message


async def test_an_event_from_both_app_and_cluster_counts_once():
    async with page() as dashboard, live(dashboard) as viewer:
        for at, event in [*beginning(), *one_round(1)]:
            dashboard.tell(event, at)
            dashboard.tell(event, at)
        while not (lanes := (await shown(viewer, "lanes"))["lanes"]):
            pass
        while lanes[0]["state"] != "idle" or not lanes[0]["updates"]:
            lanes = (await shown(viewer, "lanes"))["lanes"]
        assert lanes[0]["updates"] == 1


async def test_a_run_that_was_stopped_by_ctrl_c_is_shown_as_stopping():
    stop = StopRequest()
    stop.gently, stop.say = lambda: True, lambda text: None
    async with page(stop=stop.interrupted) as dashboard:
        stop.tell = dashboard.stopping
        for at, event in beginning():
            dashboard.tell(event, at)
        async with live(dashboard) as viewer:
            await shown(viewer, "run")
            assert stop.interrupted()  # Ctrl-C
            while not (await shown(viewer, "run"))["run"]["stopping"]:
                pass


async def test_the_stop_button_calls_the_stop_function():
    was_asked = asyncio.Event()

    def stop():
        was_asked.set()
        return True

    async with page(stop=stop) as dashboard:
        for at, event in beginning():
            dashboard.tell(event, at)
        async with live(dashboard) as viewer:
            assert (await shown(viewer, "about"))["about"]["can_stop"]
            await viewer.send("nonsense")
            await viewer.send('{"stop": false}')
            await viewer.send("[]")
            assert not was_asked.is_set()
            await viewer.send('{"stop": true}')
            await asyncio.wait_for(was_asked.wait(), PATIENCE_S)
            while not (await shown(viewer, "run"))["run"]["stopping"]:
                pass


async def test_the_page_reports_that_the_master_is_blocked(monkeypatch):
    monkeypatch.setattr("ddlf.monitor.dashboard.server.HELD_UP_S", 0.2)
    monkeypatch.setattr("ddlf.monitor.dashboard.server.LOOK_S", 0.05)
    async with page() as dashboard:
        seconds = await asyncio.to_thread(_blocked, dashboard, asyncio.get_running_loop())
    assert seconds >= 0.2


def _blocked(dashboard, loop):
    """Return how many seconds the master has been blocked, according to the page."""
    from websockets.sync.client import connect

    free = threading.Event()
    with connect(f"ws://127.0.0.1:{dashboard.port}/live", subprotocols=["ddlf", dashboard.token], proxy=None) as viewer:
        loop.call_soon_threadsafe(free.wait)
        try:
            while not (seconds := json.loads(viewer.recv(PATIENCE_S))["held_s"]):
                pass
        finally:
            free.set()
    return seconds


async def test_a_browser_that_does_not_read_delays_neither_the_run_nor_other_viewers(monkeypatch):
    """The server sends the browser 20 MB, more than the buffers of the system hold."""
    monkeypatch.setattr("ddlf.monitor.dashboard.server.RATE_HZ", 200)
    monkeypatch.setattr("ddlf.monitor.dashboard.server.LOOK_S", 0.001)
    large = "x" * 500_000

    async def look_at_much():
        return [{"worker": 1, "why": large}]

    async with Dashboard(look_at_much, port=0) as dashboard:
        token = dashboard.url.partition("#")[2]
        with socket.socket() as frozen:
            frozen.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            frozen.connect(("127.0.0.1", dashboard.port))
            frozen.sendall(
                f"GET /live HTTP/1.1\r\nHost: 127.0.0.1:{dashboard.port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                f"Sec-WebSocket-Key: MTIzNDU2Nzg5MDEyMzQ1Ng==\r\nSec-WebSocket-Version: 13\r\n"
                f"Sec-WebSocket-Protocol: ddlf, {token}\r\n\r\n".encode()
            )
            address = f"ws://127.0.0.1:{dashboard.port}/live"
            async with connect(address, subprotocols=["ddlf", token], proxy=None, max_size=None) as viewer:
                for number in range(1, 41):
                    for at, event in [*beginning(), *one_round(number)] if number == 1 else one_round(number):
                        dashboard.tell(event, at)
                    await shown(viewer, "workers")
                for at, event in one_round(41):
                    dashboard.tell(event, at)
                while (await shown(viewer, "series"))["series"]["x"][-1:] != [41]:
                    pass
        assert not dashboard._inbox


async def test_viewers_receive_the_last_state_and_the_end_of_the_page():
    async with page() as dashboard, live(dashboard) as viewer:
        await shown(viewer, "about")
        for at, event in beginning():
            dashboard.tell(event, at)
        await asyncio.to_thread(dashboard.close)
        messages = [json.loads(text) async for text in viewer]
        assert any(message.get("run") for message in messages)
        assert messages[-1]["over"]


async def test_a_terminal_receives_the_data_of_the_page_and_ends_with_the_master():
    async with page() as dashboard:
        for at, event in [*beginning(), *one_round(1), *one_round(2)]:
            dashboard.tell(event, at)
        async for view in watch(dashboard.port, dashboard.token):
            if view["workers"] and view["run"]:
                break
        assert view["curves"]["loss"][-1] == view["run"]["metrics"]["loss"]
        with pytest.raises(AuthError):
            await anext(watch(dashboard.port, "another"))
    with pytest.raises(ConnectError, match="no page answers"):
        await anext(watch(dashboard.port, dashboard.token))


async def test_a_page_is_found_while_it_is_open():
    async with page() as dashboard:
        assert [entry["url"] for entry in address.open_pages()] == [dashboard.url]
    assert address.open_pages() == []


async def test_prometheus_can_read_the_metrics_which_have_base_units():
    from prometheus_client.parser import text_string_to_metric_families

    async with page() as dashboard:
        for at, event in [*beginning(), *one_round(1)]:
            dashboard.tell(event, at)
        metrics = {}
        async with asyncio.timeout(PATIENCE_S):
            while "ddlf_worker_updates" not in metrics or not metrics["ddlf_worker_up"]:
                status, _, body = await get(dashboard.port, "/metrics", Authorization=f"Bearer {dashboard.token}")
                assert status == 200
                families = text_string_to_metric_families(body.decode())
                metrics = {
                    family.name: {tuple(s.labels.values()): s.value for s in family.samples} for family in families
                }
                await asyncio.sleep(0.05)
    assert all(name.startswith("ddlf") for name in metrics)
    assert metrics["ddlf_worker_updates"][("1",)] == 1
    assert metrics["ddlf_worker_memory_bytes"][("2",)] == 1_240_000_000
    assert metrics["ddlf_run_training"] == {(): 1.0}


def test_a_worker_that_was_never_reached_is_not_up():
    from ddlf.monitor.dashboard.metrics import text

    board = Board()
    states = ("alive", "suspect", "dead", "missing")
    board.set_workers([{"worker": n, "name": f"pc{n}", "state": state} for n, state in enumerate(states)])
    up = [line.rpartition(" ")[2] for line in text(board).decode().splitlines() if line.startswith("ddlf_worker_up{")]
    assert up == ["1.0", "1.0", "0.0", "0.0"]


async def test_without_prometheus_client_a_sentence_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "ddlf.monitor.dashboard.metrics", raising=False)
    async with page() as dashboard:
        status, _, body = await get(dashboard.port, "/metrics", Authorization=f"Bearer {dashboard.token}")
        assert (status, b"pip install 'ddlf[metrics]'" in body) == (501, True)
