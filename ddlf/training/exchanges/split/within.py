"""How a single layer is cut: each of p workers has some of its units. Pure functions of layers, without a network.

For a layer y = f(x W + b), and shares x_k, y_k of the units of x and y::

    columns:  y_k = f(x W[:, k] + b[k])                      each worker needs all of x, and has its share of y
    rows:     z_k = x_k W[k, :],   y_k = f(sum of z [k] + b[k])   each worker needs its share of x, and adds up its share of y

So a layer by rows that follows a layer by columns only needs its sum. A convolution has filters for columns, and
channels for rows. Attention has heads: its output projection is a layer by rows. Units need not divide evenly: of 10
units, 3 workers have 4, 3 and 3.

Layers that treat each unit alone, such as activations, pooling and batch normalization, follow their input. All other
layers stay whole: each worker that needs the result computes all of it. A gradient that flows through a whole layer is
then a part of a sum, as the layers behind it are cut; since gradients are linear, their sum is right.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from ddlf.errors import ConfigError
from ddlf.training.exchanges.split.graph import Call, bytes_of

Units = tuple[np.ndarray[Any, Any], ...]
"""For each worker of a group, the indices of its units, on the last axis of a tensor."""


def shares(units: int, workers: int) -> Units:
    """Return which units each worker has, in order. Their numbers differ by at most 1; the first ones have more."""
    return tuple(np.array_split(np.arange(units), workers))


def same(one: Units | None, other: Units | None) -> bool:
    """Return whether each worker has the same units."""
    if one is None or other is None:
        return one is other
    return one is other or all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def run_of(indices: np.ndarray[Any, Any]) -> slice | None:
    """Return indices that follow each other as a slice; None for others."""
    begin = int(indices[0])
    return (
        slice(begin, begin + len(indices)) if np.array_equal(indices, np.arange(begin, begin + len(indices))) else None
    )


def take(tensor: Any, indices: np.ndarray[Any, Any]) -> Any:
    """Return some units of a tensor."""
    import keras

    found = run_of(indices)
    return tensor[..., found] if found else keras.ops.take(tensor, indices, axis=-1)


def joined(tensors: Sequence[Any], units: Units) -> Any:
    """Return a tensor from the shares of all workers."""
    import keras

    whole = keras.ops.concatenate(list(tensors), axis=-1)
    order = np.concatenate(units)
    return whole if run_of(order) else keras.ops.take(whole, np.argsort(order), axis=-1)


@dataclass(frozen=True, slots=True)
class Piece:
    """How a weight is cut.

    Args:
        axis: The axis that is cut.
        units: For each worker, the indices that it has.
    """

    axis: int
    units: Units

    def of(self, value: np.ndarray[Any, Any], worker: int) -> np.ndarray[Any, Any]:
        """Return the share of a worker. ``value`` may also be a variable of an optimizer, with the same shape."""
        return np.take(value, self.units[worker], axis=self.axis)

    def join(self, values: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        """Return the whole weight from the shares of all workers."""
        whole = np.concatenate(list(values), axis=self.axis)
        return np.take(whole, np.argsort(np.concatenate(self.units)), axis=self.axis)

    def share(self, worker: int) -> float:
        """Return the share of the weight that a worker has, from 0 to 1."""
        return len(self.units[worker]) / sum(map(len, self.units))


@dataclass(frozen=True)
class Way:
    """How a call of a layer is computed. This one is for a layer that stays whole.

    Args:
        why: Why the layer stays whole; "" if it is cut, or has no weights.
        takes: The units of the input that each worker needs; None if it needs all.
        gives: The units of the output that each worker computes; None if it computes all.
        pieces: How weights are cut, by the ``id`` of the variable. Others are whole.
    """

    name: ClassVar[str] = "whole"
    adds: ClassVar[bool] = False
    """Whether the outputs of all workers must be added up, and ``gives`` are the units of the sum."""

    why: str = ""
    takes: Units | None = None
    gives: Units | None = None
    pieces: Mapping[int, Piece] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def counted(self) -> Units | None:
        """The units that each worker has, as people count them; None if all have all."""
        return self.takes if self.adds and self.takes is not None else self.gives

    def activation(self, layer: Any) -> Callable[[Any], Any] | None:
        """Return the function that follows the call, if ``compute`` leaves it out; None without one."""
        return None

    def bias(self, layer: Any) -> Any:
        """Return the variable that is added after the sum; None without one."""
        return None

    def adapt(self, layer: Any, worker: int) -> None:
        """Prepare a layer of a worker's own model."""
        if self.pieces:
            layer.input_spec = None  # it would demand the sizes of the whole layer

    def compute(
        self, call: Call, symbols: Sequence[Any], values: Sequence[Any], worker: int, training: bool
    ) -> list[Any]:
        """Compute the call on a worker.

        Args:
            call: The call.
            symbols: Keras's symbolic tensors of its inputs.
            values: Their values, as far as ``takes`` has them.
            worker: Number of the worker in its group, from 0.
            training: Whether layers behave as in training.
        """
        import keras
        from keras.src.models.functional import operation_fn

        args, options = call.node.arguments.fill_in(
            {id(one): value for one, value in zip(symbols, values, strict=True)}
        )
        return list(keras.tree.flatten(operation_fn(call.operation, training=training)(*args, **options)))


