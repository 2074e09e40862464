"""One merged update -> new weights: the outer optimizers. Runs on the master.

An outer optimizer is a value with two pure functions::

    init(weights) -> state
    update(state, weights, merged, trainable) -> (state, weights)

The state is a list of arrays, so that a checkpoint can hold it. Arrays that went in are never modified.

Only trainable tensors go through the rule. The others (BatchNorm's moving mean and variance) become ``w - g``, which is
the plain mean of the workers' values: with momentum or another step size a variance could turn negative. Tensors of
integers or booleans stay as they are on the master.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Protocol

import numpy as np

from ddlf.algorithms.named import Family, Named
from ddlf.algorithms.weights import Tensor, is_float
from ddlf.errors import ConfigError

State = list[Tensor]


class OuterOptimizer(Protocol):
    """What every rule in this file is."""

    def init(self, weights: Sequence[Tensor]) -> State:
        """Return the state before the first round."""

    def update(
        self, state: State, weights: Sequence[Tensor], merged: Sequence[Tensor], trainable: Sequence[bool]
    ) -> tuple[State, list[Tensor]]:
        """Return the state and the weights after one round.

        Args:
            state: From ``init`` or from the round before.
            weights: One array per tensor.
            merged: The merged update (weights before minus after), with the shapes of ``weights``.
            trainable: Per tensor, whether the rule applies.

        Raises:
            ConfigError: The lists do not fit together.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Subtract(Named):
    """Subtract the merged update: ``w <- w - learning_rate * g``.

    ``learning_rate=1`` takes the plain average of the workers' weights.

    Args:
        learning_rate: Step size on the update, dimensionless, > 0.

    Raises:
        ConfigError: ``learning_rate`` is out of range.

    Source:
        Phan, Do 2023, Algorithm 2; FedAvg, arXiv:1602.05629.
    """

    learning_rate: float = 1.0

    def __post_init__(self) -> None:
        _check_learning_rate(self.learning_rate)

    def init(self, weights: Sequence[Tensor]) -> State:
        return []

    def update(
        self, state: State, weights: Sequence[Tensor], merged: Sequence[Tensor], trainable: Sequence[bool]
    ) -> tuple[State, list[Tensor]]:
        _check_fit(weights, merged, trainable)
        stepped = []
        for w, g, learns in zip(weights, merged, trainable, strict=True):
            rate = self.learning_rate if learns else 1.0
            stepped.append(_minus(w, g if rate == 1.0 else rate * g))
        return state, stepped


