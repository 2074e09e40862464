"""Tests of the events that a run sends to subscribers. The workers are fake."""

import asyncio
import json
from collections import Counter

import pytest

from ddlf.algorithms.weights import digest
from ddlf.errors import CheckpointMismatch, ConfigError
from ddlf.events import (
    CheckpointWritten,
    Committed,
    Converged,
    RunBegan,
    RunEnded,
    SlotFinished,
    SlotStarted,
    UpdateArrived,
)
from ddlf.events.sinks import from_json, to_json
from ddlf.monitor.terminal.lines import line
from ddlf.testing import FakeRun


def app_and_events(**attributes):
    """Return an app, and a list of its events."""
    app, received = FakeRun(**attributes), []
    app.subscribe(received.append)
    return app, received


def events_of(kind, received):
    return [event for event in received if isinstance(event, kind)]


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_run_sends_all_events_in_order_and_as_facts(mode, tmp_path):
    app, received = app_and_events(mode=mode, checkpoint=tmp_path, slots=2)
    records = await app.train_model()
    names = [type(event).__name__ for event in received]
    assert [name for name in names if name != "WorkerReady"][:3] == ["RunBegan", "TrainingBegan", "SlotStarted"]
    assert names[-1] == "RunEnded"
    assert [event.record for event in events_of(Committed, received)] == records
    assert sorted(event.version for event in events_of(CheckpointWritten, received)) == [
        record.version for record in records
    ]
    slots = [(event.round, event.slot) for event in events_of(SlotStarted, received)]
    assert sorted(slots) == [(number, slot) for number in range(1, 5) for slot in (1, 2)]
    assert sorted(slots) == sorted((event.round, event.slot) for event in events_of(SlotFinished, received))
    ended = received[-1]
    assert (ended.run, ended.how, ended.version) == (received[0].run, "complete", records[-1].version)
    counted = Counter(record.staleness for record in records)
    assert ended.staleness == (tuple(counted[tau] for tau in range(max(counted) + 1)) if mode == "async" else ())
    assert ended.weights == (digest(app.run_context.progress.weights) if mode == "async" else "")
    for event in received:
        assert repr(from_json(json.loads(json.dumps(to_json(event), allow_nan=False)))) == repr(event)


@pytest.mark.parametrize(("round_", "converged"), [(2, [(2, 4)]), (4, [])])
async def test_only_a_run_that_ends_before_its_last_epoch_reports_convergence(round_, converged):
    app, received = app_and_events(slots=2)
    app.is_convergent = lambda record: record.round == round_
    history = await app.train_model()
    assert history.ended == app.history.ended != ""
    assert [(event.version, event.epochs) for event in events_of(Converged, received)] == converged
    assert [line(event) for event in events_of(Converged, received)] == [
        "converged after 2 merges, before the end of 4 epochs: is_convergent, converge or a callback stopped it"
    ] * len(converged)


async def test_events_have_the_cost_of_each_update_and_the_record_has_the_slowest():
    app, received = app_and_events(slots=3)
    records = await app.train_model()
    for record in records:
        arrived = [event for event in events_of(UpdateArrived, received) if event.round == record.round]
        assert sorted(event.slot for event in arrived) == [1, 2, 3]
        assert {event.slot: event.worker for event in arrived} == dict(enumerate(record.workers, 1))
        assert sum(event.samples for event in arrived) == record.samples
        assert max(event.compute_s for event in arrived) == record.compute_s
        assert max(event.transfer_s for event in arrived) == pytest.approx(record.transfer_s)
        assert {event.epochs for event in arrived} == {record.epochs}


@pytest.mark.parametrize("how", ["converged", "stopped", "failed", "cancelled"])
async def test_the_last_event_tells_how_the_run_ended(how):
    app, received = app_and_events()
    app.is_convergent = lambda record: how == "converged"

    def on_round(record):
        if how == "stopped":
            app.stop_training()
        elif how == "failed":
            raise ZeroDivisionError("in on_round")
        elif how == "cancelled":
            training.cancel()

    app.on_round = on_round
    training = asyncio.ensure_future(app.train_model())
    (outcome,) = await asyncio.gather(training, return_exceptions=True)
    assert isinstance(outcome, {"failed": ZeroDivisionError, "cancelled": asyncio.CancelledError}.get(how, list))
    assert received[-1].how == how
    assert received[-1].version >= 1
    assert received[-1].why == ("in on_round" if how == "failed" else "")


async def test_refused_second_training_sends_no_event():
    app, received = app_and_events()
    outcomes = await asyncio.gather(app.train_model(), app.train_model(), return_exceptions=True)
    assert len(outcomes[0]) == 4
    assert "this app is in another training run of this program; wait until" in str(outcomes[1])
    assert [event.run for event in events_of((RunBegan, RunEnded), received)] == [received[0].run] * 2
    await app.train_model()
    runs = [event.run for event in events_of((RunBegan, RunEnded), received)]
    assert runs == [runs[0]] * 2 + [runs[2]] * 2
    assert len(set(runs)) == 2


async def test_run_that_fails_before_training_has_version_0(tmp_path):
    app, received = app_and_events()
    await app.train_model()
    app.slots = 3
    with pytest.raises(CheckpointMismatch):
        await app.train_model()
    assert [(event.how, event.version) for event in events_of(RunEnded, received)] == [("complete", 4), ("failed", 0)]


async def test_a_sink_sees_the_weights_of_the_committed_round():
    app, received = app_and_events()
    sums = []
    app.subscribe(lambda event: isinstance(event, Committed) and sums.append(app.model.get_weights()[0].sum()))
    await app.train_model()
    assert len(set(map(float, sums))) == len(events_of(Committed, received)) == 4
    assert sums[-1] == app.model.get_weights()[0].sum()


async def test_sink_that_raises_changes_nothing_and_a_hook_ends_the_run(caplog):
    def broken(event):
        raise ValueError("in the sink")

    app = FakeRun()
    app.subscribe(broken)
    assert len(await app.train_model()) == 4
    assert caplog.text.count("ValueError: in the sink") == 1
    app.on_event = broken
    with pytest.raises(ValueError, match="in the sink"):
        await app.train_model()


def test_a_sink_that_is_async_and_would_never_run_is_refused():
    async def sink(event):
        """Never awaited."""

    with pytest.raises(ConfigError, match=r"a sink cannot be async, but .*sink.* is: training does not wait"):
        FakeRun().subscribe(sink)
