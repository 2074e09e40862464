"""One merged update -> new weights: the outer optimizers. Runs on the master.

An outer optimizer is a value with two pure functions::

    init(weights) -> state
    update(state, weights, merged, trainable) -> (state, weights)

The state is a list of arrays, so that a checkpoint can hold it. Arrays that went in are never modified.

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


class PerTensor(Named, ABC):
    """A rule that steps each trainable tensor by itself. Subclasses say what it keeps of one, and how it steps.

    The state is, for each array that is kept of a tensor, a list of those of all tensors, one list after the other.
    """

    __slots__ = ()
    kept: ClassVar[int] = 0
    """Number of arrays that are kept of each tensor."""

    @abstractmethod
    def step(self, kept: Sequence[Tensor], g: Tensor) -> tuple[Sequence[Any], Tensor]:
        """Return what is kept of a tensor after a round, and what is subtracted from its weights.

        Args:
            kept: What was kept before. Not modified.
            g: Merged update of the tensor.
        """

    def begin(self, w: Tensor) -> State:
        """Return what is kept of a tensor before the first round, each with its shape and type."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Subtract(PerTensor):
    """Subtract the merged update: ``w <- w - learning_rate * g``.

    ``learning_rate=1`` takes the plain average of the workers' weights: with the default merge, which weighs by samples, FedAvg.

    Args:
        learning_rate: Step size on the update, dimensionless, > 0.

    Raises:
        ConfigError: ``learning_rate`` is out of range.

    Source:
        Phan, Do 2023, Algorithm 2; FedAvg, arXiv:1602.05629.
    """

    learning_rate: float = 1.0

    def __post_init__(self) -> None:
        _check_positive(learning_rate=self.learning_rate)

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

    def __post_init__(self) -> None:
        _check_positive(learning_rate=self.learning_rate)
        _check_shares(momentum=self.momentum)

    def step(self, kept: Sequence[Tensor], g: Tensor) -> tuple[Sequence[Any], Tensor]:
        v = _as(self.momentum * kept[0] + g, kept[0])
        return [v], self.learning_rate * (g + self.momentum * v)


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAvgM(PerTensor):
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

    kept: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _check_positive(learning_rate=self.learning_rate)
        _check_shares(momentum=self.momentum)

    def step(self, kept: Sequence[Tensor], g: Tensor) -> tuple[Sequence[Any], Tensor]:
        v = _as(self.momentum * kept[0] + g, kept[0])
        return [v], self.learning_rate * v


