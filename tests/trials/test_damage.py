"""Run the short form of the damage trial: every damaged file is named before a sample of it counts."""

from tests.trials.damage import trial


def test_damaged_data_is_named_and_never_trained_on():
    assert trial(flips=28, cuts=14) == []
