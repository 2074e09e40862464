"""Tests of repartitioned files: a running training changes to new files of the same samples when an epoch begins."""

import random

import numpy as np
import pytest

from ddlf.errors import DatasetError, WorkerLost
from ddlf.events import FilesChanged
from ddlf.testing import FakeCluster, FakeRun, FakeWorker
from ddlf.testing.fake_run import MadeUp
from ddlf.training.progress import FileLedger

FILES = {3: (70, 70, 63), 5: (41, 41, 41, 40, 40), 7: (31, 17, 40, 29, 28, 29, 29)}
"""203 samples."""
ROUNDS = {2: 5, 4: 7}
"""The number of new files, by the round before the repartition."""


@pytest.fixture(autouse=True)
def no_disk(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def bits(run):
    return [array.tobytes() for array in [*run.model.get_weights(), *(a for state in run.optimizers for a in state)]]


def run_of(workers=3, **settings):
    return FakeRun(FakeCluster(workers), **{"slots": 3, "files": FILES[3], "master_epochs": 6, **settings})


def repartition_during(run, rounds=ROUNDS):
    """Repartition the data after some rounds. Return the rounds of the events, and the versions read in each round."""
    changes, versions_read = [], {}
    run.subscribe(lambda event: isinstance(event, FilesChanged) and changes.append((event.round, event.files)))

    def on_round(record):
        if record.round in rounds and record.slot in (None, 1):
            run.train_data.repartition(FILES[rounds[record.round]])

    run.on_round = on_round
    for worker in run.cluster.workers:

        def train(task, worker=worker, usual=worker.train):
            versions_read.setdefault(task.round, set()).add((task.indices.version, task.indices.epoch))
            return usual(task)

        worker.train = train
    return changes, versions_read


@pytest.mark.parametrize("length", [{}, {"round_samples": 70}], ids=["epochs", "rounds within"])
@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_each_epoch_reads_one_version_of_repartitioned_files(mode, length):
    run = run_of(mode=mode, **length)
    changes, versions_read = repartition_during(run)
    await run.train_model()
    assert run.ledger.is_exact(6)
    assert (run.ledger.counts == 6).all()
    epochs = {}
    for versions in versions_read.values():
        for version, epoch in versions:
            epochs.setdefault(epoch, set()).add(version)
    assert all(len(versions) == 1 for versions in epochs.values())
    assert [files for _, files in changes] == [5, 7]
    if mode == "sync" and not length:
        assert changes == [(3, 5), (5, 7)]


@pytest.mark.parametrize("length", [{}, {"round_samples": 70}], ids=["epochs", "rounds within"])
async def test_change_of_files_survives_losses_and_resumes(length, tmp_path):
    undisturbed = run_of(checkpoint=tmp_path / "whole", checkpoint_keep=100, **length)
    changes, _ = repartition_during(undisturbed)
    await undisturbed.train_model()
    chance, lost, run = random.Random(2), [], run_of(workers=2, **length)
    for worker in run.cluster.workers:

        def train(task, worker=worker):
            reply = FakeWorker.train(worker, task)
            if chance.random() < 0.3 and len(lost) < 20:
                lost.append(worker.id)
                worker.lost = True
                raise WorkerLost("it was lost", worker=worker.name)
            return reply

        worker.train = train
    repartition_during(run)
    await run.train_model()
    assert lost
    assert run.ledger.is_exact(6)
    assert bits(run) == bits(undisturbed)
    last = changes[-1][0]  # no new files are written after this round, so a resumed run knows all versions
    for source in sorted((tmp_path / "whole").glob("round-*"))[last - 1 : -1]:
        resumed = run_of(
            workers=1, train_data=undisturbed.train_data, resume=source, checkpoint=tmp_path / source.name, **length
        )
        await resumed.train_model()
        assert bits(resumed) == bits(undisturbed)
        assert resumed.ledger.is_exact(6)


async def test_epoch_ends_with_the_files_it_began_with_after_a_resume(tmp_path):
    first = run_of(round_samples=70, checkpoint=tmp_path / "a", checkpoint_keep=100)
    _, versions_read = repartition_during(first, {1: 5})
    await first.train_model()
    assert [sorted(version for version, _ in versions_read[number]) for number in range(4)] == [[1], [1], [1], [2]]
    resumed = run_of(
        round_samples=70,
        train_data=first.train_data,
        resume=tmp_path / "a" / "round-000002",
        checkpoint=tmp_path / "b",
    )
    _, versions_read_resumed = repartition_during(resumed, {})
    await resumed.train_model()
    assert {number: versions_read_resumed[number] for number in versions_read_resumed} == {
        number: versions_read[number] for number in versions_read if number > 1
    }
    assert bits(resumed) == bits(first)


async def test_a_store_that_fails_for_a_while_changes_no_bit():
    run, plain = run_of(), run_of()

    def newer(version):
        raise DatasetError("cannot read s3://bucket/mnist: the store answered 503")

    run.train_data.newer = newer
    await run.train_model()
    await plain.train_model()
    assert bits(run) == bits(plain)


def test_ranges_of_two_versions_do_not_make_an_epoch():
    data = MadeUp((4, 3, 3))
    data.repartition((5, 5))
    from ddlf.algorithms.reading_order import Portion

    first = Portion(shuffle="none", seed=0, epoch=0, slots=2, start=0, stop=5, version=1)
    second = Portion(shuffle="none", seed=0, epoch=0, slots=2, start=5, stop=10, version=2)
    ledger = FileLedger(10)
    ledger.at = data.in_version
    ledger.add(first, 1)
    ledger.add(second, 1)
    assert not ledger.is_exact(1)
    assert np.array_equal(ledger.counts, [1] * 10)
