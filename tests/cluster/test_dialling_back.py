"""Tests of pairs of workers with only one that can dial the other: it dials, and both can call each other."""

import asyncio
import contextlib

import numpy as np
import pytest

from ddlf.cluster.cluster import Cluster
from ddlf.cluster.introduce import introduce, introduced
from ddlf.cluster.launch.gate import Joined
from ddlf.errors import LeaseError, ProtocolError
from ddlf.rpc.dial import open_socket
from ddlf.rpc.join import Offer, RunOver, offer
from ddlf.testing.in_process import InProcessDaemon
from ddlf.worker.introduction import Endpoint
from ddlf.worker.joining import Join
from ddlf.worker.lease import offer_number
from ddlf.worker.options import Options
from tests.daemons import TOKEN
from tests.patience import PATIENCE_S
from tests.worker.test_peers import RUN, open_roles, role, worker_in_process

LISTENS, LISTENS_NOWHERE = 0, None
"""Values for the port of a worker: a free port, or no port."""


@contextlib.asynccontextmanager
async def joined(tmp_path, *ports):
    """Yield a cluster of workers that have joined and host a role, and the daemons of the workers."""
    token = tmp_path / "token"
    token.write_bytes(TOKEN)
    token.chmod(0o600)
    launcher = Joined(len(ports), "127.0.0.1", 0, token_file=token)
    gate = (("127.0.0.1", launcher.open().port),)
    daemons = [
        InProcessDaemon(Options(host="127.0.0.1", port=port, tokens=(TOKEN,), state_dir=None, join=Join(gate, place)))
        for place, port in enumerate(ports)
    ]
    running = [asyncio.create_task(daemon.run()) for daemon in daemons]
    try:
        async with asyncio.timeout(PATIENCE_S), Cluster(launcher) as cluster:
            await open_roles(cluster)
            yield cluster, daemons
    finally:
        for daemon in daemons:
            daemon.stop()
        await asyncio.gather(*running, return_exceptions=True)
        await launcher.stop()


async def push(caller, called):
    """Let one worker call another one with an array, and return the answer's first number."""
    return float((await role(caller).call(called.id, "push", np.ones(100_000)))[0])


@pytest.mark.parametrize("ports", [(LISTENS, LISTENS_NOWHERE), (LISTENS_NOWHERE, LISTENS)])
async def test_worker_without_a_port_dials_its_caller_and_both_can_call(tmp_path, ports):
    async with joined(tmp_path, *ports) as (cluster, _):
        for worker in cluster.workers:
            role(worker).slice = np.zeros(100_000)
        await introduce(cluster.workers, RUN)
        first, second = cluster.workers
        assert [await push(first, second), await push(second, first), await push(first, second)] == [1.0, 1.0, 2.0]
        sent, received = await role(first).carried(second.id)
        assert min(sent, received) > 1_600_000


async def test_only_pairs_of_two_workers_without_a_port_cannot_connect(tmp_path):
    async with joined(tmp_path, LISTENS, LISTENS_NOWHERE, LISTENS_NOWHERE) as (cluster, _):
        pairs = await introduced(cluster.workers, RUN)
        assert [(caller.id, called.id) for caller, called, _ in pairs] == [(2, 3), (3, 2)]
        assert {reason for _, _, reason in pairs} == {
            "it has no known address; if it joins its master, start it with --port, too"
        }


async def test_pair_without_a_connection_is_named_with_both_reasons(tmp_path, free_port):
    async with joined(tmp_path, LISTENS, LISTENS_NOWHERE) as (cluster, _):
        cluster.workers[0].advertise = f"127.0.0.1:{free_port}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(InProcessDaemon, "addresses", facts_on_another_machine)
            pairs = await introduced(cluster.workers, RUN)
        assert [(caller.id, called.id) for caller, called, _ in pairs] == [(1, 2), (2, 1)]
        reason = pairs[0][2]
        assert reason.startswith("it has no known address; ")
        assert (
            f"; and {cluster.workers[1].name} cannot dial it either: 127.0.0.1:{free_port}: connection refused"
            in reason
        )


