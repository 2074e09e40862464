"""Tests of the crew, which has slots carried by workers that join and leave. The workers are fake, the event loop is real."""

import asyncio
import contextlib

import pytest

from ddlf import IApp
from ddlf.cluster.link import Notice
from ddlf.errors import (
    AppMissing,
    AuthError,
    ClusterTooSmall,
    ExecutorCrashed,
    LeaseError,
    RemoteError,
    WorkerLost,
)
from ddlf.testing import FakeCluster, FakeWorker
from ddlf.training.crew.crew import Crew
from ddlf.training.crew.recovery import LOSS
from ddlf.training.reporter import hooked
from tests.patience import PATIENCE_S


class Returning(FakeWorker):
    """A worker that returns, or fails to return, when the test decides it."""

    def __init__(self, number):
        super().__init__(number)
        self.back = asyncio.Event()
        self.error = None

    async def reconnect(self):
        if self.lost:
            await self.back.wait()
        if self.error is not None:
            raise self.error
        self.notice = None


class Story:
    """Records events, and gives the answers of the workers in order. The last answer is repeated."""

    def __init__(self, count, **options):
        self.cluster = FakeCluster(0)
        self.cluster.workers = [Returning(number) for number in range(1, count + 1)]
        self.events = []
        self.opened = []
        self.calls = []
        self.answers = {}
        self.openings = {}
        self.waited = {}
        self.app = IApp()
        self.app.on_event = self.observe
        self.crew = Crew(self.cluster, self.open, self.app.run_context.emit, **options)

    @contextlib.asynccontextmanager
    async def begun(self):
        """Enter the crew, which opens its workers."""
        async with self.crew as crew, hooked(self.app, crew.end):
            yield crew

    @contextlib.asynccontextmanager
    async def ready(self):
        """Enter the crew, and wait until training can begin."""
        async with self.begun() as crew:
            await asyncio.wait_for(crew.ready(), 5)
            yield crew

    def observe(self, event):
        self.events.append(event)
        self.signal_of((event.kind, event.worker)).set()

    def signal_of(self, event):
        return self.waited.setdefault(event, asyncio.Event())

    async def open(self, worker):
        self.opened.append(worker.id)
        self.signal_of((f"opening {self.opened.count(worker.id)}", worker.id)).set()
        outcomes = self.openings.get(worker.id, [])
        outcome = outcomes.pop(0) if outcomes else None
        if isinstance(outcome, asyncio.Event):
            await outcome.wait()
        elif outcome is not None:
            worker.lost = isinstance(outcome, WorkerLost)
            raise outcome

    async def work(self, worker, holds):
        self.calls.append((worker.id, holds))
        answers = self.answers.get(worker.id, [])
        answer = answers.pop(0) if answers else worker.id
        if isinstance(answer, asyncio.Event):
            await answer.wait()
            return worker.id
        if isinstance(answer, Exception):
            worker.lost = isinstance(answer, LOSS)
            raise answer
        return answer

    def kinds(self):
        return [(event.kind, event.worker) for event in self.events if event.kind not in ("start", "finish")]


async def test_another_worker_carries_the_slot_of_a_lost_worker():
    story = Story(2)
    story.answers[1] = [WorkerLost("gone")]
    async with story.ready() as crew:
        assert await asyncio.gather(crew.carry(0, 0, story.work), crew.carry(1, 0, story.work)) == [2, 2]
    assert story.kinds() == [("lost", 1)]
    assert crew.losses == 1


async def test_a_returning_worker_is_opened_before_it_carries_a_slot():
    story = Story(1)
    story.answers[1] = [ExecutorCrashed("ended"), "done"]
    story.cluster.workers[0].back.set()
    async with story.ready() as crew:
        assert await crew.carry(0, 0, story.work) == "done"
    assert story.opened == [1, 1]
    assert story.kinds() == [("lost", 1), ("back", 1)]


