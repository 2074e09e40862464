"""Tests of push rules and of the cadence: shards apply pushed gradients by formulas, replicas fetch and push in time."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlf.algorithms.flat_weights import cut
from ddlf.algorithms.push_rules import BLOCK, PUSHED, Adagrad, Adam, Cadence, Momentum, Sgd, Softsync
from ddlf.errors import ConfigError

STALE = [1.0, 1 / 2, 1.0, 1 / 7, 1 / 3, 1.0, 1.0, 1 / 24, 1.0, 1 / 2]
"""Factors of ten pushes."""


def apply_pushes(rule, weights, gradients, factors=STALE):
    """Return the weights after each push, in float64 like the formulas."""
    weights, state = weights.copy(), [array.astype(weights.dtype) for array in rule.start(weights.size)]
    history = []
    for count, (g, factor) in enumerate(zip(gradients, factors, strict=False)):
        rule.apply(weights, state, g, factor, count)
        history.append(weights.copy())
    return history


def sgd(w, pushes, rate=0.01):
    for g, s in pushes:
        w = w - s * rate * g
        yield w


def momentum(w, pushes, rate=0.01, beta=0.9):
    m = 0.0
    for g, s in pushes:
        m = beta * m + g
        w = w - s * rate * m
        yield w


def adagrad(w, pushes, rate=0.05):
    a = float(np.float32(0.1))
    for g, s in pushes:
        a = a + g**2
        w = w - s * (rate * g / np.sqrt(a))
        yield w


def adam(w, pushes, rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-7):
    m = v = 0.0
    for t, (g, s) in enumerate(pushes, 1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        w = w - s * rate * math.sqrt(1 - beta2**t) / (1 - beta1**t) * m / (np.sqrt(v) + epsilon)
        yield w


FORMULAS = {"sgd": sgd, "momentum": momentum, "adagrad": adagrad, "adam": adam}


@pytest.mark.parametrize("name", PUSHED.names)
@pytest.mark.parametrize("parameters", [{}, {"rate": 0.3}])
def test_over_ten_stale_pushes_each_rule_is_the_formula_of_its_source(name, parameters):
    """Gradients have very different sizes, and one value is always zero."""
    chance = np.random.default_rng(3)
    gradients = chance.normal(size=(10, 4)) * [1.0, 1e-4, 30.0, 0.0]
    w = chance.normal(size=4)
    rule = PUSHED.read(name + "".join(f":{key}={value}" for key, value in parameters.items()))
    formula = FORMULAS[name](w, list(zip(gradients, STALE, strict=True)), **parameters)
    for actual, expected in zip(apply_pushes(rule, w, gradients), formula, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", PUSHED.names)
def test_shards_of_any_cut_have_the_bits_of_one(name):
    rule, size = PUSHED.read(name), BLOCK + 10
    chance = np.random.default_rng(7)
    w = chance.normal(size=size).astype(np.float32)
    gradients = chance.normal(size=(4, size)).astype(np.float32)
    uncut = apply_pushes(rule, w, gradients)[-1]
    assert uncut.dtype == np.float32
    for shards in (2, 3, 7):
        parts = [apply_pushes(rule, w[low:high], gradients[:, low:high])[-1] for low, high in cut(size, shards)]
        assert np.concatenate(parts).tobytes() == uncut.tobytes()


@pytest.mark.parametrize("name", PUSHED.names)
def test_staleness_scales_the_step_and_not_the_state(name):
    """The factor would cancel out inside of Adagrad's root."""
    rule, g = PUSHED.read(name), np.array([0.5, -3.0], np.float32)
    (fresh, of_fresh), (stale, of_stale) = ((np.zeros(2, np.float32), rule.start(2)) for _ in range(2))
    rule.apply(fresh, of_fresh, g)
    rule.apply(stale, of_stale, g, 0.25)
    np.testing.assert_allclose(stale, fresh / 4, rtol=1e-6)
    assert all(np.array_equal(a, b) for a, b in zip(of_fresh, of_stale, strict=True))
    assert g.tolist() == [0.5, -3.0]


def test_adagrad_from_zero_steps_by_rate_then_rate_over_root_2():
    gradients = np.array([[1e-3, -5.0, 0.0]] * 2)
    first, second = apply_pushes(Adagrad(rate=0.1, first=0), np.zeros(3), gradients, [1.0, 1.0])
    np.testing.assert_allclose(first, [-0.1, 0.1, 0.0], rtol=1e-12)
    np.testing.assert_allclose(second - first, [-0.1 / math.sqrt(2), 0.1 / math.sqrt(2), 0.0], rtol=1e-12)


@pytest.mark.parametrize("name", PUSHED.names)
@pytest.mark.parametrize("wrong", [np.zeros(3, np.float32), np.zeros(1, np.float32), np.zeros(4), [0.0] * 4])
def test_wrong_gradient_for_a_shard_is_refused_and_changes_nothing(name, wrong):
    rule = PUSHED.read(name)
    weights, state = np.ones(4, np.float32), rule.start(4)
    before = [array.copy() for array in state]
    with pytest.raises(ConfigError, match=r"must be float32 \(4,\), but is"):
        rule.apply(weights, state, wrong)
    assert weights.tolist() == [1.0] * 4
    assert all(np.array_equal(a, b) for a, b in zip(before, state, strict=True))


