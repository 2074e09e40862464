"""The times of the parts of a round, for other parts of DDLF, from kept measurements. Runs on the master."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

from ddlf.extras.planner.measurement_files import read
from ddlf.extras.planner.model import TimeModel, Way
from ddlf.training.context import App

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Constants:
    """The times of the parts of a round. ``ddlf.extras.MeasuredRounds`` describes the methods.

    Args:
        model: The model of time.
        when: Time of the measurements, in seconds since 1970.
    """

    model: TimeModel
    when: float

    @property
    def origin(self) -> str:
        """Say where the times are from."""
        return f"as ddlf plan has measured on {time.strftime('%Y-%m-%d', time.localtime(self.when))}"

    def step_s(self, batch: int) -> float:
        """Return the seconds of a step of one slot alone."""
        return self.model.step(batch)

    def exchange_s(self, mode: str, exchange: str, codec: str, slots: int) -> float | None:
        """Return the seconds of a round besides its steps; None if no such rounds were measured."""
        way = Way(mode, exchange, codec)
        return self.model.exchange(way, slots) if way in self.model.ways else None


def measured_rounds(app: App, cluster: Any) -> Constants | None:
    """Return the times of the parts of a round of an app; None without measurements on these workers."""
    try:
        measurements = None if cluster is None else read(app, cluster)
        return None if measurements is None else Constants(TimeModel(measurements.measured), measurements.when)
    except Exception:  # a defect of the planner must not end a run
        log.exception("the measurements of the plan cannot be used")
        return None
