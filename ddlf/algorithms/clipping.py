"""The values of the setting ``clip``: rules that clip gradients. Runs on master and workers, without Keras.

``ddlf.extras.stabilisers`` contains the optimizers that clip. Each formula has an argument ``xp``: the module whose
functions it calls, NumPy or ``keras.ops``.
"""

from dataclasses import dataclass
from math import isfinite
from typing import Any

from ddlf.algorithms.rule_text import Family, Named
from ddlf.errors import ConfigError

TINY = 1e-6
"""Added to the norm before the division."""
LEAST_NORM = 1e-3
"""Lower bound of the norm of weights: without it, weights that begin with zeros could not change (arXiv:2102.06171)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rolling(Named):
    """Clip a gradient whose norm is much larger than the recent norms.

    ``G`` is the norm of all gradients of a batch together. At the first batch ``mu = G`` and ``sigma = 0``. Then::

        mu <- decay mu + (1 - decay) G;  sigma <- decay sigma + (1 - decay) |G - mu|
        T = mu + k sigma,  k = first for ``warm`` batches, then later;  g <- g T / (G + 1e-6) if G > T

    A batch with a norm that is not finite does not change ``mu`` and ``sigma``.

    Args:
        decay: Share of the previous ``mu`` and ``sigma`` to keep at each batch, in [0, 1).
        first: ``k`` of the first ``warm`` batches, >= 0.
        later: ``k`` of all later batches, >= 0.
        warm: Number of batches that use ``first``, >= 0.
    """

    decay: float = 0.9
    first: float = 4.0
    later: float = 2.0
    warm: int = 15

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ConfigError(f"decay must be at least 0 and below 1, got {self.decay}")
        if not (isfinite(self.first) and isfinite(self.later) and min(self.first, self.later) >= 0) or self.warm < 0:
            raise ConfigError(
                f"first, later and warm must be 0 or more, got {self.first}, {self.later} and {self.warm}"
            )

    def observe(self, norm: Any, mean: Any, spread: Any, count: Any, xp: Any) -> tuple[Any, Any, Any]:
        """Update the running mean and spread of gradient norms by the norm of a batch.

        Args:
            norm: G, the norm of this batch.
            mean: ``mu`` before this batch.
            spread: ``sigma`` before this batch.
            count: Number of earlier batches.
            xp: Module of the functions: ``numpy`` or ``keras.ops``.

        Returns:
            The new ``mu``, the new ``sigma``, and the threshold ``T``.
        """
        is_first = count == 0
        mean = xp.where(is_first, norm, self.decay * mean + (1 - self.decay) * norm)
        spread = xp.where(is_first, 0.0 * norm, self.decay * spread + (1 - self.decay) * xp.abs(norm - mean))
        return mean, spread, mean + xp.where(count < self.warm, self.first, self.later) * spread

    @staticmethod
    def factor(norm: Any, most: Any, xp: Any) -> Any:
        """Return the factor that scales a gradient with this norm down to the threshold T, ``most``."""
        return xp.where(norm > most, most / (norm + TINY), xp.ones_like(norm))


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptive(Named):
    """Clip the gradient of each unit by its weights: ``g <- g t / |g|`` if ``|g| > t = share max(|w|, 1e-3)``.

    The last layer is not clipped.

    Args:
        share: Largest norm of a unit's gradient as a share of the norm of its weights (the source's lambda), > 0.

    Source:
        Brock et al. 2021, arXiv:2102.06171 (AGC).
    """

    share: float = 0.01

    def __post_init__(self) -> None:
        if not (isfinite(self.share) and self.share > 0):
            raise ConfigError(f"share must be finite and > 0, got {self.share}")

    def factor(self, gradient: Any, weight: Any, xp: Any) -> Any:
        """Return the factor that clips each unit's gradient, in a shape that broadcasts to the gradient's shape.

        A unit consists of all weights with the same index on the last axis. A vector or a number is one unit, like in
        the authors' code.
        """
        axes = tuple(range(len(weight.shape) - 1)) if sum(size > 1 for size in weight.shape) > 1 else None
        size, most = (
            xp.sqrt(xp.sum(xp.square(tensor), axis=axes, keepdims=axes is not None)) for tensor in (gradient, weight)
        )
        most = self.share * xp.maximum(most, LEAST_NORM)
        return xp.where(size > most, most / xp.maximum(size, TINY), xp.ones_like(size))


CLIP: Family[Any] = Family("clip", rolling=Rolling, agc=Adaptive)
"""Every way to clip by name."""
