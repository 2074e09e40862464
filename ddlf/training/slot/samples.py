"""A worker's training samples as ``fit`` takes them, from arrays or from partition files. Runs in the executor, on the thread that Keras lives on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from ddlf.algorithms.reading_order import Portion
from ddlf.data.array_cache import ArrayCache
from ddlf.data.parts import batches, place_of
from ddlf.data.trees import first_array
from ddlf.training.slot.feed import Feed, gathered, make_feed
from ddlf.training.slot.file_feed import FileFeed
from ddlf.training.slot.task import Task


class Samples(Protocol):
    """The training samples of a replica."""

    def feed(self, batch_size: int) -> Any:
        """Return what gives ``fit`` its batches."""

    def batch(self, task: Task) -> tuple[Any, ...]:
        """Return all samples of a task as one batch."""

    def batches(self, task: Task) -> Iterator[tuple[tuple[Any, ...], int]]:
        """Yield all samples of a task batch by batch, and the number of samples in each."""

    def during(self, fit: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Call a ``fit`` that reads samples, and return its metrics."""

    @property
    def skipped(self) -> list[tuple[int, int]]:
        """Damaged files that the last pass left out, from 0, and the number of samples in each."""

    def end(self) -> None:
        """Stop reading. Any thread may call it."""

    def told(self) -> tuple[float, list[int]]:
        """Return the seconds of waiting for files since the last call, and the files that were opened."""


class TrainingSamples:
    """The training data of an app, in whatever order a round wants it.

    Args:
        app: The user's app, with its data.
        found: The fingerprint of each array.
        held: Arrays of this worker, by fingerprint.
        ends: Whether reading files is to end at once.
    """

    def __init__(self, app: Any, found: dict[str, str], held: ArrayCache, ends: Callable[[], bool]) -> None:
        self._app, self._found, self._held, self._ends = app, found, held, ends
        self._feed: tuple[int, Feed] | None = None
        self._files: FileFeed | None = None
        self._data: tuple[Any, ...] = ()  # what a batch is gathered from that is not fed

    def feed(self, batch_size: int) -> Any:
        """What gives ``fit`` its batches; it is kept from round to round."""
        if place_of(self._app, "train") is not None:
            return self._reading(batch_size)
        if self._feed is None or self._feed[0] != batch_size:
            feed = make_feed(batches(self._app, "train"), batch_size)
            # TensorFlow copies arrays into tensors; what is kept are views of these, so that the data is here once.
            for name, data in zip(("x_train", "y_train"), feed.data, strict=False):
                one = self._found.get(name, "")
                if getattr(self._app, name) is self._held.get(one):  # and not what create_model made of it
                    self._held[one] = data
                    setattr(self._app, name, data)
            self._feed = batch_size, feed
        return self._feed[1]

    def batch(self, task: Task) -> tuple[Any, ...]:
        """All samples of a task, as ``fit`` gets a batch."""
        if isinstance(task.indices, Portion):
            return next(self._reading(task.batch_size).batches(task.indices))
        self._data = self._data or batches(self._app, "train")
        return gathered(self._data, task.indices)

    def batches(self, task: Task) -> Iterator[tuple[tuple[Any, ...], int]]:
        """All samples of a task, batch by batch, and how many there are in each."""
        size, samples = task.batch_size, len(task.indices)
        if isinstance(task.indices, Portion):
            yield from ((batch, len(first_array(batch))) for batch in self._reading(size).batches(task.indices))
            return
        counts = [min(size, samples - begin) for begin in range(0, samples, size)]
        self._data = self._data or batches(self._app, "train")
        for begin, count in zip(range(0, samples, size), counts, strict=True):
            yield gathered(self._data, task.indices[begin : begin + size]), count

    def _reading(self, batch_size: int) -> FileFeed:
        if self._files is None or self._files.batch_size != batch_size:
            self._files = FileFeed(self._app, "train", batch_size, self._ends)
        return self._files

    def during(self, fit: Callable[[], dict[str, float]]) -> dict[str, float]:
        """What a ``fit`` comes to that reads samples: nothing where it is to end while it waits for them.

        Raises:
            Exception: Why files could not be read, whatever Keras has made of it.
        """
        try:
            return fit()
        except Exception:
            error = None if self._files is None else self._files.error
            if error is None:
                raise
            if self._ends():
                return {}
            raise error.with_traceback(None) from None
        finally:
            self.end()

    @property
    def skipped(self) -> list[tuple[int, int]]:
        """Damaged files that were left out of the last pass, from 0, and how many of its samples each had."""
        return [] if self._files is None else sorted(self._files.skipped.items())

    def end(self) -> None:
        """Read no more. Any thread may."""
        if self._files is not None:
            self._files.end()

    def told(self) -> tuple[float, list[int]]:
        """Seconds that was waited for samples of files since this was asked last, and the files that were opened."""
        return (0.0, []) if self._files is None else self._files.told()


def in_order(indices: Any, again: tuple[int, ...]) -> Any:
    """The samples of a round in the order of a later local epoch.

    Args:
        indices: As in a ``Task``.
        again: Seed of that order.
    """
    if isinstance(indices, Portion):
        return indices.of(again)
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(again))).permutation(indices)
