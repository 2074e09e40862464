"""Knows the arguments of all Keras layers, and shapes and parameters of common ones. Pure: does not import Keras.

``keras_layers.txt`` lists each layer of Keras 3.15 with its arguments, and ``keras_training.txt`` each optimizer, schedule
and penalty. Another name may be a custom layer, whose output shape and parameters are unknown.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

Shape = tuple[int | None, ...]
COMMON = ("dtype", "trainable", "input_shape", "batch_input_shape", "activity_regularizer")
"""Arguments that every layer of Keras takes."""
COUNTS = ("units", "filters", "input_dim", "output_dim", "num_heads", "key_dim")
"""Arguments that are sizes in every layer."""
INNER = ("ops.numpy", "ops.nn", "ops.core", "ops.math", "ops.linalg", "ops.image", "applications.convnext")
"""Keras's packages of operations without layers. For example, ``x + y`` is ``numpy>Add``."""


@functools.cache
def arguments() -> dict[str, tuple[str, ...]]:
    """Return the arguments of each Keras layer."""
    return _listed("keras_layers.txt")


def training_objects(kind: str) -> dict[str, tuple[str, ...]]:
    """Return the arguments of each ``"optimizer"``, ``"schedule"`` or ``"penalty"`` of Keras."""
    listed = _listed("keras_training.txt").items()
    return {name.removeprefix(f"{kind} "): names for name, names in listed if name.startswith(f"{kind} ")}


def _listed(file: str) -> dict[str, tuple[str, ...]]:
    text = (Path(__file__).parent / file).read_text(encoding="ascii")
    return {
        name: tuple(arguments.split()) for name, _, arguments in (line.partition(":") for line in text.splitlines())
    }


_SAME = frozenset((
    "Activation", "ActivityRegularization", "AlphaDropout", "Dropout", "ELU", "GaussianDropout", "GaussianNoise", "Identity",
    "LeakyReLU", "ReLU", "Rescaling", "Softmax", "SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D", "Masking",
    "UnitNormalization", "RandomFlip", "RandomRotation", "RandomTranslation", "RandomZoom", "RandomContrast", "RandomBrightness", "Add",
    "Subtract", "Multiply", "Average", "Maximum", "Minimum",
))  # fmt: skip


_MERGING = frozenset(("Add", "Subtract", "Multiply", "Average", "Maximum", "Minimum"))
_MOVING = frozenset(f"{kind}{rank}D" for kind in ("ZeroPadding", "Cropping", "UpSampling") for rank in (1, 2, 3))


def shape_of(
    name: str, options: dict[str, Any], before: Shape | None, other_shapes: Sequence[Shape | None] = ()
) -> Shape | None:
    """Return the shape of a layer's output without the batch, or None if it is unknown.

    Args:
        name: The name of the layer.
        options: The layer's arguments as plain values.
        before: The shape of its input.
        other_shapes: The shapes of its further inputs.
    """
    try:
        shape = (
            _merged(name, options, [before, *other_shapes])
            if other_shapes and (name in _MERGING or name == "Concatenate")
            else _shape_of(name, options, before)
        )
        return shape if shape is None or _are_sizes(shape) else None
    except (TypeError, ValueError, IndexError, KeyError, ArithmeticError):
        return None  # a value that Keras will refuse


def _merged(name: str, options: dict[str, Any], shapes: list[Shape | None]) -> Shape | None:
    """Return the shape of tensors that are joined along an axis, or merged elementwise."""
    known_shapes = [shape for shape in shapes if shape is not None]
    if len(known_shapes) < len(shapes) or len({len(shape) for shape in known_shapes}) > 1:
        return None
    axis = options.get("axis", -1) if name == "Concatenate" else None
    if axis == 0:  # the batch
        return None
    axis = axis - 1 if axis is not None and axis > 0 else axis
    joined = axis % len(known_shapes[0]) if axis is not None else None
    merged: list[int | None] = []
    for at, sizes in enumerate(zip(*known_shapes, strict=True)):
        if None in sizes:
            merged.append(None)
        else:
            merged.append(sum(sizes) if at == joined else max(sizes))
    return tuple(merged)


