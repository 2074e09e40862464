"""Make a tensor smaller for the network. Encoding runs in the sender, decoding in the receiver.

A codec turns one float32 tensor into a payload, a small dict of arrays, and back; ``encoding.py`` applies it to a model's. A codec that rounds small
values to zero is *biased*: round after round, it would never let them through, so what it lost is added to the next tensor (error feedback).

No number is made up: a NaN, an infinity or a value beyond the codec's range decodes to NaN or infinity, never to a finite number.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, frexp, inf, isfinite, prod
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ddlf.algorithms.named import Family, Named
from ddlf.algorithms.weights import Tensor
from ddlf.errors import ConfigError

Float32s = npt.NDArray[np.float32]
Payload = dict[str, Tensor]


class Codec(Named, ABC):
    """One way to make a float32 tensor smaller. Subclasses define ``pack`` and ``decode``.

    Attributes:
        biased: Whether it needs error feedback. Then ``encode`` returns the error to pass in next time.
        largest: The largest magnitude that ``pack`` keeps.
    """

    __slots__ = ()
    biased: ClassVar[bool] = False
    largest: ClassVar[float] = float(np.finfo(np.float32).max)

    @property
    def name(self) -> str:
        """This codec as it is named in messages: its text without the names of parameters."""
        return re.sub(r"\w+=", "", str(self))

    @abstractmethod
    def pack(self, tensor: Float32s) -> Payload:
        """Return the payload of one tensor of any shape, without error feedback. It may share the tensor's memory."""

    @abstractmethod
    def decode(self, payload: Payload, shape: Sequence[int]) -> Float32s:
        """Return the tensor of a payload. It may share memory with the payload.

        Raises:
            ConfigError: The payload is not one of this codec for a tensor of this shape.
        """

    def encode(self, tensor: Float32s, error: Float32s | None = None) -> tuple[Payload, Float32s | None]:
        """Return the payload of ``tensor + error``, and what it lost.

        Args:
            tensor: float32, any shape.
            error: What the previous call lost, with the shape of ``tensor``, or None.

        Returns:
            The payload, and ``tensor + error - decoded`` if the codec is biased, else None. The error is zero where the
            tensor is not finite: such a value is reported once, not added to every later tensor.
        """
        whole = tensor if error is None else added(tensor, error)
        payload = self.pack(whole)
        if not self.biased:
            return payload, None
        with np.errstate(invalid="ignore"):  # inf - inf; removed below
            lost = np.asarray(whole - self.decode(payload, tensor.shape))
        if not np.isfinite(lost).all():
            lost[~np.isfinite(lost)] = 0
        return payload, lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Float32(Codec):
    """Send the values as they are: exact, 4 bytes per value."""

    def pack(self, tensor: Float32s) -> Payload:
        return {"values": tensor.reshape(-1)}

    def decode(self, payload: Payload, shape: Sequence[int]) -> Float32s:
        return _values(payload, "values", np.float32, prod(shape)).reshape(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Float16(Codec):
    """Round to IEEE half precision, in units of a power of two: 2 bytes per value, 11 significant bits.

    The unit brings the largest magnitude of the tensor to 2**14 .. 2**15, so that updates of 1e-8 are kept as well as those
    of 1; by itself a half has steps of 6e-8 below 6e-5 and ends at 65504. A value keeps its 11 bits down to 2**-29 of
    the largest one. Since the unit is a power of two, it changes no bit of a value that a half holds well anyway. In a
    tensor that holds a NaN or an infinity the unit is 1, and values above 65504 become infinite.
    Measured: 0.02% relative L2 error on updates of a small CNN, which is why it is not run with error feedback.

    Source:
        No loss of quality for DiLoCo in OpenDiLoCo, arXiv:2407.07852; a scale as in mixed precision training,
        Micikevicius et al. 2017, arXiv:1710.03740, here for each tensor.
    """

    largest: ClassVar[float] = (2 - 2**-10) * 2.0**127  # what is above rounds to 2**128

    def pack(self, tensor: Float32s) -> Payload:
        values = tensor.reshape(-1)
        unit = _half_unit(values)
        values = values * (np.float32(1) / unit)
        # Below the smallest normal half, 2**-14, halves are multiples of 2**-24, and so are float32 values near 0.75.
        # NumPy's cast of what lies between them takes 20 ns per value, and updates are full of it, so round it first.
        rounded = values + np.float32(0.75)
        rounded -= np.float32(0.75)
        np.copyto(rounded, values, where=~(np.abs(values) < np.float32(2**-14)))
        with np.errstate(over="ignore"):  # becomes infinite, as documented
            return {"halves": rounded.astype(np.float16), "unit": unit}

    def decode(self, payload: Payload, shape: Sequence[int]) -> Float32s:
        values = _values(payload, "halves", np.float16, prod(shape)).astype(np.float32)
        with np.errstate(over="ignore"):  # of a payload that was made up
            values *= _values(payload, "unit", np.float32, 1)
        return values.reshape(shape)


def _half_unit(values: Float32s) -> Float32s:
    """The power of two, shape (1,), in units of which the largest magnitude is 2**14 .. 2**15, or as near as float32 allows."""
    largest = float(max(values.max(), -values.min())) if values.size else 0.0
    exponent = frexp(largest)[1] - 15 if isfinite(largest) and largest else 0
    return np.array([2.0 ** max(exponent, -126)], np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class BFloat16(Codec):
    """Keep the upper half of each float32: 2 bytes per value, 8 significant bits, the whole range of float32.

    NumPy has no such type, so the payload is uint16. Rounding is to nearest, ties to even, done on the bits: adding
    0x7FFF plus the lowest kept bit carries into the upper half exactly when rounding up is right, also across exponents
    and into infinity. Measured: 0.17% relative L2 error on updates of a small CNN.

    Source:
        The type of the same name in TensorFlow, ml_dtypes and PyTorch.
    """

    largest: ClassVar[float] = float(np.uint32(0x7F7F0000).view(np.float32))

    def pack(self, tensor: Float32s) -> Payload:
        values = np.ascontiguousarray(tensor).reshape(-1)
        bits = values.view(np.uint32)
        rounded = bits >> np.uint32(16)
        rounded &= np.uint32(1)
        rounded += np.uint32(0x7FFF)
        rounded += bits
        rounded >>= np.uint32(16)
        upper = rounded.astype(np.uint16)
        nan = np.isnan(values)
        if nan.any():  # its lower half, now lost, may be all that told it from an infinity; bit 0x40 does too
            upper[nan] = (bits[nan] >> np.uint32(16)) | np.uint32(0x40)
        return {"values": upper}

    def decode(self, payload: Payload, shape: Sequence[int]) -> Float32s:
        bits = _values(payload, "values", np.uint16, prod(shape)).astype(np.uint32)
        bits <<= np.uint32(16)
        return bits.view(np.float32).reshape(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8(Codec):
    """Round to 255 equal steps between plus and minus the largest magnitude of the tensor or block: 1 byte per value.

    For one block ``x``::

        scale = max(abs(x)) / 127;  q = round(x / scale);  decoded = q * scale

    Zero stays exactly zero, and no value moves by more than half a step. A block that holds a NaN or an infinity
    decodes to NaN as a whole. A block whose scale is below the smallest normal float32 (1.2e-38) decodes to zero.

    The largest magnitude was chosen by measurement. Relative L2 error on the largest tensor (495,616 values) of a small
    CNN, for updates of the first and third round: 1.5% and 3.1%; in blocks of 4096, 1.0% and 1.9%; with a zero point
    instead of a symmetric range, 1.2% and 4.2%; with a range of 6 standard deviations and a code book (hivemind), 4.8%
    and 23%, because updates have far outliers, which that clips. Hence blocks whenever 4 more bytes per 4096 are
    acceptable.

    Args:
        block: Values per block, > 0, or None for one scale for the whole tensor.

    Raises:
        ConfigError: ``block`` is out of range.

    Source:
        Blockwise absmax: Dettmers et al. 2021, arXiv:2110.02861 (there with a dynamic map instead of equal steps).
    """

    block: int | None = None

    biased: ClassVar[bool] = True
    largest: ClassVar[float] = 3.4e38  # up to the last float32 but for its rounding, where 127 * scale could overflow

    def __post_init__(self) -> None:
        if self.block is not None and self.block <= 0:
            raise ConfigError(f"block must be > 0 values, got {self.block}")

    def pack(self, tensor: Float32s) -> Payload:
        values = tensor.reshape(-1)
        steps = np.empty(values.size, np.int8)
        scales = np.empty(self._blocks(values.size), np.float32)
        for part, row in self._rows(values.size):
            scales[row] = _quantise(values[part].reshape(len(scales[row]), -1), steps[part])
        return {"steps": steps, "scales": scales}

    def decode(self, payload: Payload, shape: Sequence[int]) -> Float32s:
        size = prod(shape)
        steps = _values(payload, "steps", np.int8, size)
        scales = _values(payload, "scales", np.float32, self._blocks(size))
        values = np.empty(size, np.float32)
        for part, row in self._rows(size):
            by_row = (len(scales[row]), -1)
            with np.errstate(over="ignore"):  # becomes infinite, beyond `largest` only
                np.multiply(steps[part].reshape(by_row), scales[row, np.newaxis], out=values[part].reshape(by_row))
        return values.reshape(shape)

    def _blocks(self, size: int) -> int:
        return -(-size // (self.block or size or 1))

    def _rows(self, size: int) -> list[tuple[slice, slice]]:
        """Cut values into the full blocks and the shorter last one, as (slice of values, slice of scales)."""
        block = self.block or size or 1
        full = size // block
        parts = [(slice(0, full * block), slice(0, full)), (slice(full * block, size), slice(full, full + 1))]
        return [(part, row) for part, row in parts if part.stop > part.start]


def _quantise(rows: Float32s, steps: npt.NDArray[np.int8]) -> Float32s:
    """Write the steps of ``rows``, shape (blocks, values), to ``steps``, and return the scales, shape (blocks,)."""
    scales: Float32s = np.maximum(rows.max(axis=1), -rows.min(axis=1))  # no array of magnitudes
    scales /= np.float32(127)
    finite = np.isfinite(scales)
    usable = finite & (scales >= np.finfo(np.float32).smallest_normal)
    with np.errstate(invalid="ignore"):  # inf / inf; replaced below
        scaled = rows / np.where(usable, scales, np.float32(inf))[:, np.newaxis]
    np.rint(scaled, out=scaled)
    scaled[~finite] = 0
    np.copyto(steps.reshape(rows.shape), scaled, casting="unsafe")
    return np.where(usable, scales, np.where(finite, np.float32(0), np.float32(np.nan)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK(Codec):
    """Send only the entries largest in magnitude, with their places; the others wait in the error.

    ``k = ceil(fraction * size)`` values are sent. Of entries with the same magnitude the first are sent, so that every
    machine sends the same. NaN counts as largest. Decodes to zero where nothing was sent. 8 bytes per sent value (6 in
    tensors up to 65,536 values).

    Args:
        fraction: Share of the entries to send, in (0, 1].

    Raises:
        ConfigError: ``fraction`` is out of range.

    Source:
        Deep Gradient Compression, Lin et al. 2017, arXiv:1712.01887 (which adds momentum correction); BytePS.
    """

    fraction: float = 0.01

    biased: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ConfigError(f"fraction must be in (0, 1], got {self.fraction}")

    def pack(self, tensor: Float32s) -> Payload:
        values = tensor.reshape(-1)
        places = self._largest(values)
        return {"places": places.astype(np.min_scalar_type(max(values.size - 1, 0))), "values": values[places]}

    def decode(self, payload: Payload, shape: Sequence[int]) -> Float32s:
        size = prod(shape)
        sent = self._sent(size)
        places = _values(payload, "places", np.min_scalar_type(max(size - 1, 0)), sent)
        if sent and int(places.max()) >= size:
            raise ConfigError(f"malformed payload: place {places.max()} in a tensor of {size} values")
        decoded = np.zeros(size, np.float32)
        decoded[places] = _values(payload, "values", np.float32, sent)
        return decoded.reshape(shape)

    def _sent(self, size: int) -> int:
        return min(size, ceil(self.fraction * size))

    def _largest(self, values: Float32s) -> npt.NDArray[np.intp]:
        """Return the places to send, ascending.

        Not by ``np.argpartition``: which of several equal magnitudes it picks depends on the machine's vector
        instructions.
        """
        sent = self._sent(values.size)
        if sent == 0:
            return np.empty(0, np.intp)
        magnitudes = np.abs(values)
        magnitudes[np.isnan(magnitudes)] = inf
        threshold = np.partition(magnitudes, values.size - sent)[values.size - sent]
        above = np.flatnonzero(magnitudes > threshold)
        equal = np.flatnonzero(magnitudes == threshold)[: sent - len(above)]
        places = np.concatenate([above, equal])
        places.sort()
        return places


CODEC: Family[Codec] = Family(
    "codec",
    float32=Float32,
    float16=Float16,
    bfloat16=BFloat16,
    int8=lambda: Int8(),
    **{"int8-block": lambda block=4096: Int8(block=block)},
    topk=TopK,
)
"""Every codec by name."""


@dataclass(frozen=True, slots=True)
class Outward(Named):
    """How weights travel to the workers: ``float16``, or ``delta:int8`` for the difference to what a worker holds.

    Args:
        codec: Codec of the weights, or of the difference.
        delta: Whether the difference travels.

    Raises:
        ConfigError: The codec is biased, and whole weights travel.
    """

    codec: Codec
    delta: bool = False

    def __post_init__(self) -> None:
        if self.codec.biased and not self.delta:
            raise ConfigError(
                f"weights cannot travel as {self.codec.name!r}: what it loses would never come back",
                hint=f"use float32, float16, bfloat16 or delta:{self.codec.name}",
            )

    @classmethod
    def read(cls, text: str) -> "Outward":
        """Return what a text says: a codec's, or one after ``delta:``.

        Raises:
            ConfigError: It is no codec, or none for weights.
        """
        return cls(CODEC.read(text.removeprefix("delta:")), text.startswith("delta:"))

    def __str__(self) -> str:
        return "delta:" * self.delta + str(self.codec)


def added(x: Float32s, y: Float32s) -> Float32s:
    """Return ``x + y`` as an array even if 0-d. Overflow gives an infinity, which is then reported as such."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(x + y)


def _values(payload: Payload, key: str, dtype: npt.DTypeLike, size: int) -> Tensor:
    """Return one array of a payload that came over the network, after checking that it is what the codec writes."""
    array = payload.get(key)
    if array is None or array.dtype != dtype or array.shape != (size,):
        found = "nothing" if array is None else f"{array.dtype} {array.shape}"
        raise ConfigError(f"malformed payload: expected {np.dtype(dtype)} ({size},) as {key!r}, got {found}")
    return array
