"""Tests of the error messages of a command: rows on a terminal, one sentence in a file."""

import os
import sys

import pytest

from ddlf.cli.output import native_output_to_log, show_error
from ddlf.errors import ClusterTooSmall, ConfigError, ConnectError, ExecutorCrashed, RemoteError, WorkerLost

LIBRARY = '  File "/v/lib/python3.11/site-packages/keras/model.py", line 9, in fit\n    return call(x)\n'
LINES = f'Traceback on the worker (most recent call last):\n{LIBRARY}  File "app.py", line 3, in train\n    check(x)\n{LIBRARY}'


def remote(message="no labels", **more):
    return RemoteError("ValueError", message, f"{LINES}ValueError: {message}", worker="worker 2 (pc02:9000)", **more)


@pytest.fixture
def on_a_terminal(capsys, monkeypatch):
    """Return a function that gives the text of an error on a terminal with 60 columns."""

    def shown(error, whole=False):
        monkeypatch.setenv("COLUMNS", "60")
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        show_error(error, whole=whole)
        return capsys.readouterr().err

    return shown


def test_terminal_error_has_cause_remedy_and_reference(on_a_terminal):
    error = WorkerLost("worker 2 (pc02:9000): the connection was reset by the other side", hint="look at its terminal")
    assert on_a_terminal(error) == (
        "error  worker 2 (pc02:9000): the connection was reset by the\n"
        "       other side\n"
        "try    look at its terminal\n"
        "more   ddlf help WorkerLost\n"
    )


def test_reference_is_one_that_ddlf_help_has(on_a_terminal):
    class PartLost(ClusterTooSmall):
        pass

    assert on_a_terminal(PartLost("two are gone")).endswith("more   ddlf help ClusterTooSmall\n")


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        (
            ConnectError("it was not reached again within 30 s", hint="x", worker="worker 2"),
            "worker 2: it was not reached again within 30 s",
        ),
        (OSError(28, "No space left on device", "/x/y"), "No space left on device"),
        (ValueError("line 3 is not a number\nor so"), "line 3 is not a number"),
        (OSError(104, "Reset by the other side"), ""),  # the sentence has the same reason
        (None, ""),
    ],
)
def test_error_prints_its_cause_unless_the_sentence_has_it(on_a_terminal, cause, reason):
    error = WorkerLost("worker 2: reset by the other side", hint="look at it")
    error.__cause__ = cause
    rows = [f"why    {reason}"] * bool(reason) + ["try    look at it", "more   ddlf help WorkerLost"]
    assert on_a_terminal(error).splitlines()[1:] == rows


def test_error_table_keeps_its_lines(on_a_terminal):
    row = f"    1  127.0.0.1:9{' ' * 60}connection refused"
    error = ConnectError(f"1 of 2 workers could not be reached:\n{row}", hint="start it")
    assert f"\n{row}\ntry    start it\n" in on_a_terminal(error)
    assert "more" not in on_a_terminal(ConfigError("batch_size must be a whole number, got 1.5"))


def test_error_shows_worker_lines_last_and_library_lines_with_v(on_a_terminal):
    error = remote()
    error.hint = "set y_train"
    printed = on_a_terminal(error)
    assert printed.startswith(
        "error  worker 2 (pc02:9000): ValueError: no labels\ntry    set y_train\n"
        "more   -v also shows the lines of libraries\n\nTraceback on the worker"
    )
    assert printed.endswith(
        'Traceback on the worker (most recent call last):\n  File "app.py", line 3, in train\n    check(x)\n'
    )
    assert on_a_terminal(error, whole=True).endswith(f"\n{LINES}")


def test_error_in_a_file_is_one_sentence_and_a_reference(capsys):
    show_error(WorkerLost("it is gone", hint="look at it"), whole=False)
    assert capsys.readouterr().err == "error  it is gone; look at it\nmore   ddlf help WorkerLost\n"
    show_error(ExecutorCrashed("it ended", stderr_tail="Killed", hint="use less"), whole=False)
    assert capsys.readouterr().err == (
        "error  it ended; use less\nits last output:\nKilled\nmore   ddlf help ExecutorCrashed\n"
    )
    show_error(ConfigError("it is not a number", hint="write one"), whole=False)
    assert capsys.readouterr().err == "error  it is not a number; write one\n", "this kind of error has no page of help"


def test_error_of_several_lines_in_a_file_has_its_remedy_in_a_line_of_its_own(capsys):
    table = "2 of 3 workers are in use:\n    1  pc01  by ann\n    2  pc02  by bob\n"
    show_error(ConfigError(table, hint="wait for them"), whole=False)
    assert capsys.readouterr().err == f"error  {table}try    wait for them\n"
    error = ConfigError("4 values are NaN", hint="lower the learning rate")
    error.add_note("likely cause: sample 17")
    show_error(error, whole=False)
    assert (
        capsys.readouterr().err == "error  4 values are NaN\nlikely cause: sample 17\ntry    lower the learning rate\n"
    )


def test_equal_errors_of_several_workers_are_printed_once(capsys):
    first, *equal_errors = (remote() for _ in range(4))
    first.join(equal_errors, 5)
    show_error(first, whole=False)
    printed = capsys.readouterr().err
    assert printed.startswith("error  4 of 5 workers failed\n")
    assert printed.count("no labels") == 2, "in the sentence, and where the traceback ends"
    assert printed.count("check(x)") == 1
    assert "keras" not in printed


def test_notes_of_a_user_error_are_printed(capsys):
    error = remote()
    error.add_note("in file 3")
    show_error(error, whole=False)
    assert capsys.readouterr().err.startswith(
        "error  worker 2 (pc02:9000): ValueError: no labels\nin file 3\n\nTraceback"
    )


def test_output_of_native_code_stays_on_the_terminal_of_a_user_without_a_home_folder(tmp_path, monkeypatch):
    for name in ("XDG_STATE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # this is the result if the user id has no home
    before = sys.stderr
    with native_output_to_log():
        assert sys.stderr is before
    assert os.listdir(tmp_path) == []
