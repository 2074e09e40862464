"""Picks the learning rate from the losses of trials, and says which other rates are as good. Pure.

A trial is shorter than the run, which favours high rates. So the answer is not the rate with the smallest loss. It is in
the middle between that rate and the lowest one whose loss is nearly as small. ``docs/LAB.md`` compares this rule with
others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from ddlf.extras.scout.halving import Curve, Point

AS_GOOD = 0.1
"""A rate is as good as the best one if it loses at most this share of what the best one has learnt."""
LEAST_SAMPLES = round(2 / AS_GOOD)
"""With fewer samples to compare rates, one sample has half the weight of the share that decides, or more."""
LEAST_STEPS = 10
"""Shorter trials do not compare rates, except if the run is as short."""
SURE = 2.0
"""The loss must fall by so many standard errors of its starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer of a search.

    Args:
        rate: The learning rate to use.
        best: The rate with the smallest mean loss.
        low: The lower end of the interval of rates that are as good, around ``best``.
        high: Its upper end.
        own_rate: The user's rate; None if there is none.
        keeps: Whether the user's rate is as good and not above ``best``, so that it should stay.
    """

    rate: float
    best: float
    low: float
    high: float
    own_rate: float | None
    keeps: bool


def best_of(curve: Curve) -> float:
    """Return the rate with the smallest mean loss after the longest trials; the lowest of equal ones."""
    return min(curve.longest, key=lambda point: (point.loss, point.rate)).rate


def judged(curve: Curve, own_rate: float | None) -> Verdict:
    """Return the answer from the losses of all trials. At least one trial must have a finite loss."""
    best = best_of(curve)
    flat = interval(curve, best)
    middle = _middle([point.rate for point in flat if point in curve.longest and point.rate <= best])
    keeps = own_rate is not None and own_rate <= best and any(point.rate == own_rate for point in flat)
    return Verdict(
        rate=own_rate if keeps and own_rate is not None else middle,
        best=best,
        low=flat[0].rate,
        high=flat[-1].rate,
        own_rate=own_rate,
        keeps=keeps,
    )


def _middle(rates: Sequence[float]) -> float:
    """Return the rate nearest to the middle between the first and the last one, in logarithms. The higher one of two is taken."""
    middle = math.log(rates[0] * rates[-1]) / 2

    def distance(rate: float) -> float:
        return round(abs(math.log(rate) - middle), 6)

    return min(rates, key=lambda rate: (distance(rate), -rate))


def doubt(curve: Curve, samples: int, run_steps: int) -> str:
    """Return why the losses do not decide about a rate, and what to do; "" if they do.

    Args:
        curve: The losses of all rates.
        samples: The samples of the validation loss.
        run_steps: The steps of the run.
    """
    best = next(point for point in curve.longest if point.rate == best_of(curve))
    if samples < LEAST_SAMPLES:
        return (
            f"only {samples} sample{'s' * (samples != 1)} compare{'s' * (samples == 1)} the rates, and {LEAST_SAMPLES} are "
            "the least: set x_val and y_val"
        )
    if best.steps < (least := min(LEAST_STEPS, run_steps)):
        return (
            f"the longest trials have {best.steps} step{'s' * (best.steps != 1)}, and {least} are the least: search with "
            "more --steps"
        )
    fell = [before - after for before, after in zip(curve.first, best.losses, strict=False)]
    if len(fell) > 1 and fmean(fell) < SURE * stdev(fell) / math.sqrt(len(fell)):
        return (
            f"from {len(fell)} starts, the loss fell by {fmean(fell):.2g} with a standard deviation of {stdev(fell):.2g}: "
            "search with more --steps"
        )
    return ""


def interval(curve: Curve, rate: float) -> list[Point]:
    """Return the points around a rate, without gaps, that are as good as the best rate.

    A rate that left the search earlier is compared with the best rate of trials of the same length.
    """
    index = [point.rate for point in curve.points].index(rate)
    low, high = index, index
    while low > 0 and as_good(curve, curve.points[low - 1]):
        low -= 1
    while high + 1 < len(curve.points) and as_good(curve, curve.points[high + 1]):
        high += 1
    return list(curve.points[low : high + 1])


def as_good(curve: Curve, point: Point) -> bool:
    """Return whether a rate is as good as the best one with trials of this length."""
    if not math.isfinite(point.loss):
        return False
    least = min(other.loss for other in curve.longest) if point in curve.longest else point.least
    return cost(curve, point, least) <= AS_GOOD


def cost(curve: Curve, point: Point, least: float) -> float:
    """Return what a rate loses against the smallest loss, as a share of what the rate with this loss has learnt."""
    first = math.fsum(curve.first[: len(point.losses)]) / len(point.losses)
    learnt, excess = first - least, point.loss - least
    if excess <= 0:
        return 0.0
    return excess / learnt if learnt > 0 else math.inf
