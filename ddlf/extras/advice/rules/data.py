"""Rules of class D: mistakes in the data, for any model. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ddlf.data.app_data import ONE_BY_ONE
from ddlf.extras.advice.facts import AppFacts, ArrayFacts
from ddlf.extras.advice.rule import Change, Finding, plural, rule
from ddlf.extras.advice.rules.labels import DISTANCES

UNSCALED = 20.0
"""A model without normalization learns badly if a feature has a larger root mean square than this.

Pixels up to 255 have about 100.
"""
SCALES_APART = 100.0
"""Largest acceptable ratio of the scales of features."""
MAJORITY = 0.9
LARGE_TARGETS = 100.0
MANY_FEATURES = 5_000
FAR = 20.0
"""Targets up to this size can be reached in every usual run."""
ADAPTIVE = ("Adam", "AdamW", "Nadam", "Adamax", "RMSprop", "Lion")
BOUNDED_BY_1 = ("tanh", "sigmoid", "softsign", "hard_sigmoid", "softmax")
NOTHING = 0.005
"""Minimum root mean square of the largest feature. Smaller inputs have less effect than biases."""
OTHER = 4.0
"""Largest acceptable ratio of the scales of two parts of the data."""
ENOUGH_SAMPLES = 30
"""Smallest number of samples in a part whose scale is compared."""
NO_ARRAY = f"Turn it into an array of numbers in load_dataset; {ONE_BY_ONE}."
SHARED_SHARE, SHARED_COUNT = 0.01, 2
"""Maximum share and number of samples of another part that may be in training by chance."""
DEVIATIONS, LARGE_SHARE = 3, 0.05
"""Standard deviations above the duplicates expected by chance, and the share that is a leak in any case."""
FEW, EACH = 20, 10
"""A data set up to the first size is a toy. Each class should have the second number of samples."""
TURNED, HANDFUL = 3, 50
"""Maximum ratio of another part's size to the size of training, and number of training samples above which a larger
ratio may be intended."""
CONTRADICTING = 0.01
FEW_WRONG, WRONG = 3, (0.005, 0.01)
"""Minimum number and share of probably wrong labels for a finding, and minimum share for a warning. Models err, too.
"""
OVERLAPPING, LEAST_OVERLAPPING = 0.1, 10
"""Largest share of a part's windows that overlap training, and their number. A few overlap where the series is cut."""
RELATED, SURELY, LESS = 4.0, 15.0, 4.5
"""Thresholds in standard deviations from permuted labels: below the first, samples say nothing about labels; above the
second, they say much; a test lower than training by the third is not chance.
"""
OFTENER = 3.0
"""Integer samples are shared by more than chance if they are this many times as frequent as duplicates in training."""
NEAR_DUPLICATES = 0.01
"""Minimum share of test pictures with a near duplicate in training for a finding. A smaller share may be chance."""


@rule("D01", "E", "NaN or infinite values")
def _not_finite(facts: AppFacts) -> Iterator[Finding]:
    """One NaN makes the loss NaN, then all gradients, then all weights.

    Fix: Drop or fill these samples in load_dataset.
    Source: Zhang et al., UMLAUT: Debugging Deep Learning Programs, CHI 2021, doi:10.1145/3411764.3445538
    """
    for array in facts.arrays:
        if array.non_finite:
            size = math.prod(array.shape)
            changes: tuple[Change, ...] = ()
            x, y = f"x_{array.part}", f"y_{array.part}"
            if array.name in (x, y) and array.non_finite < 0.1 * size and facts.array(x) and facts.array(y):
                lines = (
                    f'finite = (abs(self.{array.name}) < float("inf")).reshape(len(self.{array.name}), -1).all(axis=1)',
                    f"self.{x}, self.{y} = self.{x}[finite], self.{y}[finite]",
                )
                changes = (Change("data", lines),)
            yield Finding(
                f"{array.non_finite:,} of {size:,} values of {array.name} are NaN or infinite, "
                f"in samples such as {_numbers_text(array.non_finite_rows)}",
                ("data", array.name),
                array.non_finite_rows,
                changes,
            )


