"""Calls Keras's compiled training step of one batch at a lower cost. Runs where TensorFlow trains.

For a small model, calling the step costs more than computing it. Keras wraps the result, TensorFlow looks up the
compiled function, and a thread pool runs each operation. Here one lookup serves a whole ``fit``, and the operations run
on the calling thread. They are the same operations, with the same bits. But this executor computes loops differently,
so steps with a loop, such as an LSTM's, stay in the pool.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

SMALL = 1 << 17
"""Maximum number of values in a small model. In a larger model, the operations are worth several threads."""
LOOPS = ("While", "If", "Case", "For")
"""Suffixes of operations that run other operations several times, or conditionally."""


def quick_step(model: Any) -> Callable[[Any], Any] | None:
    """Return a function that replaces a model's ``train_function`` if one call is one batch.

    Args:
        model: Built and compiled model.

    Returns:
        The function. None if Keras's is necessary: the model overrides it, runs eagerly, uses XLA, or is large.
    """
    import keras

    own = type(model).make_train_function is not keras.Model.make_train_function
    if own or model.run_eagerly or model.jit_compile or model.steps_per_execution != 1 or model.count_params() > SMALL:
        return None
    import tensorflow as tf

    step = tf.function(lambda iterator: model.train_step(iterator.get_next()), reduce_retracing=True)
    known: Any = None
    compiled: Any = None
    threads: str | None = None

    def train_function(iterator: Any) -> Any:
        nonlocal known, compiled, threads
        if known is None or known() is not iterator:
            compiled, known = step.get_concrete_function(iterator), weakref.ref(iterator)
            threads = None if _has_loops(compiled.graph) else "SINGLE_THREADED_EXECUTOR"
        with contextlib.nullcontext() if threads is None else tf.experimental.function_executor_type(threads):
            return compiled(iterator)

    return train_function


def _has_loops(graph: Any) -> bool:
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    return any(node.op.endswith(LOOPS) for node in nodes)
