"""Tests of the parts of L-BFGS against their formulas and against SciPy."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlf.algorithms import lbfgs
from ddlf.algorithms.lbfgs import (
    FixedPoint,
    WolfeSearch,
    cut,
    direction,
    dot,
    exact_mean,
    is_kept,
    packed,
    packed_row,
    unpacked,
    unpacked_row,
)
from tests.later import Later

optimize = Later("scipy.optimize")


def two_loops(s, y, g):
    """Return ``-H g`` by the two loops of Nocedal and Wright 2006, algorithm 7.4, which need the vectors."""
    q, steps = g.copy(), []
    for s_i, y_i in zip(reversed(s), reversed(y), strict=True):
        steps.append(s_i @ q / (y_i @ s_i))
        q = q - steps[-1] * y_i
    if s:
        q = q * (s[-1] @ y[-1]) / (y[-1] @ y[-1])
    for s_i, y_i, step in zip(s, y, reversed(steps), strict=True):
        q = q + s_i * (step - y_i @ q / (y_i @ s_i))
    return -q


def gram(vectors):
    return np.array([[float(dot(a, b)) for b in vectors] for a in vectors])


@pytest.mark.parametrize("pairs", [0, 1, 2, 10])
def test_direction_is_that_of_the_two_loops(pairs):
    chance = np.random.default_rng(pairs)
    root = chance.normal(size=(30, 30))
    s = [chance.normal(size=30) for _ in range(pairs)]
    y, g = [root @ root.T @ s_i for s_i in s], chance.normal(size=30)
    vectors = [*s, *y, g]
    step = sum(c * vector for c, vector in zip(direction(gram(vectors), pairs), vectors, strict=True))
    np.testing.assert_allclose(step, two_loops(s, y, g), rtol=1e-9, atol=1e-9)


def minimized(function, x, *, history=10, tolerance=1e-9, passes=2000):
    """Minimize a function with the module's parts, and return the losses of all passes."""
    losses = []

    def evaluated(at):
        loss, gradient = function(at)
        losses.append(loss)
        return loss, gradient

    (loss, g), s, y = evaluated(x), [], []
    while np.abs(g).max() > tolerance and len(losses) < passes:
        vectors = [*s, *y, g]
        d = sum(c * vector for c, vector in zip(direction(gram(vectors), len(s)), vectors, strict=True))
        search = WolfeSearch(loss, float(dot(g, d)), 1.0 if s else min(1.0, 1 / np.abs(g).sum()))
        outcome = "try"
        while outcome == "try":
            step = search.step
            new_loss, new_g = evaluated(x + step * d)
            outcome = search.tell(new_loss, float(dot(new_g, d)))
        if outcome == "failed":
            break
        change, bend = step * d, new_g - g
        if is_kept(change @ change, change @ bend, bend @ bend):
            s, y = [*s, change][-history:], [*y, bend][-history:]
        x, loss, g = x + step * d, new_loss, new_g
    return losses


def rosenbrock(x):
    a, b = x
    return (1 - a) ** 2 + 100 * (b - a * a) ** 2, np.array([-2 * (1 - a) - 400 * a * (b - a * a), 200 * (b - a * a)])


def quadratic(seed):
    chance = np.random.default_rng(seed)
    axes = np.linalg.qr(chance.normal(size=(20, 20)))[0]
    matrix, b = axes @ np.diag(np.logspace(0, 3, 20)) @ axes.T, chance.normal(size=20)
    return lambda x: (0.5 * x @ matrix @ x - b @ x, matrix @ x - b)


@pytest.mark.parametrize(
    ("function", "start"),
    [(rosenbrock, np.array([-1.2, 1.0])), *((quadratic(seed), np.zeros(20)) for seed in range(2))],
)
def test_lbfgs_needs_as_many_passes_as_scipy(function, start):
    losses = []

    def recorded(x):
        loss, gradient = function(x)
        losses.append(loss)
        return loss, gradient

    options = {"maxcor": 10, "ftol": 0, "gtol": 1e-10, "maxiter": 5000, "maxfun": 5000}
    least = optimize.minimize(recorded, start, jac=True, method="L-BFGS-B", options=options).fun
    reached = [
        next(n for n, loss in enumerate(history, 1) if loss <= least + 1e-8)
        for history in (losses, minimized(function, start))
    ]
    assert reached[1] <= 1.15 * reached[0]


def test_a_minimum_is_reached_although_losses_have_rounding_errors():
    losses = minimized(quadratic(0), np.zeros(20))
    assert len(losses) < 1000


