"""The live display: a picture of a run below the lines of a terminal, or in a notebook's cell. A thread redraws it."""

from __future__ import annotations

import contextlib
import functools
import html
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from rich.console import Console, ConsoleRenderable
from rich.live import Live
from rich.text import Text

from ddlf import events as e
from ddlf.monitor.state import RunningPhase, State, WorkerLane
from ddlf.monitor.terminal.display import Display
from ddlf.monitor.terminal.phrases import SILENT_S, duration, number, phase_in_words, position, rate, trouble

DRAWS_PER_S = 4.0
AT_MOST_EVERY_S = 0.1
"""Minimum seconds between additional refreshes."""
CELL_COLUMNS, CELL_ROWS = 100, 40
"""Size of the picture in a notebook."""


@functools.cache
def _console() -> Console:
    """Return the console for standard output. All pictures share it, so that text printed through an earlier picture
    appears above a later one.

    It prints the user's text without markup, and the terminal breaks lines. The caller must check that the terminal can
    draw.
    """
    return Console(
        markup=False, emoji=False, highlight=False, soft_wrap=True, force_terminal=True, force_interactive=True
    )


class Terminal(Display):
    """A display that draws a live picture of the run in a terminal. All printed text appears above the picture.
    ``close`` removes it completely.
    """

    prints = True

    def __init__(self) -> None:
        super().__init__()
        self._notes: deque[str] = deque()
        self._console = _console()
        self._live = _Reflowed(
            console=self._console,
            get_renderable=self._draw,
            drawn=lambda: self._picture,
            refresh_per_second=DRAWS_PER_S,
            transient=True,
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start()

    def tell(self, event: e.Event) -> None:
        """Update the state. Draw a new phase at once, because an import may soon keep all threads from drawing."""
        super().tell(event)
        if isinstance(event, e.PhaseBegan) and time.monotonic() - self._drawn_at > AT_MOST_EVERY_S:
            self._live.refresh()

    def note(self, text: str) -> None:
        """Print a note when the picture is drawn next."""
        self._notes.append(text)

    def close(self) -> None:
        """Remove the picture. Safe to call again."""
        if not self._live.is_started:
            return
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # also print text that does not end with a line break
        self._say_notes()
        try:
            self._live.stop()
        finally:  # this runs even if a second Ctrl-C interrupts ``stop``
            self._console.show_cursor(True)

    def _draw(self) -> Text:
        self._say_notes()
        ascii_only = self._console.options.ascii_only
        self._drawn_at = time.monotonic()
        self._picture = draw(self.state, time.monotonic(), *self._console.size, ascii_only=ascii_only)
        return self._picture

    def _say_notes(self) -> None:
        while self._notes:
            print(self._notes.popleft(), file=sys.stderr)


class _Reflowed(Live):
    """A live picture that finds its first row again after the terminal became narrower and wrapped its rows.

    Args:
        drawn: Returns the picture that is written next.
        options: Options of ``rich.live.Live``.
    """

    def __init__(self, *, drawn: Callable[[], Text], **options: Any) -> None:
        self._next = drawn
        self._columns, self._rows = 0, [""]
        super().__init__(**options)

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        columns = self.console.width
        if columns < self._columns:
            broken = sum(max(1, -(-len(row) // columns)) for row in self._rows)
            self._live_render._shape = (columns, broken)
        self._columns, self._rows = columns, self._next().plain.split("\n")
        return super().process_renderables(renderables)


class Cell(Display):
    """A display that draws a picture of the run in the output of a notebook cell, and changes it in place."""

    prints = True

    def __init__(self) -> None:
        from IPython.display import HTML, display

        super().__init__()
        self._html = HTML
        self._handle: Any = display(HTML(""), display_id=True)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._refresh, name="ddlf picture", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Remove the picture. Safe to call again."""
        self._done.set()
        self._thread.join()
        self._handle.update(self._html(""))

    def _refresh(self) -> None:
        drawn = ""
        while not self._done.wait(1 / DRAWS_PER_S):
            text = draw(self.state, time.monotonic(), CELL_COLUMNS, CELL_ROWS).plain
            if text != drawn:
                with contextlib.suppress(Exception):  # the kernel is ending
                    self._handle.update(self._html(f"<pre>{html.escape(text)}</pre>"))
            drawn = text


NAME = 10
"""Width of the first word in columns, equal to the width in printed lines."""
LONGEST_NAME = 20
MARGIN = 2
"""Columns to leave empty: a terminal writes ``^C`` after the last row, which must not wrap."""
FEWEST_LANES = 3
"""Minimum number of rows for workers, including the row that sums up the others."""
SHORTEST_BAR, LONGEST_BAR = 5, 20
METRICS = 3
"""Number of training metrics to show. The line of the round has all of them."""
BARS = {False: "━╸─", True: "=>-"}
"""Full, half and empty parts of a bar; in ASCII for encodings without the other characters."""


def draw(state: State, now: float, width: int, height: int, *, ascii_only: bool = False) -> Text:
    """Return the picture of a run: its progress, its metrics and its workers.

    Args:
        state: State of the run.
        now: Current time, on the clock of the state.
        width: Columns of the terminal.
        height: Rows of the terminal. The picture has at most half of them, but always the rows above the workers.
        ascii_only: Whether only ASCII can be written.
    """
    pen = _Pen(now, max(width - MARGIN, 20), BARS[ascii_only])
    master_phases = [phase for phase in list(state.phases.values()) if not phase.worker]
    worker_phases = {phase.worker: phase for phase in list(state.phases.values()) if phase.worker}
    lanes = sorted(state.lanes.values(), key=lambda lane: lane.worker)
    pen.names = max([NAME, *(min(len(lane.name), LONGEST_NAME) + 2 for lane in lanes)])
    rows = pen.run(state) if state.is_training else []
    rows += [pen.phase("master", phase) for phase in master_phases]
    if state.waiting_until is not None:
        remaining_s = max(0.0, state.waiting_until - now)
        rows.append(pen.row("waiting", f"no workers left; the run ends in {remaining_s:.0f} s", style="red"))
    if state.is_training or worker_phases:
        most = max(FEWEST_LANES, height // 2 - len(rows))
        rows += _lanes(pen, lanes, worker_phases, most, rounds=not state.in_rounds)
    for row in rows:
        row.truncate(pen.width, overflow="ellipsis")
    return Text("\n").join(rows)


def _lanes(
    pen: _Pen, lanes: list[WorkerLane], phases: dict[int, RunningPhase], most: int, *, rounds: bool
) -> list[Text]:
    """Return a row of the picture for each worker. If there are too many workers, workers in trouble are shown first,
    and a last row counts the other ones.
    """
    shown = lanes
    if len(lanes) > most:
        shown = sorted(lanes, key=lambda lane: not trouble(lane, pen.now))[: most - 1]
        shown.sort(key=lambda lane: lane.worker)
    rows = [pen.lane(lane, phases.get(lane.worker), rounds=rounds) for lane in shown]
    hidden = [lane for lane in lanes if lane not in shown]
    if hidden:
        together = sum(lane.rate for lane in hidden if lane.is_there)
        rows.append(pen.row(f"+ {len(hidden)} more", rate(together) if together else "", style="dim"))
    return rows


class _Pen:
    """Writes the rows of text that form one picture of a run."""

    def __init__(self, now: float, width: int, bars: str) -> None:
        self.now = now
        self.width = width
        self.bars = bars
        self.names = NAME

    def row(self, name: str, *parts: str | Text, style: str = "") -> Text:
        name = name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"
        return Text(f"{name:<{self.names}}", style=style, no_wrap=True, end="").append_text(
            Text("  ").join(Text(part, style) if isinstance(part, str) else part for part in parts if part)
        )

    def bar(self, share: float, columns: int, style: str = "cyan") -> Text:
        full, half, empty = tuple(self.bars)
        halves = int(min(max(share, 0.0), 1.0) * columns * 2)
        drawn = full * (halves // 2) + half * (halves % 2)
        return Text(drawn, style).append(empty * (columns - len(drawn)), "dim")

    def run(self, state: State) -> list[Text]:
        """Return rows with the progress and the metrics of the run."""
        remaining_s = state.left_s(self.now)
        ends = [position(state), f"{duration(remaining_s)} left" if remaining_s is not None else ""]
        used_width = self.names + sum(len(end) + 2 for end in ends if end) + len(" 100 %")
        room = self.width - used_width
        bar = self.bar(state.done, room, "green").append(" ") if room >= SHORTEST_BAR else Text()
        first = self.row("training", bar.append(f"{state.done * 100:3.0f} %"), *ends)
        metrics = [f"{name} {number(value)}" for name, value in list(state.metrics.items())[:METRICS]]
        total = rate(state.rate, "samples") if state.rate else ""
        return [first, self.row("", *metrics, total)] if metrics or total else [first]

    def phase(self, name: str, phase: RunningPhase) -> Text:
        since = f"{self.now - phase.since:.0f} s"
        if not phase.done:
            return self.row(name, phase_in_words(phase), since)
        return self.row(name, phase_in_words(phase, amount=False), self.bar(phase.done / phase.total, 10), since)

    def lane(self, lane: WorkerLane, phase: RunningPhase | None, *, rounds: bool) -> Text:
        if problem := trouble(lane, self.now):
            return self.row(lane.name, problem, style="dim" if lane.is_gone else "red")
        if phase is not None:
            return self.phase(lane.name, phase)
        silent = lane.quiet_s(self.now)
        heard = Text(f"{silent:.0f} s ago" if silent >= 1 else "now", "yellow" if silent >= SILENT_S else "dim")
        if not lane.slot:
            return self.row(lane.name, Text(f"idle  {self.now - lane.since:.0f} s", "dim"))
        if not lane.total:
            return self.row(lane.name, Text("computing", "dim"), f"round {lane.round}" if rounds else "", heard)
        where = f"round {lane.round}" if rounds else f"epoch {lane.epoch}" if lane.epoch else ""
        loss = f"loss {number(lane.loss)}" if lane.loss is not None else ""
        parts: list[str | Text] = [where, f"{rate(lane.rate):>9}" if lane.rate else "", loss, heard]
        room = self.width - self.names - sum(len(part) + 2 for part in parts if part)
        if room < SHORTEST_BAR:
            parts, room = parts[1:], room + len(where) + 2
        bar = [self.bar(lane.done / lane.total, min(room, LONGEST_BAR))]
        return self.row(lane.name, *bar * (room >= SHORTEST_BAR), *parts)
