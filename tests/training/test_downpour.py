"""Tests of Downpour SGD: each push counts once, whichever worker is lost. Shards and pushes are real. No process, no Keras."""

import asyncio
import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from ddlf.algorithms.encoding import decode_update
from ddlf.algorithms.flat_weights import Rows
from ddlf.algorithms.push_rules import turns
from ddlf.algorithms.reading_order import Portion
from ddlf.algorithms.weights import digest
from ddlf.errors import AppMissing, BadUpdate, ClusterTooSmall, ConfigError, ConnectError, ProtocolError, WorkerLost
from ddlf.events import Warned
from ddlf.testing import FakeCluster, FakeRun, FakeWorker
from ddlf.testing.fake_run import MadeUp, gradient
from ddlf.training.callbacks.checks import warnings_of_master
from ddlf.training.checkpoints import resume
from ddlf.training.slot.task import OPTIMIZER
from ddlf.training.strategies.downpour.client import FetchedRange
from ddlf.training.strategies.downpour.placement import Placement
from ddlf.training.strategies.downpour.server import Server, Servers
from ddlf.training.strategies.downpour.state import ServerState
from ddlf.worker.calls import Hosting
from tests.training.server_states import state

CHANCE = np.random.default_rng(1)
START = {
    "dense/kernel": CHANCE.normal(size=(40, 30)).astype("f4"),  # more than 90% of all values
    "dense/bias": CHANCE.normal(size=7).astype("f4"),
    "scale": np.asarray(0.5, "f4"),
    "nothing": np.zeros((0, 3), "f4"),
    "norm/variance": CHANCE.random(7, "f4"),
    "norm/steps": np.asarray(41, "i8"),
}
FROZEN = frozenset(["norm/variance", "norm/steps"])
PLAIN = {"push_rule": "sgd:rate=0.01", "staleness": "constant"}


def run_of(workers=3, **settings):
    settings = {"slots": 3, "start": START, "frozen": FROZEN, "master_epochs": 2, **settings}
    return FakeRun(FakeCluster(workers), mode="downpour", **settings)


async def trained(workers=3, **settings):
    run = run_of(workers, **settings)
    await run.train_model()
    assert run.ledger.is_exact(run.master_epochs)
    return run


def bits(run):
    return digest(run.model.get_weights())


def row(weights):
    return np.concatenate([np.ravel(w) for w, path in zip(weights, START, strict=True) if path not in FROZEN])


def sum_gradients(run):
    """Make the workers of a run add up all their gradients. Return the sum."""
    total = np.zeros(row(START.values()).size)

    def added(*arguments):
        pushed = gradient(*arguments)
        total[:] += pushed
        return pushed

    for worker in run.cluster.workers:
        worker.gradient = added
    return total


def delay_messages(run, seed):
    """Delay messages between workers by a random number of turns."""
    chance = np.random.default_rng(seed)
    for worker in run.cluster.workers:

        async def ask(*arguments, worker=worker):
            for _ in range(chance.integers(6)):
                await asyncio.sleep(0)
            return await FakeWorker._ask(worker, *arguments)

        worker._ask = ask


# --- counts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 3])
async def test_22_steps_are_5_fetches_and_6_pushes_of_all_gradients(workers):
    run = run_of(workers, slots=1, samples=22 * 16, n_fetch=5, n_push=4, master_epochs=1, **PLAIN)
    total = sum_gradients(run)
    await run.train_model()
    (record,) = run.history
    assert (len(record.fetches), len(record.pushes)) == (5, 6)
    assert [push[1] for push in record.pushes] == list(range(6))
    assert run.ledger.is_exact(1)
    assert np.allclose(row(run.model.get_weights()), row(START.values()) - 0.01 * total, rtol=0, atol=1e-5)


async def test_each_push_of_several_replicas_counts_once_at_each_shard():
    run = run_of(replicas=7, n_fetch=3, n_push=2, **PLAIN)
    total = sum_gradients(run)
    delay_messages(run, 1)
    await run.train_model()
    assert run.ledger.is_exact(2)
    for shard in range(3):
        numbers = sorted(push[5 + shard] for record in run.history for push in record.pushes)
        assert numbers == list(range(len(numbers)))
    assert np.allclose(row(run.model.get_weights()), row(START.values()) - 0.01 * total, rtol=0, atol=1e-5)


