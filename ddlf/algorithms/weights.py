"""Tells which arrays are merged, computes means and differences of weights, and checks updates. Runs everywhere.

Weights are floats of any kind, including the types of ``ml_dtypes`` (bfloat16, float8), which NumPy does not count as
floats. Integers and booleans (counters, seeds, masks) and complex numbers are never merged.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ddlf.errors import BadUpdate

Tensor = npt.NDArray[Any]
Weights = list[np.ndarray[Any, Any]]


def is_float(tensor: Tensor) -> bool:
    """Return whether a tensor takes part in merges: only floating-point tensors do."""
    return is_float_type(tensor.dtype)


@lru_cache(maxsize=256)
def is_float_type(dtype: np.dtype[Any]) -> bool:
    """Return whether tensors of a type take part in merges: only floating-point types do."""
    if dtype.kind != "V" or dtype.names is not None:
        return dtype.kind == "f"
    try:
        import ml_dtypes
    except ImportError:  # then no array has such a type
        return False
    try:
        ml_dtypes.finfo(dtype)
    except ValueError:
        return False
    return True


def divided(update: Sequence[Tensor], by: float) -> list[Tensor]:
    """Return an update divided by a number. Types other than floats become zero, because they are not merged."""
    return [np.asarray(u / by, u.dtype) if is_float(u) else np.zeros_like(u) for u in update]


def mean_of(lists: Sequence[Sequence[Tensor]], shares: Sequence[float], total: float | None = None) -> list[Tensor]:
    """Return the weighted mean of lists of arrays, summed in their order in float64.

    For other types than floats it is the element-wise maximum.

    Args:
        lists: One or more lists of arrays, with equal shapes and types.
        shares: Weight of each list, > 0.
        total: Divisor of the sum: the sum of the shares, or more if further lists count as zeros.
    """
    total = sum(shares) if total is None else total
    return [
        np.asarray(
            sum(share * np.asarray(a, np.float64) for share, a in zip(shares, arrays, strict=True)) / total,
            arrays[0].dtype,
        )
        if is_float(arrays[0])
        else np.asarray(np.max(np.stack(arrays), axis=0))
        for arrays in zip(*lists, strict=True)
    ]


def difference(before: Sequence[Tensor], after: Sequence[Tensor], *, over: bool = False) -> list[Tensor]:
    """Return an update: ``before - after`` for each array. It is zero for integers and booleans, which are not merged.

    Args:
        before: Weights before the training.
        after: Weights after the training.
        over: Whether the update may overwrite arrays of ``after`` that are writable and have its type.
    """

    def subtract(b: Tensor, a: Tensor) -> Tensor:
        if not is_float(b):
            return np.zeros_like(b)
        if over and a.flags.writeable and (a.dtype, a.shape) == (b.dtype, b.shape):
            return np.subtract(b, a, out=a)
        return np.asarray(b - a, b.dtype)

    return [subtract(b, a) for b, a in zip(before, after, strict=True)]


def digest(weights: Sequence[Tensor]) -> str:
    """Return a SHA-256 hash of the types, shapes and values of weights."""
    sum = hashlib.sha256()
    for w in weights:
        sum.update(f"{w.dtype} {w.shape} ".encode())
        sum.update(np.ascontiguousarray(w).tobytes())
    return sum.hexdigest()


@dataclass(frozen=True, slots=True)
class Fault:
    """The reason why an update cannot be used at all.

    Args:
        reason: The problem and its location.
        tensor: Name of the tensor, such as ``"dense/kernel"`` or ``"tensor 3"``; empty for the whole update.
        count: Number of invalid values in that tensor.
        hint: What to do next.
    """

    reason: str
    tensor: str = ""
    count: int = 0
    hint: str = ""

    def error(self, slot: int, worker: str = "") -> BadUpdate:
        """Return the error that reports this fault of a slot's update."""
        return BadUpdate(
            f"slot {slot}: {self.reason}", hint=self.hint, worker=worker, tensor=self.tensor, count=self.count
        )


def fault(update: Sequence[Tensor], samples: int, like: Sequence[Tensor], names: Sequence[str] = ()) -> Fault | None:
    """Return the fault that makes an update unusable, such as NaN; None if it is usable.

    Args:
        update: One array per tensor.
        samples: Number of samples that the slot trained on.
        like: Arrays with the shapes and types that the update must have, such as the model's weights.
        names: Paths of the tensors, for the reason; without them they are numbered.
    """
    if samples <= 0:
        return Fault(f"trained on {samples} samples; its update has no weight")
    if len(update) != len(like):
        return Fault(f"sent {len(update)} tensors, but the model has {len(like)}", hint=_SAME_MODEL)
    for i, (tensor, expected) in enumerate(zip(update, like, strict=True)):
        if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
            return Fault(
                f"{_name(i, names)}: expected {expected.dtype} {expected.shape}, got {tensor.dtype} {tensor.shape}",
                _name(i, names),
                tensor.size,
                _SAME_MODEL,
            )
    for i, tensor in enumerate(update):
        finite = np.isfinite(tensor)
        if not finite.all():
            count = tensor.size - int(np.count_nonzero(finite))
            return Fault(
                f"{count:,} of {tensor.size:,} values of {_name(i, names)} are NaN or infinite",
                _name(i, names),
                count,
                "lower the learning rate, or look for such values in the data",
            )
    return None


def _name(index: int, names: Sequence[str]) -> str:
    return names[index] if names else f"tensor {index}"


_SAME_MODEL = "create the same model on the master and on every worker"
