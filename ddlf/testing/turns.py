"""The order in which made-up updates arrive. Runs on the master."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ddlf.errors import ConfigError


class Turns:
    """Who may have its update arrive: the first of the order, when all others wait, may not go on yet, or compute nothing more."""

    def __init__(self, order: Sequence[int], bound: int | None, measured: int = 0) -> None:
        self._left = list(order)
        self._bound = len(order) if bound is None else bound
        self._measured = measured
        self._done = dict.fromkeys(order, 0)
        self._waiting: dict[int, asyncio.Event] = {}
        for slot in order:
            if slot not in self._going():
                paced = f" and {measured} rounds of all that are measured first" if measured else ""
                raise ConfigError(
                    f"with max_staleness={bound}{paced} slot {slot} cannot be so far ahead as arrivals say"
                )
            self._done[slot] += 1
        self._done = dict.fromkeys(order, 0)

    async def arrive(self, slot: int) -> None:
        """Wait until it is a slot's turn."""
        waiting = self._waiting[slot] = asyncio.Event()
        self._next()
        await waiting.wait()
        del self._left[0], self._waiting[slot]
        self._done[slot] += 1
        self._next()

    def _next(self) -> None:
        if self._left and self._waiting.keys() == set(self._left) & self._going():
            self._waiting[self._left[0]].set()

    def _going(self) -> set[int]:
        """Slots that are not too far ahead. None goes on behind the rounds that are measured before all have done them."""
        least = min(self._done.values())
        most = least + self._bound
        if least < self._measured:
            most = min(most, self._measured - 1)
        return {slot for slot, done in self._done.items() if done <= most}
