"""The layer graph of a compiled Keras model, which browsers train. Runs on the server.

A graph is JSON: the weights, layers with their arguments, calls of them in the order of computation, losses, metrics and
the optimizer. Weights have the names that they have in sets, such as ``dense/kernel``. Tensors have numbers: the inputs
come first, then the results of each call. A nested model is written as its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ddlf.errors import ConfigError
from ddlf.peers.browser.supported import (
    ACTIVATIONS,
    BY_SHAPE,
    LAYERS,
    LOSSES,
    METRICS,
    OPTIMIZERS,
    RATES,
    REDUCTIONS,
    Config,
    Listed,
)

FORMAT = 1
"""Number of this format. The engine refuses other ones."""
HINT = "docs/reference/browser.md lists what browsers train; Python peers train every Keras model"
USUAL = ("name", "trainable", "dtype")
ARGUMENTS = {"MultiHeadAttention": ("query", "value", "key"), "LSTM": ("sequences", "initial_state")}
ARGUMENTS |= dict.fromkeys(("SimpleRNN", "GRU"), ARGUMENTS["LSTM"])


def layer_graph(model: Any, weights: Mapping[str, Any]) -> Config:
    """Return the layer graph of a model.

    Args:
        model: A compiled Sequential or functional Keras model.
        weights: Its variables by their names in sets, in the order of a set.

    Raises:
        ConfigError: Browsers cannot train the model exactly as Keras does. The sentence names the part.
    """
    return _Writer(model, weights).graph()


def refusal(part: str) -> ConfigError:
    """Return the error for a part that the engine lacks."""
    return ConfigError(f"browsers cannot train {part}", hint=HINT)


class _Writer:
    """Writes one model."""

    def __init__(self, model: Any, weights: Mapping[str, Any]) -> None:
        self.model = model
        self.weights = weights
        self.names = {id(weight): name for name, weight in weights.items()}
        self.layers: dict[int, Config] = {}
        self.written: list[Config] = []
        self.count = 0

    def graph(self) -> Config:
        model = self.model
        if not getattr(model, "compiled", False):
            raise refusal(f"the model {model.name!r}, which is not compiled")
        if model.dtype_policy.name != "float32":
            raise refusal(f"the model {model.name!r} of type {model.dtype_policy.name}, only float32")
        function = _functional(model)
        outputs = self.calls(model, "", None)
        trained = {id(weight) for weight in model.trainable_variables}
        return {
            "format": FORMAT,
            "name": model.name,
            "inputs": [_input(tensor) for tensor in function.inputs],
            "weights": [_weight(name, weight, id(weight) in trained) for name, weight in self.weights.items()],
            "layers": list(self.layers.values()),
            "calls": self.written,
            "outputs": outputs,
            "output_shapes": [list(tensor.shape[1:]) for tensor in function.outputs],
            "losses": _losses(model, _output_names(function)),
            "optimizer": _optimizer(model, self.names),
        }

    def calls(self, model: Any, prefix: str, inputs: list[int] | None) -> list[int]:
        """Write the calls of a model, and return the numbers of its outputs."""
        function = _functional(model)
        numbers = self._new_numbers(len(function.inputs)) if inputs is None else inputs
        numbers_by_tensor = {id(tensor): number for tensor, number in zip(function.inputs, numbers, strict=True)}
        for depth in sorted(function._nodes_by_depth, reverse=True):
            for node in function._nodes_by_depth[depth]:
                if node.operation is None or node.is_input:
                    continue
                arguments = [numbers_by_tensor[id(tensor)] for tensor in _inputs(node)]
                results = self._call(node, prefix, arguments)
                numbers_by_tensor |= {id(tensor): number for tensor, number in zip(node.outputs, results, strict=True)}
        return [numbers_by_tensor[id(tensor)] for tensor in function.outputs]

    def _new_numbers(self, count: int) -> list[int]:
        self.count += count
        return list(range(self.count - count, self.count))

    def _call(self, node: Any, prefix: str, inputs: list[int]) -> list[int]:
        import keras

        operation = node.operation
        if isinstance(operation, keras.Model):
            return self.calls(operation, f"{prefix}{operation.name}/", inputs)
        if not isinstance(operation, keras.layers.Layer):
            raise refusal(f"the operation {type(operation).__name__} ({operation.name!r}), only layers")
        layer = self.layers.get(id(operation))
        if layer is None:
            layer = self.layers[id(operation)] = self._layer(operation, prefix)
        layer["calls"].append({"arguments": _arguments(node)})
        call = {"layer": layer["name"], "number": len(layer["calls"]) - 1, "inputs": inputs}
        self.written.append(call)
        return self._new_numbers(len(node.outputs))

    def _layer(self, layer: Any, prefix: str) -> Config:
        import keras

        label = f"the layer {layer.name!r}"
        row = _row(layer, LAYERS, keras.layers, label)
        if layer.dtype_policy.name != "float32":
            raise refusal(f"{label} of type {layer.dtype_policy.name}, only float32")
        return {
            "name": f"{prefix}{layer.name}",
            "kind": row.kind,
            "config": _layer_config(layer, row, label),
            "trainable": bool(layer.trainable),
            "weights": {name: self.names[id(weight)] for name, weight in _own_weights(layer)},
            "calls": [],
        }


def _weight(name: str, weight: Any, trained: bool) -> Config:
    if weight.constraint is not None:
        raise refusal(f"the weight {name!r} with the constraint {type(weight.constraint).__name__}")
    return {
        "name": name,
        "shape": list(weight.shape),
        "penalty": _penalty(weight.regularizer, name),
        "trained": trained,
    }


def _functional(model: Any) -> Any:
    """Return the functional model that a Sequential model contains, or a functional model itself."""
    import keras
    from keras.src.models.functional import Functional

    sequential = isinstance(model, keras.Sequential)
    functional = model._functional if sequential else model
    usual = keras.Sequential.call if sequential else Functional.call
    if functional is None:
        raise refusal(f"the model {model.name!r} without an input shape; begin it with keras.Input")
    if not isinstance(functional, Functional) or type(model).call is not usual:
        raise refusal(f"the model {model.name!r}, whose class {type(model).__name__} has its own call")
    return functional


def _output_names(function: Any) -> list[str]:
    return [str(tensor._keras_history.operation.name) for tensor in function.outputs]


def _input(tensor: Any) -> Config:
    name = tensor._keras_history.operation.name
    if tensor.dtype not in ("float32", "int32", "int64", "uint8", "bool"):
        raise refusal(f"the input {name!r} of type {tensor.dtype}")
    if None in tensor.shape[1:]:
        raise refusal(f"the input {name!r} of shape {tuple(tensor.shape)}, only inputs of a fixed shape")
    return {"name": name, "shape": list(tensor.shape[1:])}


def _inputs(node: Any) -> list[Any]:
    """Return the tensors that a call takes, in the order of the layer's arguments."""
    import keras

    names = ARGUMENTS.get(type(node.operation).__name__)
    if names is None:
        return list(node.input_tensors)
    arguments = dict(zip(names, node.arguments.args, strict=False)) | dict(node.arguments.kwargs)
    ordered = [arguments[name] for name in names if arguments.get(name) is not None]
    flat: list[Any] = keras.tree.flatten(ordered)
    if any(len(tensor.shape) != 3 for tensor in flat if type(node.operation).__name__ == "MultiHeadAttention"):
        raise refusal(f"the layer {node.operation.name!r} (MultiHeadAttention) with several axes")
    return flat


