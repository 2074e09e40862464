"""Tests of dynamic local updates (DyLU): in asynchronous training, the steps of a slot follow its speed. No Keras."""

import asyncio
import dataclasses

import pytest

from ddlf.errors import ConfigError
from ddlf.events import PartsChanged
from ddlf.testing import FakeCluster, FakeRun, FakeWorker

pytestmark = pytest.mark.asyncio(loop_scope="module")

SPEEDS = (8, 4, 1)
"""Steps per second of three workers."""


@pytest.fixture(autouse=True)
def nothing_is_synced(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


class Timed(FakeWorker):
    """A worker whose turns of the loop and reported seconds follow from its speed and its samples."""

    def train(self, task):
        reply = super().train(task)
        self.compute_s = reply.samples / task.batch_size / SPEEDS[self.id - 1]
        return dataclasses.replace(reply, compute_s=self.compute_s)

    async def rpc(self, request, timeout_s=None):
        answer = await super().rpc(request, timeout_s)
        for _ in range(round(self.compute_s * 100)):
            await asyncio.sleep(0)
        return answer


async def paced(**settings):
    cluster = FakeCluster(3)
    cluster.workers = [Timed(number) for number in (1, 2, 3)]
    usual = dict(mode="async", balance="speed", worker_steps=16, batch_size=4, samples=1003, master_epochs=6, slots=3)
    run = FakeRun(cluster, **{**usual, **settings})
    run.event_log = []
    run.subscribe(run.event_log.append)
    await run.train_model()
    return run


def samples_of(run, number):
    return [record.samples for record in sorted(run.history, key=lambda record: record.slot) if record.round == number]


async def test_steps_follow_speed_after_two_measured_rounds():
    run = await paced()
    assert samples_of(run, 1) == [64, 64, 64]
    assert samples_of(run, 2) == [64, 64, 64]  # the first round is not measured, because a worker compiles in it
    assert samples_of(run, 3) == [64, 32, 8]  # 16, floor(16 / 2) and floor(16 / 8) steps of 4 samples
    changes = [event for event in run.event_log if isinstance(event, PartsChanged)]
    assert changes == [PartsChanged(round=3, samples=(64, 32, 8))]


async def test_every_epoch_has_every_sample_once_and_one_end():
    run = await paced()
    assert run.ledger.is_exact(6)
    ends = [number for number, samples in enumerate(run.run_context.progress.offsets) if samples == 0]
    assert len(ends) == 7


@pytest.mark.slow
async def test_paced_slots_make_updates_hardly_stale():
    async def stalest(**settings):
        run = await paced(master_epochs=12, **settings)
        return max(record.staleness for record in run.history if 3 < record.round < record.rounds - 2)

    assert await stalest() <= 4
    assert await stalest(balance="equal") >= 8


async def test_resumed_run_keeps_its_pace_and_an_exact_ledger(tmp_path):
    await paced(checkpoint=tmp_path, master_epochs=3)
    run = await paced(checkpoint=tmp_path, resume=tmp_path)
    assert run.ledger.is_exact(6)
    assert [64, 32, 8] in [samples_of(run, number) for number in range(2, 30)]


async def test_an_app_that_continues_with_equal_balance_has_equal_parts_again():
    run = await paced()
    run.balance = "equal"
    await run.train_model()
    assert run.ledger.is_exact(12)
    first = run.run_context.progress.starts.index(6)
    assert samples_of(run, first + 2) == [64, 64, 64]


async def test_validation_data_is_evaluated_once_an_epoch(monkeypatch):
    evaluations = []

    async def report(self, weights, *, validate, last):
        evaluations.append(validate)
        return await usual(self, weights, validate=validate, last=last)

    from ddlf.training.reporter import Reporter

    usual = Reporter.report
    monkeypatch.setattr(Reporter, "report", report)
    await paced()
    assert sum(evaluations) == 6
    assert evaluations[-1]


async def test_workers_that_join_later_get_no_new_slots():
    run = await paced(slots=None)
    assert not run.run_context.progress.slots_from[1:]
    assert len(run.run_context.progress.states) == 3


@pytest.mark.parametrize("settings", [dict(worker_steps=None), dict(worker_steps=None, worker_epochs=2)])
async def test_rounds_of_whole_epochs_have_no_steps_to_choose(settings):
    with pytest.raises(ConfigError, match="balance='speed' in asynchronous training sets the steps of a round"):
        await paced(**settings)
