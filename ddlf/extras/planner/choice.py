"""Which settings are fastest, and whether several workers pay. Pure functions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ddlf.extras.planner.memory import Bytes, Largest, MemoryModel
from ddlf.extras.planner.model import Predicted, Setting, TimeModel, Way

WORTH = 1.05
"""A cluster pays if training is at least so many times as fast as on one machine."""
Verdict = Literal["pays off", "no gain", "unclear"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One way to train, with its prediction.

    Args:
        setting: The setting.
        epoch: Seconds of an epoch.
        update_s: Seconds between two updates of the weights.
        factor: How many times as fast as ``fit`` on one machine.
        low: Lower end of the 80 % interval of this factor.
        high: Its upper end.
        memory: The most bytes of a worker; None if they were not measured.
    """

    setting: Setting
    epoch: Predicted
    update_s: float
    factor: float
    low: float
    high: float
    memory: Bytes | None = None

    @property
    def cost(self) -> float:
        """Seconds of all workers together in an epoch."""
        return self.setting.slots * self.epoch.seconds

    @property
    def verdict(self) -> Verdict:
        """Whether it pays to train so."""
        return "pays off" if self.low >= WORTH else "no gain" if self.high < WORTH else "unclear"


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """How long a round is.

    Args:
        samples: n, the samples of an epoch.
        epochs: Local epochs in a round.
        steps: Batches of a slot in a round; None for whole epochs.
        most: Maximum number of samples of all slots in a round; None without one.
    """

    samples: int
    epochs: int = 1
    steps: int | None = None
    most: int | None = None

    def steps_of(self, way: Way, slots: int, batch: int) -> float:
        """Return K, the batches of a slot in a round."""
        if way.is_one_step:
            return 1.0
        epoch_steps = self.samples / (slots * batch)
        if self.steps is not None:
            return min(float(self.steps), max(epoch_steps, 1.0))
        if self.most is not None:
            return max(min(self.samples, self.most) / (slots * batch), 1.0)
        return max(epoch_steps, 1.0) * self.epochs


