"""Rules of class M about layers together, as far as no batch is needed to see it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ddlf.extras.advice.facts import NORMALIZING, WEIGHTED, Facts, Layer
from ddlf.extras.advice.of_layers import DROPOUT, JOINING, NEURALINT, UMLAUT, hidden
from ddlf.extras.advice.rule import Change, Found, Rule

KEEPS_LINES = frozenset(
    {
        "Dropout",
        "Flatten",
        "Reshape",
        "AveragePooling1D",
        "AveragePooling2D",
        "ZeroPadding2D",
        "BatchNormalization",
        "Identity",
        "Bias",
    }
)
"""Behind which what is linear is linear still."""
POOLING = frozenset(
    {f"{pool}Pooling{n}D" for pool in ("Max", "Average", "GlobalMax", "GlobalAverage") for n in (1, 2, 3)}
    | {f"UpSampling{n}D" for n in (1, 2, 3)}
)
DEEP = 20
"""Layers with weights one behind the other from which on nothing learns without norms or skips; VGG19 has 19."""
WIDE = 8
"""Places, each way, of which pooling may leave one only behind the last convolution."""
SATURATING = {"sigmoid": 4, "hard_sigmoid": 4, "tanh": 9, "softsign": 9}
"""So many of them one behind the other leave the first without gradients."""


def _before(facts: Facts, layer: Layer, through: frozenset[str] = frozenset()) -> Layer | None:
    """The one layer whose output it takes, if nobody else takes that."""
    while len(layer.reads) == 1 and (found := facts.layer(layer.reads[0])) is not None:
        if len(facts.readers(found.name)) != 1:
            return None
        if found.kind not in through:
            return found
        layer = found
    return None


def _longest(facts: Facts, counts: Callable[[Layer], bool], breaks: Callable[[Layer], bool]) -> list[str]:
    """The longest row of layers one behind the other that count; one that breaks begins anew."""
    best: dict[str, list[str]] = {}
    for layer in facts.layers:
        before = max((best.get(name, []) for name in layer.reads), key=len, default=[])
        best[layer.name] = [] if breaks(layer) else [*before, layer.name] if counts(layer) else before
    return max(best.values(), key=len, default=[])


def _linear(facts: Facts) -> Iterator[Found]:
    pairs = list(_pairs(facts))
    yield from pairs or _all_linear(facts)


def _pairs(facts: Facts) -> Iterator[Found]:
    for layer in facts.layers:
        if layer.kind not in ("Dense", "Conv1D", "Conv2D") or not layer.trained:
            continue
        before = _before(facts, layer, KEEPS_LINES)
        if before is None or before.kind != layer.kind or before.activation != "linear" or not before.trained:
            continue
        if (
            layer.config.get("groups", 1) != 1
            or before.config.get("groups", 1) != 1
            or not before.shape
            or not layer.shape
        ):
            continue
        width, ends = before.shape[-1] or 0, ((before.before or (0,))[-1] or 0, layer.shape[-1] or 0)
        if width < max(ends) and width < min(
            ends[0] or width + 1, 10 * width
        ):  # narrower than both sides: a factor, or a code
            continue
        if width < ends[1]:
            continue
        yield Found(
            f"between {before.name!r} and {layer.name!r} there is no activation: together they are one {layer.kind}",
            ("layer", before.name),
            changes=(Change("argument", "relu", before.name, "activation"),),
        )


def _all_linear(facts: Facts) -> Iterator[Found]:
    """No activation in the whole model, over pooling, skips and norms, of which the rule of pairs says nothing."""
    last = {head.layer for head in facts.heads}
    inner = [one for one in facts.layers if one.name not in last]
    known = WEIGHTED | KEEPS_LINES | JOINING - {"Multiply"} | POOLING
    weighted = [one for one in inner if one.kind in WEIGHTED and one.trained]
    if not last or any(one.kind not in known or one.activation not in ("", "linear") for one in inner):
        return
    if len(weighted) >= 2 and any((one.shape[-1:] or (0,))[0] != 1 for one in weighted):
        yield Found(
            f"none of the {len(weighted)} layers with weights before the output has an activation, from {weighted[0].name!r} to "
            f"{weighted[-1].name!r}",
            ("layer", weighted[0].name),
            changes=tuple(Change("argument", "relu", one.name, "activation") for one in weighted),
        )


def _deep(facts: Facts) -> Iterator[Found]:
    if any(one.kind in NORMALIZING or one.kind in JOINING for one in facts.layers) or any(
        one.activation == "selu" for one in facts.layers
    ):
        return
    row = _longest(facts, lambda one: one.kind in WEIGHTED, lambda one: False)
    if len(row) > DEEP:
        yield Found(
            f"{len(row)} layers with weights, from {row[0]!r} to {row[-1]!r}, and no normalization and no skip among them",
            ("layer", row[0]),
        )


def _saturating(facts: Facts) -> Iterator[Found]:
    for activation, most in SATURATING.items():
        row = _longest(
            facts,
            lambda one, wanted=activation: one.activation == wanted and one.kind not in ("LSTM", "GRU", "SimpleRNN"),  # type: ignore[misc]
            lambda one: one.kind in NORMALIZING or one.kind in JOINING,
        )
        row = [name for name in row if name not in {head.layer for head in facts.heads}]
        if len(row) >= most:
            yield Found(
                f"{len(row)} times {activation} one behind the other, from {row[0]!r} to {row[-1]!r}",
                ("layer", row[0]),
                changes=tuple(Change("argument", "relu", name, "activation") for name in row if len(row) <= DEEP),
                fix="" if len(row) <= DEEP else "take fewer layers, or relu with normalization and skips",
            )
            return


def _dropout_before_norm(facts: Facts) -> Iterator[Found]:
    for layer in facts.layers:
        if layer.kind == "BatchNormalization":
            before = _before(
                facts,
                layer,
                frozenset({"Activation", "ReLU", "MaxPooling2D", "AveragePooling2D"}),
            )
            if before is not None and before.kind in DROPOUT and float(before.config.get("rate") or 0) > 0:
                yield Found(
                    f"{before.name!r} stands before {layer.name!r}",
                    ("layer", before.name),
                    changes=(Change("remove", of=before.name),),
                )


def _dropout_at_the_end(facts: Facts) -> Iterator[Found]:
    for layer in facts.layers:
        if (
            layer.kind in DROPOUT
            and layer.reads
            and not facts.readers(layer.name)
            and float(layer.config.get("rate") or 0) > 0
        ):
            yield Found(
                f"{layer.name!r} stands behind the output, and sets {float(layer.config['rate']):.0%} of it to 0 in training",
                ("layer", layer.name),
                changes=(Change("remove", of=layer.name),),
            )


def _inner_softmax(facts: Facts) -> Iterator[Found]:
    for layer in [*hidden(facts), *(one for one in facts.layers if one.kind in ("Softmax", "Activation"))]:
        readers = facts.readers(layer.name)
        straight = len(readers) == 1 and readers[0].kind in (
            "Dense",
            "Dropout",
            "BatchNormalization",
            "Conv2D",
            "Flatten",
        )
        if layer.activation == "softmax" and straight and all(one.reads == (layer.name,) for one in readers):
            yield Found(
                f"{layer.name!r} is a softmax, and {readers[0].name!r} goes on from it",
                ("layer", layer.name),
                changes=(Change("argument", "relu", layer.name, "activation"),) if layer.kind != "Softmax" else (),
            )


def _cut_logits(facts: Facts) -> Iterator[Found]:
    for layer in facts.layers:
        if layer.kind in ("Softmax", "Activation") and layer.activation in ("softmax", "sigmoid"):
            before = _before(facts, layer, frozenset({"Dropout"}))
            if before is not None and before.activation in ("relu", "sigmoid", "tanh", "softmax"):
                kept = before.kind in ("Dense", "Conv2D")
                yield Found(
                    f"{before.name!r} is a {before.activation}, and {layer.name!r} takes a {layer.activation} of it",
                    ("layer", before.name),
                    changes=(Change("argument", "linear", before.name, "activation"),) if kept else (),
                )


def _bias_before_norm(facts: Facts) -> Iterator[Found]:
    found = []
    for layer in facts.layers:
        if layer.kind == "BatchNormalization" and layer.config.get("center", True):
            before = _before(facts, layer)
            if (
                before is not None
                and before.kind in WEIGHTED
                and before.config.get("use_bias")
                and before.activation == "linear"
            ):
                found.append(before.name)
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        yield Found(
            f"{found[0]!r}{more} {'add' if more else 'adds'} a bias that the normalization behind takes off again",
            ("layer", found[0]),
            changes=tuple(Change("argument", False, name, "use_bias") for name in found),
        )


def _one_wide(facts: Facts) -> Iterator[Found]:
    for layer in hidden(facts):
        readers = facts.readers(layer.name)
        units = [(one.shape[-1:] or (0,))[0] or 0 for one in readers if one.kind == "Dense"]
        straight = sum(units) if len(units) == len(readers) else 0
        if layer.kind == "Dense" and layer.shape[-1:] == (1,) and layer.fan_in > 1 and straight > 1:
            yield Found(
                f"all that {readers[0].name!r}, of {readers[0].shape[-1]} units"
                + (f", and {len(readers) - 1} more learn" if len(readers) > 1 else ", learns")
                + f" of is the 1 unit of {layer.name!r}",
                ("layer", layer.name),
            )


def _one_pixel(facts: Facts) -> Iterator[Found]:
    for layer in facts.layers:
        if layer.kind not in ("MaxPooling2D", "AveragePooling2D") or layer.shape[:2] != (1, 1):
            continue
        readers = facts.readers(layer.name)
        wide = min((size or 0 for size in layer.before[:2]), default=0)
        if wide >= WIDE and len(readers) == 1 and readers[0].kind == "Conv2D" and readers[0].trained:
            yield Found(
                f"{layer.name!r} leaves one of {wide} x {wide} places, and {readers[0].name!r} is a convolution over it",
                ("layer", layer.name),
            )


AUTOTRAINER = "Zhang et al., AutoTrainer, ICSE 2021, doi:10.1109/ICSE43902.2021.00043"
MODELS = (
    Rule(
        id="M02",
        severity="W",
        title="layers without an activation between them",
        look=_linear,
        why="Two linear layers in a row can do no more than one.",
        fix="Give the first one an activation, as relu.",
        source=NEURALINT,
    ),
    Rule(
        id="M03",
        severity="W",
        title="a deep model without normalization or skip connections",
        look=_deep,
        why="Gradients become smaller or larger with each layer, until the first ones stand still or burst.",
        fix="Add BatchNormalization or LayerNormalization behind layers, or skips around them.",
        source="WebNNM, 2026; He et al., arXiv:1512.03385",
    ),
    Rule(
        id="M04",
        severity="W",
        title="saturating activations in a row",
        look=_saturating,
        why="A sigmoid passes on a quarter of a gradient at best: behind some of them nothing is left.",
        fix="Take relu, gelu or selu in hidden layers, or normalize between them.",
        source=AUTOTRAINER,
    ),
    Rule(
        id="M05",
        severity="W",
        title="dropout before batch normalization",
        look=_dropout_before_norm,
        why="Dropout changes the variance in training only, and the normalization is then wrong by that in use.",
        fix="Put dropout behind the last normalization.",
        source="Li et al., Understanding the Disharmony, arXiv:1801.05134",
    ),
    Rule(
        id="M06",
        severity="W",
        title="dropout after the output",
        look=_dropout_at_the_end,
        why="The loss compares outputs that dropout set to 0 with the labels.",
        fix="Remove it, or move it before the last layer.",
        source=UMLAUT,
    ),
    Rule(
        id="M07",
        severity="W",
        title="softmax in a hidden layer",
        look=_inner_softmax,
        why="A softmax keeps all units but one near 0, with almost no gradient.",
        fix="Take relu in hidden layers.",
        source=UMLAUT,
    ),
    Rule(
        id="M08",
        severity="W",
        title="an activation before the softmax",
        look=_cut_logits,
        why="Logits that cannot be negative, or not large, cannot say that something is certain; units of a relu that are at 0 stay there.",
        fix="Leave the layer before the softmax without an activation.",
        source=NEURALINT,
    ),
    Rule(
        id="M09",
        severity="I",
        title="a bias before batch normalization",
        look=_bias_before_norm,
        why="The normalization takes the mean off, and the bias with it; it only costs.",
        fix="Give the layer use_bias=False.",
        source="Ioffe and Szegedy, arXiv:1502.03167",
    ),
    Rule(
        id="M31",
        severity="W",
        title="a layer of one unit in the middle",
        look=_one_wide,
        why="All that is behind it learns from one number, in which several classes lie on a line.",
        fix="Give it more units.",
        source="Humbatova et al., arXiv:1910.11015: suboptimal number of neurons",
    ),
    Rule(
        id="M19",
        severity="W",
        title="pooling that leaves one place",
        look=_one_pixel,
        why="Where something is in the picture is gone before the convolutions that could use it.",
        fix="Pool by 2, and all at once only behind the last convolution.",
        source="Humbatova et al., arXiv:1910.11015: wrong filter and pooling sizes",
    ),
)