def _numbers_text(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers)) or "none of the examined ones"


@rule("D02", "E", "text or objects instead of numbers")
def _no_numbers(facts: AppFacts) -> Iterator[Finding]:
    """Layers multiply numbers, so they cannot use text or Python objects.

    Fix: Convert them to numbers in load_dataset, for example labels with numpy.unique(y, return_inverse=True)[1].
    Source: UMLAUT, doi:10.1145/3411764.3445538
    """
    for array in facts.arrays:
        if not array.has_numbers:
            problem = f"holds {array.dtype}, not numbers" if array.is_numpy else f"is a {array.dtype}, not an array"
            yield Finding(f"{array.name} {problem}", ("data", array.name), fix="" if array.is_numpy else NO_ARRAY)


def _goes_into_products(facts: AppFacts, array: ArrayFacts) -> bool:
    """Return whether the model multiplies this array with weights, and no layer normalizes it."""
    is_multiplied = (
        bool(facts.layers) and not facts.weights_scale and "own" not in {layer.kind for layer in facts.layers}
    )
    return is_multiplied and array.has_numbers and not array.non_finite and not array.padded > 0.3


def _unusual_scale(array: ArrayFacts) -> str:
    return (
        f"values of {array.name} reach from {array.low:g} to {array.high:g} (root of the mean square {array.loudest:.3g}), "
        "and no layer of the model scales them"
    )


@rule("D03", "W", "unscaled inputs")
def _unscaled(facts: AppFacts) -> Iterator[Finding]:
    """Initial weights and usual learning rates assume inputs of about 1. With larger inputs, steps overshoot and units
    saturate or die.

    Fix: Subtract the mean and divide by the standard deviation in load_dataset, or begin the model with
    layers.Normalization.
    Source: UMLAUT, doi:10.1145/3411764.3445538; LeCun et al., Efficient BackProp, 1998
    """
    for array in facts.arrays_of("x", "train"):
        if not _goes_into_products(facts, array) or array.loudest <= UNSCALED or _has_unequal_scales(array):
            continue
        are_bytes = array.low >= 0 and array.is_whole and array.high <= 255
        changes = _standardizing(facts, array)
        if are_bytes and changes:
            names = [x_array.name for x_array in facts.arrays_of("x") if "[" not in x_array.name]
            lines = tuple(f'self.{name} = self.{name}.astype("float32") / 255' for name in names)
            changes = (Change("data", lines),)
        yield Finding(
            _unusual_scale(array),
            ("data", array.name),
            changes=changes,
            fix="divide by 255 in load_dataset, or begin the model with layers.Rescaling(1 / 255)" if are_bytes else "",
        )


@rule("D21", "W", "inputs close to 0")
def _nearly_nothing(facts: AppFacts) -> Iterator[Finding]:
    """Initial weights assume inputs of about 1. With tiny inputs the model first learns the average, and learns
    everything else slowly.

    Fix: Check whether the data is scaled twice, or divide by the standard deviation.
    Source: LeCun et al., Efficient BackProp, 1998
    """
    for array in facts.arrays_of("x", "train"):
        if _goes_into_products(facts, array) and 0 < array.loudest < NOTHING and not _has_unequal_scales(array):
            yield Finding(
                _unusual_scale(array),
                ("data", array.name),
                changes=_standardizing(facts, array),
            )


