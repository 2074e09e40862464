"""Tests of the decay of the learning rate with validations, against the formula. Wrong rules are refused."""

import math

import pytest

from ddlf.algorithms.rate_decay import RATE_DECAY, Never, Plateau, WebNN
from ddlf.errors import ConfigError

ACCURACIES = [0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.92, 0.97, 0.99, 1.0]
LOSSES = [2.0, 1.5, 1.0, 0.8, 0.5, 0.3, 0.3, 0.1, 0.05, 0.01]


@pytest.mark.parametrize(("power", "last"), [(2, 5), (1, 5), (1.5, 2)])
def test_the_rate_after_each_of_ten_validations_equals_the_formula(power, last):
    for n in range(1, 11):
        accuracies, losses = ACCURACIES[max(0, n - last) : n], LOSSES[max(0, n - last) : n]
        a, loss = math.fsum(accuracies) / len(accuracies), math.fsum(losses) / len(losses)
        expected = 0.3**power * (1 - a ** (loss * (n - 1)))
        rule = WebNN(power=power, last=last)
        assert rule.rate(0.3, ACCURACIES[:n], LOSSES[:n]) == pytest.approx(expected, abs=1e-12)


def test_first_or_perfect_validation_changes_no_rate():
    assert WebNN().rate(0.3, [0.5], [1.0]) == 0
    assert WebNN().rate(0.3, [1.0] * 7, [0.0] * 7) == 0
    assert not WebNN().rate(0.3, [0.5, 0.5], [1.0, math.nan]) > 0
    assert WebNN().rate(0.3, [0.0] * 7, [-1.0] * 7) == 0
    assert Never().rate(0.3, ACCURACIES, LOSSES) == 0.3


def test_the_rate_falls_as_validation_becomes_better():
    rates = [WebNN(power=1).rate(1.0, [a] * 9, [loss] * 9) for a, loss in zip(ACCURACIES, LOSSES, strict=True)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 0.999
    assert rates[-1] == 0


@pytest.mark.parametrize("rule", [Never(), WebNN(), WebNN(power=1, last=3), Plateau(factor=0.5)])
def test_a_rule_is_written_as_text_and_read_again(rule):
    assert RATE_DECAY.read(str(rule)) == rule


@pytest.mark.parametrize(
    "text",
    [
        "webnn:power=0",
        "webnn:power=nan",
        "webnn:last=0",
        "webnn:x=1",
        "webn",
        "never:1",
        "plateau:1",
        "plateau:0.5,0",
        "plateau:delta=nan",
    ],
)
def test_an_impossible_decay_is_refused(text):
    with pytest.raises(ConfigError):
        RATE_DECAY.read(text)
