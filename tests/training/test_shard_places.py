"""Tests of the places of Downpour's shards: cut by values or layers, on training workers or on other workers. No Keras."""

import asyncio

import numpy as np
import pytest

from ddlf.algorithms.flat_weights import Rows
from ddlf.errors import CheckpointMismatch, ConfigError, ExecutorCrashed, WorkerLost
from ddlf.events import SlotStarted, Warned, WorkerReturned
from ddlf.testing import FakeCluster, FakeRun, FakeWorker, fake_run
from ddlf.testing.fake_run import gradient
from ddlf.training.crew.crew import Crew

pytestmark = pytest.mark.usefixtures("short_waits")
CHANCE = np.random.default_rng(1)
START = {
    "dense/kernel": CHANCE.normal(size=(30, 7)).astype("f4"),
    "dense/bias": CHANCE.normal(size=7).astype("f4"),
    "norm/gamma": CHANCE.random(7, "f4"),
    "norm/variance": CHANCE.random(7, "f4"),
    "out/kernel": CHANCE.normal(size=(7, 3)).astype("f4"),
}
FROZEN = frozenset(["norm/variance"])
PLAIN = {"push_rule": "sgd:rate=0.01", "staleness": "constant"}


def run_of(workers=4, **settings):
    run = FakeRun(FakeCluster(workers), **{"mode": "downpour", "start": START, "frozen": FROZEN, **PLAIN, **settings})
    run.event_log = []
    run.subscribe(run.event_log.append)
    return run


def owners(run):
    """Return the worker that owns each shard."""
    worker_of_shard = {
        number: worker.id for worker in run.cluster.workers for number in worker.end.shards if not worker.lost
    }
    return [worker_of_shard[number] for number in sorted(worker_of_shard)]


def carried(run):
    """Return the workers that carried a slot."""
    return {event.worker for event in run.event_log if isinstance(event, SlotStarted)}


def test_a_cut_by_layers_keeps_untrained_weights_with_their_layer():
    weights = [np.zeros(size, "f4") for size in (10, 2, 3, 3, 40, 0, 5)]
    layers = ["a", "a", "norm", "norm", "b", "b", "c"]
    trained = [True, True, True, False, True, True, True]
    rows = Rows.of(weights, trained)
    assert rows.cut(2, layers) == [((0, 15), (0, 3)), ((15, 60), (3, 3))]
    assert rows.cut(4, layers) == [((0, 12), (0, 0)), ((12, 15), (0, 3)), ((15, 55), (3, 3)), ((55, 60), (3, 3))]
    assert rows.cut(1, layers) == [((0, 60), (0, 3))]
    frozen = Rows.of(weights, [False, False, True, False, True, True, False])
    assert frozen.cut(2, layers) == [((0, 3), (0, 15)), ((3, 43), (15, 20))]
    with pytest.raises(ConfigError, match="4 layers cannot be cut into 5 shards"):
        rows.cut(5, layers)


@pytest.mark.parametrize("shards", [None, 2])
async def test_shards_by_layer_have_the_result_of_equal_slices(shards):
    run = run_of(1, slots=1, shards=shards, shard_cut="layers", master_epochs=2)
    run.on_round = lambda record: parts.append(
        [tuple(trained) for trained, _ in run.cluster.workers[0].end.owners.parts]
    )
    parts = []
    await run.train_model()
    assert parts[0] == ([(0, 217), (217, 245)] if shards else [(0, 245)])
    equal = run_of(1, slots=1, shards=2, master_epochs=2)
    await equal.train_model()
    assert [w.tobytes() for w in run.model.get_weights()] == [w.tobytes() for w in equal.model.get_weights()]


async def test_the_default_number_of_shards_is_at_most_the_number_of_layers():
    run = run_of(5, shard_cut="layers", master_epochs=1)
    run.on_round = lambda record: counts.append(len(owners(run)))
    counts = []
    await run.train_model()
    assert counts[0] == 3


