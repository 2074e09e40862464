"""A replica that evaluates weights which workers hold. Runs in the executor."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ddlf.training.context import App
from ddlf.training.evaluation.model import evaluate, evaluate_between_trainings
from ddlf.training.slot.replica import Replica
from ddlf.worker.calls import concurrent

if TYPE_CHECKING:
    from ddlf.worker.worker import Worker


class HoldingReplica(Replica):
    """One worker's copy of an app and its model, for runs whose weights are on the workers.

    Args:
        worker: The replica's worker.
        app: App that the master sent.
        run: Name of the run. Other workers find their replicas by it.
    """

    def __init__(self, worker: Worker, app: App, run: str) -> None:
        super().__init__(worker, app)
        self._run = run

    @concurrent
    async def evaluate(
        self, reference: dict[str, Any], part: str, batch_size: int, content: dict[str, str]
    ) -> dict[str, float] | None:
        """Evaluate weights that workers hold, between the trainings of slots.

        Args:
            reference: Names the weights, for ``_weights_of``.
            part: ``"test"`` or ``"val"``.
            batch_size: Samples in a batch.
            content: Fingerprint of the master's data, for each attribute of that part.

        Returns:
            The metrics; None if this worker's data differ, or some of the weights are missing.
        """
        weights = await self._weights_of(reference) if self._has(content) else None
        if weights is None:
            return None
        evaluation = partial(evaluate, self.app, weights, part, batch_size)
        metrics: dict[str, float] | None = await evaluate_between_trainings(self._worker, self.app, evaluation)
        return metrics
