"""Tests of schedules: learning rates over a run, against formulas computed by hand."""

from math import cos, pi

import numpy as np
import pytest

from ddlf.algorithms.schedules import SCHEDULE
from ddlf.errors import ConfigError


def shares(text, steps, epochs):
    """Return the share of the highest rate for each step of a run."""
    rule = SCHEDULE.read(text)
    return rule.share(np.arange(1, steps + 1, dtype=np.float64), steps, rule.warmup.steps(steps, epochs), np)


def test_warm_up_and_cosine_equal_the_numbers_of_the_notes():
    rates = 5e-4 * shares("warmup:0.05,cosine", 600, 20)
    assert rates[[0, 14, 314, 599]] == pytest.approx([1.6667e-5, 2.5e-4, 2.5e-4, 0], abs=1e-9)
    by_hand = [5e-4 * (s / 30 if s <= 30 else (1 + cos(pi * (s - 30) / 570)) / 2) for s in range(1, 601)]
    assert rates == pytest.approx(by_hand, abs=1e-12)


def test_a_warm_up_is_at_least_an_epoch_and_at_most_half_of_the_run():
    assert SCHEDULE.read("warmup:0.05").warmup.steps(100, 10) == 10
    assert SCHEDULE.read("warmup:0.2").warmup.steps(100, 10) == 20
    assert SCHEDULE.read("warmup:0.05").warmup.steps(7, 1) == 3.5
    assert shares("warmup:0.05,linear", 7, 1)[-1] == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("constant", [1, 1, 1, 1]),
        ("linear", [0.75, 0.5, 0.25, 0]),
        ("linear:0.2", [0.8, 0.6, 0.4, 0.2]),
        ("hold", [1, 1, 0.5, 0]),
        ("hold:until=0.75,least=0.1", [1, 1, 1, 0.1]),
        ("cosine:0.5", [0.5 + 0.25 * (1 + cos(pi * q)) for q in (0.25, 0.5, 0.75, 1)]),
        ("restarts:2", [0.5, 0, 0.5, 0]),
        ("warmup:0.5,linear", [0.5, 1, 0.5, 0]),
        ("warmup:0.5", [0.5, 1, 1, 1]),
    ],
)
def test_each_course_is_its_formula(text, expected):
    assert shares(text, 4, 4) == pytest.approx(expected, abs=1e-12)


def test_each_cycle_ends_at_its_minimum_also_if_thirds_are_rounded():
    for steps in (3, 30, 999, 3_000_003):
        rule = SCHEDULE.read("restarts:3,least=0.1")
        ends = np.float32([steps // 3, 2 * steps // 3, steps])
        assert rule.share(ends, np.float32(steps), np.float32(0), np) == pytest.approx([0.1, 0.1, 0.1], abs=1e-4)


def test_the_rate_stays_after_the_last_step():
    rule = SCHEDULE.read("linear:0.2")
    assert rule.share(np.float32(12), np.float32(10), np.float32(0), np) == pytest.approx(0.2)


def test_a_schedule_is_written_as_text_and_read_back():
    for text in ("cosine:least=0.0", "warmup:share=0.1,restarts:cycles=4,least=0.01", "hold:until=0.5,least=0.0"):
        assert str(SCHEDULE.read(text)) == text
    assert SCHEDULE.read("warmup:0.1, hold:0.3,least=0.1") == SCHEDULE.read("warmup:share=0.1,hold:until=0.3,least=0.1")
    assert SCHEDULE.normalized(SCHEDULE.read("linear")) == SCHEDULE.read("linear")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("cosin", "unknown schedule 'cosin', did you mean 'cosine'?"),
        ("warmup:0.1,cosin", "unknown schedule 'cosin' in 'warmup:0.1,cosin', did you mean 'cosine'?"),
        ("warmup:0.1,restart:4", "did you mean 'restarts'?"),
        ("warmup:0.1,0.2", "no more parameters"),
        ("cosine,linear", "is not one course behind at most one warm-up"),
        ("cosine,warmup", "is not one course behind at most one warm-up"),
        ("warmup:0.6,cosine", "share must be from 0 to 0.5, got 0.6"),
        ("cosine:2", "least must be from 0 to 1, got 2.0"),
        ("hold:until=1", "until must be below 1"),
        ("restarts:0", "cycles must be 1 or more, got 0"),
    ],
)
def test_text_without_a_schedule_is_refused_with_a_sentence(text, sentence):
    with pytest.raises(ConfigError, match=sentence.replace("?", r"\?")):
        SCHEDULE.read(text)
