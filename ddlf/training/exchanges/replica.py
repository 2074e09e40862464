"""A replica whose worker holds weights of the run, or gets them from other workers. Runs in the executor."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ddlf.training.context import App
from ddlf.training.roles.evaluation import beside, evaluate
from ddlf.training.slot.replica import Replica
from ddlf.worker.methods import concurrent

if TYPE_CHECKING:
    from ddlf.worker.worker import Worker


class HoldingReplica(Replica):
    """One worker's copy of an app and its model, where workers hold the weights: it can evaluate them.

    Args:
        worker: Worker that it is on.
        app: App as it came from the master.
        run: Name of the run, by which the other workers find their replicas.
    """

    def __init__(self, worker: Worker, app: App, run: str) -> None:
        super().__init__(worker, app)
        self._run = run

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
