"""Watching a run: each thing is said once, and an error names what is likely to be its cause."""

from types import SimpleNamespace

import pytest

from ddlf.errors import BadUpdate
from ddlf.events import Advised, Committed
from ddlf.events.sinks import Events
from ddlf.extras.advice.advise import explained_errors
from ddlf.extras.advice.rules.run import watched
from tests.extras.advice.cases import record


class Watched:
    """What the watching of an app needs."""

    def __init__(self, advice="quick"):
        self.advice, self.told, events = advice, [], Events()
        self.subscribe = events.subscribe
        self.subscribe(self.told.append)
        self.run_context = SimpleNamespace(emit=events.emit)

    def advised(self):
        return [event.rule for event in self.told if isinstance(event, Advised)]


def test_each_thing_is_said_once():
    app = Watched()
    with watched(app):
        for number in range(1, 12):
            app.run_context.emit(Committed(record=record(number, 2.0**number)))
    assert app.advised() == ["R02", "R04"]
    app.run_context.emit(Committed(record=record(12, float("nan"))))
    assert app.advised() == ["R02", "R04"]


def test_nothing_is_said_of_a_run_that_is_well_or_where_nobody_wants_it():
    for app, losses in ((Watched(), [1 / n for n in range(1, 20)]), (Watched("off"), [2.0**n for n in range(20)])):
        with watched(app):
            for number, loss in enumerate(losses, 1):
                app.run_context.emit(Committed(record=record(number, loss)))
        assert app.advised() == []


def test_an_update_that_cannot_be_merged_is_told_with_its_likely_cause():
    with pytest.raises(BadUpdate) as raised, explained_errors(Watched(), "D01 3 of 9 values of x_train are NaN"):
        raise BadUpdate("slot 0")
    assert raised.value.__notes__ == ["likely cause: D01 3 of 9 values of x_train are NaN"]
    with pytest.raises(BadUpdate) as raised, explained_errors(Watched(), ""):
        raise BadUpdate("slot 0")
    assert not hasattr(raised.value, "__notes__")
