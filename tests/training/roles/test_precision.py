"""Tests of the probe that measures how fast a processor computes each number format, also on a busy machine."""

import itertools

import pytest

from ddlf.training.slot.build import LEAST_TURNS, gain_of_bfloat16, times_as_fast


class Machine:
    """A clock, and work that takes the given seconds turn by turn. After the last one, all turns take the same time."""

    def __init__(self, **seconds):
        self.now, self.turns = 0.0, dict.fromkeys(seconds, 0)
        self.left = {name: itertools.chain(took, itertools.repeat(took[-1])) for name, took in seconds.items()}

    def work(self, name):
        def run():
            self.turns[name] += 1
            self.now += next(self.left[name])

        return run

    def measured(self):
        return times_as_fast(self.work("bfloat16"), self.work("float32"), lambda: self.now)


def test_first_turns_of_the_probe_do_not_count():
    """A probe once reported a factor of 188, because the first product in float32 took longer than the whole probe."""
    assert Machine(float32=[0.188, 0.002], bfloat16=[0.001]).measured() == pytest.approx(2)
    assert Machine(float32=[0.002], bfloat16=[0.5, 0.001]).measured() == pytest.approx(2)


def test_other_programs_do_not_change_the_probe():
    machine = Machine(float32=[0.1, 0.05, 0.004, 0.03, 0.0041, 0.02], bfloat16=[0.03, 0.002, 0.01, 0.0022, 0.05])
    assert machine.measured() == pytest.approx(2)
    assert machine.turns["float32"] == machine.turns["bfloat16"] > LEAST_TURNS


@pytest.mark.parametrize(
    "took",
    [
        {"float32": [0.3], "bfloat16": [0.001]},
        {"float32": [0.1, 0.004, 0.1], "bfloat16": [0.002]},
        {"float32": [0.002], "bfloat16": [0.1, 0.004, 0.1]},
        {"float32": [0.002], "bfloat16": [0.0]},
    ],
    ids=["no processor has it", "float32 had no time", "bfloat16 had no time", "nothing was done"],
)
def test_impossible_factors_are_not_reported(took):
    assert Machine(**took).measured() == 0


def test_slow_formats_have_smaller_factors():
    assert Machine(float32=[0.002], bfloat16=[0.01]).measured() == pytest.approx(0.2)


def test_a_process_measures_once(monkeypatch):
    monkeypatch.setattr("ddlf.training.slot.build.times_as_fast", lambda *work: next(factors))
    factors = iter([1.5, 2.0])
    gain_of_bfloat16.cache_clear()
    try:
        assert [gain_of_bfloat16(), gain_of_bfloat16()] == [1.5, 1.5]
    finally:
        gain_of_bfloat16.cache_clear()
