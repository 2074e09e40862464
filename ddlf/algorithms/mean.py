"""What the merge of one round is, and the usual one: the mean of all updates, weighted by samples. Runs on the master."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from ddlf.algorithms.check import fault
from ddlf.algorithms.named import Named
from ddlf.algorithms.weights import Tensor, is_float
from ddlf.errors import ConfigError


class Merge(ABC):
    """The merge of one round, while the updates still arrive.

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
        """Take the update of one slot.

        Args:
            slot: ``0 .. K-1``.
            update: One array per tensor. It must not be modified before ``result``.
            count: Samples that the slot trained on, > 0.
            checked: Whether ``check.judge`` has accepted it, so that it need not be looked at again.

        Raises:
            ConfigError: The slot is unknown or was added before.
            BadUpdate: A tensor has another shape or type or holds a NaN or an infinity, or ``count`` is not positive.
        """
        if not 0 <= slot < self._slots:
            raise ConfigError(f"slot {slot} is not one of the {self._slots} slots of this round")
        if slot not in self._missing:
            raise ConfigError(f"slot {slot} was merged already", hint="add one update per slot and round")
        if not checked and (found := fault(update, count, self._like, self._names)):
            raise found.error(slot)
        self._missing.remove(slot)
        self._take(slot, update, count)

    def leave_out(self, slot: int) -> None:
        """Merge without the update of one slot.

        Args:
            slot: One that is missing.
        """
        self._missing.remove(slot)
        self._leave_out(slot)

    @property
    def missing(self) -> list[int]:
        """The slots whose update has not been added, in order."""
        return sorted(self._missing)

    def result(self) -> list[Tensor]:
        """Return the merged update as new arrays, one per tensor. Those of integers or booleans are zero.

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
        """Keep or sum an update that fits."""

    def _leave_out(self, slot: int) -> None:  # noqa: B027  most have nothing to do
        """Wait for this slot no more."""

    @abstractmethod
    def _merged(self, index: int) -> Tensor:
        """The merged value of one float tensor, a new array."""


class RunningMerge(Merge):
    """The weighted mean, summed while updates arrive.

    Updates are summed in slot order, never in arrival order: one that arrives early waits (by reference, without a
    copy) until all lower slots are in. So the result has the same bits whichever worker was fast, and most of the work
    is done when the last update arrives. Per tensor, with ``a`` in float64::

        a <- n_0 * g_0;  a <- a + n_1 * g_1;  ...;  mean = float32(a / (n_0 + n_1 + ...))

    In float64 the products of float32 values and counts below 2**29 are exact, hence a single slot, or slots that all
    sent the same, get exactly their update back. Tensors of integers or booleans (counters, seeds) are not averaged:
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
        self._waiting: dict[int, tuple[Sequence[Tensor], int] | None] = {}  # None for those that are left out

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


class Rule(Protocol):
    """What every merge rule is.

    Attributes:
        least: Slots that it needs.
        useful: Slots from which on one bad update cannot do what it likes; with fewer it does no more than the mean.

    One that merges each value by itself says so with ``by_value``: it can be used on slices of the weights (``shards.py``).
    """

    @property
    def least(self) -> int: ...

    @property
    def useful(self) -> int: ...

    def start(self, slots: int, like: Sequence[Tensor], names: Sequence[str] = ()) -> Merge:
        """Begin the merge of one round; see ``Merge`` for the arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean(Named):
    """The mean weighted by samples, see ``RunningMerge``. One bad slot can make it anything.

    Source:
        FedAvg, McMahan et al. 2016, arXiv:1602.05629; with equal counts Phan, Do 2023, Algorithm 2.
    """

    least: ClassVar[int] = 1
    useful: ClassVar[int] = 1
    by_value: ClassVar[bool] = True

    def start(self, slots: int, like: Sequence[Tensor], names: Sequence[str] = ()) -> Merge:
        return RunningMerge(slots, like, names)
