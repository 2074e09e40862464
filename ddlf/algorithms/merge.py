"""Rules that merge many updates into one. Runs on the master.

An update is ``weights_before - weights_after`` of local training: one array per tensor of ``model.weights``. The merge
is by default the mean over slots, weighted by samples. Divisors are known here only: a worker never divides by the
number of slots, so a lost worker cannot shrink the result.

Each rule is a value whose ``start`` gives the merge of one round, which takes updates in any order of arrival::

    merge = MERGE.read("trimmed:0.2").start(slots, like=weights)
    merge.add(slot, update, samples)  # for each slot
    merged = merge.result()

| rule | result | use it for |
|---|---|---|
| ``mean`` | the mean of each coordinate, weighted by samples | honest workers |
| ``median`` | the median of each coordinate, each slot counts once | fewer than half of the slots are bad |
| ``trimmed:0.2`` | the mean of each coordinate without the 20% largest and 20% smallest | fewer than 20% are bad |
| ``krum:1,keep=3`` | the mean of the 3 updates nearest to the others | at most 1 slot is bad |
| ``geometric`` | the point with the least sum of distances to all updates | fewer than half of the samples are bad |
| ``clipped:1`` | the mean, with long updates shortened to the median length | a few updates are too long |
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from math import ceil, isfinite
from typing import ClassVar, Protocol

import numpy as np

from ddlf.algorithms.pairwise import Vector, norm, squared_distances
from ddlf.algorithms.rule_text import Family, Named
from ddlf.algorithms.weights import Tensor, fault, is_float
from ddlf.errors import ConfigError


class Merge(ABC):
    """The merge of one round's updates. It receives them one by one, as they arrive.

    Args:
        slots: Number of slots, K > 0.
        like: Arrays with the shapes and types that every update must have, such as the model's weights. Not modified.
        names: Paths of the tensors, for errors; without them they are numbered.

    Raises:
        ConfigError: ``slots`` is not positive.

    On failure:
        A refused update changes nothing: the same slot can be added again, from another worker.
    """

    def __init__(self, slots: int, like: Sequence[Tensor], names: Sequence[str] = ()) -> None:
        if slots <= 0:
            raise ConfigError(f"cannot merge {slots} slots")
        self._slots = slots
        # Shapes and types only; the weights themselves would be kept alive.
        self._like = [np.broadcast_to(np.zeros((), tensor.dtype), tensor.shape) for tensor in like]
        self._names = names
        self._missing = set(range(slots))

    def add(self, slot: int, update: Sequence[Tensor], count: int, *, checked: bool = False) -> None:
        """Add the update of one slot to the merge.

        Args:
            slot: ``0 .. K-1``.
            update: One array per tensor. It must not be modified before ``result``.
            count: Number of samples that the slot trained on, > 0.
            checked: Whether ``update_check.judge`` has accepted it, so that it needs no second check.

        Raises:
            ConfigError: The slot is unknown or was added before.
            BadUpdate: A tensor has another shape or type or holds a NaN or an infinity, or ``count`` is not positive.
        """
        if not 0 <= slot < self._slots:
            raise ConfigError(f"slot {slot} is not one of the {self._slots} slots of this round")
        if slot not in self._missing:
            raise ConfigError(f"slot {slot} was merged already", hint="add one update per slot and round")
        if not checked and (problem := fault(update, count, self._like, self._names)):
            raise problem.error(slot)
        self._missing.remove(slot)
        self._take(slot, update, count)

    def leave_out(self, slot: int) -> None:
        """Merge without the update of one slot, because it was rejected or will not come.

        Args:
            slot: A slot whose update has not been added.
        """
        self._missing.remove(slot)
        self._leave_out(slot)

    @property
    def missing(self) -> list[int]:
        """Return the slots whose updates have not been added yet, in order."""
        return sorted(self._missing)

    def result(self) -> list[Tensor]:
        """Return the merged update, one array per tensor. Integers and booleans are zero.

        An array may belong to an update, so nobody may modify it.

        Raises:
            ConfigError: Slots are missing.
        """
        if self._missing:
            raise ConfigError(f"cannot merge: no update from slots {self.missing} of {self._slots}")
        return [
            np.asarray(self._merged(i), tensor.dtype) if is_float(tensor) else np.zeros(tensor.shape, tensor.dtype)
            for i, tensor in enumerate(self._like)
        ]

    @abstractmethod
    def _take(self, slot: int, update: Sequence[Tensor], count: int) -> None:
        """Store a slot's checked update, or add it to the sum."""

    def _leave_out(self, slot: int) -> None:  # noqa: B027  most have nothing to do
        """Stop waiting for the update of this slot."""

    @abstractmethod
    def _merged(self, index: int) -> Tensor:
        """Return the merged value of one float tensor."""


