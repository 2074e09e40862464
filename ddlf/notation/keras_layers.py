"""Keras's layers by name: their arguments, and the shapes and parameters of those that models mostly have. Pure: Keras itself is not asked.

``keras_layers.txt`` has each layer of Keras 3.15 and its arguments. A layer that is not in there may be one of the user's own; what it gives and
holds is not known here.
"""

from __future__ import annotations

import functools
from math import prod
from pathlib import Path
from typing import Any

Shape = tuple[int | None, ...]
COMMON = ("dtype", "trainable", "input_shape", "batch_input_shape", "activity_regularizer")
"""Arguments that every layer of Keras takes."""


@functools.cache
def arguments() -> dict[str, tuple[str, ...]]:
    """The arguments of each layer."""
    text = (Path(__file__).parent / "keras_layers.txt").read_text(encoding="ascii")
    return {name: tuple(rest.split()) for name, _, rest in (line.partition(":") for line in text.splitlines())}


_SAME = frozenset((
    "Activation", "ActivityRegularization", "AlphaDropout", "Dropout", "ELU", "GaussianDropout", "GaussianNoise", "Identity",
    "LeakyReLU", "ReLU", "Rescaling", "Softmax", "SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D", "Masking",
    "UnitNormalization", "RandomFlip", "RandomRotation", "RandomTranslation", "RandomZoom", "RandomContrast", "RandomBrightness", "Add",
    "Subtract", "Multiply", "Average", "Maximum", "Minimum",
))  # fmt: skip


def shape_of(name: str, options: dict[str, Any], before: Shape | None) -> Shape | None:
    """What a layer gives, without the batch; None if that is not known.

    Args:
        name: The layer.
        options: Its arguments as plain values.
        before: The shape that goes in.
    """
    try:
        shape = _shape_of(name, options, before)
        return shape if shape is None or _are_sizes(shape) else None
    except (TypeError, ValueError, IndexError, KeyError, ArithmeticError):
        return None  # a value that Keras will refuse


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
    if name == "Flatten":
        return (prod(before),) if None not in before else (None,)  # type: ignore[arg-type]
    if name in ("LSTM", "GRU", "SimpleRNN"):
        return (before[0], options["units"]) if options.get("return_sequences") else (options["units"],)
    if options.get("data_format") == "channels_first":
        return None
    rank = len(before) - 1
    if name in ("Conv1D", "Conv2D", "Conv3D"):
        kernel, strides, dilation = (
            _each(options.get(key, 1), rank) for key in ("kernel_size", "strides", "dilation_rate")
        )
        padding = options.get("padding", "valid")
        return (*map(_slid, before, kernel, strides, dilation, [padding] * rank), options["filters"])
    if "Global" in name and "Pool" in name:
        return (*[1] * rank, before[-1]) if options.get("keepdims") else (before[-1],)
    if name in ("MaxPooling1D", "MaxPooling2D", "AveragePooling1D", "AveragePooling2D", "MaxPool2D", "AvgPool2D"):
        window = options.get("pool_size", 2)
        pool, strides = _each(window, rank), _each(options.get("strides") or window, rank)
        padding = options.get("padding", "valid")
        return (*map(_slid, before, pool, strides, [1] * rank, [padding] * rank), before[-1])
    return None


def _each(value: Any, rank: int) -> list[int]:
    return [value] * rank if isinstance(value, int) else list(value)


def _slid(size: int | None, window: int, stride: int, dilation: int, padding: str) -> int | None:
    if size is None or padding not in ("valid", "same"):
        return None
    return -(-size // stride) if padding == "same" else (size - dilation * (window - 1) - 1) // stride + 1


def parameters_of(name: str, options: dict[str, Any], before: Shape | None) -> list[tuple[str, Shape]] | None:
    """Name and shape of each parameter of a layer; None if that is not known.

    Args:
        name: The layer.
        options: Its arguments as plain values.
        before: The shape that goes in.
    """
    try:
        found = _parameters_of(name, options, before)
        return found if found is None or all(_are_sizes(shape) for _, shape in found) else None
    except (TypeError, ValueError, IndexError, KeyError):
        return None


def _parameters_of(name: str, options: dict[str, Any], before: Shape | None) -> list[tuple[str, Shape]] | None:
    if (
        name in _SAME
        or name in ("Flatten", "Reshape", "RepeatVector", "Permute", "Concatenate", "Dot")
        or "Pool" in name
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
        kernel = _each(options["kernel_size"], len(before) - 1)
        channels = None if last is None else last // options.get("groups", 1)
        return [("kernel", (*kernel, channels, options["filters"]))] + [("bias", (options["filters"],))] * biased
    if name in ("LayerNormalization", "BatchNormalization"):
        axis = options.get("axis", -1)
        size = (before[axis if axis < 0 else axis - 1],)
        found = [("gamma", size)] * options.get("scale", True) + [("beta", size)] * options.get("center", True)
        return found + [("moving_mean", size), ("moving_variance", size)] * (name[0] == "B")
    if name in ("LSTM", "GRU", "SimpleRNN"):
        units, gates = options["units"], {"LSTM": 4, "GRU": 3, "SimpleRNN": 1}[name]
        bias = (2, gates * units) if name == "GRU" and options.get("reset_after", True) else (gates * units,)
        kernels: list[tuple[str, Shape]] = [
            ("kernel", (last, gates * units)),
            ("recurrent_kernel", (units, gates * units)),
        ]
        return kernels + [("bias", bias)] * biased
    return None