async def test_event_of_an_executor_that_ended_while_it_was_idle_has_the_reason():
    story = Story(1)
    (worker,) = story.cluster.workers
    worker.back.set()
    before, crash = ExecutorCrashed("an earlier run ended it"), ExecutorCrashed("the executor was ended by SIGKILL")
    worker.crash = before
    async with story.ready() as crew:
        story.answers[1] = [AppMissing("another run"), AppMissing("new executor"), "done"]
        carried = asyncio.ensure_future(crew.carry(0, 0, story.work))
        await story.signal_of(("back", 1)).wait()
        worker.crash = crash
        assert await carried == "done"
    lost = [event.text.partition(";")[0] for event in story.events if event.kind == "lost"]
    assert lost == ["another run", "the executor was ended by SIGKILL"]


async def test_worker_holds_a_slot_only_if_it_carried_it_last():
    story = Story(1)
    story.cluster.workers[0].back.set()
    async with story.ready() as crew:
        await crew.carry(0, 0, story.work)
        await crew.carry(0, 0, story.work)
        story.answers[1] = [AppMissing("new executor")]
        await crew.carry(0, 0, story.work)
        await crew.carry(0, 0, story.work)
    assert story.calls == [(1, False), (1, True), (1, True), (1, False), (1, True)]


async def test_an_error_of_the_app_is_raised_at_once_and_nobody_is_lost():
    story = Story(2)
    story.answers[1] = [RemoteError("ValueError", "bad", "")]
    async with story.ready() as crew:
        with pytest.raises(RemoteError):
            await crew.carry(0, 0, story.work)
    assert story.kinds() == []


async def test_slot_that_ends_three_executors_raises_the_last_error():
    story = Story(1)
    story.answers[1] = [ExecutorCrashed(f"number {n}") for n in range(3)]
    story.cluster.workers[0].back.set()
    async with story.ready() as crew:
        with pytest.raises(ExecutorCrashed, match="number 2"):
            await crew.carry(0, 0, story.work)


async def test_without_workers_training_waits_and_then_raises():
    story = Story(1, wait_s=0.05)
    story.answers[1] = [WorkerLost("cable cut")]
    async with story.ready() as crew:
        with pytest.raises(ClusterTooSmall, match=r"none came back within 0\.05 s.*cable cut"):
            await crew.carry(0, 0, story.work)
    assert story.kinds() == [("lost", 1), ("waiting", None)]


async def test_a_worker_that_refuses_the_run_is_excluded():
    story = Story(2)
    story.answers[1] = [WorkerLost("gone")]
    story.cluster.workers[0].back.set()
    async with story.ready() as crew:
        story.cluster.workers[0].error = AuthError("other token")
        assert await asyncio.gather(crew.carry(0, 0, story.work), crew.carry(1, 0, story.work)) == [2, 2]
        assert [await crew.carry(slot, 0, story.work) for slot in (0, 1)] == [2, 2]
    assert story.kinds() == [("lost", 1), ("gone", 1)]


async def test_a_master_that_was_replaced_stops():
    story = Story(1)
    story.answers[1] = [WorkerLost("silent")]
    story.cluster.workers[0].back.set()
    async with story.ready() as crew:
        story.cluster.workers[0].error = LeaseError("taken over by anna")
        with pytest.raises(LeaseError, match="anna"):
            await crew.carry(0, 0, story.work)


async def test_a_worker_that_joins_takes_part_from_the_next_round():
    story = Story(1)
    release = asyncio.Event()
    async with story.ready() as crew:
        story.cluster.workers.append(Returning(2))
        story.cluster.workers[1].back.set()
        joined = asyncio.ensure_future(wait_for(story, ("joined", 2)))
        crew.begin_round()
        await joined
        story.answers[1] = [release]
        carried = asyncio.gather(crew.carry(0, 0, story.work), crew.carry(1, 0, story.work))
        await wait_for(story, ("finish", 2))
        release.set()
        assert await carried == [1, 2]
    assert story.opened == [1, 2]


