"""Tests of the page of a real cluster, for plain calls and for the run of an app."""

import argparse
import asyncio
import json

import pytest
from websockets.asyncio.client import connect

from ddlf.cli import dashboard as cli
from ddlf.cli.stopping import StopRequest
from ddlf.cluster.cluster import Cluster
from ddlf.errors import ConfigError, ConnectError, ListenError
from ddlf.monitor.dashboard import address
from ddlf.monitor.dashboard.server import Dashboard
from ddlf.monitor.terminal.display import Display
from ddlf.testing import FakeRun, in_process_cluster
from tests.patience import PATIENCE_S


async def shown(page, condition):
    """Receive messages as a viewer until ``condition`` holds for the merged data, and return this data."""
    view = {}
    address = f"ws://127.0.0.1:{page.port}/live"
    async with (
        asyncio.timeout(PATIENCE_S),
        connect(address, subprotocols=["ddlf", page.url.partition("#")[2]], proxy=None) as viewer,
    ):
        async for text in viewer:
            view.update(json.loads(text))
            if condition(view):
                return view
    raise AssertionError(view)


async def test_a_cluster_without_a_run_has_a_page_with_its_workers():
    async with in_process_cluster(2) as cluster, cluster.dashboard(port=0, title="calls") as page:
        view = await shown(page, lambda view: len(view.get("workers", [])) == 2)
        assert view["about"]["title"] == "calls"
        assert not view["about"]["can_stop"]
        for number, worker in enumerate(view["workers"], 1):
            assert (worker["worker"], worker["state"], worker["busy"]) == (number, "alive", None)
            assert worker["cores"] >= 1
            assert worker["memory"]["used"] > 1_000_000
        await cluster.workers[1].close()
        view = await shown(page, lambda view: view.get("workers") and view["workers"][1]["state"] == "dead")
        assert view["workers"][0]["state"] == "alive"


async def test_a_busy_worker_reports_its_running_method():
    async def wait_a_while(self):
        await asyncio.sleep(PATIENCE_S)

    async with in_process_cluster(1) as cluster, cluster.dashboard(port=0) as page:
        call = asyncio.ensure_future(cluster.run_method(wait_a_while))
        view = await shown(page, lambda view: view.get("workers") and view["workers"][0]["busy"])
        assert view["workers"][0]["busy"]["method"] == "wait_a_while"
        call.cancel()


async def test_a_guest_sees_the_state_of_a_worker_without_taking_it(tmp_path):
    async with in_process_cluster(1) as cluster:
        worker, token = cluster.workers[0], tmp_path / "token"
        token.touch(0o600)
        token.write_bytes(cluster._launcher.tokens.primary)
        guest = Cluster([worker.host], worker.port, token_file=token, guest=True)
        try:
            (facts,) = await guest.look()
            assert facts["state"] == "alive"
            assert facts["lease"]["state"] == "alive"
        finally:
            await guest.close()
        assert await cluster.run_method(int) == [0]


async def test_the_page_of_an_app_shows_its_run_and_can_end_it():
    rounds = 100_000  # so many that the run cannot end before the page is read
    run = FakeRun(master_epochs=rounds)

    async def nobody():
        return []

    async with Dashboard(nobody, port=0, follow=[run], stop=run.stop_training) as page:
        address = f"ws://127.0.0.1:{page.port}/live"
        async with connect(address, subprotocols=["ddlf", page.url.partition("#")[2]], proxy=None) as viewer:
            training = asyncio.ensure_future(run.train_model())
            async with asyncio.timeout(PATIENCE_S):
                async for text in viewer:
                    if (json.loads(text).get("run") or {}).get("phase") == "training":
                        await viewer.send('{"stop": true}')
                        break
            assert len(await training) < rounds


def options(**changes):
    return argparse.Namespace(**{"dashboard": None, "quiet": False, **changes})


@pytest.fixture
def lines_of(capsys):
    """Return a function that gives the printed lines of a run with an option, and the open pages during the run."""

    async def of(dashboard, *, prints=True):
        display = Display()
        display.prints = prints
        async with (
            in_process_cluster(1) as cluster,
            cli.served(cluster, None, options(dashboard=dashboard), display, StopRequest(), "lab"),
        ):
            pages = address.open_pages()
        captured = capsys.readouterr()
        return (captured.out if prints else captured.err).splitlines(), pages

    return of


async def test_a_run_prints_the_url_of_its_page(monkeypatch, lines_of):
    monkeypatch.setattr("ddlf.monitor.dashboard.address.PORTS", range(8940, 8950))
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    (line,), (page,) = await lines_of(True)
    assert line.startswith(f"dashboard {page['url']}")
    assert page["cluster"] == "lab"
    monkeypatch.setenv("SSH_CONNECTION", "10.1.1.1 5000 10.0.0.9 22")
    (_, line), (page,) = await lines_of(True)
    assert f"ssh -N -L {page['port']}:127.0.0.1:{page['port']} " in line
    lines, _ = await lines_of(True, prints=False)
    assert lines[0].startswith("dashboard http://"), (
        "with prints=False, standard output is used for other data, so the line is on standard error"
    )


async def test_without_a_terminal_there_is_no_page_unless_it_is_requested(monkeypatch, lines_of):
    assert await lines_of(None) == ([], [])
    assert await lines_of(False) == ([], [])
    monkeypatch.setenv("DDLF_DASHBOARD", "off")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert await lines_of(None) == ([], [])


async def test_a_page_without_a_free_port_is_a_line_but_a_given_port_in_use_is_an_error(monkeypatch, lines_of):
    listener = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    async with listener:
        with pytest.raises(ListenError, match=f"port {port} for the dashboard is in use"):
            await lines_of(port)
        monkeypatch.setattr("ddlf.monitor.dashboard.address.PORTS", range(port, port + 1))
        (line,), pages = await lines_of(True)
    assert line.startswith(f"dashboard not shown: ports {port} to {port}")
    assert pages == []


@pytest.mark.parametrize(
    ("text", "value"),
    [("on", True), ("0", False), ("OFF", False), ("1", True), ("8950", 8950), ("auto", None), ("", "nothing")],
)
def test_the_environment_variable_is_on_off_auto_or_a_port(monkeypatch, text, value):
    monkeypatch.setenv("DDLF_DASHBOARD", text)
    assert cli.requested(options()) == (None if value == "nothing" else (value, "DDLF_DASHBOARD"))
    assert cli.requested(options(dashboard=8960)) == (8960, "--dashboard")


@pytest.mark.parametrize("text", ["maybe", "70000"])
def test_other_values_of_the_variable_are_refused(monkeypatch, text):
    monkeypatch.setenv("DDLF_DASHBOARD", text)
    with pytest.raises(ConfigError, match="DDLF_DASHBOARD must be"):
        cli.requested(options())


def test_without_a_page_the_command_names_the_option_for_one():
    with pytest.raises(ConnectError, match="no run of yours") as error:
        cli.dashboard(argparse.Namespace(open=False))
    assert "--dashboard" in error.value.hint
