"""The trial in short: every damage is named before a sample counts."""

from tests.trials.damage import trial


def test_flipped_bits_and_truncations_are_named_and_nothing_of_them_is_trained_on():
    assert trial(flips=28, cuts=14) == []
