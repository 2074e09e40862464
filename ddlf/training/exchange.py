"""Weights as they leave and updates as they come. Runs on the master; ``ddlf.roles.exchange`` is the worker's end.

The codecs are in ``ddlf.algorithms.codec``; here is what the master remembers of each slot between rounds: for a delta exactly what the slot's worker
holds, so that another worker can be given the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ddlf.algorithms.codec import EncodedUpdate, codec, decode_update, encode_delta, encode_update
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
        self.held: dict[int, Weights] = {}
        self._last: tuple[Weights, dict[str, Any]] | None = None
        self._sent: dict[int, tuple[Weights, EncodedUpdate | None]] = {}

    def encode(self, slot: int, weights: Weights, *, holds: bool = True) -> dict[str, Any]:
        """What to send to the worker of a slot; without deltas it is encoded once for all of them.

        Args:
            slot: Which.
            weights: The global ones. The same list again means the same round: another worker is given what the first one got.
            holds: Whether the worker has what was sent for this slot before.
        """
        if not self._delta:
            if self._last is None or self._last[0] is not weights:
                encoded, _ = encode_update(self._codec, weights, self._lossless)
                self._last = weights, {"delta": None, "encoded": encoded}
            return self._last[1]
        if slot not in self._sent or self._sent[slot][0] is not weights:
            delta = None
            if slot in self.held:
                delta, self.held[slot] = encode_delta(weights, self.held[slot], self._codec, self._lossless)
            else:
                self.held[slot] = weights
            self._sent[slot] = weights, delta
        delta = self._sent[slot][1]
        if delta is not None and holds:
            return {"delta": True, "encoded": delta}
        # Exactly what the slot's own worker would have now, so that the result is the same bits on another one.
        encoded, _ = encode_update(codec("float32"), self.held[slot], self._lossless)
        return {"delta": False, "encoded": encoded}


def read_update(encoded: EncodedUpdate, like: Weights) -> Weights:
    """Decode an update that came from a worker.

    Args:
        encoded: As it came; it is data of another machine, so everything in it is checked.
        like: The model's weights, for shapes and types.
    """
    return decode_update(encoded, like)
