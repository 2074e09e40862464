"""Tests of the end of a training and of the decay of its learning rate, with golden numbers."""

import pytest

from ddlf.errors import ConfigError
from ddlf.peers.plan import Plan, Validation, candidate_rate, decayed, describe_end, end_reason


def result(accuracy):
    return Validation(accuracy=accuracy, loss=0.3, samples=64)


def test_the_fifth_validation_above_the_target_ends_the_training():
    plan = Plan(end=0.98)
    assert not end_reason(plan, [result(0.99)] * 4, 100.0)
    assert "0.9900" in end_reason(plan, [result(0.99)] * 5, 100.0)
    assert not end_reason(plan, [result(0.97), *[result(0.98)] * 4], 100.0)


def test_a_target_of_at_least_one_means_seconds():
    assert not end_reason(Plan(end=5), [], None)
    assert not end_reason(Plan(end=5), [], 4.9)
    assert "5 s" in end_reason(Plan(end=5), [], 5.0)


def test_without_a_target_a_training_does_not_end():
    assert not end_reason(Plan(end=0), [result(1.0)] * 5, 1e9)


def test_the_decay_has_the_published_number():
    assert candidate_rate(0.2, 0.9, 0.3, 10) == pytest.approx(0.01084, abs=5e-6)
    plan = Plan(rate=0.2, decay=True)
    validations = [result(0.9)] * 5
    assert decayed(plan, 0.2, validations, 10) == pytest.approx(0.01084, abs=5e-6)
    assert decayed(plan, 0.01, validations, 10) == 0.01  # the rate never rises
    assert decayed(plan, 0.2, validations[:4], 4) == 0.2  # there is no decision before the fifth validation
    assert decayed(plan, 0.2, [result(1.0)] * 5, 10) == 0.2  # a candidate of 0 is not used
    assert decayed(Plan(rate=0.2), 0.2, validations, 10) == 0.2


@pytest.mark.parametrize(
    "values",
    [
        {"merge": "median"},
        {"way": "rounds", "merge": "mimic"},
        {"updates": 0},
        {"batch_size": True},
        {"end": float("nan")},
        {"outer": "none"},
        {"update_policy": "trust"},
    ],
)
def test_a_plan_refuses_meaningless_values(values):
    with pytest.raises(ConfigError):
        Plan(**values)


@pytest.mark.parametrize(
    ("end", "by_app", "words"),
    [
        (0.0, False, "--end 0.97"),
        (0.0, True, "by is_convergent"),
        (0.9, True, "accuracy of 0.9"),
        (600, False, "600 s"),
    ],
)
def test_the_server_says_how_the_training_ends(end, by_app, words):
    sentence = describe_end(Plan(end=end), by_app=by_app)
    assert words in sentence
    assert "ddlf peers stop" in sentence
    assert "Ctrl-C" in sentence