class Adaptive(PerTensor):
    """A rule that divides the mean update of each weight by the size that its updates have. Subclasses say how large that is.

    Kept are ``m``, from 0, and ``v``, from ``tau**2``, as in the source the least that it can be.
    """

    __slots__ = ()
    learning_rate: float
    beta1: float
    tau: float
    kept: ClassVar[int] = 2

    @abstractmethod
    def squares(self, v: Tensor, g: Tensor) -> Any:
        """Return the ``v`` that follows on another one after a merged update."""

    def begin(self, w: Tensor) -> State:
        return [np.zeros_like(w), np.full_like(w, self.tau**2 if is_float(w) else 0)]

    def step(self, kept: Sequence[Tensor], g: Tensor) -> tuple[Sequence[Any], Tensor]:
        m = _as(self.beta1 * kept[0] + (1 - self.beta1) * g, kept[0])
        v = _as(self.squares(kept[1], g), kept[1])
        return [m, v], self.learning_rate * m / (np.sqrt(v) + self.tau)


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAdagrad(Adaptive):
    """Step each weight by its update over the size of all its updates so far (Adagrad, on merged updates).

    With ``g`` the merged update (weights before minus weights after), per tensor, from ``m = 0`` and ``v = tau**2``::

        m <- beta1 * m + (1 - beta1) * g
        v <- v + g**2
        w <- w - learning_rate * m / (sqrt(v) + tau)

    Steps only become shorter: with updates that stay the same by ``1 / sqrt(t)`` after ``t`` rounds. The source has rounds only; in
    asynchronous training each of K updates is a step, which together go ``sqrt(K)`` times as far: divide the rate by that.

    Args:
        learning_rate: Step of a weight in the first round, if its update is much larger than ``tau``, in units of the weight, > 0.
        beta1: Share of the previous ``m`` to keep, in [0, 1).
        tau: Size of updates below which steps are smaller, in units of the weight, > 0.

    Raises:
        ConfigError: A value is out of range.

    Source:
        Reddi et al. 2020, arXiv:2003.00295, Algorithm 2.
    """

    learning_rate: float = 0.1
    beta1: float = 0.0
    tau: float = 1e-3

    def __post_init__(self) -> None:
        _check_positive(learning_rate=self.learning_rate, tau=self.tau)
        _check_shares(beta1=self.beta1)

    def squares(self, v: Tensor, g: Tensor) -> Any:
        return v + g * g


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAdam(Adaptive):
    """Step each weight by its mean update over the size that its updates usually have (Adam, on merged updates).

    With ``g`` the merged update (weights before minus weights after), per tensor, from ``m = 0`` and ``v = tau**2``::

        m <- beta1 * m + (1 - beta1) * g
        v <- beta2 * v + (1 - beta2) * g**2
        w <- w - learning_rate * m / (sqrt(v) + tau)

    As in the source there is no correction of the first rounds, where ``m`` is still small; Flower multiplies its rate by one
    and begins with ``v = 0``. The source has rounds only; in asynchronous training each of K updates is a step, which together go up to K
    times as far: divide the rate by K.

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
        _check_positive(learning_rate=self.learning_rate, tau=self.tau)
        _check_shares(beta1=self.beta1, beta2=self.beta2)

    def squares(self, v: Tensor, g: Tensor) -> Any:
        return self.beta2 * v + (1 - self.beta2) * g * g


@dataclass(frozen=True, slots=True, kw_only=True)
class FedYogi(Adaptive):
    """Step each weight by its mean update over the size of its updates, which is forgotten slowly (Yogi, on merged updates).

    With ``g`` the merged update (weights before minus weights after), per tensor, from ``m = 0`` and ``v = tau**2``::

        m <- beta1 * m + (1 - beta1) * g
        v <- v - (1 - beta2) * g**2 * sign(v - g**2)
        w <- w - learning_rate * m / (sqrt(v) + tau)

    ``FedAdam`` forgets a share of ``v`` in each round; here it moves by a share of ``g**2``, so after a few small updates the next steps
    do not become much longer. In asynchronous training divide the rate by K, as for ``FedAdam``.

    Args:
        learning_rate: Step of a weight whose updates are always the same and much larger than ``tau``, in units of the weight, > 0.
        beta1: Share of the previous ``m`` to keep, in [0, 1).
        beta2: What of ``g**2`` does not get into ``v``, in [0, 1).
        tau: Size of updates below which steps are smaller, in units of the weight, > 0.

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
        _check_positive(learning_rate=self.learning_rate, tau=self.tau)
        _check_shares(beta1=self.beta1, beta2=self.beta2)

    def squares(self, v: Tensor, g: Tensor) -> Any:
        square = g * g
        return v - (1 - self.beta2) * square * np.sign(v - square)


def _minus(w: Tensor, g: Tensor) -> Tensor:
    """Return ``w - g`` for floats, and a copy of ``w`` for integers and booleans, which are never merged."""
    return np.asarray(w - g, w.dtype) if is_float(w) else w.copy()


def _as(value: Any, like: Tensor) -> Tensor:
    """Arithmetic on a 0-d array gives a scalar, maybe float64: as an array of the type of ``like``."""
    return np.asarray(value, like.dtype)


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not (isfinite(value) and value > 0):
            raise ConfigError(f"{name} must be finite and > 0, got {value}")


def _check_shares(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ConfigError(f"{name} must be in [0, 1), got {value}")


def _check_fit(weights: Sequence[Tensor], other: Sequence[Tensor], trainable: Sequence[bool]) -> None:
    """Broadcasting would silently accept a wrong shape, so refuse it here."""
    if not len(weights) == len(other) == len(trainable):
        raise ConfigError(f"{len(weights)} weights do not fit {len(other)} arrays and {len(trainable)} flags")
    for i, (w, o) in enumerate(zip(weights, other, strict=True)):
        if w.shape != o.shape or w.dtype != o.dtype:
            raise ConfigError(f"tensor {i}: weights are {w.dtype} {w.shape}, but got {o.dtype} {o.shape}")


OUTER: Family[OuterOptimizer] = Family(
    "outer optimizer",
    subtract=Subtract,
    nesterov=Nesterov,
    fedavgm=FedAvgM,
    fedadam=FedAdam,
    fedadagrad=FedAdagrad,
    fedyogi=FedYogi,
    fedavg=lambda: Subtract(),
    diloco=Nesterov,
)
"""Every outer optimizer by name; the last two are other names for rules before them, which is what is written and compared."""
