"""Tests of gathering updates that are compared with each other. Workers and the check of updates are fake."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from ddlf.algorithms.merge import MERGE
from ddlf.algorithms.update_check import Verdict
from ddlf.errors import BadUpdate
from ddlf.events import UpdateClipped
from ddlf.testing import FakeRun
from ddlf.training import run as training_run
from ddlf.training.judging import UpdateJudge


async def test_update_judged_twice_is_reported_once(monkeypatch):
    events, distrusted = [], []
    crew = SimpleNamespace(
        emit=events.append,
        distrust=lambda slot, worker, reason: distrusted.append((slot, worker)),
        trust=lambda worker: None,
        others_than=lambda workers: len(workers) < 2,
    )
    like = [np.zeros(2, np.float32)]
    judge = UpdateJudge("clip", ["a"], [True], crew, lambda: like, lambda sentence: None)
    run = SimpleNamespace(crew=crew, judge=judge, weights=like, verdicts=[])
    verdicts = iter([("reject", "clip", "reject"), ("reject", "clip", "accept"), ("reject", "clip", "accept")])

    def judged(replies):
        actions = next(verdicts)
        return {slot: Verdict(slot=slot + 1, action=action, reason="why") for slot, action in enumerate(actions)}

    tasks = [SimpleNamespace(slot=slot, round=3) for slot in range(3)]

    async def reply(task, worker):
        return SimpleNamespace(
            task=task, slot=task.slot, update=[np.full(2, worker, "f4")], samples=1, weight=1, worker=worker
        )

    monkeypatch.setattr(judge, "compare", judged)
    run.carry_task = lambda task, avoid: reply(task, 7 + task.slot)
    carrying = [asyncio.ensure_future(reply(task, worker)) for worker, task in enumerate(tasks, 1)]
    merge = MERGE.read("mean").start(3, like)
    fit = await training_run.gather(run, tasks, carrying, merge)
    assert events == [UpdateClipped(round=4, slot=2, worker=2, factor=1.0, why="slot 2 scaled by 1: why")]
    assert distrusted == [(0, 1), (2, 3), (0, 7)]
    assert [reply.slot for reply in fit] == [1, 2]
    assert merge.result()[0].tolist() == [5.5, 5.5], "of workers 2 and 9"
    assert len(run.verdicts) == 4


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("settings", [{"outer": "subtract:1e200"}, {"mode": "async", "outer": "fedavgm:1e200"}])
async def test_infinite_weights_after_a_step_are_blamed_on_the_rule(settings):
    """This holds also in the last round, although no later task would show the weights to a worker."""
    run = FakeRun(master_epochs=1, **settings)
    before = run.model.get_weights()
    with pytest.raises(
        BadUpdate, match=r"weights after round 1 cannot be used: 1,200 of 1,200 .* rate .* outer"
    ) as bad:
        await run.train_model()
    assert (bad.value.tensor, bad.value.count, bad.value.worker) == ("layer/0", 1200, "")
    assert not run.history
    assert all(np.array_equal(a, b) for a, b in zip(before, run.model.get_weights(), strict=True))
