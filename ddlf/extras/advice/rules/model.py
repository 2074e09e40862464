"""Rules of class M: single layers, combinations of layers, and observations of a batch. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from ddlf.extras.advice.facts import DROPOUT, NORMALIZING, WEIGHTED, AppFacts, LayerFacts
from ddlf.extras.advice.rule import Change, Finding, plural, rule
from ddlf.extras.advice.rules.labels import LEARNT

SEEN = 0.5
"""The receptive field of an output should cover this share of a picture's side."""
WHOLE = math.inf
SLIDING = frozenset({"Conv2D", "SeparableConv2D", "DepthwiseConv2D", "MaxPooling2D", "AveragePooling2D"})
GLOBAL = frozenset({"GlobalAveragePooling2D", "GlobalMaxPooling2D"})
PASSING = frozenset(
    {"Activation", "ReLU", "ReLU6", "LeakyReLU", "PReLU", "ELU", "Softmax", "Sigmoid", "Tanh", "Gelu", "Silu", "Relu", "Bias", "Identity", "Cast"}
    | {"BatchNormalization", "LayerNormalization", "Dropout", "SpatialDropout2D", "Rescaling", "Normalization", "ZeroPadding2D"}
    | {"Add", "Concatenate", "Average", "Multiply", "Subtract", "Maximum", "Dense", "Reshape", "Flatten"}
)  # fmt: skip
"""Layers that do not mix the positions of a picture, unless an earlier layer has flattened them."""
Field = tuple[float, float, bool]
"""Receptive field in pixels along a side, pixels between neighbours, and whether positions were merged."""
JOINING = frozenset({"Add", "Concatenate", "Average", "Multiply", "Subtract", "Maximum"})
DROPPED = 0.8
PENALTY, PENALIZED = 0.1, 0.5
"""If a penalty has a larger factor than this, or is a larger share of the first loss, it outweighs correct
predictions."""
FEW_WORDS = 10
READS_QUANTITIES = frozenset({"LSTM", "GRU", "SimpleRNN", "Bidirectional", "Conv1D", "Dense"})
SPREADS = (0.02, 5.0)
"""Acceptable range of the output's scale, which is the initial standard deviation times the root of the fan-in. 1 to
1.4 is ideal."""
PADDED = 0.3
PIERCED = 0.05
LEFT_OF_FIRST, REVERSED_MOMENTUM = 0.2, 0.3
"""Maximum share of the initial moving mean at the end of the run; and minimum momentum, because a smaller one was
probably meant in PyTorch's sense."""
ONE_TOKEN = 0.4
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
"""Layers that keep a linear function linear."""
POOLING = frozenset(
    {f"{pool}Pooling{n}D" for pool in ("Max", "Average", "GlobalMax", "GlobalAverage") for n in (1, 2, 3)}
    | {f"UpSampling{n}D" for n in (1, 2, 3)}
)
DEEP = 20
"""This number of successive layers with weights cannot learn without normalization or skip connections. VGG19 has
19."""
WIDE = 8
"""Before the last convolution, pooling must not reduce this number of positions along a side to one."""
SATURATING = {"sigmoid": 4, "hard_sigmoid": 4, "tanh": 9, "softsign": 9}
"""With this number of successive saturating activations, the first layer gets almost no gradient."""
MIXED, FUTURE = 1e-3, 1e-3
DEAD, SATURATED = 0.6, 0.4
SPREAD = 1e4
OFF = 3.0


def _pair(value: Any, default: int) -> int:
    return default if value is None else int(max(value) if isinstance(value, list | tuple) else value)


def _field(layer: LayerFacts, ins: list[Field]) -> Field:
    """Return the receptive field of a layer's output."""
    width, spacing, joined = max(ins)
    if layer.kind in SLIDING:
        kernel = layer.config.get("kernel_size", layer.config.get("pool_size"))
        if kernel is None:  # an operator that pools all positions
            return width, spacing, True
        size, stride = _pair(kernel, 1), layer.config.get("strides")
        step = _pair(stride, size if "Pooling" in layer.kind else 1)
        extent = (size - 1) * _pair(layer.config.get("dilation_rate"), 1)
        return width + extent * spacing, spacing * step, joined
    if layer.kind in GLOBAL:
        return width, spacing, True
    has_places = len(layer.input_shape) == 3
    if layer.kind == "Flatten" and has_places and math.prod(size or 1 for size in layer.input_shape[:2]) > 1:
        return WHOLE, spacing, True
    return (width, spacing, joined) if layer.kind in PASSING else (WHOLE, spacing, joined)


@rule("M18", "W", "a receptive field smaller than half of the picture")
def _small_field(facts: AppFacts) -> Iterator[Finding]:
    """The output never sees larger objects as a whole, only their texture.

    Fix: Pool or stride earlier, add layers, or dilate filters (dilation_rate=2).
    Source: Luo et al., Understanding the Effective Receptive Field, arXiv:1701.04128
    """
    shapes = [shape for _, shape, _ in facts.inputs]
    if not shapes or not all(len(shape) == 3 and shape[0] and shape[1] for shape in shapes):
        return
    side = max(size or 0 for shape in shapes for size in shape[:2])
    begin: Field = (1.0, 1.0, False)
    fields: dict[str, Field] = {}
    last: dict[str, str] = {}
    for layer in facts.layers:
        ins = [fields.get(name, begin) for name in layer.reads]  # a tensor without a layer is an input
        if not ins:
            fields[layer.name] = (WHOLE, 1.0, False)
            continue
        fields[layer.name] = _field(layer, ins)
        earlier = next((last[name] for name in layer.reads if name in last), "")
        last[layer.name] = layer.name if layer.kind in SLIDING else earlier
    for head in facts.heads:
        width, _, joined = fields.get(head.layer, (WHOLE, 1.0, False))
        if joined and width < SEEN * side and last.get(head.layer):
            yield Finding(
                f"each value before the global pooling sees {width:.0f} x {width:.0f} pixels of {side} x {side}",
                ("layer", last[head.layer]),
            )


