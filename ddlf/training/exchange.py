"""Weights as they leave. Runs on the master; ``ddlf.roles.exchange`` is the worker's end.

The codecs are in ``ddlf.algorithms.codec``; here is what the master remembers of each slot between rounds: for a delta exactly what the slot's worker
holds, so that another worker can be given the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ddlf.algorithms.codec import EncodedUpdate, Float32, Outward, encode_delta, encode_update

Weights = list[np.ndarray[Any, Any]]


class WeightsOut:
    """The master's side of sending weights.

    Args:
        name: What ``Outward`` reads: a codec's text, or one after ``delta:``.
        lossless: For each tensor, whether it must arrive exactly.

    Attributes:
        differences: Whether weights travel as differences.
        held: Weights that each slot holds, if they do.
    """

    def __init__(self, name: str, lossless: Sequence[bool]) -> None:
        how = Outward.read(name)
        self._codec, self.differences = how.codec, how.delta
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
        if not self.differences:
            if self._last is None or self._last[0] is not weights:
                encoded, _ = encode_update(self._codec, weights, self._lossless)
                self._last = weights, {"delta": False, "encoded": encoded}
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
        encoded, _ = encode_update(Float32(), self.held[slot], self._lossless)
        return {"delta": False, "encoded": encoded}