async def test_late_slot_gets_a_backup_and_the_first_answer_counts(monkeypatch):
    monkeypatch.setattr("ddlf.training.crew.schedule.STRAGGLER_LEAST_S", 0.02)
    monkeypatch.setattr("ddlf.training.crew.schedule.FIRST_SLOT_S", 0.0)
    story = Story(2)
    never = asyncio.Event()
    story.answers = {1: [1, "first"], 2: [never]}
    async with story.ready() as crew:
        assert await asyncio.gather(crew.carry(0, 0, story.work), crew.carry(1, 0, story.work)) == [1, "first"]
        assert ("backup", 1) in story.kinds()
        # The stopped worker is free again.
        assert sorted(await asyncio.gather(crew.carry(0, 0, story.work), crew.carry(1, 0, story.work))) == [1, 2]


async def test_worker_with_three_rejected_updates_in_a_row_is_excluded():
    story = Story(2)
    async with story.ready() as crew:
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
    async with story.ready() as crew:
        carrying = asyncio.ensure_future(crew.carry(0, 0, story.work))
        await wait_for(story, ("start", 1))
        carrying.cancel()
    await asyncio.gather(carrying, return_exceptions=True)
    assert asyncio.all_tasks() == before


async def test_training_begins_when_all_workers_are_open():
    story = Story(3)
    first = asyncio.Event()
    story.openings[1] = [first]
    async with story.begun() as crew:
        beginning = asyncio.ensure_future(crew.ready())
        for worker in (1, 2, 3):
            await wait_for(story, ("opening 1", worker))
        assert not beginning.done()
        first.set()
        await beginning
        assert await asyncio.gather(*(crew.carry(slot, 0, story.work) for slot in range(3))) == [1, 2, 3]
    assert story.kinds() == []


@pytest.mark.parametrize("loss", [ExecutorCrashed("ended"), WorkerLost("cut"), AppMissing("new executor")])
async def test_worker_lost_while_it_opens_is_opened_again(loss):
    story = Story(2)
    story.openings[2] = [loss]
    async with story.ready() as crew:
        story.cluster.workers[1].back.set()
        await wait_for(story, ("back", 2))
        assert await asyncio.gather(crew.carry(0, 0, story.work), crew.carry(1, 0, story.work)) == [1, 2]
    assert story.opened == [1, 2, 2]
    assert story.kinds() == [("lost", 2), ("back", 2)]


async def test_run_waits_for_a_worker_if_all_are_lost_while_they_are_opened():
    story = Story(2)
    story.openings = {1: [WorkerLost("cut")], 2: [WorkerLost("cut")]}
    async with story.begun() as crew:
        beginning = asyncio.ensure_future(crew.ready())
        await wait_for(story, ("waiting", None))
        story.cluster.workers[1].back.set()
        await beginning
        assert await crew.carry(0, 0, story.work) == 2
    story = Story(1, wait_s=0.05)
    story.openings[1] = [WorkerLost("cut")]
    with pytest.raises(ClusterTooSmall, match=r"none came back within 0\.05 s.*cut"):
        async with story.ready():
            pass


async def test_a_worker_may_take_long_to_load_its_data(monkeypatch):
    monkeypatch.setattr("ddlf.training.crew.recovery.RETRY_S", (0.0, 0.0))
    story = Story(1, wait_s=0.1)
    loading = asyncio.Event()
    story.openings[1] = [ExecutorCrashed("ended"), loading]
    async with story.begun() as crew:
        beginning = asyncio.ensure_future(crew.ready())
        await wait_for(story, ("opening 2", 1))
        await asyncio.wait([beginning], timeout=0.3)
        assert not beginning.done()
        loading.set()
        await beginning


async def test_worker_on_which_the_app_fails_is_excluded_with_the_reason():
    story = Story(2)
    story.openings[1] = [RemoteError("FileNotFoundError", "train.npz", "Traceback ...", worker="worker 1")]
    async with story.ready() as crew:
        assert await asyncio.gather(crew.carry(0, 0, story.work), crew.carry(1, 0, story.work)) == [2, 2]
    assert story.kinds() == [("gone", 1)]
    assert story.events[0].text.startswith(
        "worker 1: FileNotFoundError: train.npz; it is excluded from this run\n\nTraceback"
    )


