"""Draw the three diagrams of the architecture page as SVG: ``python docs/pictures/diagrams.py``.

GitHub and Sphinx both show SVG files, without a plug-in and without another host.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN, TITLE = 236, 66, 104, 48, 24, 30


class Box(NamedTuple):
    """A box: its lane (a column), its row, a title, and one line below it."""

    lane: int
    row: float
    title: str
    text: str


class Arrow(NamedTuple):
    """An arrow from one box to another, by their numbers, with a label."""

    begin: int
    end: int
    label: str = ""


class Diagram(NamedTuple):
    """Lanes side by side, boxes in them, and arrows between boxes."""

    lanes: tuple[str, ...]
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]


CALL = Diagram(
    ("master", "worker: daemon", "worker: executor"),
    (
        Box(0, 0, "Cluster.run_method", "one request for each worker"),
        Box(0, 1, "ProxyWorker, Link", "one worker, two connections"),
        Box(0, 2, "Channel", "open requests, deadlines"),
        Box(1, 0, "Daemon", "admits masters, grants the lease"),
        Box(2, 2, "Session", "decodes requests"),
        Box(2, 1, "Calls", "runs a call now, or queues it"),
        Box(2, 0, "your function", "on the event loop or a thread"),
    ),
    (
        Arrow(0, 1),
        Arrow(1, 2),
        Arrow(1, 3, "control"),
        Arrow(3, 6, "kills, restarts"),
        Arrow(2, 4, "data: request"),
        Arrow(4, 2, "data: response"),
        Arrow(4, 5),
        Arrow(5, 6),
    ),
)
ROUND = Diagram(
    ("master", "worker"),
    (
        Box(0, 0, "strategy", "sync: one loop over rounds"),
        Box(0, 1, "Crew and Schedule", "choose a worker for each slot"),
        Box(1, 0, "Replica", "sets weights and seeds"),
        Box(1, 1, "slot parts begin", "optimizer, residual, callbacks"),
        Box(1, 2, "model.fit", "the partition of this slot"),
        Box(1, 3, "slot parts end", "update and slot state"),
        Box(0, 2, "Run.all", "checks and merges updates"),
        Box(0, 3, "Run.commit", "ledger, record, checkpoint"),
    ),
    (
        Arrow(0, 1, "tasks"),
        Arrow(1, 2, "Task"),
        Arrow(2, 3),
        Arrow(3, 4),
        Arrow(4, 5),
        Arrow(5, 6, "Reply"),
        Arrow(6, 7, "outer optimizer"),
    ),
)
PUSH = Diagram(
    ("worker 1", "worker 2", "worker 3, and the master"),
    (
        Box(0, 0, "replica", "computes a gradient"),
        Box(0, 1, "client", "pushes and fetches"),
        Box(1, 1, "server", "owns a part of the weights"),
        Box(1, 2, "push rule", "scales by staleness, applies"),
        Box(2, 2, "backup", "takes over if the server is lost"),
        Box(2, 0, "master", "assigns servers and backups"),
    ),
    (
        Arrow(0, 1, "gradient"),
        Arrow(1, 2, "push"),
        Arrow(2, 1, "weights"),
        Arrow(2, 3, "gradient"),
        Arrow(2, 4, "snapshots"),
        Arrow(5, 2, "owner, term"),
    ),
)
DIAGRAMS = {"call": CALL, "round": ROUND, "push": PUSH}


def drawn(diagram: Diagram) -> str:
    """Return a diagram as SVG on a light ground, so that dark pages show it, too."""
    rows = 1 + max(box.row for box in diagram.boxes)
    width = 2 * MARGIN + len(diagram.lanes) * WIDTH + (len(diagram.lanes) - 1) * GAP_X
    height = 2 * MARGIN + TITLE + rows * HEIGHT + (rows - 1) * GAP_Y
    lanes = [
        f'<text x="{_x(lane) + WIDTH / 2}" y="{MARGIN + 14}" class="lane">{escape(name)}</text>'
        for lane, name in enumerate(diagram.lanes)
    ]
    boxes = [
        f'<rect x="{_x(box.lane)}" y="{_y(box.row)}" width="{WIDTH}" height="{HEIGHT}" rx="8"/>'
        f'<text x="{_x(box.lane) + WIDTH / 2}" y="{_y(box.row) + 28}" class="title">{number}. {escape(box.title)}</text>'
        f'<text x="{_x(box.lane) + WIDTH / 2}" y="{_y(box.row) + 48}">{escape(box.text)}</text>'
        for number, box in enumerate(diagram.boxes, 1)
    ]
    arrows = [_arrow(diagram, arrow) for arrow in diagram.arrows]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" width="{width}">',
            "<style>text{font:13px sans-serif;text-anchor:middle;fill:#222}.title{font-weight:bold;font-size:15px}"
            ".lane{font-size:15px;fill:#666}.label{fill:#1f5fa8;stroke:#fff;stroke-width:5px;paint-order:stroke}rect{fill:#eef4fb;stroke:#4a7fb5}"
            "path{stroke:#444;fill:none;marker-end:url(#a)}</style>",
            '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
            '<path d="M0 0L8 4L0 8z" style="fill:#444;stroke:none;marker-end:none"/></marker></defs>',
            f'<rect width="{width}" height="{height:g}" style="fill:#fff;stroke:none"/>',
            *lanes,
            *(line for line, _ in arrows),
            *(label for _, label in arrows),  # above all lines, on a white ground
            *boxes,
            "</svg>\n",
        ]
    )


def _x(lane: int) -> int:
    return MARGIN + lane * (WIDTH + GAP_X)


def _y(row: float) -> float:
    return MARGIN + TITLE + row * (HEIGHT + GAP_Y)


def _arrow(diagram: Diagram, arrow: Arrow) -> tuple[str, str]:
    """Return a straight arrow between the nearest sides of two boxes, and its label.

    Two arrows in opposite directions are drawn beside each other.
    """
    begin, end = diagram.boxes[arrow.begin], diagram.boxes[arrow.end]
    has_reverse = Arrow(arrow.end, arrow.begin) in [other._replace(label="") for other in diagram.arrows]
    offset = 12 * (has_reverse if arrow.begin < arrow.end else -has_reverse)
    if begin.lane == end.lane:
        down = begin.row < end.row
        x = _x(begin.lane) + WIDTH / 2
        y1, y2 = _y(begin.row) + HEIGHT * down, _y(end.row) + HEIGHT * (not down)
        label = f'<text x="{x + 8}" y="{(y1 + y2) / 2 + 4}" class="label" style="text-anchor:start">'
        return f'<path d="M{x} {y1}L{x} {y2}"/>', f"{label}{escape(arrow.label)}</text>"
    right = begin.lane < end.lane
    x1, x2 = _x(begin.lane) + WIDTH * right, _x(end.lane) + WIDTH * (not right)
    y1, y2 = _y(begin.row) + HEIGHT / 2 - offset, _y(end.row) + HEIGHT / 2 - offset
    above = 4 if y1 != y2 else -6 if offset >= 0 else 16
    label = f'<text x="{(x1 + x2) / 2}" y="{(y1 + y2) / 2 + above}" class="label">{escape(arrow.label)}</text>'
    return f'<path d="M{x1} {y1}L{x2} {y2}"/>', label


if __name__ == "__main__":
    for name, diagram in DIAGRAMS.items():
        (HERE / f"{name}.svg").write_text(drawn(diagram), encoding="utf-8")
