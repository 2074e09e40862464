"""A learning rate schedule whose phases, such as the warm-up, are given as fractions of the run.

It knows the number of steps of a slot. Runs wherever a model is.
"""

from __future__ import annotations

from typing import Any

import keras

from ddlf.algorithms.schedules import SCHEDULE
from ddlf.errors import ConfigError
from ddlf.training.slot.optimizers import read_position


@keras.saving.register_keras_serializable(package="ddlf")
class RunSchedule(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """A learning rate schedule in shares of the run: warm-up, cosine and others (``ddlf.algorithms.schedules``).

    In a DDLF run, the schedule counts the steps of the slot. Their number depends on K, the mode, ``worker_steps`` and
    the speed of workers. The last step of each slot always has the final rate. The schedule continues even if the
    slot's optimizer restarts in each round.

    Args:
        peak: The highest rate, > 0.
        rule: The schedule as text, such as ``"warmup:0.05,cosine"``.
        steps: Number of steps, ``epochs * ceil(samples / batch_size)``, needed for training with plain Keras. A DDLF
            run sets this number itself.
        epochs: Number of epochs with plain Keras, which set the length of the warm-up. By default the warm-up has
            ``share * steps`` steps.

    Raises:
        ConfigError: The rule is invalid; or the rate is needed, and the number of steps is unknown.

    Example::

        keras.optimizers.Adam(RunSchedule(1e-3, "warmup:0.05,cosine"))
    """

    follows_the_run = True

    def __init__(
        self, peak: float, rule: str = "warmup,cosine", steps: int | None = None, epochs: int | None = None
    ) -> None:
        super().__init__()
        self.peak, self.rule = float(peak), SCHEDULE.read(str(rule))
        self.steps, self.epochs = steps, epochs
        self.position: Any = None  # during a run, a variable of the optimizer
        self._planned: tuple[int, float] | None = None

    def warm(self, steps: int, epochs: int) -> float:
        """Return the number of warm-up steps W in a run of ``steps`` steps."""
        return self.rule.warmup.steps(steps, epochs)

    def plan(self, steps: int, epochs: int) -> None:
        """Start a run of ``steps`` steps, counted by the optimizer.

        If the master steps, this is one count for all slots.
        """
        self.position, self._planned = None, (steps, self.warm(steps, epochs))

    def __call__(self, step: Any) -> Any:
        """Return the learning rate after this number of steps."""
        if self.position is not None:
            step, steps, warm = read_position(self.position, step)
        else:
            steps, warm = self._steps_and_warmup()
            step = keras.ops.cast(step, "float32") + 1
        return self.peak * self.rule.share(step, steps, warm, keras.ops)

    def _steps_and_warmup(self) -> tuple[float, float]:
        if self._planned is not None:
            return self._planned
        if self.steps is None:
            raise ConfigError(
                f"the schedule {str(self.rule)!r} needs the number of steps of the run, which plain Keras does not tell it",
                hint="RunSchedule(..., steps=epochs * ceil(samples / batch_size)), or train with DDLF",
            )
        epochs = self.epochs or self.steps  # the number of epochs that the warm-up share refers to
        return self.steps, self.warm(self.steps, epochs)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of this schedule, which Keras saves with a model."""
        return {"peak": self.peak, "rule": str(self.rule), "steps": self.steps, "epochs": self.epochs}
