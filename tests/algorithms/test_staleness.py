import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlf.algorithms.staleness import STALENESS, Constant, Hinge, Inverse, Polynomial
from ddlf.errors import ConfigError

EXTREME = [Polynomial(a=2000.0), Polynomial(a=1e308), Hinge(a=1e308, b=0)]
rules = st.sampled_from([Constant(), Inverse(), Polynomial(), Polynomial(a=2.0), Hinge(), Hinge(a=0.1), *EXTREME])


@pytest.mark.parametrize(
    ("rule", "factors"),
    [
        (Constant(), [1, 1, 1, 1]),
        (Inverse(), [1, 1, 1 / 2, 1 / 3]),
        (Polynomial(a=0.5), [1, 1 / math.sqrt(2), 1 / math.sqrt(3), 1 / 2]),
        (Polynomial(a=1), [1, 1 / 2, 1 / 3, 1 / 4]),
        (Hinge(a=10, b=1), [1, 1, 1 / 11, 1 / 21]),
    ],
)
def test_factors_follow_the_formula(rule, factors):
    assert [rule(tau) for tau in range(4)] == pytest.approx(factors)


@given(rule=rules, tau=st.integers(0, 10**6))
def test_a_factor_is_in_zero_to_one_and_never_grows_with_staleness(rule, tau):
    assert 0 < rule(tau + 1) <= rule(tau) <= 1


@given(rule=rules)
def test_a_fresh_update_counts_in_full(rule):
    assert rule(0) == 1.0


@given(rule=rules, tau=st.integers(0, 100))
def test_a_factor_does_not_decay_over_the_rounds(rule, tau):
    """A public implementation multiplies its rate by the factor for good, so that it goes to zero."""
    assert rule(tau) == [rule(tau) for _ in range(50)][-1]


@given(rule=rules)
def test_a_negative_staleness_is_refused(rule):
    with pytest.raises(ConfigError, match="staleness"):
        rule(-1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Polynomial(a=-1),
        lambda: Polynomial(a=math.nan),
        lambda: Hinge(a=0),
        lambda: Hinge(b=-1),
    ],
)
def test_a_rule_that_would_amplify_is_refused(make):
    with pytest.raises(ConfigError):
        make()


@pytest.mark.parametrize("rule", [Constant(), Inverse(), Polynomial(a=2.0), Hinge(a=0.5, b=7)])
def test_a_rule_is_a_value_that_is_written_as_text(rule):
    assert STALENESS.read(str(rule)) == rule
    assert str(Hinge()) == "hinge:a=10.0,b=4"
    assert STALENESS.read("polynomial") == Polynomial(a=0.5)


def learned(seeds, rate, factor, replicas=25, examples=50_000):
    """Of runs that learn XOR with 4 hidden units, batch size 1, in strict turns of replicas: whether all outputs are within 0.1.

    Each replica reads the weights when its own update was applied, so all others come in between: staleness 24. All runs and replicas of
    a turn are computed together.
    """
    chances = [np.random.default_rng(seed) for seed in seeds]
    inputs, targets = np.array([[1, 0, 0], [1, 0, 1], [1, 1, 0], [1, 1, 1.0]]), np.array([0.0, 1, 1, 0])
    hidden = np.stack([chance.normal(0, 0.2, (1, 4, 3)) for chance in chances])
    out = np.stack([chance.normal(0, 0.2, (1, 5)) for chance in chances])

    def forward(hidden, out, x):
        units = 1 / (1 + np.exp(-np.einsum("...ij,...j->...i", hidden, x)))
        with_bias = np.concatenate([np.ones((*units.shape[:-1], 1)), units], -1)
        return units, with_bias, 1 / (1 + np.exp(-(out * with_bias).sum(-1)))

    read_hidden, read_out = np.repeat(hidden, replicas, 1), np.repeat(out, replicas, 1)
    for turn in range(examples // replicas):
        which = np.stack([chance.integers(0, 4, replicas) for chance in chances])
        x = inputs[which]
        units, with_bias, y = forward(read_hidden, read_out, x)
        delta = (y - targets[which]) * y * (1 - y)
        inner = delta[..., None] * read_out[..., 1:] * units * (1 - units)
        scale = rate * np.array([factor(place if turn == 0 else replicas - 1) for place in range(replicas)])
        # One after the other, each by its own factor.
        read_hidden = hidden - np.cumsum(scale[:, None, None] * inner[..., None] * x[..., None, :], 1)
        read_out = out - np.cumsum(scale[:, None] * delta[..., None] * with_bias, 1)
        hidden, out = read_hidden[:, -1:], read_out[:, -1:]
    y = forward(hidden, out, np.broadcast_to(inputs, (len(seeds), 4, 3)))[2]
    return np.abs(y - targets).max(1) < 0.1


def test_where_a_fixed_rate_diverges_one_over_the_staleness_learns():
    """Zhang et al. 2016: 25 replicas in strict turns; of 20 seeds none learned with a fixed rate, and all with this one."""
    assert not learned(range(5), 12, STALENESS.read("constant")).any()
    assert learned(range(5), 12, STALENESS.read("inverse")).sum() >= 4
