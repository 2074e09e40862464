"""Which settings are fastest, and whether several workers pay. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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
        factor: How many times as fast as ``fit`` on one machine.
        low: Lower end of the 80 % interval of this factor.
        high: Its upper end.
    """

    setting: Setting
    epoch: Predicted
    factor: float
    low: float
    high: float

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

    def of(self, way: Way, slots: int, batch: int) -> float:
        """Return K, the batches of a slot in a round."""
        if way.is_one_step:
            return 1.0
        whole = self.samples / (slots * batch)
        if self.steps is not None:
            return min(float(self.steps), max(whole, 1.0))
        if self.most is not None:
            return max(min(self.samples, self.most) / (slots * batch), 1.0)
        return max(whole, 1.0) * self.epochs


def epoch(model: TimeModel, setting: Setting, samples: int) -> Predicted:
    """Return the seconds of an epoch."""
    return model.predict(setting).times(samples / setting.samples)


def alone(model: TimeModel, batch: int, samples: int, way: Way) -> Predicted:
    """Return the seconds of an epoch of ``fit`` on one machine, without any exchange."""
    steps = samples / batch
    one = model.predict(Setting(way=way, slots=1, batch=batch, steps=steps))
    seconds = steps * model.step(batch)
    return one.times(seconds / one.seconds) if one.seconds else one


def choices(
    model: TimeModel, length: Length, batches: Sequence[int], slots: Sequence[int], ways: Sequence[Way]
) -> list[Choice]:
    """Return a prediction for each combination, the fastest first.

    Args:
        model: The model of time.
        length: How long a round is.
        batches: Batch sizes.
        slots: Numbers of slots.
        ways: Ways that were measured.
    """
    found = []
    for way in ways:
        for batch in batches:
            fit = alone(model, batch, length.samples, way)
            for count in slots:
                if count * batch > length.samples:
                    continue
                setting = Setting(way=way, slots=count, batch=batch, steps=length.of(way, count, batch))
                seconds = epoch(model, setting, length.samples)
                factor = fit.seconds / seconds.seconds
                half = (half_of(fit) ** 2 + half_of(seconds) ** 2) ** 0.5
                found.append(
                    Choice(
                        setting=setting,
                        epoch=seconds,
                        factor=factor,
                        low=factor / (1.0 + half),
                        high=factor * (1.0 + half),
                    )
                )
    return sorted(found, key=lambda one: one.epoch.seconds)


def half_of(predicted: Predicted) -> float:
    """Return half of the relative interval."""
    return predicted.high / predicted.seconds - 1.0 if predicted.seconds else 0.0
