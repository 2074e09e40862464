"""Outer optimizers that divide the update of each weight by the usual size of its updates. They run on the master."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ddlf.algorithms.per_tensor import PerTensor, State, as_like, check_positive, check_shares, check_size
from ddlf.algorithms.weights import Tensor, is_float


class Adaptive(PerTensor):
    """A rule that divides the mean update of each weight by the size of its updates. Subclasses define that size.

    The state is ``m``, which starts at 0, and ``v``, which starts at ``tau**2``, the smallest value that the source
    allows.
    """

    __slots__ = ()
    learning_rate: float
    beta1: float
    tau: float
    kept: ClassVar[int] = 2
    by_value: ClassVar[bool] = True

    @abstractmethod
    def squares(self, v: Tensor, g: Tensor) -> Any:
        """Return the next ``v`` after a merged update."""

    def begin(self, w: Tensor) -> State:
        return [np.zeros_like(w), np.full_like(w, self.tau**2 if is_float(w) else 0)]

    def step(self, kept: Sequence[Tensor], g: Tensor) -> tuple[Sequence[Any], Tensor]:
        m = as_like(self.beta1 * kept[0] + (1 - self.beta1) * g, kept[0])
        v = as_like(self.squares(kept[1], g), kept[1])
        return [m, v], self.learning_rate * m / (np.sqrt(v) + self.tau)


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAdagrad(Adaptive):
    """Divide the update of each weight by the size of all its updates so far (Adagrad, on merged updates).

    With ``g`` the merged update (weights before minus weights after), per tensor, from ``m = 0`` and ``v = tau**2``::

        m <- beta1 * m + (1 - beta1) * g
        v <- v + g**2
        w <- w - learning_rate * m / (sqrt(v) + tau)

    Steps only become shorter: with constant updates a step shrinks by ``1 / sqrt(t)`` after ``t`` rounds. The source
    describes synchronous rounds only. In asynchronous training each of K updates is a step, so K steps go ``sqrt(K)``
    times as far: divide the rate by ``sqrt(K)``.

    Args:
        learning_rate: Step of a weight in the first round, if its update is much larger than ``tau``, in units of the
            weight, > 0.
        beta1: Share of the previous ``m`` to keep, in [0, 1).
        tau: Size of updates below which steps are smaller, in units of the weight, 1e-18 to 1e18.

    Raises:
        ConfigError: A value is out of range.

    Source:
        Reddi et al. 2020, arXiv:2003.00295, Algorithm 2.
    """

    learning_rate: float = 0.1
    beta1: float = 0.0
    tau: float = 1e-3

    def __post_init__(self) -> None:
        check_positive(learning_rate=self.learning_rate)
        check_size(tau=self.tau)
        check_shares(beta1=self.beta1)

    def squares(self, v: Tensor, g: Tensor) -> Any:
        return v + g * g


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAdam(Adaptive):
    """Divide the mean update of each weight by the usual size of its updates (Adam, on merged updates).

    With ``g`` the merged update (weights before minus weights after), per tensor, from ``m = 0`` and ``v = tau**2``::

        m <- beta1 * m + (1 - beta1) * g
        v <- beta2 * v + (1 - beta2) * g**2
        w <- w - learning_rate * m / (sqrt(v) + tau)

    Like the source, this rule does not correct the first rounds, where ``m`` is still small. Flower corrects its rate
    and begins with ``v = 0``. The source describes synchronous rounds only. In asynchronous training each of K updates
    is a step, so K steps go up to K times as far: divide the rate by K.

    Args:
        learning_rate: Step of a weight whose updates are always the same and much larger than ``tau``, in units of
            the weight, > 0.
        beta1: Share of the previous ``m`` to keep, in [0, 1).
        beta2: Share of the previous ``v`` to keep, in [0, 1).
        tau: Size of updates below which steps are smaller, in units of the weight, 1e-18 to 1e18.

    Raises:
        ConfigError: A value is out of range.

    Source:
        Reddi et al. 2020, arXiv:2003.00295, Algorithm 2.
    """

    learning_rate: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        check_positive(learning_rate=self.learning_rate)
        check_size(tau=self.tau)
        check_shares(beta1=self.beta1, beta2=self.beta2)

    def squares(self, v: Tensor, g: Tensor) -> Any:
        return self.beta2 * v + (1 - self.beta2) * g * g


@dataclass(frozen=True, slots=True, kw_only=True)
class FedYogi(Adaptive):
    """Divide the mean update of each weight by a slowly changing size of its updates (Yogi, on merged updates).

    With ``g`` the merged update (weights before minus weights after), per tensor, from ``m = 0`` and ``v = tau**2``::

        m <- beta1 * m + (1 - beta1) * g
        v <- v - (1 - beta2) * g**2 * sign(v - g**2)
        w <- w - learning_rate * m / (sqrt(v) + tau)

    ``FedAdam`` forgets a share of ``v`` in each round. Here ``v`` moves by a share of ``g**2``, so after a few small
    updates the next steps do not become much longer. In asynchronous training divide the rate by K, as for
    ``FedAdam``.

    Args:
        learning_rate: Step of a weight whose updates are always the same and much larger than ``tau``, in units of
            the weight, > 0.
        beta1: Share of the previous ``m`` to keep, in [0, 1).
        beta2: One minus the step of ``v`` as a share of ``g**2``, in [0, 1).
        tau: Size of updates below which steps are smaller, in units of the weight, 1e-18 to 1e18.

    Raises:
        ConfigError: A value is out of range.

    Source:
        Reddi et al. 2020, arXiv:2003.00295, Algorithm 2; the default rate is Flower's.
    """

    learning_rate: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        check_positive(learning_rate=self.learning_rate)
        check_size(tau=self.tau)
        check_shares(beta1=self.beta1, beta2=self.beta2)

    def squares(self, v: Tensor, g: Tensor) -> Any:
        square = g * g
        return v - (1 - self.beta2) * square * np.sign(v - square)