def _arguments(node: Any) -> Config:
    """Return the arguments of a call, without its tensors."""
    layer, arguments = node.operation, dict(node.arguments.kwargs)
    tensors = ARGUMENTS.get(type(layer).__name__, ())
    values = {key: value for key, value in arguments.items() if key not in tensors and value is not None}
    values.pop("training", None)  # Keras records a default here, and overrides it when the model is called
    causal = bool(values.pop("use_causal_mask", False))
    if values.get("return_attention_scores") is False:
        del values["return_attention_scores"]
    if values or len(node.arguments.args) > max(1, len(tensors)):
        raise refusal(f"the layer {layer.name!r}, which is called with {', '.join(values) or 'more arguments'}")
    return {"use_causal_mask": True} if causal else {}


def _own_weights(layer: Any) -> Iterator[tuple[str, Any]]:
    """Yield each weight of a layer, and its name in the engine's function for this layer."""
    kind = type(layer).__name__
    if kind == "Bidirectional":
        for side in ("forward", "backward"):
            for nested, weight in _own_weights(getattr(layer, f"{side}_layer")):
                yield f"{side}/{nested}", weight
    elif kind == "MultiHeadAttention":
        for part in ("query", "key", "value", "output"):
            name = "attention_output" if part == "output" else part
            for weight in getattr(layer, f"_{part}_dense").weights:
                yield f"{name}/{weight.name}", weight
    else:
        for weight in layer.weights:
            if "seed_generator" not in weight.path:
                yield weight.name, weight


