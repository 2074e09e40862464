"""Tests of introducing workers to each other: the addresses to try, the answers there, and unconnected pairs."""

import asyncio
import contextlib

import pytest

from ddlf.cluster.config.addresses import parse_advertised
from ddlf.cluster.introduce import candidates, introduce
from ddlf.cluster.proxy import ProxyWorker
from ddlf.errors import AppMissing, ConfigError, ConnectError, ExecutorCrashed, VersionError, WorkerLost
from ddlf.rpc.messages import Request
from ddlf.rpc.tls import Security
from ddlf.rpc.tokens import new_token
from ddlf.testing.in_process import InProcessDaemon, in_process_cluster
from ddlf.worker.daemon import Control
from ddlf.worker.introduction import Endpoint
from ddlf.worker.machine import addresses_of, same_machine
from ddlf.worker.options import Options
from ddlf.worker.peers import Peers
from tests.patience import PATIENCE_S
from tests.tls import Relay, far_apart, own_certificate
from tests.worker.test_peers import RUN, SHARD, Shard, open_roles, role

OLD, NEW = new_token().encode(), new_token().encode()


# -- addresses --------------------------------------------------------------------------------------------------------


def addresses_at(*addresses, machine="here", advertised=None):
    return Endpoint(machine=machine, port=9000, advertised=advertised, addresses=list(addresses))


def test_given_addresses_are_tried_first_then_the_masters_then_the_workers_own():
    remote = addresses_at("127.0.0.1", "192.168.0.7", "10.0.0.7", machine="there")
    assert candidates([("lab.example", 1)], ("10.0.0.7", 9000), remote, "here") == [
        ("lab.example", 1, True),
        ("10.0.0.7", 9000, False),
        ("192.168.0.7", 9000, False),
    ]


def test_loopback_is_tried_only_by_a_worker_on_the_same_machine_and_never_because_the_master_dials_it():
    remote = addresses_at("127.0.0.1", "10.0.0.7")
    assert candidates([], ("localhost", 9001), remote, "here") == [
        ("127.0.0.1", 9000, False),
        ("10.0.0.7", 9000, False),
    ]
    assert candidates([], ("127.0.0.1", 9001), remote, "elsewhere") == [("10.0.0.7", 9000, False)]


def test_an_address_that_is_known_in_two_ways_is_tried_once():
    assert candidates([("10.0.0.7", 9000)], ("10.0.0.7", 9000), addresses_at("10.0.0.7"), "x") == [
        ("10.0.0.7", 9000, True)
    ]


def test_a_machine_knows_its_addresses():
    assert addresses_of("10.1.2.3") == ["10.1.2.3"]
    everywhere = addresses_of("0.0.0.0")
    assert everywhere[0] == "127.0.0.1"
    assert not any(address.startswith(("127.", "0.")) or ":" in address for address in everywhere[1:])
    assert addresses_of("::")[:2] == ["::1", "127.0.0.1"]
    assert set(everywhere) <= set(addresses_of("::"))
    assert same_machine() == same_machine() != ""


@pytest.mark.parametrize(
    ("text", "address"),
    [("lab", ("lab", 0)), ("lab:9001", ("lab", 9001)), ("[::2]", ("::2", 0)), ("10.0.0.1:1", ("10.0.0.1", 1))],
)
def test_an_advertised_address_may_leave_the_port_to_the_worker(text, address):
    assert parse_advertised(text) == address


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "host must be a host name or an IP address"),
        ("a b", "host must be a host name"),
        ("lab:0", "port must be 1-65535, got 0"),
        ("lab:x", "port must be an integer"),
        ("::2", "needs brackets"),
        ("tcp://lab:1", "without a protocol"),
        ("0.0.0.0", "'0.0.0.0' is only an address to listen on: other workers cannot connect"),
        ("[::]:9000", "'::' is only an address to listen on"),
        ("10.0.0.300", "'10.0.0.300' is not a valid IP address"),
    ],
)
def test_an_address_that_cannot_be_dialled_is_not_advertised(text, sentence):
    with pytest.raises(ConfigError, match=sentence.replace("(", r"\(")):
        parse_advertised(text)


