"""Lists the operators of the notation, with operands, options and shape rules.

Pure. Defaults are WebNN's, not Keras's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ddlf.extras.text.language import keras_layers

DTYPES = ("float32", "float16", "bfloat16", "int32", "uint32", "int8", "uint8", "int4", "uint4")
"""The types, the highest first."""
INTEGERS = DTYPES[3:]
LOSSES = ("MSE", "MAE", "HUL", "BCE", "CCE", "CCEL", "SCE", "HIL", "KLD", "FOL")
LOSSES_OF_KERAS = {
    "meansquarederror": "MSE",
    "meanabsoluteerror": "MAE",
    "huber": "HUL",
    "hinge": "HIL",
    "kldivergence": "KLD",
    "binarycrossentropy": "BCE",
    "categoricalcrossentropy": "CCE",
    "sparsecategoricalcrossentropy": "SCE",
    "binaryfocalcrossentropy": "FOL",
    "categoricalfocalcrossentropy": "FOL",
}
"""The losses by Keras's names in lower case, without ``_``."""


def loss_meant(name: str) -> str:
    """Return the name in the notation for a loss that has a Keras name; any other name stays the same."""
    return LOSSES_OF_KERAS.get(name.casefold().replace("_", ""), name)


EVERYWHERE = ("name", "shape", "shapes", "lrm")
"""Options that every layer takes."""
PROPERTIES = ("input", "output", "from", "layers", "name", "loss", "delta", "gamma", "alpha", "model")
FOREIGN = ("bool", "float64", "int16", "int64", "string", "uint16", "uint64")
"""Types of inputs that only layers of Keras can read."""


def is_keras(name: str) -> bool:
    """Return whether a name is that of a Keras layer.

    It begins with a capital, after an optional package (``own>Layer``).
    """
    return name.rpartition(">")[2][:1].isupper()


@dataclass(frozen=True, slots=True)
class OperatorSpec:
    """An operator of the notation.

    Attributes:
        name: The operator's name in a model text.
        kind: The name of its shape rule in ``inference``.
        least: The smallest number of operands; one of them may be a layer (``to=``).
        most: The largest number of operands.
        reads: The smallest and the largest number of layers in ``to=``; None means any number.
        options: The names of its own options.
        floats: Whether it computes with floats only, so that integers become float32 before it.
        wide: Whether it computes in float32 if its inputs are 16-bit floats.
        result: The type of its output, if it differs from the type of its inputs.
    """

    name: str
    kind: str
    least: int = 0
    most: int = 0
    reads: tuple[int, int | None] = (0, 1)
    options: tuple[str, ...] = ()
    floats: bool = False
    wide: bool = False
    result: str = ""


