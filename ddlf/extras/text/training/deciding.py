"""What a text leaves open of its training, decided by rules: facts in, value, rule and reason out. Pure.

What is written is never decided. Limits are first guesses where no source is named. The rules of losses follow from what an output can say and what
labels are; the others ask for something only where a known defect is to be feared, and say so where none is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from math import isfinite, log, sqrt

DROPOUTS = frozenset(
    {
        "dropout",
        "Dropout",
        "SpatialDropout1D",
        "SpatialDropout2D",
        "SpatialDropout3D",
        "AlphaDropout",
        "GaussianDropout",
    }
)
PER_SAMPLE = 10
"""Parameters for each sample from which on a model can learn them by heart."""
DROPOUT_DENSITY = 0.2
"""Of layers with parameters, as many layers of dropout as spare a penalty."""
MANY_FEATURES = 5_000
LARGE, APART = 10.0, 100.0
"""Inputs of that size are not scaled; nor are features whose ranges are so many times apart."""
MOST_NUMBERS = 1_000
"""Features that get a mean and a deviation each: they are written into the text."""
PATIENCE = 10
ATTENDING = frozenset({"attend", "MultiHeadAttention", "GroupQueryAttention", "Attention", "AdditiveAttention"})
RECURRENT = frozenset(
    {"lstm", "gru", "lstmCell", "gruCell", "LSTM", "GRU", "SimpleRNN", "ConvLSTM2D", "Bidirectional", "RNN"}
)
NORMALIZING = frozenset(
    {"batchNorm", "batchNormalization", "instanceNormalization", "layerNormalization", "BatchNormalization"}
    | {"LayerNormalization", "GroupNormalization", "UnitNormalization", "RMSNormalization"}
    | {"Normalization", "Rescaling"}
)
SCALING = frozenset({"Normalization", "Rescaling"})
"""What stands before the first weights."""
SQUARED = ("MSE",)
"""Losses whose gradient grows with the error."""
MAJORITY = 0.9
"""Share of one class from which on guessing it pays more than learning."""
DEEP = 15
"""Operators on the shortest path from which on gradients need a normalization or a clip."""
OUTLIERS = 0.001
PEAK = 100.0
"""How many times as large as the middle one a sample is not, without being an outlier."""
UNEVEN = 10.0
"""How many times as large as another one a loss may be at first."""
HUBER = 1.345
"""Of the errors' deviation: 95 % as good as the mean square where there are no outliers (Huber 1964, Holland and Welsch 1977)."""
MOST_CLASSES = 1_000

Answer = tuple[str, str, str]
"""Value, rule, reason."""


