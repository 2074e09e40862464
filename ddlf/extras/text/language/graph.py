"""Describes a model as a graph. Each node follows the nodes that it reads. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from ddlf.extras.text.language.values import Arg, Call, Number

Shape = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a node.

    Attributes:
        name: The name in the model text with a number, such as ``w1``.
        shape: The sizes. An unknown size is None; so is a wholly unknown shape.
        dtype: The type of its values.
    """

    name: str
    shape: Shape | None = None
    dtype: str = "float32"

    @property
    def count(self) -> int | None:
        """Return the number of values in this parameter; None if it is unknown."""
        count = 1
        for size in self.shape or ():
            if size is None:
                return None
            count *= size
        return None if self.shape is None else count


@dataclass(frozen=True, slots=True)
class Node:
    """A layer, or an input.

    Attributes:
        operator: The name of the operator or Keras layer; ``input`` for an input.
        inputs: The numbers of the nodes that it reads; the previous layer is first.
        operands: The names of parameters, and numbers, in their order.
        options: Its options by name.
        name: The name in the model text; for an input, the block's name; empty without one.
        written: The type in the text; empty if it is inferred.
        declared_shape: The shape in the text.
        lrm: The factor of its parameters' learning rate.
        call_arguments: The arguments of a Keras layer's call, if it has more than inputs. Numbers replace the tensors.
        share: The name of the layer whose weights it uses; empty for a layer with its own weights.
        shape: The shape of its output, without the batch axis.
        dtype: The type of its output.
        parameters: Its parameters.
        at: Its position in the text.
        call: The position of the call of the outermost macro around it.
    """

    operator: str
    inputs: tuple[int, ...] = ()
    operands: tuple[str | Number, ...] = ()
    options: tuple[Arg, ...] = ()
    name: str = ""
    written: str = ""
    declared_shape: Shape | None = None
    lrm: float = 1.0
    call_arguments: Call | None = None
    share: str = ""
    shape: Shape | None = None
    dtype: str = ""
    parameters: tuple[Parameter, ...] = ()
    at: int = field(default=0, compare=False)
    call: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """An output of a model.

    Attributes:
        name: The name in the block's statement ``name``, or the block's name.
        node: The number of the node that computes it.
        loss: The loss in the model text; empty if the text has none.
        factors: The values of ``delta``, ``gamma`` and ``alpha`` in the text.
        written: The type in the text.
        declared_shape: The shape in the text.
        block: The block's name.
        at: Its position in the text.
    """

    name: str
    node: int
    loss: str = ""
    factors: tuple[tuple[str, float], ...] = ()
    written: str = ""
    declared_shape: Shape | None = None
    block: str = ""
    at: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Graph:
    """A model as a graph: all its nodes (layers and inputs) and outputs."""

    nodes: tuple[Node, ...]
    heads: tuple[ModelOutput, ...]

    @property
    def parameters(self) -> int | None:
        """Return the number of trainable values in the model; None if only Keras knows that number of some layer."""
        counts = [parameter.count for node in self.nodes for parameter in node.parameters]
        known_counts = [count for count in counts if count is not None]
        return sum(known_counts) if len(known_counts) == len(counts) else None


def inputs_of(graph: Graph) -> list[Node]:
    """Return the inputs in the order of the model text."""
    return sorted((node for node in graph.nodes if node.operator == "input"), key=lambda node: node.at)


def pruned(graph: Graph, inputs: Collection[str] = ()) -> Graph:
    """Return a graph with only the nodes on a path from an input to an output.

    Args:
        graph: All nodes.
        inputs: The names of inputs to keep in any case.
    """
    kept_numbers = {at for at, node in enumerate(graph.nodes) if node.operator == "input" and node.name in inputs}
    pending = [head.node for head in graph.heads]
    while pending:
        number = pending.pop()
        if number not in kept_numbers:
            kept_numbers.add(number)
            pending += graph.nodes[number].inputs
    numbers = {old: new for new, old in enumerate(sorted(kept_numbers))}
    nodes = tuple(
        replace(graph.nodes[old], inputs=tuple(numbers[source] for source in graph.nodes[old].inputs))
        for old in numbers
    )
    return Graph(nodes, tuple(replace(head, node=numbers[head.node]) for head in graph.heads))


def distances(graph: Graph) -> list[tuple[int, int]]:
    """Return for each node the lengths of the longest paths from an input and to an output.

    Lengths count edges. A parameter's path to an output is one edge longer.
    """
    from_input = [0] * len(graph.nodes)
    for number, node in enumerate(graph.nodes):
        from_input[number] = max((from_input[source] + 1 for source in node.inputs), default=0)
    to_output = [0] * len(graph.nodes)
    for number in reversed(range(len(graph.nodes))):
        for source in graph.nodes[number].inputs:
            to_output[source] = max(to_output[source], to_output[number] + 1)
    return list(zip(from_input, to_output, strict=True))


def consumers(nodes: Iterable[Node]) -> dict[int, list[int]]:
    """Return for each node the nodes that read it."""
    readers: dict[int, list[int]] = {}
    for number, node in enumerate(nodes):
        for source in node.inputs:
            readers.setdefault(source, []).append(number)
    return readers
