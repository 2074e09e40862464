"""Tests of the state of a slot: it survives rounds, moves of the slot, and interrupted runs."""

import asyncio

import numpy as np
import pytest

from ddlf.cluster.link import Notice
from ddlf.errors import AppMissing
from ddlf.testing import FakeCluster, FakeRun
from ddlf.testing.fake_run import FakeWorker
from ddlf.training.checkpoints.checkpoint import CheckpointFolder
from ddlf.training.slot.parts import send_update
from ddlf.training.slot.task import HELD, RESIDUAL, KeptStates, Task
from tests.training.models import equal
from tests.training.test_exchange import tensors

LOSSY = [{"codec": "int8"}, {"codec": "topk:0.05"}, {"codec": "int8", "weights_codec": "delta:int8"}]
IDS = ["int8", "topk", "delta"]


class Interrupted(Exception):
    pass


def interrupted_after(app, version):
    def on_round(record):
        if record.version == version:
            raise Interrupted

    app.on_round = on_round
    return app


async def trained(cluster=None, **options):
    app = FakeRun(cluster, master_epochs=6, **options)
    await app.train_model()
    assert all((record.error > 0) == (app.codec != "float32") for record in app.history), "or no codec was used"
    return app


def requests_of(app, name):
    return [entry for worker in app.cluster.workers for entry in worker.asked if entry[0] == name]


def kinds(app):
    return [event.kind for event in app.events if event.kind not in ("start", "finish")]


@pytest.mark.parametrize("options", LOSSY, ids=IDS)
@pytest.mark.parametrize("state", ["kept", "fresh"])
async def test_run_interrupted_between_checkpoints_ends_with_the_same_bits(tmp_path, options, state):
    options = {**options, "optimizer_state": state}
    plain = await trained(**options)
    first = FakeRun(master_epochs=6, checkpoint=tmp_path, checkpoint_every=4, **options)
    with pytest.raises(Interrupted):
        await interrupted_after(first, 3).train_model()
    resumed = await trained(checkpoint=tmp_path, resume="auto", **options)
    assert equal(resumed.model.get_weights(), plain.model.get_weights())
    assert kinds(first) == kinds(resumed) == []


async def test_run_cancelled_in_a_round_resumes_with_the_same_bits(tmp_path):
    options = LOSSY[2]
    plain = await trained(**options)
    first = FakeRun(master_epochs=6, checkpoint=tmp_path, checkpoint_every=4, **options)
    usual = first.cluster.workers[0].train

    def train(task):
        reply = usual(task)
        if task.round == 3:  # its worker is one round ahead of the master
            raise Interrupted
        return reply

    first.cluster.workers[0].train = train
    with pytest.raises(Interrupted):
        await first.train_model()
    assert CheckpointFolder(tmp_path).newest().round == 3
    resumed = await trained(checkpoint=tmp_path, resume="auto", **options)
    assert equal(resumed.model.get_weights(), plain.model.get_weights())


async def test_with_fresh_optimizers_residuals_are_still_sent_later():
    app = await trained(codec="topk:0.05", optimizer_state="fresh")
    states = [task.state for _, task in requests_of(app, "train")]
    assert states.count(None) == len(states) - 2, "each task except the first of a slot has a state"


@pytest.mark.parametrize("options", LOSSY, ids=IDS)
async def test_a_slot_that_moves_between_living_workers_keeps_its_state(options):
    one_worker = await trained(FakeCluster(1), slots=3, **options)
    two = FakeCluster(2)
    usual = two.workers[0].rpc

    async def rpc(request, timeout_s=None):
        for _ in range(50 * (request.args[-1]["round"] % 2 if request.args[2] == "train" else 0)):
            await asyncio.sleep(0)  # this worker is late in every second round
        return await usual(request, timeout_s)

    two.workers[0].rpc = rpc
    among = await trained(two, slots=3, **options)
    assert len({record.workers for record in among.history}) > 1, "or no slot moved and this test shows nothing"
    assert equal(one_worker.model.get_weights(), among.model.get_weights())
    assert kinds(among) == []


