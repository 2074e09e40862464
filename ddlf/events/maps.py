"""Maps: one function for many items, each on whichever worker is free. ``cluster.subscribe`` gets these."""

from __future__ import annotations

from typing import Literal

from ddlf.events.event import Event

HowMapped = Literal["complete", "cancelled", "failed"]
"""How a map can end."""


class MapEvent(Event):
    """Something that has happened to a map.

    Args:
        map: Number of the map, another one for each in this process.
        function: Name of the function.
    """

    map: int
    function: str


class MapBegan(MapEvent):
    """A map has begun to take items.

    Args:
        items: How many there are; None where that is not known.
        workers: How many workers may do them.
        per_worker: How many items may run at the same time on each.
    """

    items: int | None
    workers: int
    per_worker: int


class MapMoved(MapEvent):
    """Items are done. It comes a few times a second at most.

    Args:
        done: Items that have a result, so far.
        failed: Items that have an error, so far.
    """

    done: int
    failed: int


class MapEnded(MapEvent):
    """A map is over.

    Args:
        how: ``"complete"``, ``"cancelled"`` (its caller went on without the rest) or ``"failed"``.
        done: Items that have a result.
        failed: Items that have an error.
        seconds: Seconds since it began.
        compute_s: Seconds that the workers took for the items, together.
        why: The error's text if it has failed.
    """

    how: HowMapped
    done: int
    failed: int
    seconds: float
    compute_s: float
    why: str = ""
