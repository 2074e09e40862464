"""The model of time: how long a round takes with given settings. Pure functions and values.

A slot trains K batches of b samples between two exchanges, and N slots train at once. A round takes

    r K (s0 + s1 b) + K (N - 1) (h0 + h1 b) + c0 + c1 N

seconds. A step takes s0 + s1 b on the fastest worker, and r is 1 if all workers are about equally fast; ``speeds`` has its
formulas. The second term is the cost that slots on one machine cause each other. The exchange takes c0 + c1 N in each way:
c1 is the part that each further slot adds on the master. With ``exchange="gradient"`` a round is one step. All constants
are fitted to measured rounds, and are not negative.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ddlf.errors import ConfigError
from ddlf.extras.planner.fit import Fit, fitted
from ddlf.extras.planner.speeds import slowest, slowness_of

SHARED = 4
"""Columns that all ways share: what steps cost."""


@dataclass(frozen=True, slots=True, order=True)
class Way:
    """How updates travel.

    Args:
        mode: ``"sync"`` or ``"async"``.
        exchange: ``"star"``, ``"sharded"`` or ``"gradient"``.
        codec: The codec of updates, such as ``"float32"``.
    """

    mode: str
    exchange: str
    codec: str

    @property
    def is_one_step(self) -> bool:
        """Whether a round is one step."""
        return self.exchange == "gradient"

    def __str__(self) -> str:
        return self.mode if self.exchange == "star" else f"{self.mode}, {self.exchange}"


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Setting:
    """The facts that decide the time of a round.

    Args:
        way: How updates travel.
        slots: N, the number of slots that train at once.
        batch: b, the samples of a batch.
        steps: K, the batches of a slot in a round; on average if parts follow the speed of workers.
        balanced: Whether they do (``balance="speed"``).
    """

    way: Way
    slots: int
    batch: int
    steps: float
    balanced: bool = False

    @property
    def samples(self) -> float:
        """The samples of all slots in a round."""
        return self.slots * self.steps * self.batch

    def difference(self, other: Setting) -> tuple[bool, float]:
        """Return how different the rounds of another setting are, to compare such differences."""
        return self.slots != other.slots, abs(math.log(self.steps * self.batch / (other.steps * other.batch)))

    @property
    def description(self) -> str:
        """The way, and whether parts follow the speed of workers."""
        return f"{self.way}, by speed" if self.balanced else str(self.way)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measured rounds of one setting.

    Args:
        setting: The setting.
        seconds: Seconds of each round, without the first ones, which compile.
        computing: Seconds of local training of the slowest slot in each of these rounds.
        sent: Bytes that the master sent and received in a round.
        weight: The weight of these rounds in the fit.
        paces: Numbers of workers, and their seconds of a sample.
    """

    setting: Setting
    seconds: tuple[float, ...]
    computing: tuple[float, ...] = ()
    sent: float = 0.0
    weight: float = 1.0
    paces: tuple[tuple[int, float], ...] = ()

    @property
    def median(self) -> float:
        """The median of the rounds' seconds."""
        return float(np.median(self.seconds))

    @property
    def spread(self) -> float:
        """Relative standard error of the median, from the quartiles."""
        low, high = np.percentile(self.seconds, (25, 75))
        return float((high - low) / 1.349 / self.median / np.sqrt(len(self.seconds)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """A prediction.

    Args:
        seconds: Seconds of a round.
        low: Lower end of the 80 % interval.
        high: Its upper end.
        within: Whether a measured setting of the same way has at least as many slots.
    """

    seconds: float
    low: float
    high: float
    within: bool = True

    def times(self, factor: float) -> Predicted:
        """Return the prediction for a multiple of this work."""
        return replace(self, seconds=self.seconds * factor, low=self.low * factor, high=self.high * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """An assumed link of the master.

    Args:
        bandwidth: Bytes per second, each way; None for the measured link.
        latency: Additional seconds that a message needs, each way.
    """

    bandwidth: float | None = None
    latency: float = 0.0

    def seconds(self, size: float) -> float:
        """Return the seconds that a round with so many bytes takes longer."""
        return (size / self.bandwidth if self.bandwidth else 0.0) + 2 * self.latency


class TimeModel:
    """Predicts the seconds of a round.

    Args:
        measured: Rounds of several settings. For a prediction with N slots, at least one of them has several slots.
        link: A link to assume beside the measured one.
        slowness: The attribute; by default it is measured.
        fit: The fitted constants; by default they are fitted.

    Attributes:
        ways: The ways with a prediction: the measured ones. With an assumed link, ``exchange="sharded"`` is left out,
            because its bytes do not pass the master.
        fit: The fitted constants.
        slowness: How many times as long as the fastest worker each worker takes, by its number; empty if all are about
            equally fast. The first N workers train N slots.
    """

    def __init__(
        self,
        measured: Sequence[Measured],
        link: Link | None = None,
        slowness: Mapping[int, float] | None = None,
        fit: Fit | None = None,
    ) -> None:
        if not measured:
            raise ConfigError("no round was measured, so there is nothing to predict from", hint="plan with more time")
        self._measured = measured
        self._measured_ways = sorted({rounds.setting.way for rounds in measured})
        self.link = link
        self.ways = [way for way in self._measured_ways if link is None or way.exchange != "sharded"]
        self.slowness = slowness_of(_paces(measured)) if slowness is None else slowness
        slots = [(rounds.setting.slots, rounds.setting.way) for rounds in measured]
        self._most = {way: max(count for count, other in slots if other == way) for way in self._measured_ways}
        rows = np.array([self._row(rounds.setting) for rounds in measured])
        seconds = np.array([rounds.median for rounds in measured])
        weights = np.array([rounds.weight for rounds in measured])
        self.fit: Fit = fit or fitted(rows, seconds, float(np.median([rounds.spread for rounds in measured])), weights)

    def _row(self, setting: Setting) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        steps, other_slots = setting.steps, setting.slots - 1
        slowness = [self.slowness.get(number, 1.0) for number in range(1, setting.slots + 1)]
        slowest_steps, slowest_samples = slowest(slowness, steps, balanced=setting.balanced)
        shared_steps = steps * other_slots
        row = [slowest_steps, slowest_samples * setting.batch, shared_steps, shared_steps * setting.batch]  # SHARED
        for way in self._measured_ways:
            row += [1.0, float(setting.slots)] if way == setting.way else [0.0, 0.0]
        return np.array(row)

    def in_other_order(self) -> TimeModel:
        """Return the model for a cluster that lists the fastest worker first, and the slowest one last."""
        return TimeModel(self._measured, self.link, dict(enumerate(sorted(self.slowness.values()), 1)), fit=self.fit)

    def predict(self, setting: Setting) -> Predicted:
        """Return the seconds of a round.

        Raises:
            ConfigError: The way was not measured.
        """
        prediction = self.predict_as_measured(setting)
        if self.link is None:
            return prediction
        slot, all_slots = (self.link.seconds(count * self.sent(setting.way)) for count in (1, setting.slots))
        # The measured exchange includes a link, and slots that do not end together need not share one.
        least = max(
            (slot if setting.way.mode == "async" else all_slots) - self.exchange(setting.way, setting.slots), 0.0
        )
        return replace(
            prediction,
            seconds=prediction.seconds + all_slots,
            low=prediction.low + least,
            high=prediction.high + all_slots,
            within=False,
        )

    def predict_as_measured(self, setting: Setting) -> Predicted:
        """Return the seconds of a round with the measured link.

        Raises:
            ConfigError: The way was not measured.
        """
        if setting.way not in self.ways:
            raise ConfigError(f"no round of {setting.way} was measured", hint="plan with more time (--budget)")
        seconds, half_width = self.fit.predict(self._row(setting))
        return Predicted(
            seconds=seconds,
            low=seconds / (1.0 + half_width),
            high=seconds * (1.0 + half_width),
            within=setting.slots <= self._most[setting.way],
        )

    def sent(self, way: Way) -> float:
        """Return the bytes that the master sends to and receives from a slot in a round."""
        sizes = [
            rounds.sent / (1 if way.mode == "async" else rounds.setting.slots)
            for rounds in self._measured
            if rounds.setting.way == way
        ]
        return float(np.median(sizes))

    def computing(self, setting: Setting) -> float:
        """Return the seconds of a round in which the slowest slot trains; 0 if they were not measured."""
        timed = [replace(rounds, seconds=rounds.computing) for rounds in self._measured if any(rounds.computing)]
        if setting.way not in {choice.setting.way for choice in timed}:
            return 0.0
        return min(TimeModel(timed, slowness=self.slowness).predict(setting).seconds, self.predict(setting).seconds)

    def step(self, batch: int) -> float:
        """Return the seconds of a step of one slot alone on the fastest worker, without an exchange."""
        constant, sample_s = self.fit.values[:2]
        return float(constant + sample_s * batch)

    def knows_step(self, batch: int) -> bool:
        """Return whether the measured rounds determine the seconds of a step of one slot alone.

        They do not without one slot or with rounds of one length, because then an exchange or other slots may have taken
        the time. They do not either if the noise is larger than the steps.
        """
        step = np.zeros(len(self.fit.values))
        step[:2] = 1.0, batch
        rows = np.array([self._row(rounds.setting) for rounds in self._measured])
        rows, step = rows / np.abs(rows).max(axis=0).clip(1e-12), step / np.abs(rows).max(axis=0).clip(1e-12)
        coefficients = np.linalg.lstsq(rows.T, step, rcond=None)[0]
        return self.step(batch) > 0 and bool(np.allclose(rows.T @ coefficients, step, atol=1e-6 * np.abs(step).max()))

    def exchange(self, way: Way, slots: int) -> float:
        """Return the seconds of an exchange."""
        index = SHARED + 2 * self._measured_ways.index(way)
        constant, slot_s = self.fit.values[index : index + 2]
        return float(constant + slot_s * slots)


def _paces(measured: Sequence[Measured]) -> dict[int, float]:
    """Return the seconds of a sample by the number of the worker: of most workers, in the longest rounds."""
    with_paces = [rounds for rounds in measured if len(rounds.paces) > 1]
    best = max(
        with_paces,
        key=lambda rounds: (len(rounds.paces), rounds.weight, rounds.setting.steps * rounds.setting.batch),
        default=None,
    )
    return {} if best is None else dict(best.paces)
