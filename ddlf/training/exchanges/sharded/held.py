"""What one worker holds for the sharded exchange: weights by their generation, and slots' updates. Runs in the executor."""

from __future__ import annotations

import asyncio

from ddlf.algorithms.encoding import EncodedUpdate
from ddlf.errors import AppMissing
from ddlf.training.exchanges.sharded.plan import Generation

WAIT_S = 60.0
"""How long another worker is waited for that has not heard of a plan yet."""


class Held:
    """Generations and updates that are here.

    Attributes:
        generations: By number.
        updates: By generation and slot.
    """

    def __init__(self) -> None:
        self.generations: dict[int, Generation] = {}
        self.updates: dict[tuple[int, int], EncodedUpdate] = {}
        self._news = asyncio.Condition()

    def sent(self, generation: int, slot: int) -> EncodedUpdate:
        """A slot's update.

        Raises:
            AppMissing: It is not here.
        """
        found = self.updates.get((generation, slot))
        if found is None:
            raise AppMissing(f"there is no update of slot {slot + 1} here")
        return found

    def generation(self, number: int) -> Generation:
        """A generation.

        Raises:
            AppMissing: It is not here.
        """
        try:
            return self.generations[number]
        except KeyError:
            raise AppMissing("the weights of this round are not here") from None

    async def expected(self, number: int) -> Generation:
        """A generation, also one whose plan this worker has not heard of yet; but one that has nothing has come anew, and is in no plan.

        Raises:
            AppMissing: It is not to be expected here.
        """
        if not self.generations:
            raise AppMissing("the weights of this round are not here")
        try:
            async with asyncio.timeout(WAIT_S), self._news:
                await self._news.wait_for(lambda: max(self.generations, default=-1) >= number)
        except TimeoutError:
            raise AppMissing(f"it has not begun with the weights of this round in {WAIT_S:g} s") from None
        return self.generation(number)

    async def hold(self, more: dict[int, Generation]) -> None:
        """Hold these, too."""
        await self.only({**self.generations, **more})

    async def only_since(self, generation: int) -> None:
        """Forget what was before a generation."""
        await self.only({n: one for n, one in self.generations.items() if n >= generation})
        self.updates = {key: update for key, update in self.updates.items() if key[0] >= generation}

    async def only(self, generations: dict[int, Generation]) -> None:
        """Hold these generations, and no others."""
        async with self._news:
            self.generations = generations
            self._news.notify_all()
