"""Tests of phases: an event marks the start and the end of each phase, also if it fails."""

import pytest

from ddlf.events import PhaseBegan, PhaseEnded, PhaseMoved
from ddlf.events.phases import Phase, PhasesInTurn


def test_a_phase_sends_events_from_its_start_to_its_end():
    received = []
    with Phase(received.append, "evaluating", total=100, unit="samples") as phase:
        phase.move(40)
    began, moved, ended = received
    assert began == PhaseBegan(phase=began.phase, what="evaluating", total=100, unit="samples")
    assert moved == PhaseMoved(phase=began.phase, what="evaluating", done=40)
    assert ended == PhaseEnded(phase=began.phase, what="evaluating", seconds=ended.seconds)
    assert ended.seconds > 0


@pytest.mark.parametrize(
    ("error", "reason"),
    [(ValueError("no data"), "no data"), (ValueError(), "ValueError"), (KeyboardInterrupt(), "cancelled")],
)
def test_a_phase_that_fails_reports_the_reason(error, reason):
    received = []
    with pytest.raises(type(error)), Phase(received.append, "loading", worker=2, name="pc02"):
        raise error
    assert (received[-1].why, received[-1].worker, received[-1].name) == (reason, 2, "pc02")


def test_each_phase_in_turn_ends_when_the_next_begins_and_the_last_ends_with_the_error():
    def open_worker():
        with PhasesInTurn(received.append, 1, "worker 1") as phases:
            phases.begin("sending", total=9, unit="bytes")
            phases.begin("loading")
            raise ValueError("cut")

    received = []
    with pytest.raises(ValueError, match="cut"):
        open_worker()
    assert [(type(event), event.what) for event in received] == [
        (PhaseBegan, "sending"),
        (PhaseEnded, "sending"),
        (PhaseBegan, "loading"),
        (PhaseEnded, "loading"),
    ]
    assert [event.why for event in received if isinstance(event, PhaseEnded)] == ["", "cut"]
    assert received[0].phase == received[1].phase != received[2].phase == received[3].phase
