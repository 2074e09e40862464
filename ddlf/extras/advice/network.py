"""Collects the facts of a compiled Keras model: layers, outputs, losses and optimizer. Runs where a model is.

This module neither calls the model nor draws random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ddlf.data.trees import leaves
from ddlf.extras.advice.facts import USUAL_CUT, WEIGHTED, LayerFacts, OptimizerFacts, OutputFacts
from ddlf.training.slot.variables import is_made

ARGUMENTS = frozenset(
    {"units", "filters", "kernel_size", "strides", "padding", "rate", "use_bias", "data_format", "groups", "input_dim"}
    | {"output_dim", "mask_zero", "activation", "pool_size", "dilation_rate", "momentum", "scale", "offset", "axis"}
    | {"num_heads", "key_dim", "return_sequences", "name", "stddev", "seed"}
)
"""Arguments of layers that rules use."""
ACTIVATIONS = {"Softmax": "softmax", "ReLU": "relu", "LeakyReLU": "leaky_relu", "PReLU": "prelu", "ELU": "elu"} | {
    "Sigmoid": "sigmoid",
    "Tanh": "tanh",
    "Relu": "relu",
    "Gelu": "gelu",
    "Silu": "silu",
}
"""Layers and operations that are activations."""
LINEAR = WEIGHTED | {"Bias"}
SCALING = {
    f"{name}{ends.title()}": (scale, mode, ends)
    for name, scale, mode in (("Glorot", 1.0, "avg"), ("He", 2.0, "in"), ("Lecun", 1.0, "in"))
    for ends in ("uniform", "normal")
}
"""Initializers that depend on the size of the kernel: the scale of the variance, the size, and the distribution."""
ENOUGH_VALUES = 100
MOST_LAYERS = 5_000
LOSSES = {
    "categorical_crossentropy": "cce",
    "sparse_categorical_crossentropy": "sce",
    "binary_crossentropy": "bce",
    "binary_focal_crossentropy": "bce",
    "categorical_focal_crossentropy": "cce",
    "mean_squared_error": "mse",
    "mean_absolute_error": "mae",
    "mean_absolute_percentage_error": "mape",
    "mean_squared_logarithmic_error": "msle",
    "huber": "huber",
    "log_cosh": "logcosh",
    "logcosh": "logcosh",
    "kl_divergence": "kld",
    "kullback_leibler_divergence": "kld",
    "poisson": "poisson",
    "hinge": "hinge",
    "squared_hinge": "hinge",
    "categorical_hinge": "categorical_hinge",
    "cosine_similarity": "cosine",
}
"""Keras's losses by the names of their functions, with the names that rules use."""
SHAPED = frozenset(
    {
        "Reshape",
        "Flatten",
        "Permute",
        "Dropout",
        "SpatialDropout1D",
        "SpatialDropout2D",
        "Identity",
        "Squeeze",
        "ExpandDims",
    }
    | {"ActivityRegularization", "Cast", "Transpose", "Cropping1D", "Cropping2D", "RepeatVector"}
)
"""Layers and operations that do not change values."""
CUT = frozenset(
    {
        "BinaryAccuracy",
        "Precision",
        "Recall",
        "F1Score",
        "TruePositives",
        "TrueNegatives",
        "FalsePositives",
        "FalseNegatives",
    }
)
CUT_BY_NAME = frozenset({*CUT, "binary_accuracy"})
"""Metrics with a threshold."""
GATED = {"LSTM": "tanh", "GRU": "tanh", "SimpleRNN": "tanh"}
KINDS = {
    "matmul": "Dense",
    "gemm": "Dense",
    "conv2d": "Conv2D",
    "convTranspose2d": "Conv2DTranspose",
    "relu": "ReLU",
    "leakyRelu": "LeakyReLU",
    "prelu": "PReLU",
    "elu": "ELU",
    "gelu": "Gelu",
    "sigmoid": "Sigmoid",
    "tanh": "Tanh",
    "softmax": "Softmax",
    "dropout": "Dropout",
    "batchNormalization": "BatchNormalization",
    "layerNormalization": "LayerNormalization",
    "instanceNormalization": "GroupNormalization",
    "residual": "Add",
    "concat": "Concatenate",
    "attend": "MultiHeadAttention",
    "averagePool2d": "AveragePooling2D",
    "maxPool2d": "MaxPooling2D",
    "reshape": "Reshape",
    "identity": "Identity",
    "cast": "Cast",
    "transpose": "Transpose",
}
OF_TWO = {"add": "Add", "sub": "Subtract", "mul": "Multiply", "max": "Maximum"}
"""Operators that combine a layer with another layer."""
LEARNED = ("Dense", "Conv2D", "Conv2DTranspose")


