"""A graph as an SVG picture: a box for each layer, in rows by the longest way from an input, branches beside each other. Pure.

Rows are ordered by the mean place of what a box reads and is read by, forth and back (the barycentre heuristic of Sugiyama, Tagawa and Toda, 1981,
doi:10.1109/TSMC.1981.4308636). A way that passes rows has an empty place in each of them, so that no line crosses a box.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from html import escape

from ddlf.extras.text.language.graph import Graph, distances

WIDTH, HEIGHT = 190, 44
"""Of a box, in pixels."""
ACROSS, DOWN = 24, 36
"""Between boxes."""
LANE = 10
"""Of a way that passes a row."""
SWEEPS = 8
LETTERS = 26
"""Of a line in a box."""
Place = tuple[int, int]
"""A row, and the number of what stands in it: a node, or minus a way's number."""


def picture(graph: Graph, labels: Sequence[tuple[str, str, str]]) -> str:
    """The SVG of a graph.

    Args:
        graph: Nodes, each behind what it reads.
        labels: Two lines for each node, and what is shown where the pointer is.
    """
    rows, ways = _rows(graph)
    _order(rows, ways)
    left = _placed(rows, ways)
    high = max(rows, default=0) * (HEIGHT + DOWN) + HEIGHT + 2 * ACROSS
    wide = max((left[row, each] + _wide(each) for row, line in rows.items() for each in line), default=0) + ACROSS
    heads = {head.node: head.name for head in graph.heads}
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide:.0f}" height="{high}" viewBox="0 0 {wide:.0f} {high}" '
        'font-family="sans-serif" font-size="11">',
        "<style>path{fill:none;stroke:#888}rect{fill:#eef3fa;stroke:#4a6fa5}.in rect{fill:#e6f4e6;stroke:#4a8a4a}"
        ".out rect{fill:#fbeee0;stroke:#b0763a}.t{font-weight:bold}</style>",
    ]
    lines += [_curve(way, left) for way in ways]
    for row, line in sorted(rows.items()):
        for each in line:
            if each >= 0:
                kind = "out" if each in heads else "in" if graph.nodes[each].operator == "input" else "layer"
                lines.append(_box(left[row, each], row, labels[each], kind, heads.get(each, "")))
    return "\n".join([*lines, "</svg>"]) + "\n"


def _rows(graph: Graph) -> tuple[dict[int, list[int]], list[list[Place]]]:
    """What stands in each row, and each way from a box to one that reads it."""
    far = [begun for begun, _ in distances(graph)]
    rows: dict[int, list[int]] = {}
    for number, row in enumerate(far):
        rows.setdefault(row, []).append(number)
    ways: list[list[Place]] = []
    for number, node in enumerate(graph.nodes):
        for source in dict.fromkeys(node.inputs):
            lane = -len(ways) - 1
            way = [(far[source], source)]
            for row in range(far[source] + 1, far[number]):
                rows[row].append(lane)
                way.append((row, lane))
            ways.append([*way, (far[number], number)])
    return rows, ways


def _order(rows: dict[int, list[int]], ways: list[list[Place]]) -> None:
    """Order each row so that few ways cross."""
    above: dict[Place, list[Place]] = {}
    below: dict[Place, list[Place]] = {}
    for way in ways:
        for one, other in itertools.pairwise(way):
            above.setdefault(other, []).append(one)
            below.setdefault(one, []).append(other)
    for sweep in range(SWEEPS):
        beside = below if sweep % 2 else above
        at = {(row, each): index for row, line in rows.items() for index, each in enumerate(line)}
        for row in sorted(rows, reverse=bool(sweep % 2)):
            line = rows[row]
            means = {
                each: sum(at[near] for near in nears) / len(nears)
                if (nears := beside.get((row, each)))
                else at[row, each]
                for each in line
            }
            line.sort(key=means.__getitem__)
            at.update({(row, each): index for index, each in enumerate(line)})


def _wide(each: int) -> int:
    return WIDTH if each >= 0 else LANE


