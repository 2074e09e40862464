"""Tests of calls between workers: the verbs that a role can call, the access rules, and the end of access."""

import asyncio
import contextlib
import gc
import sys
import weakref

import ml_dtypes
import numpy as np
import pytest

from ddlf.cluster.introduce import introduce
from ddlf.errors import AppMissing, ConfigError, LeaseError, NotPicklable, ProtocolError, RemoteError, WorkerLost
from ddlf.rpc import messages
from ddlf.rpc.code import CodeSender
from ddlf.rpc.connection import Connection
from ddlf.rpc.dial import dial
from ddlf.rpc.handshake import Role
from ddlf.rpc.messages import Kind, Limits, Request, dumps, loads, rebuild
from ddlf.testing.in_process import in_process_cluster
from ddlf.worker.calls import offered
from ddlf.worker.executor import Executor
from ddlf.worker.lease import peer_pass
from ddlf.worker.peers import caller
from tests.patience import PATIENCE_S

RUN = "a-run"
SHARD = (RUN, "shard")
FOUND = weakref.WeakValueDictionary()


class Shard:
    """A role with a slice of numbers; its peers may add to the slice."""

    def __init__(self, worker):
        self.worker = worker
        self.slice = np.zeros(4)
        self.gate = asyncio.Event()
        self.reached = asyncio.Event()
        self.left = asyncio.Event()

    @offered
    async def push(self, piece, *, times=1):
        self.slice = self.slice + times * piece
        return self.slice

    @offered
    async def wait(self):
        self.reached.set()
        try:
            await self.gate.wait()
        finally:
            self.left.set()
        return "through"

    @offered
    async def fail(self):
        raise ValueError("a slice of the wrong length")

    @offered
    async def an_object(self):
        return Connection

    @offered
    async def caller_number(self):
        return caller()

    async def hidden(self):
        return "secret"

    async def train(self, peer):
        """Hold the turn until the peer opens its gate."""
        return await self.worker.peers[peer].call(SHARD, "wait")

    async def call(self, peer, verb, *args, **data):
        return await self.worker.peers[peer].call(SHARD, verb, *args, **data)

    async def send_code(self, peer):
        return await self.worker.peers[peer].call(SHARD, "push", lambda: 1)

    async def ids(self):
        peers = self.worker.peers
        return peers.me, list(peers), [peer.name for peer in peers.values()]

    async def carried(self, peer):
        return self.worker.peers[peer].bytes_sent, self.worker.peers[peer].bytes_received

    async def open_gate(self):
        self.gate.set()

    async def close(self):
        self.gate.set()


async def open_roles(cluster, run=RUN):
    await asyncio.gather(*(worker.call((run, "shard"), "open", Shard) for worker in cluster.workers))


@pytest.fixture
async def cluster():
    async with asyncio.timeout(PATIENCE_S), in_process_cluster(3) as cluster:
        await open_roles(cluster)
        yield cluster


@pytest.fixture
async def peers(cluster):
    await introduce(cluster.workers, RUN)
    return cluster.workers


def role(worker):
    """Return the ``Shard`` of a worker that runs in this process."""
    return worker_in_process(worker)._hosting._roles[SHARD]


def worker_in_process(worker):
    """Return the executor of a worker; it is an object of this process."""
    name = worker.executor.name
    if name not in FOUND:  # a search through all objects is slow
        FOUND.update({executor.peers.executor: executor for executor in gc.get_objects() if type(executor) is Executor})
    return FOUND[name]


# -- calls of a role --------------------------------------------------------------------------------------------------


async def test_a_role_calls_roles_of_other_workers_and_knows_their_names(peers):
    first, second, third = peers
    assert await first.call(SHARD, "ids") == (1, [2, 3], [second.name, third.name])
    assert await third.call(SHARD, "ids") == (3, [1, 2], [first.name, second.name])
    assert (await first.call(SHARD, "call", 2, "push", np.arange(4.0))).tolist() == [0, 1, 2, 3]
    assert (await third.call(SHARD, "call", 2, "push", np.ones(4))).tolist() == [1, 2, 3, 4]


async def test_a_verb_knows_which_worker_calls_it(peers):
    first, _, third = peers
    assert [await peer.call(SHARD, "call", 2, "caller_number") for peer in (first, third, first)] == [1, 3, 1]
    assert await peers[1].call(SHARD, "caller_number") is None


async def test_all_workers_call_each_other_at_the_same_time_with_large_arrays(peers):
    piece = np.arange(1_000_000, dtype=np.float32)
    pairs = [(a, b) for a in peers for b in peers if a is not b]
    for worker in peers:
        role(worker).slice = np.zeros_like(piece)
    results = await asyncio.gather(*(a.call(SHARD, "call", b.id, "push", piece) for a, b in pairs))
    assert all(any(np.array_equal(result, times * piece) for times in (1, 2)) for result in results)
    for worker in peers:
        assert np.array_equal(role(worker).slice, 2 * piece)
    sent, received = await peers[0].call(SHARD, "carried", 2)
    assert piece.nbytes < sent < piece.nbytes + 1000
    assert piece.nbytes < received < piece.nbytes + 1000


