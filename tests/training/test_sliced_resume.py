"""Tests of a run that continues from slices: each worker reads its slice, and the master reads none. No Keras."""

import os
import shutil

import numpy as np
import pytest

from ddlf.algorithms.flat_weights import Rows
from ddlf.errors import CheckpointCorrupt, CheckpointError, WorkerLost
from ddlf.events import CheckpointDamaged, Warned
from ddlf.testing import FakeWorker
from ddlf.training.checkpoints import contents, slice_reader
from ddlf.training.checkpoints.checkpoint import CheckpointFolder
from ddlf.training.checkpoints.durable import seal, unseal
from ddlf.training.checkpoints.slice_reader import SliceLocation, SliceReport, read_location
from ddlf.training.checkpoints.slices import Slices
from ddlf.training.strategies.downpour.server import Server
from tests.training.runs import FROZEN, START, bits, events_of, run_of, trained

pytestmark = pytest.mark.usefixtures("short_waits")
SYNC = {"exchange": "sharded", "outer": "nesterov", "master_epochs": 4}
PLAIN = {"exchange": "sharded", "outer": "subtract", "codec": "int8", "optimizer_state": "stays", "master_epochs": 4}
DOWNPOUR = {"mode": "downpour", "master_epochs": 2, "push_rule": "adagrad", "shards": 3, "softsync": 1}
BOTH = pytest.mark.parametrize("settings", [SYNC, DOWNPOUR], ids=["sharded", "downpour"])


@pytest.fixture
def read_by_master(monkeypatch):
    """The numbers of the slices that the master has read. The number -1 stands for all slices."""
    slice_numbers, read, read_one, folder = [], Slices.read, Slices.read_one, contents._checked
    monkeypatch.setattr(Slices, "read", lambda slices: (slice_numbers.append(-1), read(slices))[1])
    monkeypatch.setattr(
        Slices, "read_one", lambda slices, number: (slice_numbers.append(number), read_one(slices, number))[1]
    )
    monkeypatch.setattr(
        contents,
        "_checked",
        lambda path, file: (slice_numbers.append(path.name) if "slice" in path.name else 0, folder(path, file))[1],
    )
    return slice_numbers


def hide_folder(run, *workers):
    """Hide the folder from some workers."""
    for number in workers:
        worker = run.cluster.workers[number - 1]

        async def rpc(request, timeout_s=None, worker=worker):
            if request.args[2] in ("look_at", "read_slice"):
                return SliceReport(visible=False)
            return await FakeWorker.rpc(worker, request, timeout_s)

        worker.rpc = rpc


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize(
    "settings", [SYNC, PLAIN, {**SYNC, "weights_codec": "bfloat16"}], ids=["kept", "stays", "codec"]
)
async def test_workers_read_their_slices_and_resume_with_the_same_bits(settings, workers, read_by_master, tmp_path):
    uninterrupted = await trained(settings, checkpoint=tmp_path, checkpoint_keep=99)
    run = run_of(settings, workers, resume=tmp_path / "round-000002", checkpoint=tmp_path / "there")
    read_at_rounds = []
    run.on_round = lambda record: read_at_rounds.append(list(read_by_master))
    read_by_master.clear()
    await run.train_model()
    assert read_at_rounds[0] == []
    assert bits(run) == bits(uninterrupted)
    assert not any(request[0] in ("hold", "take_slice") for worker in run.cluster.workers for request in worker.asked)
    assert not [event for event in events_of(run, Warned) if event.about == "checkpoint"]


