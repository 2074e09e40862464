"""Sets as they travel between peers and a server, in full or rounded to 2 bytes for each weight. Pure.

The plan names a codec. With ``bfloat16`` or ``float16``, each trained float32 weight of a set travels as this type: the
set is a safetensors file with the same names and shapes. Other weights travel unchanged: integers, float64, and weights
that are not trained, such as the statistics of BatchNorm. Their error would not shrink while the peers train.

Only ``Wire`` knows the codec. Ledger, merges, outer optimizers and tests compute with the types of the model.

| what | precision |
|---|---|
| a peer's live weights | exact: a peer never rounds its own weights |
| a posted set, in the journal and as the answer to another peer | as it was posted: one rounding between two peers |
| a set that the server has computed | exact in the journal, rounded once for all peers |

A peer knows its last post as the server has it. When it replaces its weights, it adds ``live - posted``: its training
since the post, and the part that the rounding has lost. So in rounds no part is lost for good (error feedback), and the
server's own rounding of the base does not count as an update, see ``merging.next_base``.

The codecs with error feedback of updates, such as ``int8`` and ``topk``, are refused. They lose so much of whole weights
that the receiver needs the lost part with the next message, and in swaps the next set goes to another receiver.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod

import numpy as np

from ddlf.algorithms.codec import CODEC, BFloat16
from ddlf.algorithms.weights import Weights, is_float
from ddlf.errors import ConfigError
from ddlf.peers.sets import Array, Layout
from ddlf.training.checkpoints.tensors import dtype_of

FLOAT32 = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """A type with 2 bytes for float32 values.

    Attributes:
        limit: The smallest magnitude that becomes infinite.
        rounded: Rounds float32 values to the type: to nearest, ties to even. NaN stays NaN.
        read: Returns such values as float32, exactly.
    """

    limit: float
    rounded: Callable[[Array], Array]
    read: Callable[[Array], Array]


def _to_bfloat16(values: Array) -> Array:
    return BFloat16().pack(values)["values"].view(dtype_of("bfloat16"))


def _from_bfloat16(values: Array) -> Array:
    return BFloat16().decode({"values": values.view(np.uint16).reshape(-1)}, values.shape)


def _to_float16(values: Array) -> Array:
    """Round to IEEE half precision. The bits of a NaN do not depend on the processor."""
    flat = np.ascontiguousarray(values).reshape(-1)
    with np.errstate(over="ignore", under="ignore"):
        halves = flat.astype(np.float16)
    nan = np.isnan(flat)
    if nan.any():
        bits = flat.view(np.uint32)[nan]
        upper = (bits >> np.uint32(16)) & np.uint32(0x8000)
        halves.view(np.uint16)[nan] = upper | np.uint32(0x7E00) | ((bits >> np.uint32(13)) & np.uint32(0x3FF))
    return halves


HALVES: Mapping[str, Half] = {
    "bfloat16": Half(limit=float(np.uint32(0x7F7F8000).view(np.float32)), rounded=_to_bfloat16, read=_from_bfloat16),
    "float16": Half(limit=65520.0, rounded=_to_float16, read=lambda values: values.astype(np.float32)),
}
CODECS = (FLOAT32, *HALVES)
"""Codecs of sets. The first one rounds nothing."""


def check_codec(text: str) -> None:
    """Refuse a codec that sets cannot travel with.

    Raises:
        ConfigError: Names the codec and the reason.
    """
    if text in CODECS:
        return
    name, hint = str(text).partition(":")[0], f"use {', '.join(CODECS[1:])} or {FLOAT32}"
    if name in CODEC.names or name == "delta":
        raise ConfigError(
            f"sets of peers cannot travel as {text!r}: it is for updates, whose lost part follows with the next update, "
            "and a peer takes each set as it is",
            hint=hint,
        )
    raise ConfigError(f"peers have no codec {text!r}", hint=hint)


class Wire:
    """Turns weights into sets as they travel, and back.

    Args:
        model: Layout of exact sets.
        codec: One of ``CODECS``.
        trainable: Per tensor, whether it is trained.

    Attributes:
        layout: Layout of the sets that travel.
        bytes: Length of a set that travels.
    """

    def __init__(self, model: Layout, codec: str, trainable: Sequence[bool]) -> None:
        self.model = model
        self.codec = codec
        self._half = HALVES.get(codec)
        self._rounds = [
            self._half is not None and trained and kind == FLOAT32
            for (_, _, kind), trained in zip(model.tensors, trainable, strict=True)
        ]
        self.layout = model
        if any(self._rounds):
            kinds = zip(model.tensors, self._rounds, strict=True)
            self.layout = Layout([(name, shape, codec if rounds else kind) for (name, shape, kind), rounds in kinds])
        self.bytes = self.layout.bytes

    @property
    def digest(self) -> str:
        """SHA-256 of the header of sets that travel: two sides with the same digest have the same layout and codec."""
        return self.layout.digest

    def encode(self, weights: Sequence[Array]) -> bytes:
        """Return weights, in the order of the model, as the bytes of a set that travels."""
        if self._half is None:
            return self.layout.encode(weights)
        rounded = self._half.rounded
        return self.layout.encode(
            [
                rounded(np.asarray(weight)).reshape(weight.shape) if rounds else weight
                for weight, rounds in zip(weights, self._rounds, strict=True)
            ]
        )

    def decode(self, data: bytes) -> Weights:
        """Return the weights in a set, with the types of the model. The set may be an exact one of the journal.

        Args:
            data: Bytes that ``fault`` accepts, or an exact set.
        """
        if self._half is None or self._is_exact(data):
            return self.model.decode(data)
        read = self._half.read
        pairs = zip(self.layout.decode(data), self._rounds, strict=True)
        return [read(weight) if rounds else weight for weight, rounds in pairs]

    def fault(self, data: bytes) -> str:
        """Return why these bytes are not a set as it travels; empty if they are one."""
        return self.layout.fault(data)

    def unfit(self, weights: Sequence[Array]) -> str:
        """Return why weights cannot travel: NaN, infinite, or too large for the codec; empty if they can."""
        return self.model.not_finite(weights) or self.overflow(weights)

    def overflow(self, weights: Sequence[Array]) -> str:
        """Return which weight has finite values that the codec would make infinite; empty if none has."""
        limit = inf if self._half is None else self._half.limit
        for name, weight, rounds in zip(self.model.names, weights, self._rounds, strict=True):
            if rounds and is_float(weight) and weight.size and max(weight.max(), -weight.min()) >= limit:
                count = int(np.count_nonzero(np.isfinite(weight) & (np.abs(weight) >= limit)))
                if count:
                    return (
                        f"{count:,} of {prod(weight.shape):,} values of {name!r} are {limit:,.6g} or more, which "
                        f"{self.codec} makes infinite"
                    )
        return ""

    def travelling(self, data: bytes) -> bytes:
        """Return an exact set as it travels; empty bytes if it travels as it is."""
        if self.layout is self.model or not self._is_exact(data):
            return b""
        return self.encode(self.model.decode(data))

    def length(self, data: bytes) -> int:
        """Return the length of the set at the beginning of a record's bytes: an exact set, or one as it was posted."""
        return self.model.bytes if self._is_exact(data) else self.layout.bytes

    def _is_exact(self, data: bytes) -> bool:
        return data.startswith(self.model.header)
