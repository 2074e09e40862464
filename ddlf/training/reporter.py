"""Reports the rounds of a run: records, validation, hooks of the app, and whether it has converged. Runs on the master."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

from ddlf.algorithms.weights import Weights
from ddlf.errors import ConfigError
from ddlf.events import (
    Committed,
    Event,
)
from ddlf.events.record import RoundRecord, metrics
from ddlf.rpc.iworker import awaited
from ddlf.training.callbacks.master import Callbacks
from ddlf.training.context import App
from ddlf.training.evaluation.master import compute, measured, validate
from ddlf.training.evaluation.model import evaluate, evaluate_on
from ddlf.training.evaluation.workers import WorkerEvaluation
from ddlf.training.progress import Progress, WeightsRef
from ddlf.training.spec import RunSpec


class Reporter:
    """Reports finished rounds to the user's hooks, with their evaluations and their places in the history.

    The hooks are the user's own code, not sinks: an error in a hook ends the run. Records reach the hooks one after
    another, in the order of their merges. A thread evaluates the test data while the workers continue to compute. Only
    the record waits for the evaluation.

    Args:
        app: The user's ``IApp``.
        records: Records of the run. They contain the reported record, which gets its evaluation there.
        spec: All settings of the run.
        callbacks: The user's Keras callbacks on the master, if any.
        worker_evaluation: Evaluates on the workers, if they share evaluations.

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
        worker_evaluation: WorkerEvaluation | None = None,
    ) -> None:
        self._app, self._worker_evaluation = app, worker_evaluation
        self._records = records
        self._batch_size = spec.data.batch_size
        self._every, self._rule = spec.evaluation.every, spec.evaluation.converge
        self._can_converge = bool(self._rule.metric)
        self._validates = app.run_context.data.has_data(app, "val")
        self._workers_test = app.run_context.data.is_elsewhere(app, "test")
        self._callbacks = callbacks
        self._turn = asyncio.Lock()  # a fair lock: the first caller gets it first
        self._tasks: set[asyncio.Task[bool]] = set()
        self.is_testing = False
        self.converged = False

    async def report(self, weights: Weights | WeightsRef, *, validate: bool, last: bool) -> asyncio.Task[bool]:
        """Begin to report the newest record to the user's hooks.

        At the end of an epoch with callbacks, wait until it is reported.

        Args:
            weights: The global weights after the record's round.
            validate: Whether an epoch is over, so that validation data is evaluated, if there is any.
            last: Whether it is the last record of the run, whose weights are always evaluated.

        Returns:
            A task that ends when the hooks have returned. Its result says whether training must end.
        """
        index = len(self._records) - 1
        tested, validated = self.due(validate=validate, last=last)
        self.is_testing = self.is_testing or tested or validated
        callbacks = self._callbacks if validate else None
        task = asyncio.get_running_loop().create_task(self._report(index, weights, validated, tested, callbacks))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if callbacks is not None:
            await asyncio.wait([task])  # callbacks may change the next tasks and the checkpoint
        return task

    def due(self, *, validate: bool, last: bool) -> tuple[bool, bool]:
        """Return whether to evaluate test data, and whether to evaluate validation data, for the newest record.

        The arguments are the same as for ``report``.
        """
        every = self._every and self._records[-1].version % self._every == 0
        # Only workers have the test data of a private run, and only until its end.
        tested = bool(every) or (last and (bool(self._every) or self._workers_test))
        return tested, validate and self._validates

    async def tested(self, weights: Weights, x: Any, y: Any) -> dict[str, float]:
        """Evaluate weights on some samples, between two reports. The model has its earlier weights afterwards."""
        async with self._turn:
            context, model = self._app.run_context, vars(self._app)["model"]
            weights_before = context.weights if context.weights is not None else model.get_weights()
            context.weights = None
            try:
                values: dict[str, float] = await compute(evaluate_on, model, weights, x, y)
            finally:
                context.weights = weights_before
            return values

    @property
    def shows(self) -> bool:
        """Whether a callback reads the weights after each epoch, so that the master must have them."""
        return self._callbacks is not None and self._callbacks.need_weights

    async def go_back(self, then: Progress) -> None:
        """Continue after an earlier state of the run, whose progress has its records and the states of callbacks."""
        self.is_testing = self.converged = False
        del self._app.history[len(then.records) :]
        if self._callbacks is not None:
            await self._callbacks.go_back()

    async def close(self) -> None:
        """Cancel the reports that are still running, because the run has failed or goes back."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _report(
        self, index: int, weights: Weights | WeightsRef, validated: bool, tested: bool, callbacks: Callbacks | None
    ) -> bool:
        app = self._app
        async with self._turn:
            record = self._records[index]
            if validated or tested or callbacks is not None:
                app.run_context.weights = None  # the model must keep its weights during the evaluation
                if callbacks is not None:
                    await callbacks.show()
                if validated:
                    test_callbacks = None if callbacks is None else callbacks.for_tests()
                    more = await measured(
                        validate,
                        app,
                        weights,
                        self._batch_size,
                        test_callbacks,
                        worker_evaluation=self._worker_evaluation,
                    )
                    self._records[index] = record = dataclasses.replace(record, metrics=record.metrics | more)
                if callbacks is not None:
                    self._records[index] = record = await callbacks.end_epoch()
                    weights = callbacks.weights
                if tested:
                    record = dataclasses.replace(
                        record, test=await measured(evaluate, app, weights, worker_evaluation=self._worker_evaluation)
                    )
                self._records[index] = record
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
        history_values = (metrics(before).get(rule.metric) for before in reversed(self._app.history))
        return bool(
            rule.reached(list(itertools.islice((value for value in history_values if value is not None), rule.last)))
        )


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
