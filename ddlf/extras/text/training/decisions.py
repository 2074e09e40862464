"""Decides the training keys that a model text leaves open, with a rule for each key. Pure.

Rules use facts of the model and its data, and never decide a written key. Limits without a source are first guesses.
The range of an output and its labels determine the loss. All other rules prevent a known defect.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from math import isfinite, log, sqrt
from typing import Any

import numpy as np

from ddlf.extras.text.language.graph import Graph, ModelOutput, Node, consumers, inputs_of
from ddlf.extras.text.language.inference import options_of
from ddlf.extras.text.language.model import Model
from ddlf.extras.text.language.operators import INTEGERS, is_keras
from ddlf.extras.text.language.syntax import MAX_ITEMS

DROPOUTS = frozenset(
    (
        "dropout",
        "Dropout",
        "SpatialDropout1D",
        "SpatialDropout2D",
        "SpatialDropout3D",
        "AlphaDropout",
        "GaussianDropout",
    )
)
ATTENDING = frozenset(("attend", "MultiHeadAttention", "GroupQueryAttention", "Attention", "AdditiveAttention"))
RECURRENT = frozenset(
    ("lstm", "gru", "lstmCell", "gruCell", "LSTM", "GRU", "SimpleRNN", "ConvLSTM2D", "Bidirectional", "RNN")
)
SCALING = frozenset(("Normalization", "Rescaling"))
"""Layers that scale inputs."""
NORMALIZING = SCALING.union(
    ("batchNorm", "batchNormalization", "instanceNormalization", "layerNormalization", "BatchNormalization"),
    ("LayerNormalization", "GroupNormalization", "UnitNormalization", "RMSNormalization"),
)
VALUE_KEEPING = frozenset(("identity", "cast", "reshape", "Flatten", "Reshape", "Identity")) | DROPOUTS
"""Layers that do not change values. The activation of an output is the one before them."""
LINEAR = ("input", "matmul", "gemm", "add", "residual", "conv2d", "convTranspose2d", "linear")
TOKEN_READERS = frozenset(("Embedding", "StringLookup", "IntegerLookup", "CategoryEncoding", "Hashing"))
PER_SAMPLE = 10
"""With more parameters per sample than this, a model can memorize its samples."""
DROPOUT_DENSITY = 0.2
"""Dropout layers per layer with parameters that make a penalty unnecessary."""
MANY_FEATURES = 5_000
LARGE, APART = 10.0, 100.0
"""Inputs are scaled above this size, or if the ranges of features differ by this factor."""
SAME_SCALE = 0.1
"""The features of a sequence have different scales if their median range is below this share of the whole range."""
MOST_FEATURES = MAX_ITEMS // 2
"""Maximum number of features that are scaled one by one: their means and variances are in one statement of the text."""
MOST_NUMBERS = 1_000
"""Maximum number of whole labels that are counted one by one."""
PATIENCE = 10
SQUARED = ("MSE",)
"""Losses whose gradient grows with the error."""
MAJORITY = 0.9
"""If one class has more than this fraction of the labels, guessing it pays more than learning."""
DEEP = 15
"""Gradients through more operators than this need a normalization or a clip."""
OUTLIERS = 0.001
FAR = 6.0
"""Outliers are further than this number of deviations from the median."""
SIGMA = 1.4826
"""The standard deviation of a normal distribution, divided by its median absolute deviation."""
PEAK = 100.0
"""A sample is an outlier if its norm is larger than the median norm by this factor."""
UNEVEN = 10.0
"""The model learns how its losses count if the initial losses differ by this factor."""
HUBER = 1.345
"""Huber's delta in deviations of the errors.

Without outliers, it is 95 % as efficient as squared errors (Huber 1964, Holland and Welsch 1977).
"""
MOST_CLASSES = 1_000

Answer = tuple[str, str, str]
"""A decision's value, rule and reason."""