# -- answers ----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def cluster():
    async with asyncio.timeout(PATIENCE_S), in_process_cluster(3) as cluster:
        await open_roles(cluster)
        yield cluster


@contextlib.asynccontextmanager
async def relayed(cluster, worker, **how):
    async with Relay(worker.port, **how) as relay:
        worker.advertise = f"127.0.0.1:{relay.port}"
        yield relay


async def test_workers_use_the_given_address(cluster, free_port):
    second = cluster.workers[1]
    async with relayed(cluster, second) as relay:
        await introduce(cluster.workers, RUN)
        relayed_bytes = len(relay.heard)
        assert relayed_bytes > 0
        await role(cluster.workers[0]).call(2, "push", 1.0)
        assert len(relay.heard) > relayed_bytes
        await introduce(cluster.workers, RUN, calls={})
    second.advertise = f"127.0.0.1:{free_port}"  # no worker listens there, so other addresses are used
    await introduce(cluster.workers, RUN)
    await role(cluster.workers[0]).call(2, "push", 1.0)


async def test_an_address_that_leads_to_another_worker_or_to_oneself_is_named(cluster):
    first, second, third = cluster.workers
    second.advertise = f"127.0.0.1:{first.port}"
    with pytest.raises(ConnectError) as caught:
        await introduce(cluster.workers, RUN)
    assert f"{first.name} cannot reach {second.name}: 127.0.0.1:{first.port} leads back to this worker itself" in str(
        caught.value
    )
    assert f"{third.name} cannot reach {second.name}: 127.0.0.1:{first.port} leads to worker 1" in str(caught.value)
    assert "ddlf-worker --advertise HOST:PORT, or advertise: in cluster.yaml" in caught.value.hint


async def test_an_address_of_a_free_worker_or_of_another_program_is_named(cluster):
    first, second, _ = cluster.workers
    stranger = InProcessDaemon(Options(host="127.0.0.1", port=0, tokens=cluster._launcher.tokens.all, state_dir=None))
    running = asyncio.create_task(stranger.run())
    second.advertise = f"127.0.0.1:{stranger.port}"
    with pytest.raises(ConnectError, match=f"127.0.0.1:{stranger.port} leads to a worker outside this run"):
        await introduce([first, second], RUN)
    stranger.stop()
    await running


async def test_two_workers_with_one_address_are_named_before_dialling(cluster):
    first, _, third = cluster.workers
    first.advertise, third.advertise = "Lab.example:9000", "lab.example.:9000"
    with pytest.raises(ConfigError) as caught:
        await introduce(cluster.workers, RUN)
    assert str(caught.value).startswith(f"{first.name} and {third.name} are both advertised at lab.example")
    assert "give each its own address" in str(caught.value)


async def test_an_unconnected_pair_is_named_with_each_address_and_reason(cluster, free_port):
    first, second, _ = cluster.workers
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InProcessDaemon, "addresses", lambda self: addresses_at("127.0.0.1", machine=str(self.port)))
        with pytest.raises(ConnectError, match="it has no known address") as caught:
            await introduce(cluster.workers, RUN)
    assert str(caught.value).count("cannot reach") == 5
    assert "and 1 more pairs" in str(caught.value)
    second.advertise = f"127.0.0.1:{free_port}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InProcessDaemon, "addresses", lambda self: addresses_at(machine=str(self.port)))
        with pytest.raises(ConnectError, match="connection refused, nothing listens there"):
            await introduce([first, second], RUN)


async def test_a_worker_that_is_lost_during_the_introduction_is_not_a_broken_link(monkeypatch):
    meet = Peers.meet

    async def met_too_late(self):
        if self.me == 2:
            return []
        cluster.machine(2).kill()
        return await meet(self)

    monkeypatch.setattr(Peers, "meet", met_too_late)
    async with asyncio.timeout(PATIENCE_S), in_process_cluster(2) as cluster:
        await open_roles(cluster)
        with pytest.raises((ExecutorCrashed, AppMissing, WorkerLost)) as caught:
            await introduce(cluster.workers, RUN)
        assert caught.value.worker == cluster.workers[1].name


