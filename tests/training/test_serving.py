"""Tests of evaluation in Downpour: a worker evaluates the weights of the shards, which never reach the master. No Keras."""

import asyncio

import numpy as np
import pytest

from ddlf.errors import WorkerLost
from ddlf.events import Warned
from ddlf.testing import FakeCluster, FakeRun, FakeWorker
from ddlf.testing.fake_run import mean_of
from ddlf.training.progress import WeightsRef
from ddlf.training.strategies.downpour.server import Server
from tests.training.doubles import Doubles
from tests.training.server_states import state

CHANCE = np.random.default_rng(1)
START = {
    "dense/kernel": CHANCE.normal(size=(30, 7)).astype("f4"),
    "dense/bias": CHANCE.normal(size=7).astype("f4"),
    "norm/variance": CHANCE.random(7, "f4"),
    "norm/steps": np.asarray(41, "i8"),
}
FROZEN = frozenset(["norm/variance", "norm/steps"])
PLAIN = {"push_rule": "sgd:rate=0.01", "staleness": "constant"}


@pytest.fixture(autouse=True)
def on_the_master(monkeypatch, short_waits):
    """The weights that the master evaluates itself. Here it has no model."""
    evaluated = []

    async def compute(function, app, weights, *rest, **more):
        evaluated.append(weights)
        return {"loss": mean_of(weights)}

    monkeypatch.setattr("ddlf.training.evaluation.master.compute", compute)
    monkeypatch.setattr("ddlf.training.start.check_test_data", lambda app: None)
    return evaluated


def run_of(workers=3, **settings):
    settings = {"slots": 3, "start": START, "frozen": FROZEN, "master_epochs": 3, **PLAIN, **settings}
    run = FakeRun(FakeCluster(workers), mode="downpour", **settings)
    run.x_test = run.y_test = np.arange(4.0)
    run.event_log = []
    run.subscribe(run.event_log.append)
    return run


def verbs(run):
    return [[request[0] for request in worker.asked] for worker in run.cluster.workers]


async def test_worker_evaluates_weights_of_shards_without_the_master(on_the_master):
    run, snapshots = run_of(evaluate_every=1), []

    def count_snapshots(record):
        snapshots.append(
            (
                isinstance(run.run_context.progress.weights, WeightsRef),
                sum(verbs_of_worker.count("snapshot") for verbs_of_worker in verbs(run)),
            )
        )

    run.on_round = count_snapshots
    history = await run.train_model()
    assert [record.test.keys() for record in history] == [{"loss"}] * 9
    assert sum(verbs_of_worker.count("evaluate") for verbs_of_worker in verbs(run)) == 8
    assert len(on_the_master) == 1  # the master has the weights of the last commit
    assert {brought for is_remote, brought in snapshots if is_remote} == {0}


async def test_evaluation_uses_the_weights_of_its_commit():
    run, marked = run_of(1, slots=1, evaluate_every=1), []
    mark = Server.mark

    async def noted(shard, moment):
        await mark(shard, moment)
        if moment:
            marked.append((shard.weights.copy(), shard.rest.copy()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Server, "mark", noted)
        history = await run.train_model()
    for record, (weights, rest) in zip(history, marked, strict=False):
        assert record.test["loss"] == mean_of([weights, rest, START["norm/steps"]])
    assert len(marked) == 2


async def test_worker_whose_round_is_over_evaluates_before_its_next_task():
    run = run_of(evaluate_every=1, master_epochs=4)
    await run.train_model()
    for worker in run.cluster.workers:
        own_verbs = [request[0] for request in worker.asked if request[0] in ("train", "evaluate")]
        assert own_verbs[:7] == ["train", "evaluate"] * 3 + ["train"]


async def test_a_marked_moment_does_not_change_and_is_freed():
    server = Server.from_state(state(rule="sgd:rate=1", staleness="constant"))
    await server.mark(7)
    await server.push(0, 1, 0, 0, 0, np.ones(4, "f4"), np.zeros(0, "f4"))
    weights, rest = await server.values(7)
    assert (weights.tolist(), rest.tolist(), server.weights.tolist()) == ([0] * 4, [], [-1] * 4)
    assert await server.values(6) == []
    await server.mark(0)
    assert await server.values(7) == []
    assert server.marked is None


@pytest.mark.parametrize("at", [1, 2, 3])
async def test_another_worker_evaluates_if_the_first_is_lost(at, on_the_master):
    run, count = run_of(evaluate_every=1), []

    async def rpc(worker, request, timeout_s=None):
        if request.args[2] == "evaluate":
            count.append(worker)
            if len(count) == at:
                worker.lost = True
                raise WorkerLost("it was lost", worker=worker.name)
        return await FakeWorker.rpc(worker, request, timeout_s)

    for worker in run.cluster.workers:
        worker.rpc = lambda *arguments, worker=worker: rpc(worker, *arguments)
    history = await run.train_model()
    assert all("loss" in record.test for record in history)
    assert run.ledger.is_exact(3)
    assert len(on_the_master) == 1


async def test_evaluation_is_retried_and_then_done_on_the_master(on_the_master, monkeypatch):
    run, answers = run_of(evaluate_every=3), []

    async def none(worker, source, part, *rest):
        answers.append(source["moment"])

    monkeypatch.setattr("ddlf.testing.fake_run.FakeWorker.evaluate", none)
    history = await run.train_model()
    assert answers == [1, 2, 3, 4]
    assert len(on_the_master) == 3
    assert [bool(record.test) for record in history] == [False, False, True] * 3


async def test_a_run_converges_by_metrics_of_workers():
    run = run_of(evaluate_every=1, master_epochs=9, converge="target:metric=test_loss,value=1e9")
    history = await run.train_model()
    assert run.run_context.progress.converged
    assert len(history) < 27


async def test_run_warns_that_shards_ignore_weights_of_callbacks(monkeypatch):
    monkeypatch.setattr(Doubles, "after", range(100))  # after each epoch
    monkeypatch.setattr("ddlf.training.start.Callbacks", Doubles)
    run = run_of(callbacks=[1])
    await run.train_model()
    (message,) = [event.why for event in run.event_log if isinstance(event, Warned) and event.about == "callback"]
    assert message.startswith("callbacks have set weights, which has no effect before training is over")
    assert run.ledger.is_exact(3)
    await asyncio.sleep(0)