async def test_a_replica_alone_steps_as_the_formula_says():
    """With n_fetch = n_push = 1 a step uses weights from before the last pushes, moved by the gradients of these pushes."""
    run = run_of(1, slots=1, samples=64, master_epochs=1, learning_rate=0.25, start={"w": np.ones(3, "f4")}, **PLAIN)
    read_weights = []

    def linear(app, task, samples, weights):
        read_weights.append(weights.copy())
        return weights.copy()

    run.cluster.workers[0].gradient = linear
    delay_messages(run, 2)
    await run.train_model()
    shard = [np.ones(3)]
    for number, weights in enumerate(read_weights):
        allowed = (
            shard[version] - 0.25 * sum(read_weights[version:number], np.zeros(3)) for version in range(number + 1)
        )
        assert any(np.allclose(weights, candidate, rtol=0, atol=1e-6) for candidate in allowed)
        shard.append(shard[-1] - 0.01 * weights)
    assert np.allclose(run.model.get_weights()[0], shard[-1], rtol=0, atol=1e-6)


def test_turns_are_drawn_by_chance_and_the_last_batch_is_the_last_step():
    drawn = turns([5, 4, 6], 2, np.random.default_rng(1), alone=3)
    assert drawn[:3] == [0, 0, 0]
    assert [drawn.count(replica) for replica in range(3)] == [5, 4, 6]
    assert drawn[-1] == 2
    long_turns = turns([100] * 4, 1, np.random.default_rng(2))
    following = {(a, b) for a, b in itertools.pairwise(long_turns)}
    assert len(following) == 16


async def test_the_first_replica_is_alone_until_the_warm_start_is_over():
    run = await trained(replicas=5, warm_start=3, **PLAIN)
    pushes = [(push[5], push[0]) for record in run.history for push in record.pushes]
    assert [replica for _, replica in sorted(pushes)[:3]] == [0, 0, 0]
    assert all(min(fetch[1:]) >= 3 for record in run.history for fetch in record.fetches if fetch[0])


