"""The rules of Downpour SGD: how a shard applies a replica's gradient. Runs on workers that own shards; pure.

A rule has a state: some arrays as long as the shard. It changes the values and the state in place::

    state = rule.start(size)
    rule.apply(weights, state, gradient, factor=s(tau), count=0)

Each server applies the rule to its own values, one by one, so the results do not depend on the number of servers.
``factor`` is the share of the step that remains after weighting by staleness (``ddlf.algorithms.staleness``:
``inverse`` is ``1 / max(1, tau)``, with ``tau`` the pushes that this shard applied since the replica read it). It
scales the step, never the state: in Adagrad it stands outside the root, which would take it out again.

A push contains the *sum* of the gradients since the replica's last push. With ``Sgd``, the sum of ``n_push`` gradients
moves the weights as far as single pushes would. ``Sgd(rate=1)`` on *updates*, weights before minus weights after,
subtracts what any local optimizer did.

``Softsync`` has a shard collect pushes first, ``Cadence`` says when a replica fetches and pushes, and ``turns`` draws
the order of replicas that share a worker.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ddlf.algorithms.rule_text import Family, Named, check_positive, check_shares
from ddlf.errors import ConfigError

FloatArray = npt.NDArray[np.floating[Any]]

BLOCK = 1 << 15
"""Number of values in a block, so that intermediate results stay in the processor's cache."""
KNOWN = -1
"""Replaces an unknown position: an earlier incarnation made the push, the shard lost it, or a fetch saw undone pushes."""


