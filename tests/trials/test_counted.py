"""Run the short form of the trial that kills workers with servers of Downpour, and their master."""

import pytest

from tests.trials.counted import is_well, trial

pytestmark = pytest.mark.usefixtures("one_template")


def test_each_push_counts_once_when_workers_and_master_are_killed():
    result = trial(kills=3, masters=1, workers=3, parameters=3e4, seed=1, pause_s=0.05)
    assert result["masters"] == 1, result
    assert result["kills"] >= 2, result
    assert is_well(result), result
