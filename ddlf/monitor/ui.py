"""Choose and open the display of a run: live picture, lines, events as JSON, or only results. Runs on the master."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

from ddlf.data.app import UserApp
from ddlf.errors import ConfigError
from ddlf.events import Event, MapBegan, MapEnded
from ddlf.events.sinks import Sink, to_json
from ddlf.monitor.terminal.display import Display
from ddlf.monitor.terminal.lines import Lines
from ddlf.settings.declared import declared

_drawing = threading.Lock()
"""Locked while a live picture is open: a terminal can show only one."""
LONG_S = 1.0
"""Seconds until a map is drawn. The picture of a shorter map would only flicker."""


class Json(Display):
    """A display for programs: prints each event as a line of JSON on standard output. Prints of the user's code go to
    standard error.
    """

    def __init__(self) -> None:
        super().__init__()
        self._out, sys.stdout = sys.stdout, sys.stderr

    def tell(self, event: Event) -> None:
        """Print an event as a line of JSON."""
        self._out.write(f"{json.dumps(to_json(event))}\n")
        self._out.flush()

    def close(self) -> None:
        """Restore standard output. Safe to call again."""
        sys.stdout = self._out


def chosen(setting: str, origin: str = "ui") -> str:
    """Return the name of the display to use: ``"rich"`` (live picture), ``"plain"`` (lines), ``"json"`` or ``"none"``.

    Args:
        setting: One of these, or ``"auto"``.
        origin: The option, variable or setting that it comes from.

    Raises:
        ConfigError: ``setting`` is invalid, or there is no terminal to draw in.
    """
    ui: str = declared()["ui"].check(origin, setting)
    if ui == "auto":
        return "rich" if can_draw() and not os.environ.get("CI") else "plain"
    if ui == "rich" and not can_draw():
        raise ConfigError(
            f"{origin} is 'rich', but standard output is not a terminal that can draw",
            hint="leave it at 'auto', which then prints lines",
        )
    return ui


def can_draw() -> bool:
    """Return whether standard output is a notebook, or a terminal with a movable cursor. rich decides about colours."""
    if in_kernel():
        return True
    is_mute = os.environ.get("TERM", "") in ("", "dumb", "unknown") or os.environ.get("TTY_INTERACTIVE") == "0"
    return sys.stdout.isatty() and not is_mute


def in_kernel() -> bool:
    """Return whether this is the cell of a notebook, which can show more than text."""
    shell = sys.modules.get("IPython") and sys.modules["IPython"].get_ipython()
    return hasattr(shell, "kernel")


@contextlib.contextmanager
def opened(ui: str) -> Iterator[Display]:
    """Open the display with a name, and close it at the end of the ``with`` block.

    Args:
        ui: Result of ``chosen``.
    """
    draws = ui == "rich" and _drawing.acquire(blocking=False)
    try:
        display = _drawn() if draws else {"json": Json, "none": Display}.get(ui, Lines)()
        try:
            yield display
        finally:
            display.close()
    finally:
        if draws:
            _drawing.release()


def _drawn() -> Display:
    from ddlf.monitor.terminal.live import Cell, Terminal

    return Cell() if in_kernel() else Terminal()


@contextlib.contextmanager
def shown(app: UserApp, cluster: Any = None) -> Iterator[None]:
    """Open the display that the app's ``ui`` names, unless it is already open.

    Args:
        app: The user's ``IApp``.
        cluster: A cluster whose events the display shows, too, if there is no run that passes them to the app.
    """
    if app.run_context.display is not None:
        yield
        return
    with opened(choice(app)) as display, attached(app, display), heard(cluster, display.tell):
        yield


def choice(app: UserApp) -> str:
    """Return the name of the display that an app wants. The attribute ``ui`` of the object overrides ``$DDLF_UI``,
    which overrides the attribute of the class.
    """
    named = os.environ.get("DDLF_UI") if "ui" not in vars(app) else None
    ui = chosen(named, "DDLF_UI") if named else chosen(app.ui)
    return ui if app.verbose or ui == "json" else "none"


@contextlib.contextmanager
def attached(app: UserApp, display: Display) -> Iterator[None]:
    """Send an app's events to a display, which also decides which records get a line."""
    app.run_context.display = display
    # this display shows nothing
    take_off = app.subscribe(display.tell) if type(display) is not Display else lambda: None
    try:
        yield
    finally:
        take_off()
        app.run_context.display = None


@contextlib.contextmanager
def heard(cluster: Any, tell: Sink) -> Iterator[None]:
    """Send a cluster's events to a sink, if there is a cluster."""
    take_off = cluster.subscribe(tell) if cluster is not None else lambda: None
    try:
        yield
    finally:
        take_off()


class LongMaps:
    """A context for a function that runs on a cluster. A live picture shows the maps (``Cluster.map``) that take over a
    second. Printed text appears above it.

    Args:
        cluster: The cluster.
        display: The closed display of the run before. If it printed lines, there is no picture.
    """

    def __init__(self, cluster: Any, display: Display) -> None:
        self._heard = heard(None if isinstance(display, Lines) else cluster, self._tell)
        self._going: dict[int, Event] = {}
        self._display: Display | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        self._heard.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._heard.__exit__(*error)
        self._end()

    def _tell(self, event: Event) -> None:
        if isinstance(event, MapBegan):
            if not self._going:
                self._timer = asyncio.get_running_loop().call_later(LONG_S, self._draw)
            self._going[event.map] = event
        if self._display is not None:
            self._display.tell(event)
        if isinstance(event, MapEnded):
            self._going.pop(event.map, None)
            if not self._going:
                self._end()

    def _draw(self) -> None:
        self._display = _drawn()
        for began in self._going.values():
            self._display.tell(began)

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._display is not None:
            self._display.close()
        self._display = None
