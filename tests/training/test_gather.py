"""Updates that are compared with each other; workers and judgement are stand-ins."""

import asyncio
from types import SimpleNamespace

import numpy as np

from ddlf.algorithms.check import Verdict
from ddlf.algorithms.merge import MERGE
from ddlf.events import UpdateClipped
from ddlf.training import gather


async def test_what_is_judged_again_because_others_were_computed_again_is_told_once(monkeypatch):
    told, distrusted = [], []
    crew = SimpleNamespace(
        emit=told.append,
        distrust=lambda slot, worker, why: distrusted.append((slot, worker)),
        trust=lambda worker: None,
        others_than=lambda workers: len(workers) < 2,
    )
    like = [np.zeros(2, np.float32)]
    facts = SimpleNamespace(names=["a"], update_policy="clip")
    run = SimpleNamespace(crew=crew, facts=facts, weights=like, verdicts=[])
    verdicts = iter([("reject", "clip", "reject"), ("reject", "clip", "accept"), ("reject", "clip", "accept")])

    def judged(run, replies):
        actions = next(verdicts)
        return {slot: Verdict(slot=slot + 1, action=action, reason="why") for slot, action in enumerate(actions)}

    tasks = [SimpleNamespace(slot=slot, round=3) for slot in range(3)]

    async def reply(task, worker):
        return SimpleNamespace(task=task, slot=task.slot, update=[np.full(2, worker, "f4")], samples=1, worker=worker)

    monkeypatch.setattr(gather, "verdicts_on", judged)
    carrying = [asyncio.ensure_future(reply(task, worker)) for worker, task in enumerate(tasks, 1)]
    merge = MERGE.read("mean").start(3, like)
    fit = await gather.gather(run, tasks, carrying, lambda task, avoid: reply(task, 7 + task.slot), merge)
    assert told == [UpdateClipped(round=4, slot=2, worker=2, factor=1.0, why="slot 2 scaled by 1: why")]
    assert distrusted == [(0, 1), (2, 3), (0, 7)]
    assert [reply.slot for reply in fit] == [1, 2]
    assert merge.result()[0].tolist() == [5.5, 5.5], "of workers 2 and 9"
    assert len(run.verdicts) == 4
