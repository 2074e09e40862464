"""Tests of workers that announce their end at awkward moments: the run keeps its bits, or ends with a clear error."""

import asyncio
import contextlib
import re

import pytest

from ddlf.cluster.link import Notice
from ddlf.errors import ClusterTooSmall, ConnectError
from ddlf.events import WorkerLeaving, WorkerLost, WorkerReturned
from ddlf.testing import FakeCluster, FakeWorker
from ddlf.training.strategies.downpour.server import ServerCopies, Servers
from tests.patience import PATIENCE_S
from tests.training.runs import bits, events_of, run_of

pytestmark = pytest.mark.usefixtures("short_waits")

ROUNDS = 3
WAYS = {
    "star": {},
    "sharded": {"exchange": "sharded"},
    "stepped": {"exchange": "sharded", "outer": "nesterov", "optimizer_state": "kept"},
    "averaged": {"exchange": "sharded", "optimizer_state": "averaged"},
    "kept": {"optimizer_state": "kept", "codec": "int8"},
    "async": {"mode": "async"},
    "downpour": {"mode": "downpour", "shards": 2},
    "copies": {"mode": "downpour", "shards": 2, "copies": 1},
}
SAME_BITS = ("star", "sharded", "stepped", "averaged", "kept")


class Noticed(FakeWorker):
    """A worker that announces its end, and ends when its time is over.

    Attributes:
        moment: When it announces its end.
        within_s: Its time.
        times: How often it announces its end.
        comes_back: Whether another worker replaces it afterwards.
        hands_back: Whether its work ends in its time. Otherwise this is random without time.
        never_answers: Whether connections to its address stay without an answer, instead of being refused.
    """

    moment, within_s, times, comes_back, hands_back, never_answers = "", 0.0, 1, True, True, False

    def announce(self):
        if not self.moment or self.notice is not None:
            return
        self.moment, self.ended = "", asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.call_later(self.within_s, self.end_now)
        for _ in range(self.times):
            self.notice = Notice("SIGTERM", loop.time() + self.within_s)
            if self.on_leaving is not None:
                self.on_leaving()

    def end_now(self):
        self.lost = self.lost or self.notice is not None
        self.ended.set()

    def open(self, app):
        super().open(app)
        if self.moment == "start":
            self.announce()

    async def rpc(self, request, timeout_s=None):
        task = request.args[3] if len(request.args) > 3 else None
        number = task.get("round") if isinstance(task, dict) else None
        if (self.moment, number) in (("first", 0), ("last", ROUNDS - 1)):
            self.announce()
            if not self.hands_back:
                await self.ended.wait()
        return await super().rpc(request, timeout_s)

    async def reconnect(self):
        if self.never_answers and self.notice is not None:
            await asyncio.Event().wait()
        if not self.comes_back and self.notice is not None:
            raise ConnectError("nobody is there", worker=self.name)
        await super().reconnect()


async def disturbed(way, moment, count, runs=None, **facts):
    """Train with three workers. The last ``count`` of them leave at a moment. The run is appended to ``runs``."""
    wait_s = PATIENCE_S if facts.get("comes_back", True) else 0.05
    cluster = FakeCluster(0)
    cluster.workers = [Noticed(number) for number in (1, 2, 3)]
    for worker in cluster.workers:
        worker.others = {other.id: other for other in cluster.workers}
    chosen = cluster.workers[-count:]
    for worker in chosen:
        worker.moment = moment
        vars(worker).update(facts)
    run = run_of(WAYS[way], master_epochs=ROUNDS, wait_for_workers_s=wait_s)
    run.cluster = cluster
    if runs is not None:
        runs.append(run)
    if moment == "idle":
        run.on_round = lambda record: [worker.announce() for worker in chosen]
    async with asyncio.timeout(PATIENCE_S):
        await run.train_model()
    return run


MOMENTS = ("start", "first", "idle", "last")
TWICE = {"within_s": 60.0, "times": 2}
ON_SERVERS = ("downpour", "copies")
"""These runs have their weights on servers, and a server needs a worker."""


KNOWN = {}