@pytest.mark.parametrize("rule", [Sgd(rate=0.5), Momentum(beta=0.5), Adagrad(rate=0.1, first=0.0), Adam(epsilon=1e-3)])
def test_a_rule_is_written_as_text_and_compared(rule):
    assert PUSHED.read(str(rule)) == rule
    assert str(Adagrad()) == "adagrad:rate=0.05,first=0.1"


@pytest.mark.parametrize(
    "text",
    ["sgd:0", "sgd:nan", "momentum:beta=1", "adagrad:rate=-1", "adagrad:first=-0.1", "adam:beta2=1", "adam:epsilon=0"],
)
def test_a_rule_that_would_not_learn_is_refused(text):
    with pytest.raises(ConfigError, match="push rule"):
        PUSHED.read(text)


def test_softsync_steps_along_the_weighted_mean_of_pushes():
    """With 8 replicas and n = 2, c is 4."""
    chance = np.random.default_rng(11)
    pushed, factors = chance.normal(size=(8, 5)).astype(np.float32), [1, 1 / 2, 1 / 3, 1, 1 / 5, 1, 1, 1 / 2]
    collected, weights = Softsync.begun(5, replicas=8, n=2), np.zeros(5, np.float32)
    ends = []
    for i, (g, factor) in enumerate(zip(pushed, factors, strict=True)):
        if due := collected.add(g, factor):
            Sgd(rate=0.1).apply(weights, [], *due)
            ends.append(i)
    formula = [
        -0.1 * sum(s * g for s, g in zip(factors[low : low + 4], pushed[low : low + 4].astype(float), strict=True)) / 4
        for low in (0, 4)
    ]
    np.testing.assert_allclose(weights, formula[0] + formula[1], rtol=1e-5, atol=1e-7)
    assert ends == [3, 7]


def test_softsync_leaves_factors_out_of_the_state_of_adagrad():
    """After equal stale pushes, the state equals that of one fresh push, and the step is a quarter of its step."""
    g, rule = np.array([2.0, -1.0], np.float32), Adagrad()
    unscaled, unscaled_state = np.zeros(2, np.float32), rule.start(2)
    rule.apply(unscaled, unscaled_state, g)
    collected, weights, state = Softsync.begun(2, replicas=3, n=1), np.zeros(2, np.float32), rule.start(2)
    (due,) = filter(None, [collected.add(g, 0.25) for _ in range(3)])
    rule.apply(weights, state, *due)
    np.testing.assert_allclose(weights, unscaled / 4, rtol=1e-6)
    np.testing.assert_allclose(state[0], unscaled_state[0], rtol=1e-6)


def test_softsync_with_as_many_as_replicas_steps_with_each_push():
    collected = Softsync.begun(2, replicas=5, n=5)
    mean, share = collected.add(np.array([1.0, 2.0], np.float32), 0.5)
    assert (mean.tolist(), share) == ([1.0, 2.0], 0.5)


@pytest.mark.parametrize("n", [0, 9])
def test_softsync_with_no_replica_in_a_group_is_refused(n):
    with pytest.raises(ConfigError, match="from 1 to the 8 replicas"):
        Softsync.begun(5, replicas=8, n=n)


def test_22_steps_are_5_fetches_and_6_pushes_that_have_every_gradient():
    actions = list(Cadence(n_fetch=5, n_push=4).actions(22))
    assert actions.count("fetch") == 1
    assert actions.count("take") == actions.count("begin fetch") == 4
    assert gradients_in_pushes(actions) == [4, 4, 4, 4, 4, 2]


def gradients_in_pushes(actions):
    """Return the number of gradients in each push."""
    counts, unpushed = [], 0
    for action in actions:
        unpushed += action == "step"
        if action == "push":
            counts.append(unpushed)
            unpushed = 0
    return counts if not unpushed else [*counts, "left", unpushed]


@given(n_fetch=st.integers(1, 9), n_push=st.integers(1, 9), steps=st.integers(1, 60))
def test_every_fetch_is_taken_and_every_gradient_pushed_once(n_fetch, n_push, steps):
    actions = list(Cadence(n_fetch=n_fetch, n_push=n_push).actions(steps))
    fetches = [action for action in actions if action not in ("step", "push")]
    assert fetches[0] == "fetch"
    assert fetches[1:] == ["begin fetch", "take"] * (math.ceil(steps / n_fetch) - 1)
    sums = gradients_in_pushes(actions)
    assert len(sums) == math.ceil(steps / n_push)
    assert (sum(sums), set(sums[:-1]) | {n_push}, 0 < sums[-1] <= n_push) == (steps, {n_push}, True)


@pytest.mark.parametrize("wrong", [0, -1, 2.0, True, "3"])
@pytest.mark.parametrize("name", ["n_fetch", "n_push"])
def test_impossible_steps_between_exchanges_are_refused(name, wrong):
    with pytest.raises(ConfigError, match=f"{name} must be a whole number"):
        Cadence(**{name: wrong})