async def test_shard_owners_read_the_bits_that_were_written(read_by_master, tmp_path, monkeypatch):
    await trained(DOWNPOUR, checkpoint=tmp_path, checkpoint_keep=99)
    saved = CheckpointFolder(tmp_path).load("round-000003").arrays
    weights, push = list(saved["weights"].values()), list(saved["state_push"].values())
    rows = Rows.of(weights, [path not in FROZEN for path in START])
    make_server, shards = Server.from_state.__func__, []

    def recorded(cls, *arguments):
        server = make_server(cls, *arguments)
        shards.append(
            (
                server.settings.part,
                server.weights.copy(),
                server.rest.copy(),
                [row.copy() for row in server.state],
                server,
            )
        )
        return server

    monkeypatch.setattr(Server, "from_state", classmethod(recorded))
    run, read_at_rounds = run_of(DOWNPOUR, 2, resume=tmp_path / "round-000003", checkpoint=tmp_path / "there"), []
    run.on_round = lambda record: read_at_rounds.append(list(read_by_master))
    read_by_master.clear()
    await run.train_model()
    assert read_at_rounds[0] == []
    assert run.ledger.is_exact(2)
    trained_row, rest = rows.row(weights, rows.trained), rows.row(weights, rows.rest)
    first = {part: facts for part, *facts in reversed(shards)}
    assert sorted(first) == [cut_part[0] for cut_part in rows.cut(3)]
    assert np.concatenate([first[part][1] for part in sorted(first)]).tobytes() == rest.tobytes()
    for (begin, end), (values, _, state, server) in first.items():
        assert values.tobytes() == trained_row[begin:end].tobytes()
        assert state[0].tobytes() == push[0][begin:end].tobytes()
        assert server.softsync.total.size == end - begin
    owned = [
        sorted(request[2] for request in worker.asked if request[0] == "own_stored") for worker in run.cluster.workers
    ]
    read = [
        sorted(request[1] for request in worker.asked if request[0] == "read_slice") for worker in run.cluster.workers
    ]
    assert read == owned == [[0, 2], [1]]


@BOTH
async def test_master_sends_slices_to_workers_that_see_no_folder_and_warns_once(settings, read_by_master, tmp_path):
    uninterrupted = await trained(settings, checkpoint=tmp_path, checkpoint_keep=99)
    run = run_of(settings, resume=tmp_path / "round-000002", checkpoint=tmp_path / "there")
    hide_folder(run, 1, 2, 3)
    opened_by_master, take = [], Slices._with_slice

    def one_at_a_time(slices, number, do):
        opened_by_master.append(number)
        return take(slices, number, do)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Slices, "_with_slice", one_at_a_time)
        await run.train_model()
    assert run.ledger.is_exact(run.master_epochs)
    assert -1 not in read_by_master[: read_by_master.index(-1) if -1 in read_by_master else None]
    assert {number for number in read_by_master if type(number) is int and number >= 0} >= {0, 1, 2}
    messages = [
        event.why for event in events_of(run, Warned) if "does not see" in event.why and "sends it" in event.why
    ]
    assert len(messages) == len(set(messages)) >= 2
    assert str(tmp_path / "round-000002") in messages[0]
    if settings is SYNC:
        assert bits(run) == bits(uninterrupted)


def missing(folder):
    (folder / "slice_0002.safetensors").unlink()


def flipped(folder):
    path = folder / "slice_0002.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def shorter(folder):
    path = folder / "slice_0002.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


def of_another_round(folder):
    shutil.copy(folder.parent / "round-000001" / "slice_0002.safetensors", folder)


def of_another_run(folder):
    path = folder / "slice_0002.safetensors"
    data = path.read_bytes()
    at = data.index(b'"run":"') + 7
    path.write_bytes(data[:at] + b"0123456789abcdef" + data[at + 16 :])


WRONG = {
    missing: r"slice_0002.safetensors is missing",
    flipped: r"slice_0002.safetensors is damaged: expected SHA-256 \w+, found SHA-256 \w+",
    shorter: r"slice_0002.safetensors is damaged: expected [\d,]+ bytes, found [\d,]+ bytes",
    of_another_round: r"slice_0002.safetensors is a slice of round 1 of this run, and not of round 2 of run \w+",
    of_another_run: r"slice_0002.safetensors is a slice of round 2 of another run, 0123456789abcdef, and not of",
}


