"""Kills of the master inside epochs, the short form."""

import pytest

from tests.trials.masters import is_well, trial


@pytest.mark.slow
def test_a_master_that_is_killed_inside_epochs_ends_with_the_same_bits_and_fetches_nothing_again():
    result = trial(kills=3, seed=1)
    assert result["kills"] == 3
    assert result["fetched"] == [1]
    assert is_well(result), result
