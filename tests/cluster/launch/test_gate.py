"""Tests of workers that dial the gate of their master: their places, reconnecting, and refusals."""

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from ddlf.cluster import link
from ddlf.cluster.cluster import Cluster
from ddlf.cluster.launch import gate as gate_module
from ddlf.cluster.launch.gate import Joined
from ddlf.errors import AuthError, ConfigError, ConnectError, DDLFError, LeaseError, ListenError
from ddlf.rpc.dial import dial
from ddlf.rpc.handshake import PROOF_BYTES, Role
from ddlf.rpc.join import (
    ANSWER,
    ANY_PLACE,
    KEPT,
    OFFER,
    OPENING,
    GateVerdict,
    Greeting,
    Offer,
    Offering,
    join_preamble,
)
from ddlf.testing.in_process import InProcessDaemon
from ddlf.worker import joining
from ddlf.worker.joining import Join
from ddlf.worker.options import Options
from tests.daemons import TOKEN
from tests.patience import PATIENCE_S


class Fleet:
    """Workers in this process that join a gate."""

    def __init__(self, port: int, token: bytes = TOKEN) -> None:
        self.port = port
        self._token = token
        self.daemons: list[InProcessDaemon] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.lines: list[str] = []

    def join(self, place: int = ANY_PLACE, *, port: int | None = None, **more) -> InProcessDaemon:
        addresses = more.pop("addresses", (("127.0.0.1", self.port),))
        join = Join(addresses, place, **more)
        options = Options(host="127.0.0.1", port=port, tokens=(self._token,), state_dir=None, join=join)
        daemon = InProcessDaemon(options, say=self.lines.append)
        self.daemons.append(daemon)
        self.tasks.append(asyncio.create_task(daemon.run()))
        return daemon

    async def ended(self, daemon: InProcessDaemon) -> DDLFError | None:
        await asyncio.wait_for(self.tasks[self.daemons.index(daemon)], PATIENCE_S)
        return daemon.end_error

    async def end(self) -> None:
        for daemon in self.daemons:
            daemon.stop()
        # A cancelled task must not end the teardown of the fixture, because pytest would not undo patches of later tests.
        await asyncio.gather(*self.tasks, return_exceptions=True)


@pytest.fixture
def token(tmp_path):
    path = tmp_path / "token"
    path.write_bytes(TOKEN)
    path.chmod(0o600)
    return path


