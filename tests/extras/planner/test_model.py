"""Tests that compare the fit and the model of time with SciPy, formulas and made-up rounds."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlf.errors import ConfigError
from ddlf.extras.planner.choice import Choice, Length, Wish, choices, epoch_of_fit, updates
from ddlf.extras.planner.fit import fitted, nonnegative
from ddlf.extras.planner.measurement_files import Measurements
from ddlf.extras.planner.model import Link, Measured, Predicted, Setting, TimeModel, Way
from tests.later import Later

nnls = Later("scipy.optimize", "nnls")

STAR, GRADIENT = Way("sync", "star", "float32"), Way("sync", "gradient", "float32")


@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 6))
def test_coefficients_equal_those_of_scipy(seed, rows, columns):
    chance = np.random.default_rng(seed)
    matrix, target = chance.normal(size=(rows, columns)), chance.normal(size=rows)
    solution, (_, least) = nonnegative(matrix, target), nnls(matrix, target)
    assert (solution >= 0).all()
    assert np.linalg.norm(matrix @ solution - target) == pytest.approx(least, rel=1e-9, abs=1e-9)


def test_columns_of_zeros_and_equal_columns_are_accepted():
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
    """Return the seconds of a round.

    A step takes 2 ms, 50 us for each sample, and 1 ms more beside another slot. An exchange of N slots takes 30 + 5 N ms.
    """
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
        prediction = model.predict(Setting(way=way, slots=slots, batch=batch, steps=steps))
        assert prediction.seconds == pytest.approx(made_up(way, slots, batch, steps), rel=1e-6)
        assert prediction.low <= prediction.seconds <= prediction.high
        assert prediction.within == (slots <= 2)


def test_more_slots_than_a_way_was_measured_with_are_marked():
    model = TimeModel(measured(*FEW, (GRADIENT, 1, 64, 1)))
    marks = [model.predict(Setting(way=way, slots=2, batch=64, steps=1)).within for way in (STAR, GRADIENT)]
    assert marks == [True, False]


def test_the_best_choice_has_no_more_slots_than_its_way_was_measured_with():
    """The cost of further slots was not measured, so the prediction is too short."""
    cheap = Measured(setting=Setting(way=GRADIENT, slots=1, batch=64, steps=1), seconds=(0.006,) * 3)
    model = TimeModel([*measured(*FEW), cheap])
    candidates = choices(model, Length(samples=10_000, steps=2), [64], [1, 2], model.ways)
    assert (candidates[0].setting.way, candidates[0].setting.slots, candidates[0].epoch.within) == (GRADIENT, 2, False)
    best = Wish().best(candidates)
    assert (best.setting.way, best.setting.slots) == (GRADIENT, 1)
    far = [candidate for candidate in candidates if not candidate.epoch.within]
    assert Wish().best(far) == far[0]


def test_a_way_that_was_not_measured_is_refused():
    model = TimeModel(measured(*FEW))
    with pytest.raises(ConfigError, match=r"no round of sync, gradient was measured.*--budget"):
        model.predict(Setting(way=GRADIENT, slots=1, batch=64, steps=1))
    with pytest.raises(ConfigError, match="no round was measured"):
        TimeModel([])


def test_the_number_of_slots_with_the_fastest_epoch_is_found():
    model = TimeModel(measured(*FEW))
    candidates = choices(model, Length(samples=6_400), [64], range(1, 17), [STAR])
    exact = {n: made_up(STAR, n, 64, 100 / n) for n in range(1, 17)}
    assert candidates[0].setting.slots == min(exact, key=exact.get)
    assert candidates[0].epoch.seconds == pytest.approx(min(exact.values()), rel=1e-6)
    fit = epoch_of_fit(model, 64, 6_400, STAR)
    assert fit.seconds == pytest.approx(100 * (0.002 + 0.0032), rel=1e-6)
    assert candidates[0].factor == pytest.approx(fit.seconds / candidates[0].epoch.seconds)


@pytest.mark.parametrize(
    ("noise", "other", "verdict"), [(0.0, 0.001, "pays off"), (0.0, 0.006, "no gain"), (0.4, 0.001, "unclear")]
)
def test_the_verdict_follows_from_the_interval(noise, other, verdict):
    chance = np.random.default_rng(3)

    def slower(item):
        steps, slots = item.setting.steps, item.setting.slots
        seconds = np.array(item.seconds) + steps * (slots - 1) * (other - 0.001)
        return dataclasses.replace(item, seconds=tuple(seconds * np.exp(noise * chance.normal())))

    model = TimeModel([slower(item) for item in measured(*FEW)])
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
    assert length.steps_of(way, slots=2, batch=20) == steps


@pytest.mark.parametrize(
    ("way", "length", "expected"),
    [
        (STAR, Length(samples=1000), 1),
        (STAR, Length(samples=1000, epochs=4), 0.25),
        (STAR, Length(samples=1000, steps=5), 5),
        (GRADIENT, Length(samples=1000), 25),
        (Way("async", "star", "float32"), Length(samples=1000, steps=5), 10),
    ],
)
def test_updates_of_an_epoch(way, length, expected):
    """There are two slots with batches of 20. Without common rounds, each slot updates the weights by itself."""
    setting = Setting(way=way, slots=2, batch=20, steps=length.steps_of(way, 2, 20))
    assert updates(setting, 1000) == pytest.approx(expected)


def test_the_two_constants_of_the_published_study_are_a_special_case():
    """T = (V / S) t_g + (V / N + V_test) t_s for two workers on MNIST: t_g is the time of a step, t_s of a sample."""

    def row(batch):
        return [50_000 / batch, 50_000 / 2 + 10_000]

    batches = (100, 500, 1000, 2000)
    t_g, t_s = nonnegative(np.array([row(100), row(2000)]), np.array([62.0, 8.0]))
    assert (t_g, t_s) == (pytest.approx(0.113684, abs=5e-7), pytest.approx(0.00014737, abs=5e-9))
    times = [np.array(row(batch)) @ (t_g, t_s) for batch in batches]
    assert [round(seconds, 2) for seconds in times] == [62.0, 16.53, 10.84, 8.0]
    shares = [100 * row(batch)[0] * t_g / seconds for batch, seconds in zip(batches, times, strict=True)]
    assert [round(share, 1) for share in shares] == [91.7, 68.8, 52.4, 35.5]


def sent(way, slots, steps, size):
    """Return measured rounds of 100 ms plus 10 ms for each slot, with messages of this size."""
    setting = Setting(way=way, slots=slots, batch=64, steps=steps)
    return Measured(setting=setting, seconds=(0.1 + 0.01 * slots + 1e-3 * steps,) * 3, sent=size)


@pytest.mark.parametrize(
    ("link", "more"), [(Link(bandwidth=1e6), 4.0), (Link(latency=0.05), 0.1), (Link(bandwidth=1e6, latency=0.05), 4.1)]
)
def test_another_link_adds_the_time_of_its_bytes_and_messages(link, more):
    """A slot sends and receives 2 MB in a round."""
    rounds = [sent(STAR, slots, steps, 2e6 * slots) for slots in (1, 2) for steps in (1, 40)]
    setting = Setting(way=STAR, slots=2, batch=64, steps=10)
    usual, slow = (TimeModel(rounds, assumed).predict(setting) for assumed in (None, link))
    assert slow.seconds - usual.seconds == pytest.approx(more)
    assert slow.high - usual.high == pytest.approx(more)
    assert slow.low - usual.low == pytest.approx(
        max(more - 0.12, 0.0), abs=1e-6
    )  # the measured exchange has a link, too
    assert (usual.within, slow.within) == (True, False)
    assert epoch_of_fit(TimeModel(rounds, link), 64, 6400, STAR).seconds == pytest.approx(
        epoch_of_fit(TimeModel(rounds), 64, 6400, STAR).seconds
    )


def test_asynchronous_slots_may_share_a_link_or_not():
    way = Way("async", "star", "float32")
    rounds = [sent(way, slots, steps, 2e6) for slots in (1, 2) for steps in (1, 40)]
    setting = Setting(way=way, slots=2, batch=64, steps=10)
    usual, slow = (TimeModel(rounds, assumed).predict(setting) for assumed in (None, Link(bandwidth=1e6)))
    assert slow.high - usual.high == pytest.approx(4.0)
    assert slow.low - usual.low == pytest.approx(2.0 - 0.12)


def test_bytes_between_workers_have_no_prediction_for_another_link():
    sharded = Way("sync", "sharded", "float32")
    rounds = [sent(way, slots, steps, 2e6) for way in (STAR, sharded) for slots in (1, 2) for steps in (1, 40)]
    model = TimeModel(rounds, Link(bandwidth=1e6))
    assert model.ways == [STAR]
    assert model.exchange(STAR, 2) == pytest.approx(TimeModel(rounds).exchange(STAR, 2))


def made_choice(slots, seconds):
    epoch = Predicted(seconds=seconds, low=0.9 * seconds, high=1.1 * seconds)
    setting = Setting(way=STAR, slots=slots, batch=64, steps=1)
    return Choice(setting=setting, epoch=epoch, update_s=0.1, factor=1.0, low=1.0, high=1.0)


@pytest.mark.parametrize(
    ("wish", "slots", "in_time"),
    [
        (Wish(), 8, True),
        (Wish(goal="cost"), 1, True),
        (Wish(goal="cost", epochs=10, deadline_s=50.0), 2, True),  # with 2 slots, 10 epochs take at most 44 s
        (Wish(goal="time", epochs=10, deadline_s=50.0), 8, True),
        # 8 slots take 19 s, but the upper limit of the interval is 20.9 s
        (Wish(goal="cost", epochs=10, deadline_s=20.0), 8, False),
    ],
)
def test_the_best_choice_is_the_fastest_or_the_cheapest_in_time(wish, slots, in_time):
    candidates = [made_choice(1, 7.0), made_choice(2, 4.0), made_choice(8, 1.9)]
    assert wish.best(candidates).setting.slots == slots
    assert wish.meets(wish.best(candidates)) == in_time


@pytest.mark.parametrize(
    "change", [lambda seconds, steps: seconds + 0.3, lambda seconds, steps: seconds + 0.01 * steps]
)
def test_after_three_runs_the_prediction_is_within_a_fifth(change):
    """After the plan, the link or a worker becomes slower."""
    stored = Measurements(measured=tuple(measured(*FEW)), samples=6400, budget_s=30.0)
    true = change(made_up(STAR, 2, 64, 50), 50)
    setting = Setting(way=STAR, slots=2, batch=64, steps=50)
    before = TimeModel(stored.measured).predict(setting)
    assert before.high < 0.8 * true
    for _ in range(3):
        stored = stored.refined(Measured(setting=setting, seconds=(0.98 * true, true, 1.02 * true)))
    after = TimeModel(stored.measured).predict(setting)
    assert after.seconds == pytest.approx(true, rel=0.2)
    assert after.low <= true <= after.high


def test_weights_count_like_repeated_rows():
    rows, seconds = np.array([[1.0, 2.0], [1.0, 5.0], [1.0, 9.0]]), np.array([1.0, 2.5, 3.0])
    repeated = [0, 1, 1, 1, 2]
    weighted = fitted(rows, seconds, 0.0, np.array([1.0, 3.0, 1.0]))
    assert weighted.values == pytest.approx(fitted(rows[repeated], seconds[repeated], 0.0).values)


@pytest.mark.parametrize(
    ("settings", "knows"),
    [
        (FEW, True),
        ([(STAR, 1, 64, 4), (STAR, 1, 64, 20)], True),  # one worker with two lengths
        ([(STAR, 2, 64, 4), (STAR, 2, 64, 40), (STAR, 2, 128, 20), (STAR, 1, 64, 2)], False),  # only one short round
        ([(STAR, 2, 64, 4), (STAR, 2, 64, 40)], False),
        ([(STAR, 1, 64, 4), (STAR, 2, 64, 4)], False),  # only one length
        (
            [(GRADIENT, 1, 64, 1), (GRADIENT, 1, 128, 1), (GRADIENT, 2, 64, 1), (STAR, 2, 64, 2), (STAR, 2, 64, 9)],
            False,
        ),
        ([(GRADIENT, 1, 64, 1), (GRADIENT, 2, 64, 1), (STAR, 1, 64, 4), (STAR, 1, 64, 20)], True),
    ],
)
def test_a_step_is_known_from_rounds_of_two_lengths_with_one_slot(settings, knows):
    model = TimeModel(measured(*settings))
    assert model.knows_step(64) == knows
    if knows:
        assert model.step(64) == pytest.approx(made_up(STAR, 1, 64, 2) - made_up(STAR, 1, 64, 1), rel=1e-6)


def test_noise_that_is_larger_than_the_steps_hides_them():
    short, long = measured((STAR, 1, 64, 4), (STAR, 1, 64, 20))
    assert not TimeModel([short, dataclasses.replace(long, seconds=short.seconds)]).knows_step(64)
