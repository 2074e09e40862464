"""Carrying slots on workers that come and go; the workers are stand-ins, the event loop is real."""

import asyncio

import pytest

from ddlf.errors import AppMissing, AuthError, ClusterTooSmall, ExecutorCrashed, LeaseError, RemoteError, WorkerLost
from ddlf.training.crew import Crew
from tests.patience import PATIENCE_S


class FakeWorker:
    def __init__(self, id):
        self.id = id
        self.name = f"worker {id}"
        self.back = asyncio.Event()
        self.error = None

    async def reconnect(self):
        await self.back.wait()
        if self.error is not None:
            raise self.error


class FakeCluster:
    def __init__(self, count):
        self.workers = [FakeWorker(number) for number in range(1, count + 1)]
        self.missing = []

    def take_in(self, worker):
        pass


class Story:
    """What happened, and what workers are to do: answers by worker, in order; the last one stays."""

    def __init__(self, count, **options):
        self.cluster = FakeCluster(count)
        self.events = []
        self.opened = []
        self.calls = []
        self.answers = {}
        self.waited = {}
        self.crew = Crew(self.cluster, self.open, self.observe, **options)

    def observe(self, event):
        self.events.append(event)
        self.seen((event.kind, event.worker)).set()

    def seen(self, event):
        return self.waited.setdefault(event, asyncio.Event())

    async def open(self, worker):
        self.opened.append(worker.id)

    async def work(self, worker, holds):
        self.calls.append((worker.id, holds))
        answers = self.answers.get(worker.id, [])
        answer = answers.pop(0) if answers else worker.id
        if isinstance(answer, asyncio.Event):
            await answer.wait()
            return worker.id
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kinds(self):
        return [(event.kind, event.worker) for event in self.events if event.kind not in ("start", "finish")]


async def test_the_slot_of_a_lost_worker_is_carried_by_another_one():
    story = Story(2)
    story.answers[1] = [WorkerLost("gone")]
    async with story.crew as crew:
        assert await asyncio.gather(crew.carry(0, 0, story.work), crew.carry(1, 0, story.work)) == [2, 2]
    assert story.kinds() == [("lost", 1)]
    assert crew.losses == 1


async def test_a_worker_that_comes_back_is_opened_before_it_carries_again():
    story = Story(1)
    story.answers[1] = [ExecutorCrashed("ended"), "done"]
    story.cluster.workers[0].back.set()
    async with story.crew as crew:
        assert await crew.carry(0, 0, story.work) == "done"
    assert story.opened == [1]
    assert story.kinds() == [("lost", 1), ("waiting", None), ("back", 1)]


async def test_a_worker_is_said_to_hold_a_slot_only_while_it_is_the_one_that_carried_it_last():
    story = Story(1)
    story.cluster.workers[0].back.set()
    async with story.crew as crew:
        await crew.carry(0, 0, story.work)
        await crew.carry(0, 0, story.work)
        story.answers[1] = [AppMissing("new executor")]
        await crew.carry(0, 0, story.work)
        await crew.carry(0, 0, story.work)
    assert story.calls == [(1, False), (1, True), (1, True), (1, False), (1, True)]


async def test_an_error_of_the_app_is_raised_at_once_and_nobody_is_lost():
    story = Story(2)
    story.answers[1] = [RemoteError("ValueError", "bad", "")]
    async with story.crew as crew:
        with pytest.raises(RemoteError):
            await crew.carry(0, 0, story.work)
    assert story.kinds() == []


async def test_a_slot_that_ends_three_executors_raises_how_the_last_one_ended():
    story = Story(1)
    story.answers[1] = [ExecutorCrashed(f"number {n}") for n in range(3)]
    story.cluster.workers[0].back.set()
    async with story.crew as crew:
        with pytest.raises(ExecutorCrashed, match="number 2"):
            await crew.carry(0, 0, story.work)


