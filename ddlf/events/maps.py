"""Events about maps: one function, many items, each on a free worker. ``cluster.subscribe`` receives them."""

from __future__ import annotations

from typing import Literal

from ddlf.events.event import Event

HowMapped = Literal["complete", "cancelled", "failed"]
"""The ways in which a map can end."""


class MapEvent(Event):
    """Base of all events about a map.

    Args:
        map: Number of the map, unique in this process.
        function: Name of the function.
    """

    map: int
    function: str


class MapBegan(MapEvent):
    """A map has begun to take items.

    Args:
        items: Number of items; None if unknown.
        workers: Number of workers that may compute items.
        per_worker: Number of items that may run on one worker at the same time.
    """

    items: int | None
    workers: int
    per_worker: int


class MapMoved(MapEvent):
    """Items are done. This event comes at most a few times a second.

    Args:
        done: Number of items with a result so far.
        failed: Number of items with an error so far.
    """

    done: int
    failed: int


class MapEnded(MapEvent):
    """A map is over.

    Args:
        how: ``"complete"``, ``"cancelled"`` (the caller stopped taking results) or ``"failed"``.
        done: Number of items with a result.
        failed: Number of items with an error.
        seconds: Seconds since it began.
        compute_s: Sum of the seconds that workers spent on items.
        why: The error's text if it has failed.
    """

    how: HowMapped
    done: int
    failed: int
    seconds: float
    compute_s: float
    why: str = ""
