"""Rules of class L about labels that do not fit the loss. Pure. Keras refuses few of these; most train, to nothing."""

from __future__ import annotations

from collections.abc import Iterator

from ddlf.extras.advice.facts import USUAL_CUT, Facts
from ddlf.extras.advice.of_outputs import DISTANCES, KERAS, UMLAUT, are_classes, said, targets
from ddlf.extras.advice.rule import Change, Found, Rule

OF_CLASSES = (
    "accuracy",
    "acc",
    "categorical_accuracy",
    "sparse_categorical_accuracy",
    "CategoricalAccuracy",
    "SparseCategoricalAccuracy",
)
MANY_CLASSES = 1_000
ENOUGH = 50


def _out_of_range(facts: Facts) -> Iterator[Found]:
    for head, array, labels in targets(facts):
        if head.loss == "sce" and not array.whole and labels.kind == "real" and array.sample in ((), (1,)):
            yield Found(
                f"{array.name} has fractions, from {array.low:g} to {array.high:g}, and the loss takes numbers of classes",
                ("data", array.name),
                fix="leave labels as whole numbers: they are not scaled with the inputs",
            )
        elif head.loss == "sce" and labels.kind != "one_hot" and head.units > 1:
            if array.low < 0 or array.high >= head.units:
                from_one = array.low == 1 and array.high == head.units
                lines = tuple(f"self.{one.name} = self.{one.name} - 1" for one in facts.of("y") if "[" not in one.name)
                yield Found(
                    f"{array.name} has numbers from {array.low:g} to {array.high:g}, and {said(head, facts)} of {head.units} units has classes "
                    f"0 to {head.units - 1}",
                    ("data", array.name),
                    changes=(Change("data", lines),) if from_one and lines and "[" not in array.name else (),
                    fix="count classes from 0: y - 1" if from_one else "",
                )
        elif head.loss in ("bce", "cce") and (array.low < 0 or array.high > 1):
            if head.loss == "cce" and labels.kind == "numbers":
                continue  # that is L05
            names = [one.name for one in facts.of("y") if "[" not in one.name]
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
            yield Found(
                f"{array.name} has values from {array.low:g} to {array.high:g}, and the loss takes those from 0 to 1",
                ("data", array.name),
                changes=(Change("data", lines),) if lines else (),
            )
        elif head.loss == "poisson" and array.low < 0:
            yield Found(
                f"{array.name} has values down to {array.low:g}, and counts are never negative", ("data", array.name)
            )
        elif head.loss == "hinge" and array.whole and not {array.low, array.high} <= {-1.0, 0.0, 1.0}:
            yield Found(
                f"{array.name} has values from {array.low:g} to {array.high:g}, and the loss takes -1 and 1",
                ("data", array.name),
            )


def _squeezed(
    target: tuple[int, ...], output: tuple[int | None, ...]
) -> tuple[tuple[int, ...], tuple[int | None, ...]]:
    """Shapes as Keras compares them: a last axis of 1 that the other side lacks is dropped."""
    if len(output) == len(target) + 1 and output[-1] == 1:
        output = output[:-1]
    if len(target) == len(output) + 1 and target[-1] == 1:
        target = target[:-1]
    return target, output


def _broadcast(facts: Facts) -> Iterator[Found]:
    for head, array, labels in targets(facts):
        if head.loss == "sce" or (head.loss == "cce" and labels.kind == "numbers"):
            continue
        target, output = _squeezed(array.sample, head.shape)
        if target == output or not head.shape or any(size is None for size in output):
            continue
        stretched = all(1 in (a, b) or a == b for a, b in zip(reversed(target), reversed(output), strict=False))
        # With axes that one side lacks, samples are compared with samples.
        how = "is stretched to the other" if stretched else "does not fit the other"
        changes: tuple[Change, ...] = ()
        if are_classes(head, array, labels):
            changes = (Change("loss", "sparse_categorical_crossentropy", head.loss),)
            if head.activation != "softmax":
                changes += (Change("argument", "softmax", head.layer, "activation"),)
        yield Found(
            f"a sample of {array.name} has the shape {array.sample}, {said(head, facts)} {head.shape}: one {how}",
            ("loss", head.name) if changes else ("data", array.name),
            changes=changes,
            fix="numbers of classes are for sparse_categorical_crossentropy" if changes else "",
        )


def _numbers_for_rows(facts: Facts) -> Iterator[Found]:
    for head, array, labels in targets(facts):
        one_number = array.sample in ((), (1,)) and head.units > 1
        if head.loss == "cce" and one_number and labels.kind == "numbers" and len(head.shape) == 1:
            yield Found(
                f"{array.name} has numbers of classes, {array.low:g} to {array.high:g}, and categorical_crossentropy takes rows of {head.units}",
                ("loss", head.name),
                changes=(Change("loss", "sparse_categorical_crossentropy", head.loss),),
            )