class RunningMerge(Merge):
    """The weighted mean, summed while updates arrive.

    Updates are summed in slot order, never in arrival order: an update that arrives early waits (by reference, without
    a copy) until all lower slots have been added. So the result has the same bits whichever worker was fast, and most of
    the work is already done when the last update arrives. Per tensor, with ``a`` in float64::

        a <- n_0 * g_0;  a <- a + n_1 * g_1;  ...;  mean = float32(a / (n_0 + n_1 + ...))

    In float64 the products of float32 values and counts below 2**29 are exact, hence slots that all sent the same get
    exactly their update back. Tensors of integers or booleans (counters, seeds) are not averaged:
    their merged update is zero, so the master's value stays. BatchNorm statistics are averaged like any other float
    tensor.
    """

    def __init__(self, slots: int, like: Sequence[Tensor], names: Sequence[str] = ()) -> None:
        super().__init__(slots, like, names)
        self._sums: dict[int, Tensor] = {i: np.empty(tensor.shape) for i, tensor in enumerate(like) if is_float(tensor)}
        # One product at a time needs memory; it is shared by all tensors and slots.
        self._product = np.empty(max((total.size for total in self._sums.values()), default=0))
        self._samples = 0
        self._next = 0
        self._waiting: dict[int, tuple[Sequence[Tensor], int] | None] = {}  # None: the slot is left out

    def _take(self, slot: int, update: Sequence[Tensor], count: int) -> None:
        self._waiting[slot] = (update, count)
        self._go_on()

    def _leave_out(self, slot: int) -> None:
        self._waiting[slot] = None
        self._go_on()

    def _go_on(self) -> None:
        while self._next in self._waiting:
            waiting = self._waiting.pop(self._next)
            if waiting is not None:
                self._sum(*waiting)
            self._next += 1

    def _sum(self, update: Sequence[Tensor], count: int) -> None:
        for i, total in self._sums.items():
            first = self._samples == 0  # written straight into the sum, since 0 + -0 would lose the sign
            product = total if first else self._product[: total.size].reshape(total.shape)
            np.multiply(update[i], count, out=product, dtype=np.float64)
            if not first:
                np.add(total, product, out=total)
        self._samples += count

    def _merged(self, index: int) -> Tensor:
        mean = np.empty_like(self._like[index], order="C")
        np.divide(self._sums[index], self._samples, out=mean, casting="same_kind")
        return mean


class SingleMerge(Merge):
    """The mean of one slot's update, which is the update: the bits of ``RunningMerge`` without its sum in float64.

    It is for types that are narrower than float64. Their means of one update have no rounding error.
    """

    _update: Sequence[Tensor] = ()

    def _take(self, slot: int, update: Sequence[Tensor], count: int) -> None:
        self._update = update

    def _merged(self, index: int) -> Tensor:
        if not self._update:
            raise ConfigError("cannot merge: the only slot is left out")
        return np.asarray(self._update[index], order="C")


