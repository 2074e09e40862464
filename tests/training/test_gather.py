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
    progress = SimpleNamespace(weights=like, round=3, slot_rounds=[])
    job = SimpleNamespace(crew=crew, progress=progress, rule=MERGE.read("mean"), names=["a"], update_policy="clip")
    verdicts = iter([("reject", "clip", "reject"), ("reject", "clip", "accept"), ("reject", "clip", "accept")])

    def judged(job, results):
        actions = next(verdicts)
        return {slot: Verdict(slot=slot + 1, action=action, reason="why") for slot, action in enumerate(actions)}

    async def result(worker):
        return SimpleNamespace(update=[np.ones(2, np.float32)], samples=1, worker=worker)

    monkeypatch.setattr(gather, "verdict_of", judged)
    tasks = [asyncio.ensure_future(result(worker)) for worker in (1, 2, 3)]
    gathered = await gather.gather(job, tasks, lambda slot, avoid: result(7 + slot))
    assert told == [UpdateClipped(round=4, slot=2, worker=2, factor=1.0, why="slot 2 scaled by 1: why")]
    assert distrusted == [(0, 1), (2, 3), (0, 7)]
    assert set(gathered.results) == {1, 2}
    assert len(gathered.verdicts) == 4
