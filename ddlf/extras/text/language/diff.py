"""What differs between two models: layers, their options, shapes, parameters and what they read, inputs and outputs. Pure.

Layers are matched by their names where both have names, else by what they are and where they stand. A name that Keras gave (``dense_3``) is none.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from ddlf.extras.text.language.graph import Graph, Node
from ddlf.extras.text.language.inference import shown
from ddlf.extras.text.language.model import Model
from ddlf.extras.text.language.printer import spelled
from ddlf.extras.text.language.values import Number

Pairs = list[tuple[int | None, int | None]]


def differences(one: Model, other: Model) -> list[str]:
    """A line for each difference, ``-`` of what only the first has, ``+`` of what only the second has, ``~`` of what changed."""
    lines = [*_model(one, other)]
    lines += _graphs(one.graph, other.graph, "")
    names = [*one.parts, *(name for name in other.parts if name not in one.parts)]
    for name in names:
        if name not in other.parts:
            lines.append(f"- model {name}")
        elif name not in one.parts:
            lines.append(f"+ model {name}")
        else:
            lines += _graphs(one.parts[name][1], other.parts[name][1], f"{name}: ")
    return lines


def _model(one: Model, other: Model) -> Iterator[str]:
    for what, before, after in (
        ("class", one.form.kind, other.form.kind),
        ("name", _own_name(one.form.name), _own_name(other.form.name)),
        ("options", _options(one.form.options), _options(other.form.options)),
    ):
        if before != after and (what == "options" or (before and after)):
            yield f"~ model: {what} {before or 'none'} -> {after or 'none'}"
    counts = [each.graph.parameters for each in (one, other)]
    if counts[0] != counts[1]:
        yield f"~ model: parameters {_count(counts[0])} -> {_count(counts[1])}"


def _graphs(one: Graph, other: Graph, where: str) -> Iterator[str]:
    pairs = _matched(one, other)
    same = {before: after for before, after in pairs if before is not None and after is not None}
    back = {after: before for before, after in same.items()}
    for before, after in pairs:
        if after is None and before is not None:
            yield f"- {where}{_said(one, before)}"
        elif before is None and after is not None:
            yield f"+ {where}{_said(other, after)}"
        elif before is not None and after is not None:
            changed = _changed(one.nodes[before], other.nodes[after])
            reads = [same.get(each) for each in one.nodes[before].inputs] != [*other.nodes[after].inputs]
            if reads and all(each in back for each in other.nodes[after].inputs):
                changed.append(f"reads {_reads(one, before)} -> {_reads(other, after)}")
            if changed:
                yield f"~ {where}{called(one, before)}: {', '.join(changed)}"
    yield from _heads(one, other, same, where)


def _heads(one: Graph, other: Graph, same: dict[int, int], where: str) -> Iterator[str]:
    before, after = (
        {
            _own_name(head.name, each.nodes[head.node].operator) or str(place): head
            for place, head in enumerate(each.heads, 1)
        }
        for each in (one, other)
    )
    if len(before) == len(after) == 1:  # the only output is the same one, whatever it is called
        after = dict(zip(before, after.values(), strict=True))
    for name, head in before.items():
        if name not in after:
            yield f"- {where}output {name}"
            continue
        new = after[name]
        for what, old, now in (("loss", head.loss, new.loss), ("type", head.written, new.written)):
            if old != now:
                yield f"~ {where}output {name}: {what} {old or 'none'} -> {now or 'none'}"
        if head.factors != new.factors:
            yield f"~ {where}output {name}: {dict(head.factors)} -> {dict(new.factors)}"
        if same.get(head.node) not in (new.node, None):
            yield f"~ {where}output {name}: of {called(one, head.node)} -> of {called(other, new.node)}"
    yield from (f"+ {where}output {name}" for name in after if name not in before)


def _matched(one: Graph, other: Graph) -> Pairs:
    """Nodes of both that are the same layer; None where one has none."""
    of_one, of_other = ({_own_name(node.name, node.operator) for node in graph.nodes} for graph in (one, other))
    names = (of_one & of_other) - {""}
    if len(one.heads) == len(other.heads) == 1:
        names -= {node.name for graph in (one, other) for node in graph.nodes if node.operator == "input"}

    def key(node: Node) -> tuple[str, str, str]:
        return node.operator, node.name if node.name in names else "", node.share

    before, after = [key(node) for node in one.nodes], [key(node) for node in other.nodes]
    pairs: Pairs = []
    for what, a, b, c, d in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if what == "equal":
            pairs += zip(range(a, b), range(c, d), strict=True)
        else:
            pairs += [(number, None) for number in range(a, b)]
            pairs += [(None, number) for number in range(c, d)]
    return pairs


def _changed(before: Node, after: Node) -> list[str]:
    old, new = ({arg.key: spelled(arg.value) for arg in node.options} for node in (before, after))
    found = [
        f"{key} {old.get(key, 'left out')} -> {new.get(key, 'left out')}"
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key) and not (key == "name" and _own_name(old.get(key)) == _own_name(new.get(key)))
    ]
    for what, a, b in (
        ("name", *(_own_name(node.name, node.operator) for node in (before, after))),
        ("operands", _operands(before), _operands(after)),
        ("call", before.given and spelled(before.given), after.given and spelled(after.given)),
        ("lrm", before.lrm, after.lrm),
        ("type", before.dtype, after.dtype),
        ("shape", shown(before.shape), shown(after.shape)),
    ):
        if a != b:
            found.append(f"{what} {a or 'none'} -> {b or 'none'}")
    shapes = [" ".join(shown(each.shape) for each in node.parameters) or "none" for node in (before, after)]
    if shapes[0] != shapes[1]:
        found.append(f"parameters {shapes[0]} -> {shapes[1]}")
    return found


def _own_name(name: str | None, operator: str = "") -> str:
    """A name, unless Keras made it of the class (``operator``) of the layer or model, and maybe numbered it."""
    layer = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=.)(?=[A-Z][a-z])", "_", operator).lower()
    made = ("input_layer", "functional", "sequential", "model", *filter(None, [layer]))
    return "" if not name or re.sub(r"_\d+$", "", name) in made else name


def _operands(node: Node) -> str:
    return ", ".join(each.written if isinstance(each, Number) else each for each in node.operands)


def _options(options: tuple[object, ...]) -> str:
    return ", ".join(f"{arg.key}={spelled(arg.value)}" for arg in options)  # type: ignore[attr-defined]


def _count(count: int | None) -> str:
    return "not known" if count is None else f"{count:,}"


def called(graph: Graph, number: int) -> str:
    """A node as a line names it: its number, what it is, and its name."""
    node = graph.nodes[number]
    return f"{number + 1} {node.operator}{' ' * bool(node.name)}{node.name}"


def _said(graph: Graph, number: int) -> str:
    node = graph.nodes[number]
    options = ", ".join([*filter(None, [_operands(node)]), *filter(None, [_options(node.options)])])
    counts = [each.count for each in node.parameters]
    learned = f", {sum(count or 0 for count in counts):,} parameters" if counts and None not in counts else ""
    inside = f"({options})" if options or node.operator != "input" else ""
    return f"{number + 1} {node.operator}{inside}{' ' * bool(node.name)}{node.name} {shown(node.shape)}{learned}"


def _reads(graph: Graph, number: int) -> str:
    return ", ".join(called(graph, each) for each in graph.nodes[number].inputs)