async def test_an_app_that_fails_on_all_workers_is_one_error_and_no_event():
    story = Story(3)
    for worker in (1, 2, 3):
        story.openings[worker] = [RemoteError("KeyError", "layers", f"Traceback {worker}")]
    with pytest.raises(RemoteError, match="KeyError: layers") as caught:
        async with story.ready():
            pass
    assert str(caught.value).count("KeyError: layers") == 1
    assert story.events == []


async def test_different_errors_of_the_app_are_raised_together():
    story = Story(3)
    story.openings = {
        1: [RemoteError("KeyError", "layers", "")],
        2: [RemoteError("ValueError", "shape", "")],
        3: [ExecutorCrashed("was killed") for _ in range(3)],
    }
    with pytest.raises(RemoteError) as caught:
        async with story.ready():
            pass
    assert [error.remote_message for error in (caught.value, *caught.value.others)] == ["layers", "shape"]


async def test_a_worker_whose_executor_ends_in_each_opening_is_excluded():
    story = Story(2)
    story.openings[1] = [ExecutorCrashed(f"number {n}") for n in range(3)]
    async with story.ready():
        await wait_for(story, ("gone", 1))
    assert story.opened.count(1) == 3
    one_worker = Story(1)
    one_worker.openings[1] = [ExecutorCrashed(f"number {n}") for n in range(3)]
    with pytest.raises(ExecutorCrashed, match="number 2"):
        async with one_worker.ready():
            pass


async def test_a_worker_that_loses_the_app_repeatedly_is_excluded():
    story = Story(1)
    story.cluster.workers[0].back.set()
    story.answers[1] = ["fine", AppMissing("no app"), AppMissing("no app"), "fine", *[AppMissing("no app")] * 3]
    async with story.ready() as crew:
        assert [await crew.carry(0, number, story.work) for number in range(2)] == ["fine", "fine"]
        with pytest.raises(AppMissing, match="no app, for the 3rd time; another program sends it apps"):
            await crew.carry(0, 2, story.work)
    assert story.opened == [1] * 5


async def test_second_run_on_the_same_workers_is_refused():
    story, second_run = Story(2), Story(1)
    second_run.cluster.workers = story.cluster.workers[1:]
    async with story.ready() as crew:
        with pytest.raises(LeaseError, match="worker 2 is in another training run of this program; wait"):
            async with second_run.crew:
                pass
        assert second_run.opened == []
        assert await crew.carry(0, 0, story.work) == 1
    async with second_run.ready() as crew:
        assert await crew.carry(0, 0, second_run.work) == 2


async def test_run_ends_while_a_worker_is_still_opening():
    story = Story(2)
    opening = asyncio.Event()
    story.openings[2] = [ExecutorCrashed("ended"), opening]
    async with story.ready() as crew:
        await wait_for(story, ("opening 2", 2))
        assert await crew.carry(0, 0, story.work) == 1
    (left,) = story.crew._recovery.openings
    assert not left.done()
    opening.set()
    await left


@pytest.mark.parametrize("kind", ["start", "finish", "lost", "back", "joined", "gone", "waiting", "backup"])
@pytest.mark.parametrize("is_async", [False, True])
async def test_error_in_on_event_ends_the_run(kind, is_async, monkeypatch):
    monkeypatch.setattr("ddlf.training.crew.schedule.STRAGGLER_LEAST_S", 0.02)
    story = Story(2)
    usual = story.app.on_event

    def observe(event):
        usual(event)
        if event.kind == kind:
            raise KeyError("in on_event")

    async def observe_later(event):
        await asyncio.sleep(0)
        observe(event)

    story.app.on_event = observe_later if is_async else observe
    never = asyncio.Event()
    lost = [WorkerLost("gone"), never]
    story.answers = {
        "lost": {1: lost, 2: [never]},
        "back": {1: lost, 2: [never]},
        "gone": {1: lost, 2: [never]},
        "waiting": {1: lost, 2: lost[:]},
        "joined": {1: [never], 2: [never]},
        "backup": {1: [1, never], 2: [never]},
    }.get(kind, {})

    async def run():
        async with story.ready() as crew:
            if kind == "gone":
                story.cluster.workers[0].error = AuthError("other token")
            for worker in story.cluster.workers:
                (worker.back.clear if kind == "waiting" else worker.back.set)()
            if kind == "joined":
                story.cluster.workers.append(Returning(3))
                crew.begin_round()
            await asyncio.gather(*(crew.carry(slot, 0, story.work) for slot in (0, 1)))

    with pytest.raises(KeyError, match="in on_event"):
        await asyncio.wait_for(run(), 5)


