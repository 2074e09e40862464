"""Reports a finished round to the user's hooks, with its evaluation and its place in the history. Runs on the master.

The hooks are the user's own code, not sinks: an error in a hook ends the run.

Records reach the hooks one after another, in the order of their merges. A thread evaluates the test data while the
workers continue to compute. Only the record waits for the evaluation.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

from ddlf.algorithms.weights import Weights
from ddlf.data.parts import has
from ddlf.errors import ConfigError
from ddlf.events import Committed, Event
from ddlf.events.record import RoundRecord, metrics
from ddlf.rpc.iworker import awaited
from ddlf.training.callbacks.master import Callbacks
from ddlf.training.context import App
from ddlf.training.evaluation.master import measured, validate
from ddlf.training.evaluation.model import evaluate
from ddlf.training.evaluation.workers import EvaluationThere
from ddlf.training.spec import RunSpec
from ddlf.training.weights_ref import WeightsRef


class Reporter:
    """Reports rounds to an app.

    Args:
        app: The user's ``IApp``.
        records: Records of the run. They contain the reported record, which gets its evaluation there.
        spec: The run.
        callbacks: The user's Keras callbacks on the master, if any.
        there: Evaluates on the workers, if they share evaluations.

    Attributes:
        is_testing: Whether a record waits for its evaluation.
        converged: Whether ``is_convergent`` or another rule has ended the training.
    """

    def __init__(
        self,
        app: App,
        records: list[RoundRecord],
        spec: RunSpec,
        callbacks: Callbacks | None = None,
        there: EvaluationThere | None = None,
    ) -> None:
        self._app, self._there = app, there
        self._records = records
        self._batch_size = spec.data.batch_size
        self._every, self._rule = spec.evaluation.every, spec.evaluation.converge
        self._can_converge = bool(self._rule.metric)
        self._validates = has(app, "val")
        self._callbacks = callbacks
        self._turn = asyncio.Lock()  # fair: first come, first served
        self._tasks: set[asyncio.Task[bool]] = set()
        self.is_testing = False
        self.converged = False

    async def report(self, weights: Weights | WeightsRef, *, validate: bool, last: bool) -> asyncio.Task[bool]:
        """Begin to report the newest record. At the end of an epoch with callbacks, wait until it is reported.

        Args:
            weights: The global weights after it.
            validate: Whether an epoch is over, so that validation data is evaluated, if there is any.
            last: Whether it is the last record of the run, whose weights are always evaluated.

        Returns:
            A task that ends when the hooks have returned. Its result says whether training must end.
        """
        place = len(self._records) - 1
        tested, validated = self.due(validate=validate, last=last)
        self.is_testing = self.is_testing or tested or validated
        callbacks = self._callbacks if validate else None
        task = asyncio.get_running_loop().create_task(self._report(place, weights, validated, tested, callbacks))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if callbacks is not None:
            await asyncio.wait([task])  # callbacks may change the next tasks and the checkpoint
        return task

    def due(self, *, validate: bool, last: bool) -> tuple[bool, bool]:
        """Return whether to evaluate test data and validation data for the newest record. Arguments: see ``report``."""
        tested = bool(self._every) and (last or self._records[-1].version % self._every == 0)
        return tested, validate and self._validates

    @property
    def shows(self) -> bool:
        """Whether a callback reads the weights after each epoch."""
        return self._callbacks is not None and self._callbacks.need_weights

    async def close(self) -> None:
        """Cancel the reports that are still running, because the run has failed."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _report(
        self, place: int, weights: Weights | WeightsRef, validated: bool, tested: bool, callbacks: Callbacks | None
    ) -> bool:
        app = self._app
        async with self._turn:
            record = self._records[place]
            if validated or tested or callbacks is not None:
                app.run_context.weights = None  # the model must keep its weights during the evaluation
                if callbacks is not None:
                    await callbacks.show()
                if validated:
                    told = None if callbacks is None else callbacks.for_tests()
                    more = await measured(validate, app, weights, self._batch_size, told, there=self._there)
                    self._records[place] = record = dataclasses.replace(record, metrics=record.metrics | more)
                if callbacks is not None:
                    self._records[place] = record = await callbacks.end_epoch()
                    weights = callbacks.weights
                if tested:
                    record = dataclasses.replace(record, test=await measured(evaluate, app, weights, there=self._there))
                self._records[place] = record
                self.is_testing = False
            app.run_context.weights = weights
            app.history.append(record)
            app.run_context.emit(Committed(record=record))
            await awaited(app.on_round(record))
            self.converged = (
                self.converged
                or bool(await awaited(app.is_convergent(record)))
                or (self._can_converge and self._is_reached(record))
            )
            self.converged = self.converged or (callbacks is not None and callbacks.stopped)
            is_over = self.converged or bool(app.run_context.stop)
            if callbacks is not None and not is_over:
                await callbacks.begin_epoch()
            return is_over

    def _is_reached(self, record: RoundRecord) -> bool:
        """Return whether the setting ``converge`` ends the training, given the history up to this record."""
        rule = self._rule
        kind = next((prefix for prefix in ("val_", "test_") if rule.metric.startswith(prefix)), "")
        now = metrics(record)
        if kind and not any(name.startswith(kind) for name in now):
            return False  # this round has no such evaluation
        if rule.metric not in now:
            raise ConfigError(
                f"converge={str(rule)!r} looks at {rule.metric!r}, which is not a metric of this run",
                hint=f"name one of {', '.join(now) or 'the metrics that train returns'}",
            )
        found = (metrics(before).get(rule.metric) for before in reversed(self._app.history))
        return bool(rule.reached(list(itertools.islice((one for one in found if one is not None), rule.last))))


@contextlib.asynccontextmanager
async def hooked(app: App, end: Callable[[Exception], None]) -> AsyncIterator[None]:
    """Pass events to the app's ``on_event``, which may be async, while this context is open.

    Args:
        app: The user's ``IApp``.
        end: Ends the run with an error of the hook. The error does not reach the code that emitted the event.
    """
    running: set[asyncio.Future[Any]] = set()

    def over(task: asyncio.Future[Any]) -> None:
        running.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            end(error)

    def hook(event: Event) -> None:
        try:
            outcome = app.run_context.hook(event)
        except Exception as error:
            end(error)
            return
        if inspect.isawaitable(outcome):
            running.add(task := asyncio.ensure_future(outcome))
            task.add_done_callback(over)

    take_off = app.subscribe(hook)
    try:
        yield
    except BaseException:
        for task in running:
            task.cancel()
        raise
    finally:
        take_off()
        await asyncio.gather(*running, return_exceptions=True)
