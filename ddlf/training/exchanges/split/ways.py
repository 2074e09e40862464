"""How a call of a layer is computed when its layer is cut: ``Way`` and the ways of layers with matrices.

For a layer y = f(x W + b), and shares x_k, y_k of the units of x and y::

    columns:  y_k = f(x W[:, k] + b[k])                      each worker needs all of x, and has its share of y
    rows:     z_k = x_k W[k, :],   y_k = f(sum of z [k] + b[k])   each worker needs its share of x, and adds up its share of y

So a layer by rows that follows a layer by columns only needs its sum. A convolution has filters for columns, and
channels for rows. Attention has heads: its output projection is a layer by rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

from ddlf.training.exchanges.split.graph import Call
from ddlf.training.exchanges.split.units import UNITS, Piece, Units


@dataclass(frozen=True)
class Way:
    """How a call of a layer is computed. This one is for a layer that stays whole.

    Args:
        reason: Why the layer, or a weight of it, stays whole; "" if it is cut, or has whole inputs and no weights.
        takes: The units of the input that each worker needs; None if it needs all.
        gives: The units of the output that each worker computes; None if it computes all.
        pieces: How weights are cut, by the ``id`` of the variable. Others are whole.
    """

    name: ClassVar[str] = "whole"
    adds: ClassVar[bool] = False
    """Whether the outputs of all workers must be added up, and ``gives`` are the units of the sum."""

    reason: str = ""
    takes: Units | None = None
    gives: Units | None = None
    pieces: Mapping[int, Piece] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def counted(self) -> Units | None:
        """The units that each worker has, as people count them; None if all have all."""
        return self.takes if self.adds and self.takes is not None else self.gives

    def describe(self) -> str:
        """Return how the call is cut, for people."""
        units = self.counted
        if units is None:
            return self.name
        by = self.name if units.axis == UNITS else "image rows"
        return f"{by} {', '.join(map(str, units.counts))}"

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
            {id(symbol): value for symbol, value in zip(symbols, values, strict=True)}
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
        return [values[0] * noise(call.operation, values[0], self.takes.axis, self.takes, worker)]


def noise(layer: Any, value: Any, axis: int, units: Units, worker: int) -> Any:
    """Return the noise of a dropout layer, a factor, for a worker's share of the units on an axis."""
    import keras

    shape = list(keras.ops.shape(value))
    shape[axis] = sum(units.counts)
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
    heads: Units = field(default_factory=lambda: Units(()))

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
class Embedded(Way):
    """Each worker has some units of an embedding."""

    name: ClassVar[str] = "units"