@dataclass(frozen=True)
class Alike(Way):
    """A layer that treats each unit alone: each worker has the units of its share."""

    name: ClassVar[str] = "unit by unit"


@dataclass(frozen=True)
class Noise(Alike):
    """Multiplies by noise. Each worker draws the noise of all units, so that the cut does not change it."""

    def compute(
        self, call: Call, symbols: Sequence[Any], values: Sequence[Any], worker: int, training: bool
    ) -> list[Any]:
        """Compute the call on a worker."""
        assert self.takes is not None
        if not training:
            return [values[0]]
        return [values[0] * noise(call.operation, values[0], -1, self.takes, worker)]


def noise(layer: Any, value: Any, axis: int, units: Units, worker: int) -> Any:
    """Return the noise of a dropout layer, a factor, for a worker's share of the units on an axis."""
    import keras

    shape = list(keras.ops.shape(value))
    shape[axis] = sum(map(len, units))
    return keras.ops.take(layer(keras.ops.ones(shape, value.dtype), training=True), units[worker], axis=axis)


@dataclass(frozen=True)
class Linear(Way):
    """A layer y = f(x W + b) that is cut: a Dense layer or a convolution."""

    def activation(self, layer: Any) -> Callable[[Any], Any] | None:
        """Return f; None for the identity."""
        import keras

        return None if layer.activation in (None, keras.activations.linear) else layer.activation

    def bias(self, layer: Any) -> Any:
        """Return b; None without one."""
        return layer.bias if layer.use_bias else None

    def compute(
        self, call: Call, symbols: Sequence[Any], values: Sequence[Any], worker: int, training: bool
    ) -> list[Any]:
        """Compute x W on a worker, without b."""
        import keras

        layer, value = call.operation, keras.ops.cast(values[0], call.operation.compute_dtype)
        if hasattr(layer, "units"):
            return [keras.ops.matmul(value, layer.kernel)]
        padding = layer.padding
        if padding == "causal":
            value, padding = keras.ops.pad(value, layer._compute_causal_padding()), "valid"
        return [
            keras.ops.conv(
                value,
                layer.kernel,
                strides=list(layer.strides),
                padding=padding,
                dilation_rate=layer.dilation_rate,
                data_format=layer.data_format,
            )
        ]


@dataclass(frozen=True)
class Columns(Linear):
    """Each worker has some columns of W, or some filters."""

    name: ClassVar[str] = "columns"


@dataclass(frozen=True)
class Rows(Linear):
    """Each worker has some rows of W, or the filters of some channels of the input."""

    name: ClassVar[str] = "rows"
    adds: ClassVar[bool] = True


