"""The trial in short: every damage is named before a sample counts."""

from tests.trials.damage import trial


def test_damaged_data_is_named_and_never_trained_on():
    assert trial(flips=28, cuts=14) == []
