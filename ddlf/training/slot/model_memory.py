"""Frees the memory of models that nothing uses any more. Runs on master and workers, on the thread of Keras.

Two things keep such a model in memory. A Keras model is part of reference cycles, which Python collects after a number
of new objects, however large they are. And TensorFlow 2.21 keeps the function of each ``tf.custom_gradient`` indefinitely.
The function refers to the graph that uses it, and so to all variables of that graph. The optimizers of Keras, ``silu``
and others have such gradients: each model that was trained once keeps its weights and the state of its optimizer.

Workers collect cycles when a role ends. The master does so before it builds a model.
"""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

COLLECT_BYTES = 2**26
"""The master collects after its models had so many bytes of weights, because a collection takes 0.2 s."""

_OF_GRAPH = "_gradients_of_graph"
_PREFIX = "CustomGradient-"


class BuiltModels:
    """Counts the weights of the models that a master builds, and frees unused models."""

    def __init__(self) -> None:
        self._nbytes = 0  # since the last collection

    def add(self, model: Any) -> None:
        """Count the weights of a model that was built."""
        self._nbytes += sum(4 * math.prod(weight.shape) for weight in model.weights)

    def free(self) -> None:
        """Free models that nothing uses any more, if the models built since the last time are large."""
        if self._nbytes >= COLLECT_BYTES:
            gc.collect()
            self._nbytes = 0


BUILT = BuiltModels()


def free_gradients_with_graphs() -> None:
    """Let each custom gradient of TensorFlow end with the graphs that use it. Call it after Keras's import.

    It does nothing with other backends, a second time, or if a later TensorFlow has no such registry.
    """
    import keras

    if keras.backend.backend() != "tensorflow":
        return
    from tensorflow.python.framework import ops
    from tensorflow.python.framework.registry import Registry

    registry: Any = getattr(ops, "gradient_registry", None)
    if type(registry) is not Registry or not isinstance(getattr(registry, "_registry", None), dict):
        return

    class GradientRegistry(Registry):  # type: ignore[misc]
        """TensorFlow's registry of gradients, which refers weakly to those of one graph."""

        __slots__ = ()

        def register(self, candidate: Any, name: str | None = None) -> None:
            graphs = _graphs_being_built(ops) if name is not None and name.startswith(_PREFIX) else []
            if not graphs:
                super().register(candidate, name)
                return
            for graph in graphs:
                setattr(graph, _OF_GRAPH, [*getattr(graph, _OF_GRAPH, []), candidate])
            super().register(_called(weakref.ref(candidate)), name)
            weakref.finalize(candidate, self._registry.pop, name, None).atexit = False

    weak = GradientRegistry("gradient")
    weak._registry = registry._registry
    ops.gradient_registry = ops._gradient_registry = weak


def _graphs_being_built(ops: Any) -> list[Any]:
    """Return the graph that is being built and those around it, from the inside out; none outside of functions.

    A graph around it may need the gradient after the inner one is gone, and builds that one again from its definition.
    """
    graphs, graph = [], ops.get_default_graph()
    while graph is not None and graph.building_function:
        graphs.append(graph)
        graph = graph.outer_graph
    return graphs


def _called(gradient: weakref.ref[Any]) -> Any:
    def of_graph(op: Any, *gradients: Any) -> Any:
        return gradient()(op, *gradients)  # type: ignore[misc]  # the graph that asks for it keeps it

    return of_graph