def _placed(rows: dict[int, list[int]], ways: list[list[Place]]) -> dict[Place, float]:
    """The left edge of each box and way: near what it belongs to, without touching its neighbours."""
    near: dict[Place, list[Place]] = {}
    for way in ways:
        for one, other in itertools.pairwise(way):
            near.setdefault(one, []).append(other)
            near.setdefault(other, []).append(one)
    left: dict[Place, float] = {}
    for row, line in rows.items():
        x = 0.0
        for each in line:
            left[row, each] = x
            x += _wide(each) + ACROSS
    for sweep in range(2 * SWEEPS):
        for row in sorted(rows, reverse=bool(sweep % 2)):
            wished = []
            for each in rows[row]:
                middles = sorted(left[other] + _wide(other[1]) / 2 for other in near.get((row, each), ()))
                middle = len(middles) // 2
                mean = (middles[middle] + middles[-middle - 1]) / 2 if middles else left[row, each] + _wide(each) / 2
                wished.append(mean - _wide(each) / 2)
            for each, x in zip(rows[row], _apart(wished, [_wide(each) + ACROSS for each in rows[row]]), strict=True):
                left[row, each] = x
    for _ in range(SWEEPS):
        _straighten(rows, ways, left)
    least = min(left.values(), default=0) - ACROSS
    return {place: x - least for place, x in left.items()}


def _straighten(rows: dict[int, list[int]], ways: list[list[Place]], left: dict[Place, float]) -> None:
    """Put what hangs together one below the other on one line, where there is room for it in all its rows."""
    above: dict[Place, set[Place]] = {}
    below: dict[Place, set[Place]] = {}
    for way in ways:
        for one, other in itertools.pairwise(way):
            below.setdefault(one, set()).add(other)
            above.setdefault(other, set()).add(one)
    alone = {one: next(iter(each)) for one, each in below.items() if len(each) == 1}
    follows = {one: other for one, other in alone.items() if len(above[other]) == 1}
    number = {(row, each): index for row, line in rows.items() for index, each in enumerate(line)}
    inside = set(follows.values())
    for begin in [one for one in follows if one not in inside]:
        run = [begin]
        while run[-1] in follows:
            run.append(follows[run[-1]])
        low, high = float("-inf"), float("inf")
        for row, each in run:
            line, half = rows[row], _wide(each) / 2
            at = number[row, each]
            if at:
                low = max(low, left[row, line[at - 1]] + _wide(line[at - 1]) + ACROSS + half)
            if at + 1 < len(line):
                high = min(high, left[row, line[at + 1]] - ACROSS - half)
        middles = sorted(left[place] + _wide(place[1]) / 2 for place in run)
        if low <= high:
            for row, each in run:
                left[row, each] = min(max(middles[len(middles) // 2], low), high) - _wide(each) / 2


def _apart(wished: list[float], wide: list[int]) -> list[float]:
    """Places as near to those that are wished as can be (least squares), with room for each: neighbours that touch move as one."""
    groups: list[tuple[float, int]] = []  # sum of what the first of them wishes, and how many they are
    starts, x = [], 0.0
    for wish, room in zip(wished, wide, strict=True):
        starts.append(x)
        groups.append((wish - x, 1))
        while len(groups) > 1 and groups[-2][0] / groups[-2][1] > groups[-1][0] / groups[-1][1]:
            total, count = groups.pop()
            groups[-1] = (groups[-1][0] + total, groups[-1][1] + count)
        x += room
    shifts = [total / count for total, count in groups for _ in range(count)]
    return [shift + start for shift, start in zip(shifts, starts, strict=True)]


def _curve(way: list[Place], left: dict[Place, float]) -> str:
    """The line of a way, from the lower edge of a box to the upper one of another."""
    middle = [left[place] + _wide(place[1]) / 2 for place in way]
    tops = [ACROSS + place[0] * (HEIGHT + DOWN) for place in way]
    parts = [f"M{middle[0]:.0f},{tops[0] + HEIGHT}"]
    for index in range(1, len(way)):
        begin = tops[index - 1] + HEIGHT
        half = begin + DOWN // 2
        parts.append(f"C{middle[index - 1]:.0f},{half} {middle[index]:.0f},{half} {middle[index]:.0f},{tops[index]}")
        if index < len(way) - 1:
            parts.append(f"V{tops[index] + HEIGHT}")
    return f'<path d="{" ".join(parts)}"/>'


def _box(x: float, row: int, label: tuple[str, str, str], kind: str, output: str) -> str:
    y, middle = ACROSS + row * (HEIGHT + DOWN), x + WIDTH / 2
    said = [each if len(each) <= LETTERS else f"{each[: LETTERS - 1]}…" for each in label[:2]]
    title = label[2] + f" -> output {output}" * bool(output)
    return (
        f'<g class="{kind}"><title>{escape(title)}</title><rect x="{x:.0f}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>'
        f'<text class="t" x="{middle:.0f}" y="{y + 18}" text-anchor="middle">{escape(said[0])}</text>'
        f'<text x="{middle:.0f}" y="{y + 34}" text-anchor="middle">{escape(said[1])}</text></g>'
    )