@rule("D19", "W", "test data on a different scale")
def _other_scale(facts: AppFacts) -> Iterator[Finding]:
    """The model was not trained on inputs of this scale, so the test does not measure its quality.

    Fix: Scale every part with the mean and deviation of the training part.
    Source: Humbatova et al., arXiv:1910.11015: wrong preprocessing
    """
    for array in facts.arrays_of("x", "train"):
        if not array.has_numbers or array.non_finite or array.shape[0] < ENOUGH_SAMPLES or _are_tokens(facts, array):
            continue
        for part in ("val", "test"):
            other = facts.array(array.name.replace("_train", f"_{part}", 1))
            if (
                other is None
                or other.non_finite
                or other.shape[0] < ENOUGH_SAMPLES
                or not min(other.loudest, array.loudest)
            ):
                continue
            times = other.loudest / array.loudest
            if not 1 / OTHER < times < OTHER:
                yield Finding(
                    f"values of {other.name} reach from {other.low:g} to {other.high:g}, "
                    f"and values of {array.name} from {array.low:g} to {array.high:g}",
                    ("data", other.name),
                )


@rule("D20", "E", "identical inputs")
def _all_the_same(facts: AppFacts) -> Iterator[Finding]:
    """The model cannot tell samples apart. A cast to integers after scaling causes this.

    Fix: Check load_dataset: scale floats, not integers.
    Source: Humbatova et al., arXiv:1910.11015: wrong preprocessing
    """
    for array in facts.arrays_of("x", "train"):
        if array.has_numbers and array.shape[0] > 1 and not array.non_finite and array.low == array.high:
            yield Finding(f"all values of {array.name} are {array.low:g}", ("data", array.name))


def _standardizing(facts: AppFacts, array: ArrayFacts) -> tuple[Change, ...]:
    """Return the change of the user's code that standardizes each feature, or each channel of pictures and sequences.

    Empty if the app has several input arrays.
    """
    if "[" in array.name:
        return ()
    axis = 0 if len(array.sample) < 2 else tuple(range(len(array.sample)))
    names = [x_array.name for x_array in facts.arrays_of("x") if "[" not in x_array.name]
    scaled = [f'self.{name} = ((self.{name} - mean) / spread).astype("float32")' for name in names]
    return (
        Change(
            "data", (f"mean, spread = self.x_train.mean(axis={axis}), self.x_train.std(axis={axis}) + 1e-7", *scaled)
        ),
    )


def _has_unequal_scales(array: ArrayFacts) -> bool:
    return len(array.sample) == 1 and array.scales[0] > 0 and array.scales[1] > SCALES_APART * array.scales[0]


@rule("D04", "W", "features of very different scales")
def _unequal_scales(facts: AppFacts) -> Iterator[Finding]:
    """The largest feature dominates the loss and the steps. The model learns from the small ones last or never.

    Fix: Bring each feature to mean 0 and standard deviation 1 in load_dataset, or begin the model with
    layers.Normalization.
    Source: UMLAUT, doi:10.1145/3411764.3445538
    """
    for array in facts.arrays_of("x", "train"):
        if _goes_into_products(facts, array) and _has_unequal_scales(array) and array.loudest > 1:
            low, high = array.scales
            yield Finding(
                f"features of {array.name} differ {high / low:,.0f} times in scale: standard deviations from {low:.3g} to {high:.3g}, "
                "and no layer of the model normalizes them",
                ("data", array.name),
                changes=_standardizing(facts, array),
            )


@rule("D11", "W", "strongly imbalanced classes")
def _majority(facts: AppFacts) -> Iterator[Finding]:
    """The model may learn to predict only that class, which is rarely wrong but useless.

    Fix: Set class_weight, use a focal loss, and measure AUC or recall instead of accuracy.
    Source: WebNNM, 2026; Lin et al., Focal Loss, arXiv:1708.02002
    """
    if facts.settings.get("class_weight") is not None or any(facts.arrays_of("w", "train")):
        return
    for array in facts.arrays_of("y", "train"):
        if not is_of_classes(facts, array) or len(classes(array)) < 2 or facts.samples < 50:
            continue
        counts = array.labels.counts if array.labels is not None else {}
        total = sum(counts.values())
        largest = max(counts, key=lambda number: counts[number])
        if counts[largest] > MAJORITY * total:
            weights = {n: round(total / (len(classes(array)) * count), 3) for n, count in counts.items() if count}
            yield Finding(
                f"{counts[largest] / total:.1%} of {array.name} are of class {largest}: always predicting it is as accurate",
                ("data", array.name),
                changes=(Change("setting", weights, "class_weight"),)
                if len(facts.heads) == 1 and len(weights) <= 20
                else (),
            )


