"""``ddlf plan``: probe the workers, fit the model of time, and compare settings. Runs on the master."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ddlf.app import IApp
from ddlf.errors import ConfigError
from ddlf.extras.planner.choice import Choice, Length, alone, choices
from ddlf.extras.planner.kept import Kept, read, write
from ddlf.extras.planner.model import Measured, Predicted, Setting, TimeModel, Way
from ddlf.extras.planner.probe import Budget, Probe, explore, way_of
from ddlf.training.context import travels

BUDGET_S = 60.0
CODECS = ("int8",)
"""Codecs that are measured beside the app's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Predictions for the training of an app on a cluster.

    Args:
        measured: The measured rounds.
        spent_s: Seconds of all measurements.
        workers: Workers of the cluster.
        samples: n, the training samples.
        now: The prediction for the app's own settings.
        best: The fastest prediction with the app's own batch size.
        fit: Seconds of an epoch of ``fit`` on one machine.
        all: All predictions, the fastest first.
        step_s: Seconds of a step of one slot, without an exchange.
        exchange_s: Seconds of an exchange of the app's own settings.
        model: Predicts other settings.
    """

    measured: tuple[Measured, ...]
    spent_s: float
    workers: int
    samples: int
    now: Choice
    best: Choice
    fit: Predicted
    all: tuple[Choice, ...]
    step_s: float
    exchange_s: float
    model: TimeModel

    def to_data(self) -> dict[str, Any]:
        """Return the plan for JSON."""
        return {
            "spent_s": self.spent_s,
            "workers": self.workers,
            "samples": self.samples,
            "verdict": self.best.verdict,
            "step_s": self.step_s,
            "exchange_s": self.exchange_s,
            "fit": asdict(self.fit),
            "best": asdict(self.best),
            "now": asdict(self.now),
            "all": [asdict(one) for one in self.all],
            "measured": [asdict(one) for one in self.measured],
        }


async def plan(
    app: IApp,
    budget_s: float = BUDGET_S,
    batches: Sequence[int] = (),
    say: Callable[[str], None] | None = None,
    *,
    again: bool = False,
) -> Plan:
    """Measure short rounds of an app on its workers, and predict how long training takes.

    The measurements are kept, and a second plan of the same app on the same workers uses them.

    Args:
        app: The app, with its settings, connected to its cluster. A copy of it is trained.
        budget_s: Seconds for all measurements.
        batches: Further batch sizes to compare. The learning rate may have to change with the batch size.
        say: Shows a line of progress; by default the app's ``say``.
        again: Whether to measure even if there are kept measurements.

    Raises:
        ConfigError: A setting cannot be planned, or too little could be measured.
    """
    say = say or app.say
    own = way_of(app)
    asked = list(dict.fromkeys([app.batch_size, *batches]))
    ways, budget = ways_of(own), Budget(budget_s)
    kept = None if again else read(app)
    if kept is not None and kept.answers(ways, asked, budget_s):
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(kept.when))
        say(f"{len(kept.measured)} settings were measured on {when}; --again measures them again")
    else:
        kept = await _measured(app, ways, asked, budget, say)
    return planned(app, own, kept, asked, budget.spent)


def ways_of(own: Way) -> list[Way]:
    """Return the ways to compare: first the app's own."""
    codecs = [replace(own, codec=codec) for codec in CODECS if own.exchange == "star"]
    others = [Way("async", "star", own.codec), Way("sync", "gradient", "float32")]
    return list(dict.fromkeys([own, *codecs, *others]))


async def _measured(
    app: IApp, ways: Sequence[Way], batches: Sequence[int], budget: Budget, say: Callable[[str], None]
) -> Kept:
    """Measure rounds of an app, and keep them.

    Raises:
        ConfigError: Too little could be measured.
    """
    assert app.cluster is not None
    probe, workers = Probe(copied(app)), app.cluster.N
    sizes = list(dict.fromkeys([*batches, 2 * batches[0]]))
    measured = await explore(probe, ways, sizes, workers, budget, say)
    if workers > 1 and all(one.setting.slots > 1 for one in measured):
        raise ConfigError(
            f"no training with one slot could be measured in {budget.seconds:g} s",
            hint=f"plan with more time: --budget {2 * budget.seconds:g}s, in a program plan({2 * budget.seconds:g})",
        )
    kept = Kept(measured=tuple(measured), samples=probe.samples, budget_s=budget.seconds)
    write(app, kept)
    return kept


def planned(app: IApp, own: Way, kept: Kept, batches: Sequence[int], spent_s: float = 0.0) -> Plan:
    """Return a plan from measurements.

    Args:
        app: The app, connected to its cluster.
        own: How its updates travel.
        kept: The measurements.
        batches: Batch sizes to compare; first the app's own.
        spent_s: Seconds of the measurements.

    Raises:
        ConfigError: A batch is larger than the data.
    """
    assert app.cluster is not None
    batch, workers = batches[0], app.cluster.N
    slots_now = min(app.slots or workers, workers)
    model = TimeModel(kept.measured)
    length = Length(samples=kept.samples, epochs=app.worker_epochs, steps=app.worker_steps, most=app.round_samples)
    found = choices(model, length, batches, range(1, workers + 1), model.ways)
    if not found:
        raise ConfigError(
            f"a batch of {batch} samples is more than the {kept.samples} samples of the data",
            hint="plan with a smaller batch size",
        )
    now = next(one for one in found if _is(one.setting, own, slots_now, batch))
    return Plan(
        measured=kept.measured,
        spent_s=spent_s,
        workers=workers,
        samples=kept.samples,
        now=now,
        best=next(one for one in found if one.setting.batch == batch),
        fit=alone(model, batch, kept.samples, own),
        all=tuple(found),
        step_s=model.step(batch),
        exchange_s=model.exchange(own, slots_now),
        model=model,
    )


def copied(app: IApp) -> IApp:
    """Return an app with the same settings and cluster, without data and model."""
    other = type(app)(app.cluster)
    vars(other).update(travels(app))
    return other


def _is(setting: Setting, way: Way, slots: int, batch: int) -> bool:
    return (setting.way, setting.slots, setting.batch) == (way, slots, batch)
