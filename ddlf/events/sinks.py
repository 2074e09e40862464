"""Who is told what happens: ``Events`` gives each event to all that have subscribed. Runs on the master."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

from ddlf.errors import ConfigError
from ddlf.events import KINDS, Event, facts

log = logging.getLogger(__name__)

Sink = Callable[[Event], object]
"""Takes each event, on the master's event loop, and returns at once: the run waits for it."""


class Events:
    """Those who want to know."""

    def __init__(self) -> None:
        self._sinks: dict[object, Sink] = {}

    def subscribe(self, sink: Sink) -> Callable[[], None]:
        """Give each event from now on to a sink, after those that were there before it.

        A sink that raises is taken off, and its traceback is logged. It never ends a run.

        Returns:
            Takes the sink off. Safe to call again.

        Raises:
            ConfigError: The sink is async: nobody would wait for it, so it would never run.
        """
        if inspect.iscoroutinefunction(sink):
            raise ConfigError(
                f"a sink cannot be async, but {sink!r} is: training does not wait for it",
                hint="make it a plain function, which may put the event into an asyncio.Queue",
            )
        key = object()
        self._sinks[key] = sink

        def take_off() -> None:
            self._sinks.pop(key, None)

        return take_off

    def emit(self, event: Event) -> None:
        """Tell everybody. Raises nothing of theirs."""
        for key, sink in list(self._sinks.items()):
            try:
                sink(event)
            except Exception:
                self._sinks.pop(key, None)
                log.exception("%r failed on %s, and is told no more; the run goes on", sink, event)


def to_json(event: Event) -> dict[str, Any]:
    """An event as JSON data: its facts, and its name as ``"event"``."""
    return {"event": type(event).__name__, **facts.to_data(event)}


def from_json(data: dict[str, Any]) -> Event:
    """The event of JSON data.

    Raises:
        KeyError: There is no event of that name.
        TypeError: A fact is missing.
    """
    return facts.from_data(KINDS[data["event"]], data)