@dataclass(frozen=True)
class Heads(Way):
    """Each worker has some heads of an attention layer.

    Args:
        heads: The heads of each worker.
    """

    name: ClassVar[str] = "heads"
    adds: ClassVar[bool] = True
    heads: Units = ()

    @property
    def counted(self) -> Units:
        """The heads of each worker."""
        return self.heads

    def bias(self, layer: Any) -> Any:
        """Return the bias of the output projection; None without one."""
        return vars(layer._output_dense).get("bias_of_sum", layer._output_dense.bias)

    def adapt(self, layer: Any, worker: int) -> None:
        """Take the bias from the output projection, since it is added once, and let dropout draw for all heads."""
        dense = layer._output_dense
        if "bias_of_sum" in vars(dense):
            return
        vars(dense).update(bias_of_sum=dense.bias, bias=None)
        if layer._dropout > 0:
            inner, heads = layer._dropout_layer, self.heads
            vars(layer)["_dropout_layer"] = lambda scores, training=None: (
                scores * noise(inner, scores, 1, heads, worker) if training else scores
            )


@dataclass(frozen=True)
class Chooser:
    """Chooses how a call is computed.

    Args:
        call: The call.
        inputs: The symbolic tensors that it takes.
        outputs: The symbolic tensors that it returns.
        cut: For each input, the units that each worker has; None for a whole one.
        held: Whether each worker has all of each input anyway.
        workers: The number of workers.
    """

    call: Call
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    cut: Sequence[Units | None]
    held: bool
    workers: int

    def way(self) -> Way:
        """Return how the call is computed."""
        layer = self.call.operation
        kind = type(layer)
        rule = _rules().get(kind)
        found = rule(self, layer) if rule else Way(f"a layer {kind.__name__} is not cut")
        for variable in getattr(layer, "weights", ()):
            if id(variable) in found.pieces and (why := _uncuttable(variable)):
                return Way(why)
        return found

    # -- layers with matrices -----------------------------------------------------------------------------------------

    def dense(self, layer: Any) -> Way:
        """Cut a Dense layer by columns or by rows."""
        if getattr(layer, "quantization_mode", None) or layer.lora_enabled:
            return Way("it is quantized, or has LoRA")
        return self._linear(layer, layer.units, "units")

    def convolution(self, layer: Any) -> Way:
        """Cut a convolution by filters, or by the channels of its input."""
        if layer.data_format != "channels_last" or layer.groups > 1 or getattr(layer, "lora_enabled", False):
            return Way("its channels are first, or it has groups or LoRA")
        return self._linear(layer, layer.filters, "filters")

    def _linear(self, layer: Any, units: int, what: str) -> Way:
        (before,), bias = self.cut, layer.bias if layer.use_bias else None
        few = units < self.workers
        gives = None if few else shares(units, self.workers)
        biased = {} if bias is None or few else {id(bias): Piece(0, shares(units, self.workers))}
        cheap = bytes_of(self.outputs[0]) <= bytes_of(self.inputs[0])
        if before is not None and (few or (cheap and not self.held)):
            return Rows(takes=before, gives=gives, pieces={id(layer._kernel): Piece(-2, before), **biased})
        if gives is None:
            return Way(f"it has {units} {what} for {self.workers} parts")
        return Columns(gives=gives, pieces={id(layer._kernel): Piece(-1, gives), **biased})

    def attention(self, layer: Any) -> Way:
        """Cut an attention layer by heads."""
        heads, workers = layer._num_heads, self.workers
        if heads < workers:
            return Way(f"it has {heads} heads for {workers} parts")
        if len(self.outputs) > 1 or len(self.inputs[0].shape) != 3 or len(layer._output_dense.kernel.shape) != 3:
            return Way("it returns scores, or has more than one axis of attention or of outputs")
        found, width = shares(heads, workers), self.outputs[0].shape[-1]
        pieces = {}
        gate = [layer._gate_dense] if getattr(layer, "_use_gate", False) else []
        for dense in (layer._query_dense, layer._key_dense, layer._value_dense, *gate):
            pieces[id(dense.kernel)] = Piece(1, found)
            if dense.bias is not None:
                pieces[id(dense.bias)] = Piece(0, found)
        dense, gives = layer._output_dense, None if width < workers else shares(width, workers)
        pieces[id(dense.kernel)] = Piece(0, found)
        if dense.bias is not None and gives is not None:
            pieces[id(dense.bias)] = Piece(0, gives)
        return Heads(gives=gives, pieces=pieces, heads=found)

    def embedding(self, layer: Any) -> Way:
        """Cut an embedding by the units of its output."""
        if layer.output_dim < self.workers or getattr(layer, "lora_enabled", False) or layer.quantization_mode:
            return Way(f"it has {layer.output_dim} units for {self.workers} parts, or LoRA")
        gives = shares(layer.output_dim, self.workers)
        return Embedded(gives=gives, pieces={id(layer._embeddings): Piece(1, gives)})

    # -- layers that treat each unit alone ----------------------------------------------------------------------------

    def alike(self, layer: Any) -> Way:
        """Let a layer follow the units of its input; if it has several, of the first one that is cut."""
        import keras

        first = next((one for one in self.cut if one is not None), None)
        shapes = {tuple(one.shape) for one in self.inputs}
        if getattr(layer, "data_format", "channels_last") != "channels_last":
            return Way()
        if first is None or len(shapes) > 1 or _has_arrays(self.call.node):
            return Way()
        if isinstance(layer, keras.layers.Activation) and not is_elementwise(layer.activation):
            return Way()
        return Alike(takes=first, gives=first)

    def per_unit(self, layer: Any) -> Way:
        """Cut a layer with weights for each unit."""
        shape, workers = self.inputs[0].shape, self.workers
        axis = getattr(layer, "axis", -1)
        last = axis in (-1, len(shape) - 1) and len(shape) - 1 not in (getattr(layer, "shared_axes", None) or ())
        if not last or getattr(layer, "renorm", False):
            return Way("its weights are not for each unit")
        if shape[-1] < workers:
            return Way(f"it has {shape[-1]} units for {workers} parts")
        units = self.cut[0] if self.cut[0] is not None else shares(shape[-1], workers)
        variables = [*layer.trainable_variables, *layer.non_trainable_variables]
        return Alike(takes=units, gives=units, pieces={id(one): Piece(-1, units) for one in variables})

    def noise(self, layer: Any) -> Way:
        """Let a layer that multiplies by noise follow the units of its input."""
        units = self.cut[0]
        return Way() if units is None else Noise(takes=units, gives=units)

    def flatten(self, layer: Any) -> Way:
        """Cut the result of Flatten, where the units of a worker lie apart."""
        units, shape = self.cut[0], self.inputs[0].shape
        if units is None or layer.data_format != "channels_last" or None in shape[1:]:
            return Way()
        places = np.arange(int(np.prod(shape[1:-1])))[:, None] * shape[-1]
        return Alike(takes=units, gives=tuple((places + one).ravel() for one in units))

    def concatenate(self, layer: Any) -> Way:
        """Cut a Concatenate layer on another axis than its last one."""
        rank = len(self.inputs[0].shape)
        first = next((one for one in self.cut if one is not None), None)
        if first is None or layer.axis in (-1, rank - 1) or any(not same(one, first) for one in self.cut):
            return Way()
        return Alike(takes=first, gives=first)