async def test_without_any_worker_training_waits_and_then_says_so():
    story = Story(1, wait_s=0.05)
    story.answers[1] = [WorkerLost("cable cut")]
    async with story.crew as crew:
        with pytest.raises(ClusterTooSmall, match=r"none came back within 0\.05 s.*cable cut"):
            await crew.carry(0, 0, story.work)
    assert story.kinds() == [("lost", 1), ("waiting", None)]


async def test_a_worker_that_refuses_takes_no_part_any_more():
    story = Story(2)
    story.answers[1] = [WorkerLost("gone")]
    story.cluster.workers[0].error = AuthError("other token")
    story.cluster.workers[0].back.set()
    async with story.crew as crew:
        assert await asyncio.gather(crew.carry(0, 0, story.work), crew.carry(1, 0, story.work)) == [2, 2]
        assert [await crew.carry(slot, 0, story.work) for slot in (0, 1)] == [2, 2]
    assert story.kinds() == [("lost", 1), ("gone", 1)]


async def test_a_master_that_was_replaced_stops():
    story = Story(1)
    story.answers[1] = [WorkerLost("silent")]
    story.cluster.workers[0].error = LeaseError("taken over by anna")
    story.cluster.workers[0].back.set()
    async with story.crew as crew:
        with pytest.raises(LeaseError, match="anna"):
            await crew.carry(0, 0, story.work)


async def test_a_worker_that_joins_takes_part_from_the_next_round():
    story = Story(1)
    release = asyncio.Event()
    async with story.crew as crew:
        story.cluster.workers.append(FakeWorker(2))
        story.cluster.workers[1].back.set()
        joined = asyncio.ensure_future(wait_for(story, ("joined", 2)))
        crew.begin_round()
        await joined
        story.answers[1] = [release]
        carried = asyncio.gather(crew.carry(0, 0, story.work), crew.carry(1, 0, story.work))
        await wait_for(story, ("finish", 2))
        release.set()
        assert await carried == [1, 2]
    assert story.opened == [2]


async def test_a_late_slot_is_carried_by_a_free_worker_too_and_the_first_answer_counts(monkeypatch):
    monkeypatch.setattr("ddlf.training.schedule.STRAGGLER_LEAST_S", 0.02)
    story = Story(2)
    never = asyncio.Event()
    story.answers = {1: [1, "first"], 2: [never]}
    async with story.crew as crew:
        assert await asyncio.gather(crew.carry(0, 0, story.work), crew.carry(1, 0, story.work)) == [1, "first"]
        assert ("backup", 1) in story.kinds()
        # The stopped worker is free again.
        assert sorted(await asyncio.gather(crew.carry(0, 0, story.work), crew.carry(1, 0, story.work))) == [1, 2]


async def test_a_worker_whose_updates_are_rejected_three_times_in_a_row_is_out():
    story = Story(2)
    async with story.crew as crew:
        await crew.carry(0, 0, story.work)
        for trusted in (False, False, True, False, False):
            crew.trust(1) if trusted else crew.distrust(0, 1, "its update is all zeros")
        assert ("gone", 1) not in story.kinds()
        crew.distrust(0, 1, "its update is all zeros")
        crew.distrust(0, 1, "its update is all zeros")
        assert story.kinds().count(("gone", 1)) == 1
        assert not crew.others_than(frozenset({2}))
        assert await asyncio.gather(crew.carry(0, 1, story.work), crew.carry(1, 1, story.work)) == [2, 2]
        for _ in range(4):
            crew.distrust(0, 2, "its update is all zeros")
        assert ("gone", 2) not in story.kinds(), "it is the last one"


async def test_nothing_runs_after_the_end():
    story = Story(1)
    never = asyncio.Event()
    story.answers[1] = [never]
    before = asyncio.all_tasks()
    async with story.crew as crew:
        carrying = asyncio.ensure_future(crew.carry(0, 0, story.work))
        await wait_for(story, ("start", 1))
        carrying.cancel()
    await asyncio.gather(carrying, return_exceptions=True)
    assert asyncio.all_tasks() == before


async def wait_for(story, event):
    """Until an event has come."""
    await asyncio.wait_for(story.seen(event).wait(), PATIENCE_S)
