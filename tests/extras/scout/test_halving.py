"""Tests of the search by successive halving, with made-up losses."""

import math
from dataclasses import replace

import pytest

from ddlf.errors import ConfigError
from ddlf.extras.scout.halving import Curve, Point, Rung, Trial, grid, measure_neighbours, rungs, search
from ddlf.extras.scout.verdict import interval, judged

LADDER = [Rung(steps=10, starts=1), Rung(steps=20, starts=2), Rung(steps=40, starts=3)]
RATES = grid(1e-5, 10.0)


def bowl(trial, best=0.03):
    """Return the loss of a trial: 2.3 before training, smallest at ``best``, and infinite from 100 times ``best``."""
    if not trial.steps:
        return 2.3
    far = abs(math.log10(trial.rate / best))
    if trial.rate >= 100 * best:
        return math.nan
    return min(2.3, 0.3 + 0.5 * far**2 + 1.0 / trial.steps + 0.001 * trial.start)


def run(steps, loss=bowl):
    """Run a search with made-up losses. Return its curve, and all trials by rung."""
    trials_by_rung = []
    try:
        trials = next(steps)
        while True:
            trials_by_rung.append(list(trials))
            trials = steps.send([loss(trial) for trial in trials])
    except StopIteration as end:
        return end.value, trials_by_rung


def test_a_grid_has_two_rates_a_decade_with_two_digits():
    assert RATES == [1e-5, 3.2e-5, 1e-4, 3.2e-4, 1e-3, 3.2e-3, 0.01, 0.032, 0.1, 0.32, 1.0, 3.2, 10.0]
    assert grid(0.01, 0.02) == [0.01, 0.02]


