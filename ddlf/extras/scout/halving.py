"""Successive halving over learning rates. Pure: trials out, losses in.

All rates begin with one short trial. After each rung the better half of the rates continues with longer trials from
more starts. A trial always begins at the first step, so its loss depends only on its rate, start and length. It depends
neither on the worker nor on earlier trials.

Source: Jamieson and Talwalkar, arXiv:1502.07943; Li et al., Hyperband, arXiv:1603.06560. Their trials continue, ours
begin again, which costs at most as much again.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

from ddlf.errors import ConfigError

PER_DECADE = 2
"""Rates in a decade of the first grid."""
LEAST_KEPT = 3
"""Rates that continue, even if half of them are fewer: one alone has no neighbours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A short training from a start.

    Args:
        rate: The learning rate; of a schedule, its highest value.
        start: The number of the start, from 0: first weights and the order of samples.
        steps: The number of steps; 0 only evaluates the first weights.
        batch: Samples in a batch; 0 for the batch size of the app.
        warmup: The share of the steps in which the rate rises from 0.
    """

    rate: float
    start: int
    steps: int
    batch: int = 0
    warmup: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """Trials of one length.

    Args:
        steps: Steps of each trial.
        starts: The number of starts of each rate.
    """

    steps: int
    starts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The losses of a rate after its longest trials.

    Args:
        rate: The learning rate.
        steps: Steps of these trials.
        losses: The validation loss of each start. It is infinite if the trial diverged.
        least: The smallest mean loss of all rates in the same rung.
    """

    rate: float
    steps: int
    losses: tuple[float, ...]
    least: float = math.inf

    @property
    def loss(self) -> float:
        """The mean loss; infinite if any trial diverged."""
        return math.fsum(self.losses) / len(self.losses) if all(map(math.isfinite, self.losses)) else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The losses of all rates.

    Args:
        first: The loss of each start before training.
        points: The point of each rate, by rising rate.
    """

    first: tuple[float, ...]
    points: tuple[Point, ...]

    def point_of(self, rate: float) -> Point | None:
        """Return the point of a rate; None without trials."""
        return next((point for point in self.points if point.rate == rate), None)

    def restricted_to(self, low: float, high: float) -> Curve:
        """Return the curve of the rates between two bounds."""
        return replace(self, points=tuple(point for point in self.points if low <= point.rate <= high))

    @property
    def longest(self) -> tuple[Point, ...]:
        """The points with the longest trials, from the most starts. Only losses from the same starts can be compared."""
        most = max((point.steps, len(point.losses)) for point in self.points)
        return tuple(point for point in self.points if (point.steps, len(point.losses)) == most)


Search = Generator[Sequence[Trial], Sequence[float], Curve]
"""Yields trials, receives their losses in the same order, and returns the curve."""


def grid(low: float, high: float) -> list[float]:
    """Return the rates of the first rung, from the lowest to the highest, about equally far apart in logarithms.

    Raises:
        ConfigError: A bound is not above 0, or the bounds do not leave two rates.
    """
    if not (math.isfinite(low) and math.isfinite(high) and low > 0 and high > 0):
        raise ConfigError(f"learning rates must be above 0, got bounds {low:g} and {high:g}")
    if low == high:
        raise ConfigError(
            f"both bounds are {low:g}, and one rate leaves nothing to compare", hint="search between --from and --to"
        )
    if low > high:
        raise ConfigError(
            f"the lower bound {low:g} is above the upper bound {high:g}", hint=f"--from {high:g} --to {low:g}"
        )
    count = max(2, round(PER_DECADE * math.log10(high / low)) + 1)
    rates = sorted({rounded(low * (high / low) ** (index / (count - 1))) for index in range(count)})
    if len(rates) < 2:
        raise ConfigError(
            f"between {low:g} and {high:g} there is only the rate {rates[0]:g}, because more than two digits mean "
            "nothing",
            hint="search between bounds that are farther apart",
        )
    return rates


def rounded(rate: float) -> float:
    """Return a rate with two digits, because more mean nothing."""
    return float(f"{rate:.1e}")


def rungs(steps: int, rates: int, longest: int) -> list[Rung]:
    """Return the rungs of a search that has about so many steps altogether.

    Args:
        steps: Steps of all trials together.
        rates: Rates of the first rung.
        longest: The most steps of a trial, such as the steps of the whole run.
    """
    shape = (Rung(steps=1, starts=1), Rung(steps=2, starts=2), Rung(steps=4, starts=STARTS))
    unit = max(1, round(steps / steps_of(shape, rates)))
    return [Rung(steps=max(1, min(rung.steps * unit, longest)), starts=rung.starts) for rung in shape]


STARTS = 3
"""The starts of the last rung."""


def steps_of(shape: Sequence[Rung], rates: int) -> int:
    """Return the steps of a search whose rungs have this shape, with half and double of the best rate."""
    total = 0
    for rung in shape:
        total += rates * rung.steps * rung.starts
        rates = _kept_count(rates) + 1  # the own rate always continues
    return total + 2 * shape[-1].steps * shape[-1].starts


def _kept_count(rates: int) -> int:
    return max(LEAST_KEPT, (rates + 1) // 2)


def search(
    rates: Sequence[float], own_rate: float | None, ladder: Sequence[Rung], low: float = 0.0, high: float = math.inf
) -> Search:
    """Search the rate with the smallest loss. The search ends early if each rate between the bounds diverges.

    Args:
        rates: The rates of the first rung.
        own_rate: The user's rate, which gets the longest trials whatever its loss is; None if there is none.
        ladder: The rungs.
        low: The lowest rate that can be the answer. The user's rate may be below it.
        high: The highest one.
    """
    starts = max(rung.starts for rung in ladder)
    first = yield [Trial(rate=0.0, start=start, steps=0) for start in range(starts)]
    points: dict[float, Point] = {}
    alive = sorted({*rates, *([] if own_rate is None else [own_rate])})
    for number, rung in enumerate(ladder):
        yield from _measure(alive, rung, points)
        if number + 1 < len(ladder):
            best = sorted(alive, key=lambda rate: (points[rate].loss, rate))
            healthy = [rate for rate in best[: _kept_count(len(alive))] if math.isfinite(points[rate].loss)]
            alive = sorted({*healthy, *([] if own_rate is None or not healthy else [own_rate])})
        if not any(math.isfinite(points[rate].loss) for rate in alive if low <= rate <= high):
            break
    return Curve(first=tuple(first), points=tuple(points[rate] for rate in sorted(points)))


def measure_neighbours(curve: Curve, rate: float, rung: Rung, low: float = 0.0, high: float = math.inf) -> Search:
    """Measure half and double of a rate, and return the curve with them.

    A rate that has trials of this rung or is not between ``low`` and ``high`` is not measured.
    """
    points = {point.rate: point for point in curve.points}
    missing_rates = [
        neighbour
        for neighbour in (rounded(rate / 2), rounded(rate * 2))
        if low <= neighbour <= high
        and (
            neighbour not in points
            or points[neighbour].steps < rung.steps
            or len(points[neighbour].losses) < rung.starts
        )
    ]
    if missing_rates:
        yield from _measure(missing_rates, rung, points)
    return Curve(first=curve.first, points=tuple(points[measured_rate] for measured_rate in sorted(points)))


def _measure(
    rates: Sequence[float], rung: Rung, points: dict[float, Point]
) -> Generator[Sequence[Trial], Sequence[float], None]:
    """Measure the trials of a rung, and put the points of its rates into ``points``."""
    trials = [Trial(rate=rate, start=start, steps=rung.steps) for rate in rates for start in range(rung.starts)]
    losses = [*map(_loss, (yield trials))]
    measured = [
        Point(rate=rate, steps=rung.steps, losses=tuple(losses[index * rung.starts : (index + 1) * rung.starts]))
        for index, rate in enumerate(rates)
    ]
    least = min(point.loss for point in measured)
    points.update({point.rate: replace(point, least=least) for point in measured})


def _loss(loss: float) -> float:
    return float(loss) if math.isfinite(loss) else math.inf
