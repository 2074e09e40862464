"""Tests of tables of runs as CSV, LaTeX and text."""

import csv

from ddlf import events as e
from ddlf.monitor.runs import table
from ddlf.monitor.runs.run_reader import read
from tests.monitor.runs.made import BEGAN, events_of, run


def test_a_run_is_a_column_of_its_results(tmp_path):
    events = [*events_of(4), (BEGAN + 9, e.Evaluated(metrics={"loss": 0.5, "accuracy": 0.875}))]
    rows = table.run_rows([read(run(tmp_path, "a", events))])
    results = dict(rows[1:])
    assert results["rounds"] == "4"
    assert results["seconds per round"] == "2"
    assert results["samples per second"] == "500"  # 4 rounds of 1000 samples in 8 s
    assert results["sent per round (MB)"] == "3"
    assert results["waiting, mean of workers (s)"] == "0.125"
    assert results["final loss"] == "0.25"
    assert results["final test accuracy"] == "0.875"
    assert "slots computed again" not in results


def test_runs_with_different_quantities_are_compared_in_one_table(tmp_path):
    pasts = [read(run(tmp_path, "a", events_of(4))), read(run(tmp_path, "b", events_of(0), "failed", "no"))]
    rows = table.run_rows(pasts)
    assert rows[0] == ["quantity", pasts[0].path.name, pasts[1].path.name]
    assert ["state", "finished", "failed"] in rows
    assert ["rounds", "4", ""] in rows


def test_csv_is_read_back_unchanged():
    rows = [["a, b", 'c"d'], ["1", "e\nf"]]
    assert list(csv.reader(table.as_csv(rows).splitlines(keepends=True))) == rows


def test_latex_escapes_special_characters_and_aligns_numbers_right():
    text = table.as_latex([["name", "n_1"], [r"a&b_c 5% $x$ {y} #1 ~ ^ \z", "1,000.5"], ["b", "-2e+10"]])
    assert text.splitlines()[1:4] == [r"\begin{tabular}{lr}", r"  \toprule", r"  name & n\_1 \\"]
    cell = r"a\&b\_c 5\% \$x\$ \{y\} \#1 \textasciitilde{} \textasciicircum{} \textbackslash{}z"
    assert f"  {cell} & 1,000.5 \\\\" in text.splitlines()


def test_text_has_aligned_columns():
    assert table.as_text([["run", "state"], ["实验", "x"], ["abcde", "y"]]).splitlines() == [
        "run    state",
        "实验   x",
        "abcde  y",
    ]
    assert table.as_text([["run", "loss"], ["20260101-a", "0.5"], ["b", "10 MB"]]).splitlines() == [
        "run          loss",
        "20260101-a    0.5",
        "b           10 MB",
    ]


def test_a_number_has_four_digits_and_nan_is_named():
    assert [table.number(value) for value in (0.123456, 12345.6, float("nan"), float("-inf"), 0.0)] == [
        "0.1235", "12346", "NaN", "-inf", "0",
    ]  # fmt: skip
