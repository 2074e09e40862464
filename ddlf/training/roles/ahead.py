"""The first steps of a slot's round, which it trains before what was merged reaches it. On workers.

With overlap a slot goes on with weights of its own for some steps, and only then takes in what was merged of the round before. Which samples these
steps are of is known before: so a worker begins with them as soon as its update is on its way, and does not wait for the answer. Whether it did, or
the slot has moved and another one does it later, is the same computation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddlf.training.slot.parts.fragments import Own
from ddlf.training.slot.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """What came of the first steps of a slot's round.

    Args:
        task: These steps, as a task.
        own: The slot's own weights after them, and the number of the round before.
        metrics: Metrics of them.
        fed: Samples that ``fit`` was given, if it ran.
    """

    task: Task
    own: Own
    metrics: dict[str, float]
    fed: list[Any]

    def is_of(self, task: Task) -> bool:
        """Whether these are the first steps that a task asks for, begun with what it is to begin with."""
        same = ("slot", "round", "first_epoch", "epochs", "batch_size", "seed", "local")
        return (
            task.state is None
            and not task.shared
            and task.since == self.task.since
            and all(getattr(task, name) == getattr(self.task, name) for name in same)
            and [list(rates) for rates in task.rates] == [list(rates) for rates in self.task.rates]
            and task.digest() == self.task.digest()
        )


def parts(task: Task, own: Own | None) -> tuple[Task | None, Task]:
    """The steps of a round before and after what was merged is taken in; None where the slot begins with that, having nothing of its own."""
    if not task.overlap or not own:
        return None, task
    cut = task.overlap * task.batch_size
    first, rest = (dataclasses.replace(task, indices=indices) for indices in (task.indices[:cut], task.indices[cut:]))
    return first, rest


def following(task: Task) -> Task:
    """The first steps of the slot's next round, of a task that knows them."""
    assert task.ahead is not None
    first_epoch, indices = task.ahead
    more: dict[str, Any] = dict(before=None, state=None, shared={})
    if (place := task.place) is not None:
        more["steps"] = place._replace(before=place.after)
    return dataclasses.replace(task, round=task.round + 1, first_epoch=first_epoch, indices=indices, **more)


def together(metrics: Sequence[tuple[dict[str, float], int]]) -> dict[str, float]:
    """Metrics of parts of a round as one, weighted by samples."""
    found = {}
    for name in dict.fromkeys(name for told, _ in metrics for name in told):
        values = [(told[name], samples) for told, samples in metrics if name in told]
        found[name] = sum(value * samples for value, samples in values) / sum(samples for _, samples in values)
    return found
