"""Run the short form of the trial that kills the master of a run and resumes the run."""

import pytest

from tests.trials.disturbed import resume

pytestmark = pytest.mark.usefixtures("one_template")


def test_a_killed_and_resumed_master_ends_with_the_same_bits():
    assert resume(kills=1, seed=1, rounds=4, exchange="star")
