"""``Events`` passes each event to all subscribed sinks. Runs on the master."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

from ddlf.errors import ConfigError
from ddlf.events import KINDS, Event, facts

log = logging.getLogger(__name__)

Sink = Callable[[Event], object]
"""Receives each event on the master's event loop. It must return at once, because the run waits for it."""


class Events:
    """Passes the events of a run or a cluster to its sinks, the functions that have subscribed."""

    def __init__(self) -> None:
        self._sinks: dict[object, Sink] = {}

    def subscribe(self, sink: Sink) -> Callable[[], None]:
        """Pass each future event to a sink, after all earlier sinks.

        A sink that raises is removed, and its traceback is logged. It never ends a run.

        Returns:
            A function that removes the sink. You may call it twice.

        Raises:
            ConfigError: The sink is async. Training does not await sinks, so it would never run.
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
        """Pass an event to all sinks, and catch their errors."""
        for key, sink in list(self._sinks.items()):
            try:
                sink(event)
            except Exception:
                self._sinks.pop(key, None)
                log.exception("the sink %r failed on %s and was removed; the run continues", sink, event)


def to_json(event: Event) -> dict[str, Any]:
    """Return an event as data for JSON: its facts, and the name of its class as ``"event"``."""
    return {"event": type(event).__name__, **facts.to_data(event)}


def from_json(data: dict[str, Any]) -> Event:
    """Return the event that JSON data describes.

    Raises:
        KeyError: No event has this name.
        TypeError: A fact is missing.
    """
    return facts.from_data(KINDS[data["event"]], data)
