"""The values of the setting ``converge``: rules that end training early. Runs on the master."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Protocol

from ddlf.algorithms.rule_text import Family, Named
from ddlf.errors import ConfigError

FALLING = (
    *("loss", "error", "mae", "mse", "mape", "msle", "crossentropy"),
    *("divergence", "hinge", "huber", "cosh", "poisson", "perplexity"),
)
"""Parts of names of metrics whose small values are good."""


class Convergence(Protocol):
    """Base of all convergence rules: each says when training can end early."""

    @property
    def metric(self) -> str:
        """Name of the metric that the rule uses; "" if it uses none."""

    @property
    def last(self) -> int:
        """Number of latest values of the metric that the rule uses."""

    def reached(self, values: Sequence[float]) -> bool:
        """Return whether training can stop.

        Args:
            values: The latest values of the metric, at most ``last`` of them.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Never(Named):
    """Train all epochs, unless ``is_convergent`` of the app says otherwise."""

    @property
    def metric(self) -> str:
        return ""

    @property
    def last(self) -> int:
        return 0

    def reached(self, values: Sequence[float]) -> bool:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Target(Named):
    """Stop when the mean of the last values of a metric reaches a target.

    The mean of a loss or an error (``mae``, ``mse``, a crossentropy) must be at most ``value``, and the mean of any
    other metric at least ``value``. Only rounds with this metric count: ``val_accuracy`` needs ``x_val``, and
    ``test_accuracy`` needs ``evaluate_every``.

    Args:
        metric: Name, as in ``history``.
        value: Target, in units of the metric.
        last: Number of values in the mean, 1 to 1,000,000. With fewer values the target is not reached.

    Raises:
        ConfigError: A value is out of range.

    Source:
        Goin, Cotton, Zhao 2018, WebNN: the mean of the last 5 validations.
    """

    metric: str = "val_accuracy"
    value: float = 0.97
    last: int = 5

    def __post_init__(self) -> None:
        if not self.metric or not isfinite(self.value) or not 1 <= self.last <= 1_000_000:
            raise ConfigError(
                f"a target needs a metric, a finite value and last from 1 to 1,000,000, got {self.metric!r}, {self.value} and {self.last}"
            )
        if self.metric.replace(".", "", 1).isdigit():
            raise ConfigError(f"a target begins with the name of its metric, got {self.metric}")

    def reached(self, values: Sequence[float]) -> bool:
        if len(values) < self.last:
            return False
        mean = sum(values) / len(values)
        return mean <= self.value if any(part in self.metric for part in FALLING) else mean >= self.value


CONVERGE: Family[Convergence] = Family("convergence", never=Never, target=Target)
"""Every rule of convergence by name."""