class Rule(Protocol):
    """The interface of merge rules, which merge the updates of a round into one.

    Attributes:
        least: Smallest number of slots.
        useful: Smallest number of slots that lets the rule limit one bad update. With fewer it only equals the mean.

    A rule that merges each value by itself has the class attribute ``by_value = True``. Then the sharded exchange can
    merge ranges of the weights. A rule that needs whole updates is a subclass of ``WholeRule`` instead.

    A rule whose result can be a part of a single update has the class attribute ``reveals``, a sentence that says so.
    """

    @property
    def least(self) -> int: ...

    @property
    def useful(self) -> int: ...

    def start(self, slots: int, like: Sequence[Tensor], names: Sequence[str] = ()) -> Merge:
        """Begin the merge of one round. ``Merge`` describes the arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean(Named):
    """The mean weighted by samples, which ``RunningMerge`` sums. A single bad slot can change it arbitrarily.

    Source:
        FedAvg, McMahan et al. 2016, arXiv:1602.05629; with equal counts Phan, Do 2023, Algorithm 2.
    """

    least: ClassVar[int] = 1
    useful: ClassVar[int] = 1
    by_value: ClassVar[bool] = True

    def start(self, slots: int, like: Sequence[Tensor], names: Sequence[str] = ()) -> Merge:
        narrow = all(tensor.dtype.itemsize < np.dtype(np.float64).itemsize for tensor in like if is_float(tensor))
        return (SingleMerge if slots == 1 and narrow else RunningMerge)(slots, like, names)


class SortedMerge(Merge):
    """Base of merges that sort the values of each coordinate over all slots.

    All updates are kept until ``result``.

    Since values are sorted, neither the order of arrival nor that of the slots changes a bit. Memory: the updates
    themselves, by reference, and one tensor times the number of slots.

    Args:
        combine: Takes the values of all slots in ascending order, shape (K, *shape), float32 or wider. Returns the
            merged values, shape (*shape,).
    """

    def __init__(
        self, slots: int, like: Sequence[Tensor], names: Sequence[str] = (), *, combine: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__(slots, like, names)
        self._combine = combine
        self._updates: dict[int, Sequence[Tensor]] = {}

    def _take(self, slot: int, update: Sequence[Tensor], count: int) -> None:
        self._updates[slot] = update

    def _merged(self, index: int) -> Tensor:
        values = np.stack([update[index] for update in self._updates.values()])
        values.sort(axis=0)
        return self._combine(values)


class WholeRule(Named, ABC):
    """A rule that gives each whole update a weight, from the updates' lengths or the distances between them.

    Attributes:
        by_length: Whether the rule uses lengths; otherwise it uses distances.
    """

    __slots__ = ()
    by_length: ClassVar[bool] = False

    def start(self, slots: int, like: Sequence[Tensor], names: Sequence[str] = ()) -> Merge:
        return WholeMerge(slots, like, names, weigh=self.weigh_all)

    def weigh_all(self, updates: Sequence[Sequence[Tensor]], counts: Vector) -> tuple[Vector, float]:
        """Return the weights of all updates, as ``weigh`` does, from the updates' float tensors."""
        return self.weigh(
            np.array([norm(update) for update in updates]) if self.by_length else squared_distances(updates), counts
        )

    @abstractmethod
    def weigh(self, measured: Vector, counts: Vector) -> tuple[Vector, float]:
        """Return a weight for each of S updates, and the divisor of the updates' weighted sum.

        Args:
            measured: The lengths of the updates, shape (S,), or their squared distances, shape (S, S), over all float
                tensors.
            counts: Samples of each.
        """