def hidden(facts: AppFacts) -> list[LayerFacts]:
    """Return the hidden layers: the layers with a kernel that other layers follow."""
    last = {head.layer for head in facts.heads}
    return [
        layer
        for layer in facts.layers
        if layer.kind in WEIGHTED and layer.reads and layer.name not in last and facts.readers(layer.name)
    ]


@rule("M01", "E", "equal initial weights")
def _equal_weights(facts: AppFacts) -> Iterator[Finding]:
    """Units that start with equal weights get equal gradients and stay equal. So the layer works like a single unit.

    Fix: Omit kernel_initializer, or use a random one.
    Source: Nikanjam et al., NeuraLint, arXiv:2105.08095
    """
    # Zeros are intended if they leave another path unchanged, such as a branch of a sum or the variance of a code.
    joined = any(layer.kind in JOINING or len(layer.reads) > 1 for layer in facts.layers)
    for layer in hidden(facts):
        size = max((n or 0 for n in layer.shape[-1:]), default=0)
        if layer.equal is None or size < 2 or not layer.trained or (joined and layer.equal == 0):
            continue
        yield Finding(
            f"all weights of {layer.name!r} are {layer.equal:g}",
            ("layer", layer.name),
            changes=(Change("argument", "glorot_uniform", layer.name, "kernel_initializer"),),
        )


@rule("M10", "E", "no trainable weights")
def _nothing_trained(facts: AppFacts) -> Iterator[Finding]:
    """Without trainable weights, training changes nothing.

    Fix: Set trainable=True on the layers that should learn, before compile.
    Source: Humbatova et al., arXiv:1910.11015
    """
    if (
        facts.layers
        and facts.heads
        and not any(layer.trained for layer in facts.layers)
        and any(layer.parameters for layer in facts.layers)
    ):
        yield Finding("no weight of the model is trained: all layers are frozen", ("layer", facts.layers[-1].name))


@rule("M11", "W", "a frozen last layer")
def _frozen_head(facts: AppFacts) -> Iterator[Finding]:
    """The random weights of the last layer never change, and all earlier layers must adapt to them.

    Fix: Freeze the pretrained layers, and train the new one.
    Source: Humbatova et al., arXiv:1910.11015
    """
    if not any(layer.trained for layer in facts.layers):
        return
    for head in facts.heads:
        layer = facts.layer(head.layer)
        if (
            layer is not None
            and layer.kind == "Dense"
            and layer.parameters
            and not layer.trained
            and layer.initializer.startswith("Glorot")
        ):
            trained = [layer for layer in facts.layers if layer.trained]
            yield Finding(
                f"the last layer, {layer.name!r}, is frozen, and {len(trained)} layers before it are trained",
                ("layer", layer.name),
                changes=(Change("argument", True, layer.name, "trainable"),),
            )


@rule("M12", "E", "tokens outside the embedding")
def _unknown_tokens(facts: AppFacts) -> Iterator[Finding]:
    """The embedding has no row for these tokens. TensorFlow ends the run on a CPU, and silently reads zeros on a GPU.

    Fix: Give Embedding input_dim = largest number + 1.
    Source: Humbatova et al., arXiv:1910.11015
    """
    for layer in facts.layers:
        if layer.kind != "Embedding" or (layer.reads and facts.layer(layer.reads[0]) is not None):
            continue
        size = layer.config.get("input_dim")
        token_arrays = [
            array
            for array in facts.arrays_of("x")
            if not facts.inputs or len(facts.inputs) == 1 or f"'{layer.reads[0] if layer.reads else ''}'" in array.name
        ]
        for array in token_arrays:
            if isinstance(size, int) and array.is_whole and (array.high >= size or array.low < 0):
                yield Finding(
                    f"{array.name} has numbers from {array.low:g} to {array.high:g}, and {layer.name!r} has rows 0 to {size - 1}",
                    ("layer", layer.name),
                    changes=(Change("argument", int(array.high) + 1, layer.name, "input_dim"),)
                    if array.low >= 0
                    else (),
                )
                break


@rule("M13", "I", "padding is read as text")
def _unmasked(facts: AppFacts) -> Iterator[Finding]:
    """A recurrent layer also reads the padding, and forgets the text before it.

    Fix: Give Embedding mask_zero=True.
    Source: Dwarampudi and Reddy, Effects of padding on LSTMs and CNNs, arXiv:1903.07288
    """
    for layer in facts.layers:
        if layer.kind == "Embedding" and not layer.config.get("mask_zero"):
            readers = facts.readers(layer.name)
            array = next((array for array in facts.arrays_of("x", "train") if array.sample == layer.input_shape), None)
            reads = any(reader.kind in ("LSTM", "GRU", "SimpleRNN", "Bidirectional") for reader in readers)
            if array is not None and array.padded > PADDED and reads:
                yield Finding(
                    f"{array.padded:.0%} of the rows of {array.name} end with zeros, which {layer.name!r} reads as a normal token",
                    ("layer", layer.name),
                    changes=(Change("argument", True, layer.name, "mask_zero"),),
                )