@rule("D13", "E", "labels of one class only")
def _one_class(facts: AppFacts) -> Iterator[Finding]:
    """The model learns to predict that class for every sample.

    Fix: Check how load_dataset reads the labels. The first part of a sorted file has only one class.
    Source: UMLAUT, doi:10.1145/3411764.3445538
    """
    for array in facts.arrays_of("y", "train"):
        if is_of_classes(facts, array) and len(classes(array)) == 1 and array.shape[0] > 1:
            yield Finding(
                f"all {array.shape[0]:,} labels of {array.name} are {min(classes(array))}", ("data", array.name)
            )


@rule("D12", "W", "large targets")
def _large_targets(facts: AppFacts) -> Iterator[Finding]:
    """Squared errors of large targets give gradients that overshoot, up to NaN. Adam has bounded steps and needs very
    many of them.

    Fix: Subtract the mean of the targets and divide by their standard deviation, or learn their logarithm.
    Source: WebNNM, 2026
    """
    yield from _out_of_steps(facts)
    for head in facts.heads:
        array = facts.array(head.target)
        if array is not None and head.loss in ("mse", "own_mse") and array.std > LARGE_TARGETS:
            yield Finding(
                f"{array.name} has a standard deviation of {array.std:.4g}, so {head.loss.upper()} begins at about {array.std**2:.3g} or more",
                ("data", array.name),
            )


def _out_of_steps(facts: AppFacts) -> Iterator[Finding]:
    """Yield findings about large targets that the last layer cannot reach within the steps of the run.

    With Adam, a step moves a weight by at most the rate.
    """
    optimizer = facts.optimizer
    if optimizer is None or optimizer.kind not in ADAPTIVE or not optimizer.rate > 0 or facts.from_files:
        return
    travel = optimizer.rate * facts.steps
    for head in facts.heads:
        array, layer = facts.array(head.target), facts.layer(head.layer)
        if array is None or layer is None or head.loss not in ("mse", "mae", "huber") or head.activation != "linear":
            continue
        input_layer = next((read_layer for name in layer.reads if (read_layer := facts.layer(name)) is not None), None)
        if layer.kind != "Dense" or input_layer is None or (head.loss == "mse" and array.std > LARGE_TARGETS):
            continue
        reach = travel * (layer.fan_in + 1)
        if input_layer.activation not in BOUNDED_BY_1:
            reach *= 1 + travel
        farthest = max(array.low, -array.high, array.std)
        if farthest > max(FAR, reach):
            yield Finding(
                f"{array.name} reaches from {array.low:g} to {array.high:g}, and in {facts.steps:,} steps with {optimizer.kind} at "
                f"{optimizer.rate:g} the output reaches about {reach:.3g}",
                ("data", array.name),
            )


@rule("D14", "W", "images with channels first")
def _channels_first(facts: AppFacts) -> Iterator[Finding]:
    """Convolutions expect channels on the last axis. Here they slide over colors and rows.

    Fix: Move the channels to the end: numpy.moveaxis(x, 1, -1).
    Source: UMLAUT, doi:10.1145/3411764.3445538
    """
    first = next(
        (layer for layer in facts.layers if layer.kind in ("Conv2D", "SeparableConv2D", "DepthwiseConv2D")), None
    )
    if first is None or first.config.get("data_format") not in (None, "channels_last"):
        return
    for array in facts.arrays_of("x", "train"):
        if len(array.sample) == 3 and array.sample == first.input_shape:
            channels, height, width = array.sample
            if channels in (1, 3, 4) and height > 4 and width > 4 and height == width:
                names = [x_array.name for x_array in facts.arrays_of("x") if "[" not in x_array.name]
                yield Finding(
                    f"samples of {array.name} have the shape {array.sample}: channels first, which the convolution {first.name!r} reads as "
                    f"{plural(channels, 'row')} of pixels with {width} channels",
                    ("data", array.name),
                    samples=(),
                    fix=f"np.moveaxis({names[0] if names else 'x'}, 1, -1) in load_dataset, and the same in keras.Input",
                )


