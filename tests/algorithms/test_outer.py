import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ddlf.algorithms.outer import OUTER, FedAdagrad, FedAdam, FedAvgM, FedYogi, Nesterov, Subtract
from ddlf.errors import ConfigError

values = hnp.arrays(np.float32, 4, elements=st.floats(-100, 100, width=32))
optimizers = pytest.mark.parametrize(
    "outer", [Subtract(learning_rate=0.5), Nesterov(), FedAvgM(), FedAdam(), FedAdagrad(), FedYogi()]
)


def run(outer, weights, updates, trainable=None):
    trainable = [True] * len(weights) if trainable is None else trainable
    state, history = outer.init(weights), []
    for update in updates:
        state, weights = outer.update(state, weights, update, trainable)
        history.append(weights)
    return history


def subtracted(w, updates, learning_rate=1.0):
    for g in updates:
        w = w - learning_rate * g
        yield w


def nesterov(w, updates, learning_rate=0.7, momentum=0.9):
    v = 0.0
    for g in updates:
        v = momentum * v + g
        w = w - learning_rate * (g + momentum * v)
        yield w


def heavy_ball(w, updates, learning_rate=1.0, momentum=0.9):
    v = 0.0
    for g in updates:
        v = momentum * v + g
        w = w - learning_rate * v
        yield w


def adaptive(w, updates, squares, learning_rate, beta1, tau=1e-3):
    m, v = 0.0, np.full_like(w, tau**2)
    for g in updates:
        m = beta1 * m + (1 - beta1) * g
        v = squares(v, g)
        w = w - learning_rate * m / (np.sqrt(v) + tau)
        yield w


def adagrad(w, updates, learning_rate=0.1, beta1=0.0):
    return adaptive(w, updates, lambda v, g: v + g**2, learning_rate, beta1)


def adam(w, updates, learning_rate=0.1, beta1=0.9, beta2=0.99):
    return adaptive(w, updates, lambda v, g: beta2 * v + (1 - beta2) * g**2, learning_rate, beta1)


def yogi(w, updates, learning_rate=0.01, beta1=0.9, beta2=0.99):
    return adaptive(w, updates, lambda v, g: v - (1 - beta2) * g**2 * np.sign(v - g**2), learning_rate, beta1)


FORMULAS = {
    "subtract": subtracted,
    "fedavg": subtracted,
    "nesterov": nesterov,
    "diloco": nesterov,
    "fedavgm": heavy_ball,
    "fedadagrad": adagrad,
    "fedadam": adam,
    "fedyogi": yogi,
    "streaming": nesterov,  # for the exchanged fragments; test_streaming.py tests the rest
}


@pytest.mark.parametrize("name", OUTER.names)
@pytest.mark.parametrize("parameters", [{}, {"learning_rate": 0.3}])
def test_over_ten_rounds_each_rule_is_the_formula_of_its_source(name, parameters):
    """Updates have very different sizes, and one value is always zero."""
    if name == "fedavg":
        parameters = {}
    chance = np.random.default_rng(3)
    sizes = np.array([[1.0, 1e-4, 30.0], [0.1, 1e-2, 0.0]])
    updates = chance.normal(size=(10, 2, 3)) * sizes
    updates[4:] *= 1e-2  # after this drop, FedYogi and FedAdam differ
    w = chance.normal(size=(2, 3))
    outer = OUTER.read(name + ":" * bool(parameters) + ",".join(f"{key}={value}" for key, value in parameters.items()))
    history = run(outer, [w], [[g] for g in updates])
    for (after,), expected in zip(history, FORMULAS[name](w, updates, **parameters), strict=True):
        np.testing.assert_allclose(after, expected, rtol=1e-12, atol=1e-12)


@given(w=values, updates=st.lists(values, min_size=1, max_size=6), rate=st.floats(0.01, 2), momentum=st.floats(0, 0.99))
def test_nesterov_equals_the_form_with_the_rate_in_the_velocity(w, updates, rate, momentum):
    """Keras's SGD(nesterov=True) is v <- m v - lr g, w <- w + m v - lr g. It is equal while the rate is constant."""
    history = run(Nesterov(learning_rate=rate, momentum=momentum), [w], [[g] for g in updates])
    expected, v = w.astype(np.float64), np.zeros(4)
    for g, (after,) in zip(updates, history, strict=True):
        v = momentum * v - rate * g
        expected = expected + momentum * v - rate * g
        np.testing.assert_allclose(after, expected, rtol=1e-4, atol=1e-2)


@given(w=values, updates=st.lists(values, min_size=1, max_size=6), momentum=st.floats(0, 0.99))
def test_fedavgm_sums_updates_discounted_by_age(w, updates, momentum):
    expected = w.astype(np.float64)
    for t, (after,) in enumerate(run(FedAvgM(momentum=momentum), [w], [[g] for g in updates])):
        expected = expected - sum(momentum ** (t - s) * updates[s].astype(np.float64) for s in range(t + 1))
        np.testing.assert_allclose(after, expected, rtol=1e-4, atol=1e-2)