def layers_of(model: Any) -> tuple[LayerFacts, ...]:
    """Return the facts of a model's layers and operations in the order of computation, including those of nested
    models.

    The layers of a subclassed model have no known inputs.
    """
    facts: list[LayerFacts] = []
    if (graph := graph_of(model)) is None:
        return tuple(
            _layer(layer, (), None, None)
            for layer in model._flatten_layers(include_self=False)
            if not _has_layers(layer)
        )
    _walk(graph, {}, facts)
    return tuple(facts[:MOST_LAYERS])


def graph_of(model: Any) -> Any:
    """Return the functional model inside a model, which knows how layers are connected; None if it has none."""
    if getattr(model, "_functional", None) is not None:
        return model._functional
    return model if hasattr(model, "_nodes_by_depth") and hasattr(model, "_operations") else None


def _has_layers(layer: Any) -> bool:
    return bool(list(layer._flatten_layers(include_self=False, recursive=False)))


def _walk(graph: Any, names: dict[int, str], facts: list[LayerFacts]) -> dict[int, str]:
    """Collect the operations of a graph, and return the name of the operation that computes each tensor.

    Args:
        graph: A functional model.
        names: For a nested model, the operations that compute its inputs.
        facts: The dict to add operations to.
    """
    names = dict(names)
    indices = {layer.name: index for index, layer in enumerate(facts)}
    for depth in sorted(graph._nodes_by_depth, reverse=True):
        for node in graph._nodes_by_depth[depth]:
            operation, inputs = node.operation, list(node.input_tensors)
            if not inputs:  # an InputLayer: a nested model reads the outer tensor
                for tensor in node.outputs:
                    names.setdefault(id(tensor), operation.name)
                continue
            reads = tuple(dict.fromkeys(names[id(tensor)] for tensor in inputs if id(tensor) in names))
            if (inner := graph_of(operation)) is not None:
                input_names = [names.get(id(tensor), "") for tensor in inputs]
                inner_names = {id(tensor): name for tensor, name in zip(inner._inputs, input_names, strict=False)}
                inner_outputs = _walk(inner, inner_names, facts)
                for outer, inner_output in zip(node.outputs, inner._outputs, strict=False):
                    names[id(outer)] = inner_outputs.get(id(inner_output), operation.name)
                indices = {layer.name: index for index, layer in enumerate(facts)}
                continue
            if operation.name not in indices:
                indices[operation.name] = len(facts)
                facts.append(_layer(operation, reads, inputs[0], node.outputs[0]))
            for tensor in node.outputs:
                names[id(tensor)] = operation.name
    return names


