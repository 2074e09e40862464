"""Tests of multipliers: factors of the learning rate by depth, against the numbers of the notes."""

import pytest

from ddlf.algorithms.multipliers import MULTIPLIERS, ByName, Freeze, factor, factors
from ddlf.errors import ConfigError

DIGITS = {"w1": (1, 9), "b1": (2, 8), "w2": (4, 6), "b2": (5, 5), "w3": (7, 3), "b3": (8, 2)}


def test_the_first_quarter_of_the_digits_is_frozen():
    assert [factor(*arguments, 0.25) for arguments in DIGITS.values()] == [0, 0, 0.5, 0.5, 0.9, 0.9]
    assert factors(DIGITS, 0.25) == dict(zip(DIGITS, [0, 0, 0.5, 0.5, 0.9, 0.9], strict=True))


def test_zero_is_off_and_one_is_all():
    assert factors(DIGITS, 0) == {}
    assert set(factors(DIGITS, 1).values()) == {0.0}


@pytest.mark.parametrize("frozen", [-0.1, 1.1, float("nan")])
def test_no_more_than_all_can_be_frozen(frozen):
    with pytest.raises(ConfigError, match="must be from 0 to 1"):
        factor(1, 1, frozen)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("freeze:0.75", Freeze((0.75,))),
        ("freeze:0.75,0.5,0", Freeze((0.75, 0.5, 0.0))),
        ("body=0.1,head/bias=2", ByName((("body", 0.1), ("head/bias", 2.0)))),
    ],
)
def test_multipliers_are_read_and_written(text, rule):
    assert MULTIPLIERS.read(text) == rule
    assert str(rule) == text
    assert MULTIPLIERS.normalized(rule) == rule


@pytest.mark.parametrize(
    "text", ["freeze", "freeze:", "freeze:2", "freeze:x", "body", "body=-1", "body=nan", "a=1,a=2", "=1"]
)
def test_text_without_multipliers_is_refused(text):
    with pytest.raises(ConfigError, match="multipliers"):
        MULTIPLIERS.read(text)
