"""Epsilon of each member of a run, from the releases that its data took part in. Runs on the master and on a server of peers.

A member is a peer or a private worker. A release leaves a run with noise. It is a sum of clipped updates, or the steps of
local training whose gradients are clipped sample by sample. Pure, except for the import of dp-accounting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite, log, sqrt
from typing import Any

from ddlf.errors import ConfigError

DELTA = 1e-5
"""The usual delta of a stated epsilon."""
LARGE = 200.0
"""An epsilon above this promises nothing. Its loss distributions could take gigabytes, so a simple bound is enough."""
ORDERS = (*range(2, 65), 128, 256)
"""Orders of Renyi differential privacy for this bound. Whole ones have a finite sum each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """The noise of a release, as it protects one member of it.

    Args:
        multiplier: Standard deviation of the Gaussian noise on the sum, in units of the clip norm: ``z``.
        sampled: Probability of each sample to be in a Poisson batch. 1 means that every release contains the member: so it is for
            peers that come when they like.

    Raises:
        ConfigError: A value is invalid.
    """

    multiplier: float
    sampled: float = 1.0

    def __post_init__(self) -> None:
        if not (isfinite(self.multiplier) and self.multiplier > 0):
            raise ConfigError(f"a noise multiplier must be finite and above 0, got {self.multiplier}")
        if not 0 < self.sampled <= 1:
            raise ConfigError(f"the probability of a sample must be above 0 and at most 1, got {self.sampled}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of a release for its members.

    Args:
        members: The members whose data are in it, by name.
        noise: Its noise.
        steps: Number of noisy sums in it: 1 for a sum of updates, the number of batches for steps of local training.

    Raises:
        ConfigError: There is no step.
    """

    members: tuple[str, ...]
    noise: Noise
    steps: int = 1

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"a release has one or more steps, got {self.steps}")


class Accountant:
    """Counts releases, and computes the epsilon of each member.

    Args:
        delta: The probability that epsilon does not hold, above 0 and below 1.
        releases: Releases that have already left.

    Raises:
        ConfigError: Delta is invalid.
    """

    def __init__(self, delta: float = DELTA, releases: Iterable[Cost] = ()) -> None:
        check_delta(delta)
        self.delta = delta
        self.releases = 0
        self._steps: dict[str, Counter[Noise]] = {}
        for release in releases:
            self.add(release)

    def add(self, release: Cost) -> None:
        """Count a release."""
        self.releases += 1
        for member in release.members:
            self._steps.setdefault(member, Counter())[release.noise] += release.steps

    def members(self) -> list[str]:
        """Return all members that were in a release, in the order of their first one."""
        return list(self._steps)

    def epsilon(self, member: str) -> float:
        """Return the epsilon of a member; 0 before its first release."""
        return epsilon(self._steps.get(member, {}), self.delta)

    def epsilons(self) -> dict[str, float]:
        """Return the epsilon of each member that was in a release."""
        return {member: self.epsilon(member) for member in self._steps}

    def worst(self) -> float:
        """Return the largest epsilon; 0 before the first release."""
        return max(self.epsilons().values(), default=0.0)

    def after(self, release: Cost) -> float:
        """Return the largest epsilon that the members of a release would have after it."""
        values = (
            epsilon(self._steps.get(member, Counter()) + Counter({release.noise: release.steps}), self.delta)
            for member in set(release.members)
        )
        return max(values, default=0.0)


def epsilon(steps: Mapping[Noise, int], delta: float) -> float:
    """Return the epsilon after a number of steps of each noise, for adding or removing one protected unit.

    Gaussian noise without sampling composes to one Gaussian mechanism with ``1 / z^2 = sum n_i / z_i^2``, whose epsilon is
    exact (Balle and Wang 2018, arXiv:1805.06530). Steps on Poisson batches are composed by privacy loss distributions
    (Koskela et al. 2020, arXiv:1906.03049), whose epsilon is an upper bound. Above ``LARGE``, epsilon is the smaller of two simpler
    upper bounds: Renyi differential privacy (Mironov et al. 2019, arXiv:1908.10530), and ``rho + 2 sqrt(rho ln(1 / delta))``
    with ``rho = sum n_i / z_i^2 / 2``, without coins (Bun and Steinke 2016, arXiv:1605.02065). dp-accounting computes all others.

    Raises:
        ConfigError: dp-accounting is not installed.
    """
    return _epsilon(frozenset((noise, count) for noise, count in steps.items() if count), delta)


@lru_cache(maxsize=4096)
def _epsilon(steps: Collection[tuple[Noise, int]], delta: float) -> float:
    if not steps:
        return 0.0
    accounting = dp_accounting()
    inverse_variance = sum(count / noise.multiplier**2 for noise, count in steps if noise.sampled == 1)
    sampled = [(noise, count) for noise, count in steps if noise.sampled < 1]
    if not sampled:
        return float(accounting.get_epsilon_gaussian(1 / sqrt(inverse_variance), delta))
    renyi, accountant = accounting.rdp.RdpAccountant(ORDERS), accounting.pld.PLDAccountant()
    events = [(accounting.GaussianDpEvent(1 / sqrt(inverse_variance)), 1)] if inverse_variance else []
    for noise, count in sampled:
        events.append(
            (accounting.PoissonSampledDpEvent(noise.sampled, accounting.GaussianDpEvent(noise.multiplier)), count)
        )
    for event, count in events:
        renyi.compose(event, count)
    rho = sum(count / noise.multiplier**2 for noise, count in steps) / 2
    bound = min(renyi.get_epsilon(delta), rho + 2 * sqrt(rho * log(1 / delta)))
    if bound > LARGE:
        return float(bound)
    for event, count in events:
        accountant.compose(event, count)
    return float(accountant.get_epsilon(delta))


def check_delta(delta: float, units: int | None = None) -> None:
    """Refuse a delta that protects nobody.

    Args:
        delta: The value.
        units: Number of protected units, if it is known. A mechanism that publishes one unit at random has ``delta = 1 /
            units``, so delta must be smaller.

    Raises:
        ConfigError: Delta is 0 or less, 1 or more, or not below ``1 / units``.
    """
    if not 0 < delta < 1:
        raise ConfigError(f"delta must be above 0 and below 1, got {delta}", hint=f"the usual value is {DELTA:g}")
    if units is not None and delta * units >= 1:
        raise ConfigError(
            f"delta = {delta:g} would let a run publish the data of one of {units:,}",
            hint=f"use less than {1 / units:.1g}",
        )


def check_budget(budget: float | None) -> None:
    """Refuse an impossible privacy budget.

    Raises:
        ConfigError: It is not finite, or not above 0.
    """
    if budget is not None and not (isfinite(budget) and budget > 0):
        raise ConfigError(
            f"privacy_budget must be a finite epsilon above 0, got {budget}", hint="leave it out for no limit"
        )


def dp_accounting() -> Any:
    """Import dp-accounting, which takes a second, and return it.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import dp_accounting
    except ImportError:
        raise ConfigError(
            "epsilon is computed by dp-accounting, which is not installed", hint="pip install 'ddlf[privacy]'"
        ) from None
    return dp_accounting