@dataclass(frozen=True, slots=True)
class LabelStatistics:
    """Statistics of the labels of an output.

    Attributes:
        shape: The shape of one sample's label.
        is_whole: Whether all values are whole numbers.
        low: The smallest value.
        high: The largest value.
        one_each: Whether each row sums to 1.
        majority: The fraction of the most frequent class; 0 if the labels are not classes.
        sigma: Robust standard deviation of all values, 1.4826 times the median absolute deviation.
        outlier_share: Share of values more than 6 sigma from the median.
        square: Mean of the squares of all values.
        counts: The number of samples of each class, from 0; empty if the labels are not classes.
    """

    shape: tuple[int, ...]
    is_whole: bool
    low: float
    high: float
    one_each: bool = False
    majority: float = 0.0
    sigma: float = 0.0
    outlier_share: float = 0.0
    square: float = 0.0
    counts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class OutputStatistics:
    """An output with its block, last activation (``"linear"`` without one), shape, type, labels, loss and name."""

    block: str
    last: str
    shape: tuple[int, ...]
    dtype: str
    labels: LabelStatistics | None
    loss: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class InputStatistics:
    """Statistics of the values of one input of the model, for the decision how to scale it.

    Attributes:
        block: The name of its block.
        shape: The shape of a sample.
        numbers: Whether its values are quantities; False for token numbers and the like.
        scaled: Whether a layer that scales reads it.
        low: The smallest value in training.
        high: The largest value in training.
        means: The mean of each feature; empty if it was not computed.
        deviations: The standard deviation of each feature; empty if it was not computed.
        ranges: The largest minus the smallest value of each feature; empty if it was not computed.
        peak: The largest norm of a sample, divided by the median norm; 0 if it was not computed.
    """

    block: str
    shape: tuple[int, ...]
    numbers: bool
    scaled: bool
    low: float
    high: float
    means: tuple[float, ...] = ()
    deviations: tuple[float, ...] = ()
    ranges: tuple[float, ...] = ()
    peak: float = 0.0


