"""Samples for ``Model.fit`` in a given order, from arrays or from partition files. Runs where a model trains or is
evaluated.

From arrays the samples are gathered by index batch by batch, so the data set is never copied. From files they are read
ahead, as a ``Stream``. Either way the order is set anew for each epoch.

With TensorFlow the batches come from a ``tf.data`` pipeline that is built once and used in every round, with its
autotuning off. Autotuning is on when ``fit`` is given arrays, and then the end of ``fit`` can wait for the autotuning
thread's next wake-up, as long again as the training itself took (TensorFlow 2.21: ``Model::OptimizeLoop`` is notified
before it can see that it was cancelled). ``docs/contributing/LAB.md`` has the figures. Of files, whole chunks of
batches pass from Python into the pipeline, which cuts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any, Protocol

import numpy as np

from ddlf.algorithms.reading_order import Portion, Turned
from ddlf.data.array_cache import ArrayCache
from ddlf.data.data_set import DataSet
from ddlf.data.parts import batches, place_of, rows
from ddlf.data.stream import LEAST_BATCHES, Stream, usual_memory
from ddlf.data.trees import first_array, leaves, tree_map, tuples
from ddlf.errors import DatasetError
from ddlf.training.context import App
from ddlf.training.settings.checks import count_of_bytes
from ddlf.training.slot.task import Task


class Feed(Protocol):
    """Batches in a settable order.

    Attributes:
        dataset: What ``fit`` or ``evaluate`` gets as ``x``.
        data: The data as arrays, in the memory that the feed uses: keep these, and the original can be freed.
    """

    dataset: Any
    data: Any

    def set_order(self, order: np.ndarray[Any, Any]) -> None:
        """Give the indices of the samples for the next pass, shape ``(n,)``, any integer type."""


def make_feed(data: Any, batch_size: int) -> Feed:
    """The feed for the Keras backend in use.

    Args:
        data: What ``fit`` takes of one batch, as ``(x,)``, ``(x, y)`` or ``(x, y, sample_weight)``, each an array or a
            tree of arrays. Floating-point numbers reach the model in Keras's own type, as they do when ``fit`` is given
            arrays.
        batch_size: Samples in a batch; the last one of a pass may be smaller.
    """
    import keras

    made = TensorFlowFeed if keras.backend.backend() == "tensorflow" else ArrayFeed
    return made(data, min(batch_size, 2**31))  # no pass is longer, and TensorFlow's numbers end at 2**63


class TensorFlowFeed:
    """A ``tf.data`` pipeline over indices in a variable."""

    def __init__(self, data: Any, batch_size: int) -> None:
        import tensorflow as tf

        self._tf = tf
        self._batch_size = batch_size
        order = self._order = tf.Variable(tf.zeros([0], tf.int64), shape=[None], trainable=False)
        with tf.device("CPU:0"):
            tensors = tree_map(lambda array: tf.convert_to_tensor(array, keras_type(array)), tuples(data))
        held = iter([array for _, array in leaves(tensors)])
        self.data = tree_map(lambda array: _memory_of(next(held), array), data)

        def batch(number: Any) -> Any:
            rows = order[number * batch_size : (number + 1) * batch_size]
            return tree_map(lambda tensor: tf.gather(tensor, rows), tensors)

        options = tf.data.Options()
        options.autotune.enabled = False
        options.threading.private_threadpool_size = 1
        options.deterministic = True
        # The number of steps is read when a pass begins, hence the flat_map over one element.
        numbers = tf.data.Dataset.range(1).flat_map(
            lambda _: tf.data.Dataset.range(self._steps(tf.size(order, tf.int64)))
        )
        self._batches = numbers.map(batch).prefetch(1).with_options(options)
        self.dataset = self._batches

    def _steps(self, samples: Any) -> Any:
        return (samples + self._batch_size - 1) // self._batch_size

    def set_order(self, order: np.ndarray[Any, Any]) -> None:
        """See ``Feed``.

        Nothing is traced again: only the number of steps, which Keras wants to know, is noted on the data set.
        """
        self._order.assign(order.astype(np.int64))
        steps = self._tf.data.experimental.assert_cardinality(self._steps(len(order)))
        self.dataset = self._batches.apply(steps)


class ArrayFeed:
    """A ``keras.utils.PyDataset`` over NumPy arrays, for JAX and PyTorch."""

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


def gathered(data: Any, rows: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    """Some rows of what ``fit`` takes, as new arrays, which reach the model as they are."""
    return tuple(tree_map(lambda array: array[rows].astype(keras_type(array), copy=False), tuples(data)))


def keras_type(array: np.ndarray[Any, Any]) -> str:
    """What Keras makes of an array's type: its own floating-point type of any other one."""
    import keras

    kind = keras.backend.standardize_dtype(array.dtype)
    return str(keras.backend.floatx() if keras.backend.is_float_dtype(kind) else kind)


def _memory_of(tensor: Any, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A tensor's memory as an array; the array that it was made of, if that had another type."""
    if tensor.dtype.as_numpy_dtype != array.dtype:
        return array
    # ``tensor.numpy()`` would copy again; the buffer protocol does not. Such a view is read-only.
    view: np.ndarray[Any, Any] = np.asarray(memoryview(tensor))
    return view


def memory_of(app: App) -> int:
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

    def __init__(self, app: App, part: str, batch_size: int, ends: Callable[[], bool] = lambda: False) -> None:
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
        """What is wrong with files of a pass, by number; each is read for that when it is first met, before a sample of
        it counts."""
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

    def __init__(self, app: App, found: dict[str, str], held: ArrayCache, ends: Callable[[], bool]) -> None:
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