async def test_an_error_inside_the_crew_itself_ends_the_run(monkeypatch):
    story = Story(1)
    async with story.ready() as crew:
        monkeypatch.setattr(crew, "_carry_out_plan", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await crew.carry(0, 0, story.work)
        with pytest.raises(ZeroDivisionError):
            await crew.carry(0, 0, story.work)


async def wait_for(story, event):
    """Wait until the story has an event."""
    await asyncio.wait_for(story.signal_of(event).wait(), PATIENCE_S)


# --- workers that announce their end ----------------------------------------------------------------------------------------


def announces(worker, within_s=60.0):
    worker.notice = Notice("SIGTERM", asyncio.get_running_loop().time() + within_s)
    worker.on_leaving()


async def test_worker_that_announces_its_end_finishes_its_slot_and_is_released_before_the_next_round():
    story = Story(2)
    finishes = story.answers[1] = [asyncio.Event()]
    handed_back = []

    async def hand_back(worker):
        handed_back.append(worker)

    async with story.ready() as crew:
        crew.hand_back.append(hand_back)
        crew.begin_round()
        leaving, _ = story.cluster.workers
        slots = asyncio.gather(crew.carry(0, 0, story.work), crew.carry(1, 0, story.work))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        announces(leaving)
        finishes[0].set() if finishes else None
        story.answers[1] = []
        assert await asyncio.wait_for(slots, PATIENCE_S) == [1, 2]
        assert not leaving.lost, "its update is not merged yet"
        crew.begin_round()
        assert await asyncio.wait_for(crew.carry(0, 1, story.work), PATIENCE_S) == 2
        await asyncio.wait_for(story.signal_of(("left", 1)).wait(), PATIENCE_S)
        assert leaving.lost
        assert handed_back == [1]
        assert crew.losses == 0
        leaving.back.set()
        await asyncio.wait_for(story.signal_of(("back", 1)).wait(), PATIENCE_S)
    assert story.kinds() == [("leaving", 1), ("left", 1), ("back", 1)]


async def test_slot_of_a_leaving_worker_moves_at_once_if_it_would_not_end_in_time():
    story = Story(2)
    story.answers[1] = [asyncio.Event()]
    async with story.ready() as crew:
        crew.finishes = False
        slot = asyncio.ensure_future(crew.carry(0, 0, story.work))
        await asyncio.wait_for(story.signal_of(("start", 1)).wait(), PATIENCE_S)
        announces(story.cluster.workers[0])
        assert await asyncio.wait_for(slot, PATIENCE_S) == 2
        await asyncio.wait_for(story.signal_of(("left", 1)).wait(), PATIENCE_S)
    (event,) = [event for event in story.events if event.kind == "leaving"]
    assert event.slot == 1
    assert event.text == "worker 1 ends within 60 s (SIGTERM); slot 1 moves to another worker"


async def test_run_waits_for_a_worker_that_is_being_released_after_a_notice(monkeypatch):
    story = Story(1)
    release_began, released = asyncio.Event(), asyncio.Event()
    (worker,) = story.cluster.workers
    release = worker.release

    async def slowly():
        release_began.set()
        await released.wait()
        await release()

    monkeypatch.setattr(worker, "release", slowly)
    async with story.ready() as crew:
        crew.finishes = False
        announces(worker)
        slot = asyncio.ensure_future(crew.carry(0, 0, story.work))
        await asyncio.wait_for(release_began.wait(), PATIENCE_S)
        crew.changed()
        for _ in range(3):
            await asyncio.sleep(0)
        assert not slot.done(), "the run ended, although the worker may come back"
        released.set()
        worker.back.set()
        assert await asyncio.wait_for(slot, PATIENCE_S) == 1