def _row(instance: Any, table: Mapping[str, Listed], module: Any, label: str) -> Listed:
    """Return the row of an object, whose class must be Keras's own."""
    kind = type(instance)
    row = table.get(kind.__name__)
    if row is None or kind is not getattr(module, kind.__name__, None):
        raise refusal(f"{label} ({kind.__name__})")
    return row


def _checked_arguments(config: Config, row: Listed, label: str) -> Config:
    """Return the arguments that the engine computes with, after checking all others."""
    for name, value in config.items():
        if name in row.takes or name in row.free or name in USUAL or name.endswith("_initializer"):
            continue
        if name.endswith("_regularizer") and name != "activity_regularizer":
            continue
        if name.endswith(("_constraint", "_regularizer")):
            if value is not None:
                raise refusal(f"{label} ({row.name}) with {name}")
            continue
        if name not in row.only:
            raise refusal(f"{label} ({row.name}) with {name}={value!r}")
        if not _is(value, row.only[name]):
            raise refusal(f"{label} ({row.name}) with {name}={value!r}, only {row.only[name]!r}")
    return row.adapt({name: config[name] for name in row.takes if name in config})


def _is(value: Any, expected: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is(item, expected) for item in value)
    return bool(value == expected)


def _layer_config(layer: Any, row: Listed, label: str) -> Config:
    import keras

    config = _checked_arguments(layer.get_config(), row, label)
    for name in ("activation", "recurrent_activation"):
        if name in config:
            config[name] = _activation(getattr(layer, name), label)
    if row.name == "Bidirectional":
        sides = {side: getattr(layer, f"{side}_layer") for side in ("forward", "backward")}
        rows = {side: _row(item, LAYERS, keras.layers, f"{label} with a layer") for side, item in sides.items()}
        kinds = {item.kind for item in rows.values()}
        if kinds - {"SimpleRNN", "LSTM", "GRU"} or len(kinds) > 1:
            raise refusal(f"{label} with the layers {' and '.join(sorted(kinds))}")
        configs = {side: _layer_config(item, rows[side], label) for side, item in sides.items()}
        if any(item["return_state"] for item in configs.values()):
            raise refusal(f"{label} (Bidirectional) with return_state=True")
        configs["forward"]["go_backwards"], configs["backward"]["go_backwards"] = False, True
        if layer.forward_layer.go_backwards:
            raise refusal(f"{label} (Bidirectional) with go_backwards=True")
        return {"kind": kinds.pop(), "merge_mode": config["merge_mode"], **configs}
    if row.name == "Rescaling" and not all(isinstance(config[key], int | float) for key in ("scale", "offset")):
        raise refusal(f"{label} (Rescaling) with several scales")
    return config


def _activation(function: Any, label: str) -> Config:
    import keras

    name = getattr(function, "__name__", type(function).__name__)
    if name not in ACTIVATIONS or function is not keras.activations.get(name):
        raise refusal(f"{label} with the activation {name}")
    return {"kind": name}


def _penalty(regularizer: Any, name: str) -> list[float] | None:
    import keras

    if regularizer is None:
        return None
    if type(regularizer) not in (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2):
        raise refusal(f"the weight {name!r} with the regularizer {type(regularizer).__name__}")
    return [float(getattr(regularizer, "l1", 0.0)), float(getattr(regularizer, "l2", 0.0))]


def _list_by_output(setting: Any, names: list[str], otherwise: Any) -> list[Any]:
    """Return what ``compile`` got for each output: one for all, a list or a dict."""
    if isinstance(setting, dict):
        return [setting.get(name, otherwise) for name in names]
    if isinstance(setting, list | tuple):
        return list(setting) if len(setting) == len(names) else [*setting, *[otherwise] * (len(names) - len(setting))]
    return [setting] * len(names)


