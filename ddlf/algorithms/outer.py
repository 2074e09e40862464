"""The outer optimizers. They apply a merged update to the weights. Runs on the master.

An outer optimizer is a value with two pure functions::

    init(weights) -> state
    update(state, weights, merged, trainable) -> (state, weights)

The state is a list of arrays, so that a checkpoint can store it. An outer optimizer never modifies its arguments.

| rule | step |
|---|---|
| ``subtract``, ``fedavg`` | the merged update |
| ``nesterov``, ``diloco``, ``fedavgm`` | a velocity of merged updates |
| ``fedadagrad``, ``fedadam``, ``fedyogi`` | the update of each weight, divided by the size of its updates |
| ``streaming`` | the step of ``diloco``, for one fragment of the weights in each round |

Only trainable tensors go through a rule. The others (BatchNorm's moving mean and variance) become ``w - g``, which is
the plain mean of the workers' values: with momentum or another step size a variance could turn negative. Tensors of
integers or booleans stay as they are on the master.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from ddlf.algorithms.rule_text import Family, Named, check_positive, check_shares, check_size
from ddlf.algorithms.weights import Tensor, is_float
from ddlf.errors import ConfigError

State = list[Tensor]


class OuterOptimizer(Protocol):
    """The interface of outer optimizers, which change the global weights by merged updates."""

    def init(self, weights: Sequence[Tensor]) -> State:
        """Return the optimizer's state before the first round."""

    def update(
        self, state: State, weights: Sequence[Tensor], merged: Sequence[Tensor], trainable: Sequence[bool]
    ) -> tuple[State, list[Tensor]]:
        """Return the optimizer's state and the weights after one round.

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

    The state has one list for each kind of state array. Each list has one array for each tensor.
    """

    __slots__ = ()
    state_arrays: ClassVar[int] = 0
    """Number of state arrays for each tensor."""

    @abstractmethod
    def step(self, state: Sequence[Tensor], g: Tensor) -> tuple[Sequence[Any], Tensor]:
        """Return a tensor's next state, and the array to subtract from the tensor.

        Args:
            state: The tensor's previous state. Not modified.
            g: Merged update of the tensor.
        """

    def begin(self, w: Tensor) -> State:
        """Return a tensor's state before the first round: arrays with its shape and type."""
        return [np.zeros_like(w) for _ in range(self.state_arrays)]

    def init(self, weights: Sequence[Tensor]) -> State:
        begun = [self.begin(w) for w in weights]
        return [arrays[i] for i in range(self.state_arrays) for arrays in begun]

    def update(
        self, state: State, weights: Sequence[Tensor], merged: Sequence[Tensor], trainable: Sequence[bool]
    ) -> tuple[State, list[Tensor]]:
        _check_fit(weights, merged, trainable)
        _check_fit([*weights] * self.state_arrays, state, [*trainable] * self.state_arrays)
        state, stepped, n = list(state), [], len(weights)
        for i, (w, g, learns) in enumerate(zip(weights, merged, trainable, strict=True)):
            if learns:
                tensor_state, g = self.step(state[i::n], g)
                state[i::n] = tensor_state
            stepped.append(_minus(w, g))
        return state, stepped


def as_like(value: Any, like: Tensor) -> Tensor:
    """Return an array with the type of ``like``, because arithmetic on a 0-d array gives a scalar, maybe float64."""
    return np.asarray(value, like.dtype)


def _minus(w: Tensor, g: Tensor) -> Tensor:
    """Return ``w - g`` for floats, and a copy of ``w`` for integers and booleans, which are never merged."""
    return np.asarray(w - g, w.dtype) if is_float(w) else w.copy()


def _check_fit(weights: Sequence[Tensor], arrays: Sequence[Tensor], trainable: Sequence[bool]) -> None:
    """Raise an error for arrays with a wrong shape, which NumPy's broadcasting would silently accept."""
    if not len(weights) == len(arrays) == len(trainable):
        raise ConfigError(f"{len(weights)} weights do not fit {len(arrays)} arrays and {len(trainable)} flags")
    for i, (w, o) in enumerate(zip(weights, arrays, strict=True)):
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

    def step(self, state: Sequence[Tensor], g: Tensor) -> tuple[Sequence[Any], Tensor]:
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

    state_arrays: ClassVar[int] = 1
    by_value: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_positive(learning_rate=self.learning_rate)
        check_shares(momentum=self.momentum)

    def step(self, state: Sequence[Tensor], g: Tensor) -> tuple[Sequence[Any], Tensor]:
        v = as_like(self.momentum * state[0] + g, state[0])
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

    state_arrays: ClassVar[int] = 1
    by_value: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_positive(learning_rate=self.learning_rate)
        check_shares(momentum=self.momentum)

    def step(self, state: Sequence[Tensor], g: Tensor) -> tuple[Sequence[Any], Tensor]:
        v = as_like(self.momentum * state[0] + g, state[0])
        return [v], self.learning_rate * v