def _rows_for_numbers(facts: Facts) -> Iterator[Found]:
    for head, array, labels in targets(facts):
        if (
            head.loss == "sce"
            and array.sample == head.shape
            and labels.kind in ("one_hot", "shares")
            and head.units > 1
        ):
            yield Found(
                f"{array.name} has rows of {array.sample[-1]}, and sparse_categorical_crossentropy takes numbers of classes",
                ("loss", head.name),
                changes=(Change("loss", "categorical_crossentropy", head.loss),),
            )


def _no_distribution(facts: Facts) -> Iterator[Found]:
    for head, array, labels in targets(facts):
        if head.loss == "kld" and head.units == 1 and head.activation in ("linear", "relu", "sigmoid", "tanh"):
            yield Found(
                f"{array.name} has one number for each sample, and the loss compares shares that sum to 1",
                ("loss", head.name),
                changes=(Change("loss", "mse", head.loss),) if head.activation == "linear" else (),
                fix="of numbers take a distance, as mse",
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
            yield Found(
                f"{sums}, and the loss compares shares that sum to 1",
                ("loss", head.name),
                changes=tuple(changes),
                fix="of several labels a sample: a sigmoid, and binary_crossentropy" if many else "",
            )


def _exclusive(facts: Facts) -> Iterator[Found]:
    for head, array, labels in targets(facts):
        if head.loss != "bce" or head.logits or head.units < 3 or labels.kind != "one_hot" or array.shape[0] < ENOUGH:
            continue
        by_class = any(name in OF_CLASSES for name in head.metrics)
        if head.activation == "softmax" or (head.activation == "sigmoid" and by_class):
            changes = [Change("loss", "categorical_crossentropy", head.loss)]
            if head.activation == "sigmoid":
                changes.append(Change("argument", "softmax", head.layer, "activation"))
            yield Found(
                f"each row of {array.name} has one class of {head.units}, and binary_crossentropy takes each class for a question of its own",
                ("loss", head.name),
                changes=tuple(changes),
            )


def _distance_of_classes(facts: Facts) -> Iterator[Found]:
    for head, array, labels in targets(facts):
        if (
            head.loss in (*DISTANCES, "hinge")
            and labels.kind == "one_hot"
            and head.units > 1
            and array.sample == head.shape
            and array.shape[0] >= ENOUGH
        ) and head.activation in ("softmax", "sigmoid", "linear"):
            changes = [Change("loss", "categorical_crossentropy", head.loss)]
            if head.activation != "softmax":
                changes.append(Change("argument", "softmax", head.layer, "activation"))
            yield Found(
                f"{array.name} has one class of {head.units} in each row, and the loss is {head.loss.upper()}",
                ("loss", head.name),
                changes=tuple(changes),
            )


def _accuracy_of_numbers(facts: Facts) -> Iterator[Found]:
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
            yield Found(
                f"the metric {accuracy[0]!r} counts outputs that are equal to {array.name}, which are numbers from {array.low:g} to {array.high:g}",
                ("metric", head.name),
                changes=(Change("metric", "mae", accuracy[0]),),
            )


def _other_metric(facts: Facts) -> Iterator[Found]:
    yield from _out_of_reach(facts)
    for head, array, labels in targets(facts):
        for name in head.metrics:
            plain = name.replace("_", "").lower()
            if plain == "binaryaccuracy" and head.loss in ("cce", "sce") and head.units > 2:
                what = f"asks each of {head.units} classes for itself: to say no to all is right {1 - 1 / head.units:.0%} of the time"
            elif plain in ("categoricalaccuracy", "sparsecategoricalaccuracy") and head.units == 1:
                what = "takes the largest of several, and the output has 1 unit: it is the same whatever that says"
            elif plain in ("categoricalaccuracy", "precision", "recall", "auc", "f1score") and head.loss == "sce":
                what = f"takes rows of {head.units}, and {array.name} has numbers of classes"
            elif plain == "sparsecategoricalaccuracy" and head.loss == "cce" and labels.kind == "one_hot":
                what = f"takes numbers of classes, and {array.name} has rows of {head.units}"
            else:
                continue
            yield Found(
                f"the metric {name!r} {what}", ("metric", head.name), changes=(Change("metric", "accuracy", name),)
            )


def _out_of_reach(facts: Facts) -> Iterator[Found]:
    for head in facts.heads:
        for name, cut in head.cuts:
            if head.activation in ("sigmoid", "softmax") and not 0 < cut < 1:
                yield Found(
                    f"the metric {name!r} takes what is above {cut:g} for a yes, and a {head.activation} is "
                    + ("always" if cut <= 0 else "never"),
                    ("metric", head.name),
                    fix=f"give {name} no threshold: it is 0.5 then",
                )


def _cut_logits(facts: Facts) -> Iterator[Found]:
    for head in facts.heads:
        names = [name for name, cut in head.cuts if cut == USUAL_CUT]
        if names and head.logits and head.loss == "bce" and head.activation == "linear":
            yield Found(
                f"the metric {names[0]!r} takes what is above {USUAL_CUT} for a yes, and {said(head, facts)} is of logits, where 0 is the middle",
                ("metric", head.name),
                fix="write keras.metrics.BinaryAccuracy(threshold=0.0), or give the output a sigmoid",
            )


def _copied(facts: Facts) -> Iterator[Found]:
    for head, array, _ in targets(facts):
        if facts.rows.copied and head.loss in ("sce", "cce") and array.sample and array.high > 1:
            yield Found(f"{array.name} is x_train itself, and the model is to tell classes", ("data", array.name))


def _long_rows(facts: Facts) -> Iterator[Found]:
    for head, array, labels in targets(facts):
        if head.loss == "cce" and labels.kind == "one_hot" and head.units >= MANY_CLASSES:
            yield Found(
                f"{array.name} has rows of {head.units:,} values with a single 1, {array.shape[0] * head.units * 4 / 1e6:,.0f} MB as float32",
                ("data", array.name),
            )


LABELS = (
    Rule(
        id="L03",
        severity="E",
        title="labels that the loss cannot take",
        look=_out_of_range,
        why="A class without a unit or a probability above 1 is invalid: the loss becomes negative or NaN, or the step fails.",
        fix="Bring labels into the range of the loss in load_dataset.",
        source=f"{KERAS}: labels of 0 and 255 reach a loss of -209,919",
    ),
    Rule(
        id="L04",
        severity="E",
        title="labels and output of different shapes",
        look=_broadcast,
        why="Broadcasting compares each output with the wrong target, or the run fails.",
        fix="Give the last layer the shape of a label, or labels that of the output.",
        source=f"{UMLAUT}; Humbatova et al., Taxonomy of Real Faults, arXiv:1910.11015",
    ),
    Rule(
        id="L05",
        severity="E",
        title="class numbers where one-hot rows are expected",
        look=_numbers_for_rows,
        why="categorical_crossentropy compares rows with rows: Keras refuses a number, or compares it with all classes.",
        fix="Use sparse_categorical_crossentropy, or one-hot labels: keras.utils.to_categorical(y).",
        source="Humbatova et al., arXiv:1910.11015",
    ),
    Rule(
        id="L06",
        severity="E",
        title="one-hot rows where class numbers are expected",
        look=_rows_for_numbers,
        why="sparse_categorical_crossentropy takes the number of a class for each sample, and Keras refuses a row in the first step.",
        fix="Use categorical_crossentropy, or numbers: y.argmax(axis=-1).",
        source="Humbatova et al., arXiv:1910.11015",
    ),
    Rule(
        id="L08",
        severity="E",
        title="targets that do not sum to 1",
        look=_no_distribution,
        why="When rows do not sum to 1, divergence and cross-entropy are not smallest at the right answer.",
        fix="Divide each row by its sum.",
        source="WebNNM, 2026",
    ),
    Rule(
        id="L10",
        severity="W",
        title="binary cross-entropy for single-label classes",
        look=_exclusive,
        why="With many classes nearly every target is 0, which makes the loss small and its gradients weak.",
        fix="Take a softmax and categorical_crossentropy.",
        source=f"{UMLAUT}; WebNNM, 2026",
    ),
    Rule(
        id="L11",
        severity="W",
        title="a regression loss for classes",
        look=_distance_of_classes,
        why="When an output is confidently wrong, a squared error has almost no gradient through a softmax or sigmoid. Training is slow.",
        fix="Take a softmax and categorical_crossentropy.",
        source=f"{UMLAUT}; Golik et al., Interspeech 2013",
    ),
    Rule(
        id="L12",
        severity="W",
        title="accuracy for regression",
        look=_accuracy_of_numbers,
        why="Outputs almost never equal a real number exactly, so the metric stays at 0.",
        fix="Measure the mean absolute error, or R2Score.",
        source=UMLAUT,
    ),
    Rule(
        id="L17",
        severity="W",
        title="a metric that does not fit labels and output",
        look=_other_metric,
        why="The metric does not measure the model, or it fails in the first step.",
        fix="Use 'accuracy'; Keras then chooses the variant that fits.",
        source=f"{UMLAUT}; Keras, Model.compile",
    ),
    Rule(
        id="L20",
        severity="I",
        title="a metric of probabilities for logits",
        look=_cut_logits,
        why="A probability below 62 % counts as a negative prediction, so the metric is too low.",
        fix="Set the threshold of the metric to 0.",
        source="Keras, BinaryAccuracy: threshold=0.5",
    ),
    Rule(
        id="L18",
        severity="W",
        title="labels that are the inputs",
        look=_copied,
        why="The model only has to copy its input. A language model then learns nothing about the next token.",
        fix="Shift the labels by one position: x[:, :-1] and x[:, 1:].",
        source="Karpathy, A Recipe for Training Neural Networks, 2019",
    ),
    Rule(
        id="L14",
        severity="I",
        title="long one-hot rows",
        look=_long_rows,
        why="Rows of so many classes take memory and time, and say no more than a number.",
        fix="Give labels as numbers, with sparse_categorical_crossentropy.",
        source="WebNNM, 2026",
    ),
)
