"""Tests of watching a run: each finding is reported once, and an error names its likely cause."""

from types import SimpleNamespace

import pytest

from ddlf.errors import BadUpdate
from ddlf.events import Advised, Committed
from ddlf.events.sinks import Events
from ddlf.extras.advice.advise import explained_errors
from ddlf.extras.advice.rules.run import watched
from tests.extras.advice.cases import record


class Watched:
    """A stand-in for an app, with the attributes that ``watched`` uses."""

    def __init__(self, advice="quick"):
        self.advice, self.emitted, events = advice, [], Events()
        self.subscribe = events.subscribe
        self.subscribe(self.emitted.append)
        self.run_context = SimpleNamespace(emit=events.emit)

    def advised(self):
        return [event.rule for event in self.emitted if isinstance(event, Advised)]


def test_each_finding_is_reported_once():
    app = Watched()
    with watched(app):
        for number in range(1, 12):
            app.run_context.emit(Committed(record=record(number, 2.0**number)))
    assert app.advised() == ["R02", "R04"]
    app.run_context.emit(Committed(record=record(12, float("nan"))))
    assert app.advised() == ["R02", "R04"]


def test_a_healthy_run_or_disabled_advice_reports_nothing():
    for app, losses in ((Watched(), [1 / n for n in range(1, 20)]), (Watched("off"), [2.0**n for n in range(20)])):
        with watched(app):
            for number, loss in enumerate(losses, 1):
                app.run_context.emit(Committed(record=record(number, loss)))
        assert app.advised() == []


def test_the_error_of_an_unusable_update_names_its_likely_cause():
    with pytest.raises(BadUpdate) as raised, explained_errors(Watched(), "D01 3 of 9 values of x_train are NaN"):
        raise BadUpdate("slot 0")
    assert raised.value.__notes__ == ["likely cause: D01 3 of 9 values of x_train are NaN"]
    with pytest.raises(BadUpdate) as raised, explained_errors(Watched(), ""):
        raise BadUpdate("slot 0")
    assert not hasattr(raised.value, "__notes__")