def _are_tokens(facts: AppFacts, array: ArrayFacts) -> bool:
    return array.is_whole and any(
        layer.kind == "Embedding" and layer.input_shape == array.sample for layer in facts.layers
    )


@rule("D15", "I", "constant features")
def _constant(facts: AppFacts) -> Iterator[Finding]:
    """Constant features carry no information, and a division by their standard deviation gives NaN.

    Fix: Remove these features: x[:, x.std(axis=0) > 0].
    Source: measured: scikit-learn's digits have 3, MNIST has 67
    """
    for array in facts.arrays_of("x", "train"):
        if array.constant and len(array.constant) < array.sample[0] and not _are_tokens(facts, array):
            yield Finding(
                f"{plural(len(array.constant), 'feature')} of {array.sample[0]:,} in {array.name} "
                f"never change: {first_numbers(list(array.constant))}",
                ("data", array.name),
            )


@rule("D16", "I", "very many features without a penalty")
def _many_features(facts: AppFacts) -> Iterator[Finding]:
    """If there are more features than samples, some features fit the labels by chance.

    Fix: Give the first layer kernel_regularizer='l1', so that the weights of useless features go to 0.
    Source: WebNNM, 2026
    """
    if any(layer.penalty for layer in facts.layers):
        return
    for array in facts.arrays_of("x", "train"):
        reads = [layer for layer in facts.layers if layer.kind == "Dense" and layer.input_shape == array.sample]
        if len(array.sample) == 1 and array.sample[0] > MANY_FEATURES and reads:
            yield Finding(
                f"{array.name} has {array.sample[0]:,} features of {array.shape[0]:,} samples",
                ("layer", reads[0].name),
            )


def _is_trivial(facts: AppFacts) -> bool:
    return facts.rows.repeats_by_nature or facts.rows.examined < 20


def _is_counted(facts: AppFacts) -> bool:
    """Return whether the inputs are whole numbers with few combinations, such as tokens and categories. Equal samples
    are then no mistake."""
    return all(array.is_whole and len(array.sample) == 1 for array in facts.arrays_of("x", "train"))


@rule("D05", "W", "training samples in the test")
def _shared(facts: AppFacts) -> Iterator[Finding]:
    """The model has memorized these samples, so the measured accuracy is too high.

    Fix: Remove these samples from the test.
    Source: Karpathy, A Recipe for Training Neural Networks, 2019; Barz and Denzler, arXiv:1902.00423
    """
    if _is_trivial(facts):
        return
    own_share = 1 - facts.rows.distinct / facts.rows.examined
    for shared in facts.rows.shared:
        share = shared.count / shared.of
        if not shared.count or (_is_counted(facts) and share < OFTENER * own_share):
            continue
        by_chance = 2 * own_share * shared.of  # training has about half as many pairs within itself
        expected = by_chance + DEVIATIONS * math.sqrt(by_chance)
        is_much = (
            share >= SHARED_SHARE and shared.count >= SHARED_COUNT and (share >= LARGE_SHARE or shared.count > expected)
        )
        is_most = share > 0.5
        x = f"x_{shared.part}"
        lines = (
            "known = {row.tobytes() for row in self.x_train}",
            f"new = [row.tobytes() not in known for row in self.{x}]",
            f"self.{x}, self.y_{shared.part} = self.{x}[new], self.y_{shared.part}[new]",
        )
        is_removable = not is_most and facts.array(x) and facts.array(f"y_{shared.part}") and facts.array("x_train")
        pairs = ", ".join(f"{a} = {b}" for a, b in shared.pairs)
        yield Finding(
            f"{shared.count:,} of {shared.of:,} samples of x_{shared.part} are also in x_train (number in x_train = number there: {pairs})",
            ("data", x),
            tuple(b for _, b in shared.pairs),
            (Change("data", lines),) if is_removable else (),
            severity="W" if is_much else "I",
            fix="split the data once, into parts that have nothing in common" if is_most else "",
        )