async def test_a_worker_of_a_release_without_introductions_is_named(monkeypatch):
    on_frame = Control._on_frame

    def older(self, frame):
        on_frame(self, frame._replace(name="unknown") if frame.name == "addresses" else frame)

    monkeypatch.setattr(Control, "_on_frame", older)
    async with in_process_cluster(2) as cluster:
        with pytest.raises(VersionError, match="runs a release that does not support calls between workers") as caught:
            await introduce(cluster.workers, RUN)
        assert caught.value.worker == cluster.workers[0].name
    assert "install the same version" in caught.value.hint


# -- tokens and certificates ------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def workers_with(*tokens, security=None, folder=None):
    """Start workers in this process. Each holds some tokens, and is dialled with its first one."""
    daemons, running, workers = [], [], []
    for number, own_tokens in enumerate(tokens, 1):
        state = folder / str(number) if folder is not None else None
        daemon = InProcessDaemon(
            Options(host="127.0.0.1", port=0, tokens=own_tokens, state_dir=state, security=security)
        )
        daemons.append(daemon)
        running.append(asyncio.create_task(daemon.run()))
        workers.append(ProxyWorker("127.0.0.1", daemon.port, own_tokens[0], id=number, N=len(tokens)))
    try:
        for worker in workers:
            await worker.connect()
            await worker.call(SHARD, "open", Shard)
        yield workers
    finally:
        for worker in workers:
            await worker.close()
        for daemon in daemons:
            daemon.stop()
        await asyncio.gather(*running)


async def test_workers_reach_each_other_while_a_token_is_being_replaced():
    """Some workers have both tokens in either order, and some have only the old or the new one."""
    async with workers_with((NEW, OLD), (OLD,), (OLD, NEW)) as workers:
        await introduce(workers, RUN)
        assert await role(workers[0]).call(2, "push", 1.0) is not None
    async with workers_with((NEW,), (OLD, NEW)) as workers:
        await introduce(workers, RUN)


async def test_a_pair_with_different_tokens_is_named():
    async with workers_with((NEW,), (OLD,)) as workers:
        with pytest.raises(ConnectError, match=r"worker 1 \(.*\) cannot reach worker 2 \(.*\): 127.0.0.1:\d+: .*token"):
            await introduce(workers, RUN)


@pytest.mark.slow
async def test_workers_on_several_machines_encrypt_and_refuse_the_certificate_of_a_relay(tmp_path):
    with far_apart():
        async with workers_with((OLD,), (OLD,), security=Security(), folder=tmp_path) as workers:
            await introduce(workers, RUN)
            assert await role(workers[0]).call(2, "push", 1.0) is not None
            async with Relay(workers[1].port, own_certificate()) as relay:
                workers[1].advertise = f"127.0.0.1:{relay.port}"
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(InProcessDaemon, "addresses", lambda self: addresses_at(machine=str(self.port)))
                    await introduce(workers, RUN, calls={})
                    with pytest.raises(ConnectError, match="altered on the network"):
                        await introduce(workers, RUN)


async def test_a_caller_with_a_new_executor_counts_as_lost_and_not_as_an_unconnected_pair(cluster):
    first, rpc = cluster.workers[0], cluster.workers[0].rpc

    async def ended_before(request, *more):
        if request.command == "introduce":
            cluster.machine(1).kill()
            with pytest.raises(ExecutorCrashed):
                await rpc(Request("list_methods"))
            await first.reconnect(PATIENCE_S)
        return await rpc(request, *more)

    first.rpc = ended_before
    try:
        with pytest.raises(AppMissing, match="its executor ended while workers were introduced") as caught:
            await introduce(cluster.workers, RUN)
    finally:
        del first.rpc
    assert caught.value.worker == first.name