def _layer(operation: Any, reads: tuple[str, ...], before: Any, after: Any) -> LayerFacts:
    config, kind = config_of(operation), type(operation).__name__
    if config.keys() >= {"operator", "operands", "types"}:  # the layer is an operator of a text
        kind, config = as_layer(config)
    weights = list(getattr(operation, "weights", ()))
    kernel: Any = _kernel(operation, kind)
    spread, initializer = _initializer(config.get("kernel_initializer"))
    return LayerFacts(
        name=operation.name,
        kind=kind,
        reads=reads,
        config={name: value for name, value in config.items() if name in ARGUMENTS and _is_plain(value)},
        activation=_activation(kind, config),
        input_shape=shape_of(before),
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
    except Exception:  # a custom layer without a config
        return {}


def _is_plain(value: Any) -> bool:
    return (
        value is None
        or isinstance(value, bool | int | float | str)
        or (isinstance(value, list | tuple) and all(isinstance(item, int) for item in value))
    )


def _activation(kind: str, config: Mapping[str, Any]) -> str:
    if kind in ACTIVATIONS:
        return ACTIVATIONS[kind]
    activation = config.get("activation")
    if isinstance(activation, Mapping):  # a custom initializer, or one with arguments
        activation = activation.get("config") if isinstance(activation.get("config"), str) else "own"
    return activation if isinstance(activation, str) else "linear" if kind in LINEAR else ""


def _initializer(initializer: Any) -> tuple[float | None, str]:
    if not isinstance(initializer, Mapping):
        return None, ""
    config = initializer.get("config") or {}
    spread = config.get("stddev") if isinstance(config, Mapping) else None
    if spread is None and isinstance(config, Mapping) and isinstance(config.get("maxval"), int | float):
        spread = abs(config["maxval"] - config.get("minval", 0)) / math.sqrt(12)
    return spread if isinstance(spread, int | float) else None, str(initializer.get("class_name", ""))


def _penalty(config: Mapping[str, Any]) -> float:
    strengths = [0.0]
    for name in ("kernel_regularizer", "bias_regularizer", "activity_regularizer", "embeddings_regularizer"):
        if isinstance(regularizer := config.get(name), Mapping) and isinstance(regularizer.get("config"), Mapping):
            strengths += [
                float(regularizer["config"][key])
                for key in ("l1", "l2")
                if isinstance(regularizer["config"].get(key), int | float)
            ]
    return max(strengths)


def _kernel(operation: Any, kind: str) -> Any:
    kernel: Any = getattr(operation, "_kernel", None)
    if kernel is None and kind in LINEAR:
        parameters = getattr(operation, "learned", None)  # the parameters of an operator
        kernel = parameters[0] if parameters else getattr(operation, "kernel", None)
    return kernel if hasattr(kernel, "shape") and len(kernel.shape) > 1 else None


def _equal(kernel: Any) -> float | None:
    """Return the common value of all weights of a kernel; None if they differ."""
    try:
        import keras

        if not is_made(kernel):  # the model spans workers: a few values of its initializer, not all, which need memory
            few = keras.ops.convert_to_numpy(kernel._initializer((2,) * len(kernel.shape), dtype=kernel.dtype))
            return float(few.flat[0]) if few.min() == few.max() else None
        sample = keras.ops.convert_to_numpy(
            kernel.value[..., :2] if math.prod(kernel.shape) > 1 << 16 else kernel.value
        )
        if not sample.size or sample.min() != sample.max():
            return None
        values = keras.ops.convert_to_numpy(kernel.value)
    except Exception:  # the weights have no values yet
        return None
    return float(values.flat[0]) if values.min() == values.max() else None


def _not_adapted(operation: Any, kind: str) -> bool:
    """Return whether a Normalization still has its initial mean and variance."""
    if kind != "Normalization" or getattr(operation, "input_mean", None) is not None:
        return False
    mean, variance = (getattr(operation, name, None) for name in ("adapt_mean", "adapt_variance"))
    if mean is None or variance is None:
        return False
    import keras

    return not keras.ops.convert_to_numpy(mean).any() and bool((keras.ops.convert_to_numpy(variance) == 1).all())


def _untouched(operation: Any, kernel: Any, initializer: Any) -> bool:
    """Return whether a frozen layer still seems to have its initial weights.

    Its kernel then has the range and deviation of its initializer, and biases are 0.
    """
    scaling = SCALING.get(initializer.get("class_name", "")) if isinstance(initializer, Mapping) else None
    if scaling is None or kernel is None or kernel.trainable or math.prod(kernel.shape) < ENOUGH_VALUES:
        return False
    try:
        import keras

        values, bias = keras.ops.convert_to_numpy(kernel.value), getattr(operation, "bias", None)
        if bias is not None and keras.ops.convert_to_numpy(bias.value).any():
            return False
    except Exception:  # the weights have no values yet
        return False
    positions = math.prod(kernel.shape[:-2])
    ins, outs = kernel.shape[-2] * positions, kernel.shape[-1] * positions
    scale, mode, distribution = scaling
    std = math.sqrt(scale / ((ins + outs) / 2 if mode == "avg" else ins))
    largest = std * (math.sqrt(3) if distribution == "uniform" else 2 / 0.8796)
    tolerance = 4 / math.sqrt(values.size)
    return bool(abs(values).max() <= largest * 1.0001 and abs(float(values.std()) / std - 1) < tolerance)


def shape_of(tensor: Any) -> tuple[int | None, ...]:
    shape = getattr(tensor, "shape", None)
    return () if shape is None else tuple(None if size is None else int(size) for size in shape[1:])


def heads_of(model: Any, layers: tuple[LayerFacts, ...], y: Any) -> tuple[OutputFacts, ...]:
    """Return the model's outputs with their losses, metrics and targets.

    Args:
        model: A compiled Keras model.
        layers: The result of ``layers_of``.
        y: The training labels: an array, or a tree of arrays.
    """
    graph = graph_of(model)
    if graph is None:
        return ()
    output_keys = _output_names(model, graph)
    targets = dict(_per_output(output_keys, _target_names(y)))
    losses = dict(_per_output(output_keys, getattr(model, "loss", None)))
    metrics = dict(_per_output(output_keys, _metrics(model)))
    heads = []
    for (name, key), tensor in zip(output_keys, graph._outputs, strict=True):
        last, activation = _origin(tensor._keras_history.operation, layers)
        loss, logits = _loss(losses.get(key))
        heads.append(
            OutputFacts(
                name=name,
                layer=last,
                shape=shape_of(tensor),
                activation=activation,
                loss="own" if has_own_step(model) and loss else loss,
                logits=logits,
                metrics=tuple(_names(metrics.get(key))),
                cuts=tuple(_cuts(metrics.get(key), loss)),
                target=targets.get(key) or "",
            )
        )
    return tuple(heads)


def has_own_train_step(model: Any) -> bool:
    """Return whether the model overrides ``train_step``."""
    import keras

    return type(model).train_step is not keras.Model.train_step


def has_own_step(model: Any) -> bool:
    """Return whether the model overrides ``train_step`` or ``compute_loss``."""
    import keras

    return has_own_train_step(model) or type(model).compute_loss is not keras.Model.compute_loss


def is_own(model: Any) -> bool:
    """Return whether the user's model computes its training step or its loss in its own way."""
    return has_own_step(model) or (callable(loss := getattr(model, "loss", None)) and _loss(loss)[0] == "own")


def _output_names(model: Any, graph: Any) -> list[tuple[str, Any]]:
    """Return the name of each output with the key of its loss and labels: a name or a number."""
    struct = getattr(graph, "_outputs_struct", None)
    names = list(graph.output_names)
    if isinstance(struct, Mapping):
        by_id = {id(tensor): key for key, tensor in struct.items()}
        return [
            (str(by_id.get(id(tensor), name)), by_id.get(id(tensor), name))
            for name, tensor in zip(names, graph._outputs, strict=True)
        ]
    return [(name, number) for number, name in enumerate(names)]


def _per_output(output_keys: list[tuple[str, Any]], argument: Any) -> Iterator[tuple[Any, Any]]:
    """Yield for each output the value that an argument of ``compile``, such as ``loss``, gives to it."""
    if argument is None:
        return
    for number, (name, key) in enumerate(output_keys):
        if isinstance(argument, Mapping):
            yield key, argument.get(key, argument.get(name))
        elif isinstance(argument, list | tuple) and len(output_keys) > 1:
            yield key, argument[number] if number < len(argument) else None
        else:
            yield key, argument[0] if isinstance(argument, list | tuple) and len(argument) == 1 else argument


def _target_names(y: Any) -> Any:
    """Return the tree of label arrays with the name of each array, such as ``y_train['left']``, in its place."""
    if y is None:
        return None
    names = [name for name, _ in leaves(y, "y_train")]
    if isinstance(y, Mapping):
        return dict(zip(y, names, strict=False)) if len(names) == len(y) else None
    return names if isinstance(y, list | tuple) else names[0]


def _metrics(model: Any) -> Any:
    return getattr(getattr(model, "_compile_metrics", None), "_user_metrics", None)


def _names(metrics: Any) -> Iterator[str]:
    for metric in metrics if isinstance(metrics, list | tuple) else [] if metrics is None else [metrics]:
        if isinstance(metric, list | tuple):
            yield from _names(metric)
        elif isinstance(metric, str):
            yield metric
        else:
            yield getattr(metric, "__name__", None) or type(metric).__name__


def _cuts(metrics: Any, loss: str) -> Iterator[tuple[str, float]]:
    """Yield each metric that has a threshold, with the threshold."""
    for metric in metrics if isinstance(metrics, list | tuple) else [] if metrics is None else [metrics]:
        if isinstance(metric, list | tuple):
            yield from _cuts(metric, loss)
        elif isinstance(metric, str):
            if metric in CUT_BY_NAME or (loss == "bce" and metric in ("accuracy", "acc")):
                yield metric, USUAL_CUT
        elif (name := type(metric).__name__) in CUT:
            config = config_of(metric)
            cut = config.get("thresholds", config.get("threshold"))
            if not config.get("top_k") and not (name == "F1Score" and cut is None):
                yield from ((name, float(threshold)) for threshold in np.ravel(USUAL_CUT if cut is None else cut))


def _loss(loss: Any) -> tuple[str, bool]:
    """Return the short name of a loss in the adviser's rules, such as ``"cce"``, and whether the loss expects logits."""
    if loss is None:
        return "", False
    import keras

    if isinstance(loss, str):
        try:
            loss = keras.losses.get(loss)
        except ValueError:
            return "own", False
    function = getattr(loss, "fn", loss)
    name = getattr(function, "__name__", "")
    if not str(getattr(function, "__module__", "")).startswith("keras."):
        return "own", False
    kwargs = getattr(loss, "_fn_kwargs", None) or {}
    return LOSSES.get(name, "own"), bool(getattr(loss, "from_logits", kwargs.get("from_logits", False)))


def _origin(operation: Any, layers: tuple[LayerFacts, ...]) -> tuple[str, str]:
    """Return the name of the layer that computes an output, and its activation. Each is empty if it is unknown."""
    by_name = {layer.name: layer for layer in layers}
    name = operation.name
    while (inner := graph_of(operation)) is not None:
        operation = inner._outputs[0]._keras_history.operation
        name = operation.name
    while (layer := by_name.get(name)) is not None:
        if layer.kind in SHAPED and len(layer.reads) == 1:
            name = layer.reads[0]
            continue
        return name, layer.activation or GATED.get(layer.kind, "")
    return name, ""


def optimizer_of(model: Any) -> OptimizerFacts | None:
    """Return facts about the optimizer that the model is compiled with; None without one."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return None
    scales = type(optimizer).__name__ == "LossScaleOptimizer"
    inner = optimizer.inner_optimizer if scales else optimizer
    learning_rate = getattr(inner, "_learning_rate", None)
    rate, schedule, steps = _rate(learning_rate)
    fades = _fades(schedule, config_of(learning_rate)) if schedule else None
    clips = [getattr(inner, name, None) for name in ("clipnorm", "global_clipnorm", "clipvalue")]
    decay = getattr(inner, "weight_decay", None)
    momentum = getattr(inner, "momentum", 0.0)
    return OptimizerFacts(
        kind=type(inner).__name__,
        rate=rate,
        schedule=schedule,
        steps=steps,
        fades=fades,
        scales_loss=scales,
        keeps=_keeps(type(inner).__name__, momentum),
        clip=min((float(clip) for clip in clips if clip), default=None),
        decay=float(decay) if isinstance(decay, int | float) else 0.0,
        momentum=float(momentum) if isinstance(momentum, int | float) else 0.0,
    )


def _keeps(kind: str, momentum: Any) -> int:
    if kind == "SGD":
        return int(bool(momentum))
    return {"RMSprop": 1, "Adagrad": 1, "Lion": 1}.get(kind, 2)


def _fades(kind: str, config: Mapping[str, Any]) -> int | None:
    """Return the number of steps until an endless schedule is below 1 % of its first rate."""
    steps, rate = config.get("decay_steps"), config.get("decay_rate")
    if not (isinstance(steps, int | float) and isinstance(rate, int | float)):
        return None
    if kind == "ExponentialDecay" and 0 < rate < 1:
        return math.ceil(steps * math.log(0.01) / math.log(rate))
    return math.ceil(99 * steps / rate) if kind == "InverseTimeDecay" and rate > 0 else None


def _rate(learning_rate: Any) -> tuple[float, str, int | None]:
    """Return the highest learning rate, the class of the schedule, and its number of steps."""
    import keras

    if isinstance(learning_rate, keras.optimizers.schedules.LearningRateSchedule):
        config = config_of(learning_rate)
        rate = max(float(config.get("initial_learning_rate") or 0.0), float(config.get("warmup_target") or 0.0))
        steps = config.get("decay_steps")
        kind = type(learning_rate).__name__
        if kind == "PiecewiseConstantDecay":
            rate = max(map(float, config.get("values") or [0.0]))
            steps = max(config.get("boundaries") or [0])
        if kind in ("CosineDecay",) and isinstance(steps, int | float):
            steps = steps + (config.get("warmup_steps") or 0)
        is_planned = kind in ("CosineDecay", "PolynomialDecay", "PiecewiseConstantDecay") and isinstance(
            steps, int | float
        )
        is_custom = not type(learning_rate).__module__.startswith("keras.")
        return (math.nan if is_custom else rate), kind, int(steps) if is_planned and steps is not None else None
    try:
        return float(np.asarray(keras.ops.convert_to_numpy(learning_rate))), "", None
    except Exception:  # the layer is a function
        return math.nan, "", None


def as_layer(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the kind and arguments of the Keras layer that equals an operator of a model text. If no Keras layer
    equals it, return the operator's own name and arguments.

    Args:
        config: The config of the layer that contains the operator.
    """
    name, options, learned = config["operator"], config["options"], config["parameters"]
    inputs = len(config["types"]) - 1
    kind = KINDS.get(name, name)
    if name == "linear":
        kind = "Rescaling" if "alpha" in options else "Identity"
    if name in OF_TWO:
        kind = OF_TWO[name] if inputs > 1 else "Bias" if name in ("add", "sub") and learned else name
    if kind in LEARNED and not learned:
        return name, {}
    arguments: dict[str, Any] = {"name": config.get("name")}
    if kind in LEARNED:
        arguments["use_bias"] = len(learned) > 1
    if kind.startswith("Conv"):
        layout = options.get("filterLayout", "oihw")
        shape = learned[0][1]
        arguments["filters"] = shape[layout.index("o")]
        arguments["kernel_size"] = [shape[layout.index(letter)] for letter in "hw"]
        arguments["strides"], arguments["dilation_rate"] = (
            options.get("strides", [1, 1]),
            options.get("dilations", [1, 1]),
        )
        arguments["data_format"] = "channels_first" if options.get("inputLayout", "nchw") == "nchw" else "channels_last"
    if kind.endswith("Pooling2D") and "windowDimensions" in options:
        arguments["pool_size"], arguments["strides"] = options["windowDimensions"], options.get("strides", [1, 1])
    if kind == "Dropout":
        arguments["rate"] = options.get("p", 0.5)
    return kind, arguments
