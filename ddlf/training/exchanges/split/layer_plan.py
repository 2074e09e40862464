"""Chooses how each layer is cut between the p workers of a stage. Pure functions of layers, without a network.

Units need not divide evenly: of 10 units, 3 workers have 4, 3 and 3. Layers that treat each unit alone, such as
activations, pooling and batch normalization, follow their input. Normalizations over units exchange sums. A convolution
may also be cut by image rows.

All other layers stay whole: each worker that needs the result computes all of it. A gradient that flows through a whole
layer is then a part of a sum, as the layers behind it are cut; since gradients are linear, their sum is right.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddlf.errors import ConfigError
from ddlf.training.exchanges.split.graph import Call, bytes_of
from ddlf.training.exchanges.split.images import WHOLE_WEIGHTS, Averaged, filtered, pooled
from ddlf.training.exchanges.split.statistics import (
    Exchanged,
    NormalizedRows,
    NormalizedUnits,
    RootMeanSquare,
    Softmax,
    of_units,
    pairs_of_channels,
    pairs_of_units,
)
from ddlf.training.exchanges.split.units import ROWS, UNITS, Piece, Units, same_units, shares
from ddlf.training.exchanges.split.ways import Alike, Columns, Embedded, Heads, Noise, Rows, Way


@dataclass(frozen=True)
class Chooser:
    """Chooses how a call is computed.

    Args:
        call: The call.
        inputs: The symbolic tensors that it takes.
        outputs: The symbolic tensors that it returns.
        cut: For each input, the units that each worker has; None for a whole one.
        has_whole_inputs: Whether each worker has all of each input anyway.
        workers: The number of workers.
        by_rows: Whether to cut a convolution by image rows.
    """

    call: Call
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    cut: Sequence[Units | None]
    has_whole_inputs: bool
    workers: int
    by_rows: bool = False

    def way(self) -> Way:
        """Return how the call is computed."""
        layer = self.call.operation
        kind = type(layer)
        rules = _rules_of_rows() if any(units is not None and units.axis == ROWS for units in self.cut) else {}
        rule = rules.get(kind) or _rules().get(kind)
        way = rule(self, layer) if rule else Way(f"a layer {kind.__name__} is not cut")
        if (way.gives is not None or way.adds) and _casts(layer, self.inputs):
            return Way("it computes in another type than its weights or its input have")
        if way.gives is None and not (way.adds or way.reason) and any(units is not None for units in self.cut):
            way = Way(f"a layer {kind.__name__} needs all of its input")
        for variable in getattr(layer, "weights", ()):
            if id(variable) in way.pieces and (reason := _uncuttable(variable)):
                return Way(reason)
        return way

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
        if self.by_rows:
            way = filtered(layer, self.inputs[0].shape, self._rows, self.workers)
            if way.gives is not None:
                return way
        return self._linear(layer, layer.filters, "filters")

    @property
    def _units(self) -> Units | None:
        """The units of the first input that each worker has; None if all have all, or rows."""
        return None if self.cut[0] is None or self.cut[0].axis != UNITS else self.cut[0]

    @property
    def _rows(self) -> Units | None:
        """The rows of the first input that each worker has; None if all have all, or units."""
        return None if self.cut[0] is None or self.cut[0].axis != ROWS else self.cut[0]

    def _linear(self, layer: Any, units: int, unit_name: str) -> Way:
        input_units, bias = self._units, layer.bias if layer.use_bias else None
        few = units < self.workers
        gives = None if few else shares(units, self.workers)
        biased = {} if bias is None or few else {id(bias): Piece(0, shares(units, self.workers))}
        cheap = bytes_of(self.outputs[0]) <= bytes_of(self.inputs[0])
        if input_units is not None and (few or (cheap and not self.has_whole_inputs)):
            return Rows(takes=input_units, gives=gives, pieces={id(layer._kernel): Piece(-2, input_units), **biased})
        if gives is None:
            return Way(f"it has {units} {unit_name} for {self.workers} parts")
        return Columns(gives=gives, pieces={id(layer._kernel): Piece(-1, gives), **biased})

    def attention(self, layer: Any) -> Way:
        """Cut an attention layer by heads."""
        heads, workers = layer._num_heads, self.workers
        if heads < workers:
            return Way(f"it has {heads} heads for {workers} parts")
        if len(self.outputs) > 1 or len(self.inputs[0].shape) != 3 or len(layer._output_dense.kernel.shape) != 3:
            return Way("it returns scores, or has more than one axis of attention or of outputs")
        head_units, width = shares(heads, workers), self.outputs[0].shape[-1]
        pieces = {}
        gate = [layer._gate_dense] if getattr(layer, "_use_gate", False) else []
        for dense in (layer._query_dense, layer._key_dense, layer._value_dense, *gate):
            pieces[id(dense.kernel)] = Piece(1, head_units)
            if dense.bias is not None:
                pieces[id(dense.bias)] = Piece(0, head_units)
        dense, gives = layer._output_dense, None if width < workers else shares(width, workers)
        pieces[id(dense.kernel)] = Piece(0, head_units)
        if dense.bias is not None and gives is not None:
            pieces[id(dense.bias)] = Piece(0, gives)
        return Heads(gives=gives, pieces=pieces, heads=head_units)

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

        first = next((units for units in self.cut if units is not None), None)
        shapes = {tuple(symbol.shape) for symbol in self.inputs}
        if getattr(layer, "data_format", "channels_last") != "channels_last":
            return Way()
        if first is None or len(shapes) > 1 or _has_arrays(self.call.node):
            return Way()
        if isinstance(layer, keras.layers.Activation) and not is_elementwise(layer.activation, first):
            return Way()
        return Alike(takes=first, gives=first)

    def softmax(self, layer: Any) -> Way:
        """Let a softmax over the last axis exchange numbers."""
        first = self.cut[0]
        if first is None or not is_softmax_layer(layer) or _has_arrays(self.call.node):
            return self.alike(layer)
        if first.axis == ROWS:
            return Alike(takes=first, gives=first)
        return softmax_of(first, self.inputs[0].shape)

    def per_unit(self, layer: Any) -> Way:
        """Cut a layer with weights for each unit."""
        shape, workers = self.inputs[0].shape, self.workers
        axis = getattr(layer, "axis", -1)
        last = axis in (-1, len(shape) - 1) and len(shape) - 1 not in (getattr(layer, "shared_axes", None) or ())
        if not last or getattr(layer, "renorm", False):
            return Way("its weights are not for each unit")
        if shape[-1] < workers:
            return Way(f"it has {shape[-1]} units for {workers} parts")
        units = self._units or shares(shape[-1], workers)
        variables = [*layer.trainable_variables, *layer.non_trainable_variables]
        return Alike(takes=units, gives=units, pieces={id(variable): Piece(-1, units) for variable in variables})

    def layer_normalization(self, layer: Any) -> Way:
        """Cut a LayerNormalization over units that are cut."""
        (first,), last = self.cut, [len(self.inputs[0].shape) - 1]
        if layer.rms_scaling or list(layer.axis) not in (last, [-1]):
            return Way("it normalizes over other axes than the last one, or with rms_scaling")
        return self._normalized(layer, first, NormalizedUnits, pairs_of_units)

    def rms_normalization(self, layer: Any) -> Way:
        """Cut an RMSNormalization over units that are cut."""
        (first,), last = self.cut, [len(self.inputs[0].shape) - 1]
        if list(layer.axis if isinstance(layer.axis, (list, tuple)) else [layer.axis]) not in (last, [-1]):
            return Way("it normalizes over other axes than the last one")
        return self._normalized(layer, first, RootMeanSquare, of_units)

    def _normalized(self, layer: Any, first: Units | None, kind: type[Exchanged], shape: Callable[..., Any]) -> Way:
        if first is not None and first.axis == ROWS:
            return Alike(WHOLE_WEIGHTS if layer.weights else "", takes=first, gives=first)
        if first is None or self.has_whole_inputs:
            return Way("all workers have its whole input anyway")
        pieces = {id(variable): Piece(0, first) for variable in layer.trainable_variables}
        return kind(takes=first, gives=first, pieces=pieces, shape=shape(self.inputs[0].shape))

    def batch_of_rows(self, layer: Any) -> Way:
        """Let a BatchNormalization of images that are cut by rows exchange means and variances."""
        shape, rows = self.inputs[0].shape, self._rows
        if rows is None or layer.axis not in (-1, len(shape) - 1) or layer.renorm or shape[-1] is None:
            return self.per_unit(layer)
        positions = Units(rows.of, ROWS)
        return NormalizedRows(WHOLE_WEIGHTS, takes=positions, gives=positions, shape=pairs_of_channels(shape))

    def pool_of_rows(self, layer: Any) -> Way:
        """Cut a pooling layer by image rows."""
        rows = self._rows
        if rows is None or layer.data_format != "channels_last":
            return Way()
        return pooled(layer, self.inputs[0].shape, rows, self.workers)

    def average_of_rows(self, layer: Any) -> Way:
        """Add up the mean over an image that is cut by rows."""
        rows, shape = self._rows, self.inputs[0].shape
        if rows is None or layer.data_format != "channels_last" or None in shape[1:] or layer.keepdims:
            return Way()
        gives = None if shape[-1] < self.workers else shares(shape[-1], self.workers)
        return Averaged(takes=rows, gives=gives, positions=int(np.prod(shape[1:-1])))

    def flatten_rows(self, layer: Any) -> Way:
        """Cut the result of Flatten, where the rows of a worker follow each other."""
        rows, shape = self._rows, self.inputs[0].shape
        if rows is None or layer.data_format != "channels_last" or None in shape[1:]:
            return Way()
        row = np.arange(int(np.prod(shape[2:])))
        return Alike(takes=rows, gives=Units(tuple((own_rows[:, None] * len(row) + row).ravel() for own_rows in rows)))

    def concatenate_rows(self, layer: Any) -> Way:
        """Cut a Concatenate layer on another axis than the rows."""
        rank, first = len(self.inputs[0].shape), self._rows
        if first is None or layer.axis % rank == ROWS or any(not same_units(units, first) for units in self.cut):
            return Way()
        return Alike(takes=first, gives=first)

    def noise(self, layer: Any) -> Way:
        """Let a layer that multiplies by noise follow the units of its input."""
        units = self.cut[0]
        return Way() if units is None else Noise(takes=units, gives=units)

    def flatten(self, layer: Any) -> Way:
        """Cut the result of Flatten, where the units of a worker lie apart."""
        units, shape = self._units, self.inputs[0].shape
        if units is None or layer.data_format != "channels_last" or None in shape[1:]:
            return Way()
        offsets = np.arange(int(np.prod(shape[1:-1])))[:, None] * shape[-1]
        return Alike(takes=units, gives=Units(tuple((offsets + own_units).ravel() for own_units in units)))

    def concatenate(self, layer: Any) -> Way:
        """Cut a Concatenate layer on another axis than its last one."""
        rank = len(self.inputs[0].shape)
        first = next((units for units in self.cut if units is not None), None)
        if first is None or layer.axis in (-1, rank - 1) or any(not same_units(units, first) for units in self.cut):
            return Way()
        return Alike(takes=first, gives=first)


def _has_arrays(node: Any) -> bool:
    """Return whether a call takes arrays that other calls do not compute, such as constants."""
    import keras

    arguments = keras.tree.flatten((node.arguments.args, node.arguments.kwargs))
    return any(
        np.ndim(argument) > 0
        for argument in arguments
        if not isinstance(argument, keras.KerasTensor) and hasattr(argument, "shape")
    )


def is_elementwise(function: Any, units: Units | None = None) -> bool:
    """Return whether an activation treats each value alone; with units that are rows, each row."""
    import keras
    from keras.src.activations import ALL_OBJECTS

    across = set() if units is not None and units.axis == ROWS else {"softmax", "log_softmax", "sparsemax", "glu"}
    if isinstance(function, keras.layers.Layer):
        return type(function) in _simple_activations()
    return function is None or (function in ALL_OBJECTS and function.__name__ not in across)


def softmax_of(units: Units, shape: Sequence[int | None]) -> Softmax:
    """Return how a softmax over units that are cut is computed, from the shape of the whole tensor."""
    return Softmax(takes=units, gives=units, shape=of_units(shape))


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


def _casts(layer: Any, inputs: Sequence[Any]) -> bool:
    """Return whether a layer computes in another type of floating point than its weights or its inputs have."""
    import keras

    if not isinstance(layer, keras.layers.Layer):
        return False
    kinds = {layer.variable_dtype, *(str(tensor.dtype) for tensor in inputs if "float" in str(tensor.dtype))}
    return kinds != {layer.compute_dtype}


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
        layers.LayerNormalization: Chooser.layer_normalization,
        layers.RMSNormalization: Chooser.rms_normalization,
        **dict.fromkeys(drops, Chooser.noise),
        **dict.fromkeys(alike, Chooser.alike),
        **dict.fromkeys((layers.Activation, layers.Softmax), Chooser.softmax),
    }


@functools.cache
def _rules_of_rows() -> Mapping[type, Callable[[Chooser, Any], Way]]:
    """Return the rule for each kind of layer whose input may be cut by image rows, if it differs from the usual one."""
    import keras

    layers = keras.layers
    sizes = (1, 2, 3)
    pools = [getattr(layers, f"{kind}Pooling{n}D") for n in sizes for kind in ("Max", "Average")]
    whole_layers = [getattr(layers, f"{kind}{n}D") for n in sizes for kind in ("UpSampling", "ZeroPadding", "Cropping")]
    whole_layers += [getattr(layers, f"GlobalMaxPooling{n}D") for n in sizes]
    return {
        layers.BatchNormalization: Chooser.batch_of_rows,
        layers.PReLU: lambda chooser, layer: Way("its weights are not for each row"),
        layers.Flatten: Chooser.flatten_rows,
        layers.Concatenate: Chooser.concatenate_rows,
        **dict.fromkeys(pools, Chooser.pool_of_rows),
        **{getattr(layers, f"GlobalAveragePooling{n}D"): Chooser.average_of_rows for n in sizes},
        **dict.fromkeys(whole_layers, lambda chooser, layer: Way()),
    }


def is_convolution(layer: Any) -> bool:
    """Return whether a layer is a convolution that may be cut by image rows."""
    return _rules().get(type(layer)) is Chooser.convolution


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