@pytest.mark.asyncio(loop_scope="session")
async def test_workers_in_separate_processes_call_each_other(session_cluster):
    await open_roles(session_cluster)
    await introduce(session_cluster.workers, RUN)
    first, second = session_cluster.workers
    pieces = await asyncio.gather(
        first.call(SHARD, "call", 2, "push", np.ones(4)), second.call(SHARD, "call", 1, "push", np.arange(4.0))
    )
    assert [piece.tolist() for piece in pieces] == [[1, 1, 1, 1], [0, 1, 2, 3]]
    await asyncio.gather(*(worker.call(SHARD, "close") for worker in session_cluster.workers))


async def test_a_worker_answers_its_peers_while_a_verb_has_the_turn(peers):
    first, second, third = peers
    training = asyncio.ensure_future(first.call(SHARD, "train", 2))
    await role(second).reached.wait()
    assert (await third.call(SHARD, "call", 1, "push", np.ones(4))).tolist() == [1, 1, 1, 1]
    assert not training.done()
    await second.call(SHARD, "open_gate")
    assert await training == "through"


async def test_an_error_of_a_verb_is_raised_in_its_caller(peers):
    with pytest.raises(ValueError, match="wrong length") as caught:
        await role(peers[0]).call(2, "fail")
    assert isinstance(caught.value, RemoteError)
    assert caught.value.worker == peers[1].name


async def test_a_cancelled_call_ends_on_the_called_worker(peers):
    calling = asyncio.ensure_future(role(peers[0]).call(2, "wait"))
    shard = role(peers[1])
    await shard.reached.wait()
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    await shard.left.wait()
    assert not shard.gate.is_set()


# -- only data --------------------------------------------------------------------------------------------------------


async def test_only_data_goes_from_worker_to_worker_in_both_directions(peers):
    with pytest.raises(
        NotPicklable, match=r"function cannot be sent between workers, because only data can .*; send num"
    ):
        await role(peers[0]).send_code(2)
    with pytest.raises(NotPicklable, match="cannot be sent between workers, because only data can"):
        await role(peers[0]).call(2, "an_object")
    assert len(await role(peers[0]).call(2, "push", np.ones(4))) == 4  # and the connection stays usable


async def test_unreadable_data_is_answered_and_keeps_the_connection(peers, monkeypatch):
    piece = np.ones(4, ml_dtypes.bfloat16)
    messages._dtype.cache_clear()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "ml_dtypes", None)
        with pytest.raises(NotPicklable, match="a bfloat16 array cannot be read here; pip install ml-dtypes") as caught:
            await role(peers[0]).call(2, "push", piece)
    assert caught.value.worker == peers[1].name
    assert len(await role(peers[0]).call(2, "push", np.ones(4))) == 4


async def test_a_peer_that_sends_a_pickle_is_cut_off(cluster, peers, capfd):
    async with stranger(cluster, peers[1]) as (greet, ask):
        assert (await greet(RUN, 2, *shown(cluster, peers[0], peers[1])))["refusal"] == ""
        assert len(await ask("call", RUN, "shard", "push", np.ones(4))) == 4
        with pytest.raises(ConnectionError):
            await ask("call", RUN, "shard", "push", lambda: 1)
    assert "another worker sent a pickled object, where only data is allowed" in capfd.readouterr().err


# -- access -----------------------------------------------------------------------------------------------------------


async def test_a_peer_may_call_only_offered_verbs(cluster, peers):
    with pytest.raises(ProtocolError, match="a shard does not offer 'hidden' to other workers"):
        await role(peers[0]).call(2, "hidden")
    for verb in ("open", "close"):
        with pytest.raises(ProtocolError, match=f"a shard has no verb '{verb}'|does not offer '{verb}'"):
            await role(peers[0]).call(2, verb)
    async with stranger(cluster, peers[1]) as (greet, ask):
        await greet(RUN, 2, *shown(cluster, peers[0], peers[1]))
        for command in ("run_code", "set_variable", "connect", "introduce", "meet", "greet", "close", "clean"):
            with pytest.raises(ProtocolError, match=f"may call only verbs that roles offer to others, not '{command}'"):
                await ask(command, "1")
        with pytest.raises(ProtocolError, match="only roles of the run that admitted it"):
            await ask("call", "another-run", "shard", "push", np.ones(4))
        with pytest.raises(ProtocolError, match="only roles of the run that admitted it"):
            await ask("call")


