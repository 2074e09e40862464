"""Rules of class L: labels, outputs, losses and metrics that do not fit together. Pure. Keras refuses few of these."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ddlf.extras.advice.facts import USUAL_CUT, AppFacts, ArrayFacts, LabelFacts, OutputFacts
from ddlf.extras.advice.rule import Change, Finding, rule

LEARNT = 0.7
"""A model has begun to learn when the loss is below this share of the first loss."""
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
"""The range of each activation's output."""
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
"""Targets may exceed the output's range by this share of the targets' own range."""
OF_CLASSES = (
    "accuracy",
    "acc",
    "categorical_accuracy",
    "sparse_categorical_accuracy",
    "CategoricalAccuracy",
    "SparseCategoricalAccuracy",
)
MANY_CLASSES = 1_000
ENOUGH_LABELS = 50
ENDLESS = 100.0
"""A loss counts as unbounded if it falls below minus this multiple of the first loss. No likelihood falls so far in so
few steps."""
AGAINST = -0.2
"""A correlation of outputs and labels below this number shows a wrong loss: steps that reduce a correct loss never lead
to it."""
LOSSES_APART = 10.0


def targets(facts: AppFacts) -> Iterator[tuple[OutputFacts, ArrayFacts, LabelFacts]]:
    """Yield the outputs with a Keras loss, each with its array of labels."""
    for head in facts.heads:
        array = facts.array(head.target)
        if array is not None and array.has_numbers and not array.non_finite and head.loss not in ("", "own"):
            yield head, array, array.labels or LabelFacts()


def are_classes(head: OutputFacts, array: ArrayFacts, labels: LabelFacts) -> bool:
    """Return whether labels are class numbers, and the output has a unit for each class."""
    fits = array.sample in ((), (1,)) and len(head.shape) == 1 and head.units > 2
    return fits and labels.kind == "numbers" and array.low >= 0 and array.high < head.units


def output_label(head: OutputFacts, facts: AppFacts) -> str:
    return f"the output {head.name!r}" if len(facts.heads) > 1 else "the output"


@rule("L01", "E", "softmax over one unit")
def _one_unit(facts: AppFacts) -> Iterator[Finding]:
    """The softmax of a single unit is always 1, so there are no gradients.

    Fix: Use a sigmoid with binary_crossentropy for one unit.
    Source: Zhang et al., UMLAUT, CHI 2021, doi:10.1145/3411764.3445538; measured: Keras 3.15 trains it without a word
    """
    for head in facts.heads:
        if head.activation == "softmax" and head.units == 1 and head.loss != "own":
            changes = [Change("argument", "sigmoid", head.layer, "activation")]
            if head.loss in ONE_OF_MANY:
                changes.append(Change("loss", "binary_crossentropy", head.loss))
            yield Finding(
                f"{output_label(head, facts)} is a softmax over 1 unit, which is always 1",
                ("layer", head.layer),
                changes=tuple(changes),
            )


@rule("L15", "E", "a multi-class loss for one unit")
def _of_one(facts: AppFacts) -> Iterator[Finding]:
    """The probability of a single unit is always 1, so the loss is constant and there are no gradients.

    Fix: Use binary_crossentropy with a sigmoid, or one unit per class.
    Source: Zhang et al., UMLAUT, CHI 2021, doi:10.1145/3411764.3445538; measured: Keras 3.15 trains it without a word
    """
    for head in facts.heads:
        if head.loss in ONE_OF_MANY and head.units == 1 and head.activation != "softmax":
            changes = [Change("loss", "binary_crossentropy", head.loss)]
            if head.activation not in ("sigmoid", "") and not head.logits:
                changes.append(Change("argument", "sigmoid", head.layer, "activation"))
            yield Finding(
                f"{output_label(head, facts)} has 1 unit, and the loss compares probabilities of several classes",
                ("loss", head.name),
                changes=tuple(changes) if not head.logits else (),
            )


