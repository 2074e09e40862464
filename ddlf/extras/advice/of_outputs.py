"""Rules of class L about an output that does not fit its loss. Pure. Keras refuses none of these."""

from __future__ import annotations

from collections.abc import Iterator

from ddlf.extras.advice.facts import Array, Facts, Head, Labels
from ddlf.extras.advice.rule import Change, Found, Rule

PROBABILITIES = ("cce", "sce", "bce")
ONE_OF_MANY = ("cce", "sce")
DISTANCES = ("mse", "mae", "huber", "logcosh")
BOUNDED = {
    "sigmoid": (0.0, 1.0),
    "hard_sigmoid": (0.0, 1.0),
    "softmax": (0.0, 1.0),
    "tanh": (-1.0, 1.0),
    "hard_tanh": (-1.0, 1.0),
    "softsign": (-1.0, 1.0),
    "relu": (0.0, float("inf")),
    "relu6": (0.0, 6.0),
    "softplus": (0.0, float("inf")),
    "exponential": (0.0, float("inf")),
}
"""Between which values an activation's output lies."""
NO_PROBABILITY = (
    "relu",
    "tanh",
    "relu6",
    "leaky_relu",
    "elu",
    "selu",
    "gelu",
    "silu",
    "swish",
    "softplus",
    "softsign",
    "exponential",
)
CLOSE = 0.02
"""By which share of their range targets may lie outside of what an output can be."""
UMLAUT = "Zhang et al., UMLAUT, CHI 2021, doi:10.1145/3411764.3445538"
KERAS = "measured: Keras 3.15 trains it without a word"


def targets(facts: Facts) -> Iterator[tuple[Head, Array, Labels]]:
    """Heads with the loss of Keras's, and what they are compared with."""
    for head in facts.heads:
        array = facts.array(head.target)
        if array is not None and array.has_numbers and not array.bad and head.loss not in ("", "own"):
            yield head, array, array.labels or Labels()


def are_classes(head: Head, array: Array, labels: Labels) -> bool:
    """Whether labels are numbers of classes of which the output has a unit each."""
    fits = array.sample in ((), (1,)) and len(head.shape) == 1 and head.units > 2
    return fits and labels.kind == "numbers" and array.low >= 0 and array.high < head.units


def said(head: Head, facts: Facts) -> str:
    return f"the output {head.name!r}" if len(facts.heads) > 1 else "the output"


def _one_unit(facts: Facts) -> Iterator[Found]:
    for head in facts.heads:
        if head.activation == "softmax" and head.units == 1 and head.loss != "own":
            changes = [Change("argument", "sigmoid", head.layer, "activation")]
            if head.loss in ONE_OF_MANY:
                changes.append(Change("loss", "binary_crossentropy", head.loss))
            yield Found(
                f"{said(head, facts)} is a softmax over 1 unit, which is always 1",
                ("layer", head.layer),
                changes=tuple(changes),
            )


def _of_one(facts: Facts) -> Iterator[Found]:
    for head in facts.heads:
        if head.loss in ONE_OF_MANY and head.units == 1 and head.activation != "softmax":
            changes = [Change("loss", "binary_crossentropy", head.loss)]
            if head.activation not in ("sigmoid", "") and not head.logits:
                changes.append(Change("argument", "sigmoid", head.layer, "activation"))
            yield Found(
                f"{said(head, facts)} has 1 unit, and the loss compares shares of several",
                ("loss", head.name),
                changes=tuple(changes) if not head.logits else (),
            )


def _logits(facts: Facts) -> Iterator[Found]:
    for head in facts.heads:
        if head.loss not in PROBABILITIES or not head.activation:
            continue
        normal = "sigmoid" if head.loss == "bce" else "softmax"
        if head.logits and head.activation in ("softmax", "sigmoid"):
            yield Found(
                f"the loss takes logits (from_logits=True), and {said(head, facts)} is a {head.activation} already",
                ("loss", head.name),
                changes=(Change("argument", "linear", head.layer, "activation"),),
                fix="leave the last layer without an activation, or from_logits out",
            )
        elif not head.logits and head.activation in ("linear", *NO_PROBABILITY):
            what = "has no activation" if head.activation == "linear" else f"is a {head.activation}"
            yield Found(
                f"{said(head, facts)} {what}, and the loss takes probabilities",
                ("layer", head.layer),
                changes=(Change("argument", normal, head.layer, "activation"),),
                fix=f"give the last layer activation={normal!r}"
                + ("" if head.activation != "linear" else ", or the loss from_logits=True"),
            )
        elif (
            head.logits
            and head.activation in NO_PROBABILITY
            and head.activation not in ("leaky_relu", "elu", "gelu", "silu", "swish")
        ):
            yield Found(
                f"{said(head, facts)} is a {head.activation}, and the loss takes logits of any sign",
                ("layer", head.layer),
                changes=(Change("argument", "linear", head.layer, "activation"),),
                severity="W",
                fix="leave the last layer without an activation",
            )


