"""Shows the losses of all rates: as lines for a terminal, and as an SVG picture."""

from __future__ import annotations

import math
from html import escape

from ddlf.extras.scout.halving import Curve, Point
from ddlf.extras.scout.verdict import Verdict

WIDTH = 40
"""Columns of the longest bar."""
BESIDE = 51
"""Columns beside a bar: the numbers before it, and all marks behind it."""
SIZE, MARGIN = (640, 360), 56
"""Pixels of the picture, and its margin."""


def number(value: float) -> str:
    """Return a number with at most three digits."""
    return f"{value:.3g}"


def comparable(curve: Curve, best: float) -> dict[float, float]:
    """Return a loss of each rate that can be compared with the other losses; infinite if a trial diverged.

    Some starts have larger losses than others, so the mean loss of a rate also depends on its number of starts. This
    loss is an estimate for all starts: it lies as far between the mean losses of the best rate and of the untrained models
    as on the starts of the rate itself. The mean loss of a rate that was tried from all starts stays as it is.

    Args:
        curve: The losses of all rates.
        best: The best rate, which has trials from all starts.
    """
    reference = curve.point_of(best)
    assert reference is not None
    return {point.rate: _loss_of_all_starts(point, reference, curve.first) for point in curve.points}


def _loss_of_all_starts(point: Point, best: Point, first: tuple[float, ...]) -> float:
    tried = len(point.losses)
    if tried >= len(best.losses) or not (math.isfinite(point.loss) and math.isfinite(best.loss)):
        return point.loss
    excess = math.fsum(loss - least for loss, least in zip(point.losses, best.losses, strict=False)) / tried
    learnt = math.fsum(before - least for before, least in zip(first[:tried], best.losses, strict=False)) / tried
    if excess <= 0:  # better than the best one
        return best.loss + excess
    untrained = math.fsum(first[: len(best.losses)]) / len(best.losses)
    if excess >= learnt:  # not better than the untrained models
        return untrained + excess - learnt
    return best.loss + excess / learnt * (untrained - best.loss)


def curve_lines(curve: Curve, verdict: Verdict, width: int | None = None) -> list[str]:
    """Return the curve as lines: a row for each rate, with a bar as long as its comparable loss.

    Args:
        curve: The losses of all rates.
        verdict: The answer.
        width: Columns of the terminal, which the rows fit; None without one.
    """
    longest = WIDTH if width is None else max(min(WIDTH, width - BESIDE), 1)
    losses = comparable(curve, verdict.best)
    first, bottom = _mean_first_loss(curve), min(losses.values())
    span = max(first - bottom, 1e-12)
    lines = ["rate      steps  starts   loss"]
    for point in curve.points:
        loss = losses[point.rate]
        bar = "#" * max(1, round(longest * (min(loss, first) - bottom) / span)) if math.isfinite(loss) else "diverged"
        row = f"{number(point.rate):<10}{point.steps:>5}  {len(point.losses):>6}  {number(loss) if math.isfinite(loss) else '-':>5}"
        lines.append(f"{row}  {bar} {_marks(point, verdict)}".rstrip())
    return lines


def _mean_first_loss(curve: Curve) -> float:
    return math.fsum(curve.first) / len(curve.first)


def _marks(point: Point, verdict: Verdict) -> str:
    marks = []
    if point.rate == verdict.best:
        marks.append("best")
    if point.rate == verdict.own_rate:
        marks.append("yours")
    if verdict.low <= point.rate <= verdict.high and verdict.low < verdict.high:
        marks.append("flat")
    return f"< {', '.join(marks)}" if marks else ""


def svg(curve: Curve, verdict: Verdict, title: str) -> str:
    """Return the curve as an SVG picture: the comparable loss above the logarithm of the rate.

    Points of shorter trials are smaller. The flat interval is grey, and a line marks the chosen rate.
    """
    losses = comparable(curve, verdict.best)
    finite = [point for point in curve.points if math.isfinite(point.loss)]
    rates = [math.log10(point.rate) for point in curve.points]
    bottom = min(losses.values())
    top = max(_mean_first_loss(curve), bottom)
    (width, height), inner = SIZE, (SIZE[0] - 2 * MARGIN, SIZE[1] - 2 * MARGIN)

    def x(rate: float) -> float:
        return MARGIN + inner[0] * (math.log10(rate) - rates[0]) / max(rates[-1] - rates[0], 1e-12)

    def y(loss: float) -> float:
        return MARGIN + inner[1] * (top - min(loss, top)) / max(top - bottom, 1e-12)

    most = max(point.steps for point in curve.points)
    line = " ".join(f"{x(point.rate):.1f},{y(losses[point.rate]):.1f}" for point in finite)
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
        f'<circle cx="{x(point.rate):.1f}" cy="{y(losses[point.rate]):.1f}" r="{4 if point.steps == most else 2}" fill="#2c6fbb"/>'
        for point in finite
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
