"""A worker's end of the exchange: the weights that it holds for each slot, and the residuals that it keeps.

A residual is what a biased codec still owes of a slot's updates; ``ddlf.training.residuals`` is the master's side of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ddlf.algorithms.codec import CODEC, EncodedUpdate, apply_delta, decode_update, encode_update, relative_error
from ddlf.errors import AppMissing, ConfigError

Weights = list[np.ndarray[Any, Any]]
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
        codec = CODEC.read(name)
        encoded, residual = encode_update(codec, update, lossless, before)
        if codec.biased:
            self._residuals[slot] = {number - 1: before or [None] * len(update), number: residual}
        else:
            self._residuals.pop(slot, None)  # what was owed has just been paid
        error = 0.0 if name == "float32" else relative_error(update, decode_update(encoded, update))
        return encoded, error
