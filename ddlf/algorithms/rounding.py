"""Codecs that send every value, with fewer bits. Encoding runs in the sender, decoding in the receiver."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import frexp, inf, isfinite, lcm, prod
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ddlf.algorithms.payload import Codec, Float32s, Payload, array_of, peak_of
from ddlf.algorithms.weights import Tensor
from ddlf.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Float32(Codec):
    """Send the values as they are: exact, 4 bytes per value."""

    by_value: ClassVar[bool] = True

    def pack(self, tensor: Float32s) -> Payload:
        return {"values": tensor.reshape(-1)}

    def decode(self, payload: Payload, shape: Sequence[int]) -> Float32s:
        return array_of(payload, "values", np.float32, prod(shape)).reshape(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Float16(Codec):
    """Round to IEEE half precision, in units of a power of two: 2 bytes per value, 11 significant bits.

    The unit brings the largest magnitude of the tensor to 2**14 .. 2**15, so that it keeps updates of 1e-8 as well as
    updates of 1. A plain half has steps of 6e-8 below 6e-5, and ends at 65504. A value keeps its 11 bits down to 2**-29
    of the largest one. Since the unit is a power of two, it changes no bit of a value that a half holds well anyway. In
    a tensor that holds a NaN or an infinity the unit is 1, and values above 65504 become infinite.
    The measured relative L2 error on updates of a small CNN is 0.02%, so this codec needs no error feedback.

    Source:
        No loss of quality for DiLoCo in OpenDiLoCo, arXiv:2407.07852; a scale as in mixed precision training,
        Micikevicius et al. 2017, arXiv:1710.03740, here for each tensor.
    """

    largest: ClassVar[float] = (2 - 2**-10) * 2.0**127  # larger values round to 2**128
    by_peak: ClassVar[bool] = True

    def pack(self, tensor: Float32s) -> Payload:
        return self.pack_within(tensor, peak_of(tensor))

    def pack_within(self, tensor: Float32s, peak: float) -> Payload:
        values = tensor.reshape(-1)
        unit = _half_unit(peak)
        values = values * (np.float32(1) / unit)
        # Below the smallest normal half, 2**-14, halves are multiples of 2**-24, and so are float32 values near 0.75.
        # NumPy's cast of what lies between them takes 20 ns per value, and updates are full of it, so round it first.
        rounded = values + np.float32(0.75)
        rounded -= np.float32(0.75)
        np.copyto(rounded, values, where=~(np.abs(values) < np.float32(2**-14)))
        with np.errstate(over="ignore"):  # becomes infinite, as documented
            return {"halves": rounded.astype(np.float16), "unit": unit}

    def decode(self, payload: Payload, shape: Sequence[int]) -> Float32s:
        values = array_of(payload, "halves", np.float16, prod(shape)).astype(np.float32)
        with np.errstate(over="ignore"):  # the payload may be forged
            values *= array_of(payload, "unit", np.float32, 1)
        return values.reshape(shape)


def _half_unit(largest: float) -> Float32s:
    """Return the power of two, shape (1,), that scales the largest magnitude to 2**14 .. 2**15, as far as float32 allows."""
    exponent = frexp(largest)[1] - 15 if isfinite(largest) and largest else 0
    return np.array([2.0 ** max(exponent, -126)], np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class BFloat16(Codec):
    """Keep the upper half of each float32: 2 bytes per value, 8 significant bits, the whole range of float32.

    NumPy has no such type, so the payload is uint16. The codec rounds to nearest, ties to even, on the bits: the
    addition of 0x7FFF plus the lowest kept bit carries into the upper half exactly when rounding up is right, also
    across exponents and into infinity. The measured relative L2 error on updates of a small CNN is 0.17%.

    Source:
        The type of the same name in TensorFlow, ml_dtypes and PyTorch.
    """

    largest: ClassVar[float] = float(np.uint32(0x7F7F0000).view(np.float32))
    by_value: ClassVar[bool] = True

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
        if nan.any():  # without its lower half a NaN may look like an infinity; bit 0x40 keeps it a NaN
            upper[nan] = (bits[nan] >> np.uint32(16)) | np.uint32(0x40)
        return {"values": upper}

    def decode(self, payload: Payload, shape: Sequence[int]) -> Float32s:
        bits = array_of(payload, "values", np.uint16, prod(shape)).astype(np.uint32)
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
    and 23%, because such a range clips the outliers of updates. So use blocks if 4 more bytes per 4096 values are
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
    largest: ClassVar[float] = 3.4e38  # slightly below the largest float32, because 127 * scale could overflow

    def __post_init__(self) -> None:
        if self.block is not None and self.block <= 0:
            raise ConfigError(f"block must be > 0 values, got {self.block}")

    def pack(self, tensor: Float32s) -> Payload:
        steps, scales = _rounded(tensor.reshape(-1), self.block, 127)
        return {"steps": steps, "scales": scales}

    def decode(self, payload: Payload, shape: Sequence[int]) -> Float32s:
        size = prod(shape)
        steps = array_of(payload, "steps", np.int8, size)
        return _values(steps, array_of(payload, "scales", np.float32, _blocks(size, self.block)), self.block).reshape(
            shape
        )

    def part(self, payload: Payload, shape: Sequence[int], low: int, high: int) -> Payload:
        (first, last), (begin, end) = _whole_blocks(self.block, prod(shape), low, high)
        return {"steps": payload["steps"][begin:end], "scales": payload["scales"][first:last]}

    def decode_part(self, payload: Payload, shape: Sequence[int], low: int, high: int) -> Float32s:
        _, (begin, end) = _whole_blocks(self.block, prod(shape), low, high)
        return self.decode(payload, (end - begin,))[low - begin : high - begin]


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4(Codec):
    """Round to 15 equal steps between plus and minus the largest magnitude of each block: half a byte per value.

    For one block ``x``::

        scale = max(abs(x)) / 7;  q = round(x / scale);  decoded = q * scale

    A byte contains two steps, ``q + 8`` of the first in its lower half. With 64 values in a block a value takes 0.56
    bytes, 1/7.1 of float32. Zeros, NaN and the range are handled like in ``int8``. The loss is large, and error
    feedback adds it to the next update.

    Args:
        block: Values per block, > 0.

    Raises:
        ConfigError: ``block`` is out of range.

    Source:
        Blockwise absmax: Dettmers et al. 2021, arXiv:2110.02861, there with 8 bits. Streaming DiLoCo,
        arXiv:2501.18512, sends 4-bit floats.
    """

    block: int = 64

    biased: ClassVar[bool] = True
    largest: ClassVar[float] = 3.4e38

    def __post_init__(self) -> None:
        if self.block <= 0:
            raise ConfigError(f"block must be > 0 values, got {self.block}")

    def pack(self, tensor: Float32s) -> Payload:
        steps, scales = _rounded(tensor.reshape(-1), self.block, 7)
        halves = np.full(steps.size + steps.size % 2, 8, np.uint8)
        np.add(steps, 8, out=halves[: steps.size], casting="unsafe")
        return {"pairs": halves[::2] | halves[1::2] << np.uint8(4), "scales": scales}

    def decode(self, payload: Payload, shape: Sequence[int]) -> Float32s:
        size = prod(shape)
        pairs = array_of(payload, "pairs", np.uint8, (size + 1) // 2)
        scales = array_of(payload, "scales", np.float32, _blocks(size, self.block))
        steps = np.stack([pairs & np.uint8(15), pairs >> np.uint8(4)], axis=1).reshape(-1)[:size].astype(np.int8)
        steps -= np.int8(8)
        return _values(steps, scales, self.block).reshape(shape)

    def part(self, payload: Payload, shape: Sequence[int], low: int, high: int) -> Payload:
        (first, last), (begin, end) = self._whole(prod(shape), low, high)
        return {"pairs": payload["pairs"][begin // 2 : (end + 1) // 2], "scales": payload["scales"][first:last]}

    def decode_part(self, payload: Payload, shape: Sequence[int], low: int, high: int) -> Float32s:
        _, (begin, end) = self._whole(prod(shape), low, high)
        return self.decode(payload, (end - begin,))[low - begin : high - begin]

    def _whole(self, size: int, low: int, high: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Like ``_whole_blocks``, with blocks that begin at the beginning of a byte."""
        (first, last), part = _whole_blocks(lcm(self.block, 2), size, low, high)
        several = lcm(self.block, 2) // self.block
        return (first * several, min(last * several, _blocks(size, self.block))), part


