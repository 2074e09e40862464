"""Run the short forms of the trial that kills workers with private data in each phase of their work."""

import pytest

from tests.trials.private_phases import is_right, phases, tried


@pytest.mark.slow
@pytest.mark.usefixtures("one_template")
@pytest.mark.parametrize(
    "options",
    [
        {"workers": 3},
        {"workers": 4, "masked": True},
        {"workers": 4, "masked": True, "noise": True},
    ],
    ids=["plain", "masked", "noised"],
)
def test_rounds_continue_without_killed_workers_which_are_named_and_return(options):
    result = tried(kills=1, masters=1, seed=1, **options)
    assert is_right(result), result
    assert all(result[f"killed {phase}"] for phase in phases(options.get("masked", False))), result
    assert result["without somebody"], result