def facts_on_another_machine(self):
    """Return the facts of a daemon on another machine."""
    return Endpoint(machine=str(id(self)), port=self.port, addresses=[])


async def test_reset_connection_is_replaced_by_the_next_offer(tmp_path):
    async with joined(tmp_path, LISTENS, LISTENS_NOWHERE) as (cluster, _):
        await introduce(cluster.workers, RUN)
        first, second = cluster.workers
        peer = worker_in_process(first).peers[second.id]
        for _ in range(3):
            role(second).slice = np.zeros(100_000)
            channel = await peer.reach()
            channel.stream.abort()
            await asyncio.sleep(0)
            assert await peer.reach() is not channel
            assert await push(first, second) == 1.0


async def test_offers_end_with_the_run_and_with_the_lease(tmp_path):
    async with joined(tmp_path, LISTENS, LISTENS_NOWHERE) as (cluster, (_, dialler)):
        await introduce(cluster.workers, RUN)
        (offering,) = dialler._dialled._tasks.values()
        assert not offering.done()
        await introduce(cluster.workers, RUN)  # this keeps the connection
        assert list(dialler._dialled._tasks.values()) == [offering]
        await introduce(cluster.workers, RUN, calls={})
        ended = await asyncio.wait_for(offering, PATIENCE_S)
        assert ended is None or isinstance(ended, ProtocolError), "between two offers it finds a worker without callees"
        await introduce(cluster.workers, RUN)
        (offering,) = dialler._dialled._tasks.values()
        await cluster.close()
        await asyncio.wait({offering})
        assert dialler._dialled._tasks == {}


@pytest.mark.parametrize("calls", [{}, {1: [3]}])
async def test_offers_end_when_no_caller_needs_them(tmp_path, calls):
    async with joined(tmp_path, LISTENS, LISTENS_NOWHERE, LISTENS_NOWHERE) as (cluster, (_, dialler, _)):
        await introduce(cluster.workers, RUN, calls={1: [2, 3]})
        (offering,) = dialler._dialled._tasks.values()
        offers = worker_in_process(cluster.workers[0]).peers[2].offers
        for sock in list(offers.waiting):
            offers.drop(sock)
        await introduce(cluster.workers, RUN, calls=calls)
        await asyncio.wait_for(offering, PATIENCE_S / 4)


async def offered(port, number, place=2):
    sock = await open_socket("127.0.0.1", port)
    try:
        await offer(sock, TOKEN, Offer(place, number))
    finally:
        sock.close()


async def test_unexpected_connection_is_refused(tmp_path):
    async with joined(tmp_path, LISTENS, LISTENS_NOWHERE) as (cluster, (listener, _)):
        with pytest.raises(ProtocolError, match="a DDLF worker listens there, not the gate of a master"):
            await offered(listener.port, 1)
        await introduce(cluster.workers, RUN)
        peer = worker_in_process(cluster.workers[0]).peers[2]
        good = offer_number(peer.shows)
        with pytest.raises(LeaseError, match="a later worker has place 2"):
            await offered(listener.port, good + 1)
        with pytest.raises(RunOver):
            await offered(listener.port, good, place=3)
        assert peer.offers.incarnation == good


async def test_only_the_master_with_the_lease_lets_a_worker_dial(tmp_path, free_port):
    async with joined(tmp_path, LISTENS, LISTENS_NOWHERE) as (_, (listener, _)):
        token = tmp_path / "token"
        async with Cluster(["127.0.0.1"], [listener.port], token_file=token, guest=True) as guest:
            with pytest.raises(LeaseError, match="only the master with the lease can have this worker dial others"):
                await guest.workers[0].ask("dial", [["127.0.0.1", free_port]], 1, 1)
        assert listener._dialled._tasks == {}