async def test_the_master_decides_which_worker_may_call_which(cluster):
    first, _, third = cluster.workers
    await introduce(cluster.workers, RUN, calls={1: [2], 2: [1, 3]})
    assert [(await worker.call(SHARD, "ids"))[1] for worker in cluster.workers] == [[2], [1, 3], []]
    await role(first).call(2, "push", np.ones(4))
    with pytest.raises(AppMissing, match="worker 3 may not be called by this worker in this run"):
        await role(first).call(3, "push", np.ones(4))
    async with stranger(cluster, third) as (greet, ask):
        facts = await greet(RUN, 3, *shown(cluster, first, third))
        assert facts["refusal"] == "its master has not allowed this worker to call it"
        with pytest.raises(LeaseError, match="begins with"):
            await ask("call", RUN, "shard", "push", np.ones(4))


async def test_a_number_without_a_worker_is_refused(cluster):
    for calls in ({1: [2, 9]}, {9: [1]}):
        with pytest.raises(ConfigError, match="worker 9 is named in calls, but is not among the intro"):
            await introduce(cluster.workers, RUN, calls=calls)


async def test_a_worker_with_a_wrong_pass_is_refused(cluster, peers):
    first, second, _ = peers
    executor, right = shown(cluster, first, second)
    lease = second.identity.key["lease"]
    old = lease[:16] + (int.from_bytes(lease[16:], "little") - 1).to_bytes(8, "little")
    wrong = {
        "of another run": peer_pass(lease, "another-run", executor),
        "of an old lease": peer_pass(old, RUN, executor),
        "of a guest, who has none": peer_pass(b"", RUN, executor),
        "of another worker": peer_pass(lease, RUN, "somebody"),
        "nothing": b"",
    }
    for shows in wrong.values():
        async with stranger(cluster, second) as (greet, _):
            facts = await greet(RUN, 2, executor, shows)
            assert facts["refusal"] == "its pass does not match the present lease"
    async with stranger(cluster, second) as (greet, _):
        assert (await greet(RUN, 2, executor, right))["refusal"] == ""


async def test_an_unreadable_greeting_is_answered(cluster, peers):
    async with stranger(cluster, peers[1]) as (greet, _):
        for arguments in ((), (RUN, 2, "x"), (RUN, "2", "x", b""), (RUN, True, "x", b""), (RUN, 2, "x", "text")):
            with pytest.raises(ProtocolError, match="greet takes a run, a number, the name of an executor, and a pass"):
                await greet(*arguments)


async def test_a_guest_cannot_introduce_workers(cluster):
    first = cluster.workers[0]
    guest = type(first)(first.host, first.port, cluster._launcher.tokens.primary, guest=True)
    await guest.connect()
    try:
        with pytest.raises(ConfigError, match="connected as a guest, so it cannot be introduced to other workers"):
            await introduce([guest], RUN)
        facts = dict(run=RUN, me=1, callers=[], peers=[], dead_after_s=4.0)
        for lease in (b"", bytes(24), first.identity.master_id):
            with pytest.raises(LeaseError, match="only the master with the lease can introduce workers"):
                await guest.rpc(Request("introduce", lease=lease, **facts))
    finally:
        await guest.close()


# -- end of access ----------------------------------------------------------------------------------------------------


async def test_a_worker_missing_from_the_next_introduction_is_cut_off_and_the_rest_stay_connected(cluster, peers):
    first, second, third = peers
    waiting = asyncio.ensure_future(role(third).call(1, "wait"))
    await role(first).reached.wait()
    before = worker_in_process(first).peers[2]._channel
    assert before is not None
    await introduce([first, second], RUN)
    with pytest.raises(WorkerLost, match="the link from worker 3 to it was lost") as caught:
        await waiting
    assert caught.value.worker == first.name
    assert caught.value.may_have_run
    with pytest.raises(LeaseError, match="its master has not allowed this worker to call it"):
        await role(third).call(1, "push", np.ones(4))
    assert worker_in_process(first).peers[2]._channel is before


async def test_a_peer_is_cut_off_with_the_lease_that_allowed_it(cluster, peers):
    first, second, _ = peers
    waiting = asyncio.ensure_future(role(first).call(2, "wait"))
    await role(second).reached.wait()
    second._link.control.stream.abort()
    with pytest.raises(WorkerLost, match="the link from worker 1 to it was lost"):
        await waiting
    # Master, executor and role are the same, but permissions of the last lease do not count.
    await second.reconnect(PATIENCE_S)
    with pytest.raises(Exception, match="leads to a worker outside this run"):
        await role(first).call(2, "push", np.ones(4))
    with pytest.raises(AppMissing, match="worker 1 may not be called by this worker in this run"):
        await role(second).call(1, "push", np.ones(4))
    await introduce(cluster.workers, RUN)
    assert (await role(first).call(2, "push", np.ones(4))).tolist() == [1, 1, 1, 1]


