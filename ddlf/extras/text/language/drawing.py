"""A graph as lines for a terminal: a layer a row, with lanes beside it for what is read further down. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddlf.extras.text.language.graph import Graph, consumers

NODE, INPUT = "●", "○"
_CORNERS = {
    (True, True, False, False): "│", (False, False, True, True): "─", (True, True, True, False): "┤", (True, True, False, True): "├",
    (True, False, True, False): "╯", (True, False, False, True): "╰", (False, True, True, False): "╮", (False, True, False, True): "╭",
    (True, True, True, True): "┼", (True, False, True, True): "┴", (False, True, True, True): "┬",
}  # fmt: skip
"""By where lines go from a place: up, down, left, right."""


def drawn(graph: Graph, labels: Sequence[str]) -> Iterator[str]:
    """The lines of a graph's picture.

    Args:
        graph: Nodes, each behind what it reads.
        labels: What stands beside each node.
    """
    left = {source: {*readers} for source, readers in consumers(graph.nodes).items()}
    lanes: list[int | None] = []
    rows: list[tuple[str, str]] = []
    for number, node in enumerate(graph.nodes):
        sources = set(node.inputs)
        for source in sources:
            left[source].discard(number)
        into = [lane for lane, source in enumerate(lanes) if source in sources]
        ending = [lane for lane in into if not left[lanes[lane] or 0]]
        own = ending[0] if ending else _free(lanes)
        if own == len(lanes):
            lanes.append(None)
        before = [*lanes]
        for lane in ending:
            lanes[lane] = None
        lanes[own] = number
        if into not in ([own], []):
            rows.append((_joined(before, lanes, {*into, own}, own), ""))
        sign = INPUT if node.operator == "input" else NODE
        marks = [sign if lane == own else "│" if source is not None else " " for lane, source in enumerate(lanes)]
        rows.append((" ".join(marks), labels[number]))
        if not left.get(number):
            lanes[own] = None
        while lanes and lanes[-1] is None:
            lanes.pop()
    wide = max((len(marks) for marks, _ in rows), default=0)
    for lines, label in rows:
        yield f"{lines:<{wide}}  {label}".rstrip()


def _free(lanes: list[int | None]) -> int:
    return lanes.index(None) if None in lanes else len(lanes)


def _joined(before: list[int | None], after: list[int | None], joined: set[int], own: int) -> str:
    """The row in which lanes come to a node; those that have nothing to do with it stay in front."""
    first, last = min(joined), max(joined)
    signs = []
    for lane in range(len(after)):
        up, down = before[lane] is not None, after[lane] is not None
        if lane in joined:
            signs.append(_CORNERS[up, down, lane > first, lane < last])
        else:
            signs.append("│" if up else "─" if first < lane < last else " ")
        signs.append("─" if first <= lane < last else " ")
    return "".join(signs).rstrip()
