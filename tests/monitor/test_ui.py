"""Tests of choosing the display of a run: picture, lines, JSON or none, by terminal, environment and app."""

import json
import sys

import pytest

from ddlf import IApp
from ddlf.errors import ConfigError
from ddlf.events import ModelSaved
from ddlf.events.sinks import from_json
from ddlf.monitor import ui
from ddlf.monitor.terminal.display import Display
from ddlf.monitor.terminal.lines import Lines
from ddlf.monitor.ui import chosen, opened, shown
from ddlf.testing import FakeRun
from tests.monitor.terminal.terminal import Program

SAVED = ModelSaved(path="m.keras")
ASK = "import ddlf.monitor.ui; print(ddlf.monitor.ui.chosen('auto'))"


@pytest.fixture(autouse=True)
def usual(monkeypatch):
    for name in ("CI", "DDLF_UI"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "rich"),
        ({"NO_COLOR": "1"}, "rich"),  # NO_COLOR only concerns colours
        ({"TERM": "dumb"}, "plain"),
        ({"TTY_INTERACTIVE": "0"}, "plain"),
        ({"CI": "true"}, "plain"),
    ],
)
def test_a_terminal_gets_a_picture_unless_it_is_simple_or_not_interactive(environment, expected):
    program = Program("-c", ASK, **environment)
    assert program.end() == [expected]
    program.close()


def test_a_pipe_gets_lines_despite_variables_about_colours(monkeypatch):
    for variables in ({}, {"FORCE_COLOR": "1"}, {"TTY_COMPATIBLE": "1"}):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert chosen("auto") == "plain"


def test_an_impossible_picture_and_an_unknown_name_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match="--ui is 'rich', but standard output is not a terminal"):
        chosen("rich", "--ui")
    with pytest.raises(ConfigError, match=r"DDLF_UI must be one of .*, got 'plane'; did you mean 'plain'"):
        chosen("plane", "DDLF_UI")


def test_an_object_wins_over_the_environment_which_wins_over_the_class(monkeypatch):
    class Quiet(IApp):
        ui = "none"

    app = Quiet()
    assert ui.choice(app) == "none"
    monkeypatch.setenv("DDLF_UI", "json")
    assert ui.choice(app) == "json"
    app.ui = "plain"
    assert ui.choice(app) == "plain"
    app.verbose = False
    assert ui.choice(app) == "none"


def test_with_json_standard_output_has_only_events(capsys):
    app = IApp()
    app.ui = "json"
    with shown(app):
        app.run_context.emit(SAVED)
        app.say("a line")
        print("of the program")
    print("after")
    captured = capsys.readouterr()
    event, after = captured.out.splitlines()
    assert (from_json(json.loads(event)), after) == (SAVED, "after")
    assert captured.err == "of the program\n"


def test_with_none_no_line_is_printed(capsys):
    app = IApp()
    app.ui = "none"
    with shown(app):
        assert type(app.run_context.display) is Display
        app.run_context.emit(SAVED)
    assert capsys.readouterr().out == ""


def test_a_shown_run_is_not_shown_twice(capsys):
    app = IApp()
    with shown(app):
        outer = app.run_context.display
        with shown(app):
            assert app.run_context.display is outer
    assert app.run_context.display is None


def test_a_terminal_has_room_for_one_picture(monkeypatch):
    monkeypatch.setattr(ui, "_drawn", Display)
    with opened("rich") as first, opened("rich") as second:
        assert (type(first), type(second)) == (Display, Lines)
    with opened("rich") as third:
        assert type(third) is Display


def test_standard_output_is_restored_when_a_run_fails(capsys):
    before = sys.stdout
    with pytest.raises(KeyError), opened("json"):
        raise KeyError
    assert sys.stdout is before


async def test_a_run_of_short_rounds_has_its_first_and_its_last_line(capsys):
    run = FakeRun(master_epochs=30, verbose=True)
    with shown(run):
        await run.train_model()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("round")]
    assert lines[0].startswith("round  1/30 ")
    assert lines[-1].startswith("round 30/30 ")
    assert len(lines) < 10
