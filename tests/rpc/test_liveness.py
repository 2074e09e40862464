"""Tests of the rules that decide whether a peer is alive. The tests move the clock."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlf.errors import ConfigError
from ddlf.rpc.heartbeats import GAP_HEARTBEATS, GRACE_HEARTBEATS, MIN_LOOK_S, Liveness, Timing

TIMING = Timing()


class Watch:
    """A peer that is judged at the times that ``next_look_s`` gives, on a simulated clock."""

    def __init__(self, timing=TIMING):
        self.now = 1000.0
        self.liveness = Liveness(timing, self.now)

    def look_until(self, end):
        """Judge the peer until ``end``; return the time and the new state of each change."""
        changes = []
        while self.now < end:
            before = self.liveness.state
            self.now = min(end, self.now + self.liveness.next_look_s(self.now))
            if self.liveness.judge(self.now) != before:
                changes.append((self.now - 1000, self.liveness.state))
        return changes

    def stop_for(self, seconds):
        self.now += seconds


def test_silence_makes_a_peer_suspect_after_2_s_and_dead_after_4_s_to_the_moment():
    assert Watch().look_until(1010) == [(2.0, "suspect"), (4.0, "dead")]


def test_a_sign_of_life_ends_the_suspicion():
    watch = Watch()
    watch.look_until(1003)
    assert watch.liveness.state == "suspect"
    watch.liveness.heard(watch.now)
    assert watch.liveness.state == "alive"
    assert watch.look_until(1010) == [(5.0, "suspect"), (7.0, "dead")]


def test_a_suspended_process_does_not_declare_peers_dead_when_it_wakes():
    watch = Watch()
    watch.look_until(1000.5)
    watch.stop_for(600)
    assert watch.liveness.judge(watch.now) == "alive"
    assert watch.liveness.silent_s(watch.now) == 0.5


def test_a_peer_that_was_nearly_dead_before_the_gap_gets_the_time_for_a_heartbeat_and_its_answer():
    watch = Watch()
    watch.look_until(1003.9)
    watch.stop_for(60)
    assert watch.liveness.judge(watch.now) == "suspect"
    assert watch.look_until(watch.now + 0.99) == []
    assert [state for _, state in watch.look_until(watch.now + 0.02)] == ["dead"]


def test_a_dead_peer_is_noticed_after_a_gap_too():
    watch = Watch()
    watch.look_until(1001)
    watch.stop_for(60)
    assert [(round(at, 6), state) for at, state in watch.look_until(1070)] == [(62.5, "suspect"), (64.5, "dead")]


def test_a_message_at_the_moment_of_waking_counts():
    watch = Watch()
    watch.look_until(1003)
    watch.stop_for(60)
    watch.liveness.heard(watch.now)
    assert watch.liveness.judge(watch.now) == "alive"
    assert watch.liveness.silent_s(watch.now) == 0


timings = st.builds(
    lambda heartbeat, dead, suspect: Timing(heartbeat, heartbeat * (1 + (dead - 1) * suspect), heartbeat * dead),
    st.floats(0.01, 10),
    st.floats(3, 50),
    st.floats(0.05, 0.95),
)


@given(timings, st.lists(st.floats(0.001, 0.999), max_size=50))
def test_a_peer_that_answers_every_heartbeat_in_time_is_never_suspected(timing, delays):
    watch = Watch(timing)
    # There is one sign of life in each heartbeat, at any moment, so two signs are less than two heartbeats apart.
    beats = [1000 + (number + delay) * timing.heartbeat_s for number, delay in enumerate(delays)]
    for beat, following in pairwise([1000.0, *beats]):
        assert watch.look_until(following) == [] or timing.suspect_after_s < following - beat
        watch.liveness.heard(following)
        assert watch.liveness.state == "alive"


@given(timings, st.floats(0, 5))
def test_a_silent_peer_is_dead_within_dead_after_whenever_it_fell_silent(timing, at):
    watch = Watch(timing)
    watch.look_until(1000 + at)
    watch.liveness.heard(watch.now)
    silent = watch.now
    watch.look_until(silent + timing.dead_after_s + 2 * MIN_LOOK_S)
    assert watch.liveness.state == "dead"


@given(timings, st.lists(st.tuples(st.floats(0, 20), st.floats(0, 1000)), max_size=10))
def test_gaps_alone_do_not_make_a_peer_dead(timing, steps):
    """A verdict needs ``dead_after_s`` of silence, and this side must have watched all of it except the grace period.

    This holds for any stalls of this side's event loop.
    """
    watch = Watch(timing)
    watched_s = 0.0
    for watching, gap in steps:
        begin = watch.now
        watch.look_until(begin + watching * timing.heartbeat_s)
        watched_s += watch.now - begin
        watch.stop_for(gap)
        short = gap <= GAP_HEARTBEATS * timing.heartbeat_s
        watch.liveness.judge(watch.now)
        watched_s += gap if short else 0
        if watch.liveness.state == "dead":
            assert watched_s >= timing.dead_after_s - GRACE_HEARTBEATS * timing.heartbeat_s - 2 * MIN_LOOK_S


@pytest.mark.parametrize("silent", [0, 0.3, 1.9, 2, 3.7, 4, 100])
def test_the_next_look_is_never_later_than_a_heartbeat_and_never_in_the_past(silent):
    liveness = Liveness(TIMING, 0)
    assert 0 < liveness.next_look_s(silent) <= TIMING.heartbeat_s


def test_the_defaults_are_half_a_second_two_and_four():
    assert Timing() == Timing.of() == Timing(heartbeat_s=0.5, suspect_after_s=2, dead_after_s=4)


def test_missing_times_follow_from_dead_after():
    assert Timing.of(dead_after_s=1) == Timing(heartbeat_s=0.125, suspect_after_s=0.5, dead_after_s=1)
    assert Timing.of(heartbeat_s=0.25, dead_after_s=1) == Timing(0.25, 0.5, 1)


@pytest.mark.parametrize(
    ("times", "text"),
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
def test_contradictory_times_are_named_with_their_figures(times, text):
    with pytest.raises(ConfigError, match=text):
        Timing.of(**times)
