"""Rules of class D: what is wrong with data, whatever is trained on it. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from ddlf.data.parts import ONE_BY_ONE
from ddlf.extras.advice.facts import Array, Facts
from ddlf.extras.advice.of_samples import classes, first, is_of_classes, plural
from ddlf.extras.advice.rule import Change, Found, Rule

UNSCALED = 20.0
"""Root of the mean square of a feature from which on a model without a normalizing layer learns badly: pixels up to 255 have 100."""
APART = 100.0
"""Times by which the scales of features may differ."""
MAJORITY = 0.9
LARGE_TARGETS = 100.0
MANY_FEATURES = 5_000
FAR = 20.0
"""Targets up to which any usual run comes."""
ADAPTIVE = ("Adam", "AdamW", "Nadam", "Adamax", "RMSprop", "Lion")
BOUNDED_BY_1 = ("tanh", "sigmoid", "softsign", "hard_sigmoid", "softmax")
NOTHING = 0.005
"""Root of the mean square of the loudest feature below which inputs are lost among biases and first weights."""
OTHER = 4.0
"""Times by which the scales of two parts of the data may differ."""
ENOUGH = 30
"""Samples in all below which it is a toy, and those of each class from which on there is something to learn."""


def _not_finite(facts: Facts) -> Iterator[Found]:
    for array in facts.arrays:
        if array.bad:
            size = 1
            for length in array.shape:
                size *= length
            changes: tuple[Change, ...] = ()
            x, y = f"x_{array.part}", f"y_{array.part}"
            if array.name in (x, y) and array.bad < 0.1 * size and facts.array(x) and facts.array(y):
                lines = (
                    f'finite = (abs(self.{array.name}) < float("inf")).reshape(len(self.{array.name}), -1).all(axis=1)',
                    f"self.{x}, self.{y} = self.{x}[finite], self.{y}[finite]",
                )
                changes = (Change("data", lines),)
            yield Found(
                f"{array.bad:,} of {size:,} values of {array.name} are NaN or infinite, in samples such as {_some(array.bad_rows)}",
                ("data", array.name),
                array.bad_rows,
                changes,
            )


def _some(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers)) or "none that was looked at"


NO_ARRAY = f"Turn it into an array of numbers in load_dataset; {ONE_BY_ONE}."


def _no_numbers(facts: Facts) -> Iterator[Found]:
    for array in facts.arrays:
        if not array.has_numbers:
            what = f"holds {array.dtype}, not numbers" if array.is_numpy else f"is a {array.dtype}, not an array"
            yield Found(f"{array.name} {what}", ("data", array.name), fix="" if array.is_numpy else NO_ARRAY)


def _goes_into_products(facts: Facts, array: Array) -> bool:
    """Whether the model takes it as numbers that are multiplied, and has nothing that normalizes."""
    known = bool(facts.layers) and not facts.weights_scale and "own" not in {one.kind for one in facts.layers}
    return known and array.has_numbers and not array.bad and not array.padded > 0.3


def _unscaled(facts: Facts) -> Iterator[Found]:
    for array in facts.of("x", "train"):
        if not _goes_into_products(facts, array) or array.loudest <= UNSCALED or _is_apart(array):
            continue
        whole = array.low >= 0 and array.whole and array.high <= 255
        names = [one.name for one in facts.of("x") if one.name.partition("[")[2] == array.name.partition("[")[2]]
        if "[" in array.name:
            lines: tuple[str, ...] = ()
        elif whole:
            lines = tuple(f'self.{name} = self.{name}.astype("float32") / 255' for name in names)
        else:
            lines = _standardized(names, array)
        yield Found(
            f"values of {array.name} reach from {array.low:g} to {array.high:g} (root of the mean square {array.loudest:.3g}), "
            "and no layer of the model brings them to a usual scale",
            ("data", array.name),
            changes=(Change("data", lines),) if lines else (),
            fix="divide by 255 in load_dataset, or begin the model with layers.Rescaling(1 / 255)" if whole else "",
        )


def _nearly_nothing(facts: Facts) -> Iterator[Found]:
    for array in facts.of("x", "train"):
        if _goes_into_products(facts, array) and 0 < array.loudest < NOTHING and not _is_apart(array):
            names = [one.name for one in facts.of("x") if "[" not in one.name]
            yield Found(
                f"values of {array.name} reach from {array.low:g} to {array.high:g} (root of the mean square {array.loudest:.3g}), "
                "and no layer of the model brings them to a usual scale",
                ("data", array.name),
                changes=(Change("data", _standardized(names, array)),) if "[" not in array.name else (),
            )


def _other_scale(facts: Facts) -> Iterator[Found]:
    for array in facts.of("x", "train"):
        if not array.has_numbers or array.bad or array.shape[0] < ENOUGH or _are_tokens(facts, array):
            continue
        for part in ("val", "test"):
            other = facts.array(array.name.replace("_train", f"_{part}", 1))
            if other is None or other.bad or other.shape[0] < ENOUGH or not min(other.loudest, array.loudest):
                continue
            times = other.loudest / array.loudest
            if not 1 / OTHER < times < OTHER:
                yield Found(
                    f"values of {other.name} reach from {other.low:g} to {other.high:g}, those of {array.name} from {array.low:g} to {array.high:g}",
                    ("data", other.name),
                )


def _all_the_same(facts: Facts) -> Iterator[Found]:
    for array in facts.of("x", "train"):
        if array.has_numbers and array.shape[0] > 1 and not array.bad and array.low == array.high:
            yield Found(f"all values of {array.name} are {array.low:g}", ("data", array.name))


def _standardized(names: list[str], array: Array) -> tuple[str, ...]:
    """Lines that give each feature, or each channel of pictures and sequences, mean 0 and spread 1."""
    axis = 0 if len(array.sample) < 2 else tuple(range(len(array.sample)))
    scaled = [f'self.{name} = ((self.{name} - mean) / spread).astype("float32")' for name in names]
    return (f"mean, spread = self.x_train.mean(axis={axis}), self.x_train.std(axis={axis}) + 1e-7", *scaled)


def _is_apart(array: Array) -> bool:
    return len(array.sample) == 1 and array.scales[0] > 0 and array.scales[1] > APART * array.scales[0]


def _apart(facts: Facts) -> Iterator[Found]:
    for array in facts.of("x", "train"):
        if _goes_into_products(facts, array) and _is_apart(array) and array.loudest > 1:
            low, high = array.scales
            names = [one.name for one in facts.of("x") if "[" not in one.name]
            yield Found(
                f"features of {array.name} differ {high / low:,.0f} times in scale: standard deviations from {low:.3g} to {high:.3g}, "
                "and no layer of the model normalizes them",
                ("data", array.name),
                changes=(Change("data", _standardized(names, array)),) if "[" not in array.name else (),
            )


def _majority(facts: Facts) -> Iterator[Found]:
    if facts.settings.get("class_weight") is not None or any(facts.of("w", "train")):
        return
    for array in facts.of("y", "train"):
        if not is_of_classes(facts, array) or len(classes(array)) < 2 or facts.samples < 50:
            continue
        counts = array.labels.counts if array.labels is not None else {}
        total = sum(counts.values())
        largest = max(counts, key=lambda number: counts[number])
        if counts[largest] > MAJORITY * total:
            weights = {n: round(total / (len(classes(array)) * count), 3) for n, count in counts.items() if count}
            yield Found(
                f"{counts[largest] / total:.1%} of {array.name} are of class {largest}: to say always that is as accurate",
                ("data", array.name),
                changes=(Change("setting", weights, "class_weight"),)
                if len(facts.heads) == 1 and len(weights) <= 20
                else (),
            )


def _one_class(facts: Facts) -> Iterator[Found]:
    for array in facts.of("y", "train"):
        if is_of_classes(facts, array) and len(classes(array)) == 1 and array.shape[0] > 1:
            yield Found(
                f"all {array.shape[0]:,} labels of {array.name} are {min(classes(array))}", ("data", array.name)
            )


def _large_targets(facts: Facts) -> Iterator[Found]:
    yield from _out_of_steps(facts)
    for head in facts.heads:
        array = facts.array(head.target)
        if array is not None and head.loss in ("mse", "own_mse") and array.std > LARGE_TARGETS:
            yield Found(
                f"{array.name} has a standard deviation of {array.std:.4g}, so {head.loss.upper()} begins at about {array.std**2:.3g} or more",
                ("data", array.name),
            )


def _out_of_steps(facts: Facts) -> Iterator[Found]:
    """Targets further off than the last layer can come in all steps: with Adam and its like no weight moves by more than the rate in one."""
    optimizer = facts.optimizer
    if optimizer is None or optimizer.kind not in ADAPTIVE or not optimizer.rate > 0 or facts.from_files:
        return
    travel = optimizer.rate * facts.steps
    for head in facts.heads:
        array, layer = facts.array(head.target), facts.layer(head.layer)
        if array is None or layer is None or head.loss not in ("mse", "mae", "huber") or head.activation != "linear":
            continue
        before = next((one for name in layer.reads if (one := facts.layer(name)) is not None), None)
        if layer.kind != "Dense" or before is None or (head.loss == "mse" and array.std > LARGE_TARGETS):
            continue
        reach = travel * (layer.fan_in + 1)
        if before.activation not in BOUNDED_BY_1:
            reach *= 1 + travel
        far = max(array.low, -array.high, array.std)
        if far > max(FAR, reach):
            yield Found(
                f"{array.name} reaches from {array.low:g} to {array.high:g}, and in {facts.steps:,} steps with {optimizer.kind} at "
                f"{optimizer.rate:g} the output comes to about {reach:.3g}",
                ("data", array.name),
            )


def _channels_first(facts: Facts) -> Iterator[Found]:
    first = next((one for one in facts.layers if one.kind in ("Conv2D", "SeparableConv2D", "DepthwiseConv2D")), None)
    if first is None or first.config.get("data_format") not in (None, "channels_last"):
        return
    for array in facts.of("x", "train"):
        if len(array.sample) == 3 and array.sample == first.before:
            channels, height, width = array.sample
            if channels in (1, 3, 4) and height > 4 and width > 4 and height == width:
                names = [one.name for one in facts.of("x") if "[" not in one.name]
                yield Found(
                    f"samples of {array.name} have the shape {array.sample}: channels first, which the convolution {first.name!r} takes for "
                    f"{plural(channels, 'row')} of pixels with {width} channels",
                    ("data", array.name),
                    samples=(),
                    fix=f"np.moveaxis({names[0] if names else 'x'}, 1, -1) in load_dataset, and the same in keras.Input",
                )


def _are_tokens(facts: Facts, array: Array) -> bool:
    return array.whole and any(one.kind == "Embedding" and one.before == array.sample for one in facts.layers)


def _constant(facts: Facts) -> Iterator[Found]:
    for array in facts.of("x", "train"):
        if array.constant and len(array.constant) < array.sample[0] and not _are_tokens(facts, array):
            yield Found(
                f"{plural(len(array.constant), 'feature')} of {array.sample[0]:,} in {array.name} never change: {first(list(array.constant))}",
                ("data", array.name),
            )


def _many_features(facts: Facts) -> Iterator[Found]:
    if any(one.penalty for one in facts.layers):
        return
    for array in facts.of("x", "train"):
        reads = [one for one in facts.layers if one.kind == "Dense" and one.before == array.sample]
        if len(array.sample) == 1 and array.sample[0] > MANY_FEATURES and reads:
            yield Found(
                f"{array.name} has {array.sample[0]:,} features of {array.shape[0]:,} samples",
                ("layer", reads[0].name),
            )


DATA = (
    Rule(
        id="D01",
        severity="E",
        title="NaN or infinite values",
        look=_not_finite,
        why="One NaN makes the loss NaN, then all gradients, then all weights.",
        fix="Drop or fill these samples in load_dataset.",
        source="Zhang et al., UMLAUT: Debugging Deep Learning Programs, CHI 2021, doi:10.1145/3411764.3445538",
    ),
    Rule(
        id="D02",
        severity="E",
        title="text or objects instead of numbers",
        look=_no_numbers,
        why="Layers multiply numbers; text and Python objects have none.",
        fix="Turn them into numbers in load_dataset, as labels with numpy.unique(y, return_inverse=True)[1].",
        source="UMLAUT, doi:10.1145/3411764.3445538",
    ),
    Rule(
        id="D03",
        severity="W",
        title="unscaled inputs",
        look=_unscaled,
        why="Initial weights and usual learning rates assume inputs of about 1. With larger inputs, steps overshoot and units saturate or die.",
        fix="Subtract the mean and divide by the standard deviation in load_dataset, or begin the model with layers.Normalization.",
        source="UMLAUT, doi:10.1145/3411764.3445538; LeCun et al., Efficient BackProp, 1998",
    ),
    Rule(
        id="D04",
        severity="W",
        title="features of very different scales",
        look=_apart,
        why="The largest feature dominates the loss and the steps. The model learns from the small ones last or never.",
        fix="Bring each feature to mean 0 and standard deviation 1 in load_dataset, or begin the model with layers.Normalization.",
        source="UMLAUT, doi:10.1145/3411764.3445538",
    ),
    Rule(
        id="D11",
        severity="W",
        title="strongly imbalanced classes",
        look=_majority,
        why="The model may learn to predict only that class, which is rarely wrong but useless.",
        fix="Set class_weight, use a focal loss, and measure AUC or recall instead of accuracy.",
        source="WebNNM, 2026; Lin et al., Focal Loss, arXiv:1708.02002",
    ),
    Rule(
        id="D12",
        severity="W",
        title="large targets",
        look=_large_targets,
        why="Squared errors of large targets give gradients that overshoot, up to NaN. Adam has bounded steps and needs very many of them.",
        fix="Subtract the mean of the targets and divide by their standard deviation, or learn their logarithm.",
        source="WebNNM, 2026",
    ),
    Rule(
        id="D13",
        severity="E",
        title="labels of one class only",
        look=_one_class,
        why="The model learns to predict that class for every sample.",
        fix="Check how load_dataset reads the labels. The first part of a sorted file has only one class.",
        source="UMLAUT, doi:10.1145/3411764.3445538",
    ),
    Rule(
        id="D14",
        severity="W",
        title="images with channels first",
        look=_channels_first,
        why="Convolutions expect channels on the last axis. Here they slide over colors and rows.",
        fix="Move the channels to the end: numpy.moveaxis(x, 1, -1).",
        source="UMLAUT, doi:10.1145/3411764.3445538",
    ),
    Rule(
        id="D15",
        severity="I",
        title="constant features",
        look=_constant,
        why="They carry no information, and division by their standard deviation gives NaN.",
        fix="Drop them: x[:, x.std(axis=0) > 0].",
        source="measured: scikit-learn's digits have 3, MNIST has 67",
    ),
    Rule(
        id="D19",
        severity="W",
        title="test data on a different scale",
        look=_other_scale,
        why="The model has never seen such inputs, so the measured values say nothing about it.",
        fix="Scale every part with the mean and deviation of the training part.",
        source="Humbatova et al., arXiv:1910.11015: wrong preprocessing",
    ),
    Rule(
        id="D20",
        severity="E",
        title="identical inputs",
        look=_all_the_same,
        why="The model cannot tell samples apart. A cast to integers after scaling causes this.",
        fix="Check load_dataset: scale floats, not integers.",
        source="Humbatova et al., arXiv:1910.11015: wrong preprocessing",
    ),
    Rule(
        id="D21",
        severity="W",
        title="inputs close to 0",
        look=_nearly_nothing,
        why="Initial weights assume inputs of about 1. With tiny inputs the model first learns the average, and everything else slowly.",
        fix="Check whether the data is scaled twice, or divide by the standard deviation.",
        source="LeCun et al., Efficient BackProp, 1998",
    ),
    Rule(
        id="D16",
        severity="I",
        title="very many features without a penalty",
        look=_many_features,
        why="With more features than samples a model finds some that fit by chance.",
        fix="Give the first layer kernel_regularizer='l1', so that what does not help goes to 0.",
        source="WebNNM, 2026",
    ),
)
