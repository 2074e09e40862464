"""How often each sample has been trained on, of what counts. Kept on the master; ``IApp.ledger`` shows it.

A worker says which samples it trained on (their digest comes with its update), and only a slot whose update was merged is counted. So the ledger
shows that a run trained on every sample exactly once in each local epoch, though workers came and went. What ``replica.fit`` was given otherwise,
by an own ``train`` that sets ``self.indices`` or ends early, is counted as it was. What a ``train`` feeds by itself nobody sees: its partition is
counted as trained on.
"""

from __future__ import annotations

from typing import Any

import numpy as np


class Ledger:
    """The counts of one run.

    Args:
        samples: n.

    Attributes:
        counts: Local epochs in which each sample was trained on, of merged updates; int32, shape (n,).
    """

    def __init__(self, samples: int) -> None:
        self.counts = np.zeros(samples, np.int32)

    def add(self, indices: np.ndarray[Any, Any], epochs: int, fed: np.ndarray[Any, Any] | None = None) -> None:
        """Count what one slot was trained on, whose update was merged.

        Args:
            indices: Indices of its samples, shape (n_j,).
            epochs: Local ones.
            fed: What it was given instead, once for each epoch, shape (m,); None if it was that.
        """
        if fed is not None:
            indices, epochs = fed, 1
        counts = self.counts.copy()  # the old array may be on its way into a checkpoint
        np.add.at(counts, indices, np.int32(epochs))
        self.counts = counts

    def is_exact(self, epochs: int) -> bool:
        """Whether each sample was trained on exactly once in each of so many local epochs."""
        return bool((self.counts == epochs).all())
