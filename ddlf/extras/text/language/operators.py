"""The operators of the notation: what each takes, and how its shape follows. Defaults are WebNN's, not Keras's. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ddlf.extras.text.language import keras_layers

DTYPES = ("float32", "float16", "bfloat16", "int32", "uint32", "int8", "uint8", "int4", "uint4")
"""The highest first."""
LOSSES = ("MSE", "MAE", "HUL", "BCE", "CCE", "CCEL", "SCE", "HIL", "KLD", "FOL")
LOSSES_OF_KERAS = {
    "mean_squared_error": "MSE",
    "meansquarederror": "MSE",
    "mean_absolute_error": "MAE",
    "meanabsoluteerror": "MAE",
    "huber": "HUL",
    "hinge": "HIL",
    "kl_divergence": "KLD",
    "kldivergence": "KLD",
    "binary_crossentropy": "BCE",
    "binarycrossentropy": "BCE",
    "categorical_crossentropy": "CCE",
    "categoricalcrossentropy": "CCE",
    "sparse_categorical_crossentropy": "SCE",
    "sparsecategoricalcrossentropy": "SCE",
    "binary_focal_crossentropy": "FOL",
    "categorical_focal_crossentropy": "FOL",
}
"""What they are there, with letters of one case."""


def loss_meant(name: str) -> str:
    """The loss that a name of Keras's stands for, or the name."""
    return LOSSES_OF_KERAS.get(name.casefold(), name)


EVERYWHERE = ("name", "shape", "shapes", "lrm")
"""Options that every layer takes."""
PROPERTIES = ("input", "output", "from", "layers", "name", "loss", "delta", "gamma", "alpha", "model")
FOREIGN = ("bool", "float64", "int16", "int64", "string", "uint16", "uint64")
"""Types of inputs that only layers of Keras can read."""


def is_keras(name: str) -> bool:
    """Whether a name is that of a layer of Keras: it begins with a capital, behind its package (``own>Layer``)."""
    return name.rpartition(">")[2][:1].isupper()


@dataclass(frozen=True, slots=True)
class Operator:
    """What there is to know of an operator before a model is there.

    Attributes:
        name: As it is written.
        kind: Which rule its shape follows, in ``shapes``.
        least: Operands that it must have; one of them may be a layer (``to=``).
        most: Operands that it may have.
        options: Names of its own options.
        floats: Whether it computes with floats only: whole numbers become float32 before it.
        wide: Whether it runs in float32 where 16-bit floats come in.
        result: The type of what comes out, if that is not the type of what goes in.
    """

    name: str
    kind: str
    least: int = 0
    most: int = 0
    options: tuple[str, ...] = ()
    floats: bool = False
    wide: bool = False
    result: str = ""