@rule("M35", "W", "a token with the number of the padding")
def _masked_words(facts: AppFacts) -> Iterator[Finding]:
    """With mask_zero=True the layer skips every 0, so the model never sees a word with that number.

    Fix: Number tokens from 1, and keep 0 for the padding. Increase input_dim by one.
    Source: Keras, Embedding: mask_zero
    """
    for layer in facts.layers:
        if layer.kind == "Embedding" and layer.config.get("mask_zero"):
            array = next((array for array in facts.arrays_of("x", "train") if array.sample == layer.input_shape), None)
            if array is not None and array.pierced > PIERCED:
                yield Finding(
                    f"{array.pierced:.0%} of the rows of {array.name} have zeros between other tokens, and {layer.name!r} treats 0 as padding",
                    ("layer", layer.name),
                )


@rule("M32", "I", "frozen layers with random weights")
def _frozen_as_drawn(facts: AppFacts) -> Iterator[Finding]:
    """The output of these layers is a random mixture of their inputs, which training cannot improve.

    Fix: Load weights before you freeze them, or set trainable=True.
    Source: Humbatova et al., arXiv:1910.11015; Keras, guide on transfer learning
    """
    frozen = [layer for layer in facts.layers if layer.untouched and layer.kind != "Normalization"]
    if frozen and any(layer.trained for layer in facts.layers):
        yield Finding(
            f"{frozen[0].name!r}"
            + (f" and {len(frozen) - 1} more are" if len(frozen) > 1 else " is")
            + " frozen with initial random weights",
            ("layer", frozen[0].name),
        )


@rule("M33", "I", "moving statistics that do not follow, or too fast")
def _slow_norm(facts: AppFacts) -> Iterator[Finding]:
    """Outside of training, the layer uses the moving mean and variance. If these differ from the mean and variance of
    the data, a good model gets bad results.

    Fix: Use a momentum of 0.9 to 0.99. In Keras, momentum is the share of the old value. A momentum of 0.1 in PyTorch
        is 0.9 in Keras.
    Source: Keras, BatchNormalization
    """
    steps = facts.steps_of(facts.slots)
    for layer in facts.layers:
        momentum = layer.config.get("momentum")
        if layer.kind != "BatchNormalization" or not layer.trained or not isinstance(momentum, int | float):
            continue
        initial_share = momentum**steps
        if momentum <= REVERSED_MOMENTUM:
            problem = "the moving statistics are mostly those of the last batch"
        elif initial_share > LEFT_OF_FIRST and facts.samples and not facts.from_files:
            problem = f"after the {steps:,} steps of this run, {initial_share:.0%} of its mean and variance are still the initial values"
        else:
            continue
        yield Finding(
            f"{layer.name!r} has a momentum of {momentum:g}: {problem}",
            ("layer", layer.name),
            changes=(Change("argument", 0.9, layer.name, "momentum"),),
        )
        return


@rule("D25", "W", "one token dominates")
def _unknown_words(facts: AppFacts) -> Iterator[Finding]:
    """If most words become the token for unknown words, the text has hardly any information. The vocabulary is too
    small, or belongs to another text.

    Fix: Count the words of the training texts, and make the vocabulary large enough for nearly all of them.
    Source: Humbatova et al., arXiv:1910.11015: wrong preprocessing
    """
    embedded = {layer.input_shape for layer in facts.layers if layer.kind == "Embedding"}
    for array in facts.arrays_of("x", "train"):
        if array.commonest is not None and array.sample in embedded and array.high > 2:
            token, share = array.commonest
            if share > ONE_TOKEN:
                yield Finding(
                    f"{share:.0%} of {array.name}, not counting zeros, are the token {token}",
                    ("data", array.name),
                )


@rule("M14", "W", "dropout of nearly all inputs")
def _much_dropped(facts: AppFacts) -> Iterator[Finding]:
    """Dropout leaves mostly noise, and the next layer learns almost nothing.

    Fix: Use rates of 0.1 to 0.5.
    Source: Zhang et al., UMLAUT, CHI 2021, doi:10.1145/3411764.3445538
    """
    for layer in facts.layers:
        rate = layer.config.get("rate")
        if layer.kind in DROPOUT and isinstance(rate, int | float) and rate >= DROPPED:
            yield Finding(
                f"{layer.name!r} sets {rate:.0%} of its inputs to 0",
                ("layer", layer.name),
                changes=(Change("argument", 0.5, layer.name, "rate"),),
            )


@rule("M15", "W", "a penalty larger than the loss")
def _punished(facts: AppFacts) -> Iterator[Finding]:
    """Small weights reduce the total more than right predictions do, so the model predicts the same for every sample.

    Fix: Use 0.01 to 0.00001.
    Source: Zhang et al., UMLAUT, CHI 2021, doi:10.1145/3411764.3445538
    """
    for layer in facts.layers:
        if layer.penalty >= PENALTY:
            yield Finding(
                f"the penalty of {layer.name!r} has the factor {layer.penalty:g}; 0.01 to 0.00001 is usual",
                ("layer", layer.name),
            )
    loss, penalties = facts.observations.get("loss", 0.0), facts.observations.get("penalties", 0.0)
    if not any(layer.penalty >= PENALTY for layer in facts.layers) and loss > 0 and penalties > PENALIZED * loss:
        yield Finding(
            f"weight penalties are {penalties:.4g} of the first loss of {loss:.4g}", ("method", "create_model")
        )


