"""The study of asynchronous rules in its shortest form: the clock decides who comes when, the rules are DDLF's."""

import pytest

from benchmarks import arrivals


def test_a_target_is_reached_between_two_looks():
    curve = [(0.0, 0.1), (0.5, 0.3), (1.0, 0.7), (1.5, 0.6)]
    assert arrivals.reached(curve, 0.5) == pytest.approx(0.75)
    assert arrivals.reached(curve, 0.05) == 0.0
    assert arrivals.reached(curve, 0.71) is None


def test_rules_learn_and_equal_settings_give_equal_curves(capsys):
    said = "--data digits --rules published,fedasync,published --samples 400 --epochs 3 --batch-size 4 --rate 0.2 --seeds 1 --target 0.2"
    first, other, again = arrivals.main(arrivals.parser().parse_args([*said.split(), "--slow", "3"]))
    assert first["curve"] == again["curve"] != other["curve"]
    assert 9 <= first["curve"][-1][0] <= 9.9  # three rounds of the last slot, each of 3 units and up to a tenth longer
    assert all(one["curve"][-1][1] > 0.2 for one in (first, other))
    assert "| fedasync " in capsys.readouterr().out
