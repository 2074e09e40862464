"""Copies of a shard on other workers, brought up to date by the worker that owns it. Runs in the executor.

A copy is replaced as a whole, by what the shard is at one moment, once for every so many pushes. That is its values and what the rule keeps of them:
with one such array for as many pushes as there are replicas, an eighth of what 8 replicas fetch and push.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ddlf.errors import AppMissing, DDLFError
from ddlf.training.downpour.owners import RETRY_S, Ask
from ddlf.training.downpour.server import Shard
from ddlf.training.exchanges.peers import Unreached

LONGEST_S = 2.0
"""Longest pause before a worker is tried again that does not take its copy: it is lost, or the shard is somebody else's by now."""


async def keep_copied(shard: Shard, number: int, ask: Ask) -> None:
    """Bring the copies of a shard up to date, as long as it is here.

    Args:
        shard: The shard.
        number: Which, from 0.
        ask: Asks other workers.
    """
    pause = RETRY_S
    while await shard.copies_due(shard.how["every"]):
        holders, facts = shard.holders, await shard.snapshot()
        sending = [ask(worker, "copy", shard.epoch, number, facts) for worker, _ in holders]
        found = await asyncio.gather(*sending, return_exceptions=True)
        errors = [one for one in found if isinstance(one, BaseException)]
        if unexpected := [one for one in errors if not isinstance(one, DDLFError | Unreached)]:
            raise unexpected[0]
        if errors:
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_S)
        else:
            await shard.were_copied(holders, facts["received"])
            pause = RETRY_S


class Copies:
    """Copies of other workers' shards that are here."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[int, dict[str, Any]]] = {}
        self._epochs: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._copies)

    def keep(self, epoch: int, shard: int, facts: dict[str, Any]) -> None:
        """Keep a copy, instead of an older one.

        Raises:
            AppMissing: The shard was given to somebody else since.
        """
        known, before = self._copies.get(shard, (0, {"received": 0}))
        if epoch < max(known, self._epochs.get(shard, 0)):
            raise AppMissing(f"shard {shard + 1} is another worker's by now")
        if (known, before["received"]) <= (epoch, facts["received"]):
            self._copies[shard] = epoch, facts

    def take(self, epoch: int, shard: int) -> dict[str, Any]:
        """A copy, to be a shard from an epoch on; its owner of before cannot replace it any more.

        Raises:
            AppMissing: There is none.
        """
        self._epochs[shard] = max(epoch, self._epochs.get(shard, 0))
        if shard not in self._copies:
            raise AppMissing(f"there is no copy of shard {shard + 1} here yet")
        return self._copies.pop(shard)[1]

    def only(self, shards: set[int], epochs: list[int]) -> None:
        """Keep copies of these shards and no others, and none of an owner of an earlier epoch: its pushes may be undone."""
        self._copies = {
            shard: copy for shard, copy in self._copies.items() if shard in shards and copy[0] >= epochs[shard]
        }
        self._epochs |= {shard: max(epoch, self._epochs.get(shard, 0)) for shard, epoch in enumerate(epochs)}
