"""Weights and updates as they travel. ``WeightsOut`` and ``read_update`` run on the master, ``WorkerEnd`` on a worker.

The codecs are in ``ddlf.algorithms.codec``; here is what each side remembers between rounds: for a delta the master keeps exactly what each worker
holds, and a worker keeps what a biased codec has lost so far of each slot's updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ddlf.algorithms.codec import (
    EncodedUpdate,
    apply_delta,
    codec,
    decode_update,
    encode_delta,
    encode_update,
    relative_error,
)
from ddlf.errors import ConfigError

Weights = list[np.ndarray[Any, Any]]
DELTA = "delta:"


def check_codecs(updates: str, weights: str) -> None:
    """Refuse names that are no codecs before anything is trained.

    Raises:
        ConfigError: One is unknown, or cannot be used for weights.
    """
    codec(updates)
    if codec(weights.removeprefix(DELTA)).biased and not weights.startswith(DELTA):
        raise ConfigError(
            f"weights cannot travel as {weights!r}: what it loses would never come back",
            hint=f"use float32, float16, bfloat16 or {DELTA}{weights}",
        )


class WeightsOut:
    """The master's side of sending weights.

    Args:
        name: A codec's name, or ``"delta:"`` and a codec's name for the difference to what the worker holds.
        lossless: For each tensor, whether it must arrive exactly.
    """

    def __init__(self, name: str, lossless: Sequence[bool]) -> None:
        self._codec = codec(name.removeprefix(DELTA))
        self._delta = name.startswith(DELTA)
        self._lossless = lossless
        self._held: dict[int, Weights] = {}
        self._last: tuple[Weights, dict[str, Any]] | None = None

    def encode(self, slot: int, weights: Weights) -> dict[str, Any]:
        """What to send to the worker of a slot; without deltas it is encoded once for all of them."""
        if not self._delta:
            if self._last is None or self._last[0] is not weights:
                encoded, _ = encode_update(self._codec, weights, self._lossless)
                self._last = weights, {"delta": False, "encoded": encoded}
            return self._last[1]
        held = self._held.get(slot)
        if held is None:
            encoded, _ = encode_update(codec("float32"), weights, self._lossless)
            self._held[slot] = weights
            return {"delta": False, "encoded": encoded}
        encoded, self._held[slot] = encode_delta(weights, held, self._codec, self._lossless)
        return {"delta": True, "encoded": encoded}

    def forget(self, slot: int) -> None:
        """Send everything next time: it is not known what the worker of this slot holds."""
        self._held.pop(slot, None)


def read_update(encoded: EncodedUpdate, like: Weights) -> Weights:
    """Decode an update that came from a worker.

    Args:
        encoded: As it came; it is data of another machine, so everything in it is checked.
        like: The model's weights, for shapes and types.
    """
    return decode_update(encoded, like)


class WorkerEnd:
    """A worker's side: what it holds, and what its updates have lost so far."""

    def __init__(self) -> None:
        self._held: Weights | None = None
        self._lost: dict[int, Any] = {}

    def read_weights(self, message: dict[str, Any], like: Weights) -> Weights:
        """The weights that came, whole or as a difference to the last ones."""
        if message["delta"]:
            if self._held is None:
                raise ConfigError("a difference of weights came before any weights")
            self._held = apply_delta(self._held, message["encoded"])
        else:
            self._held = decode_update(message["encoded"], like)
        return self._held

    def encode_update(
        self, slot: int, name: str, update: Weights, lossless: Sequence[bool]
    ) -> tuple[EncodedUpdate, float]:
        """An update as it travels back.

        Args:
            slot: Whose update; what the codec loses of it is added to the same slot's next one.
            name: Of the codec.
            update: One array for each tensor.
            lossless: For each, whether it must arrive exactly.

        Returns:
            What travels, and its relative error: the L2 norm of the difference to the update over the update's.
        """
        encoded, self._lost[slot] = encode_update(codec(name), update, lossless, self._lost.get(slot))
        error = 0.0 if name == "float32" else relative_error(update, decode_update(encoded, update))
        return encoded, error

    def start(self) -> None:
        """Forget everything, for a new run."""
        self._held = None
        self._lost.clear()