@dataclass(frozen=True, slots=True)
class LearningTask:
    """The facts that the rules use.

    Attributes:
        inputs: The inputs in the order of the model text.
        outputs: The outputs in the order of the text.
        samples: The number of training samples.
        parameters: The number of parameters; 0 if only Keras knows it.
        layers: The operators of all layers.
        learning: The number of layers with parameters.
        validation: Whether there is validation data.
        drawn: Whether operators have weights, whose initializer the text can set.
        depth: The number of operators on the shortest path from an input to an output.
        weighted: Whether training samples have weights.
    """

    inputs: tuple[InputStatistics, ...]
    outputs: tuple[OutputStatistics, ...]
    samples: int
    parameters: int
    layers: tuple[str, ...]
    learning: int
    validation: bool
    drawn: bool = True
    depth: int = 0
    weighted: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision about a key.

    Attributes:
        block: The block of the key.
        key: The decided key.
        value: The decided value in the notation of the model text.
        rule: The name of the rule.
        reason: The reason for the decision.
    """

    block: str
    key: str
    value: str
    rule: str
    reason: str


def decide(task: LearningTask, written: Collection[tuple[str, str]]) -> Iterator[Decision]:
    """Decide all training keys that a model text leaves open, such as the loss.

    Args:
        task: The facts of model and data.
        written: The block and key of each written statement.

    Yields:
        A decision for each key that is open, losses first.
    """
    outputs = []
    for output in task.outputs:
        if (output.block, "loss") not in written and ("train", "loss") not in written:
            value, rule, reason = loss(output)
            yield Decision(output.block, "loss", value, rule, reason)
            output = replace(output, loss=value)
        outputs.append(output)
        for key, value, rule, reason in parameters(output):
            if (output.block, key) not in written:
                yield Decision(output.block, key, value, rule, reason)
    task = replace(task, outputs=tuple(outputs))
    for key, rule_of in RULES.items():
        if ("train", key) not in written and (task.drawn or key != "initial"):
            value, rule, reason = rule_of(task)
            yield Decision("train", key, value, rule, reason)


def loss(output: OutputStatistics) -> Answer:
    """Decide the loss of an output by its last activation and its labels.

    Raises:
        ValueError: There are no labels, or no loss can compare them with this output.
    """
    labels = output.labels
    if labels is None:
        raise ValueError(
            f"its labels are not in memory, so no rule can choose: write loss, such as {output.block}:loss SCE;"
        )
    classes = output.shape[-1] if output.shape else 1
    if labels.shape in (output.shape[:-1], (*output.shape[:-1], 1)) and classes > 1:
        if not labels.is_whole or not 0 <= labels.low <= labels.high < classes:
            raise ValueError(
                f"it has {classes} values, and its labels are one number each, from {labels.low:g} to {labels.high:g}: "
                f"classes are whole numbers from 0 to {classes - 1}"
            )
        how = "logits" if output.last == "linear" else output.last
        return "SCE", "loss-integers", f"{how} of {classes} classes, and labels are whole numbers"
    if labels.shape != output.shape and (labels.shape or (1,)) != output.shape:
        raise ValueError(f"it has the shape {list(output.shape)}, and its labels have {list(labels.shape)}")
    zero_one = labels.is_whole and labels.low >= 0 and labels.high <= 1
    if output.last == "softmax" and labels.one_each and labels.low >= 0:
        if not zero_one:
            return "KLD", "loss-distributions", "softmax, and labels are rows of shares that sum to 1"
        if labels.majority > MAJORITY:
            return "FOL", "loss-majority", f"{labels.majority:.0%} of the labels are one class"
        return "CCE", "loss-one-hot", "softmax, and labels are rows of 0 and 1 with one 1 each"
    if output.last == "sigmoid" and labels.low >= 0 and labels.high <= 1:
        if zero_one and labels.majority > MAJORITY:
            return "FOL", "loss-majority", f"{labels.majority:.0%} of the labels are one class"
        return "BCE", "loss-yes-no", "sigmoid, and labels lie between 0 and 1"
    if (
        output.last in ("linear", "tanh")
        and labels.is_whole
        and labels.low == -1
        and labels.high == 1
        and labels.outlier_share == 0
    ):
        return "HIL", "loss-margin", "labels are -1 and 1"
    if labels.outlier_share > OUTLIERS and labels.sigma > 0:
        return (
            "HUL",
            "loss-outliers",
            f"{labels.outlier_share:.1%} of the labels are more than 6 deviations from their median",
        )
    return "MSE", "loss-quantities", "labels are quantities without outliers"


def _initial(task: LearningTask) -> Answer:
    return (
        "by_activation",
        "start-activation",
        "He before relu and its like, Glorot elsewhere; a bias 0.01 before relu, else 0",
    )


def _scaling(task: LearningTask) -> Answer:
    answers = [scaling(entry) for entry in task.inputs]
    values = [value for value, _, _ in answers]
    deciding = [answer for answer in answers if answer[0] != "none"] or answers
    return values[0] if len(values) == 1 else f"[{', '.join(values)}]", deciding[0][1], deciding[0][2]


def scaling(statistics: InputStatistics) -> Answer:
    """Decide how to scale the values of one input before the first layer."""
    if not statistics.numbers:
        return "none", "scaling-tokens", "the values are not quantities"
    if statistics.scaled:
        return "none", "scaling-in-model", "the model scales its input"
    large = max(abs(statistics.low), abs(statistics.high))
    if not isfinite(large):
        return "none", "scaling-not-finite", "inputs are NaN or infinite"
    spans = [number for number in statistics.ranges if number > 0]
    ratio = max(spans) / min(spans) if spans else 1.0
    if large <= LARGE and ratio <= APART:
        return "none", "scaling-fine", f"inputs lie between {statistics.low:.3g} and {statistics.high:.3g}"
    if statistics.means:
        reason = (
            f"ranges of features are {ratio:,.0f} times apart" if ratio > APART else f"inputs go up to {large:,.4g}"
        )
        means = ", ".join(f"{number:.6g}" for number in statistics.means)
        variances = ", ".join(f"{number * number or 1.0:.6g}" for number in statistics.deviations)
        return f"Normalization(axis=-1, mean=[{means}], variance=[{variances}])", "scaling-features", reason
    half_range = (statistics.high - statistics.low) / 2 or 1.0
    middle = (statistics.high + statistics.low) / 2
    value = f"Rescaling(scale={1 / half_range:.6g}, offset={-middle / half_range:.6g})"
    return value, "scaling-range", f"inputs lie between {statistics.low:,.4g} and {statistics.high:,.4g}"


def _penalty(task: LearningTask) -> Answer:
    features = max((entry.shape[0] for entry in task.inputs if len(entry.shape) == 1 and entry.numbers), default=0)
    if features > MANY_FEATURES:
        return "L1(l1=0.0001)", "penalty-features", f"{features:,} features, and few of them are likely to matter"
    if not task.parameters or not task.samples:
        return "none", "penalty-unknown", "how many parameters a sample has is known to Keras only"
    per_sample = task.parameters / task.samples
    density = sum(layer in DROPOUTS for layer in task.layers) / max(task.learning, 1)
    if per_sample > PER_SAMPLE and density < DROPOUT_DENSITY:
        return "L2(l2=0.0001)", "penalty-capacity", f"{per_sample:,.0f} parameters a sample and little dropout"
    reason = f"{per_sample:,.1f} parameters a sample" if per_sample <= PER_SAMPLE else "there is enough dropout"
    return "none", "penalty-none", reason


def _patience(task: LearningTask) -> Answer:
    if task.validation:
        return str(PATIENCE), "patience-validation", "there is validation data; the best weights are restored"
    return "none", "patience-none", "there is no validation data to look at"


def _optimizer(task: LearningTask) -> Answer:
    return "adam", "optimizer-usual", "it depends least on its learning rate, and Keras's is used"


def schedule(task: LearningTask) -> Answer:
    """Decide the schedule of the learning rate."""
    if result := next((layer for layer in task.layers if layer in ATTENDING), None):
        reason = f"the first gradients of {result} are far larger than later ones: warm-up (arXiv:2002.04745)"
        return '"warmup:0.05,cosine"', "schedule-attention", reason
    return "none", "schedule-none", "no layer needs a warm-up"


def clipping(task: LearningTask) -> Answer:
    """Decide the maximum norm of all gradients together."""
    if result := next((layer for layer in task.layers if layer in RECURRENT), None):
        return "1.0", "clipping-recurrent", f"gradients through {result} may explode (arXiv:1211.5063)"
    return "none", "clipping-none", "no layer is recurrent"


def clip(task: LearningTask) -> Answer:
    """Decide how to clip gradients: by earlier gradients, or by the weights."""
    layers = set(task.layers)
    if layers & RECURRENT:
        return "none", "clip-recurrent", "a recurrent model has a largest norm of gradients"
    for entry in task.inputs:
        if entry.peak > PEAK:
            reason = (
                f"the largest sample is {entry.peak:,.0f} times the middle one: a batch with it is to step no further"
            )
            return "rolling", "clip-inputs", reason
    for output in task.outputs:
        if output.loss in SQUARED and output.labels is not None and output.labels.outlier_share > OUTLIERS:
            reason = f"{output.labels.outlier_share:.1%} of the labels are outliers, which the loss squares"
            return "rolling", "clip-labels", reason
    if task.depth > DEEP and not layers & (NORMALIZING - SCALING):
        reason = f"{task.depth} operators deep, without normalization and skips (arXiv:2102.06171)"
        return "agc", "clip-deep", reason
    return "none", "clip-none", "no outliers in the data, and the model is not deep, or normalizes"


def loss_weights(task: LearningTask) -> Answer:
    """Decide how to weigh the losses of several outputs."""
    if len(task.outputs) == 1:
        return "none", "weights-one", "there is one output"
    if task.weighted:
        return "none", "weights-samples", "the samples have weights"
    sizes = {output.block: size for output in task.outputs if (size := first_loss(output)) > 0}
    if len(sizes) == len(task.outputs):
        large, small = max(sizes, key=lambda name: sizes[name]), min(sizes, key=lambda name: sizes[name])
        if sizes[large] > UNEVEN * sizes[small]:
            times = sizes[large] / sizes[small]
            reason = f"at first the loss of {large} is {times:,.0f} times that of {small} (arXiv:1705.07115)"
            first_losses = ", ".join(
                f"{output.name or output.block}={sizes[output.block]:.6g}" for output in task.outputs
            )
            return f"uncertainty({first_losses})", "weights-uncertainty", reason
    return "none", "weights-equal", "losses of all outputs count the same"


def first_loss(output: OutputStatistics) -> float:
    """Estimate an output's initial loss: the loss of guessing, or of predicting 0. Return 0 if it is unknown."""
    labels, classes = output.labels, output.shape[-1] if output.shape else 1
    if labels is None:
        return 0.0
    if output.loss in ("SCE", "CCE", "CCEL", "KLD"):
        return log(max(classes, 2))
    if output.loss in ("BCE", "HIL"):
        return log(2) if output.loss == "BCE" else 1.0
    if output.loss == "MSE":
        return labels.square
    return sqrt(labels.square) if output.loss == "MAE" else 0.0


