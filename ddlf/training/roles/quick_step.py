"""Keras's compiled training step of one batch, called at less cost. Runs where TensorFlow trains.

Of a small model the call of its step costs more than what is computed in it: Keras wraps what the step returns, TensorFlow looks up which compiled
function is meant, and hands each operation to a pool of threads. Here one function is looked up for a whole ``fit``, and its operations run on the
thread that calls it. They are the same, so the bits are; but loops are computed in another way there, so steps with a loop, as an LSTM's, are left
to the pool.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

SMALL = 1 << 17
"""A model of at most so many values: what a larger one computes is worth several threads."""
LOOPS = ("While", "If", "Case", "For")
"""Ends of the names of operations that run others several times, or not at all."""


def quick_step(model: Any) -> Callable[[Any], Any] | None:
    """What can stand in the place of a model's ``train_function``, where one call of it is one batch.

    Args:
        model: Built and compiled.

    Returns:
        The function; None where Keras's own is to be used: for a model that makes one itself, runs eagerly, is compiled by XLA, or is large.
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
