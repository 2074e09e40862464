"""The page of a run: whole in itself, small for any run, and made of data that no text can break out of."""

import json
import math
import re

import pytest

from ddlf import events as e
from ddlf.monitor.runs import folder, report
from tests.monitor.runs.made import BEGAN, events_of, record, run


def data_in(path):
    text = (path / folder.REPORT).read_text()
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found[1], parse_constant=pytest.fail)


def curve(data, title, name):
    (chart,) = [chart for chart in data["charts"] if chart["title"] == title]
    (found,) = [series for series in chart["series"] if series["name"] == name]
    return found


def test_the_page_has_all_it_needs_in_itself(tmp_path):
    text = (run(tmp_path, "a", events_of(3)) / folder.REPORT).read_text()
    assert not re.search(r"<(script|link|img|iframe)[^>]*(src|href)=|@import|url\(", text)
    assert "default-src 'none'" in text
    assert "Leon Sorokin" in text  # uPlot's licence
    assert "{{" not in re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)


def test_curves_are_those_of_the_records(tmp_path):
    data = data_in(run(tmp_path, "a", events_of(3, test={"loss": 0.5})))
    assert curve(data, "loss", "loss")["x"] == [1, 2, 3]
    assert curve(data, "loss", "loss")["y"] == [1.0, 0.5, 0.333333]
    assert curve(data, "loss", "test loss")["last"] == 0.5
    assert curve(data, "seconds per round", "waiting")["y"] == [0.125] * 3
    assert [worker["compute_s"] for worker in data["workers"]] == [4.5, 2.25]


@pytest.mark.parametrize("rounds", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_many_rounds_make_a_page_that_opens_at_once(tmp_path, rounds):
    spike = {"loss": 99.0, "accuracy": 0.5}
    told = [*events_of(rounds), (BEGAN + 2 * rounds + 1, e.Committed(record=record(rounds + 1, metrics=spike)))]
    told += [(BEGAN + 2 * rounds + 2, e.UpdateRejected(round=n, slot=1, worker=1, why="w")) for n in range(2000)]
    path = run(tmp_path, "a", told)
    assert (path / folder.REPORT).stat().st_size < 600_000
    data = data_in(path)
    loss = curve(data, "loss", "loss")
    assert len(loss["x"]) <= report.MOST_POINTS
    assert max(loss["y"]) == 99.0
    assert (loss["x"][0], loss["x"][-1]) == (1, rounds + 1)
    assert loss["x"] == sorted(loss["x"])
    assert len(data["faults"]) == report.MOST_FAULTS + 1
    assert data["counts"] == {"rejected": 2000}
    assert data["marks"] == []


@pytest.mark.parametrize("rounds", [0, 1])
def test_a_run_that_hardly_began_has_a_page_too(tmp_path, rounds):
    data = data_in(run(tmp_path, "a", events_of(rounds), "failed", "AppError: </script><b>no"))
    assert bool(data["charts"]) == bool(rounds)
    assert data["why"] == "AppError: </script><b>no"
    assert data["state"] == "failed"


def test_what_is_not_finite_is_no_point_but_the_last_value(tmp_path):
    told = [*events_of(2), (BEGAN + 9, e.Committed(record=record(3, metrics={"loss": math.nan, "accuracy": math.inf})))]
    data = data_in(run(tmp_path, "a", told))
    assert (curve(data, "loss", "loss")["x"], curve(data, "loss", "loss")["last"]) == ([1, 2], "NaN")
    assert curve(data, "accuracy", "accuracy")["last"] == "Infinity"
    assert data["marks"] == [[3, "not finite"]]


def test_the_page_can_be_made_while_the_run_goes_on_and_of_a_folder_with_next_to_nothing(tmp_path):
    folder.write_json(tmp_path / folder.STATE, folder.begun("App"))
    report.write(tmp_path)
    assert data_in(tmp_path)["state"] == "running"


def test_a_curve_keeps_its_ends_its_peaks_and_its_order():
    values = [math.sin(n / 50) for n in range(5000)]
    values[2500] = 7.0
    values[100] = math.nan
    x, y = report.thinned(list(range(5000)), values)
    assert len(x) <= report.MOST_POINTS
    assert (x[0], x[-1], y[x.index(2500)]) == (0, 4999, 7.0)
    assert x == sorted(set(x))
    assert report.thinned([1, 2], [None, 3.0]) == ([2], [3.0])