async def test_more_shards_than_layers_are_refused_before_any_task():
    run = run_of(2, shard_cut="layers", shards=4)
    with pytest.raises(
        ConfigError, match="3 layers cannot be cut into 4 shards; use at least 1 shard, and at most one"
    ):
        await run.train_model()
    assert all(worker.asked == [] for worker in run.cluster.workers)


async def test_a_run_is_not_resumed_with_another_cut(tmp_path):
    await run_of(2, shards=2, checkpoint=tmp_path, master_epochs=1).train_model()
    resumed = run_of(2, shards=2, checkpoint=tmp_path, resume="auto", shard_cut="layers", master_epochs=2)
    with pytest.raises(CheckpointMismatch, match="shard_cut"):
        await resumed.train_model()


async def test_a_run_by_layers_is_resumed(tmp_path):
    settings = {"shard_cut": "layers", "checkpoint": tmp_path, "resume": "auto"}
    await run_of(3, master_epochs=1, **settings).train_model()
    run = run_of(2, slots=3, master_epochs=2, **settings)
    await run.train_model()
    assert run.ledger.is_exact(2)
    received = run.run_context.progress.state["shards"][0][:, 1]
    assert len(set(received.tolist())) == 1


async def test_shard_workers_have_the_shards_and_train_no_slot():
    run = run_of(4, shard_workers=2, master_epochs=3)
    run.on_round = lambda record: owners_by_round.append(owners(run))
    owners_by_round = []
    history = await run.train_model()
    assert owners_by_round[0] == [3, 4]
    assert carried(run) == {1, 2}
    assert history[-1].slots == 2
    assert run.ledger.is_exact(3)


async def test_more_slots_than_training_workers_take_turns():
    run = run_of(3, shard_workers=1, slots=4, shards=3, master_epochs=2)
    run.on_round = lambda record: owners_by_round.append(owners(run))
    owners_by_round = []
    await run.train_model()
    assert owners_by_round[0] == [3, 3, 3]
    assert carried(run) == {1, 2}
    assert run.ledger.is_exact(2)


@pytest.mark.parametrize("at", range(2, 6))
async def test_a_returning_shard_worker_gets_a_shard_again(at):
    run, back = run_of(4, shard_workers=2, master_epochs=8), asyncio.Event()
    lost = run.cluster.workers[2 + at % 2]
    run.subscribe(lambda event: back.set() if isinstance(event, WorkerReturned) else None)

    async def lose(record):
        owners_by_round.append(owners(run))
        if record.version == at:
            lost.lost = True
        if record.version == at + 2:
            await back.wait()

    run.on_round, owners_by_round = lose, []
    await run.train_model()
    assert run.ledger.is_exact(8)
    assert carried(run) == {1, 2}
    messages = [event.why for event in run.event_log if isinstance(event, Warned)]
    assert any("continues with its copy" in message for message in messages)
    assert not any("are lost" in message for message in messages)
    assert sorted(owners_by_round[0]) == sorted(owners_by_round[-1]) == [3, 4]


async def test_a_joining_worker_replaces_a_lost_shard_worker():
    run = run_of(4, shard_workers=1, slots=2, master_epochs=12)
    joining, server = run.cluster.workers.pop(), run.cluster.workers[2]
    at = []

    def change(record):
        at.append(owners(run))
        if record.version == 3:
            run.cluster.workers.remove(server)
            server.lost = server.removed = True
            server.reconnect = never
        if record.version == 6:
            run.cluster.workers.append(joining)

    async def never():
        await asyncio.Event().wait()

    run.on_round = change
    await run.train_model()
    assert at[0] == [3]
    assert at[-1] == [4]
    assert 4 not in carried(run)
    assert run.ledger.is_exact(12)