def _out_of_reach(facts: Facts) -> Iterator[Found]:
    for head, array, labels in targets(facts):
        if head.loss not in DISTANCES or head.activation not in BOUNDED:
            continue
        low, high = BOUNDED[head.activation]
        margin = CLOSE * (array.high - array.low)
        if array.low < low - margin or array.high > high + margin:
            reach = f"at least {low:g}" if high == float("inf") else f"between {low:g} and {high:g}"
            yield Found(
                f"{said(head, facts)} is a {head.activation}, {reach}, and {array.name} reaches from {array.low:g} to {array.high:g}",
                ("layer", head.layer),
                changes=()  # of classes it is the loss that is wrong, as L04 says
                if are_classes(head, array, labels)
                else (Change("argument", "linear", head.layer, "activation"),),
            )
        elif (
            (
                head.activation == "softmax"
                and head.units > 1
                and array.labels is not None
                and array.labels.kind in ("real", "many_hot")
            )
            and array.sample == head.shape
            and max(abs(1 - end) for end in array.labels.sums) > 0.1
        ):
            yield Found(
                f"{said(head, facts)} is a softmax, whose rows sum to 1, and those of {array.name} sum to "
                f"{array.labels.sums[0]:.3g} to {array.labels.sums[1]:.3g}",
                ("layer", head.layer),
                changes=(Change("argument", "linear", head.layer, "activation"),),
            )


def _each_alone(facts: Facts) -> Iterator[Found]:
    for head in facts.heads:
        if head.activation == "sigmoid" and head.loss in ONE_OF_MANY and not head.logits and head.units > 1:
            array = facts.array(head.target)
            many = array is not None and array.labels is not None and array.labels.kind == "many_hot"
            yield Found(
                f"{said(head, facts)} is a sigmoid of {head.units} units, each by itself, and the loss takes shares that sum to 1",
                ("loss" if many else "layer", head.name if many else head.layer),
                changes=(
                    Change("loss", "binary_crossentropy", head.loss)
                    if many
                    else Change("argument", "softmax", head.layer, "activation"),
                ),
            )


def _other_axis(facts: Facts) -> Iterator[Found]:
    for head in facts.heads:
        layer = facts.layer(head.layer)
        if layer is None or layer.kind != "Softmax" or head.loss not in ONE_OF_MANY:
            continue
        axis = layer.config.get("axis", -1)
        if isinstance(axis, int) and axis not in (-1, len(layer.shape)):
            over = "samples of a batch" if axis == 0 else f"axis {axis}"
            yield Found(
                f"{said(head, facts)} is a softmax over {over}, and the loss takes shares over the last, of {head.units} classes",
                ("layer", layer.name),
                changes=(Change("argument", -1, layer.name, "axis"),),
            )


OUTPUTS = (
    Rule(
        id="L01",
        severity="E",
        title="softmax over one unit",
        look=_one_unit,
        why="The softmax of a single unit is always 1, so there are no gradients.",
        fix="Use a sigmoid with binary_crossentropy for one unit.",
        source=f"{UMLAUT}; {KERAS}",
    ),
    Rule(
        id="L02",
        severity="E",
        title="logits and probabilities confused",
        look=_logits,
        why="The logarithm of a value that is no probability is NaN or meaningless; a softmax of a softmax is nearly flat.",
        fix="Match the output to the loss: probabilities, or logits (no activation) with from_logits=True.",
        source=f"{UMLAUT}; Islam et al., arXiv:1906.01388; {KERAS}: relu with categorical_crossentropy gives NaN",
    ),
    Rule(
        id="L15",
        severity="E",
        title="a multi-class loss for one unit",
        look=_of_one,
        why="The probability of a single unit is always 1, so the loss is constant and there are no gradients.",
        fix="Use binary_crossentropy with a sigmoid, or one unit per class.",
        source=f"{UMLAUT}; {KERAS}",
    ),
    Rule(
        id="L07",
        severity="E",
        title="an output that cannot reach its targets",
        look=_out_of_reach,
        why="The activation cannot produce these targets. The output saturates, where gradients are 0.",
        fix="Use a linear output, or scale the targets to the range of the output.",
        source=f"{UMLAUT}; {KERAS}",
    ),
    Rule(
        id="L19",
        severity="E",
        title="softmax over the wrong axis",
        look=_other_axis,
        why="Positions or samples compete with each other, and the values at one position are not class probabilities.",
        fix="Omit axis: the default, the last axis, is that of the classes.",
        source=KERAS,
    ),
    Rule(
        id="L09",
        severity="W",
        title="sigmoid with a single-label loss",
        look=_each_alone,
        why="All units can be near 1 at the same time, and the loss does not penalize it.",
        fix="Use a softmax if each sample has one class, or binary_crossentropy if it may have several.",
        source=UMLAUT,
    ),
)