def class_weight(task: LearningTask) -> Answer:
    """Decide the weight of each class in the loss, if the classes have different numbers of samples."""
    if len(task.outputs) > 1:
        return "none", "classes-outputs", "class weights need a single output"
    output = task.outputs[0]
    labels = output.labels
    single = labels is not None and (labels.shape in ((), (1,)) or (labels.one_each and len(labels.shape) == 1))
    if labels is None or not single or output.loss not in ("SCE", "CCE", "CCEL", "FOL") or len(labels.counts) < 2:
        return "none", "classes-none", "labels are not one class each, or not in memory"
    if output.loss == "FOL" and output.last != "softmax":
        return "none", "classes-focal", "alpha of the loss weighs the classes"
    if task.weighted:
        return "none", "classes-samples", "the samples have weights"
    if labels.majority <= MAJORITY or len(labels.counts) > MOST_CLASSES:
        return "none", "classes-even", f"the largest class has {labels.majority:.0%} of the labels"
    present, total = sum(count > 0 for count in labels.counts), sum(labels.counts)
    weights = ", ".join(f"{total / (present * count):.6g}" if count else "1" for count in labels.counts)
    return f"[{weights}]", "classes-majority", f"{labels.majority:.0%} of the labels are one class"


def parameters(output: OutputStatistics) -> Iterator[tuple[str, str, str, str]]:
    """Yield key, value, rule and reason of each loss parameter that follows from the labels."""
    labels = output.labels
    if labels is None:
        return
    if output.loss == "HUL" and labels.sigma > 0:
        reason = f"{HUBER} times the deviation of the labels"
        yield "delta", f"{HUBER * labels.sigma:.6g}", "huber-sigma", reason
    if output.loss == "FOL" and output.last != "softmax" and len(labels.counts) == 2 and min(labels.counts):
        alpha = labels.counts[0] / sum(labels.counts)
        yield "alpha", f"{alpha:.6g}", "focal-counts", f"{alpha:.1%} of the labels are 0, and alpha weighs the others"