class WholeMerge(Merge):
    """Base of merges that give each whole update a weight. All updates are kept until ``result``.

    Sums are taken in slot order and in float64. Memory: the updates themselves, by reference.

    Args:
        weigh: A function of the float tensors and the sample counts of all updates, in slot order. It returns the
            weight of each update, and the divisor of the weighted sum.
    """

    def __init__(
        self,
        slots: int,
        like: Sequence[Tensor],
        names: Sequence[str] = (),
        *,
        weigh: Callable[[Sequence[Sequence[Tensor]], Vector], tuple[Vector, float]],
    ) -> None:
        super().__init__(slots, like, names)
        self._weigh = weigh
        self._updates: dict[int, tuple[Sequence[Tensor], int]] = {}
        self._weighed: tuple[Vector, float] | None = None

    def _take(self, slot: int, update: Sequence[Tensor], count: int) -> None:
        self._updates[slot] = update, count

    def _merged(self, index: int) -> Tensor:
        updates = [self._updates[slot][0] for slot in sorted(self._updates)]
        if self._weighed is None:
            counts = np.array([self._updates[slot][1] for slot in sorted(self._updates)], np.float64)
            floats = [i for i, tensor in enumerate(self._like) if is_float(tensor)]
            self._weighed = self._weigh([[update[i] for i in floats] for update in updates], counts)
        weights, divisor = self._weighed
        parts = (
            np.multiply(update[index], w, dtype=np.float64) for update, w in zip(updates, weights, strict=True) if w
        )
        return np.asarray(reduce(np.add, parts) / divisor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Median(Named):
    """The median of each coordinate, in float64. With an even number of slots it is the mean of the middle two values.

    Like in the source, each slot counts once, for any number of samples: a bad slot could lie about its samples. The
    rule tolerates bad slots if they are fewer than half. Its price: values that only a minority of the slots learned
    are lost, and with skewed updates the model learns slower than with the mean.

    Source:
        Yin et al. 2018, arXiv:1803.01498, Definition 1.
    """

    least: ClassVar[int] = 1
    useful: ClassVar[int] = 3
    by_value: ClassVar[bool] = True
    reveals: ClassVar[str] = "The merge median passes on single values."

    def start(self, slots: int, like: Sequence[Tensor], names: Sequence[str] = ()) -> Merge:
        return SortedMerge(slots, like, names, combine=self.combine)

    def combine(self, values: Tensor) -> Tensor:
        """Return the median of sorted values along the first axis."""
        low, high = (len(values) - 1) // 2, len(values) // 2
        return np.asarray(np.mean(values[low : high + 1], axis=0, dtype=np.float64))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrimmedMean(Named):
    """The mean of each coordinate without its largest and its smallest values, in float64.

    The rule leaves out ``floor(beta * K)`` of K values at each end: none with fewer than ``1 / beta`` slots. Like in
    the source, each slot counts once, for any number of samples. The rule tolerates up to ``floor(beta * K)`` bad
    slots.

    Args:
        beta: Share of the slots to leave out at each end, in [0, 0.5).

    Raises:
        ConfigError: ``beta`` is out of range.

    Source:
        Yin et al. 2018, arXiv:1803.01498, Definition 2.
    """

    beta: float = 0.2

    least: ClassVar[int] = 1
    by_value: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.beta < 0.5:
            raise ConfigError(f"beta must be in [0, 0.5), got {self.beta}")

    @property
    def useful(self) -> int:
        """Smallest number of slots that makes the rule leave out one value at each end; 1 if ``beta`` is 0."""
        return ceil(1 / self.beta) if self.beta > 1e-9 else 1

    def start(self, slots: int, like: Sequence[Tensor], names: Sequence[str] = ()) -> Merge:
        return SortedMerge(slots, like, names, combine=self.combine)

    def combine(self, values: Tensor) -> Tensor:
        """Return the trimmed mean of sorted values along the first axis."""
        cut = int(self.beta * len(values))
        return np.asarray(np.mean(values[cut : len(values) - cut], axis=0, dtype=np.float64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Krum(WholeRule):
    """The mean of the ``keep`` updates that lie closest to others (Krum for ``keep=1``, else Multi-Krum).

    The score of one of S updates is the sum of its squared Euclidean distances, over all float tensors, to its
    ``S - bad - 2`` nearest updates, at least one. The updates with the lowest scores count, each once, for any number
    of samples. The source proves the rule for ``S >= 2 * bad + 3``; DDLF refuses fewer slots. The last round of an
    epoch may have fewer. Coordinates are never mixed, so the result resembles an honest update. The price is the work
    of the other slots.

    Args:
        bad: Slots that may be bad, 0 or more.
        keep: Number of updates to take, 1 or more.

    Raises:
        ConfigError: A value is out of range.

    Source:
        Blanchard et al. 2017, arXiv:1703.02757.
    """

    bad: int = 1
    keep: int = 1
    reveals: ClassVar[str] = "The merge krum passes on a single update."

    def __post_init__(self) -> None:
        if self.bad < 0 or self.keep < 1:
            raise ConfigError(f"bad must be 0 or more and keep 1 or more, got {self.bad} and {self.keep}")

    @property
    def least(self) -> int:
        """Smallest number of slots in the source's proof; 1 if ``bad`` is 0, because then nothing needs a proof."""
        return 2 * self.bad + 3 if self.bad else 1

    useful = least

    def weigh(self, measured: Vector, counts: Vector) -> tuple[Vector, float]:
        """Return weight 1 for the ``keep`` updates with the lowest scores, and 0 for others. Lower slots win ties."""
        # without the distance to itself, which is 0
        nearest = np.sort(measured, axis=1)[:, 1 : 1 + max(1, len(measured) - self.bad - 2)]
        best = np.argsort(nearest.sum(axis=1), kind="stable")[: self.keep]
        weights = np.zeros(len(measured))
        weights[best] = 1
        return weights, len(best)


@dataclass(frozen=True, slots=True, kw_only=True)
class GeometricMedian(WholeRule):
    """The point with the least sum of distances to all updates, each counted by its samples (smoothed Weiszfeld).

    ``g_i`` are the updates over all float tensors, and ``n_i`` their samples. ``v`` starts as their weighted mean. Then
    ``steps`` times::

        b_i <- n_i / max(smoothing, norm(v - g_i))
        v <- sum(b_i * g_i) / sum(b_i)

    A distant update does not pull harder than a near one, so updates with fewer than half of the samples cannot move
    the result far. Each ``v`` is a weighted mean of the ``g_i``, so the steps compute only weights, from the distances
    between the updates.

    Args:
        steps: Number of steps, 0 or more. With 0 the result is the mean.
        smoothing: Distance below which the weight of an update no longer grows, in units of the weights, 1e-100 or
            more.

    Raises:
        ConfigError: A value is out of range.

    Source:
        RFA, Pillutla et al. 2019, arXiv:1912.13445, Algorithm 2. The source uses 3 or 4 steps, and each needs messages
        to all clients. Here steps need no messages.
    """

    steps: int = 32
    smoothing: float = 1e-6

    least: ClassVar[int] = 1
    useful: ClassVar[int] = 3

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ConfigError(f"steps must be 0 or more, got {self.steps}")
        if not (isfinite(self.smoothing) and self.smoothing >= 1e-100):  # below, an update's share could be infinite
            raise ConfigError(f"smoothing must be finite and 1e-100 or more, got {self.smoothing}")

    def weigh(self, measured: Vector, counts: Vector) -> tuple[Vector, float]:
        """Return the weights ``b_i`` of the last step, and their sum."""
        weights = counts
        for _ in range(self.steps):
            shares = weights / weights.sum()
            towards = measured @ shares  # the squared distance to v is this mean minus half of the mean over all pairs
            distances = np.sqrt(np.maximum(towards - shares @ towards / 2, 0))
            weights = counts / np.maximum(self.smoothing, distances)
        return weights, float(weights.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedMean(WholeRule):
    """The mean weighted by samples, after shortening the updates that are much longer than the median.

    ``g_i`` are the updates over all float tensors, and ``n_i`` their samples. With the median of all S lengths::

        f_i <- min(1, longest * median(norm(g_1) ... norm(g_S)) / norm(g_i))
        v <- sum(n_i * f_i * g_i) / sum(n_i)

    The rule limits the length of an update, not its direction: ``bad`` slots with opposite updates undo up to ``longest
    * bad`` median lengths of the other slots' sum.

    Args:
        longest: Maximum length of an update, as a multiple of the median length, > 0.

    Raises:
        ConfigError: ``longest`` is out of range.

    Source:
        Clipping by a norm: Sun et al. 2019, arXiv:1911.07963, there with a fixed norm. The median instead of a fixed
        norm is DDLF's choice.
    """

    longest: float = 1.0

    least: ClassVar[int] = 1
    useful: ClassVar[int] = 3
    by_length: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (isfinite(self.longest) and self.longest > 0):
            raise ConfigError(f"longest must be finite and > 0, got {self.longest}")

    def weigh(self, measured: Vector, counts: Vector) -> tuple[Vector, float]:
        """Return for each update its samples times ``f_i``, and the sum of all samples."""
        limit = self.longest * np.median(measured)
        factors = np.divide(limit, measured, out=np.ones(len(measured)), where=measured > limit)
        return counts * factors, float(counts.sum())


def merged(
    by: Rule, updates: Sequence[Sequence[Tensor]], counts: Sequence[int], *, checked: bool = False
) -> list[Tensor]:
    """Merge all updates of one round, given in slot order with the number of samples of each slot.

    Raises:
        ConfigError: There is no update, or the numbers of updates and counts differ.
        BadUpdate: An update does not fit the others.
    """
    if not updates or len(updates) != len(counts):
        raise ConfigError(
            f"merge needs equal numbers of updates and sample counts, above 0, got {len(updates)} and {len(counts)}"
        )
    merge = by.start(len(updates), like=updates[0])
    for slot, (update, count) in enumerate(zip(updates, counts, strict=True)):
        merge.add(slot, update, count, checked=checked)
    return merge.result()


MERGE: Family[Rule] = Family(
    "merge", mean=Mean, median=Median, trimmed=TrimmedMean, krum=Krum, geometric=GeometricMedian, clipped=ClippedMean
)
"""Every merge rule by name."""


def revealed_by(rule: Rule | None) -> str:
    """Return the sentence about the parts of single updates that a rule passes on; empty if it only passes on sums."""
    return str(getattr(rule, "reveals", ""))