_ROWS = (
    # kind, operands, options, names
    ("same", 0, 0, "", "abs floor identity neg sign relu"),
    ("same", 0, 0, "", "ceil cos erf exp log reciprocal sin sqrt tan tanh sigmoid softsign softplus hardSwish gelu"),
    ("same", 0, 0, "alpha", "elu leakyRelu"),
    ("same", 0, 0, "alpha beta", "hardSigmoid linear"),
    ("same", 0, 0, "minValue maxValue", "clamp"),
    ("same", 0, 0, "axis", "softmax logSoftmax"),
    ("same", 0, 0, "p", "dropout"),
    ("same", 0, 0, "axes", "reverse"),
    ("same", 0, 0, "upper diagonal", "triangular"),
    ("same", 0, 0, "axis exclusive reversed", "cumulativeSum"),
    ("same", 0, 0, "", "cast logicalNot"),
    ("same", 1, 1, "", "prelu"),
    ("same", 2, 2, "", "quantizeLinear dequantizeLinear"),
    ("norm", 2, 4, "axis epsilon", "batchNormalization"),
    ("norm", 0, 2, "epsilon layout", "instanceNormalization"),
    ("norm", 0, 2, "axes epsilon", "layerNormalization"),
    ("binary", 1, 1, "to", "add sub mul div max min pow"),
    ("binary", 1, 1, "to", "equal notEqual greater greaterOrEqual lesser lesserOrEqual"),
    ("binary", 1, 1, "to", "logicalAnd logicalOr logicalXor"),
    ("residual", 0, 0, "to", "residual"),
    ("matmul", 1, 1, "to", "matmul"),
    ("matmul", 1, 2, "alpha beta bTranspose", "gemm"),
    ("conv", 1, 2, "kernel padding strides dilations groups inputLayout filterLayout", "conv2d"),
    (
        "convTranspose",
        1,
        2,
        "kernel padding strides dilations groups inputLayout filterLayout outputPadding",
        "convTranspose2d",
    ),
    ("pool", 0, 0, "windowDimensions padding strides dilations layout", "averagePool2d l2Pool2d maxPool2d"),
    (
        "reduce",
        0,
        0,
        "axes keepDimensions",
        "reduceL1 reduceL2 reduceLogSum reduceLogSumExp reduceMax reduceMean reduceMin",
    ),
    ("reduce", 0, 0, "axes keepDimensions", "reduceProduct reduceSum reduceSumSquare reduceVariance"),
    ("arg", 0, 0, "axis keepDimensions", "argMin argMax"),
    ("concat", 0, 0, "to axis", "concat"),
    ("reshape", 0, 0, "", "reshape"),
    ("free", 0, 0, "", "expand"),
    ("transpose", 0, 0, "permutation", "transpose"),
    ("slice", 0, 0, "starts sizes strides", "slice"),
    ("pad", 0, 0, "beginningPadding endingPadding mode value", "pad"),
    ("tile", 0, 0, "repetitions", "tile"),
    ("resample", 0, 0, "mode scales sizes axes", "resample2d"),
    ("split", 0, 0, "splits axis index", "split"),
    ("free", 1, 1, "", "part"),
    ("gather", 1, 1, "to axis", "gather"),
    ("gather", 0, 0, "to axis", "gatherElements"),
    ("gather", 0, 0, "to", "gatherND"),
    ("scatter", 0, 0, "to axis", "scatterElements"),
    ("scatter", 0, 0, "to", "scatterND"),
    ("where", 2, 2, "to", "where"),
    ("recurrent", 2, 4, "returnSequence direction resetAfter layout", "gru lstm"),
    ("cell", 2, 4, "resetAfter layout", "gruCell lstmCell"),
    ("attend", 3, 3, "heads mask to", "attend"),
)
_FLOATS = frozenset((
    "cos", "erf", "exp", "log", "reciprocal", "sin", "sqrt", "tan", "tanh", "sigmoid", "softsign", "softplus", "hardSwish", "gelu",
    "elu", "leakyRelu", "hardSigmoid", "softmax", "logSoftmax", "dropout", "batchNormalization", "instanceNormalization",
    "layerNormalization", "averagePool2d", "l2Pool2d", "reduceLogSum", "reduceLogSumExp", "reduceMean", "reduceVariance", "gru", "lstm",
    "gruCell", "lstmCell", "attend", "prelu",
))  # fmt: skip
_WIDE = frozenset(["softmax", "logSoftmax", "batchNormalization", "instanceNormalization", "layerNormalization"])
_RESULT = {
    "argMin": "int32",
    "argMax": "int32",
    "quantizeLinear": "int8",
    "dequantizeLinear": "float32",
} | dict.fromkeys(
    [
        "equal",
        "notEqual",
        "greater",
        "greaterOrEqual",
        "lesser",
        "lesserOrEqual",
        "logicalNot",
        "logicalAnd",
        "logicalOr",
        "logicalXor",
    ],
    "uint8",
)
OPERATORS = {
    name: Operator(
        name, kind, least, most, tuple(options.split()), name in _FLOATS, name in _WIDE, _RESULT.get(name, "")
    )
    for kind, least, most, options, names in _ROWS
    for name in names.split()
}
OPERATORS["batchNorm"] = OPERATORS["batchNormalization"]

WHOLE, LIST, SIZES, NUMBER, FLAG = (
    "a whole number",
    "a list of whole numbers",
    "a list of sizes",
    "a number",
    "true or false",
)
VALUES = (
    dict.fromkeys(("axis", "index", "diagonal"), WHOLE)
    | dict.fromkeys(("axes", "padding", "permutation", "starts", "beginningPadding", "endingPadding"), LIST)
    | dict.fromkeys(("shape", "kernel", "strides", "dilations", "windowDimensions", "sizes", "repetitions"), SIZES)
    | dict.fromkeys(("outputPadding",), LIST)
    | dict.fromkeys(("alpha", "beta", "minValue", "maxValue", "epsilon", "p", "lrm", "value"), NUMBER)
    | dict.fromkeys(
        ("keepDimensions", "exclusive", "reversed", "upper", "bTranspose", "returnSequence", "resetAfter"), FLAG
    )
    | dict.fromkeys(("heads", "groups", *keras_layers.COUNTS), "a size")
)
"""What an option's value is; other ones take words."""
WORDS = {
    "mask": ("causal", "none"),
    "inputLayout": ("nchw", "nhwc"),
    "filterLayout": ("oihw", "hwio", "ohwi", "ihwo"),
    "direction": ("forward", "backward"),
}
