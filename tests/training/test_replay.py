"""An asynchronous run that is replayed ends with the same bits, whoever carries its slots. No process, no Keras."""

import asyncio
import json
import random

import numpy as np
import pytest
import pytest_asyncio

from ddlf.errors import CheckpointMismatch, ConfigError, WorkerLost
from ddlf.events import Replayed, SlotsChanged
from ddlf.monitor.runs.recording import recorded
from ddlf.testing import FakeCluster, FakeRun, FakeWorker

pytestmark = pytest.mark.asyncio(loop_scope="module")

START = {"kernel": np.random.default_rng(5).normal(size=(40, 30)).astype("f4"), "bias": np.zeros(7, "f4")}


@pytest.fixture(autouse=True)
def nothing_is_synced(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def bits(run):
    arrays = [
        *run.model.get_weights(),
        *(array for state in run.optimizers for array in state or ()),
        run.ledger.counts,
    ]
    return [array.tobytes() for array in arrays]


async def run_of(workers=3, seed=None, cluster=None, **settings):
    """A run on workers that take as long as chance says."""
    run = FakeRun(cluster or FakeCluster(workers), **{"mode": "async", "master_epochs": 5, "start": START, **settings})
    if seed is not None:
        by_chance(run.cluster, seed)
    run.told = []
    run.subscribe(run.told.append)
    with recorded(run) as run.folder:
        await run.train_model()
    return run


def by_chance(cluster, seed):
    """Have each worker take a number of turns of the loop for a task, by chance."""
    chance, speeds = random.Random(seed), random.Random(1000 + seed)
    for worker in cluster.workers:

        async def rpc(request, timeout_s=None, worker=worker):
            worker.compute_s = speeds.uniform(0.1, 1)
            for _ in range(chance.randrange(30)):
                await asyncio.sleep(0)
            return await FakeWorker.rpc(worker, request, timeout_s)

        worker.rpc = rpc


def losing(cluster, *which):
    """Lose the worker of each of these slots and rounds, from 0, once, when it has computed the update."""
    left = set(which)

    def train(worker, task):
        reply = FakeWorker.train(worker, task)
        if (task.slot, task.round) in left:
            left.remove((task.slot, task.round))
            worker.lost = True
            raise WorkerLost("it was lost", worker=worker.name)
        return reply

    for worker in cluster.workers:
        worker.train = train.__get__(worker)
    return cluster


def order(run):
    return [(record.slot, record.round, record.base, record.staleness) for record in run.history]


async def replayed(run, source=None, **settings):
    again = await run_of(replay=source or run.folder, **settings)
    (told,) = [event for event in again.told if isinstance(event, Replayed)]
    assert told == Replayed(path=str(source or run.folder), updates=len(run.history), same=True)
    assert order(again) == order(run)
    assert bits(again) == bits(run)
    return again


RULES = [
    {},
    {"staleness": "inverse", "outer": "nesterov"},
    {"arrival": "fedbuff:4"},
    {"max_staleness": 0},
    {"arrival": "elastic"},
    {"arrival": "weighted"},
    {"arrival": "copy"},
    {"arrival": "delayed", "staleness": "inverse"},
    {"worker_steps": 3, "master_epochs": 2, "batch_size": 20},
    {"worker_steps": 8, "balance": "speed", "batch_size": 4, "samples": 403, "arrival": "delayed"},
    {"codec": "int8", "weights_codec": "delta:int8"},
    {"optimizer_state": "stays"},
]


@pytest.mark.parametrize("settings", RULES, ids=str)
async def test_it_is_the_same_bits_on_other_workers_at_other_speeds_from_folder_and_checkpoint(settings, tmp_path):
    run = await run_of(seed=1, out=tmp_path, checkpoint=tmp_path / "checkpoints", slots=3, **settings)
    other = await run_of(seed=2, slots=3, **settings)
    assert order(other) != order(run) or settings.get("max_staleness") == 0
    for seed, workers, source in ((3, 5, None), (4, 1, tmp_path / "checkpoints")):
        await replayed(run, source, seed=seed, workers=workers, slots=3, **settings)


async def test_five_of_five_replays_of_a_run_that_lost_workers_are_the_same_bits_and_so_is_the_replay_of_a_replay(
    tmp_path,
):
    run = await run_of(seed=1, cluster=losing(FakeCluster(4), (0, 1), (2, 3)), slots=3, out=tmp_path)
    assert sum(record.recomputed for record in run.history) == 2
    for seed in range(5):
        again = await replayed(run, seed=seed, slots=3, out=tmp_path / "again")
    await replayed(run, again.folder, seed=6, slots=3)


async def test_a_replay_may_lose_workers_itself(tmp_path):
    run = await run_of(seed=1, slots=3, out=tmp_path)
    await replayed(run, cluster=losing(FakeCluster(3), (1, 2), (2, 0)), slots=3)


async def test_an_update_that_was_rejected_is_left_out_again_though_this_worker_is_honest(tmp_path):
    cluster, bad = FakeCluster(3), []

    def fit(worker, task, weights, momentum):
        update, momentum = FakeWorker.fit(worker, task, weights, momentum)
        if (task.slot, task.round) == (1, 2) and not bad:
            bad.append(worker.id)
            update[0][...] = np.nan
        return update, momentum

    for worker in cluster.workers:
        worker.fit = fit.__get__(worker)
    settings = {"slots": 3, "update_policy": "reject"}
    run = await run_of(seed=1, cluster=cluster, out=tmp_path, checkpoint=tmp_path / "checkpoints", **settings)
    assert (2, 3) not in {(record.slot, record.round) for record in run.history}
    for source in (None, tmp_path / "checkpoints"):
        again = await replayed(run, source, seed=9, out=tmp_path / "again", **settings)
    await replayed(run, again.folder, seed=10, **settings)


async def test_a_run_that_converged_is_followed_up_to_its_end(tmp_path):
    class Converging(FakeRun):
        def is_convergent(self, record):
            return record.version >= 7

    FakeRun.is_convergent, usual = Converging.is_convergent, FakeRun.is_convergent
    try:
        run = await run_of(seed=1, slots=3, out=tmp_path)
        assert 7 <= len(run.history) < 15
        await replayed(run, seed=2, slots=3)
    finally:
        FakeRun.is_convergent = usual


async def test_a_replay_can_be_stopped(tmp_path):
    run = await run_of(seed=1, slots=3, out=tmp_path, master_epochs=30)
    again = FakeRun(FakeCluster(3), mode="async", master_epochs=30, start=START, slots=3, replay=run.folder)
    by_chance(again.cluster, 2)
    again.on_round = lambda record: record.version == 4 and again.stop_training()
    await again.train_model()
    assert 4 <= len(again.history) < 30
    assert order(again) == order(run)[: len(again.history)]


async def test_learning_rates_that_callbacks_have_set_are_those_of_the_same_updates_again(tmp_path):
    """They are set when a worker happens to have its task already, or not yet: an update says which it had."""

    class Rated(FakeWorker):
        def fit(self, task, weights, momentum):
            update, momentum = super().fit(task, weights, momentum)
            return [u * (task.rates[0][0] if task.rates else 1) if u.dtype.kind == "f" else u for u in update], momentum

    def cluster():
        made = FakeCluster(3)
        made.workers = [Rated(number) for number in (1, 2, 3)]
        return made

    class Slower(FakeRun):
        async def on_round(self, record):
            await asyncio.sleep(0)
            self._progress.rates = [[0.5 ** (record.version // 3)]]

    async def of(seed, **settings):
        run = Slower(cluster(), mode="async", master_epochs=5, start=START, slots=3, **settings)
        by_chance(run.cluster, seed)
        with recorded(run) as run.folder:
            await run.train_model()
        return run

    run = await of(1, out=tmp_path, checkpoint=tmp_path / "checkpoints")
    assert len({record.rates for record in run.history}) > 3
    for seed, source in ((2, run.folder), (3, tmp_path / "checkpoints")):
        again = await of(seed, replay=source)
        assert [record.rates for record in again.history] == [record.rates for record in run.history]
        assert bits(again) == bits(run)


async def test_slots_that_were_added_are_there_again_from_the_same_round(tmp_path):
    cluster = FakeCluster(3)
    late, cluster.workers = cluster.workers[2:], cluster.workers[:2]
    run = FakeRun(cluster, mode="async", master_epochs=8, start=START, out=tmp_path)
    by_chance(cluster, 1)
    events = []
    run.subscribe(events.append)
    run.on_round = lambda record: record.version == 4 and cluster.workers.extend(late)
    with recorded(run) as run.folder:
        await run.train_model()
    assert any(isinstance(event, SlotsChanged) for event in events)
    for workers, slots in ((1, None), (3, 3), (5, None)):
        await replayed(run, seed=workers, workers=workers, slots=slots, master_epochs=8)


async def test_a_run_that_was_resumed_is_replayed_whole_from_its_checkpoints(tmp_path):
    first = await run_of(seed=1, slots=3, master_epochs=2, checkpoint=tmp_path / "checkpoints")
    run = await run_of(seed=2, slots=3, resume=tmp_path / "checkpoints", out=tmp_path)
    assert len(run.history) > len(first.history)
    await replayed(run, tmp_path / "checkpoints", seed=3, slots=3)
    with pytest.raises(ConfigError, match="went on from another one, so its own updates are not all; replay its check"):
        await run_of(slots=3, replay=run.folder)


# -- what cannot be replayed ---------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(loop_scope="module")
async def done(tmp_path):
    """The folder of a run, and its lines, to be changed."""
    run = await run_of(seed=1, slots=2, master_epochs=3, out=tmp_path)
    file = run.folder / "events.jsonl"
    return run.folder, file, [json.loads(line) for line in file.read_text().splitlines()]


def rewritten(file, lines):
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


async def refused(folder, error=ConfigError, **settings):
    run = FakeRun(
        FakeCluster(2),
        **{"mode": "async", "slots": 2, "master_epochs": 3, "start": START, "replay": folder, **settings},
    )
    with pytest.raises(error) as why:
        await run.train_model()
    return str(why.value), [asked for worker in run.cluster.workers for asked in worker.asked]


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"seed": 7}, "seed: 0 in "),
        ({"staleness": "inverse"}, "staleness: 'constant' in "),
        ({"slots": 3}, "slots: 2 in "),
        ({"batch_size": 8}, "batch_size: 16 in "),
    ],
)
async def test_other_settings_are_refused_before_anything_is_connected(done, settings, what):
    why, asked = await refused(done[0], CheckpointMismatch, **settings)
    assert what in why
    assert "replay it with the same settings" in why
    assert not asked