RULES: dict[str, Callable[[LearningTask], Answer]] = {
    "optimizer": _optimizer,
    "initial": _initial,
    "scaling": _scaling,
    "penalty": _penalty,
    "clipping": clipping,
    "loss_weights": loss_weights,
    "patience": _patience,
    "schedule": schedule,
    "clip": clip,
    "class_weight": class_weight,
}
"""The rules by the key of the block ``train``."""
OF_RUNS = ("schedule", "clip", "class_weight")
"""The decided keys that are settings of a run."""


def mismatch(output: OutputStatistics, loss: str) -> str:
    """Return why a loss cannot compare an output with its labels; empty if it can."""
    labels = output.labels
    if labels is None:
        return ""
    single = labels.shape in (output.shape[:-1], (*output.shape[:-1], 1))
    if loss == "SCE":
        classes = output.shape[-1] if output.shape else 1
        if not single or classes < 2:
            return f"it takes the number of a class, and labels have the shape {list(labels.shape)}: write CCE for rows of 0 and 1"
        if not labels.is_whole or labels.low < 0 or labels.high >= classes:
            return f"classes are 0 to {classes - 1}, and labels go from {labels.low:g} to {labels.high:g}"
    elif labels.shape != output.shape and not (single and output.shape[-1:] == (1,)):
        advice = ": write SCE for numbers of classes" if single and labels.is_whole else ""
        return f"outputs have the shape {list(output.shape)}, and labels {list(labels.shape)}{advice}"
    return ""


