"""Tests of the pure functions of ``benchmarks.choices``, and of its short form."""

from dataclasses import replace

import pytest

from benchmarks import choices, network
from benchmarks.choices import Outcome, bars, drawn

ONE, TWO, CODED = "1 sync, float32", "2 sync, float32", "2 sync, int8"


def made(verdict="pays off", chosen=TWO, *, situation=0, fit=1.0, one=1.05, two=0.6, coded=0.65):
    return Outcome(
        situation=drawn(1)[situation],
        verdict=verdict,
        chosen=chosen,
        interval=(1.5, 1.6, 1.7),
        predicted={ONE: 1.0, TWO: 0.6},
        seconds={ONE: [one, 9.0, one], TWO: [two] * 3, CODED: [coded] * 3},
        fit=[fit, 9.0, fit],
        spent_s=25.0,
    )


def test_situations_are_drawn_by_their_seed():
    assert drawn(1) == drawn(1) != drawn(2)
    assert len({*drawn(1)}) == 12
    assert {one.rate for one in drawn(1)} == {"10mbit", "100mbit", "1gbit"}
    assert sum(one.slow > 0 for one in drawn(1)) == sum(one.one_core for one in drawn(1)) == 2


def test_a_choice_is_compared_with_the_best_one_and_with_one_worker():
    found = made(chosen=CODED)
    assert (found.best, found.of_best) == (TWO, pytest.approx(0.65 / 0.6))
    assert found.of_one == pytest.approx(0.65 / 1.05)
    assert found.factor == pytest.approx(1.0 / 0.6)


@pytest.mark.parametrize(
    ("verdict", "fit", "is_wrong"),
    [
        ("pays off", 0.50, True),
        ("pays off", 0.55, False),
        ("no gain", 0.50, False),
        ("no gain", 0.65, False),
        ("no gain", 0.70, True),
        ("unclear", 0.50, False),
        ("unclear", 0.70, False),
    ],
)
def test_a_verdict_is_wrong_far_from_the_true_factor_only(verdict, fit, is_wrong):
    assert made(verdict, fit=fit).is_wrong == is_wrong


def test_the_bars_distinguish_good_plans_from_bad_ones():
    good = [made() for _ in range(10)] + [made("no gain", ONE, situation=10, one=1.0, two=1.1, coded=1.2)]
    assert all(holds for _, holds in bars(good))
    far = replace(good[0], seconds={ONE: [1.0], TWO: [0.8], CODED: [0.6]})
    slow = replace(good[0], seconds={ONE: [0.7], TWO: [0.8], CODED: [0.7]})
    for bad, broken in (
        (good + [far] * 3, 0),
        ([*good, slow], 1),
        ([*good, made("no gain")], 2),
        (good + [made("unclear")] * 3, 3),
        ([*good, made("unclear", situation=11, fit=0.6)], 4),
    ):
        assert [place for place, (_, holds) in enumerate(bars(bad)) if not holds] == [broken]


def test_each_choice_is_measured_beside_its_alternatives():
    assert network.available(), "needs root on Linux, with ip, tc and network namespaces"
    (found,) = choices.main(["--short"])
    assert found.chosen in found.seconds
    assert next(iter(found.seconds)) == ONE
    assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in (*found.seconds.values(), found.fit))
