"""Evaluates the app's model on its test or validation data. Runs on the master, or on workers with the weights."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ddlf.algorithms.reading_order import Portion
from ddlf.data.app_data import batches, data_set_of, samples_of
from ddlf.data.stream import LEAST_BATCHES
from ddlf.errors import ConfigError
from ddlf.rpc.iworker import drop_error
from ddlf.training.context import App
from ddlf.training.evaluation.metrics import scalars
from ddlf.training.slot.card_errors import explained
from ddlf.training.slot.distribution import without_distribution
from ddlf.training.slot.feed import Feed, FileFeed, gathered, make_feed, memory_of
from ddlf.training.slot.metric_variables import make_metric_variables
from ddlf.training.slot.task import MetricCounts
from ddlf.training.slot.variables import set_weights

if TYPE_CHECKING:
    from ddlf.worker.worker import Worker

EVALUATION_BATCH = 512
MOST_COUNTED = 2**26
"""Maximum size of the metrics' counts for all batches that one worker evaluates. Larger ones take too long to send."""
MOVED_EVERY_S = 0.5
"""Seconds between two reports of an evaluation's progress."""

Moved = Callable[[int], object]
"""Receives the number of evaluated samples."""


def evaluate(
    app: App,
    weights: list[Any] | None,
    part: str = "test",
    batch_size: int = EVALUATION_BATCH,
    *,
    moved: Moved | None = None,
    callbacks: Any = None,
) -> dict[str, float]:
    """Evaluate the app's model on its test data, with the given weights or its current ones. Return its metrics.

    Args:
        app: The user's ``IApp``.
        weights: One array for each of ``model.weights``, or None for the current weights.
        part: ``"test"`` or ``"val"``.
        batch_size: Samples in a batch.
        moved: Called a few times a second, on any thread.
        callbacks: Keras's ``CallbackList`` of ``fit``, which is called instead of ``moved`` if given.
    """
    if weights is not None:
        set_weights(app.model, weights)
    batch_size = fitting(app, part, batch_size)
    telling = [] if moved is None else [_telling(moved, batch_size)]
    with explained(app, lambda: batch_size, evaluates=True), reading(app, _feed(app, part, batch_size)) as dataset:
        return scalars(app.model.evaluate(dataset, verbose=0, return_dict=True, callbacks=callbacks or telling))


def evaluate_on(model: Any, weights: list[Any], x: Any, y: Any) -> dict[str, float]:
    """Evaluate a model with these weights on arrays, and return its metrics."""
    set_weights(model, weights)
    return scalars(model.evaluate(x, y, verbose=0, return_dict=True))


@dataclass(frozen=True, slots=True)
class NotCounted:
    """The answer of a worker that cannot count the metrics of an evaluation by batch.

    Args:
        reason: Why it cannot; empty if it only lacks the weights, or is lost.
    """

    reason: str = ""


def counts(app: App, weights: list[Any], part: str, batch_size: int, begin: int, end: int) -> MetricCounts | NotCounted:
    """Return the amounts that each batch of a range of samples adds to the variables of the metrics.

    Keras counts in the variables of its metrics, and its own metrics add to them in each batch. So from the additions
    of all batches, in the order of the batches, the master computes the exact bits of one evaluation of all batches.

    Args:
        app, weights, part, batch_size: Arguments of ``evaluate``.
        begin: Number of the first sample, from 0; a multiple of ``batch_size``.
        end: Number of the last sample + 1.

    Returns:
        The counts, whose arrays have the shape (batches, ...).
    """
    import keras

    model, counted, reasons = app.model, list[list[np.ndarray[Any, Any]]](), list[str]()
    names: list[str] = []
    most = MOST_COUNTED // -(-(end - begin) // batch_size)

    class Counting(keras.callbacks.Callback):  # type: ignore[misc]
        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            model = self.model  # with JAX, this reads the metrics' counts into the model
            if not counted:
                results = model.get_metrics_result()
                names.extend(scalars(results))
                reasons.extend(_not_added(model, set(results) ^ set(logs or {}), most))
            variables = [variable for metric in model.metrics for variable in metric.variables]
            counted.append([keras.ops.convert_to_numpy(variable) for variable in variables])
            model.reset_metrics()
            model.stop_evaluating = model.stop_evaluating or bool(reasons)

    model.set_weights(weights)
    try:
        feed = _feed(app, part, batch_size, begin, end)
    except ConfigError as error:  # this machine has less memory than the machine that chose the batches
        return NotCounted(error.message)
    with explained(app, lambda: batch_size, evaluates=True), _single_batches(app), reading(app, feed) as dataset:
        model.evaluate(dataset, verbose=0, callbacks=[Counting()])
    if reasons:
        return NotCounted(reasons[0])
    return MetricCounts(names, [np.stack(arrays) for arrays in zip(*counted, strict=True)])


def batches_of(app: App, part: str, batch_size: int) -> Iterator[tuple[Any, ...]]:
    """Return all batches of an evaluation, as ``fit`` takes them, one after another. Files are read ahead.

    Raises:
        ConfigError: This machine has too little memory for batches of this size.
    """
    if data_set_of(app, part) is not None:
        feed = _feed(app, part, batch_size)
        assert isinstance(feed, FileFeed)
        return feed.read()
    data, samples = batches(app, part), samples_of(app, part)
    begins = range(0, samples, batch_size)
    return (gathered(data, np.arange(begin, min(begin + batch_size, samples))) for begin in begins)


