"""Tests of the report of a run: it needs no other file, is small for any run, and escapes texts that look like HTML."""

import json
import math
import re

import pytest

from ddlf import events as e
from ddlf.monitor.runs import folder, report
from tests.monitor.runs.made import BEGAN, events_of, record, run


def state_in(path):
    text = (path / folder.REPORT).read_text()
    match = re.search(r'<script type="application/json" id="state">(.*?)</script>', text, re.DOTALL)
    return json.loads(match[1], parse_constant=pytest.fail)


def test_report_needs_no_other_file(tmp_path):
    text = (run(tmp_path, "a", events_of(3)) / folder.REPORT).read_text()
    assert not re.search(r"""<(script|link|img|iframe)[^>]*(src|href)="(?!data:)|@import|url\(""", text)
    assert "default-src 'none'" in text
    assert "Leon Sorokin" in text  # uPlot's licence
    assert not re.search(r"^(import|export) ", text, re.MULTILINE)


def test_curves_equal_the_records(tmp_path):
    state = state_in(run(tmp_path, "a", events_of(3, test={"loss": 0.5})))
    series = state["series"]
    assert series["x"] == [1, 2, 3]
    assert series["columns"]["loss"] == [1.0, 0.5, 0.333333]
    assert series["columns"]["#wait_s"] == [0.125] * 3
    assert state["run"]["metrics"]["test_loss"] == 0.5
    assert [worker["compute_s"] for worker in state["record"]["workers"]] == [4.5, 2.25]


def test_report_of_many_rounds_is_small(tmp_path):
    rounds = 1000  # more than a curve has points
    spike = {"loss": 99.0, "accuracy": 0.5}
    events = [*events_of(rounds), (BEGAN + 2 * rounds + 1, e.Committed(record=record(rounds + 1, metrics=spike)))]
    events += [(BEGAN + 2 * rounds + 2, e.UpdateRejected(round=n, slot=1, worker=1, why="w")) for n in range(2000)]
    path = run(tmp_path, "a", events)
    assert (path / folder.REPORT).stat().st_size < 600_000
    state = state_in(path)
    x, loss = state["series"]["x"], state["series"]["columns"]["loss"]
    assert len(x) <= 1.1 * report.MOST_POINTS
    assert max(loss) == 99.0
    assert (x[0], x[-1]) == (1, rounds + 1)
    assert x == sorted(x)
    assert len(state["record"]["faults"]) == report.MOST_FAULTS + 1
    assert state["record"]["counts"] == {"rejected": 2000}
    assert state["record"]["marks"] == []


@pytest.mark.parametrize("rounds", [0, 1])
def test_report_of_short_run_has_its_error(tmp_path, rounds):
    state = state_in(run(tmp_path, "a", events_of(rounds), "failed", "AppError: </script><b>no"))
    assert len(state["series"]["x"]) == rounds
    assert (state["record"]["state"], state["record"]["why"]) == ("failed", "AppError: </script><b>no")
    assert state["run"]["phase"] == "failed"


def test_values_that_are_not_finite_are_gaps(tmp_path):
    events = [
        *events_of(2),
        (BEGAN + 9, e.Committed(record=record(3, metrics={"loss": math.nan, "accuracy": math.inf}))),
    ]
    state = state_in(run(tmp_path, "a", events))
    assert state["series"]["columns"]["loss"] == [1.0, 0.5, None]
    assert (state["run"]["metrics"]["loss"], state["run"]["metrics"]["accuracy"]) == (None, None)
    assert state["record"]["marks"] == [[3, "not finite"]]


def test_report_can_be_written_during_run_and_from_nearly_empty_folder(tmp_path):
    folder.write_json(tmp_path / folder.STATE, folder.begun("App"))
    report.write(tmp_path)
    state = state_in(tmp_path)
    assert (state["record"]["state"], state["run"]) == ("running", None)


def test_thinned_curve_keeps_ends_peaks_and_order():
    values = [math.sin(n / 50) for n in range(5000)]
    values[2500] = 7.0
    values[100] = None
    x, columns = report.thinned(list(range(5000)), {"loss": values, "#rate": values})
    assert len(x) <= report.MOST_POINTS + 2
    assert (x[0], x[-1], columns["loss"][x.index(2500)]) == (0, 4999, 7.0)
    assert x == sorted(set(x))
    assert columns["#rate"] == columns["loss"]


def test_the_report_has_the_prediction_or_the_command_for_one(tmp_path):
    compared = e.RoundsMeasured(rounds=9, seconds=0.53, predicted=0.512, low=0.45, high=0.58)
    paths = run(tmp_path, "a", [*events_of(1), (BEGAN + 9, compared)]), run(tmp_path, "b", events_of(1))
    predictions = [dict(state_in(path)["record"]["environment"]).get("plan", "") for path in paths]
    assert predictions[0] == "rounds take 0.53 s each, predicted 0.512 s (0.45-0.58)"
    assert predictions[1].startswith("none; ddlf plan app.py predicts")
