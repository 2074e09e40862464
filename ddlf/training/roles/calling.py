"""A replica whose worker calls the other workers of its run. Runs in the executor."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ddlf.training.exchanges.peers import calls_of
from ddlf.training.roles import REPLICA
from ddlf.training.roles.evaluation import beside, evaluate
from ddlf.training.roles.restored import Restored
from ddlf.training.slot.app import App
from ddlf.training.slot.replica import Replica
from ddlf.worker.methods import concurrent

if TYPE_CHECKING:
    from ddlf.worker.worker import Worker


class CallingReplica(Replica):
    """One worker's copy of an app and its model, with its ways to the other workers.

    Args:
        worker: Worker that it is on.
        app: App as it came from the master.
        run: Name of the run, by which the other workers find their replicas.
    """

    _end: Restored

    def __init__(self, worker: Worker, app: App, run: str) -> None:
        super().__init__(worker, app)
        self._role = (run, REPLICA)
        self._ask = calls_of(worker, self._role)

    @concurrent
    async def evaluate(
        self, which: dict[str, Any], part: str, batch_size: int, content: dict[str, str]
    ) -> dict[str, float] | None:
        """Evaluate weights that workers have, before or after a slot is trained.

        Args:
            which: Says which, as ``_weights_of`` reads it.
            part: ``"test"`` or ``"val"``.
            batch_size: Samples in a batch.
            content: Fingerprint of each attribute with data of that part, as the master has it.

        Returns:
            The metrics; None if the data here is other data, or not all of the weights can be had.
        """
        weights = await self._weights_of(which) if self._has(content) else None
        if weights is None:
            return None
        evaluation = partial(evaluate, self.app, weights, part, batch_size)
        found: dict[str, float] | None = await beside(self._worker, self.app, evaluation)
        return found

    @concurrent
    async def look_at(self, place: dict[str, Any]) -> dict[str, Any]:
        """See ``Restored``."""
        return await self._end.look_at(place)

    @concurrent
    async def read_slice(self, number: int, place: dict[str, Any]) -> dict[str, Any]:
        """See ``Restored``."""
        return await self._end.read_slice(number, place)

    @concurrent
    async def take_slice(self, number: int, arrays: dict[str, Any]) -> None:
        """See ``Restored``."""
        await self._end.take_slice(number, arrays)
