"""Shards: parts of the server's own training data, one for each peer, for studies. Runs on the server.

In this mode the data are the server's and travel to the peers. A shard is leased together with the peer: the ledger
says who has it (``WeightLedger.shard_for``), and gives it to another peer after the first one has gone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import numpy as np

from ddlf.algorithms.partition import equal_sizes, partition, shuffled
from ddlf.algorithms.partitioners import PARTITION, labels_of
from ddlf.errors import ConfigError


class Shards:
    """The training data of a server, divided once for the whole run.

    Args:
        data: The data, as the model takes them: ``x_train`` and ``y_train``.
        count: Number of shards.
        rule: The partition rule, such as ``dirichlet:0.5``. The rule ``equal`` draws equal parts at random.
        seed: Seed of the division.

    Attributes:
        sizes: Samples of each shard.
        digest: SHA-256 of the data and of their division, which a resumed run must have again.

    Raises:
        ConfigError: There are fewer samples than shards, or the rule needs other labels.
    """

    def __init__(self, data: Mapping[str, Any], count: int, rule: str, seed: int) -> None:
        x, y = data["x_train"], data["y_train"]
        if not isinstance(x, np.ndarray) or not isinstance(y, np.ndarray):
            raise ConfigError(
                "shards need a model with one input and one output",
                hint="let the peers bring their own data: leave out --shards",
            )
        chosen = PARTITION.read(rule)
        labels = labels_of(y) if chosen.goes_by_labels else np.empty(0, np.int64)
        owners = chosen.owners(len(x), count, seed, labels)
        if owners is None:
            rows = partition(shuffled(len(x), seed, 0), equal_sizes(len(x), count))
            self._rows: list[np.ndarray[Any, Any]] = [np.sort(one) for one in rows]
        else:
            self._rows = [np.flatnonzero(owners == slot) for slot in range(count)]
        self._x, self._y = x, y
        self.sizes = tuple(len(rows) for rows in self._rows)
        found = hashlib.sha256()
        for array in (x, y, *(rows.astype("<i8") for rows in self._rows)):
            found.update(f"{array.dtype.str} {array.shape} ".encode())
            found.update(np.ascontiguousarray(array).view(np.uint8).data)
        self.digest = found.hexdigest()

    def content(self, shard: int) -> bytes:
        """Return a shard as an ``.npz`` file with ``x_train`` and ``y_train``. Shards are numbered from 1."""
        rows = self._rows[shard - 1]
        np.savez(target := BytesIO(), x_train=self._x[rows], y_train=self._y[rows])
        return target.getvalue()
