"""Tests of the live picture in a pseudo-terminal: lines appear above it, and it is erased at the end."""

import sys
import threading
from types import SimpleNamespace

import pytest

from ddlf.monitor.terminal.live import Cell
from tests.monitor.terminal.terminal import Program
from tests.monitor.terminal.timed_events import in_training
from tests.patience import PATIENCE_S

SHOW = """
import sys, time
from tests.monitor.terminal.timed_events import in_training
from ddlf.monitor.terminal.live import Terminal
display = Terminal()
try:
    display.state = in_training({workers})
    for lane in display.state.lanes.values():
        lane.heard += time.monotonic()
    {body}
finally:
    display.close()
print("after")
"""


@pytest.fixture
def show():
    programs = []

    def start(body, *, workers=2, **more):
        programs.append(Program("-c", SHOW.format(body=body, workers=workers), **more))
        return programs[-1]

    yield start
    for program in programs:
        program.close()


def is_drawn(lines):
    return any(line.startswith("training") for line in lines)


def is_whole(lines):
    """Return whether the whole picture is drawn. The last read bytes may end in the middle of it."""
    return is_drawn(lines) and any(line.startswith("worker 2") for line in lines)


def test_printed_lines_appear_above_the_picture_which_is_erased_at_the_end(show):
    body = """
    print("one [red] :smile:\\n" + "x" * 100)
    print("to stderr", file=sys.stderr)
    display.note("noted")
    sys.stdin.readline()
    print("no line break", end="")"""
    program = show(body)
    lines = program.until(lambda lines: is_whole(lines) and "noted" in lines)
    assert lines[:5] == ["one [red] :smile:", "x" * 80, "x" * 20, "to stderr", "noted"]
    assert [line[:9].rstrip() for line in lines[5:]] == ["training", "", "worker 1", "worker 2"]
    assert program.screen.cursor.hidden
    program.press("\n")
    lines = program.end()
    assert (lines[:5], lines[-2:]) == (
        ["one [red] :smile:", "x" * 80, "x" * 20, "to stderr", "noted"],
        ["no line break", "after"],
    )
    assert not is_drawn(lines)
    assert not program.screen.cursor.hidden


def test_the_picture_is_drawn_in_place_and_fits_80_x_24_with_16_workers(show):
    program = show("sys.stdin.readline()", workers=16)
    lines = program.until(lambda lines: is_drawn(lines) and "+ 7 more" in lines[-1])
    assert len(lines) == 12
    drawn = len(program.written)
    lines = program.until(lambda lines: len(program.written) > 2 * drawn and len(lines) == 12)
    assert is_drawn(lines)  # at the same place, not below


@pytest.mark.parametrize("size", [(60, 24), (120, 24)])
def test_resizing_the_terminal_leaves_no_remains_of_the_picture(show, size):
    program = show("sys.stdin.readline()")
    program.until(is_drawn)
    program.resize(*size)
    program.until(lambda lines: len(lines) == 4 and len(lines[0]) == size[0] - 2)
    program.press("\n")
    assert program.end()[-1] == "after"
    assert not is_drawn(program.lines)


def test_a_traceback_is_written_on_a_clean_terminal(show):
    lines = show("time.sleep(0.5); 1 / 0").end()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "ZeroDivisionError: division by zero"


def test_an_interrupt_leaves_a_clean_terminal(show):
    program = show("sys.stdin.readline()", echo=True)
    program.until(is_drawn)
    program.press("\x03")
    lines = program.end()
    assert lines[-1] == "KeyboardInterrupt"
    assert not is_drawn(lines)
    assert not program.screen.cursor.hidden


def test_the_picture_has_no_colours_if_the_user_wants_none(show):
    with_colours = show("sys.stdin.readline()")
    with_colours.until(is_whole)
    assert b"\x1b[32m" in with_colours.written
    without = show("sys.stdin.readline()", NO_COLOR="1")
    without.until(is_whole)
    assert b"\x1b[32m" not in without.written


def test_in_a_notebook_the_output_of_the_cell_is_updated_in_place(monkeypatch):
    shown, drawn = [], threading.Event()

    def update(text):
        shown.append(text)
        if "training" in text:
            drawn.set()

    fake = SimpleNamespace(HTML=str, display=lambda *_, display_id: SimpleNamespace(update=update))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=fake))
    monkeypatch.setitem(sys.modules, "IPython.display", fake)
    cell = Cell()
    cell.state = in_training()
    assert drawn.wait(PATIENCE_S)
    cell.close()
    assert shown[-1] == ""
    assert shown[-2].startswith("<pre>training  ━")


MAPS = """
import asyncio, sys
from ddlf.monitor import ui
from ddlf.events import MapBegan, MapEnded, MapMoved
from ddlf.monitor.terminal.live import Terminal

class Cluster:
    def subscribe(self, sink):
        self.tell = sink
        return lambda: None

async def main():
    cluster, before = Cluster(), Terminal()
    before.close()
    ui.LONG_S = 0.0
    with ui.LongMaps(cluster, before):
        cluster.tell(MapBegan(map=1, function="work", items=4, workers=2, per_worker=1))
        cluster.tell(MapMoved(map=1, function="work", done=1, failed=1))
        print("meanwhile")
        await asyncio.to_thread(sys.stdin.readline)
        ended = dict(how="complete", done=4, failed=0, seconds=1.0, compute_s=1.0, why="")
        cluster.tell(MapEnded(map=1, function="work", **ended))
        print("over")
        await asyncio.to_thread(sys.stdin.readline)

asyncio.run(main())
"""


def test_a_long_map_is_drawn_below_the_printed_lines_until_it_ends():
    program = Program("-c", MAPS)
    try:
        both = program.until(lambda lines: "meanwhile" in lines and any("mapping work" in line for line in lines))
        assert both[0] == "meanwhile"
        program.press("\n")
        assert program.until(lambda lines: "over" in lines and len(lines) == 2) == ["meanwhile", "over"]
        program.press("\n")
        program.end()
        assert program.code == 0
    finally:
        program.close()
