"""Run the short form of the chaos trial, and test that its check detects each kind of broken promise."""

import pytest

from tests.patience import PATIENCE_S
from tests.trials import chaos
from tests.trials.chaos import Call, History, Outcome, make_plan, run


async def test_every_request_under_faults_has_one_correct_outcome(monkeypatch):
    monkeypatch.setattr(chaos, "LATE_S", PATIENCE_S)
    history = await run(seed=3, requests=500, faults=15, scale=0.25)
    assert history.violations() == []
    assert len(history.outcomes) == 500


def test_the_same_seed_makes_the_same_plan():
    assert make_plan(1, 100, 10, 4, 1.0) == make_plan(1, 100, 10, 4, 1.0) != make_plan(2, 100, 10, 4, 1.0)


def history(*outcomes, starts=1, ends=1, idempotent=False):
    """Return the history of one request, with its starts and ends in the workers' logs."""
    recorded = History({1: Call(1, idempotent, 1.0, "compute", 0.0)}, list(outcomes))
    recorded.starts[1], recorded.ends[1] = starts, ends
    return recorded


def outcome(kind="result", value=1, ended=0.5, **more):
    return Outcome(1, 1, kind, 0.0, ended, value=value, **more)


@pytest.mark.parametrize(
    "good",
    [
        history(outcome()),
        history(outcome("WorkerLost", may_have_run=True), starts=1, ends=0),
        history(outcome("WorkerLost", may_have_run=False), starts=0, ends=0),
        history(outcome("cancelled"), starts=0, ends=0),
        history(outcome(), starts=3, ends=1, idempotent=True),
    ],
)
def test_a_correct_outcome_is_not_a_violation(good):
    assert good.violations() == []


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (history(), "has 0 outcomes"),
        (history(outcome(), outcome()), "has 2 outcomes"),
        (history(outcome("hung"), starts=0), "its deadline was"),
        (history(outcome("RequestTimeout", ended=9.0)), "took 9.0 s"),
        (history(outcome(), starts=0, ends=0), "started 0"),
        (history(outcome(), ends=0), "ended 0"),
        (history(outcome(value=2)), "(result: 2)"),
        (history(outcome("WorkerLost"), starts=2), "started 2 times"),
        (history(outcome(), starts=4, idempotent=True), "started 4 times"),
        (history(outcome("WorkerLost", may_have_run=False)), "cannot have run"),
        (history(outcome("RemoteError", text="LookupError: no method\nmore")), "no fault explains"),
    ],
)
def test_a_broken_promise_is_found(bad, text):
    assert text in " ".join(bad.violations())