@dataclass(frozen=True, slots=True)
class Labels:
    """What the labels of an output are.

    Attributes:
        shape: Sizes of one sample's label.
        whole: Whether all are whole numbers.
        low: The least.
        high: The largest.
        one_each: Whether each row sums to 1.
        majority: Share of the most frequent class; 0 if these are no classes.
        sigma: Robust deviation of all values, 1.4826 times the median distance from the median.
        far: Share of values more than 6 sigma from the median.
        square: Mean of the squares of all values.
        counts: Samples of each class, from 0; empty if these are no classes.
    """

    shape: tuple[int, ...]
    whole: bool
    low: float
    high: float
    one_each: bool = False
    majority: float = 0.0
    sigma: float = 0.0
    far: float = 0.0
    square: float = 0.0
    counts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Output:
    """An output: block, last activation (``"linear"`` if it has none), shape, type, labels, its loss if one is written, and its name."""

    block: str
    last: str
    shape: tuple[int, ...]
    dtype: str
    labels: Labels | None
    loss: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Input:
    """An input.

    Attributes:
        block: Its block.
        shape: Sizes of a sample.
        numbers: Whether they are quantities; False for numbers of tokens and the like.
        scaled: Whether a layer that scales reads it.
        low: The least value in training.
        high: The largest.
        means: Of each feature; empty if they were not looked at.
        deviations: Likewise.
        ranges: Likewise, largest minus least.
        peak: The largest norm of a sample over that of the middle one; 0 if it was not looked at.
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
class Facts:
    """All that the rules look at.

    Attributes:
        inputs: In the order of the text.
        outputs: Likewise.
        samples: Of training.
        parameters: Of the model; 0 if only Keras knows.
        layers: The operators of all layers.
        learning: How many layers have parameters.
        validation: Whether there is validation data.
        drawn: Whether operators have weights, which a text says how to draw.
        depth: Operators on the shortest path from an input to an output.
        weighted: Whether samples of training have weights.
    """

    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
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
    """What was decided.

    Attributes:
        block: Where it would be written.
        key: Under which key.
        value: As it would be written.
        rule: Name of the rule.
        reason: Why.
    """

    block: str
    key: str
    value: str
    rule: str
    reason: str


def decide(facts: Facts, written: Collection[tuple[str, str]]) -> Iterator[Decision]:
    """Decide what is not written.

    Args:
        facts: Of model and data.
        written: Block and key of all that is.

    Yields:
        A decision for each key that is open, losses first.
    """
    outputs = []
    for output in facts.outputs:
        if (output.block, "loss") not in written and ("train", "loss") not in written:
            value, rule, reason = loss(output)
            yield Decision(output.block, "loss", value, rule, reason)
            output = replace(output, loss=value)
        outputs.append(output)
        for key, value, rule, reason in parameters(output):
            if (output.block, key) not in written:
                yield Decision(output.block, key, value, rule, reason)
    facts = replace(facts, outputs=tuple(outputs))
    for key, rule_of in RULES.items():
        if ("train", key) not in written and (facts.drawn or key != "initial"):
            value, rule, reason = rule_of(facts)
            yield Decision("train", key, value, rule, reason)


def loss(output: Output) -> Answer:
    """The loss of an output, by its last activation and its labels.

    Raises:
        ValueError: There are no labels to look at, or none that an output of this shape can be compared with.
    """
    labels = output.labels
    if labels is None:
        raise ValueError("its labels are not in memory, so no rule can choose: write loss")
    classes = output.shape[-1] if output.shape else 1
    if labels.shape in (output.shape[:-1], (*output.shape[:-1], 1)) and classes > 1:
        if not labels.whole or not 0 <= labels.low <= labels.high < classes:
            raise ValueError(
                f"it has {classes} values, and its labels are one number each, from {labels.low:g} to {labels.high:g}: "
                f"classes are whole numbers from 0 to {classes - 1}"
            )
        how = "logits" if output.last == "linear" else output.last
        return "SCE", "loss-integers", f"{how} of {classes} classes, and labels are whole numbers"
    if labels.shape != output.shape and (labels.shape or (1,)) != output.shape:
        raise ValueError(f"it has the shape {list(output.shape)}, and its labels have {list(labels.shape)}")
    zero_one = labels.whole and labels.low >= 0 and labels.high <= 1
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
    if output.last in ("linear", "tanh") and labels.whole and labels.low == -1 and labels.high == 1 and labels.far == 0:
        return "HIL", "loss-margin", "labels are -1 and 1"
    if labels.far > OUTLIERS and labels.sigma > 0:
        return "HUL", "loss-outliers", f"{labels.far:.1%} of the labels are more than 6 deviations from their median"
    return "MSE", "loss-quantities", "labels are quantities without outliers"


def _initial(facts: Facts) -> Answer:
    return (
        "by_activation",
        "start-activation",
        "He before relu and its like, Glorot elsewhere; a bias 0.01 before relu, else 0",
    )


def _scaling(facts: Facts) -> Answer:
    answers = [scaling(each) for each in facts.inputs]
    values = [value for value, _, _ in answers]
    wanted = [answer for answer in answers if answer[0] != "none"] or answers
    return values[0] if len(values) == 1 else f"[{', '.join(values)}]", wanted[0][1], wanted[0][2]


def scaling(given: Input) -> Answer:
    """What one input is scaled by."""
    if not given.numbers:
        return "none", "scaling-tokens", "these are no quantities"
    if given.scaled:
        return "none", "scaling-in-model", "the model scales its input"
    large = max(abs(given.low), abs(given.high))
    if not isfinite(large):
        return "none", "scaling-not-finite", "inputs are NaN or infinite"
    spans = [each for each in given.ranges if each > 0]
    apart = max(spans) / min(spans) if spans else 1.0
    if large <= LARGE and apart <= APART:
        return "none", "scaling-fine", f"inputs lie between {given.low:.3g} and {given.high:.3g}"
    if given.means and len(given.means) <= MOST_NUMBERS:
        why = f"ranges of features are {apart:,.0f} times apart" if apart > APART else f"inputs go up to {large:,.4g}"
        means = ", ".join(f"{each:.6g}" for each in given.means)
        variances = ", ".join(f"{each * each or 1.0:.6g}" for each in given.deviations)
        return f"Normalization(axis=-1, mean=[{means}], variance=[{variances}])", "scaling-features", why
    half = (given.high - given.low) / 2 or 1.0
    middle = (given.high + given.low) / 2
    value = f"Rescaling(scale={1 / half:.6g}, offset={-middle / half:.6g})"
    return value, "scaling-range", f"inputs lie between {given.low:,.4g} and {given.high:,.4g}"


def _penalty(facts: Facts) -> Answer:
    features = max((each.shape[0] for each in facts.inputs if len(each.shape) == 1 and each.numbers), default=0)
    if features > MANY_FEATURES:
        return "L1(l1=0.0001)", "penalty-features", f"{features:,} features, of which few are likely to matter"
    if not facts.parameters or not facts.samples:
        return "none", "penalty-unknown", "how many parameters a sample has is known to Keras only"
    each = facts.parameters / facts.samples
    density = sum(layer in DROPOUTS for layer in facts.layers) / max(facts.learning, 1)
    if each > PER_SAMPLE and density < DROPOUT_DENSITY:
        return "L2(l2=0.0001)", "penalty-capacity", f"{each:,.0f} parameters a sample and little dropout"
    why = f"{each:,.1f} parameters a sample" if each <= PER_SAMPLE else "there is enough dropout"
    return "none", "penalty-none", why


def _patience(facts: Facts) -> Answer:
    if facts.validation:
        return str(PATIENCE), "patience-validation", "there is validation data; the best weights are restored"
    return "none", "patience-none", "there is no validation data to look at"


def _optimizer(facts: Facts) -> Answer:
    return "adam", "optimizer-usual", "it depends least on its learning rate, which is Keras's"


def schedule(facts: Facts) -> Answer:
    """How the learning rate goes over the run."""
    if found := next((layer for layer in facts.layers if layer in ATTENDING), None):
        why = f"the first gradients of {found} are far larger than later ones: warm-up (arXiv:2002.04745)"
        return '"warmup:0.05,cosine"', "schedule-attention", why
    return "none", "schedule-none", "nothing in the model needs a warm-up"


def clipping(facts: Facts) -> Answer:
    """The largest norm of all gradients together."""
    if found := next((layer for layer in facts.layers if layer in RECURRENT), None):
        return "1.0", "clipping-recurrent", f"gradients through {found} may explode (arXiv:1211.5063)"
    return "none", "clipping-none", "nothing in the model is recurrent"


def clip(facts: Facts) -> Answer:
    """How gradients are clipped by what they were, or by the weights."""
    layers = set(facts.layers)
    if layers & RECURRENT:
        return "none", "clip-recurrent", "gradients of what is recurrent have a largest norm"
    for each in facts.inputs:
        if each.peak > PEAK:
            why = f"the largest sample is {each.peak:,.0f} times the middle one: a batch with it is to step no further"
            return "rolling", "clip-inputs", why
    for output in facts.outputs:
        if output.loss in SQUARED and output.labels is not None and output.labels.far > OUTLIERS:
            why = f"{output.labels.far:.1%} of the labels are outliers, which the loss squares"
            return "rolling", "clip-labels", why
    if facts.depth > DEEP and not layers & (NORMALIZING - SCALING):
        why = f"{facts.depth} operators deep, without normalization and skips (arXiv:2102.06171)"
        return "agc", "clip-deep", why
    return "none", "clip-none", "no outliers in the data, and the model is not deep, or normalizes"


def loss_weights(facts: Facts) -> Answer:
    """How the losses of several outputs count."""
    if len(facts.outputs) == 1:
        return "none", "weights-one", "there is one output"
    if facts.weighted:
        return "none", "weights-samples", "samples have weights, which say what counts"
    sizes = {output.block: size for output in facts.outputs if (size := first_loss(output)) > 0}
    if len(sizes) == len(facts.outputs):
        large, small = max(sizes, key=lambda name: sizes[name]), min(sizes, key=lambda name: sizes[name])
        if sizes[large] > UNEVEN * sizes[small]:
            times = sizes[large] / sizes[small]
            why = f"at first the loss of {large} is {times:,.0f} times that of {small} (arXiv:1705.07115)"
            each = ", ".join(f"{output.name or output.block}={sizes[output.block]:.6g}" for output in facts.outputs)
            return f"uncertainty({each})", "weights-uncertainty", why
    return "none", "weights-equal", "losses of all outputs count the same"


def first_loss(output: Output) -> float:
    """About what an output's loss is before training: that of guessing, or of 0 for all; 0 if nobody knows."""
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


