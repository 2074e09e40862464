"""With which values training begins, where a text does not say: He before what cuts off below 0 (arXiv:1502.01852), Glorot elsewhere. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ddlf.extras.text.language.graph import Graph, consumers
from ddlf.extras.text.language.operators import OPERATORS

RELU_LIKE = ("relu", "leakyRelu", "prelu", "elu", "gelu", "hardSwish")
TRANSPARENT = (
    "add",
    "identity",
    "cast",
    "batchNormalization",
    "batchNorm",
    "instanceNormalization",
    "layerNormalization",
    "dropout",
    "reshape",
)
"""What may stand between weights and the activation that they are drawn for."""
BEFORE_RELU = 0.01
"""Of a bias before relu, so that no unit begins dead."""


def initial_values(graph: Graph, number: int, written: str = "") -> Sequence[str | float]:
    """The initial values of each parameter of a node: a name of Keras's initializers, or a number.

    Args:
        graph: The whole.
        number: Of the node.
        written: Name of the initializer of weights, where it does not follow from the activation; biases are 0 then.
    """
    node = graph.nodes[number]
    operator = OPERATORS[node.operator]
    if not node.parameters:
        return []
    follows = _activation(graph, number)
    weights = "he_uniform" if follows in RELU_LIKE else "glorot_uniform"
    bias = BEFORE_RELU if follows == "relu" else 0.0
    if operator.kind == "norm":
        usual = [0.0, 1.0, 1.0, 0.0] if operator.name == "batchNormalization" else [1.0, 0.0]
        return usual[: len(node.parameters)]
    if operator.name == "prelu":
        return [0.25]
    if operator.name in ("mul", "div", "pow", "quantizeLinear", "dequantizeLinear"):
        return [1.0, 0.0][: len(node.parameters)]
    if written:
        weights, bias = written, 0.0
    return [weights if len(each.shape or ()) > 1 else bias for each in node.parameters]


def _activation(graph: Graph, number: int) -> str:
    """The first layer after a node that is more than a sum, a normalization or another form."""
    readers = consumers(graph.nodes)
    while len(readers.get(number, ())) == 1:
        number = readers[number][0]
        if graph.nodes[number].operator not in TRANSPARENT:
            return graph.nodes[number].operator
    return ""
