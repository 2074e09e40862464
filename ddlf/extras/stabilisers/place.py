"""Where in the run a slot is, in a variable of its optimizer that what follows the run reads inside the compiled step. Runs where a model trains.

The variable is set when a round begins, so nothing is traced again, and JAX, whose step is handed all that it reads, is handed it. It is no state of
the optimizer: the plan of the run says it, whoever carries the slot.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ddlf.extras.stabilisers.chain import HELD_PATH, chain, innermost


class Steps(NamedTuple):
    """The steps that a slot's optimizer makes, as the run is planned.

    Args:
        before: Those before a round.
        after: Those after it.
        total: S, those of the whole run.
        epochs: Local epochs of the whole run.
    """

    before: int
    after: int
    total: int
    epochs: int


def followers(optimizer: Any) -> list[Any]:
    """What of an optimizer follows the run: its schedule, and optimizers around it. They have ``held``, and ``warm(total, epochs)``."""
    parts = [*chain(optimizer), getattr(innermost(optimizer), "_learning_rate", None)]
    return [part for part in parts if getattr(part, "follows_the_run", False)]


class Place:
    """The place of a slot in its run, for all of an optimizer that follows it.

    Args:
        optimizer: Built.
        found: What follows the run, one or more.
    """

    def __init__(self, optimizer: Any, found: list[Any]) -> None:
        self._optimizer, self._followers = innermost(optimizer), found
        self._held = self._optimizer.add_variable((5,), name=f"{HELD_PATH}_place", dtype="float32")
        for one in found:
            one.held = self._held

    @classmethod
    def of(cls, optimizer: Any) -> Place | None:
        """That of an optimizer; None if nothing of it follows the run."""
        return cls(optimizer, found) if optimizer is not None and (found := followers(optimizer)) else None

    def set(self, steps: Steps, made: int | None = None) -> None:
        """Be where a round begins.

        Args:
            steps: Of the round.
            made: Steps that the slot is going to make in it; None for as many as were planned. What it makes more or fewer is stretched.
        """
        planned = steps.after - steps.before
        stretch = planned / made if made else 1.0
        start = int(self._optimizer._iterations)
        warm = next((one.warm(steps.total, steps.epochs) for one in self._followers if hasattr(one, "warm")), 0.0)
        self._held.assign([start, steps.before, stretch, max(steps.total, 1), warm])


def read(held: Any, iterations: Any) -> tuple[Any, Any, Any]:
    """What is held of a place, at an optimizer's number of steps so far: the step, from 1, S, and W, as floats."""
    import keras

    start, before, stretch, total, warm = (held[number] for number in range(5))
    step = before + (keras.ops.cast(iterations, "float32") + 1 - start) * stretch
    return step, total, warm
