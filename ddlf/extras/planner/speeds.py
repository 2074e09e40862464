"""The speeds of workers, and how long a round takes if they differ. Pure functions.

A worker j takes r_j times as long for a sample as the fastest one. With equal parts, a round waits for the slowest of its N
workers: its steps take max(r_j) times as long as on N fast workers. With parts by speed (``balance="speed"``), all workers
end together, after N / sum(1 / r_j) times as long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

UNLIKE = 1.5
"""Workers count as equally fast if the slowest one takes less than so many times as long as the fastest one."""


def slowness_of(paces: Mapping[int, float]) -> dict[int, float]:
    """Return how many times as long as the fastest worker each worker takes; empty if all are about equally fast.

    Args:
        paces: Seconds of a sample, by the number of the worker.
    """
    fastest = min(paces.values(), default=0.0)
    if fastest <= 0.0 or max(paces.values()) < UNLIKE * fastest:
        return {}
    return {number: seconds / fastest for number, seconds in sorted(paces.items())}


def pace(slowness: Sequence[float], *, balanced: bool) -> float:
    """Return how many times as long as on the fastest worker the steps of a round take.

    Args:
        slowness: How many times as long as the fastest worker each worker of the round takes.
        balanced: Whether parts follow the speeds.
    """
    return len(slowness) / sum(1.0 / one for one in slowness) if balanced else max(slowness)
