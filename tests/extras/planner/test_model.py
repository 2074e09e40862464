"""The fit and the model of time, against SciPy, formulas and made-up rounds."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from ddlf.errors import ConfigError
from ddlf.extras.planner.choice import Length, alone, choices
from ddlf.extras.planner.fit import fitted, nonnegative
from ddlf.extras.planner.model import Measured, Setting, TimeModel, Way

STAR, GRADIENT = Way("sync", "star", "float32"), Way("sync", "gradient", "float32")


@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 6))
def test_coefficients_are_those_of_scipy(seed, rows, columns):
    chance = np.random.default_rng(seed)
    matrix, target = chance.normal(size=(rows, columns)), chance.normal(size=rows)
    found, (_, least) = nonnegative(matrix, target), nnls(matrix, target)
    assert (found >= 0).all()
    assert np.linalg.norm(matrix @ found - target) == pytest.approx(least, rel=1e-9, abs=1e-9)


def test_columns_of_zeros_and_equal_columns_are_no_problem():
    matrix = np.array([[1.0, 0.0, 1.0], [2.0, 0.0, 2.0]])
    assert matrix @ nonnegative(matrix, np.array([3.0, 6.0])) == pytest.approx([3.0, 6.0])
    assert not nonnegative(matrix, np.array([-1.0, -1.0])).any()


def test_eight_of_ten_intervals_hold_a_new_measurement():
    chance, inside, tries = np.random.default_rng(1), 0, 1000
    rows = np.array([[1.0, n] for n in (1, 2, 4, 8, 16, 32)])
    true = np.array([0.5, 0.1])
    for _ in range(tries):
        noise = 1 + 0.05 * chance.normal(size=7)
        seconds, half = fitted(rows, rows @ true * noise[:6], 0.0).predict(np.array([1.0, 12.0]))
        inside += abs(1.7 * noise[6] - seconds) <= half * seconds
    assert 0.75 <= inside / tries <= 0.85


def made_up(way, slots, batch, steps):
    """Seconds of a round: a step takes 2 ms and 50 us a sample, 1 ms more beside another slot; an exchange 30 + 5 N ms."""
    exchange = 0.030 + 0.005 * slots
    return steps * (0.002 + 5e-5 * batch + 0.001 * (slots - 1)) + exchange


def measured(*settings):
    return [
        Measured(setting=Setting(way=way, slots=n, batch=b, steps=k), seconds=(made_up(way, n, b, k),) * 3)
        for way, n, b, k in settings
    ]


FEW = [(STAR, 1, 64, 2), (STAR, 1, 64, 40), (STAR, 1, 128, 20), (STAR, 2, 64, 2), (STAR, 2, 64, 40), (STAR, 2, 128, 20)]


@pytest.mark.parametrize(("slots", "batch", "steps"), [(1, 64, 400), (2, 100, 7), (8, 256, 1000)])
def test_rounds_of_other_settings_are_predicted(slots, batch, steps):
    model = TimeModel(measured(*FEW, (GRADIENT, 1, 64, 1), (GRADIENT, 2, 64, 1)))
    for way in (STAR, GRADIENT):
        found = model.predict(Setting(way=way, slots=slots, batch=batch, steps=steps))
        assert found.seconds == pytest.approx(made_up(way, slots, batch, steps), rel=1e-6)
        assert found.low <= found.seconds <= found.high
        assert found.within == (slots <= 2)


def test_a_way_that_was_not_measured_is_refused():
    model = TimeModel(measured(*FEW))
    with pytest.raises(ConfigError, match=r"no round of sync, gradient was measured.*--budget"):
        model.predict(Setting(way=GRADIENT, slots=1, batch=64, steps=1))
    with pytest.raises(ConfigError, match="no round was measured"):
        TimeModel([])


def test_the_number_of_slots_with_the_fastest_epoch_is_found():
    model = TimeModel(measured(*FEW))
    found = choices(model, Length(samples=6_400), [64], range(1, 17), [STAR])
    exact = {n: made_up(STAR, n, 64, 100 / n) for n in range(1, 17)}
    assert found[0].setting.slots == min(exact, key=exact.get)
    assert found[0].epoch.seconds == pytest.approx(min(exact.values()), rel=1e-6)
    fit = alone(model, 64, 6_400, STAR)
    assert fit.seconds == pytest.approx(100 * (0.002 + 0.0032), rel=1e-6)
    assert found[0].factor == pytest.approx(fit.seconds / found[0].epoch.seconds)


@pytest.mark.parametrize(
    ("noise", "other", "verdict"), [(0.0, 0.001, "pays off"), (0.0, 0.006, "no gain"), (0.4, 0.001, "unclear")]
)
def test_the_verdict_follows_from_the_interval(noise, other, verdict):
    chance = np.random.default_rng(3)

    def slower(one):
        steps, slots = one.setting.steps, one.setting.slots
        seconds = np.array(one.seconds) + steps * (slots - 1) * (other - 0.001)
        return dataclasses.replace(one, seconds=tuple(seconds * np.exp(noise * chance.normal())))

    model = TimeModel([slower(one) for one in measured(*FEW)])
    assert choices(model, Length(samples=64_000), [64], [2], [STAR])[0].verdict == verdict


@pytest.mark.parametrize(
    ("way", "length", "steps"),
    [
        (STAR, Length(samples=1000), 25.0),
        (STAR, Length(samples=1000, epochs=3), 75.0),
        (STAR, Length(samples=1000, steps=10), 10.0),
        (STAR, Length(samples=1000, steps=90), 25.0),
        (STAR, Length(samples=1000, most=400), 10.0),
        (GRADIENT, Length(samples=1000), 1.0),
    ],
)
def test_batches_of_a_round_follow_from_the_settings(way, length, steps):
    assert length.of(way, slots=2, batch=20) == steps


def test_the_two_constants_of_the_published_study_are_a_special_case():
    """A step costs t_g, and a sample t_s: T = (V / S) t_g + (V / N + V_test) t_s, for two workers on MNIST."""

    def row(batch):
        return [50_000 / batch, 50_000 / 2 + 10_000]

    batches = (100, 500, 1000, 2000)
    t_g, t_s = nonnegative(np.array([row(100), row(2000)]), np.array([62.0, 8.0]))
    assert (t_g, t_s) == (pytest.approx(0.113684, abs=5e-7), pytest.approx(0.00014737, abs=5e-9))
    times = [np.array(row(batch)) @ (t_g, t_s) for batch in batches]
    assert [round(seconds, 2) for seconds in times] == [62.0, 16.53, 10.84, 8.0]
    shares = [100 * row(batch)[0] * t_g / seconds for batch, seconds in zip(batches, times, strict=True)]
    assert [round(share, 1) for share in shares] == [91.7, 68.8, 52.4, 35.5]