def _whole_blocks(block: int | None, size: int, low: int, high: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the range of blocks that a part of a tensor overlaps, and the range of their values."""
    if block is None:
        return (0, 1), (low, high)
    first, last = low // block, -(-high // block)
    return (first, last), (first * block, min(last * block, size))


def _blocks(size: int, block: int | None) -> int:
    return -(-size // (block or size or 1))


def _rows(size: int, block: int | None) -> list[tuple[slice, slice]]:
    """Cut values into the full blocks and the shorter last one, as (slice of values, slice of scales)."""
    length = block or size or 1
    full = size // length
    parts = [(slice(0, full * length), slice(0, full)), (slice(full * length, size), slice(full, full + 1))]
    return [(part, row) for part, row in parts if part.stop > part.start]


def _rounded(values: Float32s, block: int | None, largest: int) -> tuple[npt.NDArray[np.int8], Float32s]:
    """Return the steps of values, from ``-largest`` to ``largest``, and the scale of each block."""
    steps = np.empty(values.size, np.int8)
    scales = np.empty(_blocks(values.size, block), np.float32)
    for part, row in _rows(values.size, block):
        scales[row] = _quantise(values[part].reshape(len(scales[row]), -1), steps[part], largest)
    return steps, scales


def _values(steps: Tensor, scales: Tensor, block: int | None) -> Float32s:
    """Return the decoded values of steps."""
    values = np.empty(steps.size, np.float32)
    for part, row in _rows(steps.size, block):
        by_row = (len(scales[row]), -1)
        with np.errstate(over="ignore"):  # becomes infinite, beyond `largest` only
            np.multiply(steps[part].reshape(by_row), scales[row, np.newaxis], out=values[part].reshape(by_row))
    return values


def _quantise(rows: Float32s, steps: npt.NDArray[np.int8], largest: int) -> Float32s:
    """Write the steps of ``rows``, shape (blocks, values), to ``steps``, and return the scales, shape (blocks,)."""
    scales: Float32s = np.maximum(rows.max(axis=1), -rows.min(axis=1))  # no array of magnitudes
    scales /= np.float32(largest)
    finite = np.isfinite(scales)
    usable = finite & (scales >= np.finfo(np.float32).smallest_normal)
    with np.errstate(invalid="ignore"):  # inf / inf; replaced below
        scaled = rows / np.where(usable, scales, np.float32(inf))[:, np.newaxis]
    np.rint(scaled, out=scaled)
    scaled[~finite] = 0
    np.copyto(steps.reshape(rows.shape), scaled, casting="unsafe")
    return np.where(usable, scales, np.where(finite, np.float32(0), np.float32(np.nan)))
