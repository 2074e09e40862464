"""Run the short form of the trial that kills workers with private data, and their master."""

import pytest

from tests.trials.private import tried


@pytest.mark.slow
@pytest.mark.usefixtures("one_template")
def test_bits_stay_and_no_slot_moves_when_workers_and_master_are_killed():
    result = tried(kills=2, masters=1, workers=3, seed=1, iterations=12, pause_s=0.5)
    assert result["masters"] == 1, result
    assert result["same"], result
    assert result["ledger"], result
    assert not result["elsewhere"], result
    assert not result["other samples"], result
