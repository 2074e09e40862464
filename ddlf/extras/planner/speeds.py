"""The speeds of workers, and how long a round takes if they differ. Pure functions.

A worker j takes r_j times as long for a sample as the fastest one. With equal parts, a round waits for the slowest of its N
workers: its steps take max(r_j) times as long as on N fast workers. With parts by speed (``balance="speed"``), all workers
end together, after N / sum(1 / r_j) times as long. But a part has at least one batch, and its last batch is not full and
still costs a step.
"""

from __future__ import annotations

import math
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


def slowest(slowness: Sequence[float], steps: float, *, balanced: bool) -> tuple[float, float]:
    """Return the steps of the worker that ends last, and its samples in full batches, as if it were the fastest worker.

    For example, 6 steps that take 3 times as long as on the fastest worker are 18 steps.

    Args:
        slowness: How many times as long as the fastest worker each worker of the round takes.
        steps: K, the steps of each worker; on average if parts follow the speeds.
        balanced: Whether they do.
    """
    if not balanced:
        return max(slowness) * steps, max(slowness) * steps
    fastest_steps = steps * len(slowness) / sum(1.0 / worker_slowness for worker_slowness in slowness)
    parts = [max(fastest_steps / worker_slowness, 1.0) for worker_slowness in slowness]
    batches = max(
        worker_slowness * (math.floor(part + 1e-9) + 1) for worker_slowness, part in zip(slowness, parts, strict=True)
    )
    return batches, max(worker_slowness * part for worker_slowness, part in zip(slowness, parts, strict=True))