def lose_before_slot(app, worker, round):
    """Lose a worker with its states before it carries a slot in this round."""
    lost_worker = app.cluster.workers[worker - 1]
    usual = lost_worker.rpc

    async def rpc(request, timeout_s=None):
        if request.args[2] == "train" and request.args[-1]["round"] == round - 1:
            lost_worker.rpc = usual
            lost_worker.lost = True
            lost_worker.open(app)
        return await usual(request, timeout_s)

    lost_worker.rpc = rpc
    return app


async def test_one_event_reports_a_state_that_is_lost_with_its_worker():
    app = lose_before_slot(FakeRun(codec="int8"), worker=2, round=3)
    await app.train_model()
    events = [event for event in app.events if event.kind == "dropped"]
    assert [(event.slot, event.worker, event.round) for event in events] == [(2, 2, 2)]
    assert events[0].text.startswith("lost with worker 2 (it was lost): the residual of int8 in slot 2;")


async def test_checkpoint_saves_residuals_of_a_lost_worker(tmp_path):
    plain = await trained(codec="int8")
    app = lose_before_slot(FakeRun(codec="int8", master_epochs=6, checkpoint=tmp_path), worker=2, round=3)
    await app.train_model()
    assert kinds(app) == ["lost", "back"]
    assert equal(app.model.get_weights(), plain.model.get_weights())


async def test_rejected_update_is_recomputed_from_the_state_before():
    options = {"codec": "topk:0.05", "update_policy": "reject", "slots": 4}
    plain = await trained(**options)
    app = FakeRun(master_epochs=6, **options)
    broken = []
    for worker in app.cluster.workers:

        def fit(task, weights, momentum, worker=worker):
            update, state = type(worker).fit(worker, task, weights, momentum)
            if (task.round, task.slot) == (2, 1) and not broken:
                broken.append(worker.id)
                update[0][:] = float("nan")
            return update, state

        worker.fit = fit
    await app.train_model()
    assert "rejected" in kinds(app)
    assert equal(app.model.get_weights(), plain.model.get_weights())


async def test_residuals_travel_only_when_they_must(tmp_path):
    exact = FakeRun(checkpoint=tmp_path / "exact")
    await exact.train_model()
    assert requests_of(exact, "give") == []
    lossy = await trained(codec="int8")
    assert [entry[1:] for entry in requests_of(lossy, "give")] == [(0, 5, (RESIDUAL,)), (1, 5, (RESIDUAL,))], (
        "the master collects residuals at the end of the run"
    )
    every = await trained(codec="int8", checkpoint=tmp_path / "every", checkpoint_every=3)
    assert sorted(entry[1:3] for entry in requests_of(every, "give")) == [(0, 2), (0, 5), (1, 2), (1, 5)]


@pytest.mark.parametrize("every", [1, 3])
async def test_asynchronous_checkpoints_have_the_residual_of_each_slot(tmp_path, every):
    app = FakeRun(mode="async", codec="topk:0.05", checkpoint=tmp_path, checkpoint_every=every, checkpoint_keep=100)
    residuals = {}
    for worker in app.cluster.workers:

        def train(task, worker=worker):
            reply = type(worker).train(worker, task)
            residuals[task.slot, task.round] = worker.kept.state_after(task.slot, task.round)[RESIDUAL]
            return reply

        worker.train = train
    await app.train_model()
    folder = CheckpointFolder(tmp_path)
    entries = [entry.round for entry in folder.entries()]
    assert sorted(entries) == sorted({*range(every, 9, every), 8})
    for number in entries:
        checkpoint = folder.load(f"round-{number:06d}")
        rounds = checkpoint.facts["slot_rounds"]
        assert sum(rounds) == number
        expected = {
            f"slot {slot:04d} {i:04d}": array
            for slot, completed in enumerate(rounds)
            if completed
            for i, array in enumerate(residuals[slot, completed - 1])
            if array is not None
        }
        assert expected
        assert checkpoint.arrays["slots_residual"].keys() == expected.keys()
        assert equal(checkpoint.arrays["slots_residual"].values(), expected.values())


