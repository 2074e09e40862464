"""Tests of the pure functions of ``benchmarks.choices``, and of its short form."""

from dataclasses import replace

import pytest

from benchmarks import choices, network
from benchmarks.choices import Outcome, bars, drawn

ONE, TWO, CODED = "1 sync, float32", "2 sync, float32", "2 sync, int8"


def outcome(verdict="pays off", chosen=TWO, *, situation=0, fit=1.0, one_s=1.05, two_s=0.6, coded_s=0.65):
    return Outcome(
        situation=drawn(1)[situation],
        verdict=verdict,
        chosen=chosen,
        interval=(1.5, 1.6, 1.7),
        predicted={ONE: 1.0, TWO: 0.6},
        seconds={ONE: [one_s, 9.0, one_s], TWO: [two_s] * 3, CODED: [coded_s] * 3},
        fit=[fit, 9.0, fit],
        spent_s=25.0,
    )


def test_situations_are_drawn_by_their_seed():
    assert drawn(1) == drawn(1) != drawn(2)
    assert len({*drawn(1)}) == 12
    assert {situation.rate for situation in drawn(1)} == {"10mbit", "100mbit", "1gbit"}
    assert sum(situation.slow > 0 for situation in drawn(1)) == sum(situation.one_core for situation in drawn(1)) == 2


def test_a_choice_is_compared_with_the_best_one_and_with_one_worker():
    compared = outcome(chosen=CODED)
    assert (compared.best, compared.of_best) == (TWO, pytest.approx(0.65 / 0.6))
    assert compared.of_one == pytest.approx(0.65 / 1.05)
    assert compared.factor == pytest.approx(1.0 / 0.6)


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
    assert outcome(verdict, fit=fit).is_wrong == is_wrong


def test_the_bars_distinguish_good_plans_from_bad_ones():
    good = [outcome() for _ in range(10)] + [outcome("no gain", ONE, situation=10, one_s=1.0, two_s=1.1, coded_s=1.2)]
    assert all(holds for _, holds in bars(good))
    far = replace(good[0], seconds={ONE: [1.0], TWO: [0.8], CODED: [0.6]})
    slow = replace(good[0], seconds={ONE: [0.7], TWO: [0.8], CODED: [0.7]})
    for bad, broken in (
        (good + [far] * 3, 0),
        ([*good, slow], 1),
        ([*good, outcome("no gain")], 2),
        (good + [outcome("unclear")] * 3, 3),
        ([*good, outcome("unclear", situation=11, fit=0.6)], 4),
    ):
        assert [number for number, (_, holds) in enumerate(bars(bad)) if not holds] == [broken]


def test_each_choice_is_measured_beside_its_alternatives(few_digits, monkeypatch):
    monkeypatch.setenv("DDLF_DATA", str(few_digits))
    assert network.available(), "needs root on Linux, with ip, tc and network namespaces"
    (measured,) = choices.main(["--short"])
    assert measured.chosen in measured.seconds
    assert next(iter(measured.seconds)) == ONE
    assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in (*measured.seconds.values(), measured.fit))
