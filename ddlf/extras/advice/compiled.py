"""What there is to say of how a Keras model was compiled: outputs with their losses, and the optimizer. Runs where a model is; changes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ddlf.data.trees import leaves
from ddlf.extras.advice.facts import USUAL_CUT, Head, Layer, Optimizer
from ddlf.extras.advice.network import config_of, graph_of, shape_of

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
"""Keras's own losses by the name of their function, with what rules call them."""
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
"""Layers and operations behind which values are what they were."""
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
"""Metrics that take an output above a number for a yes."""
GATED = {"LSTM": "tanh", "GRU": "tanh", "SimpleRNN": "tanh"}


def heads_of(model: Any, layers: tuple[Layer, ...], y: Any) -> tuple[Head, ...]:
    """The model's outputs, each with its loss, its metrics and its target.

    Args:
        model: Compiled.
        layers: As of ``layers_of``.
        y: The training labels: an array, or a tree of arrays.
    """
    graph = graph_of(model)
    if graph is None:
        return ()
    named = _output_names(model, graph)
    targets = dict(_per_output(named, _target_names(y)))
    losses = dict(_per_output(named, getattr(model, "loss", None)))
    metrics = dict(_per_output(named, _metrics(model)))
    found = []
    for (name, key), tensor in zip(named, graph._outputs, strict=True):
        last, activation = _origin(tensor._keras_history.operation, layers)
        loss, logits = _loss(losses.get(key))
        found.append(
            Head(
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
    return tuple(found)


def has_own_step(model: Any) -> bool:
    """Whether a step is the user's own, or the loss that Keras's step takes."""
    import keras

    return (
        type(model).train_step is not keras.Model.train_step or type(model).compute_loss is not keras.Model.compute_loss
    )


def is_own(model: Any) -> bool:
    """Whether it has a step or a loss of the user's own."""
    return has_own_step(model) or (callable(loss := getattr(model, "loss", None)) and _loss(loss)[0] == "own")


def _output_names(model: Any, graph: Any) -> list[tuple[str, Any]]:
    """Name of each output, with the key by which losses and labels are given: a name, or a number."""
    struct = getattr(graph, "_outputs_struct", None)
    names = list(graph.output_names)
    if isinstance(struct, Mapping):
        by_id = {id(tensor): key for key, tensor in struct.items()}
        return [
            (str(by_id.get(id(tensor), name)), by_id.get(id(tensor), name))
            for name, tensor in zip(names, graph._outputs, strict=True)
        ]
    return [(name, number) for number, name in enumerate(names)]


def _per_output(named: list[tuple[str, Any]], given: Any) -> Iterator[tuple[Any, Any]]:
    """What was given for all outputs, for each of them."""
    if given is None:
        return
    for number, (name, key) in enumerate(named):
        if isinstance(given, Mapping):
            yield key, given.get(key, given.get(name))
        elif isinstance(given, list | tuple) and len(named) > 1:
            yield key, given[number] if number < len(given) else None
        else:
            yield key, given[0] if isinstance(given, list | tuple) and len(given) == 1 else given


def _target_names(y: Any) -> Any:
    """A tree of names in the place of arrays."""
    if y is None:
        return None
    names = [name for name, _ in leaves(y, "y_train")]
    if isinstance(y, Mapping):
        return dict(zip(y, names, strict=False)) if len(names) == len(y) else None
    return names if isinstance(y, list | tuple) else names[0]


def _metrics(model: Any) -> Any:
    return getattr(getattr(model, "_compile_metrics", None), "_user_metrics", None)


def _names(given: Any) -> Iterator[str]:
    for one in given if isinstance(given, list | tuple) else [] if given is None else [given]:
        if isinstance(one, list | tuple):
            yield from _names(one)
        elif isinstance(one, str):
            yield one
        else:
            yield getattr(one, "__name__", None) or type(one).__name__


def _cuts(given: Any, loss: str) -> Iterator[tuple[str, float]]:
    """Metrics that cut outputs into yes and no, and where."""
    for one in given if isinstance(given, list | tuple) else [] if given is None else [given]:
        if isinstance(one, list | tuple):
            yield from _cuts(one, loss)
        elif isinstance(one, str):
            if one in CUT_BY_NAME or (loss == "bce" and one in ("accuracy", "acc")):
                yield one, USUAL_CUT
        elif (name := type(one).__name__) in CUT:
            config = config_of(one)
            cut = config.get("thresholds", config.get("threshold"))
            if not config.get("top_k") and not (name == "F1Score" and cut is None):
                yield from ((name, float(each)) for each in np.ravel(USUAL_CUT if cut is None else cut))


def _loss(given: Any) -> tuple[str, bool]:
    """What rules call a loss, and whether it takes logits."""
    if given is None:
        return "", False
    import keras

    if isinstance(given, str):
        try:
            given = keras.losses.get(given)
        except ValueError:
            return "own", False
    function = getattr(given, "fn", given)
    name = getattr(function, "__name__", "")
    if not str(getattr(function, "__module__", "")).startswith("keras."):
        return "own", False
    kwargs = getattr(given, "_fn_kwargs", None) or {}
    return LOSSES.get(name, "own"), bool(getattr(given, "from_logits", kwargs.get("from_logits", False)))


def _origin(operation: Any, layers: tuple[Layer, ...]) -> tuple[str, str]:
    """The layer that makes an output's values, and its activation; the activation is empty where that is not known."""
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


def optimizer_of(model: Any) -> Optimizer | None:
    """What steps the model's weights."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return None
    scales = type(optimizer).__name__ == "LossScaleOptimizer"
    inside = optimizer.inner_optimizer if scales else optimizer
    given = getattr(inside, "_learning_rate", None)
    rate, schedule, steps = _rate(given)
    fades = _fades(schedule, config_of(given)) if schedule else None
    clips = [getattr(inside, name, None) for name in ("clipnorm", "global_clipnorm", "clipvalue")]
    decay = getattr(inside, "weight_decay", None)
    momentum = getattr(inside, "momentum", 0.0)
    return Optimizer(
        kind=type(inside).__name__,
        rate=rate,
        schedule=schedule,
        steps=steps,
        fades=fades,
        scales_loss=scales,
        keeps=_keeps(type(inside).__name__, momentum),
        clip=min((float(clip) for clip in clips if clip), default=None),
        decay=float(decay) if isinstance(decay, int | float) else 0.0,
        momentum=float(momentum) if isinstance(momentum, int | float) else 0.0,
    )


def _keeps(kind: str, momentum: Any) -> int:
    if kind == "SGD":
        return int(bool(momentum))
    return {"RMSprop": 1, "Adagrad": 1, "Lion": 1}.get(kind, 2)


def _fades(kind: str, config: Mapping[str, Any]) -> int | None:
    """After how many steps a schedule of Keras's that never ends is below a hundredth of what it began with."""
    steps, rate = config.get("decay_steps"), config.get("decay_rate")
    if not (isinstance(steps, int | float) and isinstance(rate, int | float)):
        return None
    if kind == "ExponentialDecay" and 0 < rate < 1:
        return math.ceil(steps * math.log(0.01) / math.log(rate))
    return math.ceil(99 * steps / rate) if kind == "InverseTimeDecay" and rate > 0 else None


def _rate(given: Any) -> tuple[float, str, int | None]:
    """The learning rate at its highest, the class of its schedule, and when that has done all."""
    import keras

    if isinstance(given, keras.optimizers.schedules.LearningRateSchedule):
        config = config_of(given)
        rate = max(float(config.get("initial_learning_rate") or 0.0), float(config.get("warmup_target") or 0.0))
        steps = config.get("decay_steps")
        kind = type(given).__name__
        if kind == "PiecewiseConstantDecay":
            rate = max(map(float, config.get("values") or [0.0]))
            steps = max(config.get("boundaries") or [0])
        if kind in ("CosineDecay",) and isinstance(steps, int | float):
            steps = steps + (config.get("warmup_steps") or 0)
        known = kind in ("CosineDecay", "PolynomialDecay", "PiecewiseConstantDecay") and isinstance(steps, int | float)
        own = not type(given).__module__.startswith("keras.")
        return (math.nan if own else rate), kind, int(steps) if known and steps is not None else None
    try:
        return float(np.asarray(keras.ops.convert_to_numpy(given))), "", None
    except Exception:  # a function
        return math.nan, "", None
