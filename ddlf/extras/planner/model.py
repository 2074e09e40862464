"""The model of time: how long a round takes with given settings. Pure functions and values.

A slot trains K batches of b samples between two exchanges, and N slots train at once. A round takes

    K (s0 + s1 b) + K (N - 1) (h0 + h1 b) + c0 + c1 N

seconds. A step takes s0 + s1 b. The second term is the cost that slots on one machine cause each other. The exchange takes
c0 + c1 N in each way: c1 is the part that each further slot adds on the master. With ``exchange="gradient"`` a round is
one step. All constants are fitted to measured rounds, and are not negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ddlf.errors import ConfigError
from ddlf.extras.planner.fit import Fit, fitted

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
        steps: K, the batches of a slot in a round.
    """

    way: Way
    slots: int
    batch: int
    steps: float

    @property
    def samples(self) -> float:
        """The samples of all slots in a round."""
        return self.slots * self.steps * self.batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measured rounds of one setting.

    Args:
        setting: The setting.
        seconds: Seconds of each round, without the first ones, which compile.
        computing: Seconds of local training of the slowest slot in each of these rounds.
        sent: Bytes that the master sent and received in a round.
    """

    setting: Setting
    seconds: tuple[float, ...]
    computing: tuple[float, ...] = ()
    sent: float = 0.0

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
        within: Whether a measured setting has at least as many slots.
    """

    seconds: float
    low: float
    high: float
    within: bool = True

    def times(self, factor: float) -> Predicted:
        """Return the prediction for a multiple of this work."""
        return replace(self, seconds=self.seconds * factor, low=self.low * factor, high=self.high * factor)


class TimeModel:
    """Predicts the seconds of a round.

    Args:
        measured: Rounds of several settings. For a prediction with N slots, at least one of them has several slots.

    Attributes:
        ways: The measured ways.
        fit: The fitted constants.
    """

    def __init__(self, measured: Sequence[Measured]) -> None:
        if not measured:
            raise ConfigError("no round was measured, so there is nothing to predict from", hint="plan with more time")
        self.ways = sorted({one.setting.way for one in measured})
        self._most = max(one.setting.slots for one in measured)
        rows = np.array([self._row(one.setting) for one in measured])
        seconds = np.array([one.median for one in measured])
        self.fit: Fit = fitted(rows, seconds, float(np.median([one.spread for one in measured])))

    def _row(self, setting: Setting) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        steps, others = setting.steps, setting.slots - 1
        row = [steps, steps * setting.batch, steps * others, steps * others * setting.batch]  # SHARED
        for way in self.ways:
            row += [1.0, float(setting.slots)] if way == setting.way else [0.0, 0.0]
        return np.array(row)

    def predict(self, setting: Setting) -> Predicted:
        """Return the seconds of a round.

        Raises:
            ConfigError: The way was not measured.
        """
        if setting.way not in self.ways:
            raise ConfigError(f"no round of {setting.way} was measured", hint="plan with more time (--budget)")
        seconds, half = self.fit.predict(self._row(setting))
        return Predicted(
            seconds=seconds,
            low=seconds / (1.0 + half),
            high=seconds * (1.0 + half),
            within=setting.slots <= self._most,
        )

    def step(self, batch: int) -> float:
        """Return the seconds of a step of one slot alone, without an exchange."""
        constant, each = self.fit.values[:2]
        return float(constant + each * batch)

    def exchange(self, way: Way, slots: int) -> float:
        """Return the seconds of an exchange."""
        place = SHARED + 2 * self.ways.index(way)
        constant, each = self.fit.values[place : place + 2]
        return float(constant + each * slots)
