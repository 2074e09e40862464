"""The scale of the loss with ``mixed_float16``, and rounds in which every gradient overflowed. Runs on workers.

Keras's ``LossScaleOptimizer`` skips a step whose gradients overflow, and halves its scale. A few skipped steps are usual. A
round without any step teaches nothing, so the master learns of it. If gradients overflow without a scale, too, then
another scale cannot help.
"""

from __future__ import annotations

from math import log2
from typing import Any, NamedTuple

import numpy as np

from ddlf.errors import AppError
from ddlf.training.slot.optimizers import chain, innermost

LEAST_SCALE = 1.0


class Overflow(NamedTuple):
    """A round in which every step overflowed.

    Args:
        steps: Number of skipped steps.
        scale: The scale of the loss for the next round.
    """

    steps: int
    scale: float


class LossScale:
    """Watches the scale of a model's optimizer, from round to round.

    Args:
        optimizer: The optimizer of a model.
    """

    def __init__(self, optimizer: Any) -> None:
        self._scaling = next((candidate for candidate in chain(optimizer) if hasattr(candidate, "dynamic_scale")), None)
        self._optimizer = innermost(optimizer)
        self._steps, self._scale = 0, 1.0

    def begin(self) -> None:
        """Note the scale and the number of steps at the beginning of a round."""
        if self._scaling is not None:
            self._steps, self._scale = self._now()

    def overflow(self, slot: int, round: int) -> Overflow | None:
        """Return how a round overflowed; None if it made a step, or if the loss is not scaled.

        Args:
            slot: Number of the slot, from 1.
            round: Number of the round, from 1.

        Raises:
            AppError: Gradients overflow even without a scale.
        """
        if self._scaling is None:
            return None
        steps, scale = self._now()
        if steps > self._steps or scale >= self._scale:
            return None
        if scale < LEAST_SCALE:
            raise AppError(
                f"float16 overflows in all steps of round {round} of slot {slot}, even without a scaled loss",
                hint="use precision='mixed_bfloat16', smaller inputs, or a smaller learning rate",
            )
        return Overflow(int(log2(self._scale / scale) + 0.5), scale)

    def _now(self) -> tuple[int, float]:
        steps, scale = (
            np.asarray(variable)  # a variable with a copy on each card has no other conversion
            for variable in (self._optimizer._iterations, self._scaling.dynamic_scale)  # type: ignore[union-attr]
        )
        return int(steps), float(scale)
