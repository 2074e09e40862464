"""Tests of workers with different speeds: the model of time on made-up rounds, and the choice."""

from types import SimpleNamespace

import pytest

from ddlf.errors import ConfigError
from ddlf.events import Committed, UpdateArrived
from ddlf.events.record import RoundRecord
from ddlf.extras.planner.measurement_files import Measurements
from ddlf.extras.planner.model import Measured, Setting, TimeModel, Way
from ddlf.extras.planner.planned import option_words
from ddlf.extras.planner.planning import can_follow_speeds, plan_from
from ddlf.extras.planner.probe import Rounds
from ddlf.extras.planner.result import slowest_worker_line
from ddlf.extras.planner.speeds import slowest, slowness_of
from ddlf.worker.status import ExecutorInfo
from tests.extras.planner.test_explain import rounds
from tests.training.models import Quick

STAR = Way("sync", "star", "float32")


def made_up(slowness, slots, batch, steps, balanced=False):
    """Return the seconds of a round.

    A step takes 2 ms plus 50 us for each sample on the fastest worker. An exchange of N slots takes 30 + 5 N ms.

    With parts by speed, each worker has at least one step, and its last step has few samples.
    """
    used = slowness[:slots]
    training = max(used) * steps * (0.002 + 5e-5 * batch)
    if balanced:
        parts = [max(slots * steps / slow / sum(1 / other for other in used), 1.0) for slow in used]
        training = max(slow * (int(part + 1e-9) + 1) for slow, part in zip(used, parts, strict=True)) * 0.002
        training += max(slow * part for slow, part in zip(used, parts, strict=True)) * 5e-5 * batch
    return training + 0.030 + 0.005 * slots


def measured(slowness, *, balanced=False):
    rounds = []
    workers = len(slowness)
    for slots, batch, steps in [(1, 64, 2), (1, 64, 40), (1, 128, 20), (workers, 64, 2), (workers, 64, 40)]:
        setting = Setting(way=STAR, slots=slots, batch=batch, steps=steps, balanced=balanced and slots > 1)
        paces = tuple((number, 1e-4 * slow) for number, slow in enumerate(slowness[:slots], 1))
        seconds = made_up(slowness, slots, batch, steps, setting.balanced)
        rounds.append(Measured(setting=setting, seconds=(seconds,) * 3, paces=paces))
    return rounds


@pytest.mark.parametrize("slowness", [(1, 1, 1, 3), (3, 1, 1, 1), (1, 2, 1, 3), (1.5, 3)])
@pytest.mark.parametrize("balanced", [False, True])
def test_rounds_of_unequal_workers_are_predicted(slowness, balanced):
    model = TimeModel(measured(slowness, balanced=balanced))
    fastest = min(slowness)
    assert model.slowness == pytest.approx({number: slow / fastest for number, slow in enumerate(slowness, 1)})
    for slots in range(1, len(slowness) + 1):
        for by_speed in (False, True):
            setting = Setting(way=STAR, slots=slots, batch=100, steps=300, balanced=by_speed)
            assert model.predict(setting).seconds == pytest.approx(
                made_up(slowness, slots, 100, 300, by_speed), rel=1e-6
            )
    assert model.step(64) == pytest.approx(fastest * (0.002 + 64 * 5e-5), rel=1e-6)


def test_almost_equal_workers_count_as_equal():
    assert slowness_of({1: 1.0, 2: 1.4}) == slowness_of({}) == {}
    assert slowness_of({2: 3.0, 1: 1.0}) == {1: 1.0, 2: 3.0}
    assert slowest([1.0, 1.0, 3.0], 10, balanced=False) == (30.0, 30.0)
    assert slowest([1.0, 1.0, 3.0], 10, balanced=True) == (15.0, pytest.approx(10 * 3 / (1 + 1 + 1 / 3)))


