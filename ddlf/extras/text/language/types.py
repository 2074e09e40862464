"""Types that are not written, and the casts that they need. Pure.

A layer has the type that is written, else the highest of what it reads. A cast is inserted before the layer that needs it, upwards; one that goes
downwards is told.
"""

from __future__ import annotations

from dataclasses import replace

from ddlf.extras.text.language.graph import Graph, Head, Node
from ddlf.extras.text.language.operators import DTYPES, OPERATORS
from ddlf.extras.text.language.problems import Problems
from ddlf.extras.text.language.values import Number

HALF = ("float16", "bfloat16")
RANGES = {
    f"{sign}int{bits}": (-(2 ** (bits - 1)) * (not sign), 2 ** (bits - (not sign)) - 1)
    for sign in ("", "u")
    for bits in (4, 8, 32)
}
"""The least and the largest of each type of whole numbers."""
AS_IT_COMES = ("free", "gather", "scatter", "split")
"""Kinds of operators whose inputs are not cast."""


def highest(types: list[str]) -> str:
    """The type that has room for all; two different ones of 16 bits make float32."""
    found = set(types)
    return "float32" if found >= set(HALF) else min(found, key=DTYPES.index, default="float32")


def typed(graph: Graph, problems: Problems) -> Graph:
    """Return a graph whose nodes have types, with the casts between them."""
    made: list[Node] = []
    numbers: dict[int, int] = {}
    casts: dict[tuple[int, str], int] = {}

    def cast(source: int, dtype: str, at: Node | Head, call: int) -> int:
        if made[source].dtype == dtype:
            return source
        if made[source].dtype not in DTYPES:
            problems.add(call, f"{made[source].dtype} is read by layers of Keras only")
            return source
        if _is_down(made[source].dtype, dtype):
            problems.warn(
                call, f"{made[source].dtype} becomes {dtype}, which loses; if that is meant, write cast({dtype})"
            )
        if (source, dtype) not in casts:
            casts[source, dtype] = len(made)
            made.append(
                Node("cast", (source,), written=dtype, shape=made[source].shape, dtype=dtype, at=at.at, call=call)
            )
        return casts[source, dtype]

    for old, node in enumerate(graph.nodes):
        inputs = [numbers[each] for each in node.inputs]
        into = [made[each].dtype for each in inputs]
        if node.operator in OPERATORS and any(each not in DTYPES for each in into):
            problems.add(node.call, f"{node.operator} cannot read {', '.join(into)}, which layers of Keras can only")
            into = ["float32"] * len(into)
        works, result = types_of(node, into)
        _fitting(node, into, problems)
        if works:
            inputs = [cast(each, works, node, node.call) for each in inputs]
        for operand in node.operands:
            if isinstance(operand, Number):
                _check(operand, works or result, problems)
        numbers[old] = len(made)
        made.append(replace(node, inputs=tuple(inputs), dtype=result))
    heads = []
    for head in graph.heads:
        end = numbers[head.node]
        heads.append(replace(head, node=cast(end, head.written, head, head.at) if head.written else end))
    return Graph(tuple(made), tuple(heads))


def types_of(node: Node, into: list[str]) -> tuple[str, str]:
    """The type that a node computes in, empty if it takes what comes, and that of what comes out."""
    if node.operator in ("input", "cast"):
        return "", node.written
    if node.operator not in OPERATORS:
        return "", "float32"
    operator = OPERATORS[node.operator]
    if operator.kind in AS_IT_COMES or node.operator.endswith("quantizeLinear") or node.operator == "quantizeLinear":
        return "", node.written or operator.result or into[0]
    works = node.written if node.written and not operator.result else highest(into)
    if not node.written and ((operator.floats and works in RANGES) or (operator.wide and works in HALF)):
        works = "float32"
    return works, operator.result or works


def _fitting(node: Node, into: list[str], problems: Problems) -> None:
    """Look whether what a layer takes, writes or makes has a type for it, where a cast would lose."""
    if node.operator == "quantizeLinear" and node.written and node.written not in RANGES:
        problems.add(node.call, f"quantizeLinear makes whole numbers, such as int8, not {node.written}")
    kind = OPERATORS[node.operator].kind if node.operator in OPERATORS else ""
    if kind in ("gather", "scatter") and len(into) > 1 and into[1] not in RANGES:
        problems.add(
            node.call, f"{node.operator}: indices are whole numbers, got {into[1]}; write cast(int32) behind them"
        )
    if kind == "scatter" and len(into) > 2 and into[2] != into[0]:
        problems.add(
            node.call,
            f"{node.operator}: {into[2]} is written into {into[0]}; write cast({into[0]}) behind what is written",
        )


def _is_down(before: str, after: str) -> bool:
    return DTYPES.index(after) > DTYPES.index(before) or {before, after} == set(HALF)


def _check(number: Number, dtype: str, problems: Problems) -> None:
    """Look whether a number can be of a type."""
    if dtype not in RANGES:
        return
    low, high = RANGES[dtype]
    if not isinstance(number.value, int):
        problems.add(number.at, f"{number.written} is no {dtype}; write a whole number, or cast(float32) before")
    elif not low <= number.value <= high:
        problems.add(number.at, f"{number.written} is no {dtype}, which goes from {low:,} to {high:,}")