@rule("M36", "W", "token numbers used as quantities")
def _words_as_numbers(facts: AppFacts) -> Iterator[Finding]:
    """The number of a word has no relation to its meaning: word 70 is not ten times word 7.

    Fix: Begin the model with an Embedding layer.
    Source: Humbatova et al., arXiv:1910.11015: wrong preprocessing
    """
    layer_names = {layer.name for layer in facts.layers}
    for array in facts.arrays_of("x", "train"):
        if (
            len(array.sample) != 1
            or not array.dtype.startswith(("int", "uint"))
            or array.padded <= PADDED
            or array.high < FEW_WORDS
        ):
            continue
        readers = [
            layer
            for layer in facts.layers
            if not layer_names & set(layer.reads) and layer.input_shape in (array.sample, (*array.sample, 1))
        ]
        while len(readers) == 1 and readers[0].kind in ("Reshape", "ExpandDims", "Cast"):
            readers = facts.readers(readers[0].name)
        if readers and all(reader.kind in READS_QUANTITIES for reader in readers):
            yield Finding(
                f"{array.name} has whole numbers up to {array.high:g} and ends with zeros, as tokens do, and {readers[0].name!r} reads "
                "them as quantities",
                ("layer", readers[0].name),
            )


@rule("M38", "W", "a Normalization that was never adapted")
def _not_adapted(facts: AppFacts) -> Iterator[Finding]:
    """The layer returns its inputs unchanged, so the inputs are not scaled.

    Fix: Call the layer's method adapt(x_train) in create_model, or set its mean and variance.
    Source: Keras, Normalization
    """
    layer_names = {layer.name for layer in facts.layers}
    # Behind another layer, which may scale, it may be intended, for example before trained weights are loaded.
    for layer in facts.layers:
        if layer.kind == "Normalization" and layer.untouched and not layer_names & set(layer.reads):
            yield Finding(f"{layer.name!r} has mean 0 and variance 1: it was never adapted", ("layer", layer.name))


@rule("M16", "W", "initial weights on an unusual scale")
def _start(facts: AppFacts) -> Iterator[Finding]:
    """Signals become larger or smaller with each layer, and so do gradients.

    Fix: Leave kernel_initializer out, or use he_normal before relu.
    Source: He et al., arXiv:1502.01852; WebNNM, 2026
    """
    for layer in hidden(facts):
        if (
            layer.spread is None
            or not layer.fan_in
            or layer.initializer not in ("RandomNormal", "TruncatedNormal", "RandomUniform")
        ):
            continue
        scale = layer.spread * layer.fan_in**0.5
        if layer.trained and not SPREADS[0] <= scale <= SPREADS[1]:
            yield Finding(
                f"the first weights of {layer.name!r} have a standard deviation of {layer.spread:g}, and sums {layer.fan_in} products: "
                f"its output is {scale:.3g} times as large as its input",
                ("layer", layer.name),
                changes=(Change("argument", "glorot_uniform", layer.name, "kernel_initializer"),),
            )


@rule("M17", "E", "samples of a shape that the model does not take")
def _other_shape(facts: AppFacts) -> Iterator[Finding]:
    """Keras refuses such samples in the first step. On a cluster, this error happens on a worker.

    Fix: Give keras.Input the shape of a sample.
    Source: Humbatova et al., arXiv:1910.11015
    """
    arrays = list(facts.arrays_of("x", "train"))
    # the shapes of these inputs may differ
    if len(arrays) != 1 or len(facts.inputs) != 1 or facts.custom & {"step", "train"}:
        return
    (array,), (_, input_shape, _) = arrays, facts.inputs[0]
    sample_shape = array.sample
    for shape in (sample_shape, (*sample_shape, 1), sample_shape[:-1] if sample_shape[-1:] == (1,) else sample_shape):
        if len(shape) == len(input_shape) and all(w in (None, g) for g, w in zip(shape, input_shape, strict=True)):
            return
    yield Finding(
        f"samples of {array.name} have the shape {sample_shape}, and the model takes {input_shape}",
        ("data", array.name),
    )


def _layer_before(facts: AppFacts, layer: LayerFacts, through: frozenset[str] = frozenset()) -> LayerFacts | None:
    """Return the layer before a layer, if it is the only input and no other layer reads it."""
    while len(layer.reads) == 1 and (previous := facts.layer(layer.reads[0])) is not None:
        if len(facts.readers(previous.name)) != 1:
            return None
        if previous.kind not in through:
            return previous
        layer = previous
    return None


def _longest(facts: AppFacts, counts: Callable[[LayerFacts], bool], breaks: Callable[[LayerFacts], bool]) -> list[str]:
    """Return the names of layers in the longest chain of successive layers that ``counts`` accepts. A layer that
    ``breaks`` accepts starts a new chain.
    """
    best: dict[str, list[str]] = {}
    for layer in facts.layers:
        before = max((best.get(name, []) for name in layer.reads), key=len, default=[])
        best[layer.name] = [] if breaks(layer) else [*before, layer.name] if counts(layer) else before
    return max(best.values(), key=len, default=[])


@rule("M02", "W", "layers without an activation between them")
def _linear(facts: AppFacts) -> Iterator[Finding]:
    """Two successive linear layers can compute no more than one linear layer.

    Fix: Give the first layer an activation, such as relu.
    Source: Nikanjam et al., NeuraLint, arXiv:2105.08095
    """
    pairs = list(_pairs(facts))
    yield from pairs or _all_linear(facts)