async def test_what_is_no_order_of_this_app_is_refused_in_one_sentence(done, tmp_path):
    folder, file, lines = done

    async def said(**settings):
        why, asked = await refused(**{"folder": folder, **settings})
        assert not asked
        return why

    assert "is for asynchronous and Downpour training" in await said(mode="sync")
    assert "there is no run and no checkpoint in" in await said(folder=tmp_path / "nowhere")
    assert "begins with the first weights, but resume goes on from others" in await said(resume=tmp_path)
    rewritten(file, [line | {"app": "Other"} if line["event"] == "RunBegan" else line for line in lines])
    assert "is of Other, but this app is FakeRun" in await said()
    rewritten(file, lines[:-1])
    assert "events.jsonl has no end: the run was killed, or the file is cut" in await said()
    merged = [line for line in lines if line["event"] == "Committed"]
    rewritten(file, [line for line in lines if line is not merged[2]])
    assert "cannot be replayed: before update 3 some are missing" in await said()
    several = json.loads(json.dumps(lines))
    next(line for line in several if line["event"] == "Committed" and line["record"]["version"] == 2)["record"][
        "slot"
    ] = 5
    rewritten(file, several)
    assert "update 2 is of slot 5, but round 1 has 2 slots" in await said()
    for number, why in ((10**9, "no run of 203 samples has 1000000000 slots"), (1.5, "it has numbers that no run has")):
        rewritten(file, [line | {"slots": number} if line["event"] == "TrainingBegan" else line for line in lines])
        assert why in await said()
    for wrong, why in (
        ({"round": 0}, "update 2 is of no slot and round"),
        ({"epochs": 0}, "it has numbers that no run"),
    ):
        edited = [line | {"record": {**line["record"], **wrong}} if line is merged[1] else line for line in lines]
        rewritten(file, edited)
        assert why in await said()
    rewritten(file, [line | {"record": {**line["record"], "base": None}} if line in merged else line for line in lines])
    assert "by a version that did not say which weights each update was made from" in await said()