@rule("L02", "E", "logits and probabilities confused")
def _logits(facts: AppFacts) -> Iterator[Finding]:
    """The logarithm of a value that is not a probability is NaN or meaningless, and a softmax of a softmax is nearly
    flat.

    Fix: Match the output to the loss: probabilities, or logits (no activation) with from_logits=True.
    Source: Zhang et al., UMLAUT, CHI 2021, doi:10.1145/3411764.3445538; Islam et al., arXiv:1906.01388; measured: Keras
    3.15 trains it without a word: relu with categorical_crossentropy gives NaN
    """
    for head in facts.heads:
        if head.loss not in PROBABILITIES or not head.activation:
            continue
        normal = "sigmoid" if head.loss == "bce" else "softmax"
        if head.logits and head.activation in ("softmax", "sigmoid"):
            yield Finding(
                f"the loss takes logits (from_logits=True), and {output_label(head, facts)} is a {head.activation} already",
                ("loss", head.name),
                changes=(Change("argument", "linear", head.layer, "activation"),),
                fix="leave the last layer without an activation, or from_logits out",
            )
        elif not head.logits and head.activation in ("linear", *NO_PROBABILITY):
            problem = "has no activation" if head.activation == "linear" else f"is a {head.activation}"
            yield Finding(
                f"{output_label(head, facts)} {problem}, and the loss takes probabilities",
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
            yield Finding(
                f"{output_label(head, facts)} is a {head.activation}, and the loss takes logits of any sign",
                ("layer", head.layer),
                changes=(Change("argument", "linear", head.layer, "activation"),),
                severity="W",
                fix="leave the last layer without an activation",
            )


@rule("L07", "E", "an output that cannot reach its targets")
def _out_of_reach(facts: AppFacts) -> Iterator[Finding]:
    """The activation cannot produce these targets. The output saturates, where gradients are 0.

    Fix: Use a linear output, or scale the targets to the range of the output.
    Source: Zhang et al., UMLAUT, CHI 2021, doi:10.1145/3411764.3445538; measured: Keras 3.15 trains it without a word
    """
    for head, array, labels in targets(facts):
        if head.loss not in DISTANCES or head.activation not in BOUNDED:
            continue
        low, high = BOUNDED[head.activation]
        margin = CLOSE * (array.high - array.low)
        if array.low < low - margin or array.high > high + margin:
            reach = f"at least {low:g}" if high == float("inf") else f"between {low:g} and {high:g}"
            yield Finding(
                f"{output_label(head, facts)} is a {head.activation}, {reach}, and {array.name} reaches from {array.low:g} to {array.high:g}",
                ("layer", head.layer),
                changes=()  # for classes, the loss is wrong; L04 reports it
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
            yield Finding(
                f"{output_label(head, facts)} is a softmax, whose rows sum to 1, and those of {array.name} sum to "
                f"{array.labels.sums[0]:.3g} to {array.labels.sums[1]:.3g}",
                ("layer", head.layer),
                changes=(Change("argument", "linear", head.layer, "activation"),),
            )


@rule("L09", "W", "sigmoid with a single-label loss")
def _each_alone(facts: AppFacts) -> Iterator[Finding]:
    """All units can be near 1 at the same time, and the loss does not penalize this.

    Fix: Use a softmax if each sample has one class, or binary_crossentropy if it may have several.
    Source: Zhang et al., UMLAUT, CHI 2021, doi:10.1145/3411764.3445538
    """
    for head in facts.heads:
        if head.activation == "sigmoid" and head.loss in ONE_OF_MANY and not head.logits and head.units > 1:
            array = facts.array(head.target)
            many = array is not None and array.labels is not None and array.labels.kind == "many_hot"
            yield Finding(
                f"{output_label(head, facts)} is a sigmoid of {head.units} independent units, and the loss takes probabilities that sum to 1",
                ("loss" if many else "layer", head.name if many else head.layer),
                changes=(
                    Change("loss", "binary_crossentropy", head.loss)
                    if many
                    else Change("argument", "softmax", head.layer, "activation"),
                ),
            )


@rule("L19", "E", "softmax over the wrong axis")
def _other_axis(facts: AppFacts) -> Iterator[Finding]:
    """The softmax normalizes over positions or samples, so the values at one position are not class probabilities.

    Fix: Leave axis out. The default is the last axis, which has the classes.
    Source: measured: Keras 3.15 trains it without a word
    """
    for head in facts.heads:
        layer = facts.layer(head.layer)
        if layer is None or layer.kind != "Softmax" or head.loss not in ONE_OF_MANY:
            continue
        axis = layer.config.get("axis", -1)
        if isinstance(axis, int) and axis not in (-1, len(layer.shape)):
            over = "samples of a batch" if axis == 0 else f"axis {axis}"
            yield Finding(
                f"{output_label(head, facts)} is a softmax over {over}, and the loss takes probabilities over the last axis, of {head.units} classes",
                ("layer", layer.name),
                changes=(Change("argument", -1, layer.name, "axis"),),
            )


@rule("L03", "E", "labels that the loss cannot take")
def _out_of_range(facts: AppFacts) -> Iterator[Finding]:
    """A class without an output unit, or a probability above 1, is invalid: the loss becomes negative or NaN, or the
    step fails.

    Fix: Convert labels to the range of the loss in load_dataset.
    Source: measured: Keras 3.15 trains it without a word: labels of 0 and 255 reach a loss of -209,919
    """
    for head, array, labels in targets(facts):
        if head.loss == "sce" and not array.is_whole and labels.kind == "real" and array.sample in ((), (1,)):
            yield Finding(
                f"{array.name} has fractions, from {array.low:g} to {array.high:g}, and the loss takes numbers of classes",
                ("data", array.name),
                fix="keep labels as whole numbers: do not scale them like inputs",
            )
        elif head.loss == "sce" and labels.kind != "one_hot" and head.units > 1:
            if array.low < 0 or array.high >= head.units:
                from_one = array.low == 1 and array.high == head.units
                lines = tuple(
                    f"self.{y_array.name} = self.{y_array.name} - 1"
                    for y_array in facts.arrays_of("y")
                    if "[" not in y_array.name
                )
                yield Finding(
                    f"{array.name} has numbers from {array.low:g} to {array.high:g}, and {output_label(head, facts)} of {head.units} units "
                    f"has classes 0 to {head.units - 1}",
                    ("data", array.name),
                    changes=(Change("data", lines),) if from_one and lines and "[" not in array.name else (),
                    fix="count classes from 0: y - 1" if from_one else "",
                )
        elif head.loss in ("bce", "cce") and (array.low < 0 or array.high > 1):
            if head.loss == "cce" and labels.kind == "numbers":
                continue  # L05 reports this
            names = [y_array.name for y_array in facts.arrays_of("y") if "[" not in y_array.name]
            pair = sorted(labels.counts) if labels.kind == "numbers" else []
            lines = ()
            if len(pair) == 2 and "[" not in array.name:
                lines = tuple(f'self.{name} = (self.{name} == {pair[1]}).astype("float32")' for name in names)
            elif (
                array.low >= 0
                and 1 < array.high <= 255
                and "[" not in array.name
                and not are_classes(head, array, labels)
            ):
                lines = tuple(f'self.{name} = self.{name}.astype("float32") / {array.high:g}' for name in names)
            yield Finding(
                f"{array.name} has values from {array.low:g} to {array.high:g}, and the loss takes values from 0 to 1",
                ("data", array.name),
                changes=(Change("data", lines),) if lines else (),
            )
        elif head.loss == "poisson" and array.low < 0:
            yield Finding(
                f"{array.name} has values down to {array.low:g}, and counts are never negative", ("data", array.name)
            )
        elif head.loss == "hinge" and array.is_whole and not {array.low, array.high} <= {-1.0, 0.0, 1.0}:
            yield Finding(
                f"{array.name} has values from {array.low:g} to {array.high:g}, and the loss takes -1 and 1",
                ("data", array.name),
            )


def _squeezed(
    target: tuple[int, ...], output: tuple[int | None, ...]
) -> tuple[tuple[int, ...], tuple[int | None, ...]]:
    """Return the shapes of target and output in the form in which Keras compares them: it drops a last axis of size 1
    that the other shape lacks."""
    if len(output) == len(target) + 1 and output[-1] == 1:
        output = output[:-1]
    if len(target) == len(output) + 1 and target[-1] == 1:
        target = target[:-1]
    return target, output


@rule("L04", "E", "labels and output of different shapes")
def _broadcast(facts: AppFacts) -> Iterator[Finding]:
    """NumPy-style broadcasting compares outputs with the wrong targets, or the run fails.

    Fix: Give the last layer the shape of a label, or give labels the shape of the output.
    Source: Zhang et al., UMLAUT, CHI 2021, doi:10.1145/3411764.3445538; Humbatova et al., Taxonomy of Real Faults,
    arXiv:1910.11015
    """
    for head, array, labels in targets(facts):
        if head.loss == "sce" or (head.loss == "cce" and labels.kind == "numbers"):
            continue
        target, output = _squeezed(array.sample, head.shape)
        if target == output or not head.shape or any(size is None for size in output):
            continue
        stretched = all(1 in (a, b) or a == b for a, b in zip(reversed(target), reversed(output), strict=False))
        # If one side lacks axes, the sample axes are compared.
        how = "is stretched to the other" if stretched else "does not fit the other"
        changes: tuple[Change, ...] = ()
        if are_classes(head, array, labels):
            changes = (Change("loss", "sparse_categorical_crossentropy", head.loss),)
            if head.activation != "softmax":
                changes += (Change("argument", "softmax", head.layer, "activation"),)
        yield Finding(
            f"a sample of {array.name} has the shape {array.sample}, {output_label(head, facts)} {head.shape}: one {how}",
            ("loss", head.name) if changes else ("data", array.name),
            changes=changes,
            fix="for numbers of classes use sparse_categorical_crossentropy" if changes else "",
        )


@rule("L05", "E", "class numbers where one-hot rows are expected")
def _numbers_for_rows(facts: AppFacts) -> Iterator[Finding]:
    """categorical_crossentropy compares rows with rows: Keras refuses a number, or compares it with all classes.

    Fix: Use sparse_categorical_crossentropy, or one-hot labels: keras.utils.to_categorical(y).
    Source: Humbatova et al., arXiv:1910.11015
    """
    for head, array, labels in targets(facts):
        one_number = array.sample in ((), (1,)) and head.units > 1
        if head.loss == "cce" and one_number and labels.kind == "numbers" and len(head.shape) == 1:
            yield Finding(
                f"{array.name} has numbers of classes, {array.low:g} to {array.high:g}, and categorical_crossentropy takes rows of {head.units}",
                ("loss", head.name),
                changes=(Change("loss", "sparse_categorical_crossentropy", head.loss),),
            )


@rule("L06", "E", "one-hot rows where class numbers are expected")
def _rows_for_numbers(facts: AppFacts) -> Iterator[Finding]:
    """sparse_categorical_crossentropy takes the number of a class for each sample, and Keras refuses a row in the first
    step.

    Fix: Use categorical_crossentropy, or numbers: y.argmax(axis=-1).
    Source: Humbatova et al., arXiv:1910.11015
    """
    for head, array, labels in targets(facts):
        if (
            head.loss == "sce"
            and array.sample == head.shape
            and labels.kind in ("one_hot", "shares")
            and head.units > 1
        ):
            yield Finding(
                f"{array.name} has rows of {array.sample[-1]}, and sparse_categorical_crossentropy takes numbers of classes",
                ("loss", head.name),
                changes=(Change("loss", "categorical_crossentropy", head.loss),),
            )


@rule("L08", "E", "targets that do not sum to 1")
def _no_distribution(facts: AppFacts) -> Iterator[Finding]:
    """If rows do not sum to 1, divergence and cross-entropy do not have their minimum at the right answer.

    Fix: Divide each row by its sum.
    Source: WebNNM, 2026
    """
    for head, array, labels in targets(facts):
        if head.loss == "kld" and head.units == 1 and head.activation in ("linear", "relu", "sigmoid", "tanh"):
            yield Finding(
                f"{array.name} has one number for each sample, and the loss compares probabilities that sum to 1",
                ("loss", head.name),
                changes=(Change("loss", "mse", head.loss),) if head.activation == "linear" else (),
                fix="for numbers use a distance, such as mse",
            )
        if (
            head.loss not in ("kld", "cce", "bce")
            or len(array.sample) != 1
            or array.sample != head.shape
            or head.units < 2
        ):
            continue
        if head.loss in ("cce", "bce") and (labels.kind != "many_hot" or head.activation != "softmax"):
            continue
        if labels.kind in ("real", "many_hot") and (array.low < 0 or max(abs(1 - end) for end in labels.sums) > 1e-2):
            sums = (
                f"rows of {array.name} sum to {labels.sums[0]:.3g} to {labels.sums[1]:.3g}"
                if array.low >= 0
                else f"{array.name} goes down to {array.low:g}"
            )
            many = labels.kind == "many_hot"
            changes = [Change("argument", "sigmoid", head.layer, "activation")] if many else []
            if many and head.loss != "bce":
                changes.append(Change("loss", "binary_crossentropy", head.loss))
            yield Finding(
                f"{sums}, and the loss compares probabilities that sum to 1",
                ("loss", head.name),
                changes=tuple(changes),
                fix="for several labels in a sample use a sigmoid, and binary_crossentropy" if many else "",
            )


@rule("L10", "W", "binary cross-entropy for single-label classes")
def _exclusive(facts: AppFacts) -> Iterator[Finding]:
    """With many classes nearly all targets are 0, so the loss and its gradients are small.

    Fix: Take a softmax and categorical_crossentropy.
    Source: Zhang et al., UMLAUT, CHI 2021, doi:10.1145/3411764.3445538; WebNNM, 2026
    """
    for head, array, labels in targets(facts):
        if (
            head.loss != "bce"
            or head.logits
            or head.units < 3
            or labels.kind != "one_hot"
            or array.shape[0] < ENOUGH_LABELS
        ):
            continue
        by_class = any(name in OF_CLASSES for name in head.metrics)
        if head.activation == "softmax" or (head.activation == "sigmoid" and by_class):
            changes = [Change("loss", "categorical_crossentropy", head.loss)]
            if head.activation == "sigmoid":
                changes.append(Change("argument", "softmax", head.layer, "activation"))
            yield Finding(
                f"each row of {array.name} has one class of {head.units}, and binary_crossentropy treats each class as a separate question",
                ("loss", head.name),
                changes=tuple(changes),
            )


@rule("L11", "W", "a regression loss for classes")
def _distance_of_classes(facts: AppFacts) -> Iterator[Finding]:
    """When an output is confidently wrong, a squared error has almost no gradient through a softmax or sigmoid.
    Training is slow.

    Fix: Take a softmax and categorical_crossentropy.
    Source: Zhang et al., UMLAUT, CHI 2021, doi:10.1145/3411764.3445538; Golik et al., Interspeech 2013
    """
    for head, array, labels in targets(facts):
        if (
            head.loss in (*DISTANCES, "hinge")
            and labels.kind == "one_hot"
            and head.units > 1
            and array.sample == head.shape
            and array.shape[0] >= ENOUGH_LABELS
        ) and head.activation in ("softmax", "sigmoid", "linear"):
            changes = [Change("loss", "categorical_crossentropy", head.loss)]
            if head.activation != "softmax":
                changes.append(Change("argument", "softmax", head.layer, "activation"))
            yield Finding(
                f"{array.name} has one class of {head.units} in each row, and the loss is {head.loss.upper()}",
                ("loss", head.name),
                changes=tuple(changes),
            )


@rule("L12", "W", "accuracy for regression")
def _accuracy_of_numbers(facts: AppFacts) -> Iterator[Finding]:
    """Outputs almost never equal a real number exactly, so the metric stays at 0.

    Fix: Measure the mean absolute error, or R2Score.
    Source: Zhang et al., UMLAUT, CHI 2021, doi:10.1145/3411764.3445538
    """
    for head, array, labels in targets(facts):
        accuracy = [
            name
            for name in head.metrics
            if name in OF_CLASSES or name in ("Accuracy", "BinaryAccuracy", "binary_accuracy")
        ]
        numbers = labels.kind in ("real", "shares") or (labels.kind == "numbers" and len(labels.counts) > 20)
        if (
            accuracy
            and head.loss in (*DISTANCES, "mape", "msle")
            and numbers
            and head.activation in ("linear", "relu", "softplus")
        ):
            yield Finding(
                f"the metric {accuracy[0]!r} counts outputs that are equal to {array.name}, which are numbers from {array.low:g} to {array.high:g}",
                ("metric", head.name),
                changes=(Change("metric", "mae", accuracy[0]),),
            )


@rule("L17", "W", "a metric that does not fit labels and output")
def _other_metric(facts: AppFacts) -> Iterator[Finding]:
    """The metric does not measure the model, or it fails in the first step.

    Fix: Use 'accuracy'; Keras then chooses the variant that fits.
    Source: Zhang et al., UMLAUT, CHI 2021, doi:10.1145/3411764.3445538; Keras, Model.compile
    """
    yield from _threshold_out_of_range(facts)
    for head, array, labels in targets(facts):
        for name in head.metrics:
            plain = name.replace("_", "").lower()
            if plain == "binaryaccuracy" and head.loss in ("cce", "sce") and head.units > 2:
                problem = f"counts each of {head.units} classes separately: always predicting no is right {1 - 1 / head.units:.0%} of the time"
            elif plain in ("categoricalaccuracy", "sparsecategoricalaccuracy") and head.units == 1:
                problem = "takes the largest of several units, and the output has 1: the metric never changes"
            elif plain in ("categoricalaccuracy", "precision", "recall", "auc", "f1score") and head.loss == "sce":
                problem = f"takes rows of {head.units}, and {array.name} has numbers of classes"
            elif plain == "sparsecategoricalaccuracy" and head.loss == "cce" and labels.kind == "one_hot":
                problem = f"takes numbers of classes, and {array.name} has rows of {head.units}"
            else:
                continue
            yield Finding(
                f"the metric {name!r} {problem}", ("metric", head.name), changes=(Change("metric", "accuracy", name),)
            )


def _threshold_out_of_range(facts: AppFacts) -> Iterator[Finding]:
    for head in facts.heads:
        for name, cut in head.cuts:
            if head.activation in ("sigmoid", "softmax") and not 0 < cut < 1:
                yield Finding(
                    f"the metric {name!r} counts outputs above {cut:g} as positive, and a {head.activation} is "
                    + ("always" if cut <= 0 else "never"),
                    ("metric", head.name),
                    fix=f"leave the threshold of {name} out: its default is 0.5",
                )


@rule("L20", "I", "a metric of probabilities for logits")
def _threshold_for_logits(facts: AppFacts) -> Iterator[Finding]:
    """A probability below 62 % counts as a negative prediction, so the metric is too low.

    Fix: Set the threshold of the metric to 0.
    Source: Keras, BinaryAccuracy: threshold=0.5
    """
    for head in facts.heads:
        names = [name for name, cut in head.cuts if cut == USUAL_CUT]
        if names and head.logits and head.loss == "bce" and head.activation == "linear":
            yield Finding(
                f"the metric {names[0]!r} counts outputs above {USUAL_CUT} as positive, "
                f"and {output_label(head, facts)} has logits, whose threshold is 0",
                ("metric", head.name),
                fix="write keras.metrics.BinaryAccuracy(threshold=0.0), or give the output a sigmoid",
            )


@rule("L18", "W", "labels that are the inputs")
def _copied(facts: AppFacts) -> Iterator[Finding]:
    """The model only has to copy its input. A language model then learns nothing about the next token.

    Fix: Shift the labels by one position: x[:, :-1] and x[:, 1:].
    Source: Karpathy, A Recipe for Training Neural Networks, 2019
    """
    for head, array, _ in targets(facts):
        if facts.rows.copied and head.loss in ("sce", "cce") and array.sample and array.high > 1:
            yield Finding(f"{array.name} is x_train itself, but the model predicts classes", ("data", array.name))


@rule("L14", "I", "long one-hot rows")
def _long_rows(facts: AppFacts) -> Iterator[Finding]:
    """Rows for so many classes take memory and time, and contain no more information than a number.

    Fix: Give labels as numbers, with sparse_categorical_crossentropy.
    Source: WebNNM, 2026
    """
    for head, array, labels in targets(facts):
        if head.loss == "cce" and labels.kind == "one_hot" and head.units >= MANY_CLASSES:
            yield Finding(
                f"{array.name} has rows of {head.units:,} values with a single 1, {array.shape[0] * head.units * 4 / 1e6:,.0f} MB as float32",
                ("data", array.name),
            )


@rule("L16", "E", "a loss without a minimum", level="batch")
def _endless(facts: AppFacts) -> Iterator[Finding]:
    """The loss has no minimum, so outputs grow to infinity, away from the targets.

    Fix: Check the sign of the loss and the order of its arguments. Minimize a distance; maximize a likelihood.
    Source: Karpathy, A Recipe for Training Neural Networks, 2019
    """
    first, least = facts.observations.get("first", math.nan), facts.observations.get("least", math.nan)
    if least < -ENDLESS * max(1.0, abs(first)):
        yield Finding(f"in about 260 steps the loss falls from {first:.4g} to {least:.4g} without an end", ("loss", ""))


@rule("L21", "E", "a loss that rewards wrong predictions", level="batch")
def _reversed_loss(facts: AppFacts) -> Iterator[Finding]:
    """A smaller loss means more wrong predictions, so the loss does not measure the distance to the labels.

    Fix: Check the sign of the loss and the order of its arguments. Keras passes labels first, then outputs.
    Source: Karpathy, A Recipe for Training Neural Networks, 2019
    """
    first, least = facts.observations.get("first", math.nan), facts.observations.get("least", math.nan)
    agrees = facts.observations.get("agrees")
    # Keras's losses have the right sign; after failed steps, any correlation is possible.
    is_own = any(head.loss == "own" for head in facts.heads)
    if is_own and agrees is not None and agrees < AGAINST and least < first - (1 - LEARNT) * abs(first):
        yield Finding(
            f"in some steps on 16 samples the loss falls from {first:.4g} to {least:.4g}, and outputs become the opposite of the labels "
            f"(correlation {agrees:.2f})",
            ("loss", ""),
        )


@rule("L22", "E", "a loss that compares each sample with all labels", level="batch")
def _unlinked(facts: AppFacts) -> Iterator[Finding]:
    """Labels of shape (n,) and outputs of shape (n, 1) broadcast silently to (n, n). The model learns the mean of the
    labels.

    Fix: Give both the same shape: y[:, None], or keras.ops.squeeze(outputs, axis=-1).
    Source: NumPy, broadcasting; Humbatova et al., arXiv:1910.11015
    """
    if facts.observations.get("unlinked"):
        yield Finding("the loss of a batch is the same when its labels are exchanged among its samples", ("loss", ""))


@rule("L13", "W", "losses of different sizes", level="batch")
def _losses_of_different_size(facts: AppFacts) -> Iterator[Finding]:
    """The losses are summed, so the largest one alone trains the shared layers.

    Fix: Set loss_weights that bring them to the same size, or scale the targets.
    Source: Kendall et al., arXiv:1705.07115; WebNNM, 2026
    """
    losses = {
        name: abs(value)
        for name, value in (facts.observations.get("losses") or {}).items()
        if math.isfinite(value) and value
    }
    if len(losses) > 1 and max(losses.values()) > LOSSES_APART * min(losses.values()):
        large, small = (choose(losses, key=lambda name: losses[name]) for choose in (max, min))
        yield Finding(
            f"the loss of {large!r} begins at {losses[large]:.3g}, the loss of {small!r} at {losses[small]:.3g}",
            ("loss", large),
        )