# -- facts -----------------------------------------------------------------------------------------------------------------


def values_by_name(data: Any, names: list[str]) -> dict[str, Any]:
    """Return arrays by block name, from one array, a dict, or a list in the order of the model text."""
    if isinstance(data, Mapping):
        return dict(data)
    return dict(zip(names, data if isinstance(data, list | tuple) else [data], strict=False))


def learning_task(
    model: Model,
    x: Any,
    y: Any,
    *,
    parameters: int,
    validation: bool,
    weighted: bool = False,
    losses: Mapping[str, str] | None = None,
    ignore: float | None = None,
) -> LearningTask:
    """Collect the facts about a model and its data that the rules need to decide open training keys.

    Args:
        model: The model text.
        x: The training inputs in a structure that Keras accepts; None if they are not in memory.
        y: The training labels in a structure that Keras accepts; None if they are not in memory.
        parameters: The number of the model's parameters.
        validation: Whether there is validation data.
        weighted: Whether samples have weights.
        losses: The written losses, by name of the output.
        ignore: The label that the losses ignore; None for no label.
    """
    graph = model.graph
    nodes = inputs_of(graph)
    inputs_by_name = values_by_name(x, [node.name for node in nodes])
    first = next(iter(inputs_by_name.values()), None)
    layers = tuple(node.operator for node in graph.nodes if node.operator != "input")
    return LearningTask(
        inputs=tuple(_input(graph, node, inputs_by_name.get(node.name)) for node in nodes),
        outputs=outputs_of(model, y, losses or {}, ignore),
        samples=0 if first is None else len(first),
        parameters=parameters,
        layers=layers,
        learning=sum(bool(node.parameters) for node in graph.nodes),
        validation=validation,
        drawn=model.draws,
        depth=_depth(graph),
        weighted=weighted,
    )


def outputs_of(model: Model, y: Any, losses: Mapping[str, str], ignore: float | None) -> tuple[OutputStatistics, ...]:
    """Return the facts of each output and its labels; see ``learning_task``."""
    graph = model.graph
    labels = values_by_name(y, [head.name for head in graph.heads])
    return tuple(_output(graph, head, labels.get(head.name), losses.get(head.name, ""), ignore) for head in graph.heads)


def _depth(graph: Graph) -> int:
    """Return the depth of a model: the number of operators on the shortest path from an input to an output. If there
    are several outputs, the one with the longest such path counts.
    """
    begun: list[int] = []
    for node in graph.nodes:
        begun.append(min((begun[source] for source in node.inputs), default=-1) + 1)
    return max((begun[head.node] for head in graph.heads), default=0)


def last_activation(graph: Graph, number: int) -> str:
    """Return the name of the last activation on the way to a node's output; ``"linear"`` without one."""
    node = graph.nodes[number]
    if node.operator in VALUE_KEEPING and node.inputs:
        return last_activation(graph, node.inputs[0])
    if node.operator == "Activation" or (is_keras(node.operator) and "activation" in options_of(node)):
        return str(options_of(node).get("activation", "linear")).lower()
    if node.operator in LINEAR or is_keras(node.operator):
        return "softmax" if node.operator == "Softmax" else "linear"
    return node.operator


def _output(graph: Graph, head: ModelOutput, labels: Any, loss: str, ignore: float | None) -> OutputStatistics:
    node = graph.nodes[head.node]
    shape = tuple(head.declared_shape or node.shape or ())
    sizes = tuple(int(size or 0) for size in shape)
    statistics = None if labels is None else labels_of(np.asarray(labels), sizes, ignore)
    last = last_activation(graph, head.node)
    return OutputStatistics(head.block, last, sizes, node.dtype, statistics, loss, head.name)


