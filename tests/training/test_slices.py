"""Tests of checkpoints in which each worker writes its slice: the master receives no weights, and losses change no bit."""

from types import SimpleNamespace
from unittest import mock

import pytest

from ddlf.errors import CheckpointError, WorkerLost
from ddlf.events import CheckpointFailed, CheckpointWritten, Warned
from ddlf.testing import FakeWorker
from ddlf.training.checkpoints.checkpoint import CheckpointFolder
from ddlf.training.checkpoints.slices import NotWritten
from ddlf.training.exchanges.sharded.master import Sharded
from tests.training.runs import START, bits, events_of, run_of, trained

pytestmark = pytest.mark.usefixtures("short_waits")
SYNC = {"exchange": "sharded", "outer": "nesterov", "master_epochs": 4}
DOWNPOUR = {"mode": "downpour", "master_epochs": 2, "push_rule": "adagrad", "shards": 3, "softsync": 2}
BRINGS = {"values", "kept", "snapshot", "give"}
"""Calls that bring data of the model's size to the master."""


def replace_answer(worker, verb, answer):
    """Replace a worker's answer to a verb of the master."""

    async def rpc(request, timeout_s=None):
        if request.args[2] == verb and (replacement := answer()) is not None:
            return replacement
        return await FakeWorker.rpc(worker, request, timeout_s)

    worker.rpc = rpc


@pytest.mark.parametrize("settings", [SYNC, DOWNPOUR], ids=["sharded", "downpour"])
async def test_master_receives_no_weights_for_checkpoints(settings, tmp_path):
    run = run_of(settings, checkpoint=tmp_path, checkpoint_keep=99)
    brought = []
    run.on_round = lambda record: brought.append(
        sum(request[0] in BRINGS for worker in run.cluster.workers for request in worker.asked)
    )
    await run.train_model()
    assert not any(brought[:-1])
    written = events_of(run, CheckpointWritten)
    assert [event.slices for event in written] == [3] * (len(run.history) - 1) + [0]
    assert not any(event.through for event in written)
    assert not [event for event in events_of(run, Warned) if event.about == "checkpoint"]


@pytest.mark.parametrize("workers", [1, 2, 5])
async def test_any_number_of_workers_resumes_slices_with_the_same_bits(workers, tmp_path):
    uninterrupted = await trained(SYNC, checkpoint=tmp_path, checkpoint_keep=99)
    more = {"checkpoint": tmp_path / "there", "workers": workers}
    run = await trained(SYNC, resume=tmp_path / "round-000002", **more)
    assert bits(run) == bits(uninterrupted)


@pytest.mark.parametrize("settings", [SYNC, DOWNPOUR], ids=["sharded", "downpour"])
@pytest.mark.parametrize("sees_folder", [False, True], ids=["sees no folder", "cannot write"])
async def test_slices_of_a_worker_that_cannot_write_pass_the_master(settings, sees_folder, tmp_path):
    run = run_of(settings, checkpoint=tmp_path, checkpoint_keep=99)
    refusal = NotWritten(by=2, reason="no such folder", visible=sees_folder)
    replace_answer(run.cluster.workers[1], "write", lambda: (refusal, None))
    await run.train_model()
    assert [event.through for event in events_of(run, CheckpointWritten)] == [(2,)] * (len(run.history) - 1) + [()]
    (warned,) = [event for event in events_of(run, Warned) if event.about == "checkpoint"]
    assert (
        "worker 2 could not write its slice" in warned.why
        if sees_folder
        else "worker 2 does not see the folder" in warned.why
    )
    checkpoint = CheckpointFolder(tmp_path).load("round-000002")
    assert [array.shape for array in checkpoint.arrays["weights"].values()] == [array.shape for array in START.values()]
    if settings is SYNC:
        resumed = await trained(SYNC, resume=tmp_path / "round-000002", checkpoint=tmp_path / "there")
        assert bits(resumed) == bits(run) == bits(await trained(SYNC))


@pytest.mark.parametrize("settings", [SYNC, DOWNPOUR], ids=["sharded", "downpour"])
async def test_other_workers_write_the_slices_of_a_worker_lost_while_it_writes(settings, tmp_path):
    run = run_of(settings, checkpoint=tmp_path, checkpoint_keep=99)
    worker, count = run.cluster.workers[1], []

    def lost():
        count.append(1)
        if len(count) == 2:
            worker.lost = True
            raise WorkerLost("it was lost", worker=worker.name)

    replace_answer(worker, "write", lost)
    await run.train_model()
    assert run.ledger.is_exact(run.master_epochs)
    assert len(events_of(run, CheckpointWritten)) == len(run.history)
    assert not events_of(run, CheckpointFailed)
    assert all(entry.complete for entry in CheckpointFolder(tmp_path).entries())
    if settings is SYNC:
        assert bits(run) == bits(await trained(SYNC))


@pytest.mark.parametrize("settings", [SYNC, DOWNPOUR], ids=["sharded", "downpour"])
async def test_training_continues_with_an_event_if_there_is_no_space_for_slices(settings, tmp_path):
    run = run_of(settings, checkpoint=tmp_path, checkpoint_keep=99)
    begin, save = CheckpointFolder.begin, CheckpointFolder.save

    def begun(folder, number, training):
        if number == 2:
            raise CheckpointError("no space")
        return begin(folder, number, training)

    def saved(folder, checkpoint):
        if checkpoint.round == 2:
            raise CheckpointError("no space: need more")
        return save(folder, checkpoint)

    with mock.patch.object(CheckpointFolder, "begin", begun), mock.patch.object(CheckpointFolder, "save", saved):
        await run.train_model()
    (failed,) = events_of(run, CheckpointFailed)
    assert failed.why == "no space: need more"
    assert run.ledger.is_exact(run.master_epochs)
    assert not list(tmp_path.glob(".writing*"))
    assert not (tmp_path / "round-000002").exists()


async def test_a_hook_reads_the_model_from_the_checkpoint(tmp_path):
    kernels = []
    run = run_of(DOWNPOUR, checkpoint=tmp_path)
    run.on_round = lambda record: kernels.append(run.model.get_weights()[0].tobytes())
    await run.train_model()
    assert len(set(kernels)) > 1  # fewer than the records, because several slots may push before a hook reads
    verbs = [request[0] for request in run.cluster.workers[0].asked]
    assert verbs.count("snapshot") <= 2  # once for the last commit, and once at the end


async def test_mean_is_stored_beside_the_state_of_a_slot():
    lengths = [{"control": 3}]
    slices = SimpleNamespace(left=[])

    async def first_slice(*_):
        return 2

    async def write_states(*_):
        return list(lengths)

    async def mean(*_):
        return {"optimizer": 3}

    sharded = SimpleNamespace(
        _remote_weights=SimpleNamespace(write=first_slice, write_mean=mean),
        _states=SimpleNamespace(write=write_states, averaged="optimizer"),
        _run=SimpleNamespace(facts=SimpleNamespace(names=[]), slots=1),
    )
    await Sharded._write(sharded, SimpleNamespace(means={"optimizer": False}), [], slices)
    assert slices.left == [{"control": 3, "optimizer": 3}]
    assert lengths == [{"control": 3}]  # these lengths locate a slot's slice when its worker is lost
