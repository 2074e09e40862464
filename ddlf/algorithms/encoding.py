"""Apply a codec to a model's tensors on their way over the network. Encoding runs in the sender, decoding in the
receiver.

``encode_update`` is for updates and whole weights, ``encode_delta`` for changes of the weights since a worker last
received them. Both return dicts, lists, texts and arrays only, so their results can be sent directly.

Rules that hold for every codec:

- **Error feedback.** With a biased codec, the sender adds the lost part of a tensor to the next tensor:
  ``p = x + e``, send ``c = C(p)``, ``e <- p - D(c)``.
  The sum of all decoded tensors is then the sum of all tensors up to the last ``e``. (BytePS; Karimireddy et al. 2019,
  arXiv:1901.09847.)
- **Exact where it matters.** Tensors that the caller marks (BatchNorm statistics), other types than float32 (counters),
  and tensors below 1 KiB travel raw.
- **No number is made up.** A tensor with a NaN, an infinity or a value beyond the codec's range travels raw too, so
  that the receiver can count and report such values.
"""

from collections.abc import Sequence
from math import inf, sqrt
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from ddlf.algorithms.codec import Codec, Float32, Float32s, Payload, added, codec_named, name_of
from ddlf.algorithms.weights import Tensor, is_float
from ddlf.errors import ConfigError

RAW_BELOW_BYTES = 1024
"""Smaller tensors travel raw: a few biases cost hardly any bytes, but a wrong bias hurts. (hivemind does the same.)"""


SAME: Payload = {"same": np.zeros(0, np.uint8)}
"""Stands for an unchanged tensor, which does not travel."""


class EncodedUpdate(TypedDict):
    """The encoded tensors of a model in a message. At run time this is a plain dict.

    ``payloads`` has one entry per tensor: ``{"raw": array}``, the payload of the codec that ``codec`` names, or
    ``SAME`` for zeros, which in a difference means unchanged (``without_zeros``). Shapes do not travel: the receiver
    has the same model, and allocates memory by its own shapes only.
    """

    codec: str
    payloads: list[Payload]


def encode_update(
    codec: Codec,
    tensors: Sequence[Tensor],
    lossless: Sequence[bool],
    residuals: Sequence[Float32s | None] | None = None,
) -> tuple[EncodedUpdate, list[Float32s | None]]:
    """Encode all tensors of an update, or of weights on their way to a worker.

    Residuals belong to one slot's stream of updates: keep the returned ones once the master has merged the update, and
    start from None when the stream restarts. Weights have no residuals, because each message replaces the previous one.

    Args:
        codec: The codec for all tensors that need not travel raw.
        tensors: One array per tensor. The result may share their memory.
        lossless: Per tensor, whether it must travel exactly, as BatchNorm statistics must.
        residuals: Residuals from the previous call, or None at first.

    Returns:
        The encoded tensors, and for each tensor its residual, the lost part (None without loss). A codec with memory
        adds one entry for each tensor with its last payload.

    Raises:
        ConfigError: The lists differ in length.
    """
    residuals = residuals or [None] * len(tensors)
    owed, lasts = residuals[: len(tensors)], residuals[len(tensors) :] or [None] * len(tensors)
    _check_lengths(len(tensors), lossless, owed, lasts)
    payloads: list[Payload] = []
    new_residuals: list[Float32s | None] = []
    for tensor, exact, residual, last in zip(tensors, lossless, owed, lasts, strict=True):
        corrected = tensor if residual is None else added(tensor, residual)
        if _travels_raw(codec, corrected, exact):
            payload, new_residual = _raw(corrected), None
        else:
            payload, new_residual = codec.encode(corrected, last=last)
        payloads.append(payload)
        new_residuals.append(new_residual)
    if codec.goes_on:
        new_residuals += [payload.get(codec.goes_on) for payload in payloads]
    return {"codec": name_of(codec), "payloads": payloads}, new_residuals


