"""Evaluates test and validation data on the workers during training; each evaluates some batches. Runs on the master.

A worker returns the counts of the metrics for each of its batches. The master adds them in the order of the batches, as
Keras does, so the result has the same bits as one evaluation of all data. So the number of workers does not matter, and
another worker takes over the batches of a lost one.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from ddlf.cluster.proxy import ProxyWorker
from ddlf.data.app_data import content_of, data_set_of, samples_of
from ddlf.events import Warned
from ddlf.events.phases import Phase
from ddlf.training.context import App
from ddlf.training.crew.crew import Crew
from ddlf.training.crew.recovery import LOSS, end_all
from ddlf.training.evaluation.metrics import MetricMerge
from ddlf.training.evaluation.model import NotCounted, fitting
from ddlf.training.slot.task import NOTHING_COUNTED, MetricCounts

NAMES = {"test": "test data", "val": "validation data"}


class WorkerEvaluation:
    """Evaluates weights on the workers of one run.

    Args:
        app: The user's ``IApp``, with data and model.
        crew: The workers.
        role: Name of the role on the workers.
    """

    def __init__(self, app: App, crew: Crew, role: tuple[str, str]) -> None:
        self._app, self._crew, self._role = app, crew, role
        self._merge = MetricMerge(app)
        self._content: dict[str, tuple[list[int], dict[str, str]]] = {}
        self._reasons: dict[str, str] = {}

    async def __call__(
        self,
        weights: dict[str, Any],
        part: str,
        batch_size: int,
        at: Sequence[int] | None = None,
        phase: Phase | None = None,
    ) -> dict[str, float] | None:
        """Evaluate weights on the workers. The result has the bits that an evaluation on the master would have.

        Args:
            weights: The weights, or a reference to weights that workers hold.
            part: ``"test"`` or ``"val"``.
            batch_size: Samples in a batch.
            at: Numbers of the workers that have the weights; None if ``weights`` contains them.
            phase: Receives the progress.

        Returns:
            The metrics; None if the master must evaluate. A warning gives the reason once.
        """
        reason = self._reasons.get(part) or self._reason_for_master(part)
        metrics: dict[str, float] = {}
        if not reason:
            batch_size = fitting(self._app, part, batch_size)
            counted = _Counted(samples_of(self._app, part), batch_size, phase)
            reason = await self._counted(counted, weights, part, at)
            if not reason and counted.left:
                return None  # all workers were lost
        if not reason:
            metrics = self._merge.of(counted.total())
            reason = "" if metrics else "the master's model cannot compute these metrics from the counts"
        if reason and part not in self._reasons:
            self._reasons[part] = reason
            self._app.run_context.emit(
                Warned(about="data", why=f"the {NAMES[part]} is evaluated on the master: {reason}")
            )
        return dict(sorted(metrics.items())) or None  # in Keras's order

    def samples(self, part: str) -> int:
        """Return the number of samples in a part of the data."""
        return samples_of(self._app, part)

    async def _counted(self, counted: _Counted, weights: dict[str, Any], part: str, at: Sequence[int] | None) -> str:
        """Have workers evaluate all batches, as long as a worker is left. Return the reason if they cannot, or ""."""
        content = await self._content_of(part)
        numbers = [worker.id for worker in self._app.cluster.workers if at is None or worker.id in at]
        left_out: dict[int, str] = {}  # worker -> why it cannot count

        async def carry(worker: ProxyWorker) -> None:
            while counted.left:
                begin, end = counted.left.popleft()
                try:
                    arguments = weights, part, counted.batch_size, begin, end, content
                    reply: MetricCounts | NotCounted | None = await worker.call(self._role, "counts", *arguments)
                except LOSS:  # the crew notices the loss, too
                    reply = NotCounted()
                if not isinstance(reply, MetricCounts):
                    counted.left.append((begin, end))
                    left_out[worker.id] = f"{worker.name} has other data there" if reply is None else reply.reason
                    return
                counted.add(begin, reply)

        def members() -> list[ProxyWorker]:
            return [member[0] for n in numbers if n not in left_out and (member := self._crew.member(n)) is not None]

        counted.cut(len(members()))
        while counted.left and (workers := members()):
            carrying = [asyncio.ensure_future(carry(worker)) for worker in workers]
            try:
                await asyncio.gather(*carrying)
            except BaseException:
                await end_all(carrying)
                raise
        return next(filter(None, left_out.values()), "") if counted.left else ""

    def _reason_for_master(self, part: str) -> str:
        """Return the reason why only the master can evaluate a part of the data; "" if workers can."""
        if self._app.precision not in ("float32", "auto"):
            return f"with precision={self._app.precision!r} the workers compute with fewer bits"
        return reason_for_master(self._app, part)

    async def _content_of(self, part: str) -> dict[str, str]:
        """Return the fingerprints of a part of the master's data.

        Workers must have data with the same ones to evaluate.
        """
        names = (*(f"{letter}_{part}" for letter in "xyw"), f"{part}_data")
        now = [id(getattr(self._app, name, None)) for name in names]
        if self._content.get(part, ([],))[0] != now:
            self._content[part] = now, await asyncio.to_thread(fingerprints, self._app, part)
        return self._content[part][1]


class _Counted:
    """The results of one evaluation so far, while workers evaluate its batches.

    Args:
        samples: Samples in the part.
        batch_size: Samples in a batch.
        phase: Receives the progress.

    Attributes:
        left: Ranges of samples that no worker has counted.
        counts: The counts of each range, by its first sample.
    """

    def __init__(self, samples: int, batch_size: int, phase: Phase | None) -> None:
        self._samples, self.batch_size, self._phase = samples, batch_size, phase
        self.left = deque([(0, samples)])
        self.counts: dict[int, MetricCounts] = {}

    def cut(self, parts: int) -> None:
        """Divide the samples into this number of ranges, each of whole batches except the last."""
        batches = -(-self._samples // self.batch_size)
        ends = [batches * (part + 1) // max(parts, 1) for part in range(max(parts, 1))]
        cuts = [min(end * self.batch_size, self._samples) for end in [0, *ends]]
        self.left = deque((begin, end) for begin, end in itertools.pairwise(cuts) if begin < end)

    def add(self, begin: int, counts: MetricCounts) -> None:
        """Store the sums and counts that a worker returned for a range of samples."""
        self.counts[begin] = counts
        if self._phase is not None:
            batches = sum(len(counts.state[0]) for counts in self.counts.values())
            self._phase.move(min(batches * self.batch_size, self._samples))

    def total(self) -> MetricCounts:
        """Return the counts of all batches, added in their order."""
        ranges = [self.counts[begin] for begin in sorted(self.counts)]
        return MetricCounts(ranges[0].names, added([counts.state for counts in ranges])) if ranges else NOTHING_COUNTED


def reason_for_master(app: App, part: str) -> str:
    """Return the reason why workers do not have the whole of a part of the data; "" if they do."""
    data_set = data_set_of(app, part)
    if data_set is not None and data_set.manifest.hosts:
        return f"each worker has some of the files of {data_set}"
    return data_set.inexact if data_set is not None else ""


def fingerprints(app: App, part: str) -> dict[str, str]:
    """Return the fingerprint of each attribute with data of a part, in arrays or files."""
    data_set = data_set_of(app, part)
    return content_of(app, part) if data_set is None else {f"{part}_data": data_set.manifest.identity}


def added(states: Sequence[Sequence[np.ndarray[Any, Any]]]) -> list[np.ndarray[Any, Any]]:
    """Return the sums and counts of all batches, added one after another in the type of each variable.

    Args:
        states: For each range, in order, an array for each variable, shape (batches, ...).
    """
    whole = [np.concatenate(arrays) for arrays in zip(*states, strict=True)]
    return [np.add.accumulate(array, axis=0, dtype=array.dtype)[-1] for array in whole]
