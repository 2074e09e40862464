"""Operators of a model as text by the names that rules have for layers of Keras. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KINDS = {
    "matmul": "Dense",
    "gemm": "Dense",
    "conv2d": "Conv2D",
    "convTranspose2d": "Conv2DTranspose",
    "relu": "ReLU",
    "leakyRelu": "LeakyReLU",
    "prelu": "PReLU",
    "elu": "ELU",
    "gelu": "Gelu",
    "sigmoid": "Sigmoid",
    "tanh": "Tanh",
    "softmax": "Softmax",
    "dropout": "Dropout",
    "batchNormalization": "BatchNormalization",
    "layerNormalization": "LayerNormalization",
    "instanceNormalization": "GroupNormalization",
    "residual": "Add",
    "concat": "Concatenate",
    "attend": "MultiHeadAttention",
    "averagePool2d": "AveragePooling2D",
    "maxPool2d": "MaxPooling2D",
    "reshape": "Reshape",
    "identity": "Identity",
    "cast": "Cast",
    "transpose": "Transpose",
}
OF_TWO = {"add": "Add", "sub": "Subtract", "mul": "Multiply", "max": "Maximum"}
"""With another layer."""
LEARNED = ("Dense", "Conv2D", "Conv2DTranspose")


def as_layer(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Kind and arguments of the layer of Keras that an operator is like; an operator without one has its own name.

    Args:
        config: Of the layer that holds it.
    """
    name, options, learned = config["operator"], config["options"], config["parameters"]
    inputs = len(config["types"]) - 1
    kind = KINDS.get(name, name)
    if name == "linear":
        kind = "Rescaling" if "alpha" in options else "Identity"
    if name in OF_TWO:
        kind = OF_TWO[name] if inputs > 1 else "Bias" if name in ("add", "sub") and learned else name
    if kind in LEARNED and not learned:
        return name, {}
    made: dict[str, Any] = {"name": config.get("name")}
    if kind in LEARNED:
        made["use_bias"] = len(learned) > 1
    if kind.startswith("Conv"):
        layout = options.get("filterLayout", "oihw")
        shape = learned[0][1]
        made["filters"] = shape[layout.index("o")]
        made["kernel_size"] = [shape[layout.index(letter)] for letter in "hw"]
        made["strides"], made["dilation_rate"] = options.get("strides", [1, 1]), options.get("dilations", [1, 1])
        made["data_format"] = "channels_first" if options.get("inputLayout", "nchw") == "nchw" else "channels_last"
    if kind.endswith("Pooling2D") and "windowDimensions" in options:
        made["pool_size"], made["strides"] = options["windowDimensions"], options.get("strides", [1, 1])
    if kind == "Dropout":
        made["rate"] = options.get("p", 0.5)
    return kind, made
