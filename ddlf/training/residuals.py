"""What biased codecs still owe of each slot's updates: the residuals. Runs on the master.

A residual is as large as the weights, so it stays on the worker that made it, and is fetched when it is needed elsewhere: when the slot moves to
another worker while its own one lives, when a checkpoint is due, and at the end of a run. When its worker is lost first, it is lost, too: then an
event says so, and the run is no longer the same bits as an undisturbed one.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ddlf.algorithms.codec import CODEC
from ddlf.errors import DDLFError
from ddlf.events import ResidualDropped
from ddlf.roles import replica
from ddlf.roles.exchange import Residual
from ddlf.training.crew import Crew
from ddlf.wire.messages import Request

FETCH_S = 30.0
"""How long a worker may take to give a residual. It does so beside its training, so only the network can take that long."""


class Residuals:
    """Where the residual of each slot is.

    Args:
        run: Name of the training run.
        crew: Its workers.
        name: Name of the updates' codec.
        known: Residuals to begin with, of a checkpoint or of the run before.
    """

    def __init__(
        self,
        run: str,
        crew: Crew,
        name: str,
        known: dict[int, Residual],
    ) -> None:
        self._run = run
        self._crew = crew
        self._codec = name
        self._known = dict(known)
        self._on: dict[int, tuple[int, int, int]] = {}  # slot -> worker, its number of openings, round that left it
        self._coming: dict[int, asyncio.Future[Residual | None]] = {}

    def left(self, slot: int, number: int, worker: int) -> None:
        """Say that a worker carried a round of a slot, from 0, and that its update was merged."""
        self._known.pop(slot, None)
        self._coming.pop(slot, None)
        self._on.pop(slot, None)
        if CODEC.read(self._codec).biased:
            member = self._crew.member(worker)
            # A worker that is lost already can be asked in vain: then the loss is told when it matters.
            self._on[slot] = worker, member[1] if member else -1, number

    async def of(self, slot: int, worker: int, holds: bool) -> Any:
        """What to send along with a slot's next round.

        Args:
            slot: Which.
            worker: Number of the worker that is to carry it.
            holds: Whether it still holds what the slot's round before left.

        Returns:
            ``"held"``, or the residual, or None where there is none.
        """
        if holds and slot in self._on and self._on[slot][0] == worker:
            return "held"
        return await self._fetched(slot)

    def all(self) -> asyncio.Future[dict[int, Residual]]:
        """The residual of every slot that has one, as it is now and not when it is awaited."""
        coming = {slot: self._fetched(slot) for slot in sorted({*self._known, *self._on})}
        return asyncio.ensure_future(_collected(coming))

    async def close(self) -> None:
        """End what is still under way."""
        coming = list(self._coming.values())
        for future in coming:
            future.cancel()
        await asyncio.gather(*coming, return_exceptions=True)

    def _fetched(self, slot: int) -> asyncio.Future[Residual | None]:
        """The residual of a slot; a worker is asked at once, and once."""
        if slot not in self._coming:
            loop = asyncio.get_running_loop()
            if slot in self._on:
                self._coming[slot] = loop.create_task(self._fetch(slot, *self._on[slot]))
            else:
                self._coming[slot] = loop.create_future()
                self._coming[slot].set_result(self._known.get(slot))
        return asyncio.shield(self._coming[slot])  # others may wait for it, too

    async def _fetch(self, slot: int, worker: int, openings: int, number: int) -> Residual | None:
        member = self._crew.member(worker)
        why = "it was lost"
        if member is not None and member[1] == openings:
            try:
                request = Request("run_method", replica.give_residual, self._run, slot, number)
                residual: Residual = await member[0].rpc(request, FETCH_S)
                return residual
            except DDLFError as error:
                why = str(error).partition("\n")[0]
        self._crew.emit(ResidualDropped(round=number + 1, slot=slot + 1, worker=worker, codec=self._codec, why=why))
        return None


async def _collected(coming: dict[int, asyncio.Future[Residual | None]]) -> dict[int, Residual]:
    found = {slot: await future for slot, future in coming.items()}
    return {slot: residual for slot, residual in found.items() if residual is not None}