async def test_shard_workers_train_if_no_other_worker_remains():
    run = run_of(2, shard_workers=1, master_epochs=6)

    async def never():
        await asyncio.Event().wait()

    def lose(record):
        if record.version == 2:
            run.cluster.workers[0].lost = True
            run.cluster.workers[0].reconnect = never

    run.on_round = lose
    await run.train_model()
    assert carried(run) == {1, 2}
    assert run.ledger.is_exact(6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shard_workers": 2}, "shard_workers=2 leave no worker to train: there are 2; start more workers"),
        ({"shard_workers": 3}, "shard_workers=3 leave no worker to train: there are 2; start more workers"),
        ({"copies": 2}, "copies=2 of each shard and the shard itself need 3 workers, and there are 2"),
        ({"shard_workers": 1, "mode": "sync"}, "shard_workers"),
        ({"shard_cut": "layers", "mode": "async"}, "shard_cut"),
    ],
)
async def test_impossible_settings_are_refused_by_name(settings, message):
    run = run_of(2, **{"master_epochs": 1, **settings})
    if run.mode != "downpour":
        run.push_rule, run.staleness = FakeRun().push_rule, None
    with pytest.raises(ConfigError, match=f"^{message}"):
        await run.train_model()
    assert all(worker.asked == [] for worker in run.cluster.workers)


async def test_too_few_answering_workers_are_refused_with_the_same_sentence(monkeypatch):
    def crew_of(app, *arguments, **named):
        del app.cluster.workers[2:]
        return connected(app, *arguments, **named)

    connected = fake_run._crew_of
    monkeypatch.setattr(fake_run, "_crew_of", crew_of)
    with pytest.raises(ConfigError, match="shard_workers=2 leave no worker to train: there are 2; start more workers"):
        await run_of(4, shard_workers=2).train_model()


# --- executors that end -----------------------------------------------------------------------------------------------


def crashing(monkeypatch, run, crashes):
    """End the executor of each worker that trains a batch with a true ``crashes(samples)``."""
    for worker in run.cluster.workers:

        def dies(app, task, samples, weights, worker=worker):
            worker.lost = worker.lost or crashes(samples)
            if worker.lost:  # before the batch is pushed
                raise WorkerLost("its executor ended", worker=worker.name)
            return gradient(app, task, samples, weights)

        async def rpc(*arguments, worker=worker):
            try:
                return await FakeWorker.rpc(worker, *arguments)
            except WorkerLost as error:
                raise ExecutorCrashed("its executor ended", worker=worker.name) from error

        monkeypatch.setattr(worker, "gradient", dies)
        monkeypatch.setattr(worker, "rpc", rpc)


async def test_slot_whose_executors_end_continues_while_it_progresses(monkeypatch):
    run, further, ended = run_of(3, shard_workers=1, slots=1, batch_size=1, master_epochs=1), [0], []

    really = Crew.progressed

    def progressed(crew, slot):
        further[0] += 1
        really(crew, slot)

    monkeypatch.setattr(Crew, "progressed", progressed)
    monkeypatch.setattr("ddlf.training.strategies.downpour.master.LOOK_S", 0.0)

    def crashes(samples):
        if further[0] < 1 or len(ended) == 5:
            return False
        further[0] = 0
        ended.append(samples)
        return True

    crashing(monkeypatch, run, crashes)
    await run.train_model()
    assert len(ended) == 5
    assert run.ledger.is_exact(1)
    received = run.run_context.progress.state["shards"][0][:, 1].tolist()
    assert received == [203]


async def test_a_batch_that_ends_three_executors_ends_the_run(monkeypatch):
    run, ended = run_of(3, shard_workers=1, slots=1, batch_size=1, master_epochs=1), []

    def crashes(samples):
        if 17 in samples:
            ended.append(samples)
            return True
        return False

    crashing(monkeypatch, run, crashes)
    with pytest.raises(ExecutorCrashed, match="its executor ended"):
        await run.train_model()
    assert 3 <= len(ended) <= 6  # the master may receive the progress of the slot only after its first losses
