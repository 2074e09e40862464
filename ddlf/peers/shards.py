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

PIECE_BYTES = 2**20
"""Most bytes of a shard in one answer, so that memory does not depend on the size of a shard, and slow lines have time."""


class Shards:
    """The training data of a server, divided once for the whole run.

    Args:
        data: The data, as the model takes them: ``x_train`` and ``y_train``. The shards are copies of them.
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
        check_count(count, len(next(iter(x.values())) if isinstance(x, dict) else x))
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
            divided: list[np.ndarray[Any, Any]] = [np.sort(positions) for positions in rows]
        else:
            divided = [np.flatnonzero(owners == slot) for slot in range(count)]
        self.sizes = tuple(len(rows) for rows in divided)
        digest = hashlib.sha256()
        for array in (x, y, *(rows.astype("<i8") for rows in divided)):
            digest.update(f"{array.dtype.str} {array.shape} ".encode())
            digest.update(np.ascontiguousarray(array).view(np.uint8).data)
        self.digest = digest.hexdigest()
        self._files = [_npz(x_train=x[rows], y_train=y[rows]) for rows in divided]

    def content(self, shard: int) -> bytes:
        """Return a shard as an ``.npz`` file with ``x_train`` and ``y_train``. Shards are numbered from 1."""
        return self._files[shard - 1]

    def piece(self, shard: int, begin: int) -> tuple[bytes, int]:
        """Return the bytes of the file from ``begin`` on, at most ``PIECE_BYTES``, and the length of the file."""
        content = self.content(shard)
        return content[begin : begin + PIECE_BYTES], len(content)


def check_count(shards: int, samples: int) -> None:
    """Refuse more shards than samples.

    Raises:
        ConfigError: Names both numbers.
    """
    if shards > samples:
        raise ConfigError(
            f"{samples:,} training samples cannot be divided into {shards:,} shards", hint=f"--shards {samples} at most"
        )


def _npz(**arrays: np.ndarray[Any, Any]) -> bytes:
    np.savez(target := BytesIO(), **arrays)  # type: ignore[arg-type]
    return target.getvalue()