async def evaluate_between_trainings(worker: Worker, app: App, work: Callable[[], Any]) -> Any:
    """Evaluate on a worker's thread for Keras, between trainings. If cancelled, it ends after the current batch."""
    cancelled: list[bool] = []
    evaluating = asyncio.ensure_future(worker.compute(lambda: None if cancelled else work()))
    try:
        return await asyncio.shield(evaluating)
    except asyncio.CancelledError:
        cancelled.append(True)
        evaluating.add_done_callback(drop_error)
        while not evaluating.done():
            app.model.stop_evaluating = True
            end_reading(app)
            await asyncio.wait([evaluating], timeout=0.05)
        raise


def _not_added(model: Any, other: set[str], most: int) -> list[str]:
    """Return the reason why batch-wise results cannot be added to the metrics, as a list of one sentence, or empty."""
    metrics = [part for metric in model.metrics for part in getattr(metric, "metrics", None) or [metric]]
    users_own = [part for part in metrics if type(part).update_state.__module__.partition(".")[0] != "keras"]
    nbytes = sum(int(np.prod(variable.shape)) * 4 for metric in metrics for variable in metric.variables)
    if users_own:
        return [f"{type(users_own[0]).__name__} is a metric with its own update_state, whose counts may not add up"]
    if other:
        return [f"{sorted(other)[0]!r} is not a metric of the model, but a result of its test_step"]
    if nbytes > most:
        return [f"the counts of the metrics in each batch, {nbytes:,} bytes, are too large to send"]
    return []


@contextlib.contextmanager
def _single_batches(app: App) -> Iterator[None]:
    """Make each call of the compiled test step evaluate one batch only, in this context.

    The compiled step is kept for the next such evaluation. Afterwards the model has its former test step again.
    """
    model = app.model
    before = model.steps_per_execution, model.test_function
    model.steps_per_execution, model.test_function = 1, app.run_context.test_function
    try:
        yield
    finally:
        app.run_context.test_function = model.test_function
        model.steps_per_execution, model.test_function = before


@contextlib.contextmanager
def reading(app: App, feed: Feed | FileFeed) -> Iterator[Any]:
    """Yield the data set that Keras evaluates. Afterwards raise an error if samples could not be read."""
    if app.model.test_function is None and not app.model.run_eagerly and hasattr(feed.dataset, "element_spec"):
        make_metric_variables(app.model, feed.dataset.element_spec)  # of TensorFlow
    try:
        with without_distribution():
            yield feed.dataset
    except Exception:
        if isinstance(feed, FileFeed) and feed.error is not None:
            raise feed.error.with_traceback(None) from None
        raise
    finally:
        end_reading(app)


def fitting(app: App, part: str, batch_size: int) -> int:
    """Return the batch size of an evaluation.

    It is reduced if a batch of test data in partition files would exceed the memory for data.

    Args:
        app, part, batch_size: Arguments of ``evaluate``. Validation data keep the batch size of training.
    """
    data_set = data_set_of(app, part)
    if data_set is None or part != "test":
        return batch_size
    return max(min(batch_size, memory_of(app) // LEAST_BATCHES // data_set.row_bytes), 1)


def end_reading(app: App) -> None:
    """Stop an evaluation from reading more partition files. Any thread may call this."""
    for feed, *_ in app.run_context.feeds.values():
        if isinstance(feed, FileFeed):
            feed.end()


def _telling(moved: Moved, batch_size: int) -> Any:
    """Return a Keras callback that reports the progress of an evaluation."""
    import keras

    class Telling(keras.callbacks.Callback):  # type: ignore[misc]
        async_safe = True  # the evaluation does not wait for this callback

        def __init__(self) -> None:
            super().__init__()
            self._reported_at = time.monotonic()

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            if (now := time.monotonic()) - self._reported_at >= MOVED_EVERY_S:
                self._reported_at = now
                moved((batch + 1) * batch_size)

    return Telling()


def _feed(app: App, part: str, batch_size: int, begin: int = 0, end: int | None = None) -> Feed | FileFeed:
    """Return a source of batches for a range of samples, by default of all samples of a part.

    One feed for each part is kept while the data stay the same, because TensorFlow does not free the memory of an old
    one.
    """
    data_set = data_set_of(app, part)
    data = batches(app, part) if data_set is None else (data_set,)
    feed, *feed_key = app.run_context.feeds.get(part, (None,))
    now = [batch_size, *map(id, data)]
    if feed_key[:1] != [now]:
        if data_set is not None:
            feed = FileFeed(app, part, batch_size)
        elif feed_key and feed_key[0][1:] == now[1:]:
            feed = feed.with_batches_of(batch_size)
        else:
            feed = make_feed(data, batch_size)
        feed_key = []
    end = samples_of(app, part) if end is None else end
    if data_set is not None:
        feed.set_order(Portion(shuffle="none", seed=0, epoch=0, slots=1, start=begin, stop=end))
    elif feed_key[1:2] != [(begin, end)]:
        feed.set_order(np.arange(begin, end))
    app.run_context.feeds = {**app.run_context.feeds, part: (feed, now, (begin, end), data)}
    return feed  # type: ignore[no-any-return]
