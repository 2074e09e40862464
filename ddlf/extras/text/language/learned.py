"""The parameters of each layer: shapes from what goes in and comes out, and a number for each use of a name. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ddlf.extras.text.language import keras_layers
from ddlf.extras.text.language.graph import Graph, Node, Parameter, Shape
from ddlf.extras.text.language.known import shown
from ddlf.extras.text.language.operators import DTYPES, OPERATORS, is_keras
from ddlf.extras.text.language.problems import Problems
from ddlf.extras.text.language.shapes import kernel_of, options_of

MAX_PARAMETERS = 10**10
_SPACE = {"oihw": "oihw", "hwio": "hwio", "ohwi": "ohwi", "ihwo": "ihwo"}
WHOLE_NUMBERS = DTYPES[3:]


def with_parameters(graph: Graph, problems: Problems, models: Mapping[str, Graph] | None = None) -> Graph:
    """Return a graph whose nodes have their parameters.

    Args:
        graph: Nodes with shapes and types.
        problems: Is told what cannot be inferred.
        models: Graphs of the models that are called as layers.
    """
    used: Counter[str] = Counter()
    nodes: list[Node] = []
    models, shared = models or {}, set[str]()
    unknown = any(node.operator not in OPERATORS and node.shape is None for node in graph.nodes)
    count = 0
    for node in graph.nodes:
        made: list[Parameter] = []
        if node.share and node.share in shared:
            nodes.append(node)
            continue
        shared.add(node.share or (node.operator if node.operator in models else node.name))
        if node.operator in models:
            inner = [each for other in models[node.operator].nodes for each in other.parameters]
            made = [replace(each, name=f"{node.operator}.{each.name}") for each in inner]
            count += sum(each.count or 0 for each in made)
        if node.operator == "attend" and sum(isinstance(each, str) for each in node.operands) < 3:
            problems.add(
                node.call, "attend learns all of its three parameters: write names, and no number", derived=True
            )
        for base, shape in _shapes(node, [graph.nodes[each] for each in node.inputs]):
            used[base] += 1
            dtype = node.dtype if node.written or node.dtype in WHOLE_NUMBERS else "float32"
            parameter = Parameter(f"{base}{used[base]}", shape, "float32" if node.operator not in OPERATORS else dtype)
            count += parameter.count or 0
            if parameter.count is None and not unknown and node.operator in OPERATORS:  # Keras knows of its own
                what = (
                    f"{parameter.name} has shape {shown(shape)}"
                    if shape
                    else f"the shape of {parameter.name} is not known"
                )
                how = "; write kernel= and shape=" if "conv" in node.operator else "; write shape="
                problems.add(node.call, f"{node.operator}: {what}{how}", derived=True)
            made.append(parameter)
        if count > MAX_PARAMETERS:
            problems.add(node.call, f"the model has more than {MAX_PARAMETERS:,} parameters")
            break
        nodes.append(replace(node, parameters=tuple(made)))
    return Graph(tuple(nodes), graph.heads)


def _shapes(node: Node, inputs: list[Node]) -> list[tuple[str, Shape | None]]:
    """Name and shape of each parameter of a node."""
    before = inputs[0].shape if inputs else None
    if node.operator == "input" or not (node.operator in OPERATORS or is_keras(node.operator)):
        return []
    if node.operator not in OPERATORS:
        found = keras_layers.parameters_of(node.operator, options_of(node), before)
        return [("kernel", None)] if found is None else list(found)
    names = [each for each in node.operands if isinstance(each, str)]
    if not names:
        return []
    kind, options, out = OPERATORS[node.operator].kind, options_of(node), node.shape
    into, last = (shape[-1] if shape else None for shape in (before, out))
    rank_known = before is not None
    if kind == "attend" and len(names) == 3:
        source = inputs[-1].shape
        far = source[-1] if source else None
        sides: list[tuple[str, Shape]] = [
            (names[0], (into, into)),
            (names[1], (far, into)),
            (names[2], (far, into)),
            ("out", (into, into)),
        ]
        return [pair for name, shape in sides for pair in ((name, shape), (f"{name}_bias", (into,)))]
    if kind == "matmul":
        turned = options.get("bTranspose")
        return list(zip(names, [(last, into) if turned else (into, last), (last,)], strict=False))
    if kind in ("conv", "convTranspose"):
        return list(zip(names, _filters(node, options, before, out), strict=False))
    if kind in ("recurrent", "cell"):
        gates = 4 if node.operator.startswith("lstm") else 3
        wide = None if last is None else gates * last
        return list(zip(names, [(wide, into), (wide, last), (wide,), (wide,)], strict=False))
    if node.operator == "layerNormalization" and before is not None:
        fitting = [axis for axis in options.get("axes", [-1]) if -len(before) <= axis < len(before)]
        return [
            (name, tuple(before[axis] for axis in sorted(axis % len(before) for axis in fitting))) for name in names
        ]
    if kind in ("binary", "where", "same", "norm") and rank_known and before is not None:
        first = kind == "norm" and options.get("layout", "nchw") == "nchw"
        axis = options.get("axis", 0 if first else -1)
        fits = bool(before) and -len(before) <= axis < len(before)
        return [(name, ((before[axis],) if fits else ())) for name in names]
    return [(name, None) for name in names]


def _filters(node: Node, options: dict[str, object], before: Shape | None, out: Shape | None) -> list[Shape | None]:
    """Of a filter and its bias."""
    if before is None or out is None or len(before) != 3 or len(out) != 3:
        return [None, None]
    axis = 0 if options.get("inputLayout", "nchw") == "nchw" else 2
    kernel: Sequence[int | None] = kernel_of(node, options, before, out) or (None, None)
    groups = options.get("groups", 1)
    into = before[axis]
    each = None if into is None or not isinstance(groups, int) else into // groups
    sizes = {"o": out[axis], "i": each, "h": kernel[0], "w": kernel[1]}
    if "Transpose" in node.operator:  # there a group's output channels are in the filter
        made = out[axis]
        sizes |= {"o": None if made is None or not isinstance(groups, int) else made // groups, "i": into}
    layout = _SPACE[str(options.get("filterLayout", "oihw"))]
    return [tuple(sizes[letter] for letter in layout), (out[axis],)]
