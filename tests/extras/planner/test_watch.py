"""Tests of comparing the rounds of a run with their prediction, with made-up rounds and a made-up clock."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddlf.errors import ConfigError
from ddlf.events import Committed, RoundsMeasured, RoundsPredicted, SlotsChanged, TrainingBegan
from ddlf.events.record import RoundRecord
from ddlf.events.sinks import Events
from ddlf.extras.planner import measurement_files, planned, watch
from ddlf.extras.planner.measurement_files import Measurements
from ddlf.extras.planner.model import Measured, Setting, Way
from ddlf.monitor.terminal.lines import line

STAR = Way("sync", "star", "float32")


def measured(slots, batch, steps):
    """Return measured rounds: 10 ms for a step, 80 ms for the exchange, and 20 ms for the rest."""
    setting = Setting(way=STAR, slots=slots, batch=batch, steps=steps)
    return Measured(setting=setting, seconds=(0.1 + 0.01 * steps,) * 3, computing=(0.02 + 0.01 * steps,) * 3)


KEPT = Measurements(
    measured=tuple(measured(slots, batch, steps) for slots in (1, 2) for batch in (10, 20) for steps in (2, 40)),
    samples=1000,
    budget_s=30.0,
    when=1e9,
)
FACTS = dict(
    mode="sync",
    exchange="star",
    codec="float32",
    batch_size=10,
    worker_epochs=1,
    worker_steps=None,
    round_samples=None,
)
BEGAN = TrainingBegan(mode="sync", samples=1000, slots=2, fixed=False, workers=2)


class Made:
    """A run with given end times of its rounds."""

    def __init__(self, monkeypatch, began=BEGAN, **facts):
        self.now, self.emitted, events = 0.0, [], Events()
        self.subscribe, self.run_context = events.subscribe, SimpleNamespace(emit=events.emit)
        self.subscribe(self.emitted.append)
        self.began = dataclasses.replace(
            began, facts={name: json.dumps(value) for name, value in {**FACTS, **facts}.items()}
        )
        self.written = []
        monkeypatch.setattr(watch, "path_of", lambda app: Path("kept.json"))
        monkeypatch.setattr(watch, "read_file", lambda path: KEPT)
        monkeypatch.setattr(watch, "write_file", lambda path, content: self.written.append((path, content)))

    async def train(self, ends, samples=1000, epochs=1, *more_events, **costs):
        with await watch.watch_run(self, lambda: self.now):
            self.run_context.emit(self.began)
            for number, seconds in enumerate(ends, 1):
                self.now += seconds
                self.run_context.emit(Committed(record=record(number, samples, epochs, **costs)))
            for event in more_events:
                self.run_context.emit(event)
        return [event for event in self.emitted if isinstance(event, RoundsPredicted | RoundsMeasured)]


def record(number, samples, epochs, **costs):
    costs = dict(seconds=1.0, compute_s=1.0, transfer_s=0.0, merge_s=0.0, bytes_out=1, bytes_back=1) | costs
    return RoundRecord(round=number, rounds=9, version=number, epochs=epochs, samples=samples, **costs)


async def test_the_rounds_of_a_run_are_predicted_and_measured(monkeypatch):
    predicted, compared = await Made(monkeypatch).train([9.0, 9.0, 0.7, 0.6, 0.8])
    assert predicted.seconds == pytest.approx(0.1 + 50 * 0.01, rel=1e-6)
    assert predicted.compute_s == pytest.approx(0.02 + 50 * 0.01, rel=1e-6)
    assert predicted.low <= predicted.seconds <= predicted.high
    assert predicted.within
    assert compared.rounds == 3  # the first rounds compile
    assert compared.seconds == pytest.approx(0.7)
    assert compared.predicted == predicted.seconds


async def test_local_epochs_and_short_last_rounds_of_an_epoch_are_predicted(monkeypatch):
    predicted, compared = await Made(monkeypatch, worker_epochs=3).train([1.6] * 5, 1000, 3)
    assert predicted.seconds == pytest.approx(0.1 + 150 * 0.01, rel=1e-6)
    assert compared.rounds == 3
    _, compared = await Made(monkeypatch, worker_steps=30).train([0.4] * 5, 400)
    assert compared.rounds == 0
    _, compared = await Made(monkeypatch, worker_steps=30).train([0.4] * 5, 600)
    assert compared.rounds == 3


async def test_a_run_refines_the_measurements(monkeypatch):
    run = Made(monkeypatch)
    await run.train([9.0, 9.0, 0.7, 0.6, 0.8], seconds=0.65, compute_s=0.5)
    ((path, refined),) = run.written
    assert path == Path("kept.json")
    assert refined.measured[:-1] == KEPT.measured
    assert refined.measured[-1].seconds == pytest.approx((0.7, 0.6, 0.8))
    assert refined.measured[-1].computing == (0.5, 0.5, 0.5)
    assert refined.measured[-1].weight == measurement_files.OF_A_RUN


@pytest.mark.parametrize(
    ("seconds", "costs"),
    [
        ([0.7] * 4, {"seconds": 0.65}),  # too few rounds
        ([0.7] * 9, {"seconds": 0.3}),  # hooks or checkpoints take time between the rounds
        ([0.7] * 9, {"seconds": 0.65, "recomputed": 1}),
    ],
)
async def test_runs_with_unusual_rounds_do_not_refine_the_measurements(monkeypatch, seconds, costs):
    run = Made(monkeypatch)
    _, compared = await run.train(seconds, **costs)
    assert compared.rounds == len(seconds) - 2
    assert run.written == []


async def test_changed_files_or_data_end_the_comparison_and_planned_runs(monkeypatch):
    monkeypatch.setattr(Measurements, "fits", lambda stored, app: False)
    run = Made(monkeypatch)
    assert await run.train([0.7] * 9) == []
    monkeypatch.setattr(planned, "_planned", {run})
    with pytest.raises(ConfigError, match="data or imported files have changed since the plan; plan again"):
        await run.train([0.7] * 9)


async def test_runs_without_a_prediction_are_left_alone(monkeypatch):
    taking_turns = dataclasses.replace(BEGAN, slots=4)
    assert await Made(monkeypatch, codec="topk").train([1.0] * 5) == []
    assert await Made(monkeypatch, began=taking_turns).train([1.0] * 5) == []
    grown = await Made(monkeypatch).train([1.0] * 5, 1000, 1, SlotsChanged(round=6, slots=3))
    assert [type(event) for event in grown] == [RoundsPredicted]


async def test_a_defect_of_the_planner_does_not_end_a_run(monkeypatch, caplog):
    run = Made(monkeypatch)
    monkeypatch.setattr(watch, "read_file", lambda path: 1 / 0)
    assert await run.train([1.0]) == []
    assert "the rounds of this run are not predicted" in caplog.text


@pytest.mark.parametrize(
    ("rounds", "seconds", "text"),
    [
        (9, 0.53, "rounds    0.53 s each, predicted 0.512 s (0.45-0.58)"),
        (9, 1.53, "rounds    1.53 s each, predicted 0.512 s (0.45-0.58); the reason: ddlf plan --check last"),
        (0, 0.0, "rounds    predicted 0.512 s (0.45-0.58); the run was too short to measure one"),
    ],
)
def test_the_line_has_both(rounds, seconds, text):
    assert line(RoundsMeasured(rounds=rounds, seconds=seconds, predicted=0.512, low=0.45, high=0.58)) == text
