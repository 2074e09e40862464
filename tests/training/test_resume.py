"""Tests of interrupted runs: a resumed run ends with the same bits. Tests of the master alone use fake workers."""

import os
import signal
from itertools import chain, repeat

import pytest

from ddlf.algorithms.outer import Nesterov
from ddlf.errors import CheckpointError, CheckpointMismatch
from ddlf.testing import FakeRun
from ddlf.training.checkpoints.checkpoint import CheckpointFolder
from tests.training.models import Quick, app, equal

pytestmark = pytest.mark.asyncio(loop_scope="session")

HARD = {
    "optimizer": "adam",
    "dropout": 0.3,
    "norm": True,
    "outer": Nesterov(learning_rate=0.7, momentum=0.9),
    "slots": 3,
}


class Interrupted(Exception):
    pass


def stop_after(trained, round):
    def on_round(record):
        if len(trained.cluster.workers) and record.version == round:
            raise Interrupted

    trained.on_round = on_round
    return trained


@pytest.mark.slow
async def test_resumed_run_ends_with_the_same_bits_on_one_new_worker(two_workers, tmp_path):
    """The resumed run has one worker for all slots, which has crashed. Before, slots moved between two workers."""
    options = dict(HARD, master_epochs=5, worker_epochs=2)
    plain = app(two_workers, **options)
    records = await plain.train_model()
    one_worker = two_workers.options(workers=[2])
    with pytest.raises(Interrupted):
        await stop_after(app(one_worker, checkpoint=tmp_path, **options), 2).train_model()
    os.kill(two_workers.workers[1].executor.pid, signal.SIGKILL)
    resumed = app(one_worker, checkpoint=tmp_path, resume="auto", **options)
    await resumed.train_model()
    assert equal(resumed.model.get_weights(), plain.model.get_weights())
    for resumed_state, plain_state in zip(resumed.optimizers, plain.optimizers, strict=True):
        assert equal(resumed_state, plain_state)
    assert [record.round for record in resumed.history] == [record.round for record in records]
    assert plain.ledger.is_exact(5)
    assert resumed.ledger.is_exact(5)


async def test_another_learning_rate_is_refused_by_name(two_workers, tmp_path):
    await app(two_workers, Quick, checkpoint=tmp_path).train_sync(1)
    with pytest.raises(CheckpointMismatch, match=r"optimizer learning_rate: 0.05 in the checkpoint, 0.001 now"):
        await app(two_workers, resume=tmp_path, learning_rate=0.001).train_model()


@pytest.mark.slow
async def test_another_run_is_not_resumed_and_the_error_names_the_difference(two_workers, tmp_path):
    await app(two_workers, Quick, checkpoint=tmp_path, master_epochs=1).train_model()
    with pytest.raises(CheckpointMismatch, match=r"batch_size: 16 in the checkpoint, 8 now") as caught:
        await app(two_workers, checkpoint=tmp_path, resume="auto", batch_size=8).train_model()
    assert "seed" not in str(caught.value)
    with pytest.raises(CheckpointMismatch, match="slots: 2 in the checkpoint, 3 now"):
        await app(two_workers, checkpoint=tmp_path, resume="auto", slots=3).train_model()
    with pytest.raises(CheckpointMismatch, match="model"):
        await app(two_workers, checkpoint=tmp_path, resume="auto", norm=True).train_model()


async def test_resume_auto_without_a_checkpoint_starts_a_new_run(tmp_path):
    trained = FakeRun(checkpoint=tmp_path / "new", resume="auto", master_epochs=1)
    assert len(await trained.train_model()) == 1


async def test_disk_full_for_a_while_does_not_end_training(tmp_path, monkeypatch):
    failures = chain([1, 1, 0], repeat(1))
    usual = CheckpointFolder.save

    def save(self, checkpoint):
        if next(failures):
            raise CheckpointError("no space: need 412 MB, free 96 MB")
        return usual(self, checkpoint)

    monkeypatch.setattr(CheckpointFolder, "save", save)
    trained = FakeRun(checkpoint=tmp_path, master_epochs=9)
    events = []
    trained.on_event = events.append
    with pytest.raises(CheckpointError, match="no space"):
        await trained.train_model()
    assert [event.kind for event in events if event.kind == "checkpoint"] == ["checkpoint"] * 4
    assert CheckpointFolder(tmp_path).newest().round == 3


async def test_a_crash_of_the_workers_and_of_the_run_together_change_no_bit(two_workers, tmp_path):
    options = dict(app_class=Quick, master_epochs=4)
    plain = app(two_workers, **options)
    await plain.train_model()
    with pytest.raises(Interrupted):
        await stop_after(app(two_workers, checkpoint=tmp_path, **options), 2).train_model()
    for worker in two_workers.workers:
        os.kill(worker.executor.pid, signal.SIGKILL)
    resumed = app(two_workers, checkpoint=tmp_path, resume="auto", **options)
    await resumed.train_model()
    assert equal(resumed.model.get_weights(), plain.model.get_weights())