class Pushed(Named, ABC):
    """The base of rules that apply a pushed gradient to a shard, block by block. Subclasses define the step."""

    __slots__ = ()

    def start(self, size: int) -> list[FloatArray]:
        """Return the rule's state for a shard before its first push: float32 arrays of length ``size``."""
        return []

    def apply(
        self,
        weights: FloatArray,
        state: list[FloatArray],
        gradient: FloatArray,
        factor: float = 1.0,
        count: int = 0,
    ) -> None:
        """Apply a pushed gradient to the values of a shard, in place.

        Args:
            weights: All values of the shard, in one row, float32.
            state: From ``start``; changed in place, too.
            gradient: The pushed gradient, with the length and type of ``weights``; not modified.
            factor: Share of the step that is taken, in (0, 1].
            count: Pushes that this shard has applied before.

        Raises:
            ConfigError: The gradient has another length or type; all values are unchanged.
        """
        check_fits(gradient, weights)
        for begin in range(0, weights.size, BLOCK):
            block = slice(begin, begin + BLOCK)
            weights[block] -= self.step([array[block] for array in state], gradient[block], factor, count)

    @abstractmethod
    def step(self, state: list[FloatArray], g: FloatArray, factor: float, count: int) -> FloatArray:
        """Change the state of a block of values, and return the array to subtract from these values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sgd(Pushed):
    """Subtract each pushed gradient from the weights: ``w <- w - s rate g``. ``s`` is the weight of a stale gradient.

    Args:
        rate: Step size on a gradient, > 0.

    Raises:
        ConfigError: ``rate`` is out of range.

    Source:
        Dean et al. 2012, Large Scale Distributed Deep Networks, section 4.1.
    """

    rate: float = 0.01

    def __post_init__(self) -> None:
        check_positive(rate=self.rate)

    def step(self, state: list[FloatArray], g: FloatArray, factor: float, count: int) -> FloatArray:
        return (factor * self.rate) * g


@dataclass(frozen=True, slots=True, kw_only=True)
class Momentum(Pushed):
    """Apply pushed gradients with momentum: ``m <- beta m + g``, ``w <- w - s rate m``.

    All replicas share one velocity ``m``. A constant ``g`` moves the weights by ``rate / (1 - beta) * g`` with each
    push.

    Args:
        rate: Step size on the velocity, > 0.
        beta: Share of the previous velocity to keep, in [0, 1).

    Raises:
        ConfigError: A value is out of range.
    """

    rate: float = 0.01
    beta: float = 0.9

    def __post_init__(self) -> None:
        check_positive(rate=self.rate)
        check_shares(beta=self.beta)

    def start(self, size: int) -> list[FloatArray]:
        return [np.zeros(size, np.float32)]

    def step(self, state: list[FloatArray], g: FloatArray, factor: float, count: int) -> FloatArray:
        m = state[0]
        m *= self.beta
        m += g
        return (factor * self.rate) * m


@dataclass(frozen=True, slots=True, kw_only=True)
class Adagrad(Pushed):
    """Divide each gradient by the size of all gradients so far: ``a <- a + g^2``, ``w <- w - s rate g / sqrt(a)``.

    The source chose this rule: values that rarely have a gradient keep their long steps, and training with many
    replicas stays stable. ``a`` starts at ``first``, as in TensorFlow; with 0 the first step of each value would be
    ``rate``, however small its gradient.

    Args:
        rate: Step of a value whose first gradient is much larger than ``sqrt(first)``, in units of the weight, > 0.
        first: ``a`` before the first push, in units of a squared gradient, >= 0.

    Raises:
        ConfigError: A value is out of range.

    Source:
        Duchi et al. 2011, JMLR 12; Dean et al. 2012, section 4.1.
    """

    rate: float = 0.05
    first: float = 0.1

    def __post_init__(self) -> None:
        check_positive(rate=self.rate)
        if not 0 <= self.first <= 1e18:
            raise ConfigError(f"first must be from 0 to 1e18, got {self.first}")

    def start(self, size: int) -> list[FloatArray]:
        return [np.full(size, self.first, np.float32)]

    def step(self, state: list[FloatArray], g: FloatArray, factor: float, count: int) -> FloatArray:
        a = state[0]
        a += g * g
        change = (factor * self.rate) * g
        root = np.sqrt(a)
        # Where no gradient has been yet, a may be 0, and so is the step.
        np.divide(change, root, out=change, where=root > 0 if self.first == 0 else True)
        return change


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam(Pushed):
    """Divide the mean gradient of each value by the usual size of its gradients.

    With ``t``, from 1, the number of the shard's pushes::

        m <- beta1 m + (1 - beta1) g
        v <- beta2 v + (1 - beta2) g^2
        w <- w - s rate sqrt(1 - beta2^t) / (1 - beta1^t) m / (sqrt(v) + epsilon)

    This is Keras's form of Adam, with Keras's defaults. With K replicas there are K steps for each step of a single
    replica, so a value may move K times as far: divide the rate by K.

    Args:
        rate: Step of a value whose gradients are always the same, in units of the weight, > 0.
        beta1: Share of the previous ``m`` to keep, in [0, 1).
        beta2: Share of the previous ``v`` to keep, in [0, 1).
        epsilon: Size of gradients below which steps are smaller, > 0.

    Raises:
        ConfigError: A value is out of range.

    Source:
        Kingma, Ba 2014, arXiv:1412.6980, the order of section 2.
    """

    rate: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-7

    def __post_init__(self) -> None:
        check_positive(rate=self.rate, epsilon=self.epsilon)
        check_shares(beta1=self.beta1, beta2=self.beta2)

    def start(self, size: int) -> list[FloatArray]:
        return [np.zeros(size, np.float32), np.zeros(size, np.float32)]

    def step(self, state: list[FloatArray], g: FloatArray, factor: float, count: int) -> FloatArray:
        m, v = state
        m += (1 - self.beta1) * (g - m)
        v += (1 - self.beta2) * (g * g - v)
        rate = self.rate * (1 - self.beta2 ** (count + 1)) ** 0.5 / (1 - self.beta1 ** (count + 1))
        change: FloatArray = (factor * rate) * m / (np.sqrt(v) + self.epsilon)
        return change


PUSHED: Family[Pushed] = Family("push rule", sgd=Sgd, momentum=Momentum, adagrad=Adagrad, adam=Adam)
"""Every rule of a shard by name."""


def check_fits(gradient: Any, weights: FloatArray) -> None:
    """Raise ``ConfigError`` for a gradient that does not fit, which NumPy's broadcasting would silently accept.

    Raises:
        ConfigError: The gradient is not an array, or has another length or type.
    """
    if not isinstance(gradient, np.ndarray) or (gradient.shape, gradient.dtype) != (weights.shape, weights.dtype):
        received = f"{gradient.dtype} {gradient.shape}" if isinstance(gradient, np.ndarray) else type(gradient).__name__
        raise ConfigError(f"a push to this shard must be {weights.dtype} {weights.shape}, but is {received}")


def is_finite(row: FloatArray) -> bool:
    """Return whether a pushed gradient, as a float32 row, contains no NaN and no infinity.

    Then its float64 sum is finite, because float32 values cannot overflow it.
    """
    with np.errstate(invalid="ignore"):
        return bool(np.isfinite(row.sum(dtype=np.float64)))


@dataclass(slots=True)
class Softsync:
    """Collects pushes of a shard before each step: n-softsync, with ``c = floor(K / n)`` pushes from K replicas.

    Each push has its own factor ``s_i``. From ``c`` pushes it makes the gradient ``sum(s_i g_i) / sum(s_i)`` and the
    factor ``sum(s_i) / c``. Their product is the source's mean of ``s_i g_i``. A rule that divides by the size of
    gradients does not see the factors.

    Args:
        pushes: ``c``, the number of pushes in a step, 1 or more.
        total: Sum of the collected gradients, each times its factor; changed in place.
        count: Number of collected pushes.
        factors: Sum of the factors of the collected pushes.

    Source:
        Zhang et al. 2016, arXiv:1511.05950: the mean staleness is about n.
    """

    pushes: int
    total: FloatArray
    count: int = 0
    factors: float = 0.0

    @classmethod
    def begun(cls, size: int, replicas: int, n: int) -> Softsync:
        """Return an object that has collected no push yet, for a shard with ``size`` values.

        Raises:
            ConfigError: ``n`` is not from 1 to the number of replicas.
        """
        if not 1 <= n <= replicas:
            raise ConfigError(f"softsync must be from 1 to the {replicas} replicas, got {n}")
        return cls(replicas // n, np.zeros(size, np.float32))

    def add(self, gradient: FloatArray, factor: float) -> tuple[FloatArray, float] | None:
        """Collect a push.

        The last of ``c`` pushes returns the gradient and factor of a step, and begins a new collection.

        Raises:
            ConfigError: The gradient has another length or type; all values are unchanged.
        """
        check_fits(gradient, self.total)
        self.total += factor * gradient
        self.count += 1
        self.factors += factor
        if self.count < self.pushes:
            return None
        mean, share = self.total / self.factors, self.factors / self.count
        self.total[:] = 0
        self.count, self.factors = 0, 0.0
        return mean, share


class Last(NamedTuple):
    """The last push from one replica that a shard (a server's part of the weights) has accepted.

    Args:
        life: Incarnation of the replica, from 1.
        round: Number of its round, from 0; -1 before the first push.
        number: Number of the push in this round, from 0.
        at: Number of pushes that the shard had accepted before.
        tau: Staleness: number of steps that the shard made between the replica's fetch and this push.
    """

    life: int
    round: int = -1
    number: int = -1
    at: int = KNOWN
    tau: int = 0


Action = Literal["fetch", "begin fetch", "take", "step", "push"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """Decides in which of its steps a replica fetches weights and pushes gradients. Steps are numbered from 0.

    For example, 22 steps with ``n_fetch=5, n_push=4`` have 5 fetches, including the first one, and 6 pushes of 4, 4, 4,
    4, 4 and 2 gradients. Each gradient is pushed, and each fetch is used.

    Args:
        n_fetch: Number of steps with the weights of one fetch, 1 or more.
        n_push: Number of gradients in a push, 1 or more; the last push has the remaining gradients.

    Raises:
        ConfigError: A value is not a positive whole number.

    Source:
        Dean et al. 2012, algorithm 1.1, which pushes the first gradient alone and never the last ones.
    """

    n_fetch: int = 1
    n_push: int = 1

    def __post_init__(self) -> None:
        for name in ("n_fetch", "n_push"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} must be a whole number of steps, 1 or more, got {value!r}")

    def takes(self, step: int) -> bool:
        """Return whether a step begins with fetched weights.

        The first step waits for its fetch; later steps use the pending fetch.
        """
        return step % self.n_fetch == 0

    def begins(self, step: int, steps: int) -> bool:
        """Return whether a fetch begins before this step.

        It does when a fetch was used and a later step needs another.
        """
        return self.takes(step) and step + self.n_fetch < steps

    def pushes(self, step: int, steps: int) -> bool:
        """Return whether a step ends with a push of all gradients since the last push. The last step always does."""
        return (step + 1) % self.n_push == 0 or step + 1 == steps

    def actions(self, steps: int) -> Iterator[Action]:
        """Return all fetches and pushes that a replica makes in this number of steps, in order."""
        for step in range(steps):
            if self.takes(step):
                yield "take" if step else "fetch"
            if self.begins(step, steps):
                yield "begin fetch"
            yield "step"
            if self.pushes(step, steps):
                yield "push"


def turns(steps: Sequence[int], length: int, chance: np.random.Generator, *, alone: int = 0) -> list[int]:
    """Return which replica makes each step, for replicas that share a worker's model.

    The order is random. With strict turns, the staleness of every push would be the number of the other replicas. This
    is the worst order: fixed rates that are stable in a random order diverge, and so does Adagrad (parameter servers
    with 16 replicas on MNIST: 88% in random order, 13% in turns).

    Args:
        steps: Number of steps of each replica.
        length: Number of steps in a turn; a replica's last turn may be shorter.
        chance: Random generator that draws the replica of each turn.
        alone: Number of steps that the first replica makes before the others begin.

    Returns:
        For each step, the number of the replica. The last replica makes the last step, because only its last batch may
        be smaller than the others.
    """
    remaining = list(steps)
    drawn = [0] * min(alone, remaining[0])
    remaining[0] -= len(drawn)
    while unfinished := [replica for replica, count in enumerate(remaining) if count]:
        replica = unfinished[int(chance.integers(len(unfinished)))]
        count = min(length, remaining[replica])
        drawn += [replica] * count
        remaining[replica] -= count
    last = len(steps) - 1
    if steps[last]:
        index = len(drawn) - drawn[::-1].index(last) - 1
        drawn.append(drawn.pop(index))
    return drawn