def _pairs(facts: AppFacts) -> Iterator[Finding]:
    for layer in facts.layers:
        if layer.kind not in ("Dense", "Conv1D", "Conv2D") or not layer.trained:
            continue
        before = _layer_before(facts, layer, KEEPS_LINES)
        if before is None or before.kind != layer.kind or before.activation != "linear" or not before.trained:
            continue
        if (
            layer.config.get("groups", 1) != 1
            or before.config.get("groups", 1) != 1
            or not before.shape
            or not layer.shape
        ):
            continue
        width, outer_widths = before.shape[-1] or 0, ((before.input_shape or (0,))[-1] or 0, layer.shape[-1] or 0)
        if width < max(outer_widths) and width < min(
            outer_widths[0] or width + 1, 10 * width
        ):  # narrower than both neighbours: a factorization, or a code
            continue
        if width < outer_widths[1]:
            continue
        yield Finding(
            f"between {before.name!r} and {layer.name!r} there is no activation, so both together are one {layer.kind}",
            ("layer", before.name),
            changes=(Change("argument", "relu", before.name, "activation"),),
        )


def _all_linear(facts: AppFacts) -> Iterator[Finding]:
    """Yield a finding if the whole model has no activation.

    Pooling, skips or normalization hide it from the rule that compares neighbours.
    """
    last = {head.layer for head in facts.heads}
    inner = [layer for layer in facts.layers if layer.name not in last]
    kinds = WEIGHTED | KEEPS_LINES | JOINING - {"Multiply"} | POOLING
    weighted = [layer for layer in inner if layer.kind in WEIGHTED and layer.trained]
    if not last or any(layer.kind not in kinds or layer.activation not in ("", "linear") for layer in inner):
        return
    if len(weighted) >= 2 and any((layer.shape[-1:] or (0,))[0] != 1 for layer in weighted):
        yield Finding(
            f"none of the {len(weighted)} layers with weights before the output has an activation, from {weighted[0].name!r} to "
            f"{weighted[-1].name!r}",
            ("layer", weighted[0].name),
            changes=tuple(Change("argument", "relu", layer.name, "activation") for layer in weighted),
        )


@rule("M03", "W", "a deep model without normalization or skip connections")
def _deep(facts: AppFacts) -> Iterator[Finding]:
    """Gradients become smaller or larger with each layer, so the first layers do not learn, or their gradients explode.

    Fix: Add BatchNormalization or LayerNormalization after layers, or add skip connections.
    Source: WebNNM, 2026; He et al., arXiv:1512.03385
    """
    if any(layer.kind in NORMALIZING or layer.kind in JOINING for layer in facts.layers) or any(
        layer.activation == "selu" for layer in facts.layers
    ):
        return
    names = _longest(facts, lambda layer: layer.kind in WEIGHTED, lambda layer: False)
    if len(names) > DEEP:
        yield Finding(
            f"{len(names)} layers with weights, from {names[0]!r} to {names[-1]!r}, without normalization or skip connections",
            ("layer", names[0]),
        )


@rule("M04", "W", "saturating activations in a row")
def _saturating(facts: AppFacts) -> Iterator[Finding]:
    """A sigmoid passes on at most a quarter of a gradient, so almost no gradient passes through several of them.

    Fix: Use relu, gelu or selu in hidden layers, or normalize between them.
    Source: Zhang et al., AutoTrainer, ICSE 2021, doi:10.1109/ICSE43902.2021.00043
    """
    for activation, most in SATURATING.items():
        names = _longest(
            facts,
            lambda layer, activation_name=activation: (
                layer.activation == activation_name and layer.kind not in ("LSTM", "GRU", "SimpleRNN")
            ),  # type: ignore[misc]
            lambda layer: layer.kind in NORMALIZING or layer.kind in JOINING,
        )
        names = [name for name in names if name not in {head.layer for head in facts.heads}]
        if len(names) >= most:
            yield Finding(
                f"{len(names)} layers with {activation} in a row, from {names[0]!r} to {names[-1]!r}",
                ("layer", names[0]),
                changes=tuple(Change("argument", "relu", name, "activation") for name in names if len(names) <= DEEP),
                fix="" if len(names) <= DEEP else "use fewer layers, or relu with normalization and skip connections",
            )
            return


@rule("M05", "W", "dropout before batch normalization")
def _dropout_before_norm(facts: AppFacts) -> Iterator[Finding]:
    """Dropout changes the variance only in training, so the normalization uses a wrong variance outside of training.

    Fix: Put dropout after the last normalization.
    Source: Li et al., Understanding the Disharmony, arXiv:1801.05134
    """
    for layer in facts.layers:
        if layer.kind == "BatchNormalization":
            before = _layer_before(
                facts,
                layer,
                frozenset({"Activation", "ReLU", "MaxPooling2D", "AveragePooling2D"}),
            )
            if before is not None and before.kind in DROPOUT and float(before.config.get("rate") or 0) > 0:
                yield Finding(
                    f"{before.name!r} comes before {layer.name!r}",
                    ("layer", before.name),
                    changes=(Change("remove", target=before.name),),
                )


@rule("M06", "W", "dropout after the output")
def _dropout_at_the_end(facts: AppFacts) -> Iterator[Finding]:
    """Dropout sets some outputs to 0, and the loss compares these zeros with the labels.

    Fix: Remove it, or move it before the last layer.
    Source: Zhang et al., UMLAUT, CHI 2021, doi:10.1145/3411764.3445538
    """
    for layer in facts.layers:
        if (
            layer.kind in DROPOUT
            and layer.reads
            and not facts.readers(layer.name)
            and float(layer.config.get("rate") or 0) > 0
        ):
            yield Finding(
                f"{layer.name!r} comes after the output, and sets {float(layer.config['rate']):.0%} of it to 0 in training",
                ("layer", layer.name),
                changes=(Change("remove", target=layer.name),),
            )