class Adaptive(PerTensor):
    """A rule that divides the mean update of each weight by the size of its updates. Subclasses define that size.

    The state is ``m``, which starts at 0, and ``v``, which starts at ``tau**2``, the smallest value that the source
    allows.
    """

    __slots__ = ()
    learning_rate: float
    beta1: float
    tau: float
    state_arrays: ClassVar[int] = 2
    by_value: ClassVar[bool] = True

    @abstractmethod
    def squares(self, v: Tensor, g: Tensor) -> Any:
        """Return the next ``v``, the squared size of a tensor's updates, after a merged update."""

    def begin(self, w: Tensor) -> State:
        return [np.zeros_like(w), np.full_like(w, self.tau**2 if is_float(w) else 0)]

    def step(self, state: Sequence[Tensor], g: Tensor) -> tuple[Sequence[Any], Tensor]:
        m = as_like(self.beta1 * state[0] + (1 - self.beta1) * g, state[0])
        v = as_like(self.squares(state[1], g), state[1])
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming(Named):
    """Exchange one fragment of the weights in each round, with the outer step of DiLoCo. Slots keep their other values.

    The trained tensors are divided into P fragments. Round ``r`` exchanges fragment ``r mod P``. With ``w`` its
    global values, ``w_j`` the values of slot j after its training, and ``g`` the merge of ``w - w_j`` of all slots::

        v <- momentum * v + g
        w <- w - learning_rate * (g + momentum * v)
        w_j <- alpha * w_j + (1 - alpha) * w  (on slot j, before its next round)

    So a round moves ``1 / P`` of the bytes. Untrained tensors (BatchNorm statistics) are exchanged in every round,
    and all tensors in the last one.

    Args:
        fragments: P, > 0, at most the number of trained tensors.
        alpha: Share of a slot's values that survives the exchange of a fragment, in [0, 1).
        learning_rate: Step size on the update, dimensionless, > 0.
        momentum: Share of the previous velocity to keep, in [0, 1).

    Raises:
        ConfigError: A value is out of range.

    Source:
        Douillard et al. 2025, arXiv:2501.18512, Algorithm 2, with layers as fragments; here fragments have equal sizes.
    """

    fragments: int = 4
    alpha: float = 0.0
    learning_rate: float = 0.7
    momentum: float = 0.9

    only: ClassVar[str] = "sync"
    state_arrays: ClassVar[int] = 1
    by_value: ClassVar[bool] = True
    removed: ClassVar[dict[str, str]] = {"overlap": "0"}

    def __post_init__(self) -> None:
        if self.fragments < 1:
            raise ConfigError(f"fragments must be >= 1, got {self.fragments}")
        check_shares(alpha=self.alpha)
        Nesterov(learning_rate=self.learning_rate, momentum=self.momentum)

    def init(self, weights: Sequence[Tensor]) -> State:
        return Nesterov().init(weights)

    def update(
        self,
        state: State,
        weights: Sequence[Tensor],
        merged: Sequence[Tensor],
        trainable: Sequence[bool],
        tensors: Sequence[int] | None = None,
    ) -> tuple[State, list[Tensor]]:
        """Return the state and the weights after one round, like other outer optimizers.

        ``tensors`` are the numbers of the exchanged tensors; others stay as they are.
        """
        chosen = range(len(weights)) if tensors is None else tensors
        rule = Nesterov(learning_rate=self.learning_rate, momentum=self.momentum)
        velocities, stepped = rule.update(
            *([items[i] for i in chosen] for items in (state, weights, merged, trainable))  # type: ignore[arg-type]
        )
        return with_values_at(state, chosen, velocities), with_values_at(weights, chosen, stepped)


def with_values_at(items: Sequence[Any], indices: Iterable[int], values: Iterable[Any]) -> list[Any]:
    """Return a copy of a list with new values at some indices."""
    changed = list(items)
    for index, value in zip(indices, values, strict=True):
        changed[index] = value
    return changed


def divide_into_fragments(weights: Sequence[Tensor], trainable: Sequence[bool], fragments: int) -> list[list[int]]:
    """Divide the trained tensors into fragments, groups of similar size, which are exchanged one in each round.

    Return the numbers of the tensors in each fragment.

    Each tensor, the largest first, goes to the fragment with the fewest bytes.

    Raises:
        ConfigError: There are more fragments than trained tensors.
    """
    trained = sorted((i for i, learns in enumerate(trainable) if learns), key=lambda i: -weights[i].nbytes)
    if fragments > len(trained):
        raise ConfigError(
            f"streaming with {fragments} fragments needs as many trained tensors, but the model has {len(trained)}"
        )
    dealt: list[list[int]] = [[] for _ in range(fragments)]
    for i in trained:
        min(dealt, key=lambda part: (sum(weights[j].nbytes for j in part), len(part))).append(i)
    return dealt


def tensors_of(parts: Iterable[int], weights: Sequence[Tensor], trainable: Sequence[bool], fragments: int) -> list[int]:
    """Return the numbers, ascending, of all tensors in some fragments and of all untrained tensors."""
    dealt = divide_into_fragments(weights, trainable, fragments)
    return sorted([i for part in parts for i in dealt[part]] + [i for i, learns in enumerate(trainable) if not learns])


OUTER: Family[OuterOptimizer] = Family(
    "outer optimizer",
    subtract=Subtract,
    nesterov=Nesterov,
    fedavgm=FedAvgM,
    fedadam=FedAdam,
    fedadagrad=FedAdagrad,
    fedyogi=FedYogi,
    streaming=Streaming,
    fedavg=lambda: Subtract(),
    diloco=Nesterov,
)
"""Every outer optimizer by name. The last two are aliases; checkpoints store and compare the original names."""