def _are_sizes(shape: Shape) -> bool:
    return all(size is None or (isinstance(size, int) and size > 0) for size in shape)


def _shape_of(name: str, options: dict[str, Any], before: Shape | None) -> Shape | None:
    if name == "Reshape":
        return tuple(options["target_shape"]) if min(options["target_shape"]) > 0 else None
    if name == "RepeatVector" and before is not None:
        return (options["n"], *before)
    if before is None:
        return None
    if name in _SAME or name in ("LayerNormalization", "BatchNormalization", "GroupNormalization", "RMSNormalization"):
        return before
    if name == "Dense":
        return (*before[:-1], options["units"])
    if name == "Embedding":
        return (*before, options["output_dim"])
    if name == "Permute":
        return tuple(before[axis - 1] for axis in options["dims"])
    if name == "Flatten":
        return (prod(before),) if None not in before else (None,)  # type: ignore[arg-type]
    if name in ("LSTM", "GRU", "SimpleRNN"):
        return (before[0], options["units"]) if options.get("return_sequences") else (options["units"],)
    if options.get("data_format") == "channels_first":
        return None
    rank = len(before) - 1
    if name in _MOVING:
        return (*_moved(name, options, before), before[-1])
    if name in ("Resizing", "CenterCrop") and rank == 2:
        return (options["height"], options["width"], before[-1])
    if name in _CONVOLUTIONS:
        kernel, strides, dilation = (
            _per_axis(options.get(key, 1), rank) for key in ("kernel_size", "strides", "dilation_rate")
        )
        padding = options.get("padding", "valid")
        if name.endswith("Transpose"):
            if options.get("output_padding") is not None:
                return None
            return (*map(_spread, before, kernel, strides, dilation, [padding] * rank), options["filters"])
        last = options.get("filters")
        if name.startswith("Depthwise"):
            last = None if before[-1] is None else before[-1] * options.get("depth_multiplier", 1)
        return (*map(_slid, before, kernel, strides, dilation, [padding] * rank), last)
    if "Global" in name and "Pool" in name:
        return (*[1] * rank, before[-1]) if options.get("keepdims") else (before[-1],)
    if name in ("MaxPooling1D", "MaxPooling2D", "AveragePooling1D", "AveragePooling2D", "MaxPool2D", "AvgPool2D"):
        window = options.get("pool_size", 2)
        pool, strides = _per_axis(window, rank), _per_axis(options.get("strides") or window, rank)
        padding = options.get("padding", "valid")
        return (*map(_slid, before, pool, strides, [1] * rank, [padding] * rank), before[-1])
    return None


_CONVOLUTIONS = frozenset((
    "Conv1D", "Conv2D", "Conv3D", "SeparableConv1D", "SeparableConv2D", "DepthwiseConv1D", "DepthwiseConv2D", "Conv1DTranspose",
    "Conv2DTranspose", "Conv3DTranspose",
))  # fmt: skip


def _spread(size: int | None, window: int, stride: int, dilation: int, padding: str) -> int | None:
    """Return the size of an axis after a transposed convolution."""
    if size is None or padding not in ("valid", "same"):
        return None
    return size * stride + (max(dilation * (window - 1) + 1 - stride, 0) if padding == "valid" else 0)


def _moved(name: str, options: dict[str, Any], before: Shape) -> list[int | None]:
    """Return the sizes of all axes after a layer that pads, crops or upsamples."""
    rank = len(before) - 1
    if name.startswith("Up"):
        times = _per_axis(options.get("size", 2), rank)
        return [None if size is None else size * item for size, item in zip(before, times, strict=False)]
    key = "padding" if name.startswith("Zero") else "cropping"
    edges = options.get(key, 1)
    if rank == 1 and not isinstance(edges, int):
        edges = [edges]
    widths = [axis * 2 if isinstance(axis, int) else sum(axis) for axis in _per_axis(edges, rank)]
    sign = 1 if name.startswith("Zero") else -1
    return [None if size is None else size + sign * width for size, width in zip(before, widths, strict=False)]


