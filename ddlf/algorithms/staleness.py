"""How much an asynchronous update counts when the weights moved on meanwhile. Runs on the master.

``tau``, the staleness, is the number of merges applied between reading the weights and applying the update made from
them: 0 when nobody else came in between. Each value here maps ``tau`` to a factor in (0, 1] that scales **one** update;
it must never be multiplied into a lasting rate, which would then decay to zero over the rounds.
"""

from dataclasses import dataclass
from math import isfinite
from typing import Protocol

from ddlf.errors import ConfigError


class Staleness(Protocol):
    """What every rule in this file is: staleness in applied merges -> factor on the update."""

    def __call__(self, tau: int) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """Count every update in full: ``s(tau) = 1``.

    Source:
        Phan, Do 2023, Algorithm 3; FedAsync's "constant" (arXiv:1903.03934).
    """

    def __call__(self, tau: int) -> float:
        _check(tau)
        return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Inverse:
    """Divide by the staleness: ``s(tau) = 1 / max(1, tau)``.

    Source:
        Zhang et al. 2016, staleness-aware async-SGD, arXiv:1511.05950.
    """

    def __call__(self, tau: int) -> float:
        _check(tau)
        return 1.0 / max(1, tau)


@dataclass(frozen=True, slots=True, kw_only=True)
class Polynomial:
    """Shrink with a power of the staleness: ``s(tau) = (1 + tau) ** -exponent``.

    Args:
        exponent: >= 0; 0 counts every update in full.

    Raises:
        ConfigError: ``exponent`` is out of range.

    Source:
        FedAsync, arXiv:1903.03934; FedBuff, arXiv:2106.06639.
    """

    exponent: float = 0.5

    def __post_init__(self) -> None:
        if not (isfinite(self.exponent) and self.exponent >= 0):
            raise ConfigError(f"exponent must be finite and >= 0, got {self.exponent}")

    def __call__(self, tau: int) -> float:
        _check(tau)
        return float((1.0 + tau) ** -self.exponent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hinge:
    """Count fresh updates in full: ``s(tau) = 1`` up to ``cutoff``, then ``1 / (slope * (tau - cutoff) + 1)``.

    Args:
        slope: How fast the factor falls behind the cutoff, > 0.
        cutoff: Largest staleness, in applied merges, that counts in full, >= 0.

    Raises:
        ConfigError: A value is out of range.

    Source:
        FedAsync, arXiv:1903.03934.
    """

    slope: float = 10.0
    cutoff: int = 4

    def __post_init__(self) -> None:
        if not (isfinite(self.slope) and self.slope > 0):
            raise ConfigError(f"slope must be finite and > 0, got {self.slope}")
        if self.cutoff < 0:
            raise ConfigError(f"cutoff must be >= 0 merges, got {self.cutoff}")

    def __call__(self, tau: int) -> float:
        _check(tau)
        return 1.0 if tau <= self.cutoff else 1.0 / (self.slope * (tau - self.cutoff) + 1.0)


def _check(tau: int) -> None:
    """A negative staleness means that versions were confused, which must not turn into a factor above 1."""
    if tau < 0:
        raise ConfigError(f"staleness must be >= 0 applied merges, got {tau}")
