"""The three times of liveness, checked against each other."""

import pytest

from ddlf.errors import ConfigError
from ddlf.timing import Timing


def test_the_defaults_are_half_a_second_two_and_four():
    assert Timing() == Timing.of() == Timing(heartbeat_s=0.5, suspect_after_s=2, dead_after_s=4)


def test_what_is_not_given_follows_from_dead_after():
    assert Timing.of(dead_after_s=1) == Timing(heartbeat_s=0.125, suspect_after_s=0.5, dead_after_s=1)
    assert Timing.of(heartbeat_s=0.25, dead_after_s=1) == Timing(0.25, 0.5, 1)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (dict(heartbeat_s=5, dead_after_s=2), r"dead_after_s \(2 s\) must be at least 3 x heartbeat_s \(5 s\)"),
        (dict(heartbeat_s=5), r"dead_after_s \(4 s\) must be at least 3 x heartbeat_s \(5 s\)"),
        (
            dict(suspect_after_s=4),
            r"suspect_after_s \(4 s\) must be between heartbeat_s \(0.5 s\) and dead_after_s \(4 s\)",
        ),
        (dict(suspect_after_s=0.1), r"suspect_after_s \(0.1 s\) must be between"),
        (dict(dead_after_s=0), "dead_after_s must be a finite number of seconds > 0, got 0|heartbeat_s must be"),
        (dict(dead_after_s=float("nan")), "must be a finite number"),
        (dict(dead_after_s="4"), "dead_after_s must be a finite number of seconds > 0, got '4'"),
        (dict(heartbeat_s=True), "heartbeat_s must be a finite number of seconds > 0, got True"),
    ],
)
def test_times_that_contradict_each_other_are_named_with_their_figures(given, text):
    with pytest.raises(ConfigError, match=text):
        Timing.of(**given)
