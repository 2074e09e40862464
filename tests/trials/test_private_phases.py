"""Run the short form of the trial that kills workers with private data in each phase of their work."""

import pytest

from tests.trials.private_phases import PHASES, is_right, tried


@pytest.mark.slow
def test_rounds_go_on_without_killed_workers_and_everybody_is_named_and_comes_back():
    result = tried(kills=1, masters=1, seed=1)
    assert is_right(result), result
    assert all(result[f"killed {phase}"] for phase in PHASES), result
    assert result["without somebody"], result
