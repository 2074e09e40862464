"""The interface of outer optimizers, and the base of optimizers with a separate step for each tensor. Runs on the master.

Only trainable tensors go through the rule. The others (BatchNorm's moving mean and variance) become ``w - g``, which is
the plain mean of the workers' values: with momentum or another step size a variance could turn negative. Tensors of
integers or booleans stay as they are on the master.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, ClassVar, Protocol

import numpy as np

from ddlf.algorithms.named import Named
from ddlf.algorithms.weights import Tensor, is_float
from ddlf.errors import ConfigError

State = list[Tensor]


class OuterOptimizer(Protocol):
    """The interface of outer optimizers."""

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


class PerTensor(Named, ABC):
    """A rule that steps each trainable tensor by itself. Subclasses define the state and the step.

    The state has one list for each kind of kept array. Each list has one array for each tensor.
    """

    __slots__ = ()
    kept: ClassVar[int] = 0
    """Number of state arrays for each tensor."""

    @abstractmethod
    def step(self, kept: Sequence[Tensor], g: Tensor) -> tuple[Sequence[Any], Tensor]:
        """Return a tensor's next state, and the array to subtract from its weights.

        Args:
            kept: The tensor's previous state. Not modified.
            g: Merged update of the tensor.
        """

    def begin(self, w: Tensor) -> State:
        """Return a tensor's first state: arrays with its shape and type."""
        return [np.zeros_like(w) for _ in range(self.kept)]

    def init(self, weights: Sequence[Tensor]) -> State:
        begun = [self.begin(w) for w in weights]
        return [arrays[i] for i in range(self.kept) for arrays in begun]

    def update(
        self, state: State, weights: Sequence[Tensor], merged: Sequence[Tensor], trainable: Sequence[bool]
    ) -> tuple[State, list[Tensor]]:
        _check_fit(weights, merged, trainable)
        _check_fit([*weights] * self.kept, state, [*trainable] * self.kept)
        state, stepped, n = list(state), [], len(weights)
        for i, (w, g, learns) in enumerate(zip(weights, merged, trainable, strict=True)):
            if learns:
                kept, g = self.step(state[i::n], g)
                state[i::n] = kept
            stepped.append(_minus(w, g))
        return state, stepped


def as_like(value: Any, like: Tensor) -> Tensor:
    """Return an array with the type of ``like``, because arithmetic on a 0-d array gives a scalar, maybe float64."""
    return np.asarray(value, like.dtype)


def check_positive(**values: float) -> None:
    for name, value in values.items():
        if not (isfinite(value) and value > 0):
            raise ConfigError(f"{name} must be finite and > 0, got {value}")


def check_size(**values: float) -> None:
    """Raise ``ConfigError`` for sizes whose squares, or quotients by them, leave the range of float32."""
    for name, value in values.items():
        if not 1e-18 <= value <= 1e18:
            raise ConfigError(f"{name} must be from 1e-18 to 1e18, got {value}")


def check_shares(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ConfigError(f"{name} must be in [0, 1), got {value}")


def _minus(w: Tensor, g: Tensor) -> Tensor:
    """Return ``w - g`` for floats, and a copy of ``w`` for integers and booleans, which are never merged."""
    return np.asarray(w - g, w.dtype) if is_float(w) else w.copy()


def _check_fit(weights: Sequence[Tensor], other: Sequence[Tensor], trainable: Sequence[bool]) -> None:
    """Refuse arrays with a wrong shape, because broadcasting would silently accept them."""
    if not len(weights) == len(other) == len(trainable):
        raise ConfigError(f"{len(weights)} weights do not fit {len(other)} arrays and {len(trainable)} flags")
    for i, (w, o) in enumerate(zip(weights, other, strict=True)):
        if w.shape != o.shape or w.dtype != o.dtype:
            raise ConfigError(f"tensor {i}: weights are {w.dtype} {w.shape}, but got {o.dtype} {o.shape}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subtract(PerTensor):
    """Subtract the merged update: ``w <- w - learning_rate * g``.

    ``learning_rate=1`` takes the plain average of the workers' weights. With the default merge, which weighs by
    samples, this is FedAvg.

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
    """Apply merged updates with Nesterov momentum (the outer step of DiLoCo).

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
    """Apply merged updates with heavy-ball momentum: the velocity is a decaying sum of updates.

    With ``g`` the merged update (weights before minus weights after), per tensor::

        v <- momentum * v + g
        w <- w - learning_rate * v

    ``Nesterov`` looks one step further: its step is ``g + momentum * v``. ``momentum=0`` is plain averaging. A constant
    ``g`` moves the weights by ``learning_rate / (1 - momentum) * g`` in each round.

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