@rule("D06", "I", "duplicate training samples")
def _doubled(facts: AppFacts) -> Iterator[Finding]:
    """A duplicate counts twice, and a random split can put its copies into training and test.

    Fix: Remove duplicates before you split the data: numpy.unique(x, axis=0, return_index=True).
    Source: measured: iris has one such row
    """
    rows = facts.rows
    if facts.observations.get("taken") and rows.examined >= 20 and rows.repeats_by_nature:
        yield Finding(
            f"the training batches have {rows.distinct:,} different samples of {rows.examined:,}",
            ("data", "x_train"),
            severity="W",
            fix="check __getitem__: batch number i must contain the samples from i * batch_size on",
        )
        return
    if _is_trivial(facts) or not rows.doubled or _is_counted(facts):
        return
    pairs = ", ".join(f"{a} = {b}" for a, b in rows.doubled)
    yield Finding(
        f"{rows.examined - rows.distinct:,} of {rows.examined:,} training samples are duplicates ({pairs})",
        ("data", "x_train"),
        tuple(b for _, b in rows.doubled),
    )


@rule("D07", "W", "equal samples with different labels")
def _contradicting(facts: AppFacts) -> Iterator[Finding]:
    """No model can be right for both samples, and each one undoes the training on the other.

    Fix: Check how you match labels with samples. Typical causes are an index that is off by one, and a file that was
        shuffled without the other.
    Source: UMLAUT, doi:10.1145/3411764.3445538; Northcutt et al., arXiv:1911.00068
    """
    rows = facts.rows
    labels = next((array.labels for array in facts.arrays_of("y", "train")), None)
    if labels is None or labels.kind not in ("numbers", "one_hot") or _is_trivial(facts):
        return
    if rows.contradicting > max(1.0, CONTRADICTING * rows.examined):
        pairs = ", ".join(f"{a} and {b}" for a, b in rows.pairs)
        yield Finding(
            f"{rows.contradicting:,} training samples equal a sample with another label ({pairs})",
            ("data", "y_train"),
            tuple(number for pair in rows.pairs for number in pair),
        )


@rule("D08", "W", "a feature that reveals the label")
def _leaks(facts: AppFacts) -> Iterator[Finding]:
    """The model learns only that column, which is unknown when you use the model.

    Fix: Drop the column in load_dataset.
    Source: Kaufman et al., Leakage in Data Mining, KDD 2011, doi:10.1145/2020408.2020496
    """
    for name, feature in facts.rows.leaks:
        yield Finding(f"feature {feature} of {name} is the label with other numbers or cut into ranges", ("data", name))
    if facts.rows.linear_feature is not None and any(head.loss in (*DISTANCES, "mape", "msle") for head in facts.heads):
        name, feature, correlation = facts.rows.linear_feature
        yield Finding(
            f"feature {feature} of {name} alone follows the target (correlation {correlation:.4f})",
            ("data", name),
            severity="I",
            fix="check whether this feature is known when you use the model, or is computed from the target",
        )


@rule("D09", "I", "samples sorted by label")
def _sorted(facts: AppFacts) -> Iterator[Finding]:
    """DDLF shuffles the samples, but a split by position or your own training loop would miss classes.

    Fix: Shuffle the samples once, with a fixed seed, before you split them.
    Source: measured: iris and wine are sorted by class
    """
    for array in facts.arrays_of("y", "train"):
        if array.labels is not None and array.labels.is_sorted:
            kinds = len(classes(array))
            is_unshuffled = facts.settings.get("shuffle") == "none" and (
                facts.from_files or facts.observations.get("taken")
            )
            yield Finding(
                f"{array.name} is sorted: {plural(kinds, 'class') if kinds else 'equal labels'} in consecutive blocks"
                + (", and shuffle is none, so that a batch has one label" if is_unshuffled else ""),
                ("data", array.name),
                severity="W" if is_unshuffled else None,
                fix="leave shuffle out, or take 'global'" if is_unshuffled else "",
                changes=(Change("setting", "global", "shuffle"),) if is_unshuffled else (),
            )