def _losses(model: Any, names: list[str]) -> list[Config]:
    metrics = model._compile_metrics
    weighted = metrics and metrics._user_weighted_metrics
    if weighted:
        raise refusal("a model with weighted_metrics")
    metrics_by_output = _list_by_output(metrics._user_metrics if metrics else [], names, [])
    if len(names) == 1:
        setting = metrics._user_metrics if metrics else []
        metrics_by_output = [setting.get(names[0], []) if isinstance(setting, dict) else setting]
    losses = _list_by_output(model.loss, names, None)
    weights = _list_by_output(model._compile_loss._user_loss_weights, names, 1.0)
    has_many_outputs = len(names) > 1
    return [
        {
            **_loss(loss, name),
            "name": f"{name}_loss",
            "weight": 1.0 if weight is None else float(weight),
            "metrics": [_metric(metric, f"{name}_" if has_many_outputs else "") for metric in _list(chosen)],
        }
        for name, loss, weight, chosen in zip(names, losses, weights, metrics_by_output, strict=True)
    ]


def _list(values: Any) -> list[Any]:
    return list(values) if isinstance(values, list | tuple) else [] if values is None else [values]


def _loss(loss: Any, output: str) -> Config:
    import keras

    label = f"the loss of {output!r}"
    if loss is None:
        raise refusal(f"the output {output!r} without a loss")
    function = keras.losses.get(loss)
    if not isinstance(function, keras.losses.Loss):
        return {"kind": _function(function, LOSSES, keras.losses, label), "config": {}, "reduction": "mean"}
    row = _row(function, LOSSES, keras.losses, label)
    config = _checked_arguments(_arguments_of(function), row, label)
    if function.reduction not in REDUCTIONS:
        raise refusal(f"{label} ({row.name}) with reduction={function.reduction!r}")
    return {"kind": row.kind, "config": config, "reduction": REDUCTIONS[function.reduction]}


def _arguments_of(instance: Any) -> Config:
    """Return the arguments of a loss or metric. Keras leaves some of them out of its config, such as the delta of Huber."""
    config: Config = instance.get_config() | getattr(instance, "_fn_kwargs", {})
    return {key: value for key, value in config.items() if key not in ("reduction", "fn")}


def _function(function: Callable[..., Any], table: Mapping[str, Listed], module: Any, label: str) -> str:
    """Return the kind of one of Keras's own functions."""
    name = getattr(function, "__name__", type(function).__name__)
    kinds = {row.kind for row in table.values()}
    if name not in kinds or function is not getattr(module, name, None):
        raise refusal(f"{label} ({name})")
    return name


def _metric(metric: Any, prefix: str) -> Config:
    import keras

    if metric in BY_SHAPE:
        return {"name": f"{prefix}{metric}", "kind": "accuracy_by_shape", "config": {}}
    label = f"the metric {metric!r}" if isinstance(metric, str) else "a metric"
    try:
        function = keras.metrics.get(metric)
    except ValueError:
        raise refusal(label) from None
    if not isinstance(function, keras.metrics.Metric):
        kind = _function(function, LOSSES, keras.losses, label)
        return {"name": f"{prefix}{kind}", "kind": kind, "config": {}}
    row = _row(function, METRICS, keras.metrics, label)
    config = _checked_arguments(_arguments_of(function), row, label)
    name = metric if isinstance(metric, str) else function.name
    return {"name": f"{prefix}{name}", "kind": row.kind, "config": config}


def _optimizer(model: Any, names: Mapping[int, str]) -> Config:
    import keras

    optimizer, label = model.optimizer, "the optimizer"
    row = _row(optimizer, OPTIMIZERS, keras.optimizers, label)
    config = _checked_arguments(optimizer.get_config(), row, label)
    variables = model.trainable_variables
    optimizer.build(variables)
    decayed = [names[id(weight)] for weight in variables if optimizer._use_weight_decay(weight)]
    return {"kind": row.kind, "config": config, "decayed": decayed, "rate": _rate(optimizer)}


def _rate(optimizer: Any) -> Config:
    import keras

    rate = optimizer._learning_rate
    if not isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        if callable(rate) and not hasattr(rate, "numpy"):
            raise refusal("a learning rate that is a function")
        return {"kind": "constant", "config": {"value": float(keras.ops.convert_to_numpy(optimizer.learning_rate))}}
    row = _row(rate, RATES, keras.optimizers.schedules, "the learning rate")
    return {"kind": row.kind, "config": _checked_arguments(rate.get_config(), row, "the learning rate")}
