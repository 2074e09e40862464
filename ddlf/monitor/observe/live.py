"""Keeps a picture of a run below the lines of a terminal, or in a notebook's cell, and draws it again some times a second, in a thread."""

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
from ddlf.monitor.observe.display import Display
from ddlf.monitor.observe.picture import draw

DRAWS_PER_S = 4.0
AT_MOST_EVERY_S = 0.1
"""For what is drawn besides that."""
CELL_COLUMNS, CELL_ROWS = 100, 40
"""Of the picture in a notebook."""


@functools.cache
def _console() -> Console:
    """The one that writes to standard output: what was given a stream in an earlier picture's time is printed above a later one, too.

    What is printed is the user's text, and no markup; the terminal breaks its lines. That it can draw is known.
    """
    return Console(
        markup=False, emoji=False, highlight=False, soft_wrap=True, force_terminal=True, force_interactive=True
    )


class Terminal(Display):
    """The picture in a terminal. What is printed meanwhile, from wherever, appears above it; when it is closed nothing of it is left."""

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
        """Take an event in; draw what begins at once, since an import may soon keep every thread from drawing."""
        super().tell(event)
        if isinstance(event, e.PhaseBegan) and time.monotonic() - self._drawn_at > AT_MOST_EVERY_S:
            self._live.refresh()

    def note(self, text: str) -> None:
        """Say something soon, when the picture is drawn again."""
        self._notes.append(text)

    def close(self) -> None:
        """Take the picture away. Safe to call again."""
        if not self._live.is_started:
            return
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # what has no line break yet
        self._say_notes()
        try:
            self._live.stop()
        finally:  # also when a second Ctrl-C ends that
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
    """Finds the picture's first row again when a terminal that became narrower has broken the rows.

    Args:
        drawn: Returns the picture that is about to be written.
        options: As in rich's.
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
    """The picture in the output of a notebook's cell, which is changed in place."""

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
        """Take the picture away. Safe to call again."""
        self._done.set()
        self._thread.join()
        self._handle.update(self._html(""))

    def _refresh(self) -> None:
        drawn = ""
        while not self._done.wait(1 / DRAWS_PER_S):
            text = draw(self.state, time.monotonic(), CELL_COLUMNS, CELL_ROWS).plain
            if text != drawn:
                with contextlib.suppress(Exception):  # the kernel is going down
                    self._handle.update(self._html(f"<pre>{html.escape(text)}</pre>"))
            drawn = text
