"""A Keras learning-rate schedule that continues over the run, although the optimizer restarts in each round."""

from __future__ import annotations

from typing import Any

import keras

from ddlf.training.slot.optimizers import innermost, restarts
from ddlf.training.slot.run_position import read


class ContinuedSchedule(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """Calls a schedule with the slot's step in the run, instead of the optimizer's step in the round.

    Args:
        schedule: A schedule of Keras or of the user.

    Attributes:
        held: The position of the slot; see ``RunPosition``.
    """

    follows_the_run = True

    def __init__(self, schedule: Any) -> None:
        super().__init__()
        self._schedule = schedule
        self.held: Any = None

    def __call__(self, step: Any) -> Any:
        """Return the learning rate, given the optimizer's number of steps in its round."""
        if self.held is not None:
            step = keras.ops.cast(keras.ops.round(read(self.held, step)[0] - 1), step.dtype)
        return self._schedule(step)

    def get_config(self) -> dict[str, Any]:
        """Return the configuration, as Keras requires. Only workers have this schedule, and they save no model."""
        return {"schedule": self._schedule}


def continue_schedule(optimizer: Any) -> None:
    """Let the schedule of an optimizer, if it has one, continue over the run."""
    if restarts(optimizer):
        inner = innermost(optimizer)
        inner.learning_rate = ContinuedSchedule(inner._learning_rate)
