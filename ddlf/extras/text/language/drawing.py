"""Draw a graph as lines of text: each layer has a row, and each tensor that a later row reads has a lane. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from ddlf.extras.text.language.graph import Graph, consumers

NODE, INPUT = "●", "○"
LINE_HEIGHT = 18
"""The height of a line in pixels. It is about the height of a character, so that lanes have no gaps."""
_CORNERS = {
    (True, True, False, False): "│", (False, False, True, True): "─", (True, True, True, False): "┤", (True, True, False, True): "├",
    (True, False, True, False): "╯", (True, False, False, True): "╰", (False, True, True, False): "╮", (False, True, False, True): "╭",
    (True, True, True, True): "┼", (True, False, True, True): "┴", (False, True, True, True): "┬",
}  # fmt: skip
"""The character of a crossing, by whether lines go up, down, left and right."""


def drawn(graph: Graph, labels: Sequence[str]) -> Iterator[str]:
    """Yield the lines of the drawing of a graph.

    Args:
        graph: The graph, in which a node follows the nodes that it reads.
        labels: The text beside each node.
    """
    waiting = {source: {*readers} for source, readers in consumers(graph.nodes).items()}
    lanes: list[int | None] = []
    rows: list[tuple[str, str]] = []
    for number, node in enumerate(graph.nodes):
        sources = set(node.inputs)
        for source in sources:
            waiting[source].discard(number)
        into = [lane for lane, source in enumerate(lanes) if source in sources]
        ending = [lane for lane in into if not waiting[lanes[lane] or 0]]
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
        if not waiting.get(number):
            lanes[own] = None
        while lanes and lanes[-1] is None:
            lanes.pop()
    width = max((len(marks) for marks, _ in rows), default=0)
    for row, label in rows:
        yield f"{row:<{width}}  {label}".rstrip()


def svg(lines: Sequence[str]) -> str:
    """Return an SVG picture of lines of text, for a browser."""
    width, height = 9 * max(map(len, lines), default=0) + 32, LINE_HEIGHT * len(lines) + 32
    rows = "".join(
        f'<tspan x="16" y="{LINE_HEIGHT * number + 32}">{escape(line)}</tspan>\n' for number, line in enumerate(lines)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">\n'
        '<rect width="100%" height="100%" fill="white"/>\n'
        f'<text font-family="monospace" font-size="15" style="white-space: pre">\n{rows}</text>\n</svg>\n'
    )


def _free(lanes: list[int | None]) -> int:
    return lanes.index(None) if None in lanes else len(lanes)


def _joined(before: list[int | None], after: list[int | None], joined: set[int], own: int) -> str:
    """Return the row in which lanes meet at a node. Other lanes cross it."""
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
