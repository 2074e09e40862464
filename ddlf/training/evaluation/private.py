"""Evaluates weights on the validation and test data that each worker has for itself. Runs on the master.

A worker evaluates all its samples, and returns the counts of the metrics. The master adds the counts of all workers, so
they equal one evaluation of all samples. Metrics that cannot be counted are averaged by samples.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ddlf.cluster.proxy import ProxyWorker
from ddlf.data.app_data import has_data, samples_of
from ddlf.errors import ClusterTooSmall
from ddlf.events import Warned
from ddlf.events.phases import Phase
from ddlf.training.context import App
from ddlf.training.crew.crew import Crew
from ddlf.training.crew.recovery import LOSS, end_all
from ddlf.training.evaluation.metrics import Evaluation, MetricMerge
from ddlf.training.evaluation.workers import NAMES


class PrivateEvaluation:
    """Evaluates weights on the data of each worker of one run. It has the interface of ``WorkerEvaluation``.

    Args:
        app: The user's ``IApp``, whose training data is private.
        crew: The workers.
        role: Name of the role on the workers.
    """

    def __init__(self, app: App, crew: Crew, role: tuple[str, str]) -> None:
        self._app, self._crew, self._role = app, crew, role
        self._merge = MetricMerge(app)
        self._absent: dict[str, list[int]] = {}  # part -> workers that its last evaluation was without

    def samples(self, part: str) -> int:
        """Return the number of samples in a part of the data, of the master or else of all workers."""
        if has_data(self._app, part):
            return samples_of(self._app, part)
        return sum(self._app.run_context.data.evaluates(part).values())

    async def __call__(
        self, weights: dict[str, Any], part: str, batch_size: int, at: Any = None, phase: Phase | None = None
    ) -> dict[str, float] | None:
        """Evaluate weights on the workers.

        Args:
            weights: The weights.
            part: ``"test"`` or ``"val"``.
            batch_size: Samples in a batch.
            at: Not used.
            phase: Receives the progress.

        Returns:
            The metrics; None if the master has data of this part, which then evaluates.

        Raises:
            ClusterTooSmall: All workers with such data are away.
        """
        if has_data(self._app, part):
            return None
        sizes, counts = self._app.run_context.data.evaluates(part), dict[int, Evaluation]()
        numbers = sorted(set(sizes) & set(self._app.run_context.data.homes.values()))

        async def ask(worker: ProxyWorker) -> None:
            counts[worker.id] = await worker.call(self._role, "own_counts", weights, part, batch_size)
            if phase is not None:
                phase.move(sum(sizes[number] for number in counts))

        members = [member[0] for number in numbers if (member := self._crew.member(number)) is not None]
        asking = [asyncio.ensure_future(ask(worker)) for worker in members]
        try:
            outcomes = await asyncio.gather(*asking, return_exceptions=True)
        except BaseException:
            await end_all(asking)
            raise
        for error in outcomes:
            if isinstance(error, BaseException) and not isinstance(error, LOSS):
                raise error
        if not counts:
            raise ClusterTooSmall(f"the {NAMES[part]} cannot be evaluated: all workers that have it are away")
        absent, absent_before = [number for number in numbers if number not in counts], self._absent.get(part, [])
        self._absent[part] = absent
        if absent and absent != absent_before:
            absent_names = ", ".join(f"worker {number} ({sizes[number]:,} samples)" for number in absent)
            sentence = f"the {NAMES[part]} is evaluated without {absent_names}: away"
            self._app.run_context.emit(Warned(about="data", why=sentence))
        replies = [counts[number] for number in sorted(counts)]
        return self._merge([(reply.metrics, reply.samples, reply.counted) for reply in replies])