def test_parts_by_speed_have_at_least_one_full_and_one_incomplete_batch():
    """If the part of the slow worker has 51 samples, it makes 2 of the 4 steps with batches of 50."""
    assert slowest([1.0, 3.0], 2, balanced=True) == (6.0, pytest.approx(3.0))
    assert slowest([1.0, 100.0], 2, balanced=True) == (200.0, 100.0)


def plan_of(slowness, monkeypatch, batches=(64,), **settings):
    """Return the plan of an app on made-up workers. The parts of the data may follow the speeds."""
    monkeypatch.setattr(
        "ddlf.extras.planner.planning.can_follow_speeds", lambda app, batch_parts: settings["balance"] is not None
    )
    workers = [
        SimpleNamespace(id=number, executor=ExecutorInfo(host=f"pc{number:02}"))
        for number in range(1, len(slowness) + 1)
    ]
    app = SimpleNamespace(
        cluster=SimpleNamespace(N=len(slowness), workers=workers),
        slots=None,
        master_epochs=4,
        worker_epochs=1,
        worker_steps=None,
        round_samples=None,
        balance=settings["balance"] or "equal",
    )
    return plan_from(
        app, [STAR], Measurements(measured=tuple(measured(slowness)), samples=640_000, budget_s=60.0), batches
    )


def test_a_batch_of_more_than_all_samples_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match="a batch of 640001 samples is more than the 640000 samples of the data"):
        plan_of((1, 1), monkeypatch, (64, 640_001), balance="equal")


def test_a_slow_worker_is_left_out_or_gets_less(monkeypatch):
    plan = plan_of((1, 1, 1, 3), monkeypatch, balance=None)  # parts cannot follow the speeds
    assert (plan.now.setting.slots, plan.best.setting.slots) == (4, 3)
    assert plan.wish.epochs == 4  # the epochs of the app
    assert plan.in_other_order is None
    plan = plan_of((1, 1, 1, 3), monkeypatch, balance="equal")
    assert (plan.best.setting.slots, plan.best.setting.balanced) == (4, True)
    assert option_words(plan.best) == ["--slots 4", "--balance speed"]
    assert plan.now.epoch.seconds == pytest.approx(2500 * made_up((1, 1, 1, 3), 4, 64, 1) - 2499 * 0.05, rel=1e-6)


@pytest.mark.parametrize(("batch_parts", "worker_steps", "follows"), [(1, None, True), (2, None, False), (2, 10, True)])
def test_parts_do_not_follow_speeds_if_cards_cannot_divide_them(batch_parts, worker_steps, follows):
    app = Quick()
    app.worker_steps = worker_steps
    assert can_follow_speeds(app, batch_parts) is follows


def test_a_slow_first_worker_is_named(monkeypatch):
    plan = plan_of((3, 1, 1, 1), monkeypatch, balance=None)
    assert plan.in_other_order is not None
    assert plan.in_other_order.setting.slots == 3
    assert plan.best.epoch.seconds == pytest.approx(made_up((3, 1, 1, 1), 4, 64, 2500), rel=1e-6)
    assert plan.in_other_order.epoch.seconds == pytest.approx(made_up((1, 1, 1, 3), 3, 64, 10_000 / 3), rel=1e-6)
    assert slowest_worker_line(plan) == [
        "slowest   worker 1 on pc01 (0.33x): if the cluster lists it last, 3 slots take 17.4 s an epoch"
    ]
    assert plan_of((1, 1, 1, 1), monkeypatch, balance=None).in_other_order is None


@pytest.mark.parametrize(("slots", "steps", "seconds"), [(False, 1.5, 3.5), (True, 3, 3.5)])
def test_measured_rounds_have_the_pace_of_each_worker(slots, steps, seconds):
    """Worker 2 takes three times as long. Without common rounds, only its rounds count."""
    now, way = [0.0], Way("async" if slots else "sync", "star", "float32")
    heard = Rounds(Setting(way=way, slots=2, batch=3, steps=steps), clock=lambda: now[0])
    for now[0], event in rounds(compute=(1.0, 3.0), slots=slots):
        heard.hear(event)
    result = heard.result()
    assert result.median == pytest.approx(seconds)
    assert dict(result.paces) == pytest.approx({1: 1 / 9, 2: 3 / 9})