@rule("D23", "W", "test windows that overlap training windows")
def _overlapping(facts: AppFacts) -> Iterator[Finding]:
    """If windows are shuffled before the split, nearly every time step of the test is also in training.

    Fix: Split the series by time first, then make windows of each part.
    Source: Kaufman et al., Leakage in Data Mining, KDD 2011, doi:10.1145/2020408.2020496
    """
    for part, count, of in facts.rows.overlapping:
        if count >= LEAST_OVERLAPPING and count > OVERLAPPING * of:
            yield Finding(
                f"{count:,} of {of:,} examined windows of x_{part} are windows of x_train moved by one step",
                ("data", f"x_{part}"),
            )


@rule("D24", "W", "labels unrelated to their samples", level="batch")
def _unrelated(facts: AppFacts) -> Iterator[Finding]:
    """If samples or labels were shuffled separately, or an index is wrong, the model can only memorize.

    Fix: Check some samples with their labels. Shuffle samples and labels with the same permutation, or not at all.
    Source: Humbatova et al., arXiv:1910.11015; Ojala and Garriga, Permutation Tests for Studying Classifier
    Performance, JMLR 2010
    """
    result = facts.observations.get("related") or {}
    train_labels = result.get("of", "y_train")
    test_labels = train_labels.replace("_train", "_test")
    train, train_count = result.get("train", (math.inf, 0))
    test, test_count = result.get("test", (math.inf, 0))
    sentence = "neighbours, frequencies and linear models predict {0} of {1} samples no better than permuted labels"
    if train < RELATED:
        are_tokens = all(
            array.is_whole and array.dtype.startswith(("int", "uint")) for array in facts.arrays_of("x", "train")
        )
        yield Finding(
            sentence.format(train_labels, f"{train_count:,}"),
            ("data", train_labels),
            severity="I" if are_tokens else None,  # simple predictors may miss the meaning of words in context
        )
    elif test < RELATED and (train > SURELY or train * math.sqrt(test_count / max(train_count, 1)) - test > LESS):
        yield Finding(
            f"in x_train, {sentence.format(test_labels, f'{test_count:,}')}, but predict {train_labels}",
            ("data", test_labels),
            fix="check whether x_test and y_test were shuffled separately, or their classes have other numbers than in training",
        )


def classes(array: ArrayFacts) -> set[int]:
    return {number for number, count in array.labels.counts.items() if count} if array.labels is not None else set()


def is_of_classes(facts: AppFacts, array: ArrayFacts) -> bool:
    """Return whether labels are class numbers, rather than other whole numbers."""
    if array.labels is None or array.labels.kind not in ("numbers", "one_hot"):
        return False
    heads = [head for head in facts.heads if head.target in ("", array.name)]
    sparse = any(head.loss in ("sce", "cce", "bce", "kld") for head in heads)
    return array.labels.kind == "one_hot" or sparse


