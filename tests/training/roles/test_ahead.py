"""First steps that a worker trains ahead: which they are, what they are good for, and when. No Keras; test_replica.py trains them."""

import asyncio
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from ddlf.testing import FakeCluster, FakeRun
from ddlf.training.roles.ahead import Ahead, following, parts, together
from ddlf.training.slot.replica import Replica
from ddlf.training.slot.task import Task


def task(**more):
    usual = dict(
        slot=1, round=3, slots=2, first_epoch=1, epochs=1, batch_size=4, seed=5, indices=np.arange(20), weights=()
    )
    return Task(**{**usual, "version": 3, "overlap": 2, "ahead": (2, np.arange(20, 28)), **more})


def test_a_round_is_cut_after_the_steps_of_the_overlap_or_is_whole_where_the_slot_has_nothing_of_its_own():
    first, rest = parts(task(), [np.zeros(2), np.asarray(2)])
    assert (first.indices.tolist(), rest.indices.tolist()) == (list(range(8)), list(range(8, 20)))
    for asked, own in ((task(), None), (task(), []), (task(overlap=0), [np.zeros(2), np.asarray(2)])):
        assert parts(asked, own) == (None, asked)
    first, rest = parts(task(indices=np.arange(5)), [np.asarray(2)])
    assert (len(first.indices), len(rest.indices)) == (5, 0)


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, True),
        ({"rates": ((0.1,),)}, False),
        ({"seed": 6}, False),
        ({"slot": 0}, False),
        ({"round": 5}, False),
        ({"before": 2}, False),
        ({"local": "fedprox:0.1"}, False),
        ({"state": {}}, False),
        ({"shared": {"optimizer": []}}, False),
        ({"indices": np.arange(21, 40)}, False),
        ({"first_epoch": 3}, False),
        ({"weights": (np.ones(1),), "version": 9, "merged": (2, 3), "before": 3}, True),
    ],
    ids=str,
)
def test_what_was_trained_ahead_counts_for_the_very_steps_that_are_asked_for_from_what_is_here(change, same):
    made = Ahead(task=following(task()), own=[], metrics={}, fed=[])
    asked = task(**{"round": 4, "first_epoch": 2, "indices": np.arange(20, 40), **change})
    first, _ = parts(asked, [np.asarray(3)])
    assert made.is_of(first) == same


def test_metrics_of_both_parts_are_one_by_samples():
    assert together([({"loss": 1.0, "a": 5.0}, 10), ({"loss": 4.0}, 20)]) == {"loss": 3.0, "a": 5.0}
    assert together([({"loss": 1.0}, 10), ({}, 0)]) == {"loss": 1.0}


class Worker:
    async def compute(self, work, *given):
        return await asyncio.to_thread(work, *given)


def replica():
    made = Replica(Worker(), SimpleNamespace())
    made.carry = lambda asked: SimpleNamespace(to_message=lambda: {"round": asked.round, "update": None})
    made.trained = []
    made._first_steps = lambda asked, state: made.trained.append((asked.round, state)) or "ahead"
    made._kept = SimpleNamespace(left=lambda slot, number: {"own": (slot, number)})
    return made


async def test_a_worker_trains_ahead_behind_its_reply_from_what_the_round_has_left():
    one = replica()
    assert (await one.train(task().to_message()))["round"] == 3
    await one._going
    assert one.trained == [(4, {"own": (1, 3)})]
    assert one._ahead == "ahead"


async def test_the_last_round_and_one_that_was_stopped_train_nothing_ahead():
    one = replica()
    await one.train(task(ahead=None).to_message())
    await one.stop()
    one.go_ahead(task())
    assert one.trained == []


async def test_what_goes_wrong_ahead_is_left_to_the_round_that_asks_for_it():
    one = replica()
    one._first_steps = lambda asked, state: 1 / 0
    one.go_ahead(task())
    assert one._ahead is None


async def test_a_round_that_is_cancelled_behind_steps_that_are_trained_ahead_is_not_begun():
    one, begun, go_on = replica(), [], threading.Event()
    turn, waits = asyncio.Lock(), asyncio.Event()

    async def compute(work, *given):
        if turn.locked():
            waits.set()
        async with turn:
            return await asyncio.to_thread(work, *given)

    one._worker.compute = compute
    one._first_steps = lambda asked, state: go_on.wait(10)
    await one.train(task().to_message())
    one.carry = begun.append
    asked = asyncio.ensure_future(one.train(task(round=4).to_message()))
    await waits.wait()
    asked.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert begun == []
    assert one._ahead is None


async def test_each_task_says_which_samples_the_next_round_of_its_slot_begins_with_but_the_last():
    run = FakeRun(
        FakeCluster(3),
        slots=3,
        master_epochs=2,
        worker_steps=3,
        outer="streaming:fragments=2,overlap=2,alpha=0.5",
        start={"a": np.ones((4, 4), "f4"), "b": np.ones(4, "f4")},
    )
    await run.train_model()
    tasks = {(t.slot, t.round): t for worker in run.cluster.workers for verb, t, *_ in worker.asked if verb == "train"}
    assert max(number for _, number in tasks) == 3
    for (slot, number), one in tasks.items():
        if number == 3:
            assert one.ahead is None
        else:
            then = tasks[slot, number + 1]
            assert one.ahead[0] == then.first_epoch
            assert one.ahead[1].tolist() == then.indices[:32].tolist()
    assert run.ledger.is_exact(2)
