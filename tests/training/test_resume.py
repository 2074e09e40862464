"""A run that was interrupted and resumed ends with the same bits: on real workers, and of made-up ones where only the master's side is at stake."""

import os
import signal
from functools import partial
from itertools import chain, repeat

import pytest

from ddlf.algorithms.outer import Nesterov
from ddlf.errors import CheckpointError, CheckpointMismatch, ConfigError
from ddlf.testing import FakeCluster, FakeRun
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


async def interrupted_and_resumed(make, folder, stop):
    with pytest.raises(Interrupted):
        await stop_after(make(checkpoint=folder), stop).train_model()
    resumed = make(checkpoint=folder, resume="auto")
    await resumed.train_model()
    return resumed


async def is_the_same_alone(two, one, folder, lossy=False):
    """What ran on two workers, and on one which carries all slots and is interrupted, resumed there."""
    plain = two()
    records = await plain.train_model()
    resumed = await interrupted_and_resumed(one, folder, 2)
    assert equal(resumed.model.get_weights(), plain.model.get_weights())
    for mine, others in zip(resumed.optimizers, plain.optimizers, strict=True):
        assert equal(mine, others)
    assert [record.round for record in resumed.history] == [record.round for record in records]
    assert all((record.error > 0) == lossy for record in resumed.history), "or no codec was used"
    assert plain.ledger.is_exact(5)
    assert resumed.ledger.is_exact(5)


async def test_a_resumed_run_ends_with_the_same_bits(two_workers, tmp_path):
    """Also when one worker carries all slots, which had moved between two before."""
    options = dict(HARD, master_epochs=5, worker_epochs=2)
    two, one = (partial(app, workers, **options) for workers in (two_workers, two_workers.options(workers=[2])))
    await is_the_same_alone(two, one, tmp_path)


@pytest.mark.parametrize(
    "options", [{"codec": "topk:0.05"}, {"codec": "int8", "weights_codec": "delta:int8"}], ids=["updates", "weights"]
)
async def test_so_does_one_whose_codecs_lose_something_of_updates_or_of_weights_too(tmp_path, options):
    two, one = (partial(FakeRun, FakeCluster(n), slots=3, master_epochs=5, **options) for n in (2, 1))
    await is_the_same_alone(two, one, tmp_path, lossy=True)


@pytest.mark.slow
async def test_trained_again_an_app_ends_with_the_bits_of_one_training(two_workers):
    one_worker = two_workers.options(workers=[1])
    whole, parts = app(one_worker, **HARD), app(one_worker, **HARD)
    await whole.train_sync(2)
    await parts.train_sync(1)
    await parts.train_sync(1)
    assert equal(parts.model.get_weights(), whole.model.get_weights())
    parts.learning_rate = 0.001
    with pytest.raises(CheckpointMismatch, match=r"fresh=True.:\n  optimizer learning_rate: 0.05 before, 0.001 now"):
        await parts.train_sync(1)


async def test_another_learning_rate_is_refused_by_name(two_workers, tmp_path):
    await app(two_workers, Quick, checkpoint=tmp_path).train_sync(1)
    with pytest.raises(CheckpointMismatch, match=r"optimizer learning_rate: 0.05 in the checkpoint, 0.001 now"):
        await app(two_workers, resume=tmp_path, learning_rate=0.001).train_model()


async def test_between_two_checkpoints_the_last_state_is_written_when_training_is_interrupted(tmp_path):
    with pytest.raises(Interrupted):
        await stop_after(FakeRun(checkpoint=tmp_path, checkpoint_every=10, master_epochs=5), 3).train_model()
    assert [entry.round for entry in CheckpointFolder(tmp_path).entries()] == [3]


async def test_asynchronous_training_goes_on_with_the_rounds_that_each_slot_has_left(tmp_path):
    resumed = await interrupted_and_resumed(partial(FakeRun, mode="async"), tmp_path, 3)
    done = [(record.slot, record.round) for record in resumed.history]
    assert sorted(done) == [(slot, number) for slot in (1, 2) for number in (1, 2, 3, 4)]
    assert [record.version for record in resumed.history] == list(range(1, 9))
    assert resumed.ledger.is_exact(4)


