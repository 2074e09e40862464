"""Weights and updates as they travel. ``WeightsOut`` and ``read_update`` run on the master, ``WorkerEnd`` on a worker.

The codecs are in ``ddlf.algorithms.codec``; here is what each side remembers of each slot between rounds: for a delta the master keeps exactly what
the slot's worker holds, so that another worker can be given the same; a worker keeps the residual, which is what a biased codec still owes of the
slot's updates (``ddlf.training.residuals`` is the master's side of that).
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
from ddlf.errors import AppMissing, ConfigError

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


Residual = list[np.ndarray[Any, Any] | None]
"""What a codec still owes of a slot's updates, for each tensor; None where nothing."""


class WorkerEnd:
    """A worker's side: the weights that it holds, and the residuals of its updates.

    Residuals are kept of a slot's last two rounds: while the last one is not known to count, the master may ask for the one before.
    """

    def __init__(self) -> None:
        self._held: dict[int, Weights] = {}
        self._residuals: dict[
            int, dict[int, Residual]
        ] = {}  # slot -> round, from 0, after which it was left -> residual

    def read_weights(self, slot: int, message: dict[str, Any], like: Weights) -> Weights:
        """The weights that came for a slot, whole or as a difference to its last ones.

        Args:
            slot: Which.
            message: From ``WeightsOut.encode``; its ``delta`` is None when no differences will follow, so that nothing need be kept.
            like: The model's weights, for shapes and types.
        """
        if not message["delta"]:
            weights = decode_update(message["encoded"], like)
        elif slot in self._held:
            weights = apply_delta(self._held[slot], message["encoded"])
        else:
            raise ConfigError("a difference of weights came before any weights")
        if message["delta"] is not None:
            self._held[slot] = weights
        return weights

    def begin(self, slot: int, number: int, residual: Any) -> None:
        """Take note of the residual that a slot's round begins with.

        Args:
            slot: Which.
            number: Of the round, from 0.
            residual: ``"held"``: what the slot's round before left here; or the arrays; or None for nothing.

        Raises:
            AppMissing: The slot's round before left none here.
        """
        if isinstance(residual, str):
            self.residual(slot, number - 1)
        elif residual is None:
            self._residuals.pop(slot, None)
        else:
            self._residuals[slot] = {number - 1: residual}

    def residual(self, slot: int, number: int) -> Residual:
        """What a round of a slot left.

        Raises:
            AppMissing: It is not here, or not any more.
        """
        try:
            return self._residuals[slot][number]
        except KeyError:
            raise AppMissing(f"slot {slot + 1} has left no residual of round {number + 1} here") from None

    def encode_update(
        self, slot: int, name: str, update: Weights, lossless: Sequence[bool], number: int
    ) -> tuple[EncodedUpdate, float]:
        """An update as it travels back.

        Args:
            slot: Whose update; what the codec loses of it is added to the same slot's next one.
            name: Of the codec.
            update: One array for each tensor.
            lossless: For each, whether it must arrive exactly.
            number: Of the round, from 0.

        Returns:
            What travels, and its relative error: the L2 norm of the difference to the update over the update's.
        """
        before = self._residuals.get(slot, {}).get(number - 1)
        encoded, residual = encode_update(codec(name), update, lossless, before)
        if codec(name).biased:
            self._residuals[slot] = {number - 1: before or [None] * len(update), number: residual}
        else:
            self._residuals.pop(slot, None)  # what was owed has just been paid
        error = 0.0 if name == "float32" else relative_error(update, decode_update(encoded, update))
        return encoded, error
