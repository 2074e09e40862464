"""Poisson batches: each sample enters a batch by its own coin. Runs on private workers and peers.

Pure, except for the random source of the operating system.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from ddlf.algorithms.partition import Indices
from ddlf.privacy.accountant import Cost, Noise


@dataclass(frozen=True, slots=True, kw_only=True)
class PoissonBatches:
    """The batches of a worker's epoch. Their number and their expected size do not depend on the coins.

    Args:
        samples: n, the samples of the worker.
        batch_size: b, the samples that a batch has on average. With fewer samples, each batch has all of them.
    """

    samples: int
    batch_size: int

    @property
    def expected(self) -> int:
        """Return the expected number of samples in a batch."""
        return min(self.batch_size, self.samples)

    @property
    def probability(self) -> float:
        """Return the probability of each sample to be in a batch."""
        return self.expected / self.samples

    @property
    def steps(self) -> int:
        """Return the number of batches in an epoch."""
        return -(-self.samples // self.batch_size)

    def draw(self) -> Indices:
        """Return the numbers of the samples in a new batch, by coins from the system's random source."""
        coins = np.frombuffer(os.urandom(8 * self.samples), "<u8") >> np.uint64(11)
        return np.flatnonzero(coins < self.probability * 2.0**53).astype(np.uint64)

    def cost(self, member: str, noise: float, epochs: int) -> Cost:
        """Return the cost of some epochs for the samples of a worker.

        Args:
            member: The name of the worker's slot.
            noise: Noise multiplier of each step.
            epochs: Number of epochs.
        """
        return self.cost_of_steps(member, noise, epochs * self.steps)

    def cost_of_steps(self, member: str, noise: float, steps: int) -> Cost:
        """Return the cost of some steps. ``cost`` describes the arguments."""
        return Cost(members=(member,), noise=Noise(multiplier=noise, sampled=self.probability), steps=steps)