@pytest.fixture
async def fleet():
    """Yield workers with short pauses. The test sets their port."""
    fleet = Fleet(0)
    yield fleet
    await fleet.end()
    for launcher in opened:
        await launcher.stop()
    opened.clear()
    assert not [thread for thread in threading.enumerate() if thread.name == "ddlf-gate"]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(joining, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(joining, "LONGEST_PAUSE_S", 0.05)


opened = []


def gate_launcher(n, token, **more):
    launcher = Joined(n, "127.0.0.1", 0, token_file=token, **more)
    opened.append(launcher)
    launcher.open()
    return launcher


@contextlib.asynccontextmanager
async def connected(launcher, **options):
    async with asyncio.timeout(PATIENCE_S), Cluster(launcher, **options) as cluster:
        yield cluster


def double(x):
    return 2 * x


async def test_number_of_a_worker_is_its_place_plus_one_in_any_order_of_arrival(fleet, token):
    launcher = gate_launcher(3, token)
    fleet.port = launcher.gate.port
    for place in (2, 0, 1):
        fleet.join(place)
        await asyncio.wait_for(launcher.gate.run(launcher.gate.wait(1)), PATIENCE_S)
    async with connected(launcher) as cluster:
        assert await cluster.run_code("self.id") == [1, 2, 3]
        assert [worker.label for worker in cluster.workers] == ["place 0", "place 1", "place 2"]
        assert repr(cluster) == "Cluster(place 0, place 1, place 2)"


async def test_calls_and_arrays_go_through_connections_that_workers_opened(fleet, token):
    launcher = gate_launcher(1, token)
    fleet.port = launcher.gate.port
    daemon = fleet.join(0)
    async with connected(launcher) as cluster:
        array = np.arange(1_000_000, dtype="float32")
        (result,) = await cluster.run_method(double, x=array)
        np.testing.assert_array_equal(result, 2 * array)
        assert daemon._listener is None
        assert (await cluster.look())[0]["state"] == "alive"


async def test_killed_executor_is_reached_again(fleet, token):
    launcher = gate_launcher(1, token)
    fleet.port = launcher.gate.port
    daemon = fleet.join(0)
    async with connected(launcher) as cluster:
        (before,) = await cluster.run_method(double, x=1)
        for _ in range(3):
            daemon.process.kill()
            assert await cluster.options(idempotent=True).run_method(double, x=4) == [8]
        assert before == 2


async def test_worker_that_returns_to_its_place_is_the_same_worker(fleet, token):
    launcher = gate_launcher(2, token)
    fleet.port = launcher.gate.port
    first, _ = fleet.join(0), fleet.join(1)
    async with connected(launcher) as cluster:
        await cluster.set_variable("kept", 5)
        first.stop()
        assert await fleet.ended(first) is None
        fleet.join(0)
        await cluster.connect()
        assert await cluster.run_code("self.id") == [1, 2]
        assert await cluster.get_variable("kept") == [5, 5]


async def test_later_of_two_workers_at_one_place_keeps_the_place(fleet, token):
    launcher = gate_launcher(1, token)
    fleet.port = launcher.gate.port
    early = fleet.join(0, incarnation=1)
    async with connected(launcher) as cluster:
        late = fleet.join(0, incarnation=2)
        reason = await fleet.ended(early)
        assert isinstance(reason, LeaseError)
        assert "a later worker has place 0" in reason.message
        await cluster.connect()
        assert await cluster.run_method(double, x=1) == [2]
        assert late._controls


async def test_worker_keeps_its_place_after_a_cut_of_its_waiting_connection(fleet, token):
    launcher = gate_launcher(1, token)
    gate = launcher.gate
    fleet.port = gate.port
    daemon = fleet.join()
    async with connected(launcher) as cluster:
        spare = Offering(TOKEN, Offer(ANY_PLACE, daemon._options.join.incarnation + 1))
        (place,) = gate._states

        async def cut_and_offer():
            while not place.waiting:  # the worker dials its next connection
                gate.came.clear()
                await gate.came.wait()
            place.drop(place.waiting[0])
            return gate._judge(spare._own_offer)[0]

        assert await gate.run(cut_and_offer()) is GateVerdict.FULL
        assert await cluster.run_method(double, x=1) == [2]


async def test_worker_that_joins_while_the_run_ends_learns_it(token):
    launcher = gate_launcher(1, token)
    gate = launcher.gate
    reader, writer = await asyncio.open_connection("127.0.0.1", gate.port)

    async def offered(reader, writer):
        offering = Offering(TOKEN, Offer(0, 7))
        writer.write(offering.opening)
        writer.write(offering.answer(await reader.readexactly(OPENING.size)))
        offering.check(await reader.readexactly(ANSWER.size))

    await offered(reader, writer)
    writer.write(KEPT)
    connection = await gate.take(0, PATIENCE_S)
    late = await asyncio.open_connection("127.0.0.1", gate.port)
    await offered(*late)
    ending = asyncio.ensure_future(gate.run(gate.end_workers()))
    await gate.run(gate.absent())  # the end has begun, because the gate's loop runs calls in order
    late[1].write(KEPT)
    assert await asyncio.wait_for(late[0].read(), PATIENCE_S) == join_preamble()
    await asyncio.wait_for(ending, PATIENCE_S)
    for end in (writer, late[1], connection):
        end.close()
    await launcher.stop()


async def test_workers_without_a_place_take_the_free_ones(fleet, token, monkeypatch):
    monkeypatch.setattr(gate_module, "LEFT_AFTER_S", 0.0)
    launcher = gate_launcher(2, token)
    fleet.port = launcher.gate.port
    first, _ = fleet.join(), fleet.join()
    async with connected(launcher) as cluster:
        assert await cluster.run_code("self.id") == [1, 2]
        spare = fleet.join(for_s=0.1)
        reason = await fleet.ended(spare)
        assert "the master has all its workers" in reason.message
        first.stop()
        await fleet.ended(first)
        fleet.join()
        await cluster.connect()
        assert await cluster.run_code("self.id") == [1, 2]


async def test_place_beyond_the_last_one_is_refused_by_number(fleet, token):
    launcher = gate_launcher(2, token)
    fleet.port = launcher.gate.port
    reason = await fleet.ended(fleet.join(2, for_s=0.1))
    assert "the master has no place 2; check --place" in str(reason)
    await launcher.stop()


async def test_many_workers_from_one_address_all_get_in(fleet, token):
    launcher = gate_launcher(64, token)
    fleet.port = launcher.gate.port
    for place in range(64):
        fleet.join(place)
    async with connected(launcher) as cluster:
        assert await cluster.run_code("self.id") == list(range(1, 65))


async def test_worker_joins_a_master_that_starts_later_and_the_next_one(fleet, token):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fleet.port = port
    fleet.join(0)
    for _ in range(2):
        async with connected(Joined(1, "127.0.0.1", port, token_file=token)) as cluster:
            assert await cluster.run_method(double, x=3) == [6]


async def test_worker_tries_all_addresses_and_takes_the_gate_with_its_token(fleet, token, tmp_path):
    other_token = tmp_path / "other"
    other_token.write_bytes(b"o" * 43)
    other_token.chmod(0o600)
    wrong, right = gate_launcher(1, other_token), gate_launcher(1, token)
    silent = socket.create_server(("127.0.0.1", 0))
    ports = [wrong.gate.port, silent.getsockname()[1], right.gate.port]
    fleet.join(0, addresses=tuple(("127.0.0.1", port) for port in ports))
    async with connected(right) as cluster:
        assert await cluster.run_method(double, x=3) == [6]
    assert await wrong.gate.run(wrong.gate.absent()) == [0]
    await wrong.stop()
    silent.close()


async def test_worker_that_reaches_one_gate_by_several_addresses_keeps_one_connection(fleet):
    answers, welcome, end = [], asyncio.Barrier(3), asyncio.Barrier(4)

    async def greet(reader, writer):
        greeting = Greeting((TOKEN,))
        writer.write(greeting.reply(await reader.readexactly(OPENING.size)))
        greeting.read(await reader.readexactly(OFFER.size + PROOF_BYTES))
        await welcome.wait()  # all three are welcome at the same time
        writer.write(greeting.answer(GateVerdict.WELCOME))
        answers.append(await reader.read(1))
        await end.wait()  # a worker whose connection is closed offers the next one
        writer.close()

    async with await asyncio.start_server(greet, ["127.0.0.1", "127.0.0.2", "127.0.0.3"], 0) as server:
        fleet.join(0, addresses=tuple(sock.getsockname() for sock in server.sockets))
        await asyncio.wait_for(end.wait(), PATIENCE_S)
    assert sorted(answers) == [b"", b"", KEPT]


async def test_worker_ends_when_no_master_appears(fleet):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        fleet.port = free.getsockname()[1]
        reason = await fleet.ended(fleet.join(0, for_s=0.1))
    assert isinstance(reason, ConnectError)
    assert reason.message.startswith(f"no master at 127.0.0.1:{fleet.port} for 0.1 s: ")
    assert "start the master with --listen" in reason.hint


async def test_workers_of_an_engine_end_with_the_run(fleet, token):
    launcher = gate_launcher(2, token)
    launcher.ends_workers = True
    fleet.port = launcher.gate.port
    daemons = [fleet.join(0), fleet.join(1)]
    async with connected(launcher) as cluster:
        assert await cluster.run_method(double, x=1) == [2, 2]
    assert [await fleet.ended(daemon) for daemon in daemons] == [None, None]


async def test_worker_does_not_end_while_a_master_uses_it(fleet, token):
    launcher = gate_launcher(1, token)
    fleet.port = launcher.gate.port
    daemon = fleet.join(0, for_s=0.05)
    async with connected(launcher) as cluster:
        gate = launcher.gate
        await asyncio.to_thread(gate.close)
        while not any("is gone" in line for line in fleet.lines):
            assert await cluster.run_method(double, x=1) == [2]
        for _ in range(20):
            await asyncio.sleep(0.01)
            assert await cluster.run_method(double, x=1) == [2]
        assert daemon.end_error is None


async def test_stranger_is_not_let_in(fleet, token):
    launcher = gate_launcher(1, token)
    stranger = Fleet(launcher.gate.port, b"x" * 43)
    reason = await stranger.ended(stranger.join(0, for_s=0.1))
    assert isinstance(reason, AuthError)
    assert "the gate has another token than this worker" in reason.message
    assert await launcher.gate.run(launcher.gate.absent()) == [0]
    await stranger.end()
    await launcher.stop()


async def test_master_that_dials_a_gate_gets_an_explanation(token):
    launcher = gate_launcher(1, token)
    with pytest.raises(DDLFError):
        await dial("127.0.0.1", launcher.gate.port, Role.CONTROL, TOKEN, max_message_bytes=1000)
    reader, writer = await asyncio.open_connection("127.0.0.1", launcher.gate.port)
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 400 Bad Request")
    writer.close()
    await launcher.stop()


async def test_silent_connections_do_not_keep_workers_out(fleet, token):
    launcher = gate_launcher(1, token)
    fleet.port = launcher.gate.port
    silent = [socket.create_connection(("127.0.0.1", fleet.port)) for _ in range(200)]
    fleet.join(0)
    async with connected(launcher) as cluster:
        assert await cluster.run_method(double, x=1) == [2]
    for sock in silent:
        sock.close()


async def test_cluster_begins_without_absent_workers_if_enough_have_joined(fleet, token, caplog):
    launcher = gate_launcher(2, token, start_timeout_s=0.2)
    fleet.port = launcher.gate.port
    fleet.join(1)
    async with connected(launcher, min_workers=1, connect_timeout_s=0.2) as cluster:
        assert [worker.label for worker in cluster.workers] == ["place 1"]
        assert (
            "1 of 2 workers has not come yet:\n    1  place 0                no worker has joined there yet\n"
            in caplog.text
        )
        assert "continuing with 1 worker; the others join when they come" in caplog.text
        assert "reached" not in caplog.text
        fleet.join(0)
        (late,) = cluster.missing
        await late.connect(timeout_s=PATIENCE_S)
        cluster.take_in(late)
        assert sorted(await cluster.run_code("self.id")) == [1, 2]


async def test_start_names_the_places_that_it_waits_for(fleet, token, caplog, monkeypatch):
    monkeypatch.setattr(gate_module, "SAY_AFTER_S", 0.0)  # long before the timeout, even on a busy machine
    launcher = gate_launcher(3, token, start_timeout_s=0.2)
    port = fleet.port = launcher.gate.port
    fleet.join(1)
    await asyncio.wait_for(launcher.gate.run(launcher.gate.wait(1)), PATIENCE_S)
    with pytest.raises(ConnectError, match="2 of 3 workers have not come yet"):
        await Cluster(launcher, connect_timeout_s=0.1).connect()
    assert f"waiting for workers at places 0 and 2; start them with: ddlf-worker --join HOST:{port}" in caplog.text


async def test_start_without_any_worker_says_how_to_start_one(token):
    launcher = gate_launcher(1, token, start_timeout_s=0.1)
    port = launcher.gate.port
    with pytest.raises(ConnectError, match=f"no worker joined at port {port} within 0.1 s") as caught:
        await Cluster(launcher).connect()
    assert f"ddlf-worker --join HOST:{port}" in caught.value.hint


class Waiting(Joined):
    """A launcher of an engine that gives the reason for missing workers."""

    ends_workers = True

    async def waits(self, index):
        return "infeasible: no node has {CPU: 64}"


async def test_start_without_any_worker_ends_with_the_words_of_the_engine(token):
    launcher = Waiting(1, "127.0.0.1", 0, token_file=token, start_timeout_s=0.1)
    with pytest.raises(ConnectError, match=r"within 0.1 s: infeasible: no node has \{CPU: 64\}; ") as caught:
        await Cluster(launcher).connect()
    assert caught.value.exit_code == 3
    assert caught.value.hint == "correct that, or wait longer: start_timeout=SECONDS"


async def test_workers_without_a_port_cannot_call_each_other_and_the_error_says_what_to_do(fleet, token):
    launcher = gate_launcher(2, token)
    fleet.port = launcher.gate.port
    fleet.join(0), fleet.join(1)
    async with connected(launcher) as cluster:
        await cluster.run_code("pass")
        pairs = await cluster.introduced(cluster.workers, "run")
        assert [(caller.id, called.id) for caller, called, _ in pairs] == [(1, 2), (2, 1)]
        assert "it has no known address; if it joins its master, start it with --port, too" in pairs[0][2]


async def test_workers_of_one_machine_share_its_cores(fleet, token):
    launcher = gate_launcher(2, token)
    fleet.port = launcher.gate.port
    fleet.join(0), fleet.join(1)
    async with connected(launcher) as cluster:
        assert [worker._link.session.share for worker in cluster.workers] == [2, 2]


async def test_gate_on_a_taken_port_is_an_error(token):
    with socket.create_server(("127.0.0.1", 0)) as listening, pytest.raises(ListenError, match="is in use"):
        await Joined(1, "127.0.0.1", listening.getsockname()[1], token_file=token).start()


@pytest.mark.parametrize("n", [0, 1025, True, "2", None])
def test_number_of_workers_is_checked(n):
    with pytest.raises(ConfigError, match="must be 1-1024"):
        Joined(n)


def test_gate_for_other_machines_needs_a_token():
    with pytest.raises(ConfigError, match=r"refusing to listen on 0\.0\.0\.0 without a token"):
        Joined(1, "0.0.0.0")


class ForgetfulProxy:
    """A proxy that forwards connections to a port, and ends each connection that is idle for some time."""

    def __init__(self, port: int, idle_s: float) -> None:
        self._port = port
        self._idle_s = idle_s
        self._heard: dict[asyncio.StreamWriter, float] = {}
        self.ended = 0

    async def __aenter__(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self._server.sockets[0].getsockname()[1]

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader, writer) -> None:
        with contextlib.suppress(OSError):
            connection = await asyncio.open_connection("127.0.0.1", self._port)
            carrying = [
                asyncio.ensure_future(self._carry(reader, connection[1], writer)),
                asyncio.ensure_future(self._carry(connection[0], writer, writer)),
            ]
            self._heard[writer] = time.monotonic()
            while not any(task.done() for task in carrying):
                await asyncio.wait(carrying, timeout=self._idle_s / 4, return_when=asyncio.FIRST_COMPLETED)
                if time.monotonic() - self._heard[writer] > self._idle_s:
                    self.ended += 1
                    break
            for task in carrying:
                task.cancel()
            for end in (writer, connection[1]):
                end.close()

    async def _carry(self, source, sink, key) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(2**16):
                self._heard[key] = time.monotonic()
                sink.write(data)
                await sink.drain()


async def hold(seconds):
    await asyncio.sleep(seconds)
    return "held"


@pytest.mark.slow
async def test_long_call_ends_well_through_a_proxy_that_forgets_idle_connections(fleet, token, monkeypatch):
    monkeypatch.setattr(link, "KEEP_OPEN_S", 0.1)
    launcher = gate_launcher(1, token)
    proxy = ForgetfulProxy(launcher.gate.port, idle_s=1.0)
    async with proxy as fleet.port:
        fleet.join(0)
        async with connected(launcher, heartbeat_s=0.1, dead_after_s=60) as cluster:
            assert await cluster.run_method(hold, seconds=3) == ["held"]
            assert proxy.ended > 0, "the connection that waits is idle"
            fleet.daemons[0].process.kill()
            assert await cluster.options(idempotent=True).run_method(double, x=4) == [8]


# -- real processes -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def worker_process(*arguments):
    process = subprocess.Popen(
        [sys.executable, "-m", "ddlf.cli.worker", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait(seconds):
    time.sleep(seconds)
    return "waited"


@pytest.mark.slow
async def test_master_with_a_blocked_event_loop_keeps_its_joined_worker(token):
    launcher = gate_launcher(1, token)
    address = f"127.0.0.1:{launcher.gate.port}"
    with worker_process("--join", address, "--place", "0", "--token-file", str(token)):
        async with connected(launcher, dead_after_s=2.0) as cluster:
            worker = cluster.workers[0]
            epoch = worker.epoch
            call = asyncio.ensure_future(cluster.run_method(wait, seconds=3))
            await cluster.ping()
            time.sleep(3)  # noqa: ASYNC251
            assert await call == ["waited"]
            assert worker.epoch == epoch


async def test_worker_process_prints_its_state_and_ends_with_the_reason(token):
    launcher = gate_launcher(1, token)
    port = launcher.gate.port
    with worker_process("--join", f"127.0.0.1:{port}", "--join-for", "1", "--token-file", str(token)) as process:
        async with connected(launcher) as cluster:
            assert await cluster.run_method(double, x=2) == [4]
        output, _ = await asyncio.to_thread(process.communicate, None, PATIENCE_S)
    assert process.returncode == 3
    assert f"joining   127.0.0.1:{port} " in output
    assert f"joined    127.0.0.1:{port}\n" in output
    assert f"ddlf-worker: no master at 127.0.0.1:{port} for 1 s: 127.0.0.1:{port}: connection refused" in output
