"""The values of the setting ``rate_decay``: rules that lower the learning rate after validations.

Runs on the master.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean
from typing import Protocol

from ddlf.algorithms.rule_text import Family, Named
from ddlf.errors import ConfigError


class RateDecay(Protocol):
    """Base of all rate-decay rules: each lowers the learning rate after validations."""

    def rate(self, first: float, accuracies: Sequence[float], losses: Sequence[float]) -> float:
        """Return a limit for the learning rate: it replaces a larger rate, unless it is 0 or less.

        Args:
            first: Learning rate at the beginning, above 0.
            accuracies: Accuracy of each validation so far, in [0, 1]; one or more.
            losses: Loss of each validation so far.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Never(Named):
    """Leave the learning rate to the optimizer and to callbacks."""

    def rate(self, first: float, accuracies: Sequence[float], losses: Sequence[float]) -> float:
        return first


@dataclass(frozen=True, slots=True, kw_only=True)
class WebNN(Named):
    """Lower the learning rate as validation becomes better: ``r <- min(r, r_0 ** power * (1 - A ** (L * t)))``.

    ``A`` and ``L`` are the means of accuracy and loss in the last validations, ``t`` the number of validations before
    the newest, and ``r_0`` the rate at the beginning. A factor of 0 or less does not change the rate: the first
    validation, and ``A = 1``.

    The authors' code has ``power`` 2. With ``r_0`` below 1 the rate then drops by ``r_0`` at the second validation:
    0.01 becomes 0.0001. With power 1 the rate depends on accuracy and loss alone. With fewer than ``last``
    validations the authors' code still divides by ``last``; here the mean is over the existing validations.

    Args:
        power: Power of the first rate, above 0.
        last: Validations to take the means of, 1 or more.

    Raises:
        ConfigError: A value is out of range.

    Source:
        Goin, Cotton, Zhao 2018, WebNN, by its code (``learning_decay``).
    """

    power: float = 2.0
    last: int = 5

    def __post_init__(self) -> None:
        if not (isfinite(self.power) and self.power > 0) or self.last < 1:
            raise ConfigError(f"power must be finite and > 0, and last 1 or more, got {self.power} and {self.last}")

    def rate(self, first: float, accuracies: Sequence[float], losses: Sequence[float]) -> float:
        accuracy, loss = fmean(accuracies[-self.last :]), fmean(losses[-self.last :])
        return float(first**self.power * (1 - accuracy ** max(0.0, loss * (len(losses) - 1))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plateau(Named):
    """Multiply the learning rate by ``factor`` when the loss has not fallen for ``patience`` epochs: Keras's ``ReduceLROnPlateau``.

    The rule uses the validation loss, merged over all slots; without validation data it uses the training loss.

    Args:
        factor: Factor of the learning rate, in (0, 1).
        patience: Number of epochs without a lower loss, 1 or more.
        delta: Smallest decrease that counts as a lower loss, >= 0.
        cooldown: Number of epochs after a decrease of the rate that do not count, >= 0.
        least: Lowest learning rate, >= 0.

    Raises:
        ConfigError: A value is out of range.
    """

    factor: float = 0.1
    patience: int = 10
    delta: float = 1e-4
    cooldown: int = 0
    least: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.factor < 1 or self.patience < 1:
            raise ConfigError(
                f"factor must be between 0 and 1, and patience 1 or more, got {self.factor} and {self.patience}"
            )
        bounds = self.delta, self.cooldown, self.least
        if not (all(map(isfinite, bounds)) and min(bounds) >= 0):
            raise ConfigError(
                f"delta, cooldown and least must be 0 or more, got {bounds[0]}, {bounds[1]} and {bounds[2]}"
            )


RATE_DECAY: Family[RateDecay | Plateau] = Family(
    "decay of the learning rate", never=Never, webnn=WebNN, plateau=Plateau
)
"""Every decay of the learning rate by name."""
