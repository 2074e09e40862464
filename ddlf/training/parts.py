"""Which samples each slot trains on in a round. Runs on the master; ``Progress.span`` says what part of an epoch the round is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ddlf.algorithms.partition import Indices, equal_sizes, partition, shuffled, sizes_by_speed
from ddlf.training.progress import Span

ORDERS = 4
"""So many orders of the samples are kept; each takes 1 to 8 bytes a sample."""
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
        """All samples in the order of a round or an epoch, from 0. The last few are kept: several rounds, or slots of one, come for the same."""
        if number not in self._orders:
            for old in list(self._orders)[: 1 - ORDERS]:
                del self._orders[old]
            self._orders[number] = asyncio.ensure_future(self._shuffled(number))
        return await asyncio.shield(self._orders[number])

    async def of(
        self, span: Span, slots: int, speeds: Sequence[float | None] = (), batch_size: int = 1
    ) -> list[Indices]:
        """The samples of each slot in a round: disjoint, and together all of it. Of fewer samples than slots the first slots have one each.

        Args:
            span: The samples of the round.
            slots: K.
            speeds: Samples a second of each slot, to have all end together; with one that is unknown, parts are equal.
            batch_size: No part that follows speeds is smaller, if that can be.
        """
        order = (await self.order(span.order))[span.begin : span.end]
        samples = len(order)
        if samples < self._samples:  # fewer samples than slots are refused where they are all there is
            slots = min(slots, samples)
        measured = [speed for speed in speeds[:slots] if speed is not None]
        if len(measured) < slots:
            return partition(order, equal_sizes(samples, slots))
        return partition(order, sizes_by_speed(samples, measured, minimum=min(batch_size, samples // slots)))

    async def _shuffled(self, number: int) -> Indices:
        if self._samples < IN_A_THREAD:
            return shuffled(self._samples, self._seed, number)
        return await asyncio.to_thread(shuffled, self._samples, self._seed, number)
