"""Batches for ``Model.fit`` in a given order of the samples. Runs where a model trains or is evaluated.

The samples are gathered by index batch by batch, so the data set is never copied. The order is set anew for each epoch.

With TensorFlow the batches come from a ``tf.data`` pipeline that is built once and used in every round, with its autotuning off. Autotuning is on
when ``fit`` is given arrays, and then the end of ``fit`` can wait for the autotuning thread's next wake-up, as long again as the training itself
took (TensorFlow 2.21: ``Model::OptimizeLoop`` is notified before it can see that it was cancelled).
``docs/contributing/LAB.md`` has the figures.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from ddlf.data.trees import leaves, tree_map, tuples


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
        data: What ``fit`` takes of one batch, as ``(x,)``, ``(x, y)`` or ``(x, y, sample_weight)``, each an array or a tree of arrays. Floating-point
            numbers reach the model in Keras's own type, as they do when ``fit`` is given arrays.
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
        """See ``Feed``. Nothing is traced again: only the number of steps, which Keras wants to know, is noted on the data set."""
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
