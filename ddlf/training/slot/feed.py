"""Samples for ``Model.fit`` in a given order, from arrays or partition files. Runs where a model trains or evaluates.

From arrays, the samples of each batch are gathered by index, so the data set is never copied. Files are read ahead, as
a ``SampleStream``. In both cases the order is set again for each epoch.

With TensorFlow, the batches come from a ``tf.data`` pipeline that is built once and used in every round, with
autotuning off. ``fit`` turns autotuning on for arrays. Then the end of ``fit`` can wait for the autotuning thread's
next wake-up, as long again as the training itself took (TensorFlow 2.21: ``Model::OptimizeLoop`` is notified before it
can see that it was cancelled). ``docs/LAB.md`` has the figures. From files, chunks of several batches pass
from Python into the pipeline, which cuts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any, Protocol

import numpy as np

from ddlf.algorithms.reading_order import Portion, Turned
from ddlf.data.app_data import batches, data_set_of, rows
from ddlf.data.array_cache import ArrayCache
from ddlf.data.data_set import DataSet
from ddlf.data.stream import LEAST_BATCHES, SampleStream, usual_memory
from ddlf.data.trees import first_array, leaves, tree_map, tuples
from ddlf.errors import DatasetError
from ddlf.settings.checks import count_of_bytes
from ddlf.training.context import App
from ddlf.training.slot.task import Task

ENDLESS = 2**62
"""More batches than any pass has."""


class Feed(Protocol):
    """Batches of samples for ``fit``, whose order can be set before each pass.

    Attributes:
        dataset: The ``x`` for ``fit`` or ``evaluate``.
        data: The data as arrays in the feed's own memory. The caller can keep these and free the original.
    """

    dataset: Any
    data: Any

    def set_order(self, order: np.ndarray[Any, Any]) -> None:
        """Set which samples the next pass reads, and in which order: indices of shape ``(n,)``, of any integer type."""

    def with_batches_of(self, batch_size: int) -> Feed:
        """Return a feed of the same samples with another batch size. Both share the memory of the samples."""


def make_feed(data: Any, batch_size: int) -> Feed:
    """Return the feed (batches in a settable order) for the current Keras backend.

    Args:
        data: ``(x,)``, ``(x, y)`` or ``(x, y, sample_weight)``, each an array or a tree of arrays. Floating-point
            numbers are converted to Keras's default type, like ``fit`` does with arrays.
        batch_size: Samples in a batch; the last batch of a pass may be smaller.
    """
    import keras

    feed_class = TensorFlowFeed if keras.backend.backend() == "tensorflow" else ArrayFeed
    return feed_class(data, batch_size)


class TensorFlowFeed:
    """A feed for TensorFlow: a ``tf.data`` pipeline that reads the samples' indices from a variable."""

    def __init__(self, data: Any, batch_size: int, tensors: Any = None) -> None:
        import tensorflow as tf

        batch_size = min(batch_size, 2**31)  # more than any pass has, but within TensorFlow's integers of 64 bits
        self._batch_size, self._steps = batch_size, 0
        order = self._order = tf.Variable(tf.zeros([0], tf.int64), shape=[None], trainable=False)
        if tensors is None:
            with tf.device("CPU:0"):
                tensors = tree_map(lambda array: tf.convert_to_tensor(array, keras_type(array)), tuples(data))
        self._tensors = tensors
        gathered = iter([array for _, array in leaves(tensors)])
        self.data = tree_map(lambda array: _memory_of(next(gathered), array), data)

        def batch(number: Any) -> Any:
            rows = order[number * batch_size : (number + 1) * batch_size]
            return tree_map(lambda tensor: tf.gather(tensor, rows), tensors)

        self._options = tf.data.Options()
        self._options.autotune.enabled = False
        self._options.threading.private_threadpool_size = 1
        self._options.deterministic = True
        # The number of steps limits the batches from outside, because each function in a pipeline costs milliseconds
        # whenever a pass begins.
        self._batches = tf.data.Dataset.range(ENDLESS).map(batch)
        self.dataset = self._first_batches(0)

    def _first_batches(self, steps: int) -> Any:
        return self._batches.take(steps).prefetch(1).with_options(self._options)

    def set_order(self, order: np.ndarray[Any, Any]) -> None:
        """Set the samples of the next pass in their order: indices of shape ``(n,)``, of any integer type.

        This needs no retracing: only the number of steps, which Keras asks for, is set on the data set.
        """
        self._order.assign(order.astype(np.int64))
        steps = -(-len(order) // self._batch_size)
        if steps != self._steps:
            self._steps, self.dataset = steps, self._first_batches(steps)

    def with_batches_of(self, batch_size: int) -> TensorFlowFeed:
        """Return a feed of the same samples with another batch size.

        TensorFlow keeps the tensors of an old pipeline as long as the model, so both pipelines share them.
        """
        return TensorFlowFeed(self.data, batch_size, self._tensors)


class ArrayFeed:
    """A feed for JAX and PyTorch: a ``keras.utils.PyDataset`` over NumPy arrays."""

    def __init__(self, data: Any, batch_size: int) -> None:
        import keras

        feed = self

        class Batches(keras.utils.PyDataset):  # type: ignore[misc]
            def __len__(self) -> int:
                return -(-len(feed._order) // batch_size)

            def __getitem__(self, number: int) -> Any:
                return gathered(data, feed._order[number * batch_size : (number + 1) * batch_size])

        self.data = data
        self._order: np.ndarray[Any, Any] = np.arange(0)
        self.dataset = Batches(workers=0)

    def set_order(self, order: np.ndarray[Any, Any]) -> None:
        self._order = order

    def with_batches_of(self, batch_size: int) -> ArrayFeed:
        return ArrayFeed(self.data, batch_size)


def gathered(data: Any, rows: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    """Return some rows of ``fit``'s data as new arrays, in the types that the model gets."""
    return tuple(tree_map(lambda array: array[rows].astype(keras_type(array), copy=False), tuples(data)))


def keras_type(array: np.ndarray[Any, Any]) -> str:
    """Return the type that Keras converts an array to: all floating-point types become Keras's default one."""
    import keras

    kind = keras.backend.standardize_dtype(array.dtype)
    return str(keras.backend.floatx() if keras.backend.is_float_dtype(kind) else kind)


def _memory_of(tensor: Any, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a tensor's memory as an array, so that the original array can be freed.

    If the type was converted, return the original array.
    """
    if tensor.dtype.as_numpy_dtype != array.dtype:
        return array
    # ``tensor.numpy()`` would copy again. The buffer protocol gives a read-only view instead.
    view: np.ndarray[Any, Any] = np.asarray(memoryview(tensor))
    return view


def memory_of(app: App) -> int:
    """Return the number of bytes of memory that an app allows for samples of partition files."""
    return count_of_bytes("data_memory", app.data_memory) or usual_memory()


class FileFeed:
    """A source of batches that reads a part of an app's partition files ahead, in an order that can be set.

    Args:
        app: The user's ``IApp``.
        part: ``"train"``, ``"val"`` or ``"test"``.
        batch_size: Samples in a batch; the last batch of a pass may be smaller.
        ends: Returns whether reading must end at once.

    Attributes:
        batch_size: The argument of this name.
        dataset: The ``x`` for ``fit`` or ``evaluate``.
        skipped: Samples that the last pass left out, by the number of their damaged partition file.
        error: The error that ended reading, if any. Keras may have wrapped it.
    """

    def __init__(self, app: App, part: str, batch_size: int, ends: Callable[[], bool] = lambda: False) -> None:
        import keras

        self._app, self._part, self.batch_size, self._ends = app, part, batch_size, ends
        data_set = data_set_of(app, part)
        assert data_set is not None
        self.data: DataSet = data_set
        self._memory = memory_of(app)
        if part != "train" and "replica" in vars(app):  # training, which is paused, uses the other half for its files
            self._memory = max(self._memory // 2, min(self._memory, LEAST_BATCHES * batch_size * data_set.row_bytes))
        self._skips = part == "train" and getattr(app, "on_bad", "stop") == "skip"
        self.skipped: dict[int, int] = {}
        self._order: Portion | Turned | None = None
        self._stream: SampleStream | None = None
        self._last: SampleStream | None = None  # the next pass may use the files that this pass has in memory
        self.error: Exception | None = None
        # seconds of waiting in completed passes, and the files that they opened
        self._stats: tuple[float, list[int]] = 0.0, []
        self._tensorflow = keras.backend.backend() == "tensorflow"
        self.dataset: Any = None
        self._batches: Any = self._pipeline() if self._tensorflow else None

    # -- reading ------------------------------------------------------------------------------------------------------

    def set_order(self, order: Portion | Turned) -> None:
        """Set the order of the samples for the next pass, and begin to read them from the files."""
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
        """Yield some samples batch by batch, in the form for ``fit``."""
        self._order = order
        self._begin()
        yield from self.read()

    def read(self) -> Iterator[tuple[Any, ...]]:
        """Yield the samples of the next pass, whose order is set, batch by batch, in the form for ``fit``."""
        for chunk in self._pass():
            yield from self._cut(chunk)

    def end(self) -> None:
        """Stop reading this pass. Any thread may call it."""
        if (stream := self._stream) is not None:
            stream.close()

    def take_stats(self) -> tuple[float, list[int]]:
        """Return the seconds spent waiting for samples since the last call, and the files that were opened."""
        self._put_away()
        stats, self._stats = self._stats, (0.0, [])
        return stats

    def _begin(self) -> SampleStream:
        before, self.error = self._last, None
        self._put_away()
        assert self._order is not None
        data = self.data.in_version(self._order.version)
        bad = self._bad(data, self._order) if self._skips else {}
        self._stream = self._last = SampleStream(data, self._order, self.batch_size, self._memory, before, bad)
        self.skipped, self._samples = self._stream.left_out, self._stream.samples
        if not self._samples:
            self._stream.close()
            raise DatasetError(f"no samples remain to train on: {next(iter(bad.values()))}", hint="bring files back")
        if self._ends():
            self._stream.close()
        return self._stream

    def _bad(self, data: DataSet, order: Portion | Turned) -> dict[int, str]:
        """Return an error for each damaged file of a pass, by the file's number.

        Each file is checked completely when it is first used, before any of its samples is.
        """
        files = np.unique(np.concatenate([np.unique(files) for files, _ in order.blocks(data.manifest.sizes)]))
        return {number: damage for number in files.tolist() if not self._ends() and (damage := data.damaged(number))}

    def _put_away(self) -> None:
        if (stream := self._stream) is not None:
            stream.close()
            self._stats = self._stats[0] + stream.wait_s, [*self._stats[1], *stream.files]
        self._stream = None

    def _pass(self) -> Iterator[tuple[Any, ...]]:
        """Yield the samples of the next pass in chunks.

        Keras may read the first chunks, and then start the pass again.
        """
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

    # -- for Keras ----------------------------------------------------------------------------------------------------

    def _pipeline(self) -> Any:
        """Return a ``tf.data`` pipeline that reads one pass over the samples each time it is iterated."""
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
        """Return the data set for JAX and PyTorch, whose ``fit`` requests the batches of a pass one after another."""
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


class Samples(Protocol):
    """The interface to the training samples of a replica."""

    def feed(self, batch_size: int) -> Any:
        """Return the source of batches that ``fit`` reads."""

    def batch(self, task: Task) -> tuple[Any, ...]:
        """Return all samples of a slot's task as one batch."""

    def batches(self, task: Task) -> Iterator[tuple[tuple[Any, ...], int]]:
        """Yield the samples of a slot's task batch by batch, each with the number of samples in it."""

    def run_fit(self, fit: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Call a function that runs ``fit`` on these samples, and return its metrics."""

    @property
    def skipped(self) -> list[tuple[int, int]]:
        """Return the damaged files that the last pass left out, from 0, with the number of samples lost in each."""

    def end(self) -> None:
        """Stop reading samples. Any thread may call it."""

    def take_stats(self) -> tuple[float, list[int]]:
        """Return the seconds spent waiting for files since the last call, and the files that were opened."""


class TrainingSamples:
    """The training data of an app, in any order that a round needs.

    Args:
        app: The user's app, with its data.
        fingerprints: The fingerprint of each array.
        array_cache: The arrays that this worker holds, by fingerprint.
        ends: Returns whether reading files must end at once.
    """

    def __init__(
        self, app: App, fingerprints: dict[str, str], array_cache: ArrayCache, ends: Callable[[], bool]
    ) -> None:
        self._app, self._fingerprints, self._array_cache, self._ends = app, fingerprints, array_cache, ends
        self._feed: tuple[int, Feed] | None = None
        self._files: FileFeed | None = None
        self._data: tuple[Any, ...] = ()  # source arrays of batches that use no feed

    def feed(self, batch_size: int) -> Any:
        """Return the source of batches for ``fit``. It is made once and used in all rounds."""
        if self._feed is not None and self._feed[0] != batch_size:
            self._feed = batch_size, self._feed[1].with_batches_of(batch_size)
        if self._feed is None:
            if data_set_of(self._app, "train") is not None:
                return self._reading(batch_size)
            feed = make_feed(batches(self._app, "train"), batch_size)
            # TensorFlow copies arrays into tensors. Keep views of these instead, so that the data is in memory once.
            for name, data in zip(("x_train", "y_train"), feed.data, strict=False):
                fingerprint = self._fingerprints.get(name, "")
                # do not replace the data if create_model has replaced it
                if getattr(self._app, name) is self._array_cache.get(fingerprint):
                    self._array_cache[fingerprint] = data
                    setattr(self._app, name, data)
            self._feed = batch_size, feed
        return self._feed[1]

    def batch(self, task: Task) -> tuple[Any, ...]:
        """Return all samples of a slot's task as one batch in the form for ``fit``."""
        if isinstance(task.indices, Portion):
            return next(self._reading(task.batch_size).batches(task.indices))
        self._data = self._data or batches(self._app, "train")
        return gathered(self._data, task.indices)

    def batches(self, task: Task) -> Iterator[tuple[tuple[Any, ...], int]]:
        """Yield the samples of a slot's task batch by batch, each with the number of samples in it."""
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

    def run_fit(self, fit: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Call a function that runs ``fit`` on these samples, and return its metrics.

        The metrics are empty if the run was stopped while ``fit`` waited for files.

        Raises:
            Exception: The original error of reading files, even if Keras has wrapped it.
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
        """Return the damaged files that the last pass left out, from 0, with the number of samples lost in each."""
        return [] if self._files is None else sorted(self._files.skipped.items())

    def end(self) -> None:
        """Stop reading samples. Any thread may call it."""
        if self._files is not None:
            self._files.end()

    def take_stats(self) -> tuple[float, list[int]]:
        """Return the seconds spent waiting for files since the last call, and the files that were opened."""
        return (0.0, []) if self._files is None else self._files.take_stats()


def reordered(indices: Any, again: tuple[int, ...]) -> Any:
    """Return a slot's samples of a round in the new order that a later local epoch uses.

    Args:
        indices: The ``indices`` of the task.
        again: Seed of the new order.
    """
    if isinstance(indices, Portion):
        return indices.of(again)
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(again))).permutation(indices)