Goal = Literal["time", "cost", "memory"]
"""Goals of a choice: the shortest training, the fewest seconds of all workers together, or the least memory of a worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """The goal of the best choice.

    Args:
        goal: The goal.
        epochs: Epochs of the training; a plan takes its app's ``master_epochs``.
        deadline_s: Seconds that the training may take, with the upper end of the interval; None for any.
        max_memory: Bytes that a worker may need, with the upper end of the interval; None for any.
    """

    goal: Goal = "time"
    epochs: int = 1
    deadline_s: float | None = None
    max_memory: int | None = None

    @property
    def needs_memory(self) -> bool:
        """Whether the choice depends on memory."""
        return self.goal == "memory" or self.max_memory is not None

    def is_answered(self, largest: Largest | None) -> bool:
        """Return whether this is the largest batch for the limit; without a limit, for the memory of the machine."""
        if largest is None:
            return False
        return largest.of_machine if self.max_memory is None else largest.limit == self.max_memory

    def meets(self, choice: Choice) -> bool:
        """Return whether a training ends in time."""
        return self.deadline_s is None or self.epochs * choice.epoch.high <= self.deadline_s

    def fits(self, choice: Choice) -> bool:
        """Return whether a training surely fits into the allowed memory."""
        return self.max_memory is None or (choice.memory is not None and choice.memory.high <= self.max_memory)

    def may_meet(self, choice: Choice) -> bool:
        """Return whether a training may end in time: the lower end of its interval does."""
        return self.deadline_s is None or self.epochs * choice.epoch.low <= self.deadline_s

    def may_fit(self, choice: Choice) -> bool:
        """Return whether a training may fit into the allowed memory: the lower end of its interval does."""
        return self.max_memory is None or choice.memory is None or choice.memory.low <= self.max_memory

    def best(self, candidates: Sequence[Choice]) -> Choice:
        """Return the best choice in memory and time.

        A choice with more slots than its way was measured with is best only if all are so, as with an assumed link. If
        none fits into the memory, it is the one with the least memory; if none is in time, the fastest one.
        """
        candidates = [choice for choice in candidates if choice.epoch.within] or candidates
        if not (fitting := [choice for choice in candidates if self.fits(choice)]):
            return min(candidates, key=_memory)
        fastest = min(fitting, key=lambda choice: choice.epoch.seconds)
        if self.goal == "time":
            return fastest
        least = _memory if self.goal == "memory" else _cost
        return min([choice for choice in fitting if self.meets(choice)], key=least, default=fastest)


def _memory(choice: Choice) -> tuple[float, float]:
    return (0.0 if choice.memory is None else choice.memory.count), choice.epoch.seconds


def _cost(choice: Choice) -> tuple[float, float]:
    return choice.cost, choice.epoch.seconds


def can_balance(way: Way, slots: int) -> bool:
    """Return whether parts of slots can follow the speed of their workers. In asynchronous training, steps do so."""
    return way.mode == "sync" and not way.is_one_step and slots > 1


def epoch(model: TimeModel, setting: Setting, samples: int) -> Predicted:
    """Return the seconds of an epoch."""
    return model.predict(setting).times(samples / setting.samples)


def updates(setting: Setting, samples: int) -> float:
    """Return how often the weights change in an epoch. In asynchronous training, each slot changes them by itself."""
    return samples / setting.samples * (setting.slots if setting.way.mode == "async" else 1)


def epoch_of_fit(model: TimeModel, batch: int, samples: int, way: Way) -> Predicted:
    """Return the seconds of an epoch of ``fit`` on one machine, without any exchange."""
    steps = samples / batch
    rounds = model.predict_as_measured(Setting(way=way, slots=1, batch=batch, steps=steps))
    seconds = steps * model.step(batch)
    return rounds.times(seconds / rounds.seconds) if rounds.seconds else rounds


def choices(
    model: TimeModel,
    length: Length,
    batches: Sequence[int],
    slots: Sequence[int],
    ways: Sequence[Way],
    memory: MemoryModel | None = None,
    balance: Sequence[bool] = (False,),
) -> list[Choice]:
    """Return a prediction for each combination, the fastest first.

    Args:
        model: The model of time.
        length: How long a round is.
        batches: Batch sizes.
        slots: Numbers of slots.
        ways: Ways that were measured.
        memory: The model of memory; None if it was not measured.
        balance: Whether parts follow the speed of workers, where they can: what to compare.
    """
    compared = []
    for way in ways:
        for batch in batches:
            fit = epoch_of_fit(model, batch, length.samples, way)
            for count, balanced in itertools.product(slots, balance):
                if count * batch > length.samples or (balanced and not can_balance(way, count) and False in balance):
                    continue
                compared.append(choice(model, length, way, count, batch, fit, memory, balanced=balanced))
    return sorted(compared, key=lambda candidate: candidate.epoch.seconds)


def choice(
    model: TimeModel,
    length: Length,
    way: Way,
    slots: int,
    batch: int,
    fit: Predicted,
    memory: MemoryModel | None,
    *,
    balanced: bool,
) -> Choice:
    """Return the prediction for one combination.

    Args:
        model: The model of time.
        length: How long a round is.
        way: How updates travel.
        slots: Number of slots.
        batch: Batch size.
        fit: Seconds of an epoch of ``fit`` on one machine.
        memory: The model of memory; None if it was not measured.
        balanced: Whether parts follow the speed of workers, if they can.
    """
    setting = Setting(
        way=way,
        slots=slots,
        batch=batch,
        steps=length.steps_of(way, slots, batch),
        balanced=balanced and can_balance(way, slots),
    )
    seconds = epoch(model, setting, length.samples)
    factor = fit.seconds / seconds.seconds
    half_width = (half_of(fit) ** 2 + half_of(seconds) ** 2) ** 0.5
    return Choice(
        setting=setting,
        epoch=seconds,
        update_s=seconds.seconds / updates(setting, length.samples),
        factor=factor,
        low=factor / (1.0 + half_width),
        high=factor * (1.0 + half_width),
        memory=None if memory is None else memory.predict(batch, way.exchange),
    )


def half_of(predicted: Predicted) -> float:
    """Return half of the relative interval."""
    return predicted.high / predicted.seconds - 1.0 if predicted.seconds else 0.0
