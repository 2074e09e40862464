"""What of the shards of Downpour is in a run's state, beside the weights. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ddlf.algorithms.flat_weights import Row
from ddlf.algorithms.weights import Weights
from ddlf.errors import ConfigError

STATE, META = "push", "shards"
"""Groups of the run's state: what rules keep, as rows; and of each shard what else it is."""


def facts_of_meta(meta: Weights, shard: int) -> dict[str, Any]:
    """What a shard begins with of what is no row."""
    numbers, factors, last = meta
    return {
        **dict(zip(("version", "received", "count"), map(int, numbers[shard]), strict=True)),
        "factors": float(factors[shard]),
        "last": [list(map(int, row[1:])) for row in last if row[0] == shard],
    }


def meta_of(found: Sequence[dict[str, Any]]) -> Weights:
    """Of each shard what is no row, as arrays."""
    last = [[shard, *row] for shard, one in enumerate(found) for row in one["last"]]
    return [
        np.array([[one["version"], one["received"], one["count"]] for one in found], np.int64),
        np.array([one["factors"] for one in found], np.float64),
        np.array(last, np.int64).reshape(-1, 7),
    ]


def joined(parts: Sequence[Row], size: int) -> Row:
    """A row of its slices.

    Raises:
        ConfigError: They are of another length or type.
    """
    row = np.concatenate(parts)
    if row.shape != (size,) or row.dtype != np.float32:
        raise ConfigError(f"the shards' {row.dtype} {row.shape} should be {size} float32 values")
    return row


def last_life(meta: Weights | None) -> int:
    """The last life of any replica, in a run that goes on."""
    return 0 if meta is None or not meta[2].size else int(meta[2][:, 2].max())