@rule("M07", "W", "softmax in a hidden layer")
def _inner_softmax(facts: AppFacts) -> Iterator[Finding]:
    """A softmax keeps all units except one near 0, with almost no gradient.

    Fix: Use relu in hidden layers.
    Source: Zhang et al., UMLAUT, CHI 2021, doi:10.1145/3411764.3445538
    """
    for layer in [
        *hidden(facts),
        *(operation for operation in facts.layers if operation.kind in ("Softmax", "Activation")),
    ]:
        readers = facts.readers(layer.name)
        is_read_once = len(readers) == 1 and readers[0].kind in (
            "Dense",
            "Dropout",
            "BatchNormalization",
            "Conv2D",
            "Flatten",
        )
        if layer.activation == "softmax" and is_read_once and all(reader.reads == (layer.name,) for reader in readers):
            yield Finding(
                f"{layer.name!r} is a softmax, and {readers[0].name!r} continues from it",
                ("layer", layer.name),
                changes=(Change("argument", "relu", layer.name, "activation"),) if layer.kind != "Softmax" else (),
            )


@rule("M08", "W", "an activation before the softmax")
def _activation_before_softmax(facts: AppFacts) -> Iterator[Finding]:
    """If logits cannot be negative or large, the softmax cannot give probabilities near 0 or 1. Units of a relu that
    are at 0 stay at 0.

    Fix: Leave the layer before the softmax without an activation.
    Source: Nikanjam et al., NeuraLint, arXiv:2105.08095
    """
    for layer in facts.layers:
        if layer.kind in ("Softmax", "Activation") and layer.activation in ("softmax", "sigmoid"):
            before = _layer_before(facts, layer, frozenset({"Dropout"}))
            if before is not None and before.activation in ("relu", "sigmoid", "tanh", "softmax"):
                is_changeable = before.kind in ("Dense", "Conv2D")
                yield Finding(
                    f"{before.name!r} is a {before.activation}, and {layer.name!r} applies a {layer.activation} to it",
                    ("layer", before.name),
                    changes=(Change("argument", "linear", before.name, "activation"),) if is_changeable else (),
                )


@rule("M09", "I", "a bias before batch normalization")
def _bias_before_norm(facts: AppFacts) -> Iterator[Finding]:
    """The normalization subtracts the mean, which removes the bias. So the bias has no effect, but costs time and
    memory.

    Fix: Give the layer use_bias=False.
    Source: Ioffe and Szegedy, arXiv:1502.03167
    """
    names = []
    for layer in facts.layers:
        if layer.kind == "BatchNormalization" and layer.config.get("center", True):
            before = _layer_before(facts, layer)
            if (
                before is not None
                and before.kind in WEIGHTED
                and before.config.get("use_bias")
                and before.activation == "linear"
            ):
                names.append(before.name)
    if names:
        others_text = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield Finding(
            f"{names[0]!r}{others_text} {'add' if others_text else 'adds'} a bias that the following normalization removes",
            ("layer", names[0]),
            changes=tuple(Change("argument", False, name, "use_bias") for name in names),
        )


@rule("M31", "W", "a layer of one unit in the middle")
def _one_wide(facts: AppFacts) -> Iterator[Finding]:
    """All later layers get a single number for each sample, which can hardly separate several classes.

    Fix: Give this layer more units.
    Source: Humbatova et al., arXiv:1910.11015: suboptimal number of neurons
    """
    for layer in hidden(facts):
        readers = facts.readers(layer.name)
        units = [(reader.shape[-1:] or (0,))[0] or 0 for reader in readers if reader.kind == "Dense"]
        next_units = sum(units) if len(units) == len(readers) else 0
        if layer.kind == "Dense" and layer.shape[-1:] == (1,) and layer.fan_in > 1 and next_units > 1:
            yield Finding(
                f"all that {readers[0].name!r}, of {readers[0].shape[-1]} units"
                + (f", and {len(readers) - 1} more learn" if len(readers) > 1 else ", learns")
                + f" of is the 1 unit of {layer.name!r}",
                ("layer", layer.name),
            )


@rule("M19", "W", "pooling to a single position")
def _one_pixel(facts: AppFacts) -> Iterator[Finding]:
    """This pooling removes all positions in the picture, although later convolutions need them.

    Fix: Pool by 2. Pool over all positions only after the last convolution.
    Source: Humbatova et al., arXiv:1910.11015: wrong filter and pooling sizes
    """
    for layer in facts.layers:
        if layer.kind not in ("MaxPooling2D", "AveragePooling2D") or layer.shape[:2] != (1, 1):
            continue
        readers = facts.readers(layer.name)
        side = min((size or 0 for size in layer.input_shape[:2]), default=0)
        if side >= WIDE and len(readers) == 1 and readers[0].kind == "Conv2D" and readers[0].trained:
            yield Finding(
                f"{layer.name!r} reduces {side} x {side} positions to one, and {readers[0].name!r} is a convolution over it",
                ("layer", layer.name),
            )