def _per_axis(value: Any, rank: int) -> list[int]:
    return [value] * rank if isinstance(value, int) else list(value)


def _slid(size: int | None, window: int, stride: int, dilation: int, padding: str) -> int | None:
    if size is None or padding not in ("valid", "same"):
        return None
    return -(-size // stride) if padding == "same" else (size - dilation * (window - 1) - 1) // stride + 1


def parameters_of(name: str, options: dict[str, Any], before: Shape | None) -> list[tuple[str, Shape]] | None:
    """Return name and shape of each parameter of a layer; None if they are unknown.

    Args:
        name: The name of the layer.
        options: The layer's arguments as plain values.
        before: The shape of its input.
    """
    try:
        result = _parameters_of(name, options, before)
        return result if result is None or all(_are_sizes(shape) for _, shape in result) else None
    except (TypeError, ValueError, IndexError, KeyError):
        return None


def _parameters_of(name: str, options: dict[str, Any], before: Shape | None) -> list[tuple[str, Shape]] | None:
    if (
        name in _SAME
        or name in ("Flatten", "Reshape", "RepeatVector", "Permute", "Concatenate", "Dot")
        or "Pool" in name
        or name in _MOVING
        or name in ("Resizing", "CenterCrop")
    ):
        return []
    if name == "Embedding":
        return [("embeddings", (options["input_dim"], options["output_dim"]))]
    if before is None or not before:
        return None
    biased = options.get("use_bias", True)
    last = before[-1]
    if name == "Dense":
        return [("kernel", (last, options["units"]))] + [("bias", (options["units"],))] * biased
    if name in ("Conv1D", "Conv2D", "Conv3D"):
        kernel = _per_axis(options["kernel_size"], len(before) - 1)
        channels = None if last is None else last // options.get("groups", 1)
        return [("kernel", (*kernel, channels, options["filters"]))] + [("bias", (options["filters"],))] * biased
    if name in _CONVOLUTIONS:
        return _filters_of(name, options, before, biased)
    if name in ("LayerNormalization", "BatchNormalization"):
        axis = options.get("axis", -1)
        size = (before[axis if axis < 0 else axis - 1],)
        result = [("gamma", size)] * options.get("scale", True) + [("beta", size)] * options.get("center", True)
        return result + [("moving_mean", size), ("moving_variance", size)] * (name[0] == "B")
    if name in ("LSTM", "GRU", "SimpleRNN"):
        units, gates = options["units"], {"LSTM": 4, "GRU": 3, "SimpleRNN": 1}[name]
        bias = (2, gates * units) if name == "GRU" and options.get("reset_after", True) else (gates * units,)
        kernels: list[tuple[str, Shape]] = [
            ("kernel", (last, gates * units)),
            ("recurrent_kernel", (units, gates * units)),
        ]
        return kernels + [("bias", bias)] * biased
    return None


def _filters_of(name: str, options: dict[str, Any], before: Shape, biased: bool) -> list[tuple[str, Shape]] | None:
    """Return the parameters of transposed, depthwise and separable convolutions."""
    kernel, last = _per_axis(options["kernel_size"], len(before) - 1), before[-1]
    if last is None or options.get("data_format") == "channels_first":
        return None
    if name.endswith("Transpose"):
        return [("kernel", (*kernel, options["filters"], last))] + [("bias", (options["filters"],))] * biased
    times = options.get("depth_multiplier", 1)
    if name.startswith("Depthwise"):
        return [("kernel", (*kernel, last, times))] + [("bias", (last * times,))] * biased
    point = (*[1] * len(kernel), last * times, options["filters"])
    result: list[tuple[str, Shape]] = [("depthwise_kernel", (*kernel, last, times)), ("pointwise_kernel", point)]
    return result + [("bias", (options["filters"],))] * biased