async def test_with_softsync_several_pushes_make_one_step():
    run = await trained(n_push=2, softsync=1, **PLAIN)
    versions, received = (run.run_context.progress.state["shards"][0][:, i] for i in (0, 1))
    assert (versions == received // 3).all()
    assert received.min() > 6


# --- continued runs -----------------------------------------------------------------------------------------------------


FILES = {"files": (31, 17, 40, 29, 28, 29, 29), "shuffle": "window:2"}


@pytest.mark.parametrize("settings", [{}, {"replicas": 7, "n_push": 2}, {"round_samples": 70}], ids=str)
async def test_partition_files_travel_as_ranges(settings):
    run = run_of(**FILES, **settings)
    delay_messages(run, 3)
    await run.train_model()
    assert (run.ledger.is_exact(2), set(run.ledger.counts)) == (True, {2})
    tasks = [request[1] for worker in run.cluster.workers for request in worker.asked if request[0] == "train"]
    assert all(isinstance(task.indices, Portion) for task in tasks)
    assert {(task.indices.epoch, task.slot) for task in tasks} >= {(0, 0), (1, 2)}


async def test_ledger_of_files_is_exact_after_a_replica_is_lost(monkeypatch, tmp_path):
    monkeypatch.setattr("ddlf.training.strategies.downpour.client.NOTICED_S", 0.1)
    run = run_of(4, slots=4, shards=1, n_push=2, checkpoint=tmp_path, checkpoint_keep=99, **FILES, **PLAIN)
    worker, count = run.cluster.workers[2], itertools.count(1)

    def dies(*arguments):
        worker.lost = worker.lost or next(count) == 6
        return gradient(*arguments)

    worker.gradient = dies
    await run.train_model()
    assert (run.ledger.is_exact(2), set(run.ledger.counts)) == (True, {2})
    assert sum(record.recomputed for record in run.history) == 1
    checkpoint = tmp_path / "round-000003"
    resumed = run_of(4, slots=4, n_push=2, shards=1, resume=checkpoint, checkpoint=tmp_path / "on", **FILES, **PLAIN)
    await resumed.train_model()
    assert resumed.ledger.is_exact(2)


async def test_data_that_a_program_generates_allows_one_replica_for_each_slot():
    data = MadeUp((60, 60))
    data.on_disk = False
    with pytest.raises(ConfigError, match="replicas=5 on 3 slots read in turn from several places"):
        await run_of(replicas=5, files=(60, 60), train_data=data).train_model()
    with pytest.raises(ConfigError, match="on_bad='skip' cannot be combined with mode='downpour'"):
        await run_of(on_bad="skip", **FILES).train_model()


async def test_resumed_after_any_commit_each_push_counts_once(tmp_path):
    uninterrupted = run_of(checkpoint=tmp_path, checkpoint_keep=99, n_push=2, **PLAIN)
    delay_messages(uninterrupted, 4)
    await uninterrupted.train_model()
    for number in range(1, 6):
        run = run_of(resume=tmp_path / f"round-{number:06d}", checkpoint=tmp_path / str(number), n_push=2, **PLAIN)
        await run.train_model()
        assert run.ledger.is_exact(2)
        received = run.run_context.progress.state["shards"][0][:, 1]
        assert (received == uninterrupted.run_context.progress.state["shards"][0][:, 1]).all()


# --- losses -----------------------------------------------------------------------------------------------------------


async def test_lost_replica_continues_on_another_worker_after_its_last_push(monkeypatch):
    monkeypatch.setattr("ddlf.training.strategies.downpour.client.NOTICED_S", 0.1)
    run = run_of(4, slots=4, shards=1, n_push=2, master_epochs=3, **PLAIN)
    worker, count = run.cluster.workers[2], itertools.count(1)

    def dies(*arguments):
        if next(count) == 6:
            worker.lost = True
        return gradient(*arguments)

    worker.gradient = dies
    await run.train_model()
    assert run.ledger.is_exact(3)
    assert sum(record.recomputed for record in run.history) == 1
    pushes = [push for record in run.history for push in record.pushes]
    received = run.run_context.progress.state["shards"][0][0, 1]
    steps = 3 * 4 * -(-51 // 16)
    assert received == steps // 2  # also from the lost replica, each push once
    assert len(pushes) < received or all(push[3] >= 0 for push in pushes)


@pytest.mark.parametrize("workers", [1, 3])
async def test_run_continues_if_a_worker_is_lost_while_shards_are_assigned(workers):
    run = run_of(workers, **PLAIN)
    worker, count = run.cluster.workers[0], itertools.count()
    usual_rpc = worker.rpc

    async def rpc(request, *more):
        worker.lost = worker.lost or (request.args[2] == "own" and not next(count))
        return await usual_rpc(request, *more)

    worker.rpc = rpc
    total = sum_gradients(run)
    await run.train_model()
    assert run.ledger.is_exact(2)
    assert np.allclose(row(run.model.get_weights()), row(START.values()) - 0.01 * total, rtol=0, atol=1e-5)


async def test_run_continues_if_all_workers_are_lost_before_shards_are_assigned(monkeypatch):
    run, count = run_of(1, **PLAIN), itertools.count()

    async def assign(placement, *arguments, usual=Placement.assign):
        if not next(count):
            placement._lost_members.update(placement._members.members())
        await usual(placement, *arguments)

    monkeypatch.setattr(Placement, "assign", assign)
    await run.train_model()
    assert run.ledger.is_exact(2)


async def test_without_workers_a_run_waits_for_its_set_time():
    run = run_of(1, wait_for_workers_s=0.01)
    worker = run.cluster.workers[0]

    async def stay_away():
        raise WorkerLost("it was switched off", worker=worker.name)

    worker.lost, worker.reconnect = True, stay_away
    with pytest.raises(ClusterTooSmall, match=r"none came back within 0\.01 s"):
        await run.train_model()


async def test_lost_shard_without_copy_and_checkpoint_ends_the_run():
    run = run_of(copies=0, master_epochs=3, **PLAIN)

    def lose(record):
        if record.version == 3:
            run.cluster.workers[1].lost = True

    run.on_round = lose
    with pytest.raises(ClusterTooSmall, match=r"shard 2 of 3 of the weights was on worker 2, which is lost.*resume"):
        await run.train_model()


async def test_a_failed_link_between_two_workers_is_named(monkeypatch):
    monkeypatch.setattr("ddlf.training.strategies.downpour.client.NOTICED_S", 0.1)
    run = run_of(2, slots=2)
    first = run.cluster.workers[0]

    async def cut(worker, *arguments):
        raise WorkerLost("no answer", worker="worker 2")

    first._ask = cut
    with pytest.raises(ConnectError, match="worker 1 does not reach the shards of worker 2: no answer"):
        await run.train_model()


# --- a shard ------------------------------------------------------------------------------------------------------------


def shard(weights=None, **settings):
    return Server.from_state(state(weights, **settings))


NONE = np.zeros(0, "f4")


async def test_fetched_weights_do_not_change_and_stale_pushes_step_less():
    server, g = shard(), np.ones(4, "f4")
    before = FetchedRange(*await server.fetch(0, 1))
    assert [await server.push(0, 1, 0, number, 0, g, NONE) for number in range(3)] == [(0, 0), (1, 1), (2, 2)]
    assert (before.weights == 0).all()
    after = FetchedRange(*await server.fetch(0, 1))
    assert np.allclose(after.weights, -0.5 - 0.5 - 0.25)
    assert (after.version, after.received, after.round, after.number) == (3, 3, 0, 2)


async def test_replicas_fetch_encoded_values_and_shards_keep_exact_ones():
    values = CHANCE.normal(size=400).astype("f4")
    server = shard(values, codec="float16")
    for _ in range(2):
        fetched = FetchedRange(*await server.fetch(0, 1)).weights
        assert sum(part.nbytes for part in fetched["payloads"][0].values()) < 0.6 * values.nbytes
        assert decode_update(fetched, [values])[0].tobytes() == values.astype("f2").astype("f4").tobytes()
        await server.push(0, 1, 0, server.received, server.version, values, NONE)
        values = server.weights

    def check_rounded(app, task, samples, weights):
        assert (weights == weights.astype("f2")).all()
        return np.zeros_like(weights)

    run = run_of(weights_codec="float16")
    for worker in run.cluster.workers:
        worker.gradient = check_rounded
    await run.train_model()
    assert bits(run) == digest(list(START.values()))


async def test_a_push_counts_once_and_a_lost_answer_is_repeated():
    server, g = shard(), np.ones(4, "f4")
    await server.push(2, 1, 0, 0, 0, g, NONE)
    with pytest.raises(BadUpdate, match="push 1 of replica 3 in round 1 came twice"):
        await server.push(2, 1, 0, 0, 0, g, NONE)
    assert await server.push(2, 1, 0, 0, 0, g, NONE, again=True) == (0, 0)
    assert server.received == 1
    assert await server.begin([2, 5], 7, 0) == [1, 0]
    with pytest.raises(AppMissing, match="replica 3 is now on another worker"):
        await server.push(2, 1, 0, 1, 0, g, NONE)


@pytest.mark.parametrize(
    ("read", "gradient", "message"),
    [
        (0, np.ones(3, "f4"), r"push 1 of replica 1 has float32 \(3,\) for values of float32 \(4,\)"),
        (0, np.ones(4, "f8"), r"push 1 of replica 1 has float64 \(4,\) for values of float32 \(4,\)"),
        (0, [1.0] * 4, r"push 1 of replica 1 has list for values of float32 \(4,\)"),
        (0, np.array([1, np.nan, 1, 1], "f4"), "push 1 of replica 1 has NaN or infinite values"),
        (0, np.array([1, np.inf, -np.inf, 1], "f4"), "push 1 of replica 1 has NaN or infinite values"),
        (1, np.ones(4, "f4"), "push 1 of replica 1 was made from version 1, but this shard has had versions 0 to 0"),
    ],
    ids=["length", "type", "list", "nan", "infinity", "version"],
)
async def test_push_that_does_not_fit_is_refused_and_changes_nothing(read, gradient, message):
    server = shard()
    with pytest.raises(BadUpdate, match=message):
        await server.push(0, 1, 0, 0, read, gradient, NONE)
    assert (server.received, server.weights.sum()) == (0, 0)


async def test_a_moved_shard_continues_from_its_state():
    first, g = shard(rule="adam", collects=2), np.ones(4, "f4")
    for number in range(3):
        await first.push(1, 1, 0, number, 0, g, NONE)
    moved = Server.from_state(ServerState.from_message(await first.snapshot()))
    for server in (first, moved):
        await server.push(1, 1, 0, 3, 1, g, NONE)
    assert first.weights.tobytes() == moved.weights.tobytes()
    assert (first.version, first.last) == (moved.version, moved.last)


async def test_a_model_without_trained_weights_is_refused():
    with pytest.raises(ConfigError, match="this model has none that are trained"):
        await run_of(frozen=frozenset(START)).train_model()


async def test_training_continues_with_other_push_rule_and_shard_count():
    run = run_of(master_epochs=1)
    await run.train_model()
    run.push_rule, run.shards = "adam", 2
    await run.train_model()
    assert len(run.run_context.progress.state["shards"][0]) == 2
    assert len(run.run_context.progress.state["push"]) == 2  # both moments of Adam, without the state of Adagrad


async def test_replicas_get_no_optimizer_state_of_the_earlier_training(monkeypatch):
    has_optimizer, go_on = [], resume._go_on

    def noted(*arguments):
        progress = go_on(*arguments)
        has_optimizer.append([OPTIMIZER in state for state in progress.states])
        return progress

    monkeypatch.setattr(resume, "_go_on", noted)
    run = FakeRun(FakeCluster(3), slots=3, start=START, frozen=FROZEN, master_epochs=1)
    await run.train_model()
    for mode in ("sync", "downpour"):
        run.mode = mode
        await run.train_model()
    assert has_optimizer == [[True] * 3, [False] * 3]


async def test_run_warns_of_weights_that_lose_digits_on_the_shards():
    for kind, count in (("f4", 0), ("f8", 1)):
        run = run_of(start=START | {"scale": np.asarray(0.5, kind)}, master_epochs=1)
        received = []
        run.subscribe(received.append)
        await run.train_model()
        reasons = [event.why for event in received if isinstance(event, Warned) and "float64" in event.why]
        assert len(reasons) == count
        assert all("the first is 'scale'" in reason for reason in reasons)


async def test_worker_epochs_of_another_mode_have_no_effect():
    class Long(FakeRun):
        worker_epochs = 2

    settings = {"slots": 3, "start": START, "frozen": FROZEN, "master_epochs": 2}
    run = Long(FakeCluster(3), mode="downpour", **settings)
    await run.train_model()
    assert run.ledger.is_exact(2)
    assert len(run.history) == 2 * 3

    Long.mode = "downpour"  # now the class sets worker_epochs for Downpour
    with pytest.raises(ConfigError, match="worker_epochs=2 has no effect in Downpour training"):
        await Long(FakeCluster(3), **settings).train_model()


async def test_a_shard_refuses_verbs_that_it_does_not_offer_to_other_workers():
    roles = Hosting(None)
    servers = Servers(1, "run", roles, None, lambda: Rows.of([np.zeros(4, "f4")], [True]))
    await servers.own(1, 0, state().to_message())
    assert FetchedRange(*await roles.call("run", "server:1:1", "fetch", 0, 1)).version == 0
    with pytest.raises(ProtocolError, match="a server:1:1 does not offer 'snapshot' to other workers"):
        await roles.call("run", "server:1:1", "snapshot")
    with pytest.raises(AppMissing, match="it hosts no server:1:0 of this run"):
        await roles.call("run", "server:1:0", "fetch", 0, 1)
    await servers.close()
    with pytest.raises(AppMissing, match="it hosts no server:1:1 of this run"):
        await roles.call("run", "server:1:1", "fetch", 0, 1)


# --- settings -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"copies": 3}, "copies=3 of each shard and the shard itself need 4 workers, and there are 3"),
        ({"mode": "async", "copies": 0}, "copies=0 is for Downpour training: asynchronous training does not use it"),
        ({"shards": 1209}, "1,208 values cannot be cut into 1,209 shards"),
        ({"replicas": 2}, "replicas=2 are fewer than the 3 slots"),
        ({"softsync": 4}, "softsync must be from 1 to the 3 replicas, got 4"),
        ({"merge": "median"}, "merge='median' is for synchronous training: Downpour training does not use it"),
        ({"exchange": "sharded"}, "exchange='sharded' is for synchronous training"),
        ({"arrival": "fedasync"}, "arrival='fedasync' is for asynchronous training"),
        ({"outer": "nesterov"}, "outer='nesterov' is for synchronous and asynchronous training"),
        ({"worker_epochs": 2}, "worker_epochs=2 has no effect in Downpour training"),
        ({"weights_codec": "delta:int8"}, "weights_codec='delta:int8' is of differences"),
        ({"codec": "int8"}, "codec='int8' has no effect in Downpour training"),
        ({"optimizer_state": "averaged"}, "optimizer_state='averaged' has no effect .* train in mode 'sync'"),
        ({"update_policy": "clip"}, "update_policy='clip' compares updates of whole rounds"),
    ],
    ids=str,
)
async def test_impossible_settings_are_refused_by_name(settings, message):
    with pytest.raises(ConfigError, match=message):
        await FakeRun(
            FakeCluster(3), **{"mode": "downpour", "slots": 3, "start": START, "frozen": FROZEN, **settings}
        ).train_model()


def test_run_warns_of_a_callback_that_sets_the_learning_rate():
    app = SimpleNamespace(callbacks=[type("ReduceLROnPlateau", (), {})()], checkpoint=None, resume=None)
    assert warnings_of_master(app, "sync") == []
    assert warnings_of_master(app, "downpour") == [
        "the learning rate that ReduceLROnPlateau sets applies only between two fetches of a replica; "
        "shards step at the rate of push_rule"
    ]


async def test_a_stopped_run_ends_after_its_rounds_and_keeps_their_pushes():
    run = run_of(master_epochs=30)
    run.on_round = lambda record: record.version == 5 and run.stop_training()
    await run.train_model()
    assert 5 <= len(run.history) < 90
    assert not run.ledger.is_exact(30)
    assert run.ledger.counts.sum() == sum(record.samples for record in run.history)
    assert all(np.isfinite(weights).all() for weights in run.model.get_weights())
