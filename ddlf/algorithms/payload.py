"""The interface of codecs, which make float32 tensors smaller for the network. Encoding runs in the sender, decoding in the receiver.

A codec turns one tensor into a payload, a small dict of arrays, and back. ``encoding.py`` applies it to all tensors of
a model. A codec that rounds small values to zero is *biased*: it would suppress them in every round. So the sender adds
the lost part to the next tensor (error feedback).

No number is made up: a NaN, an infinity or a value beyond the codec's range decodes to NaN or infinity, never to a
finite number.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from math import prod
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ddlf.algorithms.named import Named
from ddlf.algorithms.weights import Tensor
from ddlf.errors import ConfigError

Float32s = npt.NDArray[np.float32]
Payload = dict[str, Tensor]


class Codec(Named, ABC):
    """One way to make a float32 tensor smaller. Subclasses define ``pack`` and ``decode``.

    Attributes:
        biased: Whether the codec needs error feedback. Then ``encode`` returns the error to pass to its next call.
        goes_on: Name of the array of a payload that the sender passes to ``encode`` with the next tensor of the same
            stream; "" for none.
        largest: The largest magnitude that ``pack`` keeps.
        by_value: Whether the codec encodes each value independently of all other values.
        by_peak: Whether the encoding of a value depends only on the value and on the largest magnitude in its tensor.
    """

    __slots__ = ()
    biased: ClassVar[bool] = False
    goes_on: ClassVar[str] = ""
    largest: ClassVar[float] = float(np.finfo(np.float32).max)
    by_value: ClassVar[bool] = False
    by_peak: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """Name of this codec in messages: its text without the names of parameters."""
        return name_of(self)

    @abstractmethod
    def pack(self, tensor: Float32s) -> Payload:
        """Return the payload of one tensor of any shape, without error feedback. It may share the tensor's memory."""

    def pack_within(self, tensor: Float32s, peak: float) -> Payload:
        """Like ``pack``, for a part of a tensor whose largest magnitude is ``peak``."""
        return self.pack(tensor)

    def pack_after(self, tensor: Float32s, last: Tensor | None) -> Payload:
        """Like ``pack``, with the array of the previous payload that ``goes_on`` names; None at first."""
        return self.pack(tensor)

    @abstractmethod
    def decode(self, payload: Payload, shape: Sequence[int]) -> Float32s:
        """Return the tensor of a payload. It may share memory with the payload.

        Raises:
            ConfigError: The payload is not one of this codec for a tensor of this shape.
        """

    def part(self, payload: Payload, shape: Sequence[int], low: int, high: int) -> Payload:
        """Cut a payload for a part of its tensor. Arrays with an entry for each value are cut, and others stay whole.

        Args:
            payload: From ``pack``.
            shape: Shape of the tensor.
            low: Index of the first value of the part in the flat tensor.
            high: Index after the last value of the part, above ``low``.
        """
        return {name: array[low:high] if array.size == prod(shape) else array for name, array in payload.items()}

    def decode_part(self, payload: Payload, shape: Sequence[int], low: int, high: int) -> Float32s:
        """Return the values of a part of the tensor, shape (high - low,). ``part`` made the payload, from the same arguments.

        Raises:
            ConfigError: The payload does not belong to such a part.
        """
        return self.decode(payload, (high - low,))

    def encode(
        self, tensor: Float32s, error: Float32s | None = None, last: Tensor | None = None
    ) -> tuple[Payload, Float32s | None]:
        """Return the payload of ``tensor + error``, and the lost part.

        Args:
            tensor: float32, any shape.
            error: Lost part of the previous call, with the shape of ``tensor``, or None.
            last: Array of the previous payload that ``goes_on`` names, or None.

        Returns:
            The payload, and ``tensor + error - decoded`` if the codec is biased, else None. The error is zero where the
            tensor is not finite: such a value is reported once, not added to every later tensor.
        """
        whole = tensor if error is None else added(tensor, error)
        payload = self.pack_after(whole, last)
        if not self.biased:
            return payload, None
        with np.errstate(invalid="ignore"):  # inf - inf; removed below
            lost = np.asarray(whole - self.decode(payload, tensor.shape))
        if not np.isfinite(lost).all():
            lost[~np.isfinite(lost)] = 0
        return payload, lost


@cache
def name_of(codec: Codec) -> str:
    """Return ``codec.name`` from a cache, because each update of a run contains it."""
    return re.sub(r"\w+=", "", str(codec))


def added(x: Float32s, y: Float32s) -> Float32s:
    """Return ``x + y`` as an array, even if both are 0-d. An overflow gives an infinity, which later checks report."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(x + y)


def peak_of(tensor: Tensor) -> float:
    """Return the largest magnitude of a float32 tensor: 0 if it is empty, NaN if it contains one.

    Other types give 0.
    """
    return float(max(tensor.max(), -tensor.min())) if tensor.size and tensor.dtype == np.float32 else 0.0


def array_of(payload: Payload, key: str, dtype: npt.DTypeLike, size: int) -> Tensor:
    """Return one array of a received payload, after checking its type and shape."""
    array = payload.get(key)
    if array is None or array.dtype != dtype or array.shape != (size,):
        found = "nothing" if array is None else f"{array.dtype} {array.shape}"
        raise ConfigError(f"malformed payload: expected {np.dtype(dtype)} ({size},) as {key!r}, got {found}")
    return array