async def test_an_exact_codec_sends_the_residual_of_the_earlier_codec():
    app = FakeRun(codec="topk:0.05")
    await app.train_sync(2)
    owed = [set(state) for state in app.run_context.progress.states]
    assert owed == [{"optimizer", RESIDUAL}] * 2
    app.codec = "float32"
    await app.train_sync(2)
    states = [task.state for _, task in requests_of(app, "train") if task.round >= 2]
    assert sum(state is not None and RESIDUAL in state for state in states) == 2
    assert [set(state) for state in app.run_context.progress.states] == [{"optimizer"}] * 2


def asked_for(number, state=None):
    """Return a task of the first slot."""
    return Task(
        slot=0, round=number, slots=1, version=0, first_epoch=number, epochs=1, batch_size=1, seed=0, indices=np.arange(1), weights=None,
        codec="int8", keep=("optimizer", RESIDUAL, HELD), back=("optimizer",), state=state,
    )  # fmt: skip


def test_worker_keeps_states_of_the_last_two_rounds_of_a_slot():
    states = KeptStates()
    residuals = []
    for number in range(3):
        task = asked_for(number, None if number else {})
        residual = states.begin(task).get(RESIDUAL)
        _, residual, _ = send_update("int8", tensors(number), [False, False], residual)
        states.store(task, {"optimizer": [], RESIDUAL: residual, HELD: tensors(number), "not asked for": []})
        residuals.append(residual)
    assert states.state_after(0, 1).keys() == {RESIDUAL}
    assert equal(states.state_after(0, 1)[RESIDUAL], residuals[1])
    assert states.state_after(0, 2).keys() == {"optimizer", RESIDUAL, HELD}
    assert equal(states.state_after(0, 2)[RESIDUAL], residuals[2])
    for slot, number in ((0, 0), (0, 3), (1, 2)):
        with pytest.raises(AppMissing, match=f"this worker has no state of slot {slot + 1} after round {number + 1}"):
            states.state_after(slot, number)
    with pytest.raises(AppMissing):
        states.begin(asked_for(5))


def test_the_state_in_a_task_replaces_the_kept_state():
    states = KeptStates()
    task = asked_for(0, {})
    states.begin(task)
    states.store(task, {"optimizer": [1], RESIDUAL: [2], HELD: [3]})
    assert states.begin(asked_for(4, {"optimizer": [5]})) == {"optimizer": [5]}
    with pytest.raises(AppMissing):
        states.state_after(0, 0)


class LeavesInRound3(FakeWorker):
    """A worker that announces its end while it trains in the third round, and comes back without its state."""

    def train(self, task):
        if task.round == 2 and self.on_leaving is not None and self.notice is None:
            self.notice = Notice("SIGTERM", asyncio.get_running_loop().time() + 60)
            self.on_leaving()
        return super().train(task)


@pytest.mark.parametrize("options", [{}, *LOSSY], ids=["float32", *IDS])
@pytest.mark.parametrize("exchange", ["star", "sharded"])
async def test_run_whose_worker_announces_its_end_has_the_bits_of_an_undisturbed_one(options, exchange):
    if exchange == "sharded" and "weights_codec" in options:
        options = {"codec": "int8", "optimizer_state": "kept"}
    plain = await trained(exchange=exchange, **options)
    cluster = FakeCluster(0)
    cluster.workers = [FakeWorker(1), LeavesInRound3(2)]
    for worker in cluster.workers:
        worker.others = {other.id: other for other in cluster.workers}
    disturbed = await trained(cluster, exchange=exchange, **options)
    assert equal(disturbed.model.get_weights(), plain.model.get_weights())
    assert disturbed.ledger.is_exact(6)
    assert kinds(disturbed)[:2] == ["leaving", "left"]
    assert "dropped" not in kinds(disturbed)
    assert "lost" not in kinds(disturbed)