@BOTH
@pytest.mark.parametrize(
    "sees_folder",
    [pytest.param(True, id="a worker reads"), pytest.param(False, id="the master reads", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("harm", WRONG, ids=lambda harm: harm.__name__)
async def test_unusable_slice_is_named_and_the_previous_checkpoint_used(harm, sees_folder, settings, tmp_path):
    await trained(settings, checkpoint=tmp_path, checkpoint_keep=99)
    for folder in sorted(tmp_path.glob("round-*"))[2:]:
        shutil.rmtree(folder)
    harm(tmp_path / "round-000002")
    run = run_of(settings, resume=tmp_path / "round-000002", checkpoint=tmp_path / "there")
    hide_folder(run, *([] if sees_folder else [1, 2, 3]))
    with pytest.raises(CheckpointCorrupt, match=WRONG[harm]) as caught:
        await run.train_model()
    assert caught.value.file == str(tmp_path / "round-000002" / "slice_0002.safetensors")
    resumed = run_of(settings, resume="auto", checkpoint=tmp_path)
    hide_folder(resumed, *([] if sees_folder else [1, 2, 3]))
    await resumed.train_model()
    assert resumed.ledger.is_exact(resumed.master_epochs)
    (damaged,) = events_of(resumed, CheckpointDamaged)
    assert "round-000001 is used instead" in damaged.why
    if settings is SYNC:
        assert bits(resumed) == bits(await trained(SYNC))


async def test_resume_with_damaged_checkpoints_only_is_an_error(tmp_path):
    await trained(SYNC, checkpoint=tmp_path, checkpoint_keep=99, master_epochs=3)
    shutil.rmtree(tmp_path / "round-000003")  # the master wrote this checkpoint
    for folder in tmp_path.glob("round-*"):
        flipped(folder)
    with pytest.raises(
        CheckpointError, match=r"no complete checkpoint in .*; found 2 damaged, the newest because .*000002"
    ):
        await run_of(SYNC, resume="auto", checkpoint=tmp_path).train_model()


@BOTH
async def test_run_continues_if_a_worker_is_lost_while_it_reads(settings, tmp_path):
    uninterrupted = await trained(settings, checkpoint=tmp_path, checkpoint_keep=99)
    for verb in ("look_at", "read_slice"):
        run = run_of(settings, resume=tmp_path / "round-000002", checkpoint=tmp_path / verb)
        worker = run.cluster.workers[0]

        async def rpc(request, timeout_s=None, worker=worker, verb=verb):
            if request.args[2] == verb:
                worker.lost = True
                raise WorkerLost("it was lost", worker=worker.name)
            return await FakeWorker.rpc(worker, request, timeout_s)

        async def reconnect(worker=worker):
            if worker.lost:
                raise WorkerLost("it was lost", worker=worker.name)

        worker.rpc, worker.reconnect = rpc, reconnect
        await run.train_model()
        assert run.ledger.is_exact(run.master_epochs)
        if settings is SYNC:
            assert bits(run) == bits(uninterrupted)


async def test_workers_read_the_last_checkpoint_after_all_were_lost(read_by_master, tmp_path):
    run = run_of(SYNC, checkpoint=tmp_path, checkpoint_keep=99, wait_for_workers_s=5)
    lost = []

    def lose(record):
        if record.version == 2 and not lost:
            lost.append([len(worker.asked) for worker in run.cluster.workers])
            for worker in run.cluster.workers:
                worker.lost = True

    run.on_round = lose
    await run.train_model()
    verbs = [
        request[0]
        for worker, since in zip(run.cluster.workers, lost[0], strict=True)
        for request in worker.asked[since:]
    ]
    assert "hold_restored" in verbs
    assert "hold" not in verbs
    assert bits(run) == bits(await trained(SYNC))


async def test_another_manifest_at_that_path_is_another_checkpoint(tmp_path):
    """If two machines have a folder with this path, the worker does not read the other checkpoint."""
    await trained(SYNC, checkpoint=tmp_path, checkpoint_keep=99)
    slices = CheckpointFolder(tmp_path).load("round-000002", skip_slices=True).slices
    manifest = tmp_path / "round-000002" / "manifest.json"
    content = unseal(manifest.read_bytes(), manifest)
    manifest.write_bytes(seal({**content, "epoch": content["epoch"] + 1}))
    assert read_location(SliceLocation.of(slices, 0), load=True) == (SliceReport(visible=False), {})


async def test_checkpoint_completed_in_the_meantime_is_read(tmp_path, monkeypatch):
    await trained(SYNC, checkpoint=tmp_path, checkpoint_keep=99)
    slices = CheckpointFolder(tmp_path).load("round-000002", skip_slices=True).slices
    writing = tmp_path / ".writing-round-000002"
    os.rename(slices.final, writing)
    slices.folder, slices.manifest = writing, ""
    location, read = SliceLocation.of(slices, 0), slice_reader.read

    def late(path, *facts):
        if writing.exists():
            os.rename(writing, slices.final)
        return read(path, *facts)

    monkeypatch.setattr(slice_reader, "is_seen", lambda *folder: True)  # every worker sees the folder of checkpoints
    monkeypatch.setattr(slice_reader, "read", late)
    answer, arrays = read_location(location, load=True)
    assert (answer, arrays != {}) == (SliceReport(visible=True), True)
