"""Tests of training with failures: the result has the bits of an undisturbed run on real workers.

Most failing workers are in this process. Two tests here kill real processes. ``tests/trials/deaths.py`` kills workers at
random moments.
"""

import asyncio
import os
import signal

import numpy as np
import pytest
import pytest_asyncio

from ddlf import Cluster
from ddlf.errors import BadUpdate
from tests.daemons import DaemonWithoutProcesses
from tests.patience import PATIENCE_S
from tests.training.models import Quick, app, equal

pytestmark = pytest.mark.asyncio(loop_scope="session")

HARD = {"optimizer": "adam", "dropout": 0.3, "norm": True, "master_epochs": 4}
"""Settings with all kinds of state: an inner optimizer, random numbers, moving statistics."""


def with_faults(trained, faults):
    """Call ``faults[(round, worker)]`` when that worker begins a slot of that round for the first time."""
    pending, usual = dict(faults), trained.on_event
    trained.event_log, trained.joined = [], asyncio.Event()

    def on_event(event):
        trained.event_log.append(event)
        if event.kind == "joined":
            trained.joined.set()
        if event.kind == "start":
            pending.pop((event.round, event.worker), lambda: None)()
        usual(event)

    trained.on_event = on_event
    return trained


def kill_executor(cluster, number):
    return lambda: os.kill(cluster.workers[number - 1].executor.pid, signal.SIGKILL)


@pytest_asyncio.fixture(loop_scope="session")
async def start_here(token_file):
    """Start workers without processes, and end them after the test."""
    started = []

    def start(port=0):
        started.append(DaemonWithoutProcesses(token_file.read_bytes().strip(), port))
        return started[-1]

    yield start
    for daemon in started:
        await daemon.end()


@pytest.fixture
def no_backups(monkeypatch):
    """Give a late slot to no other worker."""
    monkeypatch.setattr("ddlf.training.crew.schedule.STRAGGLER_LEAST_S", 1000)


def kinds(trained):
    return [event.kind for event in trained.event_log if event.kind not in ("start", "finish")]


async def undisturbed(cluster, **options):
    trained = app(cluster, **options)
    await trained.train_model()
    return trained


@pytest.mark.parametrize(
    "kind", [{"app_class": Quick}, pytest.param(HARD, marks=pytest.mark.slow)], ids=["quick", "hard"]
)
async def test_joining_and_leaving_workers_change_no_bit(two_workers, token_file, start_here, no_backups, kind):
    options = dict(kind, master_epochs=5, slots=3)
    plain = await undisturbed(two_workers, **options)
    first, second = start_here(), start_here()
    async with Cluster(["127.0.0.1"], [first.port], token_file=token_file) as cluster:
        trained = with_faults(app(cluster, **options), {})

        async def on_round(record):
            if record.round == 2:
                await cluster.add("127.0.0.1", second.port)
            elif record.round == 3:
                await asyncio.wait_for(trained.joined.wait(), PATIENCE_S)
            elif record.round == 4:
                await first.end()

        trained.on_round = on_round
        records = await trained.train_model()
    assert [set(record.workers) for record in (*records[:2], *records[3:])] == [{1}, {1}, {1, 2}, {2}]
    assert kinds(trained)[:2] == ["joined", "lost"]
    assert equal(trained.model.get_weights(), plain.model.get_weights())


@pytest.mark.slow
async def test_a_worker_that_was_missing_at_the_start_comes_later(
    two_workers, token_file, start_here, free_port, no_backups
):
    options = dict(app_class=Quick, master_epochs=4, slots=2)
    plain = await undisturbed(two_workers, **options)
    first = start_here()
    async with Cluster(
        ["127.0.0.1", "127.0.0.1"], [first.port, free_port], token_file=token_file, min_workers=1
    ) as cluster:
        trained = with_faults(app(cluster, **options), {})

        async def on_round(record):
            if record.round == 1:
                start_here(port=free_port)
            elif record.round == 3:
                await asyncio.wait_for(trained.joined.wait(), PATIENCE_S)

        trained.on_round = on_round
        records = await trained.train_model()
    assert set(records[-1].workers) == {1, 2}
    assert equal(trained.model.get_weights(), plain.model.get_weights())


class Poisoned(Quick):
    """Worker 2 sends a wrong update, of slot 2 or of all slots."""

    kind = ""
    only_one = False

    def train(self, weights, worker_epochs, batch_size):
        update, metrics = super().train(weights, worker_epochs, batch_size)
        if self.worker.id == 2 and not (self.only_one and self.replica._task.slot != 1):
            if self.kind == "nan":
                update[0][0, :3] = np.nan
            else:
                factor = {"zeros": 0, "scale": 1000, "flip": -1}[self.kind]
                update = [np.asarray(factor * tensor, tensor.dtype) for tensor in update]
        return update, metrics


def poisoned(cluster, kind, **options):
    return app(cluster, Poisoned, kind=kind, **options)


async def test_nan_ends_training_and_names_worker_tensor_and_count(two_workers):
    trained = poisoned(two_workers, "nan")
    with pytest.raises(BadUpdate, match=r"worker 2: slot 2: 3 of 128 values of .*kernel are NaN") as caught:
        await trained.train_model()
    assert (caught.value.count, caught.value.worker) == (3, "worker 2")
    assert all(np.isfinite(w).all() for w in trained.model.get_weights())


@pytest.mark.parametrize("kind", ["nan", pytest.param("flip", marks=pytest.mark.slow)])
async def test_rejected_update_is_recomputed_elsewhere_with_the_same_bits(two_workers, kind):
    options = {"update_policy": "reject", "slots": 4, "samples": 800, "master_epochs": 3}
    plain = await undisturbed(two_workers, app_class=Quick, **options)
    trained = with_faults(poisoned(two_workers, kind, only_one=True, **options), {})
    records = await trained.train_model()
    assert equal(trained.model.get_weights(), plain.model.get_weights())
    assert "rejected" in kinds(trained)
    assert any("rejected" in line and "worker 2" in line for line in records[0].verdicts)
    assert trained.ledger.is_exact(3)


async def test_update_nobody_can_recompute_is_left_out_of_the_ledger(two_workers):
    only_bad = two_workers.options(workers=[2])
    trained = with_faults(poisoned(only_bad, "nan", update_policy="reject"), {})
    with pytest.raises(BadUpdate, match="no update of this round can be used"):
        await trained.train_model()
    assert not trained.ledger.counts.any()


async def test_asynchronous_training_drops_a_rejected_update_and_says_so(two_workers):
    trained = with_faults(poisoned(two_workers, "nan", mode="async", update_policy="reject", master_epochs=4), {})
    records = await trained.train_model()
    dropped = [event for event in trained.event_log if event.kind == "rejected"]
    assert len(records) + len(dropped) == 8
    assert all(np.isfinite(w).all() for w in trained.model.get_weights())
    assert trained.ledger.counts.sum() == sum(record.samples for record in records)
