"""A learning rate in fractions of the run, which knows how many steps a slot makes in it. Runs wherever a model is."""

from __future__ import annotations

from typing import Any

import keras

from ddlf.algorithms.schedules import SCHEDULE
from ddlf.errors import ConfigError
from ddlf.training.slot.run_position import read


@keras.saving.register_keras_serializable(package="ddlf")
class RunSchedule(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """A schedule whose lengths are shares of the run: warm-up, cosine and others (``ddlf.algorithms.schedules``).

    In a run of DDLF it goes by the steps of the slot, whatever K, mode, ``worker_steps`` and parts by speed make of them: each slot's last step has
    the rate of the end. Where a slot's optimizer begins anew in each round, the schedule does not.

    Args:
        peak: The highest rate, > 0.
        rule: As text, such as ``"warmup:0.05,cosine"``.
        steps: S, where plain Keras trains: ``epochs * ceil(samples / batch_size)``. A run of DDLF has its own number.
        epochs: Epochs of that training, by which a warm-up counts; by default it is ``share * steps`` long.

    Raises:
        ConfigError: The rule is none; or the rate is asked for, and nobody has said how many steps there are.

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
        self.held: Any = None  # a variable of the optimizer, in a run
        self._planned: tuple[int, float] | None = None

    def warm(self, steps: int, epochs: int) -> float:
        """W, of so many steps."""
        return self.rule.warmup.steps(steps, epochs)

    def plan(self, steps: int, epochs: int) -> None:
        """Go over so many steps from now on, counted by the optimizer: where the master takes them, one for all slots."""
        self.held, self._planned = None, (steps, self.warm(steps, epochs))

    def __call__(self, step: Any) -> Any:
        """The rate, where the optimizer has made so many steps before."""
        if self.held is not None:
            step, steps, warm = read(self.held, step)
        else:
            steps, warm = self._alone()
            step = keras.ops.cast(step, "float32") + 1
        return self.peak * self.rule.share(step, steps, warm, keras.ops)

    def _alone(self) -> tuple[float, float]:
        if self._planned is not None:
            return self._planned
        if self.steps is None:
            raise ConfigError(
                f"the schedule {str(self.rule)!r} is in fractions of the run, and plain Keras does not say how many steps it has",
                hint="RunSchedule(..., steps=epochs * ceil(samples / batch_size)), or train with DDLF",
            )
        epochs = self.epochs or self.steps  # of so many the share is counted in steps
        return self.steps, self.warm(self.steps, epochs)

    def get_config(self) -> dict[str, Any]:
        """As it is saved."""
        return {"peak": self.peak, "rule": str(self.rule), "steps": self.steps, "epochs": self.epochs}
