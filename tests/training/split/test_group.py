"""Tests of the group of workers that train one copy of a model."""

import asyncio
from types import SimpleNamespace

import pytest

from ddlf.errors import ClusterTooSmall
from ddlf.events import Warned
from ddlf.training.exchanges.members import Members
from ddlf.training.exchanges.split.master import Group
from ddlf.training.exchanges.split.states import SplitStates


def group_of(workers, parts=2, wait_s=0.01, **options):
    crew = SimpleNamespace(size=workers, wait_s=wait_s, event_log=[], hand_back=[])
    crew.emit = crew.event_log.append
    exchange = SimpleNamespace(weights_out=object.__new__(Members), states=object.__new__(SplitStates))
    facts, progress = SimpleNamespace(names=[], seed=0), SimpleNamespace(weights=[], snapshot=lambda: None)
    run = SimpleNamespace(crew=crew, exchange=exchange, facts=facts, progress=progress)
    return Group(run, SimpleNamespace(parts=range(parts)), **options), crew


async def test_a_run_with_too_few_workers_ends_after_the_wait():
    model_group, crew = group_of(workers=1)
    model_group._attempt.workers[0] = SimpleNamespace(id=1)
    with pytest.raises(ClusterTooSmall, match=r"the model has 2 parts, and 1 worker is there after 0\.01 s"):
        await model_group._wait_for_workers(model_group._attempt, 0)
    assert [type(event) for event in crew.event_log] == [Warned]


async def test_groups_that_share_too_few_workers_end_after_the_wait():
    """Two groups with one worker each would otherwise wait for each other."""
    model_group, _ = group_of(workers=2, slot=1, groups=2)
    model_group._attempt.workers[0] = SimpleNamespace(id=1)
    with pytest.raises(ClusterTooSmall, match="the model has 2 parts in 2 slots, and 2 workers are there"):
        await model_group._wait_for_workers(model_group._attempt, 0)


async def test_a_wait_is_reported_once_for_all_waiting_parts():
    model_group, crew = group_of(workers=1)
    model_group._attempt.workers.update({0: SimpleNamespace(id=1), 1: SimpleNamespace(id=1)})
    waiting = [asyncio.ensure_future(model_group._wait_for_workers(model_group._attempt, part)) for part in (1, 0)]
    await asyncio.gather(*waiting, return_exceptions=True)
    assert len(crew.event_log) == 1


async def test_parts_wait_for_a_connected_worker_that_is_busy():
    model_group, crew = group_of(workers=2)
    model_group._attempt.workers[0] = SimpleNamespace(id=1)
    waiting = asyncio.ensure_future(model_group._wait_for_workers(model_group._attempt, 0))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await asyncio.shield(waiting)
    model_group._attempt.ready.set()
    await waiting
    assert crew.event_log == []


async def test_a_lost_part_starts_one_new_attempt_of_all_parts():
    model_group, _ = group_of(workers=2)
    first = model_group._attempt
    first.workers.update({0: SimpleNamespace(id=1), 1: SimpleNamespace(id=2)})
    model_group._fail(1)
    second = model_group._attempt
    model_group._fail(0)  # this part has failed in the first attempt, too
    assert first.ended.is_set()
    assert model_group._attempt is second
    assert second is not first
    assert (second.ended.is_set(), second.workers) == (False, {})