def decode_update(
    encoded: EncodedUpdate, like: Sequence[Tensor], parts: Sequence[tuple[Sequence[int], int, int]] = ()
) -> list[Tensor]:
    """Return the tensors that ``encode_update`` has encoded.

    Args:
        encoded: Update as it arrived. The result may share its memory.
        like: Arrays with the shapes and types that the tensors must have, such as the model's weights. Not modified.
        parts: For parts of tensors (``Codec.part``): for each part the shape of its tensor, the index of the first value,
            and the index after the last value.

    Returns:
        One array per tensor.

    Raises:
        ConfigError: The update does not fit ``like``, or is malformed.
    """
    try:
        used, payloads = codec_named(encoded["codec"]), list(encoded["payloads"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"not an encoded update: {type(encoded).__name__}") from error
    _check_lengths(len(like), payloads)
    tensors: list[Tensor] = []
    for i, (payload, expected) in enumerate(zip(payloads, like, strict=True)):
        try:
            tensors.append(_decode(used, payload, expected, parts[i] if parts else None))
        except ConfigError as error:
            hint = "create the same model on the master and on every worker"
            raise ConfigError(f"tensor {i}: {error}", hint=hint) from error
    return tensors


def encode_delta(
    new: Sequence[Tensor], base: Sequence[Tensor], codec: Codec, lossless: Sequence[bool]
) -> tuple[EncodedUpdate, list[Tensor]]:
    """Encode the weights as their difference to a worker's weights.

    For each worker, the master keeps the returned weights, which are the exact weights of the worker after decoding, and
    passes them as the next ``base``. A loss of the codec is then part of the next difference. It does not add up, so
    error feedback is not needed.

    Args:
        new: The weights that the worker should have, one array per tensor.
        base: The worker's weights.
        codec: The codec for the differences. With ``Float32`` the message contains the weights themselves, so that they
            arrive exactly.
        lossless: Per tensor, whether its new value must arrive exactly.

    Returns:
        The encoded difference, and the worker's weights after ``apply_delta(base, encoded)``: the same bits.

    Raises:
        ConfigError: The lists differ in length.
    """
    _check_lengths(len(new), base, lossless)
    payloads: list[Payload] = []
    for tensor, old, exact in zip(new, base, lossless, strict=True):
        if tensor is old or np.array_equal(_bytes_of(tensor), _bytes_of(old)):
            payloads.append(SAME)
        elif _travels_raw(codec, tensor, exact) or not _in_range(codec, delta := added(tensor, -old)):
            payloads.append(_raw(tensor))
        else:
            payloads.append(codec.pack(delta))
    encoded: EncodedUpdate = {"codec": codec.name, "payloads": payloads}
    return encoded, apply_delta(base, encoded)


def apply_delta(base: Sequence[Tensor], encoded: EncodedUpdate) -> list[Tensor]:
    """Return the weights that a worker has after it received an encoded difference to its earlier weights.

    Args:
        base: The previous weights. Not modified.
        encoded: From ``encode_delta`` with the same ``base``. The result may share its memory.

    Returns:
        One array per tensor: a raw tensor as it arrived, the tensor of ``base`` if it is unchanged, else ``base +
        decoded``.

    Raises:
        ConfigError: The difference does not fit ``base``, or is malformed.
    """
    decoded = decode_update(encoded, like=base)
    return [
        (tensor if "raw" in payload else np.add(old, tensor, out=tensor)) if "same" not in payload else old
        for old, tensor, payload in zip(base, decoded, encoded["payloads"], strict=True)
    ]


def relative_error(exact: Sequence[Tensor], decoded: Sequence[Tensor]) -> float:
    """Return ``norm(exact - decoded) / norm(exact)`` (L2 over all float tensors together); 0 if both norms are 0."""
    floats = [(x, y) for x, y in zip(exact, decoded, strict=True) if is_float(x)]
    difference = sum(_squared_norm(np.subtract(x, y, dtype=np.float64)) for x, y in floats)
    size = sum(_squared_norm(x.astype(np.float64)) for x, _ in floats)
    if size == 0:
        return inf if difference else 0.0
    return sqrt(difference / size)


def _squared_norm(x: npt.NDArray[np.float64]) -> float:
    flat = x.reshape(-1)  # without a BLAS, whose threads wait for each other for longer than the sum takes
    return float(np.einsum("i,i", flat, flat))


def encode_parts(
    codec: Codec,
    parts: Sequence[Tensor],
    whole_bytes: Sequence[int],
    lossless: Sequence[bool],
    peaks: Sequence[float] = (),
) -> EncodedUpdate:
    """Encode ranges of tensors so that they get the same bits as whole tensors in ``encode_update``.

    The codec must support parts.

    With a ``by_value`` codec, a part with values beyond the codec's range travels raw, but other parts of the tensor do
    not.

    Args:
        codec: A codec with ``by_value`` or ``by_peak``.
        parts: One flat array for each tensor.
        whole_bytes: Size of each whole tensor in bytes.
        lossless: For each tensor, whether it must travel exactly.
        peaks: Result of ``peak_of`` for each tensor, for a codec with ``by_peak``.
    """
    payloads = []
    for i, (part, size, exact) in enumerate(zip(parts, whole_bytes, lossless, strict=True)):
        if _stays_raw(codec, part, exact, size):
            payloads.append(_raw(part))
        elif codec.by_peak:
            payloads.append(codec.pack_within(part, peaks[i]) if peaks[i] <= codec.largest else _raw(part))
        else:
            payloads.append(codec.pack(part) if _in_range(codec, part) else _raw(part))
    return {"codec": codec.name, "payloads": payloads}


def _travels_raw(codec: Codec, tensor: Tensor, exact: bool) -> bool:
    return _stays_raw(codec, tensor, exact, tensor.nbytes) or not _in_range(codec, tensor)


def _stays_raw(codec: Codec, tensor: Tensor, exact: bool, whole_bytes: int) -> bool:
    """Return whether a tensor travels without the codec, whatever its values are."""
    return exact or tensor.dtype != np.float32 or whole_bytes < RAW_BELOW_BYTES or isinstance(codec, Float32)


def without_zeros(encoded: EncodedUpdate) -> EncodedUpdate:
    """Return an encoded update in which ``SAME`` replaces each tensor whose bits are all zero, such as a frozen one."""
    payloads = [
        SAME if "raw" in payload and not _bytes_of(payload["raw"]).any() else payload for payload in encoded["payloads"]
    ]
    return {"codec": encoded["codec"], "payloads": payloads}


def _bytes_of(tensor: Tensor) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)


