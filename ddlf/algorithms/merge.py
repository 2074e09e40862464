"""Many updates -> one. Runs on the master.

An update is ``weights_before - weights_after`` of local training: one array per tensor of ``model.weights``. The merge
is the mean over slots, weighted by samples. Divisors are known here only: a worker never divides by the number of
slots, so a lost worker cannot shrink the result.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ddlf.errors import ConfigError

Tensor = npt.NDArray[Any]


def weighted_mean(updates: Sequence[Sequence[Tensor]], counts: Sequence[int]) -> list[Tensor]:
    """Merge the updates of one round: per tensor ``sum(n_j * g_j) / sum(n_j)`` over the slots ``j``.

    See ``RunningMerge`` for the order and precision of the sum, for integer tensors and for what is refused.

    Args:
        updates: One update per slot, in slot order.
        counts: Samples ``n_j`` that each slot trained on, each > 0.

    Returns:
        One new array per tensor, with the shapes and types of the updates.

    Raises:
        ConfigError: There is no update, or one does not fit.

    Source:
        FedAvg, McMahan et al. 2016, arXiv:1602.05629; with equal counts Phan, Do 2023, Algorithm 2.
    """
    if not updates or len(updates) != len(counts):
        raise ConfigError(f"need updates and as many sample counts, got {len(updates)} and {len(counts)}")
    merge = RunningMerge(len(updates), like=updates[0])
    for slot, (update, count) in enumerate(zip(updates, counts, strict=True)):
        merge.add(slot, update, count)
    return merge.result()


def non_finite(update: Sequence[Tensor]) -> dict[int, int]:
    """Return how many values are NaN or infinite, by tensor index; empty when all is well."""
    bad = {i: tensor.size - int(np.isfinite(tensor).sum()) for i, tensor in enumerate(update)}
    return {i: number for i, number in bad.items() if number}


class RunningMerge:
    """The weighted mean of one round while the updates still arrive, in any order.

    Updates are summed in slot order, never in arrival order: one that arrives early waits (by reference, without a
    copy) until all lower slots are in. So the result has the same bits whichever worker was fast, and most of the work
    is done when the last update arrives. Per tensor, with ``a`` in float64::

        a <- n_0 * g_0;  a <- a + n_1 * g_1;  ...;  mean = float32(a / (n_0 + n_1 + ...))

    In float64 the products of float32 values and counts below 2**29 are exact, hence a single slot, or slots that all
    sent the same, get exactly their update back. Tensors of integers or booleans (counters, seeds) are not averaged:
    their merged update is zero, so the master's value stays. BatchNorm statistics are averaged like any other float
    tensor.

    Args:
        slots: Number of slots, K > 0.
        like: Arrays with the shapes and types that every update must have, such as the model's weights. Not modified.

    Raises:
        ConfigError: ``slots`` is not positive.

    On failure:
        A refused update changes nothing: the same slot can be added again, from another worker.
    """

    def __init__(self, slots: int, like: Sequence[Tensor]) -> None:
        if slots <= 0:
            raise ConfigError(f"cannot merge {slots} slots")
        self._slots = slots
        self._expected = [(tensor.shape, tensor.dtype) for tensor in like]
        self._sums = [np.empty(shape) if np.issubdtype(dtype, np.floating) else None for shape, dtype in self._expected]
        # One product at a time needs memory; it is shared by all tensors and slots.
        self._product = np.empty(max((total.size for total in self._sums if total is not None), default=0))
        self._samples = 0
        self._next = 0
        self._waiting: dict[int, tuple[Sequence[Tensor], int]] = {}

    def add(self, slot: int, update: Sequence[Tensor], count: int) -> None:
        """Take the update of one slot, and sum all that are now in order.

        Args:
            slot: ``0 .. K-1``.
            update: One array per tensor. It must not be modified before ``result``.
            count: Samples that the slot trained on, > 0.

        Raises:
            ConfigError: The slot is unknown or was added before, a tensor has another shape or type or holds a NaN or
                an infinity, or ``count`` is not positive.
        """
        self._check(slot, update, count)
        self._waiting[slot] = (update, count)
        while self._next in self._waiting:
            self._sum(*self._waiting.pop(self._next))
            self._next += 1

    @property
    def missing(self) -> list[int]:
        """The slots whose update has not been added, in order."""
        return [slot for slot in range(self._next, self._slots) if slot not in self._waiting]

    def result(self) -> list[Tensor]:
        """Return the mean as new arrays, one per tensor.

        Raises:
            ConfigError: Slots are missing.
        """
        if self.missing:
            raise ConfigError(f"cannot merge: no update from slots {self.missing} of {self._slots}")
        merged: list[Tensor] = []
        for (shape, dtype), total in zip(self._expected, self._sums, strict=True):
            mean = np.zeros(shape, dtype)
            if total is not None:
                np.divide(total, self._samples, out=mean, casting="same_kind")
            merged.append(mean)
        return merged

    def _sum(self, update: Sequence[Tensor], count: int) -> None:
        for total, tensor in zip(self._sums, update, strict=True):
            if total is not None:
                first = self._samples == 0  # written straight into the sum, since 0 + -0 would lose the sign
                product = total if first else self._product[: tensor.size].reshape(tensor.shape)
                np.multiply(tensor, count, out=product, dtype=np.float64)
                if not first:
                    np.add(total, product, out=total)
        self._samples += count

    def _check(self, slot: int, update: Sequence[Tensor], count: int) -> None:
        if not 0 <= slot < self._slots:
            raise ConfigError(f"slot {slot} is not one of the {self._slots} slots of this round")
        if slot < self._next or slot in self._waiting:
            raise ConfigError(f"slot {slot} was merged already", hint="add one update per slot and round")
        if count <= 0:
            raise ConfigError(f"slot {slot} trained on {count} samples; its update has no weight")
        if len(update) != len(self._expected):
            raise ConfigError(f"slot {slot} sent {len(update)} tensors, but the model has {len(self._expected)}")
        for i, (tensor, (shape, dtype)) in enumerate(zip(update, self._expected, strict=True)):
            if tensor.shape != shape or tensor.dtype != dtype:
                raise ConfigError(
                    f"slot {slot}, tensor {i}: expected {dtype} {shape}, got {tensor.dtype} {tensor.shape}",
                    hint="create the same model on the master and on every worker",
                )
        for i, number in non_finite(update).items():
            raise ConfigError(
                f"slot {slot}, tensor {i}: {number} of {update[i].size} values are NaN or infinite",
                hint="lower the learning rate, or look for such values in the data",
            )
