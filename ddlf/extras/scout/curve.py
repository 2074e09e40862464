"""Shows the losses of all rates: as lines for a terminal, and as an SVG picture."""

from __future__ import annotations

import math
from html import escape

from ddlf.extras.scout.halving import Curve, Point
from ddlf.extras.scout.verdict import Verdict

WIDTH = 40
"""Columns of the longest bar."""
SIZE, MARGIN = (640, 360), 56
"""Pixels of the picture, and its margin."""


def number(value: float) -> str:
    """Return a number with at most three digits."""
    return f"{value:.3g}"


def shown(curve: Curve, verdict: Verdict) -> list[str]:
    """Return the curve as lines: a row for each rate, with a bar as long as its loss."""
    first, bottom = _first(curve), min(point.loss for point in curve.points)
    span = max(first - bottom, 1e-12)
    lines = ["rate      steps   loss"]
    for point in curve.points:
        share = (min(point.loss, first) - bottom) / span if math.isfinite(point.loss) else 1.0
        bar = "#" * max(1, round(WIDTH * share)) if math.isfinite(point.loss) else "diverged"
        loss = number(point.loss) if math.isfinite(point.loss) else "-"
        lines.append(f"{number(point.rate):<10}{point.steps:>5}  {loss:>5}  {bar} {_marks(point, verdict)}".rstrip())
    return lines


def _first(curve: Curve) -> float:
    return math.fsum(curve.first) / len(curve.first)


def _marks(point: Point, verdict: Verdict) -> str:
    marks = []
    if point.rate == verdict.best:
        marks.append("best")
    if point.rate == verdict.own:
        marks.append("yours")
    if verdict.low <= point.rate <= verdict.high and verdict.low < verdict.high:
        marks.append("flat")
    return f"< {', '.join(marks)}" if marks else ""


def svg(curve: Curve, verdict: Verdict, title: str) -> str:
    """Return the curve as an SVG picture: the loss above the logarithm of the rate.

    Points of shorter trials are smaller. The flat interval is grey, and a line marks the chosen rate.
    """
    finite = [point for point in curve.points if math.isfinite(point.loss)]
    rates = [math.log10(point.rate) for point in curve.points]
    top, bottom = max(_first(curve), min(one.loss for one in finite)), min(one.loss for one in finite)
    (width, height), inner = SIZE, (SIZE[0] - 2 * MARGIN, SIZE[1] - 2 * MARGIN)

    def x(rate: float) -> float:
        return MARGIN + inner[0] * (math.log10(rate) - rates[0]) / max(rates[-1] - rates[0], 1e-12)

    def y(loss: float) -> float:
        return MARGIN + inner[1] * (top - min(loss, top)) / max(top - bottom, 1e-12)

    most = max(point.steps for point in curve.points)
    line = " ".join(f"{x(one.rate):.1f},{y(one.loss):.1f}" for one in finite)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{MARGIN}" y="{MARGIN / 2}" font-size="15">{escape(title)}</text>',
    ]
    if verdict.low < verdict.high:
        parts.append(
            f'<rect x="{x(verdict.low):.1f}" y="{MARGIN}" width="{x(verdict.high) - x(verdict.low):.1f}" '
            f'height="{inner[1]}" fill="#e8e8e8"/>'
        )
    parts += [
        f'<line x1="{x(verdict.rate):.1f}" x2="{x(verdict.rate):.1f}" y1="{MARGIN}" y2="{height - MARGIN}" '
        'stroke="#c0392b" stroke-dasharray="4 3"/>',
        f'<polyline points="{line}" fill="none" stroke="#2c6fbb"/>',
    ]
    parts += [
        f'<circle cx="{x(one.rate):.1f}" cy="{y(one.loss):.1f}" r="{4 if one.steps == most else 2}" fill="#2c6fbb"/>'
        for one in finite
    ]
    decades = range(math.ceil(rates[0] - 1e-9), math.floor(rates[-1] + 1e-9) + 1)
    parts += [
        f'<text x="{x(10.0**power):.1f}" y="{height - MARGIN + 18}" text-anchor="middle">1e{power}</text>'
        for power in decades
    ]
    parts += [
        f'<text x="{MARGIN - 6}" y="{y(loss) + 4:.1f}" text-anchor="end">{number(loss)}</text>'
        for loss in (top, bottom)
    ]
    parts.append(f'<text x="{width / 2}" y="{height - 10}" text-anchor="middle">learning rate</text>')
    return "\n".join([*parts, "</svg>", ""])
