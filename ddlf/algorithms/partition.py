"""Chooses the samples of each slot in a round. Runs on the master, which sends only the resulting indices."""

from collections.abc import Sequence
from fractions import Fraction
from math import isfinite
from typing import Any

import numpy as np
import numpy.typing as npt

from ddlf.errors import ConfigError

Indices = npt.NDArray[np.unsignedinteger[Any]]


def shuffled(n: int, seed: int, round: int) -> Indices:
    """Return the sample indices ``0 .. n-1`` in the order of one round.

    The order depends on the arguments only, so a resumed run has the same order as an uninterrupted run.

    Args:
        n: Number of samples, > 0.
        seed: Seed of the run, >= 0.
        round: Number of the round, >= 0. Rounds get independent orders.

    Returns:
        Shape ``(n,)``, in the smallest unsigned type that holds ``n - 1``, because the indices travel every round.

    Raises:
        ConfigError: An argument is out of range.

    Source:
        PCG64 seeded with ``SeedSequence([seed, round])``, which mixes both numbers, so that (1, 2) and (2, 1) differ.
    """
    if n <= 0:
        raise ConfigError(f"cannot shuffle {n} samples", hint="load a data set with at least one sample")
    if seed < 0 or round < 0:
        raise ConfigError(f"seed and round must not be negative, got seed {seed} and round {round}")
    indices = np.arange(n, dtype=np.min_scalar_type(n - 1))
    np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, round]))).shuffle(indices)
    return indices


def partition(indices: Indices, sizes: Sequence[int]) -> list[Indices]:
    """Cut ``indices`` into consecutive partitions of the given sizes: disjoint, complete, and views, not copies.

    Args:
        indices: Shape ``(n,)``, in the order of the round.
        sizes: Samples per slot, each > 0, together exactly ``n``.

    Returns:
        One view per slot, in slot order.

    Raises:
        ConfigError: A size is not positive, or the sizes do not add up to ``n``.
    """
    if any(size <= 0 for size in sizes):
        raise ConfigError(f"every slot needs at least one sample, got sizes {list(sizes)}")
    if sum(sizes) != len(indices):
        raise ConfigError(f"sizes add up to {sum(sizes)}, but there are {len(indices)} samples")
    ends = np.cumsum(sizes, dtype=np.int64)
    return [indices[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def equal_sizes(n: int, k: int) -> list[int]:
    """Return ``k`` partition sizes for ``n`` samples that differ by at most one; the first slots get the larger ones.

    Raises:
        ConfigError: There are no samples, no slots, or fewer samples than slots.
    """
    check_split(n, k)
    return [n // k + (slot < n % k) for slot in range(k)]


def sizes_by_speed(n: int, speeds: Sequence[float], minimum: int = 1) -> list[int]:
    """Return partition sizes proportional to measured speeds, so that all slots finish at the same time.

    Shares are rounded by the largest remainder: with ``q_j = n * speed_j / sum(speeds)``, slot ``j`` gets
    ``floor(q_j)``, and the samples still left go one each to the largest ``q_j - floor(q_j)``, ties to the lower slot.
    A slot whose share is below ``minimum`` gets ``minimum``, and the others share the rest in the same way. Exact
    fractions are used, hence the same speeds give the same sizes on every machine.

    Args:
        n: Number of samples.
        speeds: Samples per second of each slot, each finite and > 0.
        minimum: Least samples per slot, > 0.

    Returns:
        One size per slot; together exactly ``n``.

    Raises:
        ConfigError: There are too few samples, or a speed or ``minimum`` is out of range.
    """
    check_split(n, len(speeds), minimum)
    if not all(isfinite(speed) and speed > 0 for speed in speeds):
        raise ConfigError(f"speeds must be finite and > 0 samples/s, got {list(speeds)}")
    sizes = [minimum] * len(speeds)
    sharing = {slot: Fraction(float(speed)) for slot, speed in enumerate(speeds)}
    while True:
        free = n - minimum * (len(speeds) - len(sharing))
        total = sum(sharing.values())
        shares = {slot: free * speed / total for slot, speed in sharing.items()}
        large = {slot: speed for slot, speed in sharing.items() if shares[slot] >= minimum}
        if len(large) == len(sharing):
            break
        sharing = large
    for slot, share in shares.items():
        sizes[slot] = int(share)
    by_remainder = sorted(shares, key=lambda slot: (int(shares[slot]) - shares[slot], slot))
    for slot in by_remainder[: n - sum(sizes)]:
        sizes[slot] += 1
    return sizes


def steps_by_speed(steps: int, speeds: Sequence[float | None]) -> list[int]:
    """Return steps of local training in proportion to speeds, so that the rounds of all slots take equally long::

        H_j = max(1, floor(H v_j / max(v)))

    Exact fractions are used, hence the same speeds give the same steps on every machine.

    Args:
        steps: H, the number of steps of the fastest slot, > 0.
        speeds: ``v_j`` of each slot, in any unit, finite and > 0; None if it is not known yet: such a slot makes H
            steps.

    Raises:
        ConfigError: A value is out of range.

    Source:
        Dynamic local updates (DyLU), Liu et al. 2024, arXiv:2401.09135.
    """
    known_speeds = [speed for speed in speeds if speed is not None]
    if steps <= 0 or not all(isfinite(speed) and speed > 0 for speed in known_speeds):
        raise ConfigError(f"steps and speeds must be finite and > 0, got {steps} and {known_speeds}")
    fastest = Fraction(max(known_speeds, default=1.0))
    return [steps if speed is None else max(1, int(steps * Fraction(speed) / fastest)) for speed in speeds]


def smooth_speed(old: float | None, new: float, alpha: float = 0.5) -> float:
    """Return ``alpha * new + (1 - alpha) * old``, so that a single slow round hardly changes the sizes.

    Args:
        old: Smoothed speed so far in samples/s, or None before the first measurement. The result is then ``new``.
        new: Measured speed in samples/s.
        alpha: Weight of the new measurement, in (0, 1].

    Raises:
        ConfigError: ``alpha`` is out of range.
    """
    if not 0 < alpha <= 1:
        raise ConfigError(f"alpha must be in (0, 1], got {alpha}")
    return new if old is None else alpha * new + (1 - alpha) * old


def check_split(n: int, k: int, minimum: int = 1) -> None:
    """Raise ConfigError if ``n`` samples are too few to give each of ``k`` slots at least ``minimum``."""
    if n <= 0:
        raise ConfigError(f"cannot split {n} samples", hint="load a data set with at least one sample")
    if k <= 0:
        raise ConfigError(f"cannot split samples over {k} slots", hint="train with at least one slot")
    if minimum <= 0:
        raise ConfigError(f"minimum must be > 0 samples, got {minimum}")
    if n < k:
        raise ConfigError(f"{n} samples cannot be split over {k} slots", hint=f"train with at most {n} slots")
    if n < k * minimum:
        raise ConfigError(f"{n} samples cannot be split over {k} slots with at least {minimum} each")
