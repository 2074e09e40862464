"""The differences of two models: layers, options, shapes, parameters, inputs and outputs. Pure.

Layers are matched by name if both have one, else by operator and position. A name that Keras made (``dense_3``) does not count.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence

from ddlf.extras.text.language.graph import Graph, ModelOutput, Node
from ddlf.extras.text.language.inference import shown
from ddlf.extras.text.language.model import Model
from ddlf.extras.text.language.printer import spelled
from ddlf.extras.text.language.values import Arg, Number

Pairs = list[tuple[int | None, int | None]]
Fields = dict[str, object]


def differences(first: Model, second: Model) -> list[str]:
    """Return a line of text for each difference between two models: ``-`` begins a removed layer, ``+`` a new one,
    ``~`` a changed one."""
    lines = []
    if changes := _changes(_model_fields(first, second), _model_fields(second, first)):
        lines.append(f"~ model: {changes}")
    lines += _graphs(first.graph, second.graph, "")
    for name in dict.fromkeys([*first.parts, *second.parts]):
        if name in first.parts and name in second.parts:
            lines += _graphs(first.parts[name][1], second.parts[name][1], f"{name}: ")
        else:
            lines.append(f"{'-' if name in first.parts else '+'} model {name}")
    return lines


def _changes(before: Fields, after: Fields) -> str:
    return ", ".join(
        f"{key} {before.get(key) or 'none'} -> {after.get(key) or 'none'}"
        for key in dict.fromkeys([*before, *after])
        if (before.get(key) or None) != (after.get(key) or None)
    )


def _model_fields(model: Model, other: Model) -> Fields:
    form, count = model.form, model.graph.parameters
    fields: Fields = {"class": form.kind, "options": _options(form.options)}
    if _own_name(form.name) and _own_name(other.form.name):
        fields["name"] = _own_name(form.name)
    return fields | {"parameters": "not known" if count is None else f"{count:,}"}


def _node_fields(node: Node) -> Fields:
    fields: Fields = {arg.key: spelled(arg.value) for arg in node.options}
    if "name" in fields:  # the name of an input in Keras, beside that of its block
        fields |= {"name": _own_name(str(fields["name"])), "block": _own_name(node.name)}
    else:
        fields["name"] = _own_name(node.name, node.operator)
    return fields | {
        "operands": _operands(node),
        "call": node.call_arguments and spelled(node.call_arguments),
        "lrm": node.lrm,
        "type": node.dtype,
        "shape": shown(node.shape),
        "parameters": " ".join(shown(parameter.shape) for parameter in node.parameters),
    }


def _head_fields(head: ModelOutput) -> Fields:
    return {"loss": head.loss, "type": head.written, **dict(head.factors)}


def _graphs(first: Graph, second: Graph, prefix: str) -> Iterator[str]:
    pairs = _matched(first, second)
    matches = {before: after for before, after in pairs if before is not None and after is not None}
    matched = set(matches.values())
    for before, after in pairs:
        if before is None and after is not None:
            yield f"+ {prefix}{_described(second, after)}"
        elif after is None and before is not None:
            yield f"- {prefix}{_described(first, before)}"
        elif before is not None and after is not None:
            old, new = first.nodes[before], second.nodes[after]
            changes = [_changes(_node_fields(old), _node_fields(new))]
            if matched.issuperset(new.inputs) and [matches.get(source) for source in old.inputs] != [*new.inputs]:
                changes.append(f"reads {_called(first, old.inputs)} -> {_called(second, new.inputs)}")
            if any(changes):
                yield f"~ {prefix}{_called(first, [before])}: {', '.join(filter(None, changes))}"
    yield from _heads(first, second, matches, prefix)


def _heads(first: Graph, second: Graph, matches: Mapping[int, int], prefix: str) -> Iterator[str]:
    before, after = _named_heads(first), _named_heads(second)
    if len(before) == len(after) == 1:  # a single output is the same one, whatever its name is
        after = dict(zip(before, after.values(), strict=True))
    for name, head in before.items():
        if name not in after:
            yield f"- {prefix}output {name}"
            continue
        changes = [_changes(_head_fields(head), _head_fields(after[name]))]
        if matches.get(head.node) not in (after[name].node, None):
            changes.append(f"reads {_called(first, [head.node])} -> {_called(second, [after[name].node])}")
        if any(changes):
            yield f"~ {prefix}output {name}: {', '.join(filter(None, changes))}"
    yield from (f"+ {prefix}output {name}" for name in after if name not in before)


def _named_heads(graph: Graph) -> dict[str, ModelOutput]:
    return {
        _own_name(head.name, graph.nodes[head.node].operator) or str(number): head
        for number, head in enumerate(graph.heads, 1)
    }


def _matched(first: Graph, second: Graph) -> Pairs:
    """Match the layers of two graphs. Return pairs of node numbers, with None where one graph lacks the layer."""
    graphs = (first, second)
    names = set.intersection(*({_own_name(node.name, node.operator) for node in graph.nodes} for graph in graphs)) - {
        ""
    }
    if len(first.heads) == len(second.heads) == 1:
        names -= {node.name for graph in graphs for node in graph.nodes if node.operator == "input"}
    before, after = (
        [(node.operator, node.name if node.name in names else "", node.share) for node in graph.nodes]
        for graph in graphs
    )
    pairs: Pairs = []
    for tag, a, b, c, d in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if tag == "equal":
            pairs += zip(range(a, b), range(c, d), strict=True)
        else:
            pairs += [*((number, None) for number in range(a, b)), *((None, number) for number in range(c, d))]
    return pairs


def _own_name(name: str, operator: str = "") -> str:
    """Return a name that the user chose; an empty text if Keras made it from the class (``operator``) of the layer."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=.)(?=[A-Z][a-z])", "_", operator).lower()
    generated = ("input_layer", "functional", "sequential", "model", *filter(None, [snake]))
    return "" if re.sub(r"_\d+$", "", name) in generated else name


def _operands(node: Node) -> str:
    return ", ".join(operand.written if isinstance(operand, Number) else operand for operand in node.operands)


def _options(options: Sequence[Arg]) -> str:
    return ", ".join(f"{arg.key}={spelled(arg.value)}" for arg in options)


def _called(graph: Graph, numbers: Sequence[int]) -> str:
    """Return the numbers, operators and names of some nodes as one text to print."""
    nodes = [(number, graph.nodes[number]) for number in numbers]
    return ", ".join(f"{number + 1} {node.operator} {node.name}".rstrip() for number, node in nodes)


def _described(graph: Graph, number: int) -> str:
    node = graph.nodes[number]
    options = ", ".join(filter(None, [_operands(node), _options(node.options)]))
    counts = [parameter.count for parameter in node.parameters]
    learned = f", {sum(count or 0 for count in counts):,} parameters" if counts and None not in counts else ""
    options_text = f"({options})" if options or node.operator != "input" else ""
    return f"{number + 1} {node.operator}{options_text} {node.name}".rstrip() + f" {shown(node.shape)}{learned}"