@pytest.mark.parametrize(
    ("low", "high", "message"),
    [
        (1.0, 1e-3, "the lower bound 1 is above the upper bound 0.001; --from 0.001 --to 1"),
        (0.1, 0.1, "both bounds are 0.1, and one rate leaves nothing to compare"),
        (1.0, 1.001, "between 1 and 1.001 there is only the rate 1, because more than two digits mean nothing"),
        (0.0, 0.1, "learning rates must be above 0"),
        (math.nan, 0.1, "learning rates must be above 0"),
    ],
)
def test_invalid_bounds_are_refused(low, high, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        grid(low, high)


def test_a_search_halves_the_rates_and_keeps_the_rate_of_the_user():
    curve, trials_by_rung = run(search(RATES, 2e-5, LADDER))
    first, *later = trials_by_rung
    assert first == [Trial(rate=0.0, start=start, steps=0) for start in range(3)]
    assert [len({trial.rate for trial in trials}) for trials in later] == [14, 8, 5]
    assert [trials[0].steps for trials in later] == [10, 20, 40]
    assert all(2e-5 in {trial.rate for trial in trials} for trials in later)
    assert curve.first == (2.3, 2.3, 2.3)
    assert [point.rate for point in curve.points] == sorted([*RATES, 2e-5])
    assert (judged(curve, 2e-5).best, judged(curve, 2e-5).rate) == (0.032, 0.032)


@pytest.mark.parametrize(
    ("best", "chosen"),
    [
        (0.1, 0.06),
        (0.06, 0.06),  # 0.03 is as near to the middle
        (0.03, 0.03),
        (0.3, 0.1),
    ],
)
def test_the_middle_between_the_best_rate_and_the_lowest_one_that_is_as_good_wins(best, chosen):
    curve = points(r1=1.5, r3=1.05, r6=1.05, r10=1.05, r30=1.05)
    changed = [replace(point, losses=(1.0,)) if point.rate == best else point for point in curve.points]
    verdict = judged(replace(curve, points=tuple(changed)), None)
    assert (verdict.low, verdict.best, verdict.rate) == (0.03, best, chosen)


def test_a_rate_that_left_the_search_earlier_does_not_win():
    losses = {0.01: 1.5, 0.03: 1.05, 0.1: 1.0}
    curve = Curve(
        first=(2.0,),
        points=tuple(
            Point(rate=rate, steps=2 - (rate == 0.01), losses=(loss,), least=1.45) for rate, loss in losses.items()
        ),
    )
    verdict = judged(curve, None)
    assert (verdict.low, verdict.rate, verdict.best, verdict.high) == (0.01, 0.1, 0.1, 0.1)


def test_equal_losses_give_the_lowest_rate():
    curve, _ = run(search([0.1, 0.01, 1.0], None, LADDER), lambda trial: 2.0 if not trial.steps else 1.0)
    assert judged(curve, None).rate == 0.01


def test_a_rate_that_diverges_from_one_start_never_wins():
    def loss(trial):
        return math.nan if trial.start == 2 and trial.rate > 0.02 else bowl(trial)

    curve, _ = run(search(RATES, None, LADDER), loss)
    assert judged(curve, None).best == 0.01
    assert math.isinf(curve.point_of(0.032).loss)


def test_a_search_ends_if_only_a_rate_outside_the_bounds_learns():
    """The user's rate, 0.03, cannot be the answer, so longer trials of it show nothing."""
    high = grid(20.0, 30.0)
    curve, trials_by_rung = run(search(high, 0.03, LADDER, 20.0, 30.0))
    assert [len(trials) for trials in trials_by_rung] == [3, 1 + len(high)]
    assert math.isfinite(curve.point_of(0.03).loss)
    assert len(run(search(high, 0.03, LADDER))[1]) == 4  # without bounds, it can


def test_a_search_ends_if_each_trial_diverges():
    curve, trials_by_rung = run(search(RATES, 0.1, LADDER), lambda trial: math.inf if trial.steps else 2.3)
    assert len(trials_by_rung) == 2
    assert all(math.isinf(point.loss) for point in curve.points)


def test_half_and_double_are_measured_as_long_as_the_winner():
    curve, _ = run(search(RATES, None, LADDER))
    more, trials_by_rung = run(measure_neighbours(curve, 0.032, LADDER[-1]))
    assert [trial.rate for trial in trials_by_rung[0]] == [0.016] * 3 + [0.064] * 3
    assert more.point_of(0.064) == Point(
        rate=0.064, steps=40, losses=more.point_of(0.064).losses, least=more.point_of(0.016).loss
    )
    assert run(measure_neighbours(more, 0.032, LADDER[-1])) == (more, [])


def points(**losses):
    return Curve(
        first=(2.0,),
        points=tuple(Point(rate=float(rate[1:]) / 100, steps=1, losses=(loss,)) for rate, loss in losses.items()),
    )


def test_the_interval_has_no_gaps():
    curve = points(r1=1.01, r2=1.5, r3=1.09, r10=1.0, r30=1.099, r99=1.101)
    assert [point.rate for point in interval(curve, 0.1)] == [0.03, 0.1, 0.3]


@pytest.mark.parametrize(
    ("user_rate", "rate", "keeps"),
    [(0.03, 0.03, True), (0.1, 0.1, True), (0.3, 0.1, False), (0.02, 0.1, False), (None, 0.1, False)],
)
def test_the_rate_of_the_user_is_kept_if_it_is_as_good(user_rate, rate, keeps):
    curve = points(r1=1.01, r2=1.5, r3=1.09, r10=1.0, r30=1.099)
    verdict = judged(curve, user_rate)
    assert (verdict.rate, verdict.keeps) == (rate, keeps)


@pytest.mark.parametrize("steps", [100, 2_000, 100_000])
def test_a_search_uses_about_its_limit_of_steps(steps):
    ladder = rungs(steps, len(RATES), 10**9)
    curve, trials_by_rung = run(search(RATES, 1e-4, ladder))
    _, more = run(measure_neighbours(curve, judged(curve, 1e-4).rate, ladder[-1]))
    total = sum(trial.steps for trials in [*trials_by_rung, *more] for trial in trials)
    assert 0.5 * steps <= total <= max(1.3 * steps, 150)


def test_no_trial_is_longer_than_the_run():
    assert [rung.steps for rung in rungs(100_000, 13, 50)] == [50, 50, 50]


def test_trials_from_fewer_starts_do_not_win_if_the_run_is_as_short_as_all_trials():
    """The last start learns less than the first ones, so rates without a trial of it look better than they are."""

    def loss(trial):
        return bowl(trial) + (1.0 if trial.start == 2 and trial.steps else 0.0)

    curve, _ = run(search(RATES, None, rungs(3_000, len(RATES), 10)), loss)
    assert {point.steps for point in curve.points} == {10}
    assert {len(point.losses) for point in curve.longest} == {3}
    assert (judged(curve, None).best, judged(curve, None).rate) == (0.032, 0.032)
