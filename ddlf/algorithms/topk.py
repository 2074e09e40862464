"""The codec that sends few values and leaves the others for later. Encoding runs in the sender, decoding in the receiver."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, prod
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ddlf.algorithms.payload import Codec, Float32s, Payload, array_of
from ddlf.errors import ConfigError


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
        places = _largest(values, self._sent(values.size))
        return {"places": places.astype(np.min_scalar_type(max(values.size - 1, 0))), "values": values[places]}

    def decode(self, payload: Payload, shape: Sequence[int]) -> Float32s:
        size = prod(shape)
        sent = self._sent(size)
        places = array_of(payload, "places", np.min_scalar_type(max(size - 1, 0)), sent)
        if sent and int(places.max()) >= size:
            raise ConfigError(f"malformed payload: place {places.max()} in a tensor of {size} values")
        decoded = np.zeros(size, np.float32)
        decoded[places] = array_of(payload, "values", np.float32, sent)
        return decoded.reshape(shape)

    def part(self, payload: Payload, shape: Sequence[int], low: int, high: int) -> Payload:
        begin, end = np.searchsorted(payload["places"], [low, high])
        return {"places": payload["places"][begin:end], "values": payload["values"][begin:end]}

    def decode_part(self, payload: Payload, shape: Sequence[int], low: int, high: int) -> Float32s:
        size = prod(shape)
        sent = payload["places"].size if "places" in payload else 0
        places = array_of(payload, "places", np.min_scalar_type(max(size - 1, 0)), sent)
        if sent and not low <= int(places.min()) <= int(places.max()) < high:
            raise ConfigError(
                f"malformed payload: places {places.min()} to {places.max()} among values {low} to {high}"
            )
        decoded = np.zeros(high - low, np.float32)
        decoded[places.astype(np.intp) - low] = array_of(payload, "values", np.float32, sent)
        return decoded

    def _sent(self, size: int) -> int:
        return min(size, ceil(self.fraction * size))


def _largest(values: Float32s, sent: int) -> npt.NDArray[np.intp]:
    """Return the places of the entries to send, ascending.

    ``np.argpartition`` is unsuitable: its choice among equal magnitudes depends on the machine's vector instructions.
    """
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
