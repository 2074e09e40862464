"""Tests of training on partition files: tasks contain portions instead of samples, and losses and resumes change no bit."""

import copy
import json
import random

import numpy as np
import pytest

from ddlf.algorithms.reading_order import Portion, portions
from ddlf.errors import ConfigError, WorkerLost
from ddlf.testing import FakeCluster, FakeRun, FakeWorker
from ddlf.training.progress import FileLedger

SEVEN = (31, 17, 40, 29, 28, 29, 29)
"""203 samples, as many as a fake run has in arrays."""


@pytest.fixture(autouse=True)
def no_disk(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def bits(run):
    return [array.tobytes() for array in [*run.model.get_weights(), *(a for state in run.optimizers for a in state)]]


async def trained(workers=3, **settings):
    run = FakeRun(FakeCluster(workers), **{"slots": 3, "files": SEVEN, "master_epochs": 5, **settings})
    await run.train_model()
    assert run.ledger.is_exact(run.master_epochs)
    assert (run.ledger.counts == run.master_epochs).all()
    return run


@pytest.mark.parametrize("shuffle", ["window:2", "none", "global"])
@pytest.mark.parametrize("length", [{}, {"round_samples": 60}], ids=["epochs", "rounds within"])
async def test_workers_that_are_lost_and_join_change_no_bit(shuffle, length, tmp_path):
    settings = {"shuffle": shuffle, **length}
    undisturbed = await trained(**settings)
    chance, lost = random.Random(1), []
    run = FakeRun(FakeCluster(3), slots=3, files=SEVEN, master_epochs=5, **settings)

    def losing(worker):
        def train(task):
            reply = FakeWorker.train(worker, task)
            if chance.random() < 0.3 and len(lost) < 20:
                lost.append(task.slot)
                worker.lost = True
                raise WorkerLost("it was lost", worker=worker.name)
            return reply

        return train

    def join(record):
        if record.round in (2, 3):
            run.cluster.workers.append(FakeWorker(record.round + 2))
            run.cluster.workers[-1].open(run)

    for worker in run.cluster.workers:
        worker.train = losing(worker)
    run.on_round = join
    await run.train_model()
    assert run.cluster.N == 5
    assert lost
    assert run.ledger.is_exact(5)
    assert bits(run) == bits(undisturbed)
    assert bits(await trained(workers=5, **settings)) == bits(undisturbed)


def test_a_piece_of_a_portion_is_that_part_of_its_samples():
    (portion,) = portions([5, 7], [12], "window:2", seed=0, epoch=0)
    ids = portion.ids([5, 7]).tolist()
    assert portion[:4].ids([5, 7]).tolist() + portion[4:][:3].ids([5, 7]).tolist() == ids[:7]
    assert portion[4:][3:].ids([5, 7]).tolist() == ids[7:]
    assert len(portion[20:]) == 0


@pytest.mark.parametrize("files", [SEVEN, ()], ids=["files", "arrays"])
@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_run_resumes_within_an_epoch_with_the_same_bits(files, mode, tmp_path):
    settings = {"files": files, "mode": mode, "round_samples": 70, "master_epochs": 2, "workers": 1}
    settings |= {"slots": 3 if mode == "sync" else 1}
    uninterrupted = await trained(**settings, checkpoint=tmp_path / "whole", checkpoint_keep=100)
    checkpoints = sorted((tmp_path / "whole").glob("round-*"))
    assert len(checkpoints) == len(uninterrupted.history) == 6  # an epoch of 203 samples is 3 rounds
    assert all(60 < record.samples < 75 for record in uninterrupted.history)
    for number, source in enumerate(checkpoints[:-1], 1):
        resumed = await trained(**settings, resume=source, checkpoint=tmp_path / f"{number}")
        assert bits(resumed) == bits(uninterrupted)
        assert resumed.ledger.is_exact(2)


@pytest.mark.parametrize("length", [{}, {"round_samples": 80}, {"worker_steps": 2}, {"worker_epochs": 2}])
async def test_files_with_a_global_shuffle_have_the_bits_of_arrays(length):
    files = await trained(shuffle="global", master_epochs=4, **length)
    assert bits(files) == bits(await trained(files=(), master_epochs=4, **length))


async def test_round_samples_hold_for_any_number_of_slots():
    rounds = [len((await trained(slots=slots, round_samples=70, master_epochs=2)).history) for slots in (1, 2, 5)]
    assert rounds == [6, 6, 6]


async def test_joining_workers_get_slots_of_files_when_an_epoch_begins():
    run = FakeRun(FakeCluster(2), files=SEVEN, round_samples=70, master_epochs=3)

    def on_round(record):
        if record.round == 2:
            run.cluster.workers.append(FakeWorker(3))
            run.cluster.workers[-1].open(run)

    run.on_round = on_round
    await run.train_model()
    assert run.ledger.is_exact(3)


@pytest.mark.slow
async def test_parts_by_speed_last_an_epoch_and_survive_a_resume(tmp_path):
    def run_with_speeds(**more):
        settings = {"slots": 3, "files": SEVEN, "master_epochs": 4, "round_samples": 70, "balance": "speed"}
        run = FakeRun(FakeCluster(3), **settings, **more)
        for worker, speed in zip(run.cluster.workers, (1000, 2000, 1), strict=True):

            def train(task, worker=worker, speed=speed):
                worker.compute_s = len(task.indices) / speed
                return FakeWorker.train(worker, task)

            worker.train = train
        return run

    run = run_with_speeds(checkpoint=tmp_path / "whole", checkpoint_keep=100)
    await run.train_model()
    assert run.ledger.is_exact(4)
    tasks = [request[1] for worker in run.cluster.workers for request in worker.asked if request[0] == "train"]
    shares = {(task.round, task.slot): len(task.indices) for task in tasks}
    assert max(shares[0, slot] for slot in range(3)) < 30  # equal shares before the first measurement
    for number in range(3, 12):
        assert shares[number, 1] > 1.5 * shares[number, 0] > shares[number, 2] > 0
        assert 65 <= sum(shares[number, slot] for slot in range(3)) <= 70
    for source in sorted((tmp_path / "whole").glob("round-*"))[:-1]:
        resumed = run_with_speeds(resume=source, checkpoint=tmp_path / f"on {source.name}")
        await resumed.train_model()
        assert resumed.ledger.is_exact(4)
        assert bits(resumed) == bits(run)


def test_the_ledger_counts_only_the_given_ranges_of_a_portion():
    (first, second) = portions([6, 6], [6, 6], "none", seed=0, epoch=0)
    ledger = FileLedger(12, [6, 6])
    ledger.add(first, 1, [[0, 2], [4, 6]])
    ledger.add(second, 1)
    assert ledger.counts.tolist() == [1, 1, 0, 0] + [1] * 8
    assert not ledger.is_exact(1)
    ledger.add(first[2:4], 1)
    assert ledger.is_exact(1)


def test_the_ledger_of_files_counts_exactly_the_samples_read():
    ledger = FileLedger(10, [4, 3, 3])
    first = Portion(shuffle="none", seed=0, epoch=0, slots=2, start=0, stop=5)
    ledger.add(first, 1)
    assert ledger.counts.tolist() == [1] * 5 + [0] * 5
    restored = FileLedger.from_facts(json.loads(json.dumps(ledger.to_facts())))
    restored.sizes = [4, 3, 3]
    assert np.array_equal(restored.counts, ledger.counts)
    second = Portion(shuffle="none", seed=0, epoch=0, slots=2, start=5, stop=10)
    ledger.add(Portion(**{**second.to_message(), "end": 2}), 1)
    assert not ledger.is_exact(1)
    assert ledger.summary()["least"] == 0
    ledger.add(Portion(**{**second.to_message(), "begin": 2}), 1)
    assert ledger.is_exact(1)
    ledger.add(first, 2, fed=1)
    assert not ledger.is_exact(1)
    assert ledger.counts.tolist() == [2] * 5 + [1] * 5
    ledger.add(first, 1)  # half of the samples count three times, and the other half once
    assert not ledger.is_exact(2)
    assert ledger.counts.tolist() == [3] * 5 + [1] * 5


def test_a_copy_of_the_ledger_does_not_change_with_it():
    first, second, third = (
        Portion(shuffle="none", seed=0, epoch=0, slots=3, start=start, stop=start + 4) for start in (0, 4, 8)
    )
    ledger = FileLedger(12, [6, 6])
    ledger.add(first, 1)
    before = copy.copy(ledger)
    ledger.add(second, 1, skipped=[1])
    ledger.add(third, 1)
    ledger.add(first[:2], 1)
    assert before.counts.tolist() == [1] * 4 + [0] * 8


def test_samples_left_out_stay_in_the_ledger():
    sizes = [4, 3, 5]
    first, second = portions(sizes, [6, 6], "window:2", seed=0, epoch=0)
    ledger = FileLedger(12, sizes)
    ledger.add(first, 1, skipped=[1])
    ledger.add(second, 1, skipped=[1])
    expected = [1] * 4 + [0] * 3 + [1] * 5
    restored = FileLedger.from_facts(json.loads(json.dumps(ledger.to_facts())))
    restored.sizes = sizes
    for copy_of_ledger in (ledger, restored):
        assert copy_of_ledger.counts.tolist() == expected
        assert not copy_of_ledger.is_exact(1)
        summary = copy_of_ledger.summary()
        assert (summary["exact"], summary["skipped"], summary["least"], summary["mean"]) == (False, [2], 0, 9 / 12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"files": (), "shuffle": "window:8"}, "shuffle='window:files=8' is for partition files"),
        ({"files": (), "data_memory": "1GB"}, "data_memory=1000000000 is for partition files"),
        ({"files": (), "on_bad": "skip"}, "on_bad='skip' is for partition files"),
        ({"worker_steps": 2}, "worker_steps=2 cannot be combined with partition files"),
        ({"partition": "power:1"}, "it needs all labels at once"),
        (
            {"balance": "speed", "round_samples": 20},
            "round_samples=20 cuts 203 samples into 11 rounds, too short for 3",
        ),
        ({"round_samples": 4}, "round_samples=4 cuts 203 samples into 51 rounds, too short for 3 slots"),
        ({"round_samples": 50, "worker_steps": 2}, "both set the length of a round"),
        ({"round_samples": 50, "worker_epochs": 2}, "both set the length of a round"),
    ],
)
async def test_settings_that_are_impossible_or_without_effect_are_refused_by_name(settings, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        await trained(**settings)


async def test_on_bad_is_refused_for_data_without_checksums():
    run = FakeRun(files=SEVEN, on_bad="skip")
    run.train_data.on_disk = False
    with pytest.raises(
        ConfigError, match=r"on_bad='skip' is for partition files and Parquet files, but self\.train_data is <"
    ):
        await run.train_model()