async def test_fewer_epochs_and_other_data_are_refused_when_they_are_known(done):
    why, asked = await refused(done[0], master_epochs=2)
    assert "is of round 3 with 1 local epochs, which slot 2 does not have here: give this run as many epochs" in why
    assert not asked
    why, asked = await refused(done[0], CheckpointMismatch, samples=100)
    assert "samples: 203 in" in why
    assert not asked


async def test_an_app_that_was_trained_before_is_not_where_the_order_begins(done):
    run = await run_of(slots=2, master_epochs=1)
    run.replay = done[0]
    with pytest.raises(ConfigError, match="this app was trained before; make a new app"):
        await run.train_model()


@pytest.mark.parametrize(
    "settings", [{"codec": "topk:0.1"}, {"weights_codec": "delta:int8"}, {"optimizer_state": "stays"}], ids=str
)
async def test_what_went_with_a_lost_worker_is_not_there_again(settings, tmp_path):
    run = await run_of(seed=1, cluster=losing(FakeCluster(3), (0, 1)), slots=2, out=tmp_path, **settings)
    with pytest.raises(
        ConfigError, match="a slot began a round twice, and what was left of it on its worker then is not"
    ):
        await run_of(slots=2, replay=run.folder, **settings)


@pytest.mark.parametrize("settings", [{"worker_epochs": 3}, {"arrival": "fedbuff:5", "worker_epochs": 3}], ids=str)
async def test_a_run_that_was_made_longer_is_replayed_with_the_rounds_that_it_had(settings, tmp_path):
    """Its first end has cut a round short, and had the buffer merged."""
    kept = {"checkpoint": tmp_path, "slots": 3, **settings}
    first = await run_of(seed=1, cluster=FakeCluster(3), master_epochs=4, **kept)
    run = await run_of(seed=2, cluster=FakeCluster(3), master_epochs=9, resume=tmp_path, **kept)
    assert [record.epochs for record in run.history if record.slot == 1] == [3, 1, 3, 2]
    assert len(run.history) > len(first.history)
    again = await run_of(master_epochs=9, replay=tmp_path, slots=3, **settings)
    assert bits(again) == bits(run)
    with pytest.raises(ConfigError, match="give this run as many epochs"):
        await run_of(master_epochs=8, replay=tmp_path, slots=3, **settings)


async def test_rounds_of_some_batches_are_replayed_too(tmp_path):
    """At the end of an epoch some slots have no task."""
    settings = {"worker_steps": 2, "samples": 98, "master_epochs": 3, "slots": 3, "out": tmp_path}
    run = await run_of(seed=1, **settings)
    again = await run_of(seed=2, replay=run.folder, **settings)
    assert bits(again) == bits(run)
    assert run.ledger.is_exact(3)
