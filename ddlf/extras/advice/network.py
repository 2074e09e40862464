"""What there is to say of a compiled Keras model, without calling it. Runs where a model is; nothing random is drawn, nothing made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ddlf.extras.advice.facts import Layer
from ddlf.extras.advice.operators import as_layer

ARGUMENTS = frozenset(
    {"units", "filters", "kernel_size", "strides", "padding", "rate", "use_bias", "data_format", "groups", "input_dim"}
    | {"output_dim", "mask_zero", "activation", "pool_size", "dilation_rate", "momentum", "scale", "offset", "axis"}
    | {"num_heads", "key_dim", "return_sequences", "name", "stddev", "seed"}
)
"""Arguments of layers that rules look at."""
ACTIVATIONS = {"Softmax": "softmax", "ReLU": "relu", "LeakyReLU": "leaky_relu", "PReLU": "prelu", "ELU": "elu"} | {
    "Sigmoid": "sigmoid",
    "Tanh": "tanh",
    "Relu": "relu",
    "Gelu": "gelu",
    "Silu": "silu",
}
"""Layers and operations that are an activation."""
LINEAR = frozenset(
    {
        "Dense",
        "Bias",
        "EinsumDense",
        "Conv1D",
        "Conv2D",
        "Conv3D",
        "Conv1DTranspose",
        "Conv2DTranspose",
        "Conv3DTranspose",
    }
    | {"SeparableConv1D", "SeparableConv2D", "DepthwiseConv1D", "DepthwiseConv2D"}
)
SCALING = {
    f"{name}{ends.title()}": (scale, mode, ends)
    for name, scale, mode in (("Glorot", 1.0, "avg"), ("He", 2.0, "in"), ("Lecun", 1.0, "in"))
    for ends in ("uniform", "normal")
}
"""Initializers that go by the size of a kernel: variance times it, which size, and what is drawn from."""
ENOUGH_VALUES = 100
MOST_LAYERS = 5_000


def layers_of(model: Any) -> tuple[Layer, ...]:
    """Layers and operations in the order in which they compute, those of nested models among them; of a subclassed model without what they read."""
    found: list[Layer] = []
    if (graph := graph_of(model)) is None:
        return tuple(
            _layer(layer, (), None, None) for layer in model._flatten_layers(include_self=False) if not _below(layer)
        )
    _walk(graph, {}, found)
    return tuple(found[:MOST_LAYERS])


def graph_of(model: Any) -> Any:
    """The functional model behind a model; None if it has none."""
    if getattr(model, "_functional", None) is not None:
        return model._functional
    return model if hasattr(model, "_nodes_by_depth") and hasattr(model, "_operations") else None


def _below(layer: Any) -> bool:
    return bool(list(layer._flatten_layers(include_self=False, recursive=False)))


def _walk(graph: Any, made_by: dict[int, str], found: list[Layer]) -> dict[int, str]:
    """Note each operation of a graph; returns by whom each of its tensors was made.

    Args:
        graph: A functional model.
        made_by: Of its input tensors, if it is nested.
        found: Where operations are noted.
    """
    made_by = dict(made_by)
    places = {one.name: place for place, one in enumerate(found)}
    for depth in sorted(graph._nodes_by_depth, reverse=True):
        for node in graph._nodes_by_depth[depth]:
            operation, inputs = node.operation, list(node.input_tensors)
            if not inputs:  # an InputLayer: that of a nested model is what is outside of it
                for tensor in node.outputs:
                    made_by.setdefault(id(tensor), operation.name)
                continue
            reads = tuple(dict.fromkeys(made_by[id(tensor)] for tensor in inputs if id(tensor) in made_by))
            if (inner := graph_of(operation)) is not None:
                outside = [made_by.get(id(tensor), "") for tensor in inputs]
                known = {id(tensor): name for tensor, name in zip(inner._inputs, outside, strict=False)}
                inside = _walk(inner, known, found)
                for outer, within in zip(node.outputs, inner._outputs, strict=False):
                    made_by[id(outer)] = inside.get(id(within), operation.name)
                places = {one.name: place for place, one in enumerate(found)}
                continue
            if operation.name not in places:
                places[operation.name] = len(found)
                found.append(_layer(operation, reads, inputs[0], node.outputs[0]))
            for tensor in node.outputs:
                made_by[id(tensor)] = operation.name
    return made_by


def _layer(operation: Any, reads: tuple[str, ...], before: Any, after: Any) -> Layer:
    config, kind = config_of(operation), type(operation).__name__
    if config.keys() >= {"operator", "operands", "types"}:  # of a model as text
        kind, config = as_layer(config)
    weights = list(getattr(operation, "weights", ()))
    kernel: Any = _kernel(operation, kind)
    spread, initializer = _initializer(config.get("kernel_initializer"))
    return Layer(
        name=operation.name,
        kind=kind,
        reads=reads,
        config={name: value for name, value in config.items() if name in ARGUMENTS and _is_plain(value)},
        activation=_activation(kind, config),
        before=shape_of(before),
        shape=shape_of(after),
        parameters=sum(math.prod(weight.shape) for weight in weights),
        trained=sum(math.prod(weight.shape) for weight in getattr(operation, "trainable_weights", ())),
        fan_in=0 if kernel is None else math.prod(kernel.shape[:-1]),
        equal=None if kernel is None else _equal(kernel),
        initializer=initializer,
        spread=spread,
        penalty=_penalty(config),
        precision=str(getattr(operation, "compute_dtype", "float32")),
        untouched=_not_adapted(operation, kind) or _untouched(operation, kernel, config.get("kernel_initializer")),
    )


def config_of(operation: Any) -> Mapping[str, Any]:
    try:
        return dict(operation.get_config())
    except Exception:  # one of the user's own, which cannot be saved
        return {}


def _is_plain(value: Any) -> bool:
    return (
        value is None
        or isinstance(value, bool | int | float | str)
        or (isinstance(value, list | tuple) and all(isinstance(one, int) for one in value))
    )


def _activation(kind: str, config: Mapping[str, Any]) -> str:
    if kind in ACTIVATIONS:
        return ACTIVATIONS[kind]
    given = config.get("activation")
    if isinstance(given, Mapping):  # one of the user's own, or one with arguments
        given = given.get("config") if isinstance(given.get("config"), str) else "own"
    return given if isinstance(given, str) else "linear" if kind in LINEAR else ""


def _initializer(given: Any) -> tuple[float | None, str]:
    if not isinstance(given, Mapping):
        return None, ""
    config = given.get("config") or {}
    spread = config.get("stddev") if isinstance(config, Mapping) else None
    if spread is None and isinstance(config, Mapping) and isinstance(config.get("maxval"), int | float):
        spread = abs(config["maxval"] - config.get("minval", 0)) / math.sqrt(12)
    return spread if isinstance(spread, int | float) else None, str(given.get("class_name", ""))


def _penalty(config: Mapping[str, Any]) -> float:
    found = [0.0]
    for name in ("kernel_regularizer", "bias_regularizer", "activity_regularizer", "embeddings_regularizer"):
        if isinstance(given := config.get(name), Mapping) and isinstance(given.get("config"), Mapping):
            found += [
                float(given["config"][one]) for one in ("l1", "l2") if isinstance(given["config"].get(one), int | float)
            ]
    return max(found)


def _kernel(operation: Any, kind: str) -> Any:
    kernel: Any = getattr(operation, "_kernel", None)
    if kernel is None and kind in LINEAR:
        made = getattr(operation, "made", None)  # of an operator
        kernel = made[0] if made else getattr(operation, "kernel", None)
    return kernel if hasattr(kernel, "shape") and len(kernel.shape) > 1 else None


def _equal(kernel: Any) -> float | None:
    """The value that all weights of a kernel have; None if they differ, which some of them show mostly."""
    try:
        import keras

        some = keras.ops.convert_to_numpy(kernel.value[..., :2] if math.prod(kernel.shape) > 1 << 16 else kernel.value)
        if not some.size or some.min() != some.max():
            return None
        whole = keras.ops.convert_to_numpy(kernel.value)
    except Exception:  # nothing that has values yet
        return None
    return float(whole.flat[0]) if whole.min() == whole.max() else None


def _not_adapted(operation: Any, kind: str) -> bool:
    """Whether a layer that is to learn mean and variance from data still has those that it is made with."""
    if kind != "Normalization" or getattr(operation, "input_mean", None) is not None:
        return False
    mean, variance = (getattr(operation, name, None) for name in ("adapt_mean", "adapt_variance"))
    if mean is None or variance is None:
        return False
    import keras

    return not keras.ops.convert_to_numpy(mean).any() and bool((keras.ops.convert_to_numpy(variance) == 1).all())


def _untouched(operation: Any, kernel: Any, given: Any) -> bool:
    """Whether a frozen layer has a kernel as its initializer draws it: no larger, of that deviation, and with biases of 0."""
    scaling = SCALING.get(given.get("class_name", "")) if isinstance(given, Mapping) else None
    if scaling is None or kernel is None or kernel.trainable or math.prod(kernel.shape) < ENOUGH_VALUES:
        return False
    try:
        import keras

        values, bias = keras.ops.convert_to_numpy(kernel.value), getattr(operation, "bias", None)
        if bias is not None and keras.ops.convert_to_numpy(bias.value).any():
            return False
    except Exception:  # nothing that has values yet
        return False
    places = math.prod(kernel.shape[:-2])
    ins, outs = kernel.shape[-2] * places, kernel.shape[-1] * places
    scale, mode, ends = scaling
    std = math.sqrt(scale / ((ins + outs) / 2 if mode == "avg" else ins))
    largest = std * (math.sqrt(3) if ends == "uniform" else 2 / 0.8796)
    near = 4 / math.sqrt(values.size)
    return bool(abs(values).max() <= largest * 1.0001 and abs(float(values.std()) / std - 1) < near)


def shape_of(tensor: Any) -> tuple[int | None, ...]:
    shape = getattr(tensor, "shape", None)
    return () if shape is None else tuple(None if size is None else int(size) for size in shape[1:])
