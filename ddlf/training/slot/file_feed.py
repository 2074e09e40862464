"""Batches for ``Model.fit`` from partition files, as a stream. Runs where a model trains or is evaluated.

With TensorFlow whole chunks of batches pass from Python into a ``tf.data`` pipeline, which cuts them; ``ddlf.training.slot.feed`` says
why there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

import numpy as np

from ddlf.algorithms.reading_order import Portion, Turned
from ddlf.data.data_set import DataSet
from ddlf.data.parts import place_of, rows
from ddlf.data.stream import LEAST_BATCHES, Stream, usual_memory
from ddlf.data.trees import leaves, tree_map, tuples
from ddlf.errors import DatasetError
from ddlf.training.settings.checks import count_of_bytes
from ddlf.training.slot.feed import keras_type


def memory_of(app: Any) -> int:
    """Bytes for samples of partition files."""
    return count_of_bytes("data_memory", app.data_memory) or usual_memory()


class FileFeed:
    """A part of an app's data in a settable order, read while it is used.

    Args:
        app: The user's ``IApp``.
        part: ``"train"``, ``"val"`` or ``"test"``.
        batch_size: Samples in a batch; the last one of a pass may be smaller.
        ends: Whether reading is to end at once.

    Attributes:
        batch_size: As it was given.
        dataset: What ``fit`` or ``evaluate`` gets as ``x``.
        skipped: Samples of the last pass that were left out, by number of their partition file, which is damaged.
        error: What reading ended with, if it failed; Keras may have made something else of it.
    """

    def __init__(self, app: Any, part: str, batch_size: int, ends: Callable[[], bool] = lambda: False) -> None:
        import keras

        self._app, self._part, self.batch_size, self._ends = app, part, batch_size, ends
        place = place_of(app, part)
        assert place is not None
        self.data: DataSet = place
        self._memory = memory_of(app)
        if part != "train" and "replica" in vars(app):  # training waits meanwhile, with files in its half
            self._memory = max(self._memory // 2, min(self._memory, LEAST_BATCHES * batch_size * place.row_bytes))
        self._skips = part == "train" and getattr(app, "on_bad", "stop") == "skip"
        self.skipped: dict[int, int] = {}
        self._order: Portion | Turned | None = None
        self._stream: Stream | None = None
        self._last: Stream | None = None  # what it has of files in memory may be wanted again
        self.error: Exception | None = None
        self._told: tuple[float, list[int]] = 0.0, []  # seconds and files of passes that are over
        self._tensorflow = keras.backend.backend() == "tensorflow"
        self.dataset: Any = None
        self._batches: Any = self._pipeline() if self._tensorflow else None

    # -- what is read ---------------------------------------------------------------------------------------------------

    def set_order(self, order: Portion | Turned) -> None:
        """Give what the next pass reads; it begins to be read."""
        if order is not self._order or self._stream is None or self._stream.begun:
            self._order = order
            self._begin()
        if self._tensorflow:
            import tensorflow as tf

            steps = tf.data.experimental.assert_cardinality(-(-self._samples // self.batch_size))
            self.dataset = self._batches.apply(steps)
        else:
            self.dataset = self._dataset(self._samples)

    def batches(self, order: Portion) -> Iterator[tuple[Any, ...]]:
        """Some samples, batch by batch, as ``fit`` takes them."""
        self._order = order
        self._begin()
        for chunk in self._pass():
            yield from self._cut(chunk)

    def end(self) -> None:
        """Read nothing more of this pass. Any thread may."""
        if (stream := self._stream) is not None:
            stream.close()

    def told(self) -> tuple[float, list[int]]:
        """Seconds that was waited for samples since this was asked last, and the files that were opened."""
        self._put_away()
        told, self._told = self._told, (0.0, [])
        return told

    def _begin(self) -> Stream:
        before, self.error = self._last, None
        self._put_away()
        assert self._order is not None
        data = self.data.at(self._order.version)
        bad = self._bad(data, self._order) if self._skips else {}
        self._stream = self._last = Stream(data, self._order, self.batch_size, self._memory, before, bad)
        self.skipped, self._samples = self._stream.left_out, self._stream.samples
        if not self._samples:
            self._stream.close()
            raise DatasetError(f"nothing is left to train on: {next(iter(bad.values()))}", hint="bring files back")
        if self._ends():
            self._stream.close()
        return self._stream

    def _bad(self, data: DataSet, order: Portion | Turned) -> dict[int, str]:
        """What is wrong with files of a pass, by number; each is read for that when it is first met, before a sample of it counts."""
        files = np.unique(np.concatenate([np.unique(files) for files, _ in order.blocks(data.manifest.sizes)]))
        return {number: why for number in files.tolist() if not self._ends() and (why := data.damaged(number))}

    def _put_away(self) -> None:
        if (stream := self._stream) is not None:
            stream.close()
            self._told = self._told[0] + stream.wait_s, [*self._told[1], *stream.files]
        self._stream = None

    def _pass(self) -> Iterator[tuple[Any, ...]]:
        """What is to be read next, in chunks. Keras may look at the first ones, and begin anew."""
        stream = self._stream
        if stream is None or stream.begun:
            stream = self._begin()
        try:
            for chunk in stream:
                yield self._as_fit_takes(chunk)
        except Exception as error:
            self.error = error
            raise

    def _as_fit_takes(self, chunk: Any) -> tuple[Any, ...]:
        data = tuples(rows(self._app, self._part, chunk))
        return tuple(tree_map(lambda array: array.astype(keras_type(array), copy=False), data))

    def _cut(self, chunk: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        samples, size = len(next(leaf for _, leaf in leaves(chunk))), self.batch_size
        for first in range(0, samples, size):
            yield tuple(tree_map(itemgetter(slice(first, first + size)), chunk))

    # -- as Keras takes it ----------------------------------------------------------------------------------------------

    def _pipeline(self) -> Any:
        """A ``tf.data`` pipeline that takes a pass from ``_pass`` whenever it is gone through."""
        import tensorflow as tf

        columns = self.data.columns.items()
        nothing = {name: np.empty((0, *column.shape), column.dtype) for name, column in columns}
        signature = tree_map(
            lambda array: tf.TensorSpec([None, *array.shape[1:]], array.dtype), self._as_fit_takes(nothing)
        )
        size = self.batch_size

        def cut(*chunk: Any) -> Any:
            samples = tf.shape(tf.nest.flatten(chunk)[0], tf.int64)[0]
            numbers = tf.data.Dataset.range((samples + size - 1) // size)
            return numbers.map(lambda n: tree_map(lambda tensor: tensor[n * size : (n + 1) * size], chunk))

        options = tf.data.Options()
        options.autotune.enabled = False
        options.threading.private_threadpool_size = 1
        options.deterministic = True
        with tf.device("CPU:0"):
            chunks = tf.data.Dataset.from_generator(self._pass, output_signature=signature)
            return chunks.flat_map(cut).prefetch(1).with_options(options)

    def _dataset(self, samples: int) -> Any:
        """The same for JAX and PyTorch, which ask for the batches of a pass one after the other."""
        import keras

        feed = self

        class Batches(keras.utils.PyDataset):  # type: ignore[misc]
            def __len__(self) -> int:
                return -(-samples // feed.batch_size)

            def __getitem__(self, number: int) -> Any:
                if not number:
                    self.left = (batch for chunk in feed._pass() for batch in feed._cut(chunk))
                return next(self.left)

        return Batches(workers=0)