@given(
    st.lists(st.floats(-10, 10), min_size=3, max_size=6).filter(lambda c: abs(c[1]) > 1e-3),
    st.floats(1e-3, 10),
)
def test_found_step_satisfies_the_strong_wolfe_conditions(coefficients, first):
    bumps = np.polynomial.Polynomial([*[*coefficients, 0, 0, 0, 1.0][:7], 0.5])  # bounded below for positive steps
    curve = (
        bumps
        if bumps.deriv()(0) < 0
        else np.polynomial.Polynomial(bumps.coef * np.array([1, -1, *[1] * (len(bumps.coef) - 2)]))
    )
    loss, slope = float(curve(0)), float(curve.deriv()(0))
    search = WolfeSearch(loss, slope, first, noise=0.0, tries=60)
    outcome = "try"
    while outcome == "try":
        step = search.step
        outcome = search.tell(float(curve(step)), float(curve.deriv()(step)))
    if outcome == "found":
        assert curve(step) <= loss + 1e-4 * step * slope
        assert abs(curve.deriv()(step)) <= 0.9 * abs(slope)
    else:
        assert search.best.step == 0 or search.best.loss < loss


def test_a_step_with_an_infinite_loss_is_shortened():
    search = WolfeSearch(1.0, -1.0, 8.0)
    assert search.tell(math.inf, math.nan) == "try"
    assert search.step == 4.0
    assert search.tell(math.nan, math.nan) == "try"
    assert search.step == 2.0


def test_a_search_without_a_lower_loss_fails_without_a_step():
    search = WolfeSearch(1.0, -1.0, tries=5)
    outcomes = [search.tell(2.0, 1.0) for _ in range(5)]
    assert outcomes == ["try"] * 4 + ["failed"]
    assert search.best.step == 0


@pytest.mark.parametrize(("fall", "is_step"), [(1e-7, False), (1e-5, True)])
def test_a_failed_search_only_takes_a_step_that_lowers_the_loss_by_more_than_rounding_errors(fall, is_step):
    """At the minimum of a float32 loss, losses and slopes are noise. Training would never end without this check."""
    search, outcome = WolfeSearch(1.0, -1e-6, noise=1e-6), "try"
    while outcome == "try":
        outcome = search.tell(1.0 - fall, -1e-6)
    assert outcome == "failed"
    assert bool(search.best.step) is is_step


@pytest.mark.parametrize("loss", [0.0, 1e-9])
def test_a_loss_of_zero_has_a_lower_bound(loss):
    """Its slopes are negative, but rounding errors hide its fall."""
    search, outcome = WolfeSearch(loss, -1e-24), "try"
    while outcome == "try":
        outcome = search.tell(0.0, -1e-24)
    assert outcome == "failed"
    search, outcome = WolfeSearch(loss, -1e-24), "try"
    while outcome == "try":
        outcome = search.tell(loss - 1e-24 * search.step, -1e-24)
    assert outcome == "unbounded"


@pytest.mark.parametrize("shards", [1, 3, 8])
def test_dots_have_the_same_bits_on_any_number_of_shards(shards):
    chance = np.random.default_rng(0)
    a, b = (chance.normal(size=9 * lbfgs.BLOCK + 17).astype(np.float32) for _ in "ab")
    parts = cut(a.size, shards)
    assert len(parts) == shards
    assert float(sum(dot(a[slice(*part)], b[slice(*part)]) for part in parts)) == float(dot(a, b))
    assert float(dot(a, b)) == pytest.approx(float(a.astype(np.float64) @ b), rel=1e-9)


def test_parts_have_whole_blocks():
    assert cut(10, 4) == [(0, 10)]
    assert cut(3 * lbfgs.BLOCK + 1, 2) == [(0, 2 * lbfgs.BLOCK), (2 * lbfgs.BLOCK, 3 * lbfgs.BLOCK + 1)]


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=20))
def test_exact_sum_travels_unchanged(values):
    total = sum(map(Fraction, values), Fraction(0))
    assert unpacked(packed(total)) == total
    assert unpacked_row(packed_row([total, -total, total - total])) == [total, -total, 0]


@given(st.integers(0, 2**32), st.floats(1e-30, 1e30))
def test_sums_of_integers_do_not_depend_on_the_order(seed, peak):
    chance = np.random.default_rng(seed)
    vectors = [chance.uniform(-peak, peak, 50) for _ in range(20)]
    format = FixedPoint.fitting(peak, len(vectors))
    numbers = [format.of(vector) for vector in vectors]
    total, permuted_total = sum(numbers), sum(numbers[i] for i in chance.permutation(20))
    assert (total == permuted_total).all()
    np.testing.assert_allclose(format.value(total), np.sum(vectors, axis=0), atol=peak * 1e-13)


def test_values_up_to_the_limit_do_not_overflow():
    format = FixedPoint.fitting(0.3, 1000)
    assert format.limit >= 300
    extremes = format.of(np.array([format.limit, -format.limit]))
    total = format.value(1000 * extremes)
    np.testing.assert_allclose(total, [1000 * format.limit, -1000 * format.limit])


def test_mean_of_losses_is_rounded_once():
    assert exact_mean([(0.1, 3)] * 10) == 0.1
    assert exact_mean([(1e16, 1), (1.0, 1), (-1e16, 1)]) == 1 / 3
    assert math.isnan(exact_mean([(1.0, 1), (math.nan, 1)]))