@given(w=values, updates=st.lists(values, min_size=1, max_size=6), beta1=st.floats(0, 0.99), beta2=st.floats(0, 0.99))
def test_fedadam_divides_mean_by_root_mean_square(w, updates, beta1, beta2):
    """The formulas are the recursions of the source."""
    outer, expected = FedAdam(beta1=beta1, beta2=beta2), w.astype(np.float64)
    for t, (after,) in enumerate(run(outer, [w.astype(np.float64)], [[g.astype(np.float64)] for g in updates])):
        ages = [t - s for s in range(t + 1)]
        m = sum((1 - beta1) * beta1**age * updates[t - age].astype(np.float64) for age in ages)
        v = beta2 ** (t + 1) * 1e-6 + sum(
            (1 - beta2) * beta2**age * updates[t - age].astype(np.float64) ** 2 for age in ages
        )
        expected = expected - 0.1 * m / (np.sqrt(v) + 1e-3)
        np.testing.assert_allclose(after, expected, rtol=1e-9, atol=1e-9)


@given(w=values, g=values)
def test_subtract_takes_the_step_times_the_learning_rate(w, g):
    assert np.array_equal(run(Subtract(), [w], [[g]])[0][0], w - g)
    np.testing.assert_allclose(run(Subtract(learning_rate=0.25), [w], [[g]])[0][0], w - g / 4, atol=1e-4)


@optimizers
def test_batchnorm_statistics_get_the_plain_mean_without_momentum(outer):
    """Public implementations apply momentum to moving variances, which then turn negative."""
    weights = [np.float32([1.0]), np.float32([1.0])]
    history = run(
        outer, weights, [[np.float32([0.9]), np.float32([0.9])], [np.float32([0.0]), np.float32([0.0])]], [True, False]
    )
    assert [float(after[1][0]) for after in history] == pytest.approx([0.1, 0.1])
    assert float(history[1][0][0]) != pytest.approx(0.1)


@optimizers
@pytest.mark.parametrize("dtype", [np.int64, np.uint32, np.bool_])
def test_counters_and_seeds_keep_the_masters_values(outer, dtype):
    weights, merged = [np.array([1, 0], dtype)], [np.zeros(2, dtype)]
    (after,) = run(outer, weights, [merged], [False])[0]
    assert after.dtype == dtype
    assert np.array_equal(after, weights[0])


@optimizers
def test_arguments_are_not_modified_and_results_keep_shapes_and_types(outer):
    weights = [np.ones((2, 3), np.float32), np.ones((), np.float32), np.ones(0, np.float32)]
    merged = [np.full_like(w, 0.5) for w in weights]
    trainable = [True, True, False]
    state = outer.init(weights)
    for _ in range(3):
        state, after = outer.update(state, weights, merged, trainable)
        assert [(type(w), w.dtype, w.shape) for w in after] == [(type(w), w.dtype, w.shape) for w in weights]
        assert all(isinstance(v, np.ndarray) and v.dtype == np.float32 for v in state)
    assert all((w == 1).all() for w in weights)
    assert all((g == 0.5).all() for g in merged)


@optimizers
def test_the_state_of_another_rule_is_refused(outer):
    weights = [np.zeros(3, np.float32)]
    with pytest.raises(ConfigError, match="do not fit"):
        outer.update([np.zeros(3, np.float32)] * 3, weights, weights, [True])


@optimizers
@pytest.mark.parametrize("merged", [[], [np.zeros(1, np.float32)], [np.zeros(3)]])
def test_an_update_that_only_broadcasting_would_fit_is_refused(outer, merged):
    weights = [np.zeros(3, np.float32)]
    with pytest.raises(ConfigError):
        outer.update(outer.init(weights), weights, merged, [True])


@pytest.mark.parametrize(
    "make",
    [
        lambda: Subtract(learning_rate=0),
        lambda: Subtract(learning_rate=float("nan")),
        lambda: Nesterov(learning_rate=-1),
        lambda: Nesterov(momentum=1),
        lambda: Nesterov(momentum=-0.1),
        lambda: FedAvgM(learning_rate=0),
        lambda: FedAvgM(momentum=1),
        lambda: FedAdam(beta1=1),
        lambda: FedAdam(beta2=-0.1),
        lambda: FedAdam(tau=0),
        lambda: FedAdam(tau=1e300),
        lambda: FedYogi(tau=1e-300),
        lambda: FedAdagrad(learning_rate=0),
        lambda: FedAdagrad(beta1=1),
        lambda: FedAdagrad(tau=-1),
        lambda: FedYogi(learning_rate=float("inf")),
        lambda: FedYogi(beta1=-0.1),
        lambda: FedYogi(beta2=1),
        lambda: FedYogi(tau=0),
    ],
)
def test_hyperparameters_out_of_range_are_refused(make):
    with pytest.raises(ConfigError):
        make()


def test_optimizers_can_be_printed_and_compared():
    assert repr(Nesterov()) == "Nesterov(learning_rate=0.7, momentum=0.9)"
    assert Subtract() == Subtract(learning_rate=1.0)
