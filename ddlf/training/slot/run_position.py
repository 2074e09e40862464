"""The position of a slot in its run, for schedules, in a variable of the slot's optimizer. Runs where a model trains.

A round sets the variable when it begins, so the step is not compiled again. JAX passes the variable to the step like
all others. The variable is not part of the optimizer's state: the plan of the run determines it on every worker.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ddlf.training.slot.optimizers import HELD_PATH, chain, innermost


class Steps(NamedTuple):
    """The steps that a slot's optimizer makes, as the run is planned.

    Args:
        before: Steps before a round.
        after: Steps after it.
        total: S, steps in the whole run.
        epochs: Local epochs in the whole run.
    """

    before: int
    after: int
    total: int
    epochs: int


def followers(optimizer: Any) -> list[Any]:
    """Return the parts of an optimizer that follow the run: its schedule, and optimizers around it.

    Such a part sets ``follows_the_run``. It reads the position from ``held``. ``plan(steps, epochs)`` gives it a fixed
    number of steps instead. A schedule with a warm-up has ``warm(total, epochs)``, which returns the warm-up's steps.
    """
    parts = [*chain(optimizer), getattr(innermost(optimizer), "_learning_rate", None)]
    return [part for part in parts if getattr(part, "follows_the_run", False)]


class RunPosition:
    """The position of a slot in its run, for every part of an optimizer that follows it.

    Args:
        optimizer: A built optimizer.
        parts: The parts that follow the run, one or more.
    """

    def __init__(self, optimizer: Any, parts: list[Any]) -> None:
        self._optimizer, self._followers = innermost(optimizer), parts
        self._held = self._optimizer.add_variable((5,), name=f"{HELD_PATH}_place", dtype="float32")
        for part in parts:
            part.held = self._held

    @classmethod
    def of(cls, optimizer: Any) -> RunPosition | None:
        """Return the position for an optimizer; None if no part of it follows the run."""
        return cls(optimizer, parts) if optimizer is not None and (parts := followers(optimizer)) else None

    def set(self, steps: Steps, made: int | None = None) -> None:
        """Set the position to the beginning of a round.

        Args:
            steps: Steps of the round.
            made: Number of steps that the slot will make, stretched to the planned number; None if it makes the
                planned number.
        """
        planned = steps.after - steps.before
        stretch = planned / made if made else 1.0
        start = int(self._optimizer._iterations)
        warm = next((part.warm(steps.total, steps.epochs) for part in self._followers if hasattr(part, "warm")), 0.0)
        self._held.assign([start, steps.before, stretch, max(steps.total, 1), warm])


def read(held: Any, iterations: Any) -> tuple[Any, Any, Any]:
    """Return the step, from 1, S, and the warm-up's steps, as floats, from the variable and the optimizer's steps."""
    import keras

    start, before, stretch, total, warm = (held[number] for number in range(5))
    step = before + (keras.ops.cast(iterations, "float32") + 1 - start) * stretch
    return step, total, warm