def test_rounds_of_slots_that_are_about_equally_fast_all_count():
    now, way = [0.0], Way("async", "star", "float32")
    heard = Rounds(Setting(way=way, slots=2, batch=3, steps=3), clock=lambda: now[0])
    for now[0], event in rounds(compute=(1.0, 1.1), slots=True):
        heard.hear(event)
    assert len(heard.result().seconds) == 8


def test_rounds_of_a_slow_slot_are_awaited_without_common_rounds():
    """Worker 2 takes nine times as long for a round. Its rounds must be counted, even if worker 1 has made enough rounds."""
    now, stopped, way = [0.0], [], Way("async", "star", "float32")
    heard = Rounds(Setting(way=way, slots=2, batch=4, steps=1), lambda: stopped.append(now[0]), clock=lambda: now[0])
    costs = dict(
        transfer_s=0.0, merge_s=0.0, bytes_out=1, bytes_back=1, epochs=1, compute_s=0.1, seconds=0.1, samples=4
    )
    for number in range(1, 200):
        now[0] = 0.1 * number
        for slot in (1, 2) if number % 9 == 0 else (1,):
            heard.hear(Committed(record=RoundRecord(round=number, rounds=200, version=number, slot=slot, **costs)))
        if stopped:
            break
    assert stopped == [pytest.approx(0.9 * 4)]  # two rounds compile, and two rounds count
    assert heard.result().median == pytest.approx(0.9)


def test_short_rounds_at_the_end_of_an_epoch_have_no_pace():
    """Every second round has one sample in each slot, but takes almost the full time. This does not mean a slow worker."""
    now = [0.0]
    heard = Rounds(Setting(way=STAR, slots=2, batch=3, steps=1.5), clock=lambda: now[0])
    costs = dict(transfer_s=0.1, bytes_out=1, bytes_back=1, epochs=1)
    for number in range(1, 11):
        is_short = number % 2 == 0
        for worker, longer in ((1, 1.1), (2, 1.0)):
            samples, compute = (1, 0.8 * longer) if is_short else (4.5, 0.9 * longer)
            heard.hear(
                UpdateArrived(round=number, slot=worker, worker=worker, samples=samples, compute_s=compute, **costs)
            )
        now[0] += 1.0
        record = RoundRecord(
            round=number,
            rounds=10,
            version=number,
            slot=None,
            samples=2 if is_short else 9,
            seconds=1.0,
            compute_s=1.0,
            merge_s=0.0,
            **costs,
        )
        heard.hear(Committed(record=record))
    assert dict(heard.result().paces) == pytest.approx({1: 0.22, 2: 0.2})


def test_rounds_whose_commit_waits_for_an_evaluation_have_their_own_times():
    """Each second commit comes with that of the next round, as if the weights between them had been evaluated."""
    now = [0.0]
    heard = Rounds(Setting(way=STAR, slots=2, batch=4, steps=1), clock=lambda: now[0])
    costs = dict(transfer_s=0.1, bytes_out=1, bytes_back=1, epochs=1, compute_s=0.8)
    waiting = []
    for number in range(1, 13):
        for worker in (1, 2):
            now[0] += 0.5
            heard.hear(UpdateArrived(round=number, slot=worker, worker=worker, samples=4, **costs))
        waiting.append(
            RoundRecord(round=number, rounds=12, version=number, samples=8, seconds=1.0, merge_s=0.0, **costs)
        )
        if number % 2 == 0:
            for record in waiting:
                heard.hear(Committed(record=record))
            waiting = []
    result = heard.result()
    assert result.seconds == pytest.approx([1.0] * 10)
    assert dict(result.paces) == pytest.approx({1: 0.2, 2: 0.2})
