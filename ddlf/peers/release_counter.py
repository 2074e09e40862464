"""Counts releases on the server before they leave: one at a time, on a thread, and as soon as the disk takes the count.

A release that is not counted must not leave. So the caller of ``count`` sends the release after its return only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from ddlf.errors import CheckpointError
from ddlf.peers import clock
from ddlf.peers.journal_writer import until_written
from ddlf.peers.ledger import WeightLedger
from ddlf.peers.said_lately import Rarely
from ddlf.peers.spending import Spending


class ReleaseCounter:
    """Counts the releases of a training by peers.

    Args:
        spending: The account.
        ledger: The ledger, which knows whether the training has ended.
        say: Prints a line.
        refused: Gets an error of the disk.

    Attributes:
        spending: The account.
    """

    def __init__(
        self,
        spending: Spending,
        ledger: WeightLedger,
        say: Callable[[str], None],
        refused: Callable[[CheckpointError], None],
    ) -> None:
        self.spending = spending
        self._ledger, self._say, self._refused = ledger, say, refused
        self._counting = asyncio.Lock()
        self._shown = Rarely(clock.now())

    async def count(self, *peers: int) -> str:
        """Count a release of some peers before it leaves. Return why they cannot be in another one; empty if they can.

        Raises:
            BudgetSpent: It would exceed the budget, so it must not leave.
            CheckpointError: The disk refuses the end of the training.
        """
        reason = await until_written(partial(self._count, *peers), self._ledger, self._refused)
        if self._shown.is_due(clock.now()):
            self._say(f"privacy   {self.spending.line()}")
        return reason

    async def _count(self, *peers: int) -> str:
        async with self._counting:
            return await asyncio.to_thread(self.spending.count, *peers)
