"""Tests of runs that are stopped or cancelled: they keep their complete rounds."""

import asyncio
import threading

import pytest

from ddlf.training.checkpoints.checkpoint import CheckpointFolder
from tests.training.models import Quick, equal

pytestmark = pytest.mark.asyncio(loop_scope="session")


class Stopping(Quick):
    master_epochs = 5

    def on_round(self, record):
        if record.version == 2:
            self.answers = [self.stop_training(), self.stop_training()]


@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.slow)])
async def test_stop_training_ends_after_the_round_and_stops_no_later_run(two_workers, mode):
    app = Stopping(two_workers)
    app.mode = mode
    assert not app.stop_training()
    records = await app.train_model()
    # In asynchronous training, another update may arrive before the hook of the second one runs.
    assert len(records) == 2 or (mode == "async" and len(records) == 3)
    assert app.answers == [True, True]
    assert not app.stop_training()
    app.on_round = lambda record: None
    assert len(await app.train_sync()) == 5


@pytest.mark.slow
async def test_a_cancelled_run_keeps_all_of_its_complete_rounds(two_workers, tmp_path):
    app = Quick(two_workers)
    app.checkpoint = tmp_path
    app.master_epochs = 50
    app.on_round = lambda record: record.round == 2 and running.cancel()
    await app.prepare()
    first = app.model.get_weights()
    running = asyncio.ensure_future(app.train_sync())
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [record.round for record in app.history] == [1, 2]
    assert not equal(app.model.get_weights(), first)
    assert app.ledger.is_exact(2)
    assert (tmp_path / "round-000002").is_dir()
    app.checkpoint = None
    assert len(await app.train_sync(master_epochs=1)) == 1


async def test_a_run_cancelled_while_it_writes_its_last_checkpoint_completes_it(two_workers, tmp_path, monkeypatch):
    loop, begun, go_on, save = asyncio.get_running_loop(), asyncio.Event(), threading.Event(), CheckpointFolder.save

    def slowly(*arguments):
        loop.call_soon_threadsafe(begun.set)
        go_on.wait()
        return save(*arguments)

    monkeypatch.setattr(CheckpointFolder, "save", slowly)
    app = Quick(two_workers)
    app.checkpoint, app.master_epochs = tmp_path, 1
    running = asyncio.ensure_future(app.train_sync())
    await begun.wait()
    while app.run_context.stop is not None:  # noqa: ASYNC110  the round is over
        await asyncio.sleep(0)
    for _ in range(2):
        running.cancel()
        await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (tmp_path / "round-000001").is_dir()
