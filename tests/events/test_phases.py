"""Tests of phases: an event marks the start and the end of each phase, also if it fails."""

import pytest

from ddlf.events import PhaseBegan, PhaseEnded, PhaseMoved
from ddlf.events.phases import Phase, PhasesInTurn


def test_a_phase_sends_events_from_its_start_to_its_end():
    told = []
    with Phase(told.append, "evaluating", total=100, unit="samples") as phase:
        phase.move(40)
    began, moved, ended = told
    assert began == PhaseBegan(phase=began.phase, what="evaluating", total=100, unit="samples")
    assert moved == PhaseMoved(phase=began.phase, what="evaluating", done=40)
    assert ended == PhaseEnded(phase=began.phase, what="evaluating", seconds=ended.seconds)
    assert ended.seconds > 0


@pytest.mark.parametrize(
    ("error", "why"),
    [(ValueError("no data"), "no data"), (ValueError(), "ValueError"), (KeyboardInterrupt(), "cancelled")],
)
def test_a_phase_that_fails_reports_the_reason(error, why):
    told = []
    with pytest.raises(type(error)), Phase(told.append, "loading", worker=2, name="pc02"):
        raise error
    assert (told[-1].why, told[-1].worker, told[-1].name) == (why, 2, "pc02")


def test_each_phase_in_turn_ends_when_the_next_begins_and_the_last_ends_with_the_error():
    def open_worker():
        with PhasesInTurn(told.append, 1, "worker 1") as phases:
            phases.begin("sending", total=9, unit="bytes")
            phases.begin("loading")
            raise ValueError("cut")

    told = []
    with pytest.raises(ValueError, match="cut"):
        open_worker()
    assert [(type(event), event.what) for event in told] == [
        (PhaseBegan, "sending"),
        (PhaseEnded, "sending"),
        (PhaseBegan, "loading"),
        (PhaseEnded, "loading"),
    ]
    assert [event.why for event in told if isinstance(event, PhaseEnded)] == ["", "cut"]
    assert told[0].phase == told[1].phase != told[2].phase == told[3].phase
