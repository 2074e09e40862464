"""Tests of the history of a training: a list of records that reads like the history of Keras."""

import builtins
import csv
import math

import pytest

from ddlf.errors import ConfigError
from ddlf.events.record import History
from tests.monitor.runs.made import record


def history():
    """Return a history of three rounds. The first has no validation, and the last has a test."""
    return History(
        [
            record(1, metrics={"loss": 2.0, "accuracy": 0.5}),
            record(2, metrics={"loss": 1.0, "accuracy": 0.75, "val_loss": 1.5}),
            record(3, metrics={"loss": 0.5, "accuracy": 0.875, "val_loss": 1.0}, test={"loss": 3.0}),
        ]
    )


def test_a_history_is_a_list():
    records = history()
    assert isinstance(records[:1], History)
    assert len(records[1:]) == 2
    assert records[-1] is records[2]
    assert records == list(records)


def test_a_history_reads_like_that_of_keras():
    metrics = history().history
    assert list(metrics) == ["loss", "accuracy", "val_loss", "test_loss"]
    assert metrics["loss"] == [2.0, 1.0, 0.5]
    assert metrics["val_loss"][1:] == [1.5, 1.0]
    assert math.isnan(metrics["val_loss"][0])
    assert history().epoch == [1, 2, 3]
    assert History([record(1, slot=2, version=7)]).epoch == [7]
    assert History().history == {}
    frame = history().to_keras()
    assert list(frame) == ["round", *metrics]
    assert frame["round"] == [1, 2, 3]


def test_a_history_is_written_as_a_table(tmp_path):
    path = tmp_path / "history.csv"
    for _ in range(2):  # the second time replaces the file
        history().to_csv(path)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["round"] for row in rows] == ["1", "2", "3"]
    assert [row["val_loss"] for row in rows] == ["", "1.5", "1.0"]
    assert rows[2]["test_loss"] == "3.0"
    assert rows[0]["bytes_out"] == "3000000"
    History().to_csv(path)
    assert path.read_text().startswith("round,version,")


@pytest.mark.slow
def test_a_history_is_drawn_with_a_panel_for_each_metric():
    figure = history().plot()
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss", "accuracy"]
    curves = {line.get_label(): list(line.get_ydata()) for axes in figure.axes for line in axes.lines}
    assert curves == {
        "loss": [2.0, 1.0, 0.5], "val_loss": [1.5, 1.0], "test_loss": [3.0], "accuracy": [0.5, 0.75, 0.875],
    }  # fmt: skip
    (only,) = history().plot("accuracy").axes
    assert only.get_ylabel() == "accuracy"
    assert History().plot().axes == []
    with pytest.raises(ConfigError, match="the history has no metric 'acc'; it has loss, accuracy"):
        history().plot("acc")


def test_without_matplotlib_an_error_names_the_package_to_install(monkeypatch):
    usual = builtins.__import__

    def without(name, *args, **options):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return usual(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r'curves need Matplotlib, .*; pip install "ddlf\[plots\]"'):
        history().plot()


def test_a_notebook_shows_a_table_of_the_first_and_the_last_rounds():
    text = history()._repr_html_()
    assert "<th>val_loss</th>" in text
    assert text.count("<tr>") == 4
    many = History([record(n, metrics={"<b>": n / 8}) for n in range(1, 101)])
    text = many._repr_html_()
    assert text.count("<tr>") == 12
    assert "&lt;b&gt;" in text
    assert "<td>...</td>" in text
    assert "<td>12.5000</td>" in text
    assert "<table>" in History()._repr_html_()
