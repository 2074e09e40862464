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


OUTER: Family[OuterOptimizer] = Family("outer optimizer", subtract=Subtract, nesterov=Nesterov, fedavgm=FedAvgM)
"""Every outer optimizer by name."""
