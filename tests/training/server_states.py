"""States of Downpour servers for tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddlf.algorithms.flat_weights import Row
from ddlf.training.strategies.downpour.state import Counters, ServerSettings, ServerState


def state(weights: Row | None = None, *, received: int = 0, **settings: Any) -> ServerState:
    """Return the state of a new server.

    Args:
        weights: Its trained values; four zeros by default. It has no untrained values.
        received: Number of pushes so far.
        settings: Fields of ``ServerSettings``.
    """
    values = np.zeros(4, np.float32) if weights is None else weights
    settings = {"rule": "sgd:rate=0.5", "staleness": "inverse", **settings}
    return ServerState(
        settings=ServerSettings(part=(0, values.size), **settings),
        counters=Counters(received=received),
        weights=values,
        rest=np.zeros(0, np.float32),
    )
