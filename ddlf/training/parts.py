"""Which samples each slot trains on in a round. Runs on the master."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ddlf.algorithms.partition import Indices, equal_sizes, shuffled, sizes_by_speed

ORDERS = 4
"""So many rounds' orders of the samples are kept; each takes 1 to 8 bytes a sample."""
IN_A_THREAD = 100_000
"""So many samples take a millisecond to shuffle. More are shuffled while connections are served."""


class Parts:
    """The samples of one run.

    Args:
        samples: n.
        seed: Seed of the orders.
    """

    def __init__(self, samples: int, seed: int) -> None:
        self._samples = samples
        self._seed = seed
        self._orders: dict[int, asyncio.Future[Indices]] = {}

    async def order(self, number: int) -> Indices:
        """The samples in the order of a round, from 0. The last few are kept: slots of asynchronous training come for the same one."""
        if number not in self._orders:
            for old in list(self._orders)[: 1 - ORDERS]:
                del self._orders[old]
            self._orders[number] = asyncio.ensure_future(self._shuffled(number))
        return await asyncio.shield(self._orders[number])

    def sizes(self, slots: int, speeds: Sequence[float | None] = (), batch_size: int = 1) -> list[int]:
        """Samples of each slot: equal, or such that slots of these speeds end together.

        Args:
            slots: K.
            speeds: Samples a second of each slot; with one that is unknown, parts are equal.
            batch_size: No part is smaller, if that can be.
        """
        measured = [speed for speed in speeds if speed is not None]
        if len(measured) < slots:
            return equal_sizes(self._samples, slots)
        return sizes_by_speed(self._samples, measured, minimum=min(batch_size, self._samples // slots))

    async def _shuffled(self, number: int) -> Indices:
        if self._samples < IN_A_THREAD:
            return shuffled(self._samples, self._seed, number)
        return await asyncio.to_thread(shuffled, self._samples, self._seed, number)