_CONV = "kernel padding strides dilations groups inputLayout filterLayout"
_TABLE = (
    # kind, operands, layers in to=, properties and type of the result, options, names
    ("same", "0", "0-1", "", "", "abs cast ceil floor identity neg relu sign"),
    ("same", "0", "0-1", "floats", "", "cos erf exp gelu hardSwish log reciprocal sigmoid sin softplus softsign sqrt tan tanh"),
    ("same", "0", "0-1", "floats", "alpha", "elu leakyRelu"),
    ("same", "0", "0-1", "floats", "alpha beta", "hardSigmoid"),
    ("same", "0", "0-1", "", "alpha beta", "linear"),
    ("same", "0", "0-1", "", "minValue maxValue", "clamp"),
    ("same", "0", "0-1", "floats wide", "axis", "softmax logSoftmax"),
    ("same", "0", "0-1", "floats", "p", "dropout"),
    ("same", "0", "0-1", "", "axes", "reverse"),
    ("same", "0", "0-1", "", "upper diagonal", "triangular"),
    ("same", "0", "0-1", "", "axis exclusive reversed", "cumulativeSum"),
    ("same", "0", "0-1", "uint8", "", "logicalNot"),
    ("same", "1", "0-1", "floats", "", "prelu"),
    ("same", "2", "0-1", "int8", "", "quantizeLinear"),
    ("same", "2", "0-1", "float32", "", "dequantizeLinear"),
    ("norm", "2-4", "0-1", "floats wide", "axis epsilon", "batchNormalization"),
    ("norm", "0-2", "0-1", "floats wide", "epsilon layout", "instanceNormalization"),
    ("norm", "0-2", "0-1", "floats wide", "axes epsilon", "layerNormalization"),
    ("binary", "1", "0-1", "", "to", "add sub mul div max min pow"),
    ("binary", "1", "0-1", "uint8", "to", "equal notEqual greater greaterOrEqual lesser lesserOrEqual"),
    ("binary", "1", "0-1", "uint8", "to", "logicalAnd logicalOr logicalXor"),
    ("where", "2", "0-1", "", "to", "where"),
    ("residual", "0", "0-any", "", "to", "residual"),
    ("matmul", "1", "0-1", "", "to", "matmul"),
    ("matmul", "1-2", "0-1", "", "alpha beta bTranspose", "gemm"),
    ("conv", "1-2", "0-1", "", _CONV, "conv2d"),
    ("convTranspose", "1-2", "0-1", "", f"{_CONV} outputPadding", "convTranspose2d"),
    ("pool", "0", "0-1", "", "windowDimensions padding strides dilations layout", "maxPool2d"),
    ("pool", "0", "0-1", "floats", "windowDimensions padding strides dilations layout", "averagePool2d l2Pool2d"),
    ("reduce", "0", "0-1", "", "axes keepDimensions", "reduceL1 reduceL2 reduceMax reduceMin reduceProduct reduceSum reduceSumSquare"),
    ("reduce", "0", "0-1", "floats", "axes keepDimensions", "reduceLogSum reduceLogSumExp reduceMean reduceVariance"),
    ("arg", "0", "0-1", "int32", "axis keepDimensions", "argMin argMax"),
    ("concat", "0", "1-any", "", "to axis", "concat"),
    ("reshape", "0", "0-1", "", "", "reshape"),
    ("free", "0", "0-1", "", "", "expand"),
    ("free", "1", "0-1", "", "", "part"),
    ("transpose", "0", "0-1", "", "permutation", "transpose"),
    ("slice", "0", "0-1", "", "starts sizes strides", "slice"),
    ("pad", "0", "0-1", "", "beginningPadding endingPadding mode value", "pad"),
    ("tile", "0", "0-1", "", "repetitions", "tile"),
    ("resample", "0", "0-1", "", "mode scales sizes axes", "resample2d"),
    ("split", "0", "0-1", "", "splits axis index", "split"),
    ("gather", "1", "0-1", "", "to axis", "gather"),
    ("gather", "0", "1", "", "to axis", "gatherElements"),
    ("gather", "0", "1", "", "to", "gatherND"),
    ("scatter", "0", "2", "", "to axis", "scatterElements"),
    ("scatter", "0", "2", "", "to", "scatterND"),
    ("recurrent", "2-4", "0-1", "floats", "returnSequence direction resetAfter layout", "gru lstm"),
    ("cell", "2-4", "0-1", "floats", "resetAfter layout", "gruCell lstmCell"),
    ("attend", "3", "0-1", "floats", "heads mask to", "attend"),
)  # fmt: skip


def _operators() -> dict[str, OperatorSpec]:
    specs = {}
    for kind, operands, layers, notes, options, names in _TABLE:
        least, _, most = operands.partition("-")
        first, _, last = layers.partition("-")
        spec = OperatorSpec(
            name="",
            kind=kind,
            least=int(least),
            most=int(most or least),
            reads=(int(first), None if last == "any" else int(last or first)),
            options=tuple(options.split()),
            floats="floats" in notes,
            wide="wide" in notes,
            result=notes if notes in DTYPES else "",
        )
        specs.update({name: replace(spec, name=name) for name in names.split()})
    return specs


OPERATORS = _operators()
OPERATORS["batchNorm"] = OPERATORS["batchNormalization"]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_size(value: Any) -> bool:
    return _is_whole(value) and value >= 1


def _is_list(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(fits, value))


SIZES = ("shape", "kernel", "strides", "dilations", "windowDimensions", "sizes", "repetitions")
"""Options that are lists of sizes."""
VALUES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    name: (requirement, fits)
    for names, requirement, fits in (
        ("axis index diagonal", "a whole number", _is_whole),
        (f"heads groups batch {' '.join(keras_layers.COUNTS)}", "a whole number of 1 or more", _is_size),
        ("alpha beta minValue maxValue epsilon value", "a number", _is_number),
        ("lrm", "a number above 0", lambda value: _is_number(value) and value > 0),
        ("p", "a number from 0 to below 1", lambda value: _is_number(value) and 0 <= value < 1),
        ("keepDimensions exclusive reversed upper bTranspose", "true or false", lambda value: isinstance(value, bool)),
        ("returnSequence resetAfter sparse ragged optional", "true or false", lambda value: isinstance(value, bool)),
        (
            "axes padding permutation starts beginningPadding endingPadding outputPadding",
            "a list of whole numbers, such as [0, 1]",
            lambda value: _is_list(value, _is_whole),
        ),
        (
            "splits",
            "a number of parts, or a list of their sizes, such as [2, 3]",
            lambda value: _is_size(value) or (_is_list(value, _is_size) and bool(value)),
        ),
        (
            "scales",
            "a list of numbers above 0, such as [2, 2]",
            lambda value: _is_list(value, lambda factor: _is_number(factor) and 0 < factor < 2**31),
        ),
    )
    for name in names.split()
}
"""For each option, the description of valid values and a test. All other options are words."""
WORDS = {
    "mask": ("causal", "none"),
    "inputLayout": ("nchw", "nhwc"),
    "filterLayout": ("oihw", "hwio", "ohwi", "ihwo"),
    "direction": ("forward", "backward"),
}
