"""Compares the rounds of a run with what kept measurements predict, and refines the measurements. Runs on the master."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median

from ddlf.events import Event, RoundsMeasured, RoundsPredicted, SlotBackedUp, SlotsChanged, TrainingBegan
from ddlf.extras.planner.choice import Length, can_balance
from ddlf.extras.planner.measurement_files import Measurements, path_of, read_file, write_file
from ddlf.extras.planner.model import Setting, TimeModel, Way
from ddlf.extras.planner.planned import check_fits, check_planned
from ddlf.extras.planner.probe import Rounds, is_probed
from ddlf.training.context import App

log = logging.getLogger(__name__)


LEAST_ROUNDS = 3
"""Rounds of a run that refine the measurements."""
MOST_IDLE = 0.3
"""A run with a larger share of idle time between its rounds refines nothing. Checkpoints and hooks take this time, and
the model has no term for them."""


async def watch_run(app: App, clock: Callable[[], float] = time.perf_counter) -> AbstractContextManager[None]:
    """Return a context manager that compares the rounds of a run with the app's kept measurements, if there are any.

    Args:
        app: The app, before its training.
        clock: Returns seconds.

    Raises:
        ConfigError: The app asks for its plan, but does not use it, or its plan is of other data.
    """
    check_planned(app)
    try:
        path = None if is_probed(app) else path_of(app)
        measurements = None if path is None else read_file(path)
        fits = measurements is not None and measurements.fits(app)
    except Exception:  # a defect of the planner must not end a run
        log.exception("the rounds of this run are not predicted")
        return contextlib.nullcontext()
    if measurements is None or path is None:
        return contextlib.nullcontext()
    if not fits:
        check_fits(app)
        return contextlib.nullcontext()
    return watching(app, Watch(measurements, path, app.run_context.emit, clock))


@contextlib.contextmanager
def watching(app: App, watch: Watch) -> Iterator[None]:
    """Predict the rounds of a run when they begin, and compare them when it has ended."""
    end = app.subscribe(watch.hear)
    try:
        yield
    finally:
        end()
    watch.close()


class Watch:
    """Hears a run.

    Args:
        measurements: The measurements.
        path: Their file.
        emit: Receives the prediction and its comparison.
        clock: Returns seconds.
    """

    def __init__(
        self, measurements: Measurements, path: Path, emit: Callable[[Event], None], clock: Callable[[], float]
    ) -> None:
        self._measurements, self._path, self._emit, self._clock = measurements, path, emit, clock
        self._predicted: RoundsPredicted | None = None
        self._rounds: Rounds | None = None

    def hear(self, event: Event) -> None:
        """Receive an event of the run."""
        if isinstance(event, TrainingBegan):
            self._begin(event)
        elif isinstance(event, SlotBackedUp) and self._rounds is not None:
            self._rounds.is_usual = False
        elif isinstance(event, SlotsChanged):  # the prediction is about other rounds
            self._predicted = self._rounds = None
        elif self._rounds is not None:
            self._rounds.hear(event)

    def _begin(self, event: TrainingBegan) -> None:
        setting = setting_of(event)
        if event.slots > event.workers or setting.way not in {
            rounds.setting.way for rounds in self._measurements.measured
        }:
            return
        model = TimeModel(self._measurements.measured)
        prediction = model.predict(setting)
        if not prediction.seconds:
            return
        self._rounds = Rounds(setting, clock=self._clock)
        self._predicted = RoundsPredicted(
            seconds=prediction.seconds,
            low=prediction.low,
            high=prediction.high,
            within=prediction.within,
            compute_s=model.computing(setting),
            when=self._measurements.when,
        )
        self._emit(self._predicted)

    def close(self) -> None:
        """Compare the rounds with the prediction."""
        if self._predicted is None or self._rounds is None:
            return
        measured = self._rounds.result()
        self._emit(
            RoundsMeasured(
                rounds=0 if measured is None else len(measured.seconds),
                seconds=0.0 if measured is None else measured.median,
                predicted=self._predicted.seconds,
                low=self._predicted.low,
                high=self._predicted.high,
            )
        )
        if measured is not None and self._is_typical(self._rounds):
            write_file(self._path, self._measurements.refined(measured))

    def _is_typical(self, rounds: Rounds) -> bool:
        """Return whether rounds show how long such rounds take in other runs, too."""
        busy, duration = median(rounds.busy), median(rounds.seconds)
        return rounds.is_usual and len(rounds.seconds) >= LEAST_ROUNDS and busy >= (1.0 - MOST_IDLE) * duration


def setting_of(event: TrainingBegan) -> Setting:
    """Return the setting of a run. Its rounds have a mean number of steps if an epoch has no whole number of them."""
    facts = {name: json.loads(text) for name, text in event.facts.items()}
    way = Way(facts["mode"], facts["exchange"], facts["codec"])
    length = Length(
        samples=event.samples,
        epochs=facts["worker_epochs"],
        steps=facts["worker_steps"],
        most=facts["round_samples"],
    )
    batch = facts["batch_size"]
    return Setting(
        way=way,
        slots=event.slots,
        batch=batch,
        steps=length.steps_of(way, event.slots, batch),
        balanced=facts.get("balance") == "speed" and can_balance(way, event.slots),
    )