async def test_a_peer_is_cut_off_when_the_run_ends(cluster, peers):
    first, second, _ = peers
    waiting = asyncio.ensure_future(role(first).call(2, "wait"))
    await role(second).reached.wait()
    shard = role(first)
    await second.call(SHARD, "close")
    with pytest.raises(WorkerLost):
        await waiting
    with pytest.raises(Exception, match="leads to a worker outside this run"):
        await shard.call(2, "push", np.ones(4))
    await first.call(("another-run", "shard"), "open", Shard)
    with pytest.raises(AppMissing):
        await shard.call(3, "push", np.ones(4))


async def test_open_calls_of_a_worker_end_when_the_run_ends_on_it(peers):
    waiting = asyncio.ensure_future(role(peers[0]).call(2, "wait"))
    await role(peers[1]).reached.wait()
    await peers[0].call(SHARD, "close")
    with pytest.raises(AppMissing, match="this worker is not in a run with worker 2"):
        await waiting


async def test_a_call_after_a_lost_connection_dials_again(peers):
    shard, link = role(peers[0]), worker_in_process(peers[0]).peers[2]
    await shard.call(2, "push", np.ones(4))
    before = link.bytes_sent
    link._channel.stream.abort()
    assert (await shard.call(2, "push", np.ones(4))).tolist() == [2, 2, 2, 2]
    assert link.bytes_sent > before


# -- a network that fails between two workers ------------------------------------------------------------------------


async def test_a_link_that_is_cut_is_noticed_and_named_while_the_master_sees_both_workers():
    async with asyncio.timeout(PATIENCE_S), in_process_cluster(2, dead_after_s=1.0) as cluster:
        way = await cluster.between(1, 2)
        await open_roles(cluster)
        await introduce(cluster.workers, RUN)
        first, second = cluster.workers
        waiting = asyncio.ensure_future(role(first).call(2, "wait"))
        await role(second).reached.wait()
        await worker_in_process(first).peers[2]._listening
        way.partition()
        with pytest.raises(
            WorkerLost, match=r"the link from worker 1 to it was lost \(no heartbeat for 1\.\d s\)"
        ) as lost:
            await waiting
        assert lost.value.worker == second.name
        assert [worker.state for worker in cluster.workers] == ["alive", "alive"]
        # the opposite direction has its own connection
        assert (await role(second).call(1, "push", np.ones(4))).tolist() == [1, 1, 1, 1]
        way.heal()
        assert (await role(first).call(2, "push", np.ones(4))).tolist() == [1, 1, 1, 1]


async def test_a_reset_link_loses_its_open_calls_and_is_dialled_again():
    async with asyncio.timeout(PATIENCE_S), in_process_cluster(2) as cluster:
        way = await cluster.between(1, 2)
        await open_roles(cluster)
        await introduce(cluster.workers, RUN)
        first, second = cluster.workers
        waiting = asyncio.ensure_future(role(first).call(2, "wait"))
        await role(second).reached.wait()
        assert way.reset(kind="data") == 1
        with pytest.raises(WorkerLost, match="the link from worker 1 to it was lost") as lost:
            await waiting
        assert lost.value.may_have_run
        assert (await role(first).call(2, "push", np.ones(4))).tolist() == [1, 1, 1, 1]


async def test_status_counts_masters_and_not_connected_peers(peers):
    for worker in worker_in_process(peers[0]).peers.values():
        await worker._listening
    assert (await peers[1].status()).masters == 1


# -- a worker with a false identity -----------------------------------------------------------------------------------


def shown(cluster, caller, called):
    """Return the identity and the pass that one worker presents to another one."""
    executor = caller.executor.name
    return executor, peer_pass(called.identity.key["lease"], RUN, executor)


@contextlib.asynccontextmanager
async def stranger(cluster, worker):
    """Dial a worker with the token as a stranger.

    Yields a function that greets the worker, and one that sends it a command with any arguments.
    """
    token = cluster._launcher.tokens.primary
    sock, _ = await dial(worker.host, worker.port, Role.DATA, token, max_message_bytes=10**9)
    answers: asyncio.Queue = asyncio.Queue()
    connection = Connection(sock, answers.put_nowait, answers.put_nowait, limits=Limits(max_body_bytes=10**9))
    number = 0

    async def ask(command, *args):
        nonlocal number
        number += 1
        connection.send(Kind.REQUEST, number, command, dumps([list(args), {}], CodeSender().dump))
        answer = await asyncio.wait_for(answers.get(), PATIENCE_S)
        if answer is None or isinstance(answer, BaseException):
            raise ConnectionError(answer)
        value = loads(answer.buffers)
        if answer.kind == Kind.ERROR:
            raise rebuild(value)
        return value

    async def greet(*arguments):
        return await ask("greet", *arguments)

    try:
        yield greet, ask
    finally:
        connection.close()
