"""The codecs. A codec makes updates and weights smaller for the network. Runs on master and workers.

A codec turns one float32 tensor into a payload, a small dict of arrays, and back. Encoding runs in the sender, decoding
in the receiver. ``encoding.py`` applies it to all tensors of a model. A codec that rounds small values to zero is
*biased*: it would suppress them in every round. So the sender adds the lost part to the next tensor (error feedback).

No number is made up: a NaN, an infinity or a value beyond the codec's range decodes to NaN or infinity, never to a
finite number.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import ceil, frexp, inf, isfinite, lcm, prod
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ddlf.algorithms.rule_text import Family, Named
from ddlf.algorithms.weights import Tensor
from ddlf.errors import ConfigError

Float32s = npt.NDArray[np.float32]
Payload = dict[str, Tensor]


class Codec(Named, ABC):
    """One way to make a float32 tensor smaller for the network. Subclasses define ``pack`` and ``decode``.

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
        """Return the payload (the small arrays to send) of one tensor of any shape, without error feedback.

        It may share the tensor's memory.
        """

    def pack_within(self, tensor: Float32s, peak: float) -> Payload:
        """Return the payload of a part of a tensor, like ``pack``.

        ``peak`` is the largest magnitude in the whole tensor.
        """
        return self.pack(tensor)

    def pack_after(self, tensor: Float32s, last: Tensor | None) -> Payload:
        """Return the payload of a tensor, like ``pack``, for a codec that continues from its previous payload.

        ``last`` is the array of that payload that ``goes_on`` names; None at first.
        """
        return self.pack(tensor)

    @abstractmethod
    def decode(self, payload: Payload, shape: Sequence[int]) -> Float32s:
        """Return the tensor that a payload encodes. It may share memory with the payload.

        Raises:
            ConfigError: The payload is not one of this codec for a tensor of this shape.
        """

    def part(self, payload: Payload, shape: Sequence[int], low: int, high: int) -> Payload:
        """Return the part of a tensor's payload (the arrays to send) that encodes a range of the tensor's values.

        Arrays with an entry for each value are cut, and others stay whole.

        Args:
            payload: From ``pack``.
            shape: Shape of the tensor.
            low: Index of the first value of the part in the flat tensor.
            high: Index after the last value of the part, above ``low``.
        """
        return {name: array[low:high] if array.size == prod(shape) else array for name, array in payload.items()}

    def decode_part(self, payload: Payload, shape: Sequence[int], low: int, high: int) -> Float32s:
        """Return a range of a tensor's values, shape (high - low,), decoded from the payload that ``part`` made.

        Raises:
            ConfigError: The payload does not belong to such a part.
        """
        return self.decode(payload, (high - low,))

    def encode(
        self, tensor: Float32s, error: Float32s | None = None, last: Tensor | None = None
    ) -> tuple[Payload, Float32s | None]:
        """Return the payload of ``tensor + error``, and the part of the values that the codec lost.

        Args:
            tensor: float32, any shape.
            error: Lost part of the previous call, with the shape of ``tensor``, or None.
            last: Array of the previous payload that ``goes_on`` names, or None.

        Returns:
            The payload, and ``tensor + error - decoded`` if the codec is biased, else None. The error is zero where the
            tensor is not finite: such a value is reported once, not added to every later tensor.
        """
        corrected = tensor if error is None else added(tensor, error)
        payload = self.pack_after(corrected, last)
        if not self.biased:
            return payload, None
        with np.errstate(invalid="ignore"):  # inf - inf; removed below
            lost = np.asarray(corrected - self.decode(payload, tensor.shape))
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
    """Return one array of a payload that another machine sent, after checking the array's type and shape."""
    array = payload.get(key)
    if array is None or array.dtype != dtype or array.shape != (size,):
        received = "nothing" if array is None else f"{array.dtype} {array.shape}"
        raise ConfigError(f"malformed payload: expected {np.dtype(dtype)} ({size},) as {key!r}, got {received}")
    return array


@dataclass(frozen=True, slots=True, kw_only=True)
class Float32(Codec):
    """Send the values unchanged. This is exact, and takes 4 bytes per value."""

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
    """Return the power of two, shape (1,), that scales the largest magnitude to 2**14 .. 2**15, as far as float32
    allows."""
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
        """Return the range of blocks that a part of a tensor overlaps. Blocks begin at the beginning of a byte."""
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
    """Cut a tensor's values into its full blocks and a shorter last one.

    Return each as (slice of values, slice of scales).
    """
    length = block or size or 1
    full = size // length
    parts = [(slice(0, full * length), slice(0, full)), (slice(full * length, size), slice(full, full + 1))]
    return [(part, row) for part, row in parts if part.stop > part.start]


def _rounded(values: Float32s, block: int | None, largest: int) -> tuple[npt.NDArray[np.int8], Float32s]:
    """Round values to whole steps from ``-largest`` to ``largest``. Return the steps, and the scale of each block."""
    steps = np.empty(values.size, np.int8)
    scales = np.empty(_blocks(values.size, block), np.float32)
    for part, row in _rows(values.size, block):
        scales[row] = _quantise(values[part].reshape(len(scales[row]), -1), steps[part], largest)
    return steps, scales


