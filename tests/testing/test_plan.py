"""Tests of fault plans: faults happen as planned, plans can be printed and replayed, and wrong updates have their worker."""

import asyncio
import contextlib
import time
import urllib.error
import urllib.request
from unittest import mock

import numpy as np
import psutil
import pytest
import pytest_asyncio

from ddlf import Cluster
from ddlf.app import IApp
from ddlf.errors import ConfigError, DDLFError, WorkerLost
from ddlf.events import SlotFinished, SlotStarted, WaitingForWorkers
from ddlf.testing.in_process import in_process_cluster
from ddlf.testing.local import local_cluster
from ddlf.testing.plan import NAMES, CutLink, FaultPlan
from ddlf.training.crew.opening import crew_of
from ddlf.worker.activity import Shard
from ddlf.worker.calls import concurrent, offered
from tests.patience import PATIENCE_S
from tests.processes import end_of
from tests.training.models import Quick, equal
from tests.training.models import app as blobs_app

pytestmark = pytest.mark.asyncio(loop_scope="session")


class Ways:
    """A role whose worker sends a message to another worker."""

    def __init__(self, worker, run):
        self._worker, self._role = worker, (run, "ways")

    @concurrent
    async def say(self, other):
        await self._worker.peers[other].call(self._role, "hear")

    @offered
    async def hear(self):
        pass

    async def close(self):
        pass


class App(IApp):
    """An app whose events the test sends itself."""

    def starts(self, number, worker, slot=1):
        self.run_context.emit(SlotStarted(round=number, slot=slot, worker=worker))

    def finishes(self, number, worker):
        self.run_context.emit(SlotFinished(round=number, slot=1, worker=worker))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared():
    async with local_cluster(2, proxied=True) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="session")
async def app(shared):
    """An app on two real workers, which are restored after each test."""
    yield App(shared)
    for machine in shared.machines:
        machine.recover()
        if machine.daemon is None:
            await machine.restart()
    await shared.connect()