@rule("D10", "W", "a class missing from training or test")
def _missing(facts: AppFacts) -> Iterator[Finding]:
    """The model cannot learn a class without training samples, and the test does not measure a class without test
    samples.

    Fix: Shuffle before the data is split, or split each class by itself (train_test_split(..., stratify=y)).
    Source: UMLAUT, doi:10.1145/3411764.3445538
    """
    for array in facts.arrays_of("y", "train"):
        if not is_of_classes(facts, array):
            continue
        train_classes = classes(array)
        for part in ("val", "test"):
            other = facts.array(array.name.replace("_train", f"_{part}"))
            if other is None or other.labels is None or other.labels.kind != array.labels.kind:  # type: ignore[union-attr]
                continue
            part_classes = classes(other)
            if unknown := sorted(part_classes - train_classes):
                yield Finding(
                    f"{other.name} has {plural(len(unknown), 'class')} that {array.name} lacks: {first_numbers(unknown)}",
                    ("data", other.name),
                )
            is_large = other.shape[0] >= 10 * len(train_classes)
            if is_large and len(train_classes) <= 1000 and (missing := sorted(train_classes - part_classes)):
                yield Finding(
                    f"{other.name} lacks {plural(len(missing), 'class')} of {len(train_classes)}: {first_numbers(missing)}",
                    ("data", other.name),
                )


def first_numbers(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")


@rule("D22", "W", "few samples of each class")
def _few_samples(facts: AppFacts) -> Iterator[Finding]:
    """The model memorizes so few samples, and learns little about other samples.

    Fix: Check whether load_dataset drops most of the data. Otherwise use more data, augmentation or a pretrained model.
    Source: Humbatova et al., DeepCrime, ISSTA 2021, doi:10.1145/3460319.3464825: training data removed
    """
    for array in facts.arrays_of("y", "train"):
        class_count = len(classes(array))
        if is_of_classes(facts, array) and class_count > 1 and FEW < facts.samples < EACH * class_count:
            yield Finding(
                f"there are {facts.samples:,} samples of {class_count} classes: {facts.samples / class_count:.1f} of each",
                ("data", array.name),
            )
    for part in ("val", "test"):
        other = facts.array(f"x_{part}")
        if other is not None and 0 < facts.samples < HANDFUL and facts.samples * TURNED < other.shape[0]:
            yield Finding(
                f"there are {facts.samples:,} samples for training, and {other.shape[0]:,} in x_{part}",
                ("data", "x_train"),
                fix="check whether the split has exchanged the parts: the larger part is for training",
            )


@rule("D18", "W", "labels that are probably wrong", level="cluster")
def _doubted(facts: AppFacts) -> Iterator[Finding]:
    """A wrong training label teaches a mistake, and a wrong test label counts a right prediction as wrong.

    Fix: Check these samples, and correct or remove the wrong labels. --format json lists all samples.
    Source: Northcutt et al., Confident Learning, arXiv:1911.00068; cleanlab
    """
    doubted = facts.observations.get("doubted")
    if doubted and doubted["count"] >= max(FEW_WRONG, WRONG[0] * doubted["of"]):
        pairs = ", ".join(f"{number} is {label} and looks like {likely}" for number, label, likely in doubted["pairs"])
        name = facts.heads[0].target if facts.heads else "y_train"
        yield Finding(
            f"{doubted['count']:,} of {doubted['of']:,} labels of {name} are probably wrong: {pairs}",
            ("data", name),
            doubted["samples"],
            severity="W" if doubted["count"] >= WRONG[1] * doubted["of"] else "I",
        )


@rule("D17", "W", "near-duplicate images in training and test", level="batch")
def _near_duplicates(facts: AppFacts) -> Iterator[Finding]:
    """The model has memorized the training image, and recognizes a cropped, shifted or recompressed copy of it. So the
    measured accuracy is too high.

    Fix: Remove the copies from the test, or keep all versions of an image in the same part.
    Source: Barz and Denzler, Do we train on test data?, arXiv:1902.00423: 3.3 % of CIFAR-10's test
    """
    duplicates = facts.observations.get("near")
    if duplicates and duplicates["count"] >= NEAR_DUPLICATES * duplicates["of"]:
        pairs = ", ".join(f"{a} and {b}" for a, b in duplicates["pairs"])
        yield Finding(
            f"{duplicates['count']:,} of {duplicates['of']:,} pictures of x_test nearly equal pictures of x_train (numbers there and here: {pairs})",
            ("data", "x_test"),
            tuple(b for _, b in duplicates["pairs"]),
        )