@pytest.mark.slow
async def test_a_longer_run_after_a_shorter_last_round_has_the_batches_that_each_optimizer_should_see(
    two_workers, tmp_path
):
    again = app(two_workers, checkpoint=tmp_path, master_epochs=3, worker_epochs=2)
    await again.train_model()
    longer = app(two_workers, resume=tmp_path, master_epochs=6, worker_epochs=2)
    records = await longer.train_model()
    assert [record.epochs for record in longer.history] == [2, 1, 2, 1]
    assert [(record.round, record.rounds) for record in records] == [(3, 4), (4, 4)]
    assert longer.ledger.is_exact(6)
    fits = [int(state[0]) for state in longer.optimizers]
    assert fits == [6 * -(-part // 16) for part in (102, 101)], "batches that each optimizer has seen"


async def test_a_run_can_be_made_longer(tmp_path):
    plain = FakeRun(master_epochs=4)
    await plain.train_model()
    await FakeRun(checkpoint=tmp_path, master_epochs=2).train_model()
    longer = FakeRun(resume=tmp_path, master_epochs=4)
    await longer.train_model()
    assert equal(longer.model.get_weights(), plain.model.get_weights())


async def test_another_run_is_not_resumed_and_the_text_says_what_differs(two_workers, tmp_path):
    await app(two_workers, Quick, checkpoint=tmp_path, master_epochs=1).train_model()
    with pytest.raises(CheckpointMismatch, match=r"batch_size: 16 in the checkpoint, 8 now") as caught:
        await app(two_workers, checkpoint=tmp_path, resume="auto", batch_size=8).train_model()
    assert "seed" not in str(caught.value)
    with pytest.raises(CheckpointMismatch, match="slots: 2 in the checkpoint, 3 now"):
        await app(two_workers, checkpoint=tmp_path, resume="auto", slots=3).train_model()
    with pytest.raises(CheckpointMismatch, match="model"):
        await app(two_workers, checkpoint=tmp_path, resume="auto", norm=True).train_model()


async def test_checkpoints_of_an_earlier_run_are_not_written_over(tmp_path):
    await FakeRun(checkpoint=tmp_path, master_epochs=1).train_model()
    with pytest.raises(ConfigError, match=r"has checkpoints already, the newest of round 1.*--resume auto"):
        await FakeRun(checkpoint=tmp_path, master_epochs=1).train_model()


async def test_nothing_to_resume_from_is_said(two_workers, tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no folder .*nothing; check its name"):
        await app(two_workers, resume=tmp_path / "nothing").train_model()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        await app(two_workers, resume=tmp_path).train_model()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="needs a folder"):
        await app(two_workers, resume="auto").train_model()


async def test_with_nothing_there_resume_auto_begins_anew(tmp_path):
    trained = FakeRun(checkpoint=tmp_path / "new", resume="auto", master_epochs=1)
    assert len(await trained.train_model()) == 1


async def test_a_disk_that_is_full_for_a_while_does_not_end_training_and_for_ever_does(tmp_path, monkeypatch):
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


@pytest.mark.parametrize(
    "kind", [{"app_class": Quick}, pytest.param(HARD, marks=pytest.mark.slow)], ids=["quick", "hard"]
)
async def test_a_crash_of_a_worker_and_of_the_run_together_change_no_bit(two_workers, tmp_path, kind):
    options = dict(kind, master_epochs=4)
    plain = app(two_workers, **options)
    await plain.train_model()
    with pytest.raises(Interrupted):
        await stop_after(app(two_workers, checkpoint=tmp_path, **options), 2).train_model()
    for worker in two_workers.workers:
        os.kill(worker.facts["pid"], signal.SIGKILL)
    resumed = app(two_workers, checkpoint=tmp_path, resume="auto", **options)
    await resumed.train_model()
    assert equal(resumed.model.get_weights(), plain.model.get_weights())
