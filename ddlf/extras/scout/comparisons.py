"""Compares other batch sizes, warm-ups and seeds at the chosen rate (``--also``). Pure: trials out, losses in.

All trials see the same number of samples as the longest trials of the search.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Literal

from ddlf.extras.scout.halving import Curve, Rung, Trial, rounded
from ddlf.extras.scout.verdict import AS_GOOD

Setting = Literal["batch", "warmup", "seed"]
COMPARED: tuple[Setting, ...] = ("batch", "warmup", "seed")
BATCHES = (0.5, 2.0, 4.0)
"""Batch sizes to try, in batches of the app."""
WARMUPS = (0.1, 0.3)
"""Lengths of a warm-up to try, in shares of a run."""
HIGHER = (1.0, 2.0, 4.0)
"""A warm-up may allow higher rates: these multiples of the chosen one are tried."""
SEEDS = 8
"""Seeds to try."""
NEAR = 0.1
"""A larger batch may add this share to the smallest loss, or this share of what the smallest one has learnt if it is less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """The losses with another batch size, warm-up or seed.

    Args:
        value: The batch size, the share of the warm-up, or the seed.
        rate: The learning rate.
        losses: The validation loss of each start; infinite if the trial diverged.
    """

    value: float
    rate: float
    losses: tuple[float, ...]

    @property
    def loss(self) -> float:
        """The mean loss; infinite if any trial diverged."""
        return math.fsum(self.losses) / len(self.losses) if all(map(math.isfinite, self.losses)) else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The answer about a batch size, a warm-up or the seed.

    Args:
        setting: The setting.
        present: The present value with its losses.
        variants: The other values.
        chosen: The value to use; ``present`` if no other is worth a change. No seed is.
        margin: A value wins if its loss is smaller than the present one by more than this: a tenth of what the present
            one has learnt.
        tolerance: A larger batch wins if its loss is above the smallest one by at most this.
    """

    setting: Setting
    present: Variant
    variants: tuple[Variant, ...]
    chosen: Variant
    margin: float = 0.0
    tolerance: float = 0.0


Tries = Generator[Sequence[Trial], Sequence[float], Comparison]


def compare(setting: Setting, curve: Curve, rate: float, rung: Rung, batch: int, seeds: Sequence[int]) -> Tries:
    """Compare other values of a setting at a rate.

    Args:
        setting: The setting.
        curve: The result of the search. The rate has losses of this rung.
        rate: The chosen rate.
        rung: The longest trials of the search.
        batch: The batch size of the app.
        seeds: The seed of each start.
    """
    point = curve.point_of(rate)
    assert point is not None
    starts = range(len(point.losses))
    first = math.fsum(curve.first[: len(starts)]) / len(starts)
    match setting:
        case "batch":
            sizes = sorted({max(1, round(batch * times)) for times in BATCHES} - {batch})
            pairs = [(float(size), scaled_rate) for size in sizes for scaled_rate in _rates(rate, size / batch)]
        case "warmup":
            pairs = [(share, rounded(rate * times)) for share in WARMUPS for times in HIGHER]
        case "seed":
            pairs = [(float(seed), rate) for seed in seeds]
    if setting == "seed":
        losses = yield [Trial(rate=rate, start=start, steps=rung.steps) for start in range(len(seeds))]
        variants = [
            Variant(value=value, rate=rate, losses=(loss,)) for (value, _), loss in zip(pairs, losses, strict=True)
        ]
        # Differences are chance, so the first seed stays.
        return Comparison(setting=setting, present=variants[0], variants=tuple(variants[1:]), chosen=variants[0])
    trials = [
        _trial(setting, value, pair_rate, start, rung.steps, batch) for value, pair_rate in pairs for start in starts
    ]
    losses = yield trials
    variants = [
        Variant(value=value, rate=pair_rate, losses=tuple(losses[index * len(starts) : (index + 1) * len(starts)]))
        for index, (value, pair_rate) in enumerate(pairs)
    ]
    present = Variant(value=float(batch) if setting == "batch" else 0.0, rate=rate, losses=point.losses)
    margin = AS_GOOD * max(first - present.loss, 0.0)
    better = [variant for variant in variants if present.loss - variant.loss > margin]
    least = min(variant.loss for variant in (present, *variants))
    tolerance = NEAR * max(min(first - least, abs(least)), 0.0)
    as_good = [
        variant
        for variant in variants
        if setting == "batch" and variant.value > batch and variant.loss - least <= tolerance
    ]
    chosen = present
    if as_good:  # it is as good with fewer steps
        chosen = min(as_good, key=lambda variant: (-variant.value, variant.loss))
    elif better:
        chosen = min(better, key=lambda variant: variant.loss)
    return Comparison(
        setting=setting, present=present, variants=tuple(variants), chosen=chosen, margin=margin, tolerance=tolerance
    )


def _rates(rate: float, times: float) -> list[float]:
    """Return the rates to try with a batch that is so many times as large: equal, by its root, and in proportion."""
    return sorted({rounded(rate), rounded(rate * math.sqrt(times)), rounded(rate * times)})


def _trial(setting: Setting, value: float, rate: float, start: int, steps: int, batch: int) -> Trial:
    if setting == "warmup":
        return Trial(rate=rate, start=start, steps=steps, warmup=value)
    return Trial(rate=rate, start=start, steps=max(1, round(steps * batch / value)), batch=int(value))