def _raw(tensor: Tensor) -> Payload:
    """Return the payload of a tensor that travels without the codec.

    (The difference of 0-d arrays is a NumPy scalar, not an array.)
    """
    return {"raw": np.asarray(tensor)}


def _in_range(codec: Codec, tensor: Tensor) -> bool:
    """Return whether the codec can encode all values of a tensor.

    NaN and infinity are not: each comparison with NaN is false.
    """
    return bool(tensor.max() <= codec.largest and tensor.min() >= -codec.largest)


def _decode(codec: Codec, payload: Payload, expected: Tensor, part: tuple[Sequence[int], int, int] | None) -> Tensor:
    if not (isinstance(payload, dict) and all(isinstance(array, np.ndarray) for array in payload.values())):
        raise ConfigError("malformed payload: expected a dict of arrays")
    if "same" in payload:
        return np.zeros_like(expected)
    if "raw" in payload:
        raw = payload["raw"]
        if raw.shape != expected.shape or raw.dtype != expected.dtype:
            raise ConfigError(f"expected {expected.dtype} {expected.shape}, got {raw.dtype} {raw.shape}")
        return raw
    if expected.dtype != np.float32:
        raise ConfigError(f"expected {expected.dtype} to travel raw")
    return codec.decode(payload, expected.shape) if part is None else codec.decode_part(payload, *part)


def _check_lengths(tensors: int, *sequences: Sequence[Any]) -> None:
    if any(len(sequence) != tensors for sequence in sequences):
        raise ConfigError(
            f"expected one entry for each of {tensors} tensors, got {[len(sequence) for sequence in sequences]}"
        )