def class_weight(facts: Facts) -> Answer:
    """How much each class counts."""
    if len(facts.outputs) > 1:
        return "none", "classes-outputs", "weights of classes are those of a single output"
    output = facts.outputs[0]
    labels = output.labels
    single = labels is not None and (labels.shape in ((), (1,)) or (labels.one_each and len(labels.shape) == 1))
    if labels is None or not single or output.loss not in ("SCE", "CCE", "CCEL", "FOL") or len(labels.counts) < 2:
        return "none", "classes-none", "labels are not one class each, or not in memory"
    if output.loss == "FOL" and output.last != "softmax":
        return "none", "classes-focal", "alpha of the loss weighs the classes"
    if facts.weighted:
        return "none", "classes-samples", "samples have weights, which say what counts"
    if labels.majority <= MAJORITY or len(labels.counts) > MOST_CLASSES:
        return "none", "classes-even", f"the largest class has {labels.majority:.0%} of the labels"
    present, total = sum(count > 0 for count in labels.counts), sum(labels.counts)
    each = ", ".join(f"{total / (present * count):.6g}" if count else "1" for count in labels.counts)
    return f"[{each}]", "classes-majority", f"{labels.majority:.0%} of the labels are one class"


def parameters(output: Output) -> Iterator[tuple[str, str, str, str]]:
    """Key, value, rule and reason of each parameter of an output's loss that its labels say."""
    labels = output.labels
    if labels is None:
        return
    if output.loss == "HUL" and labels.sigma > 0:
        why = f"{HUBER} times the deviation of the labels"
        yield "delta", f"{HUBER * labels.sigma:.6g}", "huber-sigma", why
    if output.loss == "FOL" and output.last != "softmax" and len(labels.counts) == 2 and min(labels.counts):
        alpha = labels.counts[0] / sum(labels.counts)
        yield "alpha", f"{alpha:.6g}", "focal-counts", f"{alpha:.1%} of the labels are 0, and alpha weighs the others"


RULES: dict[str, Callable[[Facts], Answer]] = {
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
"""By key of the block ``train``."""
OF_RUNS = ("schedule", "clip", "class_weight")
"""Those that are settings of a run."""


def mismatch(output: Output, loss: str) -> str:
    """Why a loss cannot compare an output with its labels; empty if it can."""
    labels = output.labels
    if labels is None:
        return ""
    single = labels.shape in (output.shape[:-1], (*output.shape[:-1], 1))
    if loss == "SCE":
        classes = output.shape[-1] if output.shape else 1
        if not single or classes < 2:
            return f"it takes the number of a class, and labels have the shape {list(labels.shape)}: write CCE for rows of 0 and 1"
        if not labels.whole or labels.low < 0 or labels.high >= classes:
            return f"classes are 0 to {classes - 1}, and labels go from {labels.low:g} to {labels.high:g}"
    elif labels.shape != output.shape and not (single and output.shape[-1:] == (1,)):
        more = ": write SCE for numbers of classes" if single and labels.whole else ""
        return f"outputs have the shape {list(output.shape)}, and labels {list(labels.shape)}{more}"
    return ""
