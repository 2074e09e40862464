"""Rules of class M about a layer by itself: one that cannot learn, or not well. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from ddlf.extras.advice.facts import WEIGHTED, Facts, Layer
from ddlf.extras.advice.rule import Change, Found, Rule

DROPOUT = frozenset(
    {"Dropout", "SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D", "AlphaDropout", "GaussianDropout"}
)
JOINING = frozenset({"Add", "Concatenate", "Average", "Multiply", "Subtract", "Maximum"})
DROPPED = 0.8
PENALTY, PENALIZED = 0.1, 0.5
"""A factor, and a share of the first loss, from which on weights matter more than to be right."""
FEW_WORDS = 10
READS_QUANTITIES = frozenset({"LSTM", "GRU", "SimpleRNN", "Bidirectional", "Conv1D", "Dense"})
SPREADS = (0.02, 5.0)
"""Standard deviation of first weights times the root of what is summed: 1 to 1.4 keeps the scale."""
PADDED = 0.3
PIERCED = 0.05
LEFT, TURNED = 0.2, 0.3
"""Share of the first moving mean that may be left at the end, and the momentum from which on it was meant the other way round."""
ONE_TOKEN = 0.4
UMLAUT = "Zhang et al., UMLAUT, CHI 2021, doi:10.1145/3411764.3445538"
NEURALINT = "Nikanjam et al., NeuraLint, arXiv:2105.08095"


def hidden(facts: Facts) -> list[Layer]:
    """Layers with kernels behind which there are others."""
    last = {head.layer for head in facts.heads}
    return [
        one
        for one in facts.layers
        if one.kind in WEIGHTED and one.reads and one.name not in last and facts.readers(one.name)
    ]


def _equal_weights(facts: Facts) -> Iterator[Found]:
    # What begins with zeros to leave another way as it is: a branch of a sum, the variance of a code.
    joined = any(one.kind in JOINING or len(one.reads) > 1 for one in facts.layers)
    for layer in hidden(facts):
        size = max((n or 0 for n in layer.shape[-1:]), default=0)
        if layer.equal is None or size < 2 or not layer.trained or (joined and layer.equal == 0):
            continue
        yield Found(
            f"all weights of {layer.name!r} are {layer.equal:g}",
            ("layer", layer.name),
            changes=(Change("argument", "glorot_uniform", layer.name, "kernel_initializer"),),
        )


def _nothing_trained(facts: Facts) -> Iterator[Found]:
    if (
        facts.layers
        and facts.heads
        and not any(one.trained for one in facts.layers)
        and any(one.parameters for one in facts.layers)
    ):
        yield Found("no weight of the model is trained: all layers are frozen", ("layer", facts.layers[-1].name))


def _frozen_head(facts: Facts) -> Iterator[Found]:
    if not any(one.trained for one in facts.layers):
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
            behind = [one for one in facts.layers if one.trained]
            yield Found(
                f"the last layer, {layer.name!r}, is frozen, and {len(behind)} before it are trained",
                ("layer", layer.name),
                changes=(Change("argument", True, layer.name, "trainable"),),
            )


def _unknown_tokens(facts: Facts) -> Iterator[Found]:
    for layer in facts.layers:
        if layer.kind != "Embedding" or (layer.reads and facts.layer(layer.reads[0]) is not None):
            continue
        size = layer.config.get("input_dim")
        named = [
            one
            for one in facts.of("x")
            if not facts.inputs or len(facts.inputs) == 1 or f"'{layer.reads[0] if layer.reads else ''}'" in one.name
        ]
        for array in named:
            if isinstance(size, int) and array.whole and (array.high >= size or array.low < 0):
                yield Found(
                    f"{array.name} has numbers from {array.low:g} to {array.high:g}, and {layer.name!r} has rows 0 to {size - 1}",
                    ("layer", layer.name),
                    changes=(Change("argument", int(array.high) + 1, layer.name, "input_dim"),)
                    if array.low >= 0
                    else (),
                )
                break


def _unmasked(facts: Facts) -> Iterator[Found]:
    for layer in facts.layers:
        if layer.kind == "Embedding" and not layer.config.get("mask_zero"):
            readers = facts.readers(layer.name)
            array = next((one for one in facts.of("x", "train") if one.sample == layer.before), None)
            reads = any(one.kind in ("LSTM", "GRU", "SimpleRNN", "Bidirectional") for one in readers)
            if array is not None and array.padded > PADDED and reads:
                yield Found(
                    f"{array.padded:.0%} of the rows of {array.name} end with zeros, which {layer.name!r} takes for a token as others",
                    ("layer", layer.name),
                    changes=(Change("argument", True, layer.name, "mask_zero"),),
                )


def _masked_words(facts: Facts) -> Iterator[Found]:
    for layer in facts.layers:
        if layer.kind == "Embedding" and layer.config.get("mask_zero"):
            array = next((one for one in facts.of("x", "train") if one.sample == layer.before), None)
            if array is not None and array.pierced > PIERCED:
                yield Found(
                    f"{array.pierced:.0%} of the rows of {array.name} have zeros between other tokens, and {layer.name!r} takes 0 for padding",
                    ("layer", layer.name),
                )


def _frozen_as_drawn(facts: Facts) -> Iterator[Found]:
    found = [one for one in facts.layers if one.untouched and one.kind != "Normalization"]
    if found and any(one.trained for one in facts.layers):
        yield Found(
            f"{found[0].name!r}"
            + (f" and {len(found) - 1} more are" if len(found) > 1 else " is")
            + " frozen, with weights as they were drawn: no training was before",
            ("layer", found[0].name),
        )


def _slow_norm(facts: Facts) -> Iterator[Found]:
    steps = facts.steps_of(facts.slots)
    for layer in facts.layers:
        momentum = layer.config.get("momentum")
        if layer.kind != "BatchNormalization" or not layer.trained or not isinstance(momentum, int | float):
            continue
        left = momentum**steps
        if momentum <= TURNED:
            what = "of each batch most counts, so that what is used outside of training is that of the last one"
        elif left > LEFT and facts.samples and not facts.from_files:
            what = f"after the {steps:,} steps of this run {left:.0%} of its mean and variance is what they began with"
        else:
            continue
        yield Found(
            f"{layer.name!r} has a momentum of {momentum:g}: {what}",
            ("layer", layer.name),
            changes=(Change("argument", 0.9, layer.name, "momentum"),),
        )
        return


def _unknown_words(facts: Facts) -> Iterator[Found]:
    embedded = {one.before for one in facts.layers if one.kind == "Embedding"}
    for array in facts.of("x", "train"):
        if array.commonest is not None and array.sample in embedded and array.high > 2:
            token, share = array.commonest
            if share > ONE_TOKEN:
                yield Found(
                    f"{share:.0%} of {array.name}, but for zeros, are the token {token}",
                    ("data", array.name),
                )


def _much_dropped(facts: Facts) -> Iterator[Found]:
    for layer in facts.layers:
        rate = layer.config.get("rate")
        if layer.kind in DROPOUT and isinstance(rate, int | float) and rate >= DROPPED:
            yield Found(
                f"{layer.name!r} sets {rate:.0%} of its inputs to 0",
                ("layer", layer.name),
                changes=(Change("argument", 0.5, layer.name, "rate"),),
            )


def _punished(facts: Facts) -> Iterator[Found]:
    for layer in facts.layers:
        if layer.penalty >= PENALTY:
            yield Found(
                f"the penalty of {layer.name!r} has the factor {layer.penalty:g}; 0.01 to 0.00001 is usual",
                ("layer", layer.name),
            )
    whole, penalties = facts.seen.get("loss", 0.0), facts.seen.get("penalties", 0.0)
    if not any(layer.penalty >= PENALTY for layer in facts.layers) and whole > 0 and penalties > PENALIZED * whole:
        yield Found(
            f"of the first loss of {whole:.4g} penalties of weights are {penalties:.4g}", ("method", "create_model")
        )


def _words_as_numbers(facts: Facts) -> Iterator[Found]:
    known = {one.name for one in facts.layers}
    for array in facts.of("x", "train"):
        if (
            len(array.sample) != 1
            or not array.dtype.startswith(("int", "uint"))
            or array.padded <= PADDED
            or array.high < FEW_WORDS
        ):
            continue
        readers = [
            one
            for one in facts.layers
            if not known & set(one.reads) and one.before in (array.sample, (*array.sample, 1))
        ]
        while len(readers) == 1 and readers[0].kind in ("Reshape", "ExpandDims", "Cast"):
            readers = facts.readers(readers[0].name)
        if readers and all(one.kind in READS_QUANTITIES for one in readers):
            yield Found(
                f"{array.name} has whole numbers up to {array.high:g} and ends with zeros, as tokens do, and {readers[0].name!r} takes "
                "them for quantities",
                ("layer", readers[0].name),
            )


def _not_adapted(facts: Facts) -> Iterator[Found]:
    known = {one.name for one in facts.layers}
    for layer in facts.layers:  # behind another one, which may scale, it waits for weights that were trained
        if layer.kind == "Normalization" and layer.untouched and not known & set(layer.reads):
            yield Found(
                f"{layer.name!r} has the mean 0 and the variance 1 of one that was never adapted", ("layer", layer.name)
            )


def _start(facts: Facts) -> Iterator[Found]:
    for layer in hidden(facts):
        if (
            layer.spread is None
            or not layer.fan_in
            or layer.initializer not in ("RandomNormal", "TruncatedNormal", "RandomUniform")
        ):
            continue
        scale = layer.spread * layer.fan_in**0.5
        if layer.trained and not SPREADS[0] <= scale <= SPREADS[1]:
            yield Found(
                f"the first weights of {layer.name!r} have a standard deviation of {layer.spread:g}, and {layer.fan_in} products are summed: "
                f"what comes out is {scale:.3g} times what goes in",
                ("layer", layer.name),
                changes=(Change("argument", "glorot_uniform", layer.name, "kernel_initializer"),),
            )


def _other_shape(facts: Facts) -> Iterator[Found]:
    arrays = list(facts.of("x", "train"))
    if len(arrays) != 1 or len(facts.inputs) != 1 or facts.own & {"step", "train"}:  # these give it what they like
        return
    (array,), (_, wanted, _) = arrays, facts.inputs[0]
    given = array.sample
    for shape in (given, (*given, 1), given[:-1] if given[-1:] == (1,) else given):
        if len(shape) == len(wanted) and all(w in (None, g) for g, w in zip(shape, wanted, strict=True)):
            return
    yield Found(f"samples of {array.name} have the shape {given}, and the model takes {wanted}", ("data", array.name))


LAYERS = (
    Rule(
        id="M01",
        severity="E",
        title="equal initial weights",
        look=_equal_weights,
        why="Units that start equal get equal gradients and stay equal. The layer is worth one unit.",
        fix="Omit kernel_initializer, or use a random one.",
        source=NEURALINT,
    ),
    Rule(
        id="M10",
        severity="E",
        title="no trainable weights",
        look=_nothing_trained,
        why="Without trainable weights, training changes nothing.",
        fix="Set trainable=True on the layers that should learn, before compile.",
        source="Humbatova et al., arXiv:1910.11015",
    ),
    Rule(
        id="M11",
        severity="W",
        title="a frozen last layer",
        look=_frozen_head,
        why="Its random weights never change, and all earlier layers must adapt to them.",
        fix="Freeze the pretrained layers, and train the new one.",
        source="Humbatova et al., arXiv:1910.11015",
    ),
    Rule(
        id="M12",
        severity="E",
        title="tokens outside the embedding",
        look=_unknown_tokens,
        why="There is no row for them: TensorFlow ends the run on a processor, and reads zeros without a word on a graphics card.",
        fix="Give Embedding input_dim = largest number + 1.",
        source="Humbatova et al., arXiv:1910.11015",
    ),
    Rule(
        id="M13",
        severity="I",
        title="padding is read as text",
        look=_unmasked,
        why="A recurrent layer also reads the padding, and forgets the text before it.",
        fix="Give Embedding mask_zero=True.",
        source="Dwarampudi and Reddy, Effects of padding on LSTMs and CNNs, arXiv:1903.07288",
    ),
    Rule(
        id="M35",
        severity="W",
        title="a token with the number of the padding",
        look=_masked_words,
        why="With mask_zero=True what is 0 is left out: a word with that number is never seen, wherever it stands.",
        fix="Count tokens from 1, and keep 0 for padding; input_dim is one more then.",
        source="Keras, Embedding: mask_zero",
    ),
    Rule(
        id="D25",
        severity="W",
        title="one token dominates",
        look=_unknown_words,
        why="Where most words are the token of unknown ones the text says hardly anything: the vocabulary is too small, or is that of another text.",
        fix="Count words in the training texts, and give the vocabulary room for nearly all of them.",
        source="Humbatova et al., arXiv:1910.11015: wrong preprocessing",
    ),
    Rule(
        id="M32",
        severity="I",
        title="frozen layers with random weights",
        look=_frozen_as_drawn,
        why="Their output is a random mixture that training cannot improve.",
        fix="Load weights before you freeze them, or set trainable=True.",
        source="Humbatova et al., arXiv:1910.11015; Keras, guide on transfer learning",
    ),
    Rule(
        id="M33",
        severity="I",
        title="moving statistics that do not follow, or too fast",
        look=_slow_norm,
        why="Outside of training the moving mean and variance are used: where they are not those of the data, a good model measures badly.",
        fix="Take a momentum of 0.9 to 0.99 in the sense of Keras, where that is the share of what was before (0.1 of PyTorch is 0.9).",
        source="Keras, BatchNormalization",
    ),
    Rule(
        id="M14",
        severity="W",
        title="nearly all is dropped",
        look=_much_dropped,
        why="What remains of the signal is noise, and the next layer learns almost nothing.",
        fix="Use rates of 0.1 to 0.5.",
        source=UMLAUT,
    ),
    Rule(
        id="M15",
        severity="W",
        title="a penalty larger than the loss",
        look=_punished,
        why="Small weights reduce the total more than right predictions do, so the model predicts the same for every sample.",
        fix="Use 0.01 to 0.00001.",
        source=UMLAUT,
    ),
    Rule(
        id="M36",
        severity="W",
        title="token numbers used as quantities",
        look=_words_as_numbers,
        why="The number of a word says nothing of what it means: 70 is not ten times 7, and nothing lies between two words.",
        fix="Start with an Embedding.",
        source="Humbatova et al., arXiv:1910.11015: wrong preprocessing",
    ),
    Rule(
        id="M38",
        severity="W",
        title="a Normalization that was never adapted",
        look=_not_adapted,
        why="It passes on what comes in, so that inputs are not scaled, though the layer is there.",
        fix="Call its adapt(x_train) in create_model, or give it mean and variance.",
        source="Keras, Normalization",
    ),
    Rule(
        id="M16",
        severity="W",
        title="initial weights on an unusual scale",
        look=_start,
        why="Signals grow or fade with each layer, and gradients with them.",
        fix="Leave kernel_initializer out, or take he_normal before relu.",
        source="He et al., arXiv:1502.01852; WebNNM, 2026",
    ),
    Rule(
        id="M17",
        severity="E",
        title="samples of a shape that the model does not take",
        look=_other_shape,
        why="Keras refuses them in the first step, which on a cluster is on a worker.",
        fix="Give keras.Input the shape of a sample.",
        source="Humbatova et al., arXiv:1910.11015",
    ),
)
