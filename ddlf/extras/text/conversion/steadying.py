"""Rules of what keeps training stable: schedule, clipping, weights of losses and of classes, parameters of losses. Pure.

Facts in, value, rule and reason out, for ``deciding``: something is asked for only where a known defect is to be feared.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import log, sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddlf.extras.text.conversion.deciding import Facts, Output

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
