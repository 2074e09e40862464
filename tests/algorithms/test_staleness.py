import math

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
    """A public implementation multiplies its rate by the factor permanently, so the rate falls to zero."""
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
def test_a_rule_is_written_as_text_and_compared(rule):
    assert STALENESS.read(str(rule)) == rule
    assert str(Hinge()) == "hinge:a=10.0,b=4"
    assert STALENESS.read("polynomial") == Polynomial(a=0.5)
