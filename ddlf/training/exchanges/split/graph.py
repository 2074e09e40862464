"""A model as a sequence of calls of its layers, with the cost of each call. Runs on master and workers.

Everything here follows from shapes, so it needs no values of variables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ddlf.errors import AppError, ConfigError
from ddlf.training.slot.gradients import check_mean_losses


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a layer, or of another operation of Keras.

    Args:
        name: Name of the layer.
        operation: The layer.
        node: Keras's node of this call.
        inputs: Numbers of the tensors that it takes.
        outputs: Numbers of the tensors that it returns.
        products: Multiplications for one sample.
        activations: Bytes of its results for one sample.
        weights: Numbers of the layer's weights in ``model.weights``.
    """

    name: str
    operation: Any
    node: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    products: int
    activations: int
    weights: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Graph:
    """A model as a sequence of calls. Each call comes after the calls that compute its inputs.

    Args:
        model: The model.
        tensors: The symbolic tensors of Keras between the calls.
        inputs: Numbers of the tensors that the model takes.
        outputs: Numbers of the tensors that the model returns.
        calls: The calls.
    """

    model: Any
    tensors: Sequence[Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    calls: Sequence[Call]

    @classmethod
    def of(cls, model: Any) -> Graph:
        """Return the calls of a Sequential or functional model.

        Raises:
            AppError: The model cannot be cut.
        """
        function = functional(model)
        index_of = {id(weight): index for index, weight in enumerate(model.weights)}
        tensors = list(function.inputs)
        numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
        calls: list[Call] = []
        for node in _nodes(function):
            outputs = list(node.outputs)
            for tensor in outputs:
                numbers[id(tensor)] = len(tensors)
                tensors.append(tensor)
            operation, inputs = node.operation, list(node.input_tensors)
            weights = getattr(operation, "weights", [])
            calls.append(
                Call(
                    operation.name,
                    operation,
                    node,
                    tuple(dict.fromkeys(numbers[id(tensor)] for tensor in inputs)),
                    tuple(numbers[id(tensor)] for tensor in outputs),
                    products_of(operation, inputs, outputs),
                    sum(map(bytes_of, outputs)),
                    tuple(index_of[id(weight)] for weight in weights),
                )
            )
        return cls(
            model,
            tensors,
            tuple(range(len(function.inputs))),
            tuple(numbers[id(tensor)] for tensor in function.outputs),
            calls,
        )

    def producers(self) -> dict[int, int]:
        """Return the number of the call that returns each tensor. Inputs of the model have none."""
        return {tensor: number for number, call in enumerate(self.calls) for tensor in call.outputs}

    def mixing(self) -> list[Call]:
        """Return the calls that take samples, and return a tensor without them, such as a mean over a batch."""

        def has_samples(number: int) -> bool:
            shape = self.tensors[number].shape
            return len(shape) > 0 and shape[0] is None

        return [
            call
            for call in self.calls
            if any(map(has_samples, call.inputs)) and not all(map(has_samples, call.outputs))
        ]

    def crossing(self, end: int) -> list[int]:
        """Return the tensors that a cut before a call crosses, by the number of that call. Inputs do not count."""
        producer_of = self.producers()
        last = len(self.calls)
        needed = {tensor for call in self.calls[end:] for tensor in call.inputs}
        needed.update(self.outputs if end < last else ())
        return sorted(tensor for tensor in needed if producer_of.get(tensor, last) < end)


def functional(model: Any) -> Any:
    """Return the functional model that a Sequential model contains, or a functional model itself.

    Raises:
        AppError: The model is neither.
    """
    import keras
    from keras.src.models.functional import Functional

    function = model._functional if isinstance(model, keras.Sequential) else model
    keras_call = keras.Sequential.call if isinstance(model, keras.Sequential) else Functional.call
    has_own_call = type(model).call is not keras_call
    if not isinstance(function, Functional) or has_own_call:
        raise AppError(
            f"split cuts Sequential and functional models, and {model.name!r} is a {type(model).__name__} with its own call",
            hint="build it with keras.Sequential or keras.Model(inputs, outputs), or leave out split",
        )
    return function


def _nodes(function: Any) -> Iterator[Any]:
    """Yield Keras's nodes of a functional model in the order in which it computes them."""
    for depth in sorted(function._nodes_by_depth, reverse=True):
        yield from (node for node in function._nodes_by_depth[depth] if node.operation and not node.is_input)


def bytes_of(tensor: Any) -> int:
    """Return the bytes of a symbolic tensor for one sample. An unknown dimension counts 1."""
    kind = str(tensor.dtype)
    itemsize = 2 if kind == "bfloat16" else np.dtype(kind).itemsize
    return int(itemsize * prod(size or 1 for size in tensor.shape[1:]))


def products_of(operation: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Return about how many multiplications a call takes for one sample.

    Each matrix of weights is applied at each position of the output, or at each step of the input of a recurrent
    layer. One multiplication is added for each output value.
    """
    values = sum(prod(size or 1 for size in tensor.shape[1:]) for tensor in outputs)
    layers = list(operation._flatten_layers()) if hasattr(operation, "_flatten_layers") else []
    products = values
    for layer in layers:
        kernels = [weight for weight in layer._trainable_variables if len(weight.shape) > 1]
        if not kernels or "Embedding" in type(layer).__name__:
            continue
        positions = max((prod(size or 1 for size in tensor.shape[1:-1]) for tensor in outputs), default=1)
        if "RNN" in [kind.__name__ for kind in type(operation).__mro__]:
            positions = max(prod(size or 1 for size in tensor.shape[1:-1]) for tensor in inputs)
        products += positions * sum(prod(weight.shape) for weight in kernels)
    return products


def check_graph(graph: Graph) -> None:
    """Raise an error for a model with a feature that does not work in parts.

    Raises:
        AppError: Names the layer.
        ConfigError: Names the layer, for features that a later release may support.
    """
    import keras

    model = graph.model
    kind = type(model)
    for method in ("train_step", "compute_loss", "compute_metrics", "make_train_function"):
        if getattr(kind, method) is not getattr(keras.Model, method):
            raise AppError(
                f"{kind.__name__} has its own {method}, and with split no worker has the whole model to call it with",
                hint=f"leave out {method}, or leave out split",
            )
    for layer in model._flatten_layers(include_self=False):
        if getattr(layer, "stateful", False):
            raise AppError(
                f"the layer {layer.name!r} is stateful: its state would depend on the order of micro-batches",
                hint="set stateful=False, or leave out split",
            )
        if getattr(layer, "activity_regularizer", None) is not None:
            raise ConfigError(
                f"split does not support the activity_regularizer of the layer {layer.name!r}: its loss depends on whole batches",
                hint="use kernel_regularizer, or leave out split",
            )
        if type(layer).__name__ == "Masking" or getattr(layer, "mask_zero", False):
            raise ConfigError(
                f"split does not support masks, and the layer {layer.name!r} makes one: masks do not travel between parts",
                hint="leave out mask_zero and Masking, or leave out split",
            )
    _check_loss(model)
    _check_optimizer(model.optimizer)


def _check_loss(model: Any) -> None:
    from keras.src.trainers.compile_utils import CompileLoss

    compiled = model._compile_loss
    if not isinstance(compiled, CompileLoss):
        raise AppError(
            "split needs a loss in compile",
            hint='give it a loss, such as "categorical_crossentropy", or leave out split',
        )
    check_mean_losses(model, "split")


def _check_optimizer(optimizer: Any) -> None:
    import keras

    from ddlf.training.slot.optimizers import chain

    if optimizer is None:
        raise AppError(
            "split needs the compiled optimizer, and the model has none", hint="compile it with an optimizer"
        )
    for inner in chain(optimizer):
        if type(inner).__name__ == "LossScaleOptimizer":
            raise ConfigError(
                "split does not support LossScaleOptimizer: each part would choose its own scale of the loss",
                hint="compile the model with the inner optimizer, or leave out split",
            )
    if len(list(chain(optimizer))) > 1 or getattr(optimizer, "optimizers", None):
        raise ConfigError(
            f"split does not support {type(optimizer).__name__}, an optimizer around others: each part has only its own gradients",
            hint="compile the model with the inner optimizer, or leave out split",
        )
    usual = keras.optimizers.Optimizer
    for method in ("apply", "apply_gradients", "stateless_apply"):
        if getattr(type(optimizer), method) is not getattr(usual, method):
            raise ConfigError(
                f"{type(optimizer).__name__} has its own {method}, and each part has only its own gradients",
                hint="use an optimizer that only has its own update_step, or leave out split",
            )
    if getattr(optimizer, "loss_scale_factor", None):
        raise ConfigError("split does not support loss_scale_factor", hint="leave it out of the optimizer")
    if getattr(optimizer, "use_ema", False):
        raise ConfigError(
            "split does not support averages of the weights (use_ema)", hint="leave out use_ema, or leave out split"
        )
