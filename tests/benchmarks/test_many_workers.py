"""Tests of the pure functions of ``benchmarks.many_workers``, and of its smallest run."""

import pytest

from benchmarks import many_workers, network
from benchmarks.many_workers import Outcome, bars, drawn, outcome_of
from ddlf.extras.planner.model import Measured


def rounds(setting, *, case, more=0.0):
    """Return simulated rounds: the time to compute, and 10 ms for the bytes of each worker on the master's link."""
    seconds = setting.steps * case.step_s + 0.005 + 0.01 * setting.slots + more
    return Measured(setting=setting, seconds=(seconds,) * 3)


def test_cases_are_drawn_by_their_seed():
    assert drawn(8, 1) == drawn(8, 1) != drawn(8, 2)
    assert len({*drawn(8, 1)}) == 8


def test_rounds_of_more_workers_are_predicted_from_two():
    case = drawn(1, 1)[0]
    probed = [rounds(setting, case=case) for setting in case.probes()]
    outcome = outcome_of(case, probed, [rounds(case.setting(workers), case=case) for workers in (1, 2, 4, 8, 16)])
    assert {*outcome.errors} == {4, 8, 16}
    assert outcome.errors == pytest.approx(dict.fromkeys((4, 8, 16), 0.0), abs=1e-6)
    assert (outcome.chosen, outcome.slower) == (outcome.best, 1.0)
    assert all(holds for _, holds in bars([outcome]))


def test_the_bars_show_wrong_predictions():
    case = drawn(1, 1)[0]
    far = Outcome(case=case, predicted={2: 1.0, 4: 0.7, 8: 0.6}, measured={2: 1.0, 4: 0.5, 8: 0.8})
    assert far.errors == pytest.approx({4: 0.4, 8: -0.25})
    assert (far.chosen, far.best, far.slower) == (8, 4, pytest.approx(1.6))
    assert [holds for _, holds in bars([far])] == [False, False]


def test_four_workers_are_measured_beside_their_predictions():
    assert network.available(), "needs root on Linux, with ip, tc and network namespaces"
    (outcome,) = many_workers.main(["--cases", "1", "--repeats", "1", "--workers", "2,4"])
    assert {*outcome.measured} == {*outcome.predicted} == {1, 2, 4}
    assert {*outcome.errors} == {4}