def labels_of(y: np.ndarray[Any, Any], shape: tuple[int, ...], ignore: float | None = None) -> LabelStatistics:
    """Return the statistics of labels for an output of a shape. Ignored labels only count for the shape."""
    if ignore is not None:
        remaining = y[y == y] if ignore != ignore else y[y != ignore]
        return replace(labels_of(remaining, ()), shape=tuple(y.shape[1:]))
    if not len(y):
        return LabelStatistics(y.shape[1:], True, 0.0, 0.0)
    is_whole = y.dtype.kind in "iub" or bool(np.all(np.mod(y, 1) == 0))
    low, high = float(y.min()), float(y.max())
    rows = y.ndim > 1 and y.shape[1:] == shape and shape[-1] > 1
    one_each = rows and bool(np.allclose(y.sum(axis=-1, dtype=np.float64), 1.0, atol=1e-4))
    majority = sigma = outlier_share = square = 0.0
    counts: tuple[int, ...] = ()
    if one_each and is_whole:
        sums = y.reshape(-1, y.shape[-1]).sum(axis=0, dtype=np.float64)
        majority, counts = float(sums.max() / sums.sum()), tuple(map(int, sums))
    elif is_whole and high - low < MOST_NUMBERS:
        result = np.bincount((y - low).astype(np.int64).reshape(-1))
        majority = float(result.max() / y.size)
        counts = (*[0] * int(low), *map(int, result)) if 0 <= low < MOST_NUMBERS else ()
    if not rows or not one_each:
        middle = np.median(y)
        distances = np.abs(np.asarray(y, np.float64) - middle)
        sigma = SIGMA * float(np.median(distances))
        outlier_share = float(np.mean(distances > FAR * sigma)) if sigma > 0 else 0.0
        square = float(np.mean(np.square(y, dtype=np.float64)))
    return LabelStatistics(
        tuple(y.shape[1:]), is_whole, low, high, one_each, majority, sigma, outlier_share, square, counts
    )


def _input(graph: Graph, node: Node, x: Any) -> InputStatistics:
    number = graph.nodes.index(node)
    readers = [graph.nodes[node] for node in consumers(graph.nodes).get(number, ())]
    numbers = node.dtype not in INTEGERS and not any(reader.operator in TOKEN_READERS for reader in readers)
    scaled = bool(readers) and all(reader.operator in NORMALIZING for reader in readers)
    shape = tuple(int(size or 0) for size in node.shape or ())
    if x is None or not numbers or scaled:
        return InputStatistics(node.name, shape, numbers and x is not None, scaled, 0.0, 0.0)
    x = np.asarray(x)
    low, high = (float(x.min()), float(x.max())) if x.size else (0.0, 0.0)
    bounds = InputStatistics(node.name, shape, numbers, scaled, low, high, peak=_peak(x))
    if len(shape) not in (1, 2) or x.ndim != len(shape) + 1 or shape[-1] > MOST_FEATURES or not x.size:
        return bounds
    steps = tuple(range(len(shape)))
    ranges = x.max(axis=steps).astype(np.float64) - x.min(axis=steps)
    if len(shape) == 2 and not np.median(ranges) < SAME_SCALE * (high - low):  # a picture, or a sequence of one scale
        return bounds
    means, deviations = x.mean(axis=steps, dtype=np.float64), x.std(axis=steps, dtype=np.float64)
    statistics = [tuple(map(float, item)) for item in (means, deviations, ranges)]
    return replace(bounds, means=statistics[0], deviations=statistics[1], ranges=statistics[2])


def _peak(x: np.ndarray[Any, Any]) -> float:
    """Return the largest norm of a sample, divided by the median norm; 0 for bytes, which have no outliers."""
    if x.dtype.kind != "f" or not x.size:
        return 0.0
    rows = x.reshape(len(x), -1)
    squares = np.einsum("ij,ij->i", rows, rows, dtype=np.float64 if x.dtype == np.float64 else np.float32)
    middle = float(np.median(squares))
    return float(np.sqrt(squares.max() / middle)) if middle > 0 else 0.0