@dataclass(frozen=True)
class Embedded(Way):
    """Each worker has some units of an embedding."""

    name: ClassVar[str] = "units"


def _has_arrays(node: Any) -> bool:
    """Return whether a call takes arrays that other calls do not compute, such as constants."""
    import keras

    arguments = keras.tree.flatten((node.arguments.args, node.arguments.kwargs))
    return any(
        np.ndim(one) > 0 for one in arguments if not isinstance(one, keras.KerasTensor) and hasattr(one, "shape")
    )


def is_elementwise(function: Any) -> bool:
    """Return whether an activation treats each value alone."""
    import keras
    from keras.src.activations import ALL_OBJECTS

    across = {"softmax", "log_softmax", "sparsemax", "glu"}
    if isinstance(function, keras.layers.Layer):
        return type(function) in _simple_activations()
    return function is None or (function in ALL_OBJECTS and function.__name__ not in across)


def is_softmax(function: Any) -> bool:
    """Return whether an activation is Keras's softmax over the last axis."""
    import keras

    return function is keras.activations.softmax


def is_softmax_layer(layer: Any) -> bool:
    """Return whether a layer is only a softmax over the last axis."""
    import keras

    layers = keras.layers
    return (type(layer) is layers.Activation and is_softmax(layer.activation)) or (
        type(layer) is layers.Softmax and layer.axis == -1
    )


