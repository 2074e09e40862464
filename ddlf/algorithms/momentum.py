"""Outer optimizers that step along the merged update, or along a velocity of such. Run on the master."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ddlf.algorithms.per_tensor import PerTensor, as_like, check_positive, check_shares
from ddlf.algorithms.weights import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Subtract(PerTensor):
    """Subtract the merged update: ``w <- w - learning_rate * g``.

    ``learning_rate=1`` takes the plain average of the workers' weights: with the default merge, which weighs by
    samples, FedAvg.

    Args:
        learning_rate: Step size on the update, dimensionless, > 0.

    Raises:
        ConfigError: ``learning_rate`` is out of range.

    Source:
        Phan, Do 2023, Algorithm 2; FedAvg, arXiv:1602.05629.
    """

    learning_rate: float = 1.0

    by_value: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_positive(learning_rate=self.learning_rate)

    def step(self, kept: Sequence[Tensor], g: Tensor) -> tuple[Sequence[Any], Tensor]:
        return (), g if self.learning_rate == 1 else self.learning_rate * g


@dataclass(frozen=True, slots=True, kw_only=True)
class Nesterov(PerTensor):
    """Step the weights along merged updates with Nesterov momentum (the outer step of DiLoCo).

    With ``g`` the merged update (weights before minus weights after), per tensor::

        v <- momentum * v + g
        w <- w - learning_rate * (g + momentum * v)

    ``learning_rate=1, momentum=0`` is plain averaging of the workers' weights. The velocity ``v`` does not contain the
    learning rate (PyTorch's convention; Keras's ``SGD`` has it inside, which differs as soon as the rate changes).

    Args:
        learning_rate: Step size on the update, dimensionless, > 0.
        momentum: Share of the previous velocity to keep, in [0, 1).

    Raises:
        ConfigError: A value is out of range.

    Source:
        Douillard et al. 2023, arXiv:2311.08105, Algorithm 1.
    """

    learning_rate: float = 0.7
    momentum: float = 0.9

    kept: ClassVar[int] = 1
    by_value: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_positive(learning_rate=self.learning_rate)
        check_shares(momentum=self.momentum)

    def step(self, kept: Sequence[Tensor], g: Tensor) -> tuple[Sequence[Any], Tensor]:
        v = as_like(self.momentum * kept[0] + g, kept[0])
        return [v], self.learning_rate * (g + self.momentum * v)


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAvgM(PerTensor):
    """Step the weights along a velocity of merged updates (heavy-ball momentum).

    With ``g`` the merged update (weights before minus weights after), per tensor::

        v <- momentum * v + g
        w <- w - learning_rate * v

    ``Nesterov`` looks one step further: its step is ``g + momentum * v``. ``momentum=0`` is plain averaging. A
    lasting ``g`` moves the weights by ``learning_rate / (1 - momentum)`` of it in each round.

    Args:
        learning_rate: Step size on the velocity, dimensionless, > 0.
        momentum: Share of the previous velocity to keep, in [0, 1).

    Raises:
        ConfigError: A value is out of range.

    Source:
        Hsu et al. 2019, arXiv:1909.06335.
    """

    learning_rate: float = 1.0
    momentum: float = 0.9

    kept: ClassVar[int] = 1
    by_value: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_positive(learning_rate=self.learning_rate)
        check_shares(momentum=self.momentum)

    def step(self, kept: Sequence[Tensor], g: Tensor) -> tuple[Sequence[Any], Tensor]:
        v = as_like(self.momentum * kept[0] + g, kept[0])
        return [v], self.learning_rate * v