@dataclass(frozen=True, slots=True, kw_only=True)
class Nesterov(Named):
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

    def __post_init__(self) -> None:
        _check_learning_rate(self.learning_rate)
        _check_share("momentum", self.momentum)

    def init(self, weights: Sequence[Tensor]) -> State:
        return [np.zeros_like(w) for w in weights]

    def update(
        self, state: State, weights: Sequence[Tensor], merged: Sequence[Tensor], trainable: Sequence[bool]
    ) -> tuple[State, list[Tensor]]:
        _check_fit(weights, merged, trainable)
        _check_fit(weights, state, trainable)
        velocities, stepped = [], []
        for v, w, g, learns in zip(state, weights, merged, trainable, strict=True):
            if learns:
                v = np.asarray(
                    self.momentum * v + g, v.dtype
                )  # arithmetic on a 0-d array gives a scalar, maybe float64
                g = self.learning_rate * (g + self.momentum * v)
            velocities.append(v)
            stepped.append(_minus(w, g))
        return velocities, stepped


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAvgM(Named):
    """Step the weights along a velocity of merged updates (heavy-ball momentum).

    With ``g`` the merged update (weights before minus weights after), per tensor::

        v <- momentum * v + g
        w <- w - learning_rate * v

    ``Nesterov`` looks one step further: its step is ``g + momentum * v``. ``momentum=0`` is plain averaging. A lasting ``g`` moves
    the weights by ``learning_rate / (1 - momentum)`` of it in each round.

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

    def __post_init__(self) -> None:
        _check_learning_rate(self.learning_rate)
        _check_share("momentum", self.momentum)

    def init(self, weights: Sequence[Tensor]) -> State:
        return [np.zeros_like(w) for w in weights]

    def update(
        self, state: State, weights: Sequence[Tensor], merged: Sequence[Tensor], trainable: Sequence[bool]
    ) -> tuple[State, list[Tensor]]:
        _check_fit(weights, merged, trainable)
        _check_fit(weights, state, trainable)
        velocities, stepped = [], []
        for v, w, g, learns in zip(state, weights, merged, trainable, strict=True):
            if learns:
                v = np.asarray(self.momentum * v + g, v.dtype)
                g = self.learning_rate * v
            velocities.append(v)
            stepped.append(_minus(w, g))
        return velocities, stepped


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAdam(Named):
    """Step each weight by its mean update over the size that its updates usually have (Adam, on merged updates).

    With ``g`` the merged update (weights before minus weights after), per tensor, from ``m = 0`` and ``v = tau**2``::

        m <- beta1 * m + (1 - beta1) * g
        v <- beta2 * v + (1 - beta2) * g**2
        w <- w - learning_rate * m / (sqrt(v) + tau)

    As in the source there is no correction of the first rounds, where ``m`` is still small; Flower multiplies its rate by one
    and begins with ``v = 0``.

    Args:
        learning_rate: Step of a weight whose updates are always the same and much larger than ``tau``, in units of the weight, > 0.
        beta1: Share of the previous ``m`` to keep, in [0, 1).
        beta2: Share of the previous ``v`` to keep, in [0, 1).
        tau: Size of updates below which steps are smaller, in units of the weight, > 0.

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
        _check_learning_rate(self.learning_rate)
        _check_share("beta1", self.beta1)
        _check_share("beta2", self.beta2)
        if not (isfinite(self.tau) and self.tau > 0):
            raise ConfigError(f"tau must be finite and > 0, got {self.tau}")

    def init(self, weights: Sequence[Tensor]) -> State:
        squares = [np.full_like(w, self.tau**2 if is_float(w) else 0) for w in weights]
        return [*(np.zeros_like(w) for w in weights), *squares]

    def update(
        self, state: State, weights: Sequence[Tensor], merged: Sequence[Tensor], trainable: Sequence[bool]
    ) -> tuple[State, list[Tensor]]:
        _check_fit(weights, merged, trainable)
        means, squares = state[: len(weights)], state[len(weights) :]
        _check_fit(weights, means, trainable)
        _check_fit(weights, squares, trainable)
        stepped = []
        for i, (w, g, learns) in enumerate(zip(weights, merged, trainable, strict=True)):
            if learns:
                means[i] = np.asarray(self.beta1 * means[i] + (1 - self.beta1) * g, w.dtype)
                squares[i] = np.asarray(self.beta2 * squares[i] + (1 - self.beta2) * g * g, w.dtype)
                g = self.learning_rate * means[i] / (np.sqrt(squares[i]) + self.tau)
            stepped.append(_minus(w, g))
        return [*means, *squares], stepped


def _minus(w: Tensor, g: Tensor) -> Tensor:
    """Return ``w - g`` for floats, and a copy of ``w`` for integers and booleans, which are never merged."""
    return np.asarray(w - g, w.dtype) if is_float(w) else w.copy()


def _check_learning_rate(rate: float) -> None:
    if not (isfinite(rate) and rate > 0):
        raise ConfigError(f"learning_rate must be finite and > 0, got {rate}")


def _check_share(name: str, share: float) -> None:
    if not 0 <= share < 1:
        raise ConfigError(f"{name} must be in [0, 1), got {share}")


def _check_fit(weights: Sequence[Tensor], other: Sequence[Tensor], trainable: Sequence[bool]) -> None:
    """Broadcasting would silently accept a wrong shape, so refuse it here."""
    if not len(weights) == len(other) == len(trainable):
        raise ConfigError(f"{len(weights)} weights do not fit {len(other)} arrays and {len(trainable)} flags")
    for i, (w, o) in enumerate(zip(weights, other, strict=True)):
        if w.shape != o.shape or w.dtype != o.dtype:
            raise ConfigError(f"tensor {i}: weights are {w.dtype} {w.shape}, but got {o.dtype} {o.shape}")


OUTER: Family[OuterOptimizer] = Family(
    "outer optimizer", subtract=Subtract, nesterov=Nesterov, fedavgm=FedAvgM, fedadam=FedAdam
)
"""Every outer optimizer by name."""