@rule("M20", "E", "NaN in the first batch", level="batch")
def _nan_in_first_batch(facts: AppFacts) -> Iterator[Finding]:
    """Every value that is computed from a NaN is NaN, too.

    Fix: Check the inputs of that layer. Typical causes are a logarithm or a root of 0, a division by 0, and float16.
    Source: Zhang et al., AutoTrainer, ICSE 2021, doi:10.1109/ICSE43902.2021.00043
    """
    if layer_name := facts.observations.get("nan"):
        at = ("layer", layer_name) if facts.layer(layer_name) else ("app", "")
        yield Finding(f"the first batch gives NaN or infinity, starting in {layer_name!r}", at)
        return
    norms = facts.observations.get("gradients") or {}
    if non_finite := [name for name, norm in norms.items() if not math.isfinite(norm)]:
        names = [layer.name for layer in facts.layers if non_finite[0].split("/")[-2:-1] == [layer.name]]
        yield Finding(
            f"the first batch gives gradients that are NaN or infinite, such as that of {non_finite[0]}",
            ("layer", names[0]) if names else ("method", "create_model"),
        )


@rule("M34", "E", "the first step fails", level="batch")
def _fails(facts: AppFacts) -> Iterator[Finding]:
    """A run would fail with the same error, on a cluster only after all machines have loaded their data.

    Fix: Check the shapes and types of the inputs of the layer, the loss or the metric that the error names.
    Source: Karpathy, A Recipe for Training Neural Networks, 2019
    """
    if error := facts.observations.get("fails"):
        yield Finding(f"the first batch fails: {error.rstrip('.')}", ("method", "create_model"))


def _has_a_floor(facts: AppFacts) -> bool:
    """Return whether the loss of a right model stays above 0: the cross-entropy of targets between 0 and 1 does, and a
    frozen backbone may prevent memorizing."""
    kinds = {array.labels.kind for array in facts.arrays_of("y", "train") if array.labels is not None}
    soft = any(head.loss in ("bce", "cce") for head in facts.heads) and bool(kinds & {"real", "shares"})
    trained, all_of_them = (sum(getattr(layer, name) for layer in facts.layers) for name in ("trained", "parameters"))
    return soft or trained < 0.5 * all_of_them


@rule("M21", "E", "the model cannot overfit one batch", level="batch")
def _by_heart(facts: AppFacts) -> Iterator[Finding]:
    """If a model cannot learn 16 samples without dropout and augmentation, it cannot learn thousands.

    Fix: Look for a loss that does not fit the output, activations that block gradients, and labels of other samples.
    Source: Karpathy, A Recipe for Training Neural Networks, 2019
    """
    if (
        _has_a_floor(facts)
        or any(array.non_finite for array in facts.arrays if array.part == "train")
        or facts.observations.get("nan")
    ):
        return
    first, least = facts.observations.get("first", math.nan), facts.observations.get("least", math.nan)
    if first > 0 and not least < LEARNT * first and not math.isnan(least):
        yield Finding(
            f"about 260 steps on 16 samples, with Adam at 0.001, 0.01 and 0.1, reduce the loss only from {first:.4g} to {least:.4g}",
            ("loss", ""),
        )


@rule("M22", "E", "samples influence each other", level="batch")
def _mixed(facts: AppFacts) -> Iterator[Finding]:
    """A reshape, a softmax or a sum over the first axis mixes samples, so the output of a sample depends on the other
    samples of its batch.

    Fix: Do not change the first axis: name the axes of reshape, softmax, mean and transpose.
    Source: Karpathy, A Recipe for Training Neural Networks, 2019
    """
    share = facts.observations.get("mixed", 0.0)
    if share > MIXED:
        yield Finding(
            f"outputs of a sample change by {share:.2%} when other samples of its batch change",
            ("method", "create_model"),
        )
    elif layer := facts.observations.get("mixing"):
        yield Finding(
            f"outputs of {layer!r} for a sample change when other samples of its batch change", ("layer", layer)
        )


@rule("M23", "E", "the model sees the future", level="batch")
def _future(facts: AppFacts) -> Iterator[Finding]:
    """The inputs contain the target. The training loss falls to 0, but the model learns nothing useful.

    Fix: Mask later positions: use_causal_mask=True, padding='causal'.
    Source: Karpathy, A Recipe for Training Neural Networks, 2019
    """
    share = facts.observations.get("future", 0.0)
    if share > FUTURE:
        yield Finding(
            f"labels are the inputs shifted by one position, and outputs of the first half change by {share:.2%} with inputs of the second half",
            ("method", "create_model"),
            fix="mask later positions: use_causal_mask=True, padding='causal', no Bidirectional",
        )


@rule("M24", "E", "weights without a gradient", level="batch")
def _no_gradient(facts: AppFacts) -> Iterator[Finding]:
    """The loss does not depend on these weights, or a function between them and the loss has a gradient of 0. So these
    weights never change.

    Fix: Look for stop_gradient, argmax, round or casts to whole numbers after that layer, and for dead units.
    Source: Zhang et al., AutoTrainer, ICSE 2021, doi:10.1109/ICSE43902.2021.00043; Karpathy, A Recipe for Training
    Neural Networks, 2019
    """
    if any(array.non_finite for array in facts.arrays if array.part == "train") or facts.observations.get("nan"):
        return
    if unmoved := facts.observations.get("unmoved"):
        yield Finding(
            f"in some steps of the model's train_step {plural(len(unmoved), 'trained weight')} {'stays' if len(unmoved) == 1 else 'stay'} the same, "
            f"while others move: {', '.join(unmoved[:3])}" + (", ..." if len(unmoved) > 3 else ""),
            ("method", "create_model"),
            fix="compute the gradients of all trainable variables, and apply all of them",
        )
    if facts.observations.get("slopes") is False:
        yield Finding(
            "the loss has no gradient for any weight",
            ("loss", ""),
            fix="look for comparisons, argmax, round, casts and NumPy in the loss: these operations have no gradient",
        )
        return
    constant = list(facts.observations.get("still", ()))
    # A bias may cancel out alone, for example if two outputs of one encoder are subtracted.
    constant = [
        path for path in constant if not path.endswith("/bias") or f"{path.removesuffix('bias')}kernel" in constant
    ]
    if constant and facts.observations.get("first", math.nan) > 0:
        names = [
            layer.name for layer in facts.layers if any(path.split("/")[-2:-1] == [layer.name] for path in constant)
        ]
        yield Finding(
            f"{plural(len(constant), 'trained weight')} {'has' if len(constant) == 1 else 'have'} a gradient of 0: {', '.join(constant[:3])}"
            + (", ..." if len(constant) > 3 else ""),
            ("layer", names[0]) if names else ("method", "create_model"),
        )


