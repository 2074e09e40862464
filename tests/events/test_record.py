"""Tests of records: the printed line of a round, and its numbers."""

import errno
import io
import math
import sys

import pytest

from ddlf.events.record import RoundRecord, accuracy, fitted, print_at_once, size


def record(**facts):
    basic = dict(round=3, rounds=10, version=3, epochs=1, samples=60_000, seconds=2.0, compute_s=1.9)
    return RoundRecord(
        **{**basic, "transfer_s": 0.05, "merge_s": 0.01, "bytes_out": 2_100_000, "bytes_back": 512, **facts}
    )


def test_the_line_has_round_time_metrics_and_bytes_in_eighty_columns():
    line = str(record(metrics={"loss": 0.25, "accuracy": 0.9}))
    assert line == "round  3/10    2.00 s  loss 0.2500  accuracy 0.9000  2.10 MB out, 512 B back"
    assert "staleness" not in line
    assert "slot 2" in str(record(slot=2, staleness=4))
    assert "staleness 4" in str(record(slot=2, staleness=4))
    assert str(record(compute_s=1.5)).endswith("  0.50 s not computing")


def test_long_lines_continue_below_and_many_metrics_are_counted():
    test = {"loss": 0.3, "accuracy": 0.8}
    assert str(
        record(metrics={"loss": 0.25, "accuracy": 0.9, "val_loss": 0.31}, test=test, recomputed=1)
    ).splitlines() == [
        "round  3/10    2.00 s  loss 0.2500  accuracy 0.9000  val_loss 0.3100",
        "          test_loss 0.3000  test_accuracy 0.8000  2.10 MB out, 512 B back",
        "          1 computed again",
    ]
    lines = str(record(metrics={f"output_{n}_categorical_accuracy": n for n in range(12)})).splitlines()
    assert max(map(len, lines)) <= 80
    assert "  and 4 more metrics  2.10 MB out" in "  ".join(line.strip() for line in lines)
    assert "output_8_categorical_accuracy" not in "".join(lines)


def test_long_lines_are_broken_between_words_on_a_terminal_only(monkeypatch):
    text = "data      " + "word  " * 20 + "\nshort"
    assert fitted(text) == text
    monkeypatch.setattr(sys, "stdout", type("Terminal", (), {"isatty": lambda self: True})())
    monkeypatch.setenv("COLUMNS", "60")
    lines = fitted(text).split("\n")
    assert lines[-1] == "short"
    assert all(len(line) <= 60 for line in lines)
    assert lines[1].startswith(" " * 10 + "word")
    assert "word  word" in lines[0]


def test_accuracy_is_found_under_any_name_and_is_nan_without_one():
    assert accuracy({"loss": 1.0, "categorical_accuracy": 0.5}) == 0.5
    assert math.isnan(record().accuracy)
    assert math.isnan(record().loss)


def test_sizes_have_units():
    counts = (0, 999, 1000, 2_060_000, 20_600_000, 412 * 10**6, 3 * 10**9, 5 * 10**15)
    texts = ["0 B", "999 B", "1.00 kB", "2.06 MB", "20.6 MB", "412 MB", "3.00 GB", "5000 TB"]
    assert [size(count) for count in counts] == texts


class Broken(io.StringIO):
    """A standard output that fails with an error."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def flush(self):
        raise self.error


def test_a_full_disk_drops_a_line_and_a_closed_pipe_raises(monkeypatch):
    monkeypatch.setattr("sys.stdout", Broken(OSError(errno.ENOSPC, "full")))
    print_at_once("x")
    monkeypatch.setattr("sys.stdout", Broken(BrokenPipeError()))
    with pytest.raises(BrokenPipeError):
        print_at_once("x")
