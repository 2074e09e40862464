"""A model as a graph. Each node stands behind the nodes that it reads. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from ddlf.extras.text.language.values import Arg, Call, Number

Shape = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a node.

    Attributes:
        name: Its name in the text with a number: ``w1``.
        shape: Sizes; None for those, or a whole, that is not known.
        dtype: Type.
    """

    name: str
    shape: Shape | None = None
    dtype: str = "float32"

    @property
    def count(self) -> int | None:
        """Values in it; None if that is not known."""
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
        operator: Name of the operator or of Keras's layer; ``input`` of an input.
        inputs: The nodes that it reads, the first of them the layer before it.
        operands: Names of parameters and numbers, in their order.
        options: Its options by name.
        name: Its name in the text, the block's of an input; empty if it has none.
        written: The type that the text gives it; empty if it is inferred.
        wanted: The shape that the text gives it.
        lrm: Factor of the learning rate of its parameters.
        given: The arguments of the call of a Keras layer, if it has more than inputs; its tensors are numbered.
        share: The name of the layer whose weights it uses; empty for a layer with its own weights.
        shape: Sizes of what comes out, without the batch.
        dtype: Type of what comes out.
        parameters: Its parameters.
        at: Where the text says it.
        call: Where the text calls the outermost macro that it comes from.
    """

    operator: str
    inputs: tuple[int, ...] = ()
    operands: tuple[str | Number, ...] = ()
    options: tuple[Arg, ...] = ()
    name: str = ""
    written: str = ""
    wanted: Shape | None = None
    lrm: float = 1.0
    given: Call | None = None
    share: str = ""
    shape: Shape | None = None
    dtype: str = ""
    parameters: tuple[Parameter, ...] = ()
    at: int = field(default=0, compare=False)
    call: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """An output.

    Attributes:
        name: The block's name, or what its ``name`` says.
        node: Number of the node.
        loss: As the text says it; empty if it does not.
        factors: The values of ``delta``, ``gamma`` and ``alpha`` in the text.
        written: The type that the text gives it.
        wanted: The shape that the text gives it.
        block: The block's name.
        at: Where the text says it.
    """

    name: str
    node: int
    loss: str = ""
    factors: tuple[tuple[str, float], ...] = ()
    written: str = ""
    wanted: Shape | None = None
    block: str = ""
    at: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Graph:
    """All nodes and outputs of a model."""

    nodes: tuple[Node, ...]
    heads: tuple[ModelOutput, ...]

    @property
    def parameters(self) -> int | None:
        """Values to learn; None if that of some layer is not known without Keras."""
        counts = [parameter.count for node in self.nodes for parameter in node.parameters]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None


def inputs_of(graph: Graph) -> list[Node]:
    """Return the inputs in the order of the text."""
    return sorted((node for node in graph.nodes if node.operator == "input"), key=lambda node: node.at)


def pruned(graph: Graph, inputs: Collection[str] = ()) -> Graph:
    """Return a graph without what lies on no path from an input to an output.

    Args:
        graph: All nodes.
        inputs: Names of inputs that stay anyway.
    """
    kept = {at for at, node in enumerate(graph.nodes) if node.operator == "input" and node.name in inputs}
    wanted = [head.node for head in graph.heads]
    while wanted:
        number = wanted.pop()
        if number not in kept:
            kept.add(number)
            wanted += graph.nodes[number].inputs
    numbers = {old: new for new, old in enumerate(sorted(kept))}
    nodes = tuple(
        replace(graph.nodes[old], inputs=tuple(numbers[source] for source in graph.nodes[old].inputs))
        for old in numbers
    )
    return Graph(nodes, tuple(replace(head, node=numbers[head.node]) for head in graph.heads))


def distances(graph: Graph) -> list[tuple[int, int]]:
    """For each node the edges of the longest path from an input to it, and from it to an output; a parameter's way to an output is one longer."""
    begun = [0] * len(graph.nodes)
    for number, node in enumerate(graph.nodes):
        begun[number] = max((begun[source] + 1 for source in node.inputs), default=0)
    left = [0] * len(graph.nodes)
    for number in reversed(range(len(graph.nodes))):
        for source in graph.nodes[number].inputs:
            left[source] = max(left[source], left[number] + 1)
    return list(zip(begun, left, strict=True))


def parameter_distances(graph: Graph) -> dict[str, tuple[int, int]]:
    """For each parameter the edges of the longest path from an input to where it is used, and from it to an output."""
    return {
        parameter.name: (begun, left + 1)
        for node, (begun, left) in zip(graph.nodes, distances(graph), strict=True)
        for parameter in node.parameters
    }


def consumers(nodes: Iterable[Node]) -> dict[int, list[int]]:
    """The nodes that read each node."""
    readers: dict[int, list[int]] = {}
    for number, node in enumerate(nodes):
        for source in node.inputs:
            readers.setdefault(source, []).append(number)
    return readers