def _simple_activations() -> tuple[type, ...]:
    import keras

    layers = keras.layers
    return layers.ReLU, layers.LeakyReLU, layers.ELU, layers.Identity


def _uncuttable(variable: Any) -> str:
    """Return why a weight cannot be cut; "" if it can."""
    import keras

    regularizer, constraint = variable.regularizer, getattr(variable, "constraint", None)
    if type(regularizer) not in (type(None), keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2):
        return f"its regularizer {type(regularizer).__name__} needs whole weights"
    if type(constraint) not in (type(None), keras.constraints.NonNeg):
        return f"its constraint {type(constraint).__name__} needs whole weights"
    return ""


@functools.cache
def _rules() -> Mapping[type, Callable[[Chooser, Any], Way]]:
    """Return the rule for each kind of layer that is cut. Subclasses may compute something else, so they stay whole."""
    import keras
    from keras.src.ops import nn
    from keras.src.ops import numpy as arrays

    layers = keras.layers
    sizes = (1, 2, 3)
    pools = [getattr(layers, f"{kind}Pooling{n}D") for n in sizes for kind in ("Max", "Average")]
    pools += [getattr(layers, f"Global{kind}Pooling{n}D") for n in sizes for kind in ("Max", "Average")]
    spatial = [getattr(layers, f"{kind}{n}D") for n in sizes for kind in ("UpSampling", "ZeroPadding", "Cropping")]
    merges = [layers.Add, layers.Subtract, layers.Multiply, layers.Average, layers.Maximum, layers.Minimum]
    operations = [arrays.Add, arrays.Subtract, arrays.Multiply, arrays.Maximum, arrays.Minimum, arrays.Tanh]
    operations += [nn.Relu, nn.Sigmoid, nn.Gelu, nn.Silu]
    drops = [layers.Dropout, layers.GaussianDropout, *(getattr(layers, f"SpatialDropout{n}D") for n in sizes)]
    alike = [layers.Activation, *_simple_activations(), *pools, *spatial, *merges, *operations]
    return {
        layers.Dense: Chooser.dense,
        **{getattr(layers, f"Conv{n}D"): Chooser.convolution for n in sizes},
        layers.MultiHeadAttention: Chooser.attention,
        layers.Embedding: Chooser.embedding,
        layers.BatchNormalization: Chooser.per_unit,
        layers.PReLU: Chooser.per_unit,
        layers.Flatten: Chooser.flatten,
        layers.Concatenate: Chooser.concatenate,
        **dict.fromkeys(drops, Chooser.noise),
        **dict.fromkeys(alike, Chooser.alike),
    }


ELEMENTWISE = ("SGD", "Adam", "AdamW", "Nadam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Ftrl", "Lion")
"""Optimizers of Keras whose step of a weight does not depend on other weights."""


def check_steps(optimizer: Any) -> None:
    """Raise an error for an optimizer whose steps need whole weights.

    Raises:
        ConfigError: Names it.
    """
    import keras

    kinds = [getattr(keras.optimizers, name) for name in ELEMENTWISE]
    if type(optimizer).update_step not in [kind.update_step for kind in kinds]:
        raise ConfigError(
            f"split='within:' cuts weights, and the steps of {type(optimizer).__name__} may depend on whole weights",
            hint=f"use one of {', '.join(ELEMENTWISE)}, or split='stages:N'",
        )
    if optimizer.clipnorm:
        raise ConfigError(
            "split='within:' cuts weights, and clipnorm needs the norm of each whole weight",
            hint="use global_clipnorm, or split='stages:N'",
        )