def _values(steps: Tensor, scales: Tensor, block: int | None) -> Float32s:
    """Return the decoded values: steps times the scale of their block."""
    values = np.empty(steps.size, np.float32)
    for part, row in _rows(steps.size, block):
        by_row = (len(scales[row]), -1)
        with np.errstate(over="ignore"):  # only values beyond `largest` become infinite
            np.multiply(steps[part].reshape(by_row), scales[row, np.newaxis], out=values[part].reshape(by_row))
    return values


def _quantise(rows: Float32s, steps: npt.NDArray[np.int8], largest: int) -> Float32s:
    """Round the blocks in ``rows``, shape (blocks, values), into ``steps``. Return their scales, shape (blocks,)."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK(Codec):
    """Send only the entries with the largest magnitudes, and their indices. Error feedback adds the others later.

    ``k = ceil(fraction * size)`` values are sent. Among entries of equal magnitude the first are sent, so that every
    machine sends the same. NaN counts as largest. Other values decode to zero. 8 bytes per sent value (6 in
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
        indices = _largest(values, self._sent(values.size))
        return {"places": indices.astype(np.min_scalar_type(max(values.size - 1, 0))), "values": values[indices]}

    def decode(self, payload: Payload, shape: Sequence[int]) -> Float32s:
        size = prod(shape)
        sent = self._sent(size)
        indices = array_of(payload, "places", np.min_scalar_type(max(size - 1, 0)), sent)
        if sent and int(indices.max()) >= size:
            raise ConfigError(f"malformed payload: place {indices.max()} in a tensor of {size} values")
        decoded = np.zeros(size, np.float32)
        decoded[indices] = array_of(payload, "values", np.float32, sent)
        return decoded.reshape(shape)

    def part(self, payload: Payload, shape: Sequence[int], low: int, high: int) -> Payload:
        begin, end = np.searchsorted(payload["places"], [low, high])
        return {"places": payload["places"][begin:end], "values": payload["values"][begin:end]}

    def decode_part(self, payload: Payload, shape: Sequence[int], low: int, high: int) -> Float32s:
        size = prod(shape)
        sent = payload["places"].size if "places" in payload else 0
        indices = array_of(payload, "places", np.min_scalar_type(max(size - 1, 0)), sent)
        if sent and not low <= int(indices.min()) <= int(indices.max()) < high:
            raise ConfigError(
                f"malformed payload: places {indices.min()} to {indices.max()} among values {low} to {high}"
            )
        decoded = np.zeros(high - low, np.float32)
        decoded[indices.astype(np.intp) - low] = array_of(payload, "values", np.float32, sent)
        return decoded

    def _sent(self, size: int) -> int:
        return min(size, ceil(self.fraction * size))


def _largest(values: Float32s, sent: int) -> npt.NDArray[np.intp]:
    """Return the indices of the entries with the largest magnitudes, which are sent, in ascending order.

    ``np.argpartition`` is unsuitable: its choice among equal magnitudes depends on the machine's vector instructions.
    """
    if sent == 0:
        return np.empty(0, np.intp)
    magnitudes = np.abs(values)
    magnitudes[np.isnan(magnitudes)] = inf
    threshold = np.partition(magnitudes, values.size - sent)[values.size - sent]
    above = np.flatnonzero(magnitudes > threshold)
    equal = np.flatnonzero(magnitudes == threshold)[: sent - len(above)]
    indices = np.concatenate([above, equal])
    indices.sort()
    return indices


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerSGD(Codec):
    """Send each matrix as a product of two thin ones, by one step of power iteration. Error feedback adds the loss
    later.

    ``M`` is the tensor as a matrix (last axis: columns), and ``Q`` the previous ``Q`` of this slot, random at first::

        P <- orthonormal(M @ orthonormal(Q));  Q <- M.T @ P;  decoded = P @ Q.T

    It sends ``(rows + columns) * rank`` values. Vectors, and matrices that would not shrink, are sent unchanged. ``Q``
    continues from round to round, so it turns towards the largest directions of updates.

    Args:
        rank: Columns of the thin matrices, > 0.

    Raises:
        ConfigError: ``rank`` is out of range.

    Source:
        Vogels et al. 2019, arXiv:1905.13727, Algorithm 1. There ``P`` and ``Q`` are averaged over all workers; here
        each slot sends its own, so that any rule can merge the decoded updates.
    """

    rank: int = 2

    biased: ClassVar[bool] = True
    goes_on: ClassVar[str] = "right"
    largest: ClassVar[float] = 1e30  # so that no sum of products overflows

    def __post_init__(self) -> None:
        if self.rank <= 0:
            raise ConfigError(f"rank must be > 0, got {self.rank}")

    def pack(self, tensor: Float32s) -> Payload:
        return self.pack_after(tensor, None)

    def pack_after(self, tensor: Float32s, last: Tensor | None) -> Payload:
        rows, columns = _sides(tensor.shape)
        if not _is_smaller(rows, columns, self.rank):
            return {"values": tensor.reshape(-1)}
        matrix = np.ascontiguousarray(tensor).reshape(rows, columns)
        start = _orthonormal(_begun(last, (columns, self.rank))).astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # NaN and infinity stay NaN and infinity
            p = _orthonormal(matrix @ start).astype(np.float32)
            q = matrix.T @ p
        return {"left": p.reshape(-1), "right": np.ascontiguousarray(q).reshape(-1)}

    def decode(self, payload: Payload, shape: Sequence[int]) -> Float32s:
        return self.decode_part(payload, shape, 0, prod(shape)).reshape(shape)

    def part(self, payload: Payload, shape: Sequence[int], low: int, high: int) -> Payload:
        rows, columns = _sides(shape)
        if not _is_smaller(rows, columns, self.rank):
            return {"values": payload["values"][low:high]}
        begin, end = low // columns, -(-high // columns)
        return {**payload, "left": payload["left"][begin * self.rank : end * self.rank]}

    def decode_part(self, payload: Payload, shape: Sequence[int], low: int, high: int) -> Float32s:
        rows, columns = _sides(shape)
        if not _is_smaller(rows, columns, self.rank):
            return array_of(payload, "values", np.float32, high - low)
        return _product(payload, columns, self.rank, low, high)


def _product(payload: Payload, columns: int, rank: int, low: int, high: int) -> Float32s:
    """Return a range of the values of the decoded matrix, shape (high - low,)."""
    begin, end = low // columns, -(-high // columns)
    left = array_of(payload, "left", np.float32, (end - begin) * rank).reshape(-1, rank)
    right = array_of(payload, "right", np.float32, columns * rank).reshape(columns, rank)
    # Do not use a product of matrices, whose last bits depend on the machine: sender and receiver need equal bits.
    with np.errstate(over="ignore", invalid="ignore"):  # the payload may be forged
        decoded = np.multiply.outer(left[:, 0], right[:, 0])
        for k in range(1, rank):
            decoded += np.multiply.outer(left[:, k], right[:, k])
    return np.asarray(decoded).reshape(-1)[low - begin * columns : high - begin * columns]


def _is_smaller(rows: int, columns: int, rank: int) -> bool:
    return (rows + columns) * rank < rows * columns


def _sides(shape: Sequence[int]) -> tuple[int, int]:
    """Return the numbers of rows and columns of a tensor when it is treated as a matrix."""
    return prod(shape[:-1]), shape[-1] if shape else 1


def _begun(last: Tensor | None, shape: tuple[int, int]) -> Tensor:
    """Return the matrix ``Q`` that the power iteration begins with.

    Missing columns and zeros become random, because zeros would stay zeros.
    """
    chance = np.random.default_rng(0).standard_normal(shape)
    if last is None or last.size != chance.size:
        return chance
    return np.where(np.any(last.reshape(shape), axis=0), last.reshape(shape), chance)


def _orthonormal(matrix: Tensor) -> npt.NDArray[np.float64]:
    """Return an orthonormal basis of the space that the columns of a thin matrix span, in float64."""
    return np.asarray(np.linalg.qr(np.asarray(matrix, np.float64))[0])


CODEC: Family[Codec] = Family(
    "codec",
    float32=Float32,
    float16=Float16,
    bfloat16=BFloat16,
    int8=lambda: Int8(),
    **{"int8-block": lambda block=4096: Int8(block=block)},
    **{"int4-block": Int4},
    topk=TopK,
    powersgd=PowerSGD,
)
"""Every codec by name."""


@lru_cache(maxsize=64)
def codec_named(text: str) -> Codec:
    """Return ``CODEC.read(text)`` from a cache, because each update of a run names its codec."""
    return CODEC.read(text)


@dataclass(frozen=True, slots=True)
class Outward(Named):
    """The encoding of weights for the workers: ``float16``, or ``delta:int8`` for the difference to a worker's weights.

    Args:
        codec: Codec for the weights, or for the difference.
        delta: Whether the master sends the difference instead of the weights.

    Raises:
        ConfigError: The codec is biased, and would encode whole weights.
    """

    codec: Codec
    delta: bool = False

    def __post_init__(self) -> None:
        if self.codec.biased and not self.delta:
            raise ConfigError(
                f"weights cannot travel as {self.codec.name!r}: the lost part would never arrive",
                hint=f"use float32, float16 or bfloat16; or delta:{self.codec.name}, for weights from the master to the workers",
            )

    @classmethod
    def read(cls, text: str) -> "Outward":
        """Return the encoding that a text names: a codec, or ``delta:`` and a codec.

        Raises:
            ConfigError: The text does not name a codec, or the codec cannot encode weights.
        """
        return cls(CODEC.read(text.removeprefix("delta:")), text.startswith("delta:"))

    def __str__(self) -> str:
        return "delta:" * self.delta + str(self.codec)
