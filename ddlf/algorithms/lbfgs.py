"""L-BFGS without vectors: a direction from dot products, a line search from losses and slopes. Pure.

Vectors are cut into parts that lie on several machines. The machine that decides has only numbers. It needs

- the dot products of the last pairs (``s``: change of the weights, ``y``: change of the gradient) and of the gradient:
  ``direction`` makes of them the coefficients of the search direction (Chen, Wang and Zhou 2014, "Large-scale L-BFGS
  using MapReduce"),
- the loss and the slope at each tried step: ``WolfeSearch`` finds a step that satisfies the strong Wolfe conditions
  (Nocedal and Wright 2006, algorithms 3.5 and 3.6, with cubic interpolation).

All sums are exact, so they have the same bits for every cut and every order. ``dot`` adds blocks of values exactly.
``FixedPoint`` adds the gradients of portions of the data as integers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

BLOCK = 1 << 16
"""Values in a block of a dot product. Parts of a vector are cut at multiples of it, so that each has whole blocks."""
LEAST_CURVATURE = 1e-10
"""A pair is kept if ``s.y`` is greater than this share of ``|s| |y|``. Otherwise the direction might not descend."""

Array = np.ndarray[Any, Any]


def dot(x: Array, y: Array) -> Fraction:
    """Return the dot product of two finite vectors of shape (n,), as the exact sum of the products of their blocks.

    A block's product is a float64 sum. It does not use BLAS, whose bits depend on the number of threads.
    """
    total = Fraction(0)
    for begin in range(0, x.size, BLOCK):
        a, b = (np.asarray(v[begin : begin + BLOCK], np.float64) for v in (x, y))
        total += Fraction(float(np.add.reduce(a * b)))
    return total


def packed(total: Fraction) -> bytes:
    """Return an exact sum of floats as bytes: two for the number of binary places, then the digits."""
    fraction_bits = total.denominator.bit_length() - 1
    digits = total.numerator.to_bytes(total.numerator.bit_length() // 8 + 1, "little", signed=True)
    return fraction_bits.to_bytes(2, "little") + digits


def unpacked(message: bytes) -> Fraction:
    """Return the exact sum that ``packed`` has made into bytes."""
    fraction_bits, digits = int.from_bytes(message[:2], "little"), message[2:]
    return Fraction(int.from_bytes(digits, "little", signed=True), 1 << fraction_bits)


def packed_row(totals: Iterable[Fraction]) -> bytes:
    """Return several exact sums as bytes: each with the length of its bytes before it."""
    parts = [packed(total) for total in totals]
    return b"".join(len(part).to_bytes(2, "little") + part for part in parts)


def unpacked_row(message: bytes) -> list[Fraction]:
    """Return the exact sums that ``packed_row`` has made into bytes."""
    sums, position = [], 0
    while position < len(message):
        end = position + 2 + int.from_bytes(message[position : position + 2], "little")
        sums.append(unpacked(message[position + 2 : end]))
        position = end
    return sums


def cut(values: int, parts: int) -> list[tuple[int, int]]:
    """Cut a vector into parts with whole blocks, whose numbers of blocks differ by at most one.

    Args:
        values: Length of the vector.
        parts: Wanted number of parts. There are fewer if there are fewer blocks.

    Returns:
        Begin and end of each part.
    """
    blocks = max(1, -(-values // BLOCK))
    parts = min(parts, blocks)
    ends = [min(blocks * number // parts * BLOCK, values) for number in range(parts + 1)]
    return list(pairwise(ends))


def direction(dots: Array, pairs: int) -> Array:
    """Return the coefficients of the L-BFGS direction ``-H g``.

    Args:
        dots: The dot products of ``s_1..s_k, y_1..y_k, g`` with each other, float64 of shape (2k + 1, 2k + 1).
        pairs: k.

    Returns:
        The coefficients of the direction in these vectors, float64 of shape (2k + 1,).
    """
    c, steps = np.zeros(2 * pairs + 1), np.zeros(pairs)
    c[-1] = -1.0
    for i in reversed(range(pairs)):
        steps[i] = (c @ dots[:, i]) / dots[i, pairs + i]
        c[pairs + i] -= steps[i]
    if pairs:
        c *= dots[pairs - 1, 2 * pairs - 1] / dots[2 * pairs - 1, 2 * pairs - 1]
    for i in range(pairs):
        c[i] += steps[i] - (c @ dots[:, pairs + i]) / dots[i, pairs + i]
    return c


def is_kept(ss: float, sy: float, yy: float) -> bool:
    """Return whether a pair is kept, from the dot products of ``s`` and ``y``."""
    return sy > LEAST_CURVATURE * math.sqrt(ss) * math.sqrt(yy)


class Point(NamedTuple):
    """A tried step: its length, and the loss and the slope along the direction there."""

    step: float
    loss: float
    slope: float


Outcome = Literal["try", "found", "failed", "unbounded"]


@dataclass(slots=True)
class WolfeSearch:
    """Finds a step that satisfies the strong Wolfe conditions. Evaluate ``step``, and ``tell`` loss and slope there.

    Args:
        loss: Loss at the beginning.
        slope: Slope along the direction at the beginning; negative.
        step: The first step to try.
        decrease: c1: a step must lower the loss by this share of what the slope promises.
        curvature: c2: the slope at the step may be at most this share of the first slope.
        tries: Maximum number of steps.
        noise: Relative error of a loss. If two losses differ by less, the slopes decide instead ("approximate Wolfe
            conditions", Hager and Zhang 2005).

    Attributes:
        best: The step with the least loss among the steps that lower the loss enough, and by more than ``noise``;
            length 0 if there is none.
    """

    loss: float
    slope: float
    step: float = 1.0
    decrease: float = 1e-4
    curvature: float = 0.9
    tries: int = 20
    noise: float = 2.0**-46
    best: Point = field(default_factory=lambda: Point(0.0, math.inf, 0.0))
    _low: Point = field(default_factory=lambda: Point(0.0, 0.0, 0.0))
    _high: Point | None = None
    _evaluations: int = 0

    def __post_init__(self) -> None:
        self._low = Point(0.0, self.loss, self.slope)

    def tell(self, loss: float, slope: float) -> Outcome:
        """Receive the loss and the slope at ``step``.

        Returns:
            ``"found"``: ``step`` satisfies the conditions. ``"try"``: ``step`` is the next one to evaluate.
            ``"failed"``: No step was found; ``best`` still lowers the loss if its length is not 0. ``"unbounded"``: The
            loss falls further and further, or to minus infinity.
        """
        self._evaluations += 1
        if loss == -math.inf:
            return "unbounded"
        now = Point(self.step, loss, slope) if math.isfinite(loss) and math.isfinite(slope) else None
        if now is None or not self._lowers(now):
            self._high = now or Point(self.step, math.inf, math.inf)
        else:
            if now.loss < self.loss - self.noise * abs(self.loss):
                self.best = min(self.best, now, key=lambda point: point.loss)
            if abs(now.slope) <= -self.curvature * self.slope:
                return "found"
            if self._high is None and now.slope < 0:  # the minimum is farther away
                before, self._low = self._low, now
                self.step = _extrapolated_step(before, now)
                if self._evaluations < self.tries:
                    return "try"
                # Rounding errors may hide what the slopes say: a loss of 0 stays 0.
                promised = (now.step - before.step) * before.slope
                return "unbounded" if now.loss <= before.loss + self.decrease * promised else "failed"
            if self._high is None or now.slope * (self._high.step - self._low.step) >= 0:
                self._high = self._low
            self._low = now
        width = abs(self._high.step - self._low.step)
        if self._evaluations >= self.tries or width <= 1e-12 * max(self._high.step, self._low.step):
            return "failed"
        self.step = _interpolated_step(self._low, self._high)
        return "try"

    def _lowers(self, now: Point) -> bool:
        error = self.noise * abs(self.loss)
        if abs(now.loss - self.loss) <= error:
            return now.slope <= (2 * self.decrease - 1) * self.slope
        enough = now.loss <= self.loss + self.decrease * now.step * self.slope
        return enough and (self._low.step == 0 or now.loss < self._low.loss + error)


def _cubic(first: Point, second: Point) -> float:
    """Return where the cubic through the losses and slopes of two points has its minimum; NaN if it has none."""
    d1 = first.slope + second.slope - 3 * (first.loss - second.loss) / (first.step - second.step)
    square = d1 * d1 - first.slope * second.slope
    if not square >= 0:
        return math.nan
    d2 = math.copysign(math.sqrt(square), second.step - first.step)
    below = second.slope - first.slope + 2 * d2
    return second.step - (second.step - first.step) * (second.slope + d2 - d1) / below if below else math.nan


def _extrapolated_step(before: Point, now: Point) -> float:
    """Return a longer step than ``now``: the minimum of the cubic, from 1.1 to 10 times as far."""
    minimum = _cubic(before, now)
    if not math.isfinite(minimum) or minimum <= now.step:
        return 2.0 * now.step if before.step == 0 else now.step + 2 * (now.step - before.step)
    return min(max(minimum, 1.1 * now.step), 10 * now.step)


def _interpolated_step(low: Point, high: Point) -> float:
    """Return a step between two points: the minimum of the cubic, at least a tenth of the way from both ends."""
    width = high.step - low.step
    minimum = _cubic(low, high) if math.isfinite(high.loss) else math.nan
    if not math.isfinite(minimum):
        return low.step + width / 2
    share = (minimum - low.step) / width
    return low.step + width * min(max(share, 0.1), 0.9)


@dataclass(frozen=True, slots=True)
class FixedPoint:
    """Sums of vectors as integers, which are the same bits in every order.

    Args:
        fraction_bits: Binary places after the point. A value is a 64-bit integer times ``2 ** -fraction_bits``.
        most: Number of vectors that are added at most.
    """

    fraction_bits: int
    most: int

    @classmethod
    def fitting(cls, peak: float, most: int) -> FixedPoint:
        """Return the number format for vectors whose values are usually at most ``peak``.

        Values may be 1,024 times as large.
        """
        exponent = math.frexp(peak)[1] if peak > 0 else 0
        return cls(52 - exponent - most.bit_length(), most)

    @property
    def limit(self) -> float:
        """The largest absolute value that a vector may have."""
        return math.ldexp(1.0, 62 - self.fraction_bits - self.most.bit_length())

    def of(self, vector: Array) -> Array:
        """Return a finite float64 vector as integers, with values of at most ``limit``."""
        return np.rint(np.ldexp(vector, self.fraction_bits)).astype(np.int64)

    def value(self, total: Array) -> Array:
        """Return a sum of integers as a float64 vector."""
        return np.ldexp(total.astype(np.float64), -self.fraction_bits)


def exact_mean(losses: Iterable[tuple[float, int]]) -> float:
    """Return the mean of losses, each of a number of samples, rounded once. NaN or infinity if one of them is."""
    total, samples = Fraction(0), 0
    for loss, count in losses:
        if not math.isfinite(loss):
            return loss
        total += Fraction(loss) * count
        samples += count
    return float(total / samples)