async def until(condition, seconds=PATIENCE_S):
    """Wait until a condition is true that other processes fulfil."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - other processes send no event
            await asyncio.sleep(0.005)


async def test_a_plan_prints_the_python_that_makes_it_again():
    plan = (
        FaultPlan()
        .kill(worker=2, at_round=3)
        .kill(worker=1, at_round=3, part="daemon", back_after_s=1.5, after=0.25)
        .hang(worker=1, at_round=1, seconds=2)
        .slow(worker=1, factor=3)
        .partition(worker=2, at_round=2, seconds=3, direction="to_master")
        .reset(worker=2, at_round=9)
        .wrong_update(worker=1, at_round=2, kind="nan")
        .cut_link(worker=1, other=2, at_round=3, seconds=1.5)
        .slow_link(worker=2, other=1, at_round=4, bytes_per_s=1e6, delay_s=0.1)
        .reset_link(worker=1, other=2, at_round=5, after=0.5)
        .storage(at_round=2, worker=1, throttle=0.25, cut=0.5, seconds=2)
        .kill_shard(shard=2, at_round=4, worker=3, back_after_s=1.0)
        .kill(slot=2, at_round=5)
        .cut_link(slot=2, other=1, at_round=5)
    )
    assert eval(str(plan)) == plan
    assert str(FaultPlan().kill(worker=2, at_round=3)) == "FaultPlan().kill(worker=2, at_round=3)"


async def test_random_plan_follows_its_seed_and_can_be_replayed():
    options = dict(workers=3, rounds=20, faults=50, kinds=tuple(NAMES.values()))
    plans = [FaultPlan.random(seed, **options) for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]
    assert eval(str(plans[0])) == plans[0]
    assert {type(fault) for fault in plans[0].faults} == set(NAMES)
    assert len({(fault.worker, fault.at_round) for fault in plans[0].faults}) == 50


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: FaultPlan().kill(worker=0, at_round=1), "worker counts from 1, got 0"),
        (lambda: FaultPlan().kill(slot=0, at_round=1), "slot counts from 1, got 0"),
        (lambda: FaultPlan().kill(at_round=1), "kill needs either a worker or a slot"),
        (lambda: FaultPlan().slow(worker=1, slot=1, factor=2), "slow needs either a worker or a slot"),
        (lambda: FaultPlan().cut_link(slot=2, other=2, at_round=1), "slot 2 has no link to itself"),
        (lambda: FaultPlan().wrong_update(slot=1, at_round=1, kind="nan"), "wrong_update needs a worker"),
        (lambda: FaultPlan().kill_shard(shard=0, at_round=1), "shard counts from 1, got 0"),
        (lambda: FaultPlan().hang(worker=1, at_round=True, seconds=1), "at_round counts from 1"),
        (lambda: FaultPlan().hang(worker=1, at_round=1, seconds=-1), "seconds must be 0 or more"),
        (lambda: FaultPlan().wrong_update(worker=1, at_round=1, kind="odd"), "nan, zeros, scale, flip"),
        (lambda: FaultPlan().cut_link(worker=1, other=0, at_round=1), "other counts from 1, got 0"),
        (lambda: FaultPlan().reset_link(worker=2, other=2, at_round=1), "worker 2 has no link to itself"),
        (lambda: FaultPlan().slow_link(worker=1, other=2, bytes_per_s=0), "bytes_per_s must be more than 0"),
        (lambda: FaultPlan.random(1, workers=1, rounds=9, kinds=["cut_link"]), "one worker has no link to another"),
        (lambda: FaultPlan.random(1, workers=1, rounds=1, faults=2), "do not fit"),
        (lambda: FaultPlan().storage(at_round=1, error=0.6, cut=0.6), "shares must be from 0 to 1 together"),
        (lambda: FaultPlan.random(1, workers=1, rounds=9, kinds=["kil"]), "unknown kind: kil"),
    ],
)
async def test_an_impossible_plan_is_refused_when_it_is_made(make, text):
    with pytest.raises(ConfigError, match=text):
        make()


async def test_a_kill_happens_when_its_worker_gets_a_slot_of_its_round(app):
    before = [machine.executor.pid for machine in app.cluster.machines]
    async with FaultPlan().kill(worker=2, at_round=3).on(app) as injection:
        app.starts(2, 2)
        app.starts(3, 1)
        app.finishes(3, 2)
        app.run_context.emit(WaitingForWorkers(round=3, seconds=1.0))
        await asyncio.sleep(0)
        assert injection.done == []
        app.starts(3, 2)
        await until(lambda: not psutil.pid_exists(before[1]))
        assert [fault for _, fault in injection.done] == list(FaultPlan().kill(worker=2, at_round=3).faults)
        assert psutil.pid_exists(before[0])
        app.starts(3, 2)  # the same slot again, but the fault happens once
        await app.cluster.options(idempotent=True).run_code("1")  # it may meet the dead executor
    assert len(injection.done) == 1
    app.starts(3, 2)  # the plan no longer follows the run
    assert len(injection.done) == 1


async def test_a_fault_of_a_slot_happens_on_the_worker_that_gets_it(app):
    before = [machine.executor.pid for machine in app.cluster.machines]
    async with FaultPlan().kill(slot=2, at_round=3).on(app) as injection:
        app.starts(2, 2, slot=2)
        app.starts(3, 2, slot=1)
        assert injection.pending
        app.starts(3, 1, slot=2)
        await until(lambda: not psutil.pid_exists(before[0]))
        assert [fault for _, fault in injection.done] == list(FaultPlan().kill(worker=1, at_round=3).faults)
        assert psutil.pid_exists(before[1])
        await app.cluster.options(idempotent=True).run_code("1")  # it may meet the dead executor


async def test_a_link_between_slots_is_cut_when_both_have_workers(app):
    async with FaultPlan().cut_link(slot=1, other=2, at_round=1).on(app) as injection:
        app.starts(1, 2, slot=2)
        assert injection.pending
        app.starts(1, 1, slot=3)
        assert injection.pending
        app.starts(1, 1, slot=1)
        assert not injection.pending
        await until(lambda: injection.done)
        assert [fault for _, fault in injection.done] == list(
            FaultPlan().cut_link(worker=1, other=2, at_round=1).faults
        )
        way = await app.cluster.between(1, 2)
        assert way.fault("to_worker", "data").stopped
        way.connections = 1  # as if the workers had sent a message


def is_over(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # the process may end during the check
        return True


async def test_dead_worker_returns_as_planned_or_at_the_end(app):
    for back_after_s in (0.1, 60):
        pids = app.cluster.machine(1).daemon.pid, app.cluster.machine(1).executor.pid
        plan = FaultPlan().kill(worker=1, at_round=1, part="daemon", back_after_s=back_after_s)
        async with plan.on(app):
            app.starts(1, 1)
            await until(lambda pids=pids: is_over(pids[0]))
            end_of(pids[1])
            if back_after_s < 1:
                await until(lambda: app.cluster.machine(1).executor is not None)
        await app.cluster.connect()
        assert await app.cluster.run_code("1") == [1, 1]


async def test_a_hang_ends_after_its_seconds(app):
    async with FaultPlan().hang(worker=1, at_round=1, seconds=0.4).on(app):
        app.starts(1, 1)
        await until(lambda: app.cluster.machine(1).daemon.status() == psutil.STATUS_STOPPED)
        begin = time.monotonic()
        assert await app.cluster.workers[0].run_code("1") == 1
        assert time.monotonic() - begin > 0.3


async def test_a_partition_heals_after_its_seconds(app):
    async with FaultPlan().partition(worker=2, at_round=1, seconds=0.4, direction="to_worker").on(app):
        app.starts(1, 2)
        await until(lambda: app.cluster.machine(2).proxy.fault("to_worker", "data").stopped)
        assert not app.cluster.machine(2).proxy.fault("to_master", "data").stopped
        begin = time.monotonic()
        assert await app.cluster.run_code("1") == [1, 1]
        assert time.monotonic() - begin > 0.3


async def test_a_store_fails_from_its_round_on_and_recovers_at_the_end(app, tmp_path):
    (tmp_path / "file").write_bytes(b"1234")
    plan = FaultPlan().storage(at_round=2, throttle=1.0)
    with pytest.raises(ConfigError, match=r"storage\(.*\) needs a store; serve the data set with cluster\.serve"):
        async with plan.on(app):
            pass
    store = app.cluster.serve(tmp_path)

    def get():
        with urllib.request.urlopen(f"{store.url}/file") as answer:
            return answer.read()

    async with plan.on(app) as injection:
        app.starts(1, 1)
        assert await asyncio.to_thread(get) == b"1234"
        app.starts(2, 1)
        await until(lambda: len(injection.done) == 1)
        with pytest.raises(urllib.error.HTTPError, match="503"):
            await asyncio.to_thread(get)
    assert await asyncio.to_thread(get) == b"1234"
    assert (store.served["file"], store.failed["throttle"]) == (2, 1)


async def test_active_faults_are_undone_at_the_end(app):
    plan = (
        FaultPlan()
        .hang(worker=1, at_round=1, seconds=60)
        .partition(worker=2, at_round=1, seconds=60)
        .slow(worker=2, factor=9)
    )
    async with plan.on(app) as injection:
        app.starts(1, 1)
        app.starts(1, 2)
        await until(lambda: len(injection.done) == 3)
    begin = time.monotonic()
    assert await app.cluster.run_code("1") == [1, 1]
    assert time.monotonic() - begin < 30


async def test_after_is_a_share_of_the_workers_last_slot(app):
    async with FaultPlan().reset(worker=1, at_round=2, after=0.5).on(app) as injection:
        app.starts(1, 1)
        await asyncio.sleep(0.4)
        app.finishes(1, 1)
        begin = time.monotonic()
        app.starts(2, 1)
        await until(lambda: injection.done)
        assert time.monotonic() - begin >= 0.2


@pytest.mark.parametrize(("shard", "killed"), [(1, 3), (2, 1)])
async def test_the_current_owner_of_a_shard_is_killed(shard, killed):
    shards = {
        1: Shard(5, 9, 9, 1, "run"),
        2: Shard(0, 5, 9, 1, "run", shards=0),
        3: Shard(0, 5, 9, 1, "run", shards=2),
        4: None,
    }
    workers = [
        mock.Mock(id=number, status=mock.AsyncMock(return_value=mock.Mock(shard=content)))
        for number, content in shards.items()
    ]
    workers.append(mock.Mock(id=5, status=mock.AsyncMock(side_effect=WorkerLost("it is gone", worker="worker 5"))))
    cluster = mock.Mock(workers=workers)
    await FaultPlan().kill_shard(shard=shard, at_round=1).faults[0].act(cluster)
    cluster.machine.assert_called_once_with(killed)
    cluster.machine.return_value.kill.assert_called_once_with("executor")
    with pytest.raises(ConfigError, match=r"there is no shard 3: 2 workers have shards"):
        await FaultPlan().kill_shard(shard=3, at_round=1).faults[0].act(cluster)


async def test_link_between_workers_is_cut_slowed_and_reset():
    async with in_process_cluster(3) as cluster:
        app, role = App(cluster), ("run", "ways")
        plan = (
            FaultPlan()
            .cut_link(worker=1, other=2, at_round=1, seconds=0.3)
            .slow_link(worker=2, other=1, at_round=2, delay_s=0.2)
            .reset_link(worker=1, other=2, at_round=3)
        )
        async with plan.on(app) as injection:
            for worker in cluster.workers:
                await worker.call(role, "open", Ways, "run")
            await cluster.introduce(cluster.workers, "run")
            forward, backward = await cluster.between(1, 2), await cluster.between(2, 1)
            first = cluster.workers[0]

            async def seconds():
                begin = time.monotonic()
                await first.call(role, "say", 2)
                return time.monotonic() - begin

            await seconds()
            app.starts(1, 1)
            await until(
                lambda: forward.fault("to_worker", "data").stopped and backward.fault("to_master", "data").stopped
            )
            assert await first.run_code("1") == 1
            assert await seconds() > 0.1
            app.starts(2, 2)
            await until(lambda: backward.fault("to_worker", "data").delay_s)
            assert await seconds() > 0.3  # two delays, one for each direction
            connections = forward.connections
            app.starts(3, 1)
            await until(lambda: len(injection.done) == 3)
            async with asyncio.timeout(PATIENCE_S):
                while forward.connections == connections:
                    with contextlib.suppress(DDLFError):  # the worker whose link ends
                        await first.call(role, "say", 2)
        assert not forward.fault("to_worker", "data").delay_s
        with pytest.raises(ConfigError, match="workers 1 to 3"):
            async with FaultPlan().cut_link(worker=1, other=4, at_round=1).on(app):
                pass


async def test_a_cut_of_an_unused_link_is_an_error():
    async with in_process_cluster(2) as cluster:
        app = App(cluster)
        message = (
            r"^cut_link\(worker=1, at_round=1, other=2\) changed nothing: workers 1 and 2 sent nothing to each other"
        )

        async def run():
            async with FaultPlan().cut_link(worker=1, other=2, at_round=1).on(app) as injection:
                app.starts(1, 1)
                await until(lambda: injection.done)

        with pytest.raises(ConfigError, match=message):
            await run()


async def test_a_fault_that_did_not_happen_is_an_error(app):
    with pytest.raises(ConfigError, match=r"did not happen: kill\(worker=2, at_round=9\)"):
        async with FaultPlan().kill(worker=2, at_round=9).on(app):
            app.starts(1, 2)
    with pytest.raises(ZeroDivisionError):  # an error of the run itself is raised first
        async with FaultPlan().kill(worker=2, at_round=9).on(app):
            raise ZeroDivisionError


async def test_a_cluster_that_cannot_execute_the_plan_is_refused_before_training(app):
    with pytest.raises(ConfigError, match="workers 1 to 2"):
        async with FaultPlan().kill(worker=3, at_round=1).on(app):
            pass
    with pytest.raises(ConfigError, match="local_cluster"):
        async with FaultPlan().kill(worker=1, at_round=1).on(App(Cluster.local(1))):
            pass
    async with in_process_cluster(1) as cluster:
        with pytest.raises(ConfigError, match="proxied=True"):
            async with FaultPlan().reset(worker=1, at_round=1).on(App(cluster)):
                pass
        with pytest.raises(ConfigError, match="cannot be frozen"):  # noqa: PT012
            async with FaultPlan().hang(worker=1, at_round=1, seconds=1).on(hanging := App(cluster)) as injection:
                hanging.starts(1, 1)
                await until(lambda: injection.done)


async def test_training_with_killed_workers_ends_with_the_same_bits():
    runs = []
    for plan in (FaultPlan(), FaultPlan().kill(worker=2, at_round=1).kill(worker=1, at_round=3)):
        async with in_process_cluster(2) as cluster:
            trained = blobs_app(cluster, Quick, master_epochs=4)
            async with plan.on(trained) as injection:
                await trained.train_sync()
            assert len(injection.done) == len(plan.faults)
            runs.append(trained.model.get_weights())
            assert [status.restarts for status in await cluster.status()] == [len(plan.faults) // 2] * 2
    assert equal(*runs)


@pytest.mark.slow
async def test_training_finds_a_wrong_update_at_its_planned_place():
    async with in_process_cluster(2) as cluster:
        trained = blobs_app(cluster, Quick, master_epochs=4)
        with pytest.raises(DDLFError, match=r"worker 2.*nan|nan.*worker 2|worker 2.*NaN"):
            async with FaultPlan().wrong_update(worker=2, at_round=3, kind="nan").on(trained):
                await trained.train_sync()
        assert len(trained.history) in (0, 2)
        plain = blobs_app(cluster, Quick, master_epochs=4)  # the faults of the earlier app are undone
        await plain.train_sync()


class Watched(type(blobs_app(None))):
    """An app whose correct update is 2 everywhere."""

    async def create_model(self):
        await super().create_model()
        if hasattr(self, "worker"):
            self.worker.data["app"] = self

    def train(self, weights, worker_epochs, batch_size):
        return [np.full(w.shape, 2.0, "float32") for w in weights]


class WatchedAsync(Watched):
    """The same app, with a coroutine and metrics."""

    async def train(self, weights, worker_epochs, batch_size):
        return Watched.train(self, weights, worker_epochs, batch_size), {"loss": 1.0}


@pytest.mark.parametrize("kind_of_app", [Watched, pytest.param(WatchedAsync, marks=pytest.mark.slow)])
async def test_a_wrong_update_comes_from_its_worker_in_its_round_only(kind_of_app):
    async with in_process_cluster(2) as cluster:
        expected = {"nan": np.nan, "zeros": 1.0, "scale": 1001.0, "flip": 0.0}
        for kind, mean in expected.items():
            app = kind_of_app(cluster)
            async with FaultPlan().wrong_update(worker=2, at_round=2, kind=kind).on(app) as injection:
                steps = await two_rounds(app)
                for number in (1, 2):
                    for worker in (1, 2):
                        app.run_context.emit(SlotStarted(round=number, slot=1, worker=worker))
                await until(lambda injection=injection: injection.done)
            assert steps[0] == [2.0, 2.0]
            np.testing.assert_equal((steps[1][0] + steps[1][1]) / 2, mean)
            assert "train" not in vars(app)


async def two_rounds(app):
    """Return the value of each worker's update, in two rounds."""
    async with crew_of(app):
        weights, workers = app.model.get_weights(), app.cluster.workers
        return [
            [float((await worker.run_method(train_alone, weights, number))[0].ravel()[0]) for worker in workers]
            for number in (0, 1)
        ]


async def train_alone(self, weights, number):
    """Train like a replica does for a task, without the rest of the round."""
    import types

    from ddlf.training.slot.replica import call

    app = self.data["app"]

    def train():
        app.replica._task = types.SimpleNamespace(round=number)
        outcome = call(app.train, weights, 1, 1)
        return outcome[0] if isinstance(outcome, tuple) else outcome

    return await self.compute(train)


async def test_link_of_two_slots_on_one_worker_is_not_cut():
    (fault,) = FaultPlan().cut_link(slot=1, other=2, at_round=3).faults
    event = SlotStarted(round=3, slot=2, worker=1)
    assert fault.begun(event, {1: 1, 2: 1}) is None
    assert fault.begun(event, {1: 2, 2: 1}) == CutLink(worker=2, other=1, at_round=3)
