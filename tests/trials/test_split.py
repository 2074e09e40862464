"""Run the short form of the trial that kills workers and the master of a model in parts."""

from tests.trials.killed import kills
from tests.trials.split import APP


def test_bits_stay_when_parts_and_master_are_killed():
    result = kills(APP, kills=2, masters=1, workers=3, seed=1, iterations=10, pause_s=0.5)
    assert result["masters"] == 1, result
    assert result["same"], result
    assert result["ledger"], result