@rule("M25", "W", "gradients that vanish or explode", level="batch")
def _norms(facts: AppFacts) -> Iterator[Finding]:
    """All layers share one learning rate, so some layers hardly change while others take too long steps.

    Fix: Normalize between layers, add skip connections, use relu and he_normal.
    Source: Zhang et al., AutoTrainer, ICSE 2021, doi:10.1109/ICSE43902.2021.00043; WebNNM, 2026
    """
    norms = facts.observations.get("gradients") or {}
    if len(norms) < 3:
        return
    (first, a), *_, (last, b) = norms.items()
    if a > 0 and b > 0 and all(map(math.isfinite, (a, b))) and not 1 / SPREAD <= a / b <= SPREAD:
        how = "vanish" if a < b else "explode"
        yield Finding(
            f"gradients {how}: the norm is {a:.2g} at {first} and {b:.2g} at {last}", ("method", "create_model")
        )


def _units(facts: AppFacts, name: str, most: float, problem: str) -> Iterator[Finding]:
    shares = {layer: share for layer, share in (facts.observations.get(name) or {}).items() if share > most}
    if shares:
        worst = max(shares, key=lambda layer: shares[layer])
        yield Finding(
            f"{shares[worst]:.0%} of {worst!r} {problem}"
            + (f", and many in {len(shares) - 1} more layers" if len(shares) > 1 else ""),
            ("layer", worst),
        )


@rule("M26", "W", "dead units", level="batch")
def _dead(facts: AppFacts) -> Iterator[Finding]:
    """A relu unit that is 0 for all samples has no gradient, and stays 0.

    Fix: Scale inputs, use he_normal, a smaller learning rate, or leaky_relu.
    Source: Zhang et al., AutoTrainer, ICSE 2021, doi:10.1109/ICSE43902.2021.00043; WebNNM, 2026
    """
    if any(layer.kind == "BatchNormalization" for layer in facts.layers):
        return  # before training, the moving statistics of this layer fit no batch
    yield from _units(facts, "dead", DEAD, "is 0 for all samples of a batch")


@rule("M27", "W", "saturated units", level="batch")
def _saturated(facts: AppFacts) -> Iterator[Finding]:
    """Near its limits a sigmoid or a tanh is flat, so it blocks gradients.

    Fix: Scale inputs and initial weights, normalize before the activation, or use relu.
    Source: Zhang et al., AutoTrainer, ICSE 2021, doi:10.1109/ICSE43902.2021.00043; WebNNM, 2026
    """
    yield from _units(facts, "saturated", SATURATED, "is saturated")


@rule("M28", "W", "a high initial loss", level="batch")
def _first_loss(facts: AppFacts) -> Iterator[Finding]:
    """The model starts with confident wrong predictions, and its first steps only correct them.

    Fix: Scale inputs and initial weights, and check whether the loss fits the output.
    Source: Karpathy, A Recipe for Training Neural Networks, 2019; Zhang et al., UMLAUT, CHI 2021,
    doi:10.1145/3411764.3445538
    """
    loss = facts.observations.get("loss", math.nan)
    if len(facts.heads) != 1 or facts.heads[0].loss not in ("cce", "sce", "bce") or any(facts.arrays_of("w", "train")):
        return
    head = facts.heads[0]
    usual = math.log(2) if head.loss == "bce" else math.log(max(2, head.units))
    penalties = any(layer.penalty for layer in facts.layers)
    if math.isfinite(loss) and loss > OFF * usual and not penalties and facts.settings.get("class_weight") is None:
        yield Finding(f"the first loss is {loss:.3g}, and a uniform prediction has {usual:.3g}", ("loss", head.name))


@rule("M29", "W", "an input that changes nothing", level="batch")
def _ignored(facts: AppFacts) -> Iterator[Finding]:
    """The model loses the information of this input, for example by a multiplication with 0 or a slice.

    Fix: Check how the model uses this input.
    Source: Karpathy, A Recipe for Training Neural Networks, 2019
    """
    for name in facts.observations.get("ignored", ()):
        yield Finding(f"no output changes with {name}", ("data", name))


@rule("M30", "I", "randomness outside of training", level="batch")
def _random(facts: AppFacts) -> Iterator[Finding]:
    """The same sample gets a different prediction each time, so tests cannot be repeated.

    Fix: In your own layer, draw random numbers only if training is true.
    Source: Zhang et al., UMLAUT, CHI 2021, doi:10.1145/3411764.3445538
    """
    if facts.observations.get("random"):
        yield Finding("two predictions of the same samples differ, outside of training", ("method", "create_model"))