async def plain_bits(way):
    """Return the bits of a run whose workers stay, which is trained once."""
    if way not in KNOWN:
        plain = run_of(WAYS[way], master_epochs=ROUNDS)
        await plain.train_model()
        KNOWN[way] = bits(plain)
    return KNOWN[way]


async def check(run, way):
    assert run.ledger.is_exact(ROUNDS)
    if way in SAME_BITS:
        assert bits(run) == await plain_bits(way)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("way", WAYS)
async def test_run_with_a_worker_that_leaves_has_the_same_bits(way, moment):
    run = await disturbed(way, moment, 1, **TWICE)
    await check(run, way)
    assert len(events_of(run, WorkerLeaving)) == 1, "the second notice says nothing new"
    assert events_of(run, WorkerLost) == []


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("way", [way for way in WAYS if way not in ON_SERVERS])
async def test_run_whose_workers_all_leave_at_once_and_come_back_has_the_same_bits(way, moment):
    await check(await disturbed(way, moment, 3, within_s=60.0), way)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(
    "way", [way for way in WAYS if way != "kept"]
)  # a state without a copy is lost, and an event reports it
async def test_notice_without_time_is_a_loss(way, moment):
    await check(await disturbed(way, moment, 1), way)


@pytest.mark.parametrize("facts", [{}, {"comes_back": False}])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("way", WAYS)
async def test_run_whose_workers_all_leave_without_time_ends_clearly_or_is_complete(way, moment, facts):
    try:
        run = await disturbed(way, moment, 3, **facts)
    except (ClusterTooSmall, ConnectError):
        return
    assert run.ledger.is_exact(ROUNDS)


@pytest.mark.parametrize("moment", ["first", "idle", "last"])
@pytest.mark.parametrize("way", ON_SERVERS)
async def test_terms_of_a_server_never_fall_while_workers_leave_without_time(way, moment, monkeypatch):
    """A worker refuses backups of a term before one that it has seen, and pushes wait for backups."""
    terms = {0: [], 1: []}

    async def note_own(servers, epoch, shard, *arguments, usual=Servers.own):
        terms[shard].append(epoch)
        await usual(servers, epoch, shard, *arguments)

    def take(copies, epoch, shard, usual=ServerCopies.take):
        terms[shard].append(epoch)
        return usual(copies, epoch, shard)

    monkeypatch.setattr(Servers, "own", note_own)
    monkeypatch.setattr(ServerCopies, "take", take)
    with contextlib.suppress(ClusterTooSmall):  # two workers can have all copies of a server
        await disturbed(way, moment, 2)
    assert max(map(len, terms.values())) > 1
    assert terms == {shard: sorted(of_shard) for shard, of_shard in terms.items()}


@pytest.mark.parametrize("way", WAYS)
async def test_run_continues_without_a_worker_that_leaves_for_good(way):
    run = await disturbed(way, "first", 1, within_s=60.0, comes_back=False)
    await check(run, way)
    assert events_of(run, WorkerReturned) == []


async def test_slots_that_wait_only_for_workers_that_leave_end_the_run():
    """The run once hung, because it counted leaving workers as workers that may still carry a slot."""
    with pytest.raises(ClusterTooSmall, match="none came back within"):
        await disturbed("star", "last", 3, comes_back=False, hands_back=False)


@pytest.mark.parametrize("way", ["sharded", "stepped", "averaged"])
async def test_workers_that_all_leave_for_good_hand_the_weights_to_the_master(way):
    """The run once ended with the error that all weights were lost, and saved the weights of an earlier round."""
    plain = run_of(WAYS[way], master_epochs=1)
    await plain.train_model()
    runs = []
    with pytest.raises(ClusterTooSmall, match="none came back within"):
        await disturbed(way, "idle", 3, within_s=60.0, comes_back=False, runs=runs)
    (run,) = runs
    assert bits(run) == bits(plain)
    assert [record.round for record in run.history] == [1]


async def test_error_of_a_run_whose_workers_have_all_left_says_why_the_last_one_left():
    with pytest.raises(ClusterTooSmall) as caught:
        await disturbed("star", "first", 3, within_s=60.0, comes_back=False, never_answers=True)
    assert re.search(r"the last loss was: worker \d has left: SIGTERM$", caught.value.hint)
