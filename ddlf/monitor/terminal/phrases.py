"""The state of a run in words: current work, its workers, and the elapsed and remaining time."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from ddlf.events.record import size
from ddlf.monitor.state import RunningPhase, State, WorkerLane

DOING = {
    "starting": "starting",
    "connecting": "connecting",
    "importing": "importing the backend",
    "sending": "sending code and data",
    "loading": "loading the data",
    "building": "building the model",
    "evaluating": "evaluating the test data",
    "validating": "evaluating the validation data",
    "saving": "saving the model",
    "writing": "writing a checkpoint",
}
"""The name of each phase."""
SILENT_S = 5.0
"""Seconds of silence until the display names a training worker."""
FEW = 3
"""Maximum number of named workers. With more workers, only their number is given."""


def duration(seconds: float) -> str:
    """Return seconds in the format of a clock: ``"0:07"``, ``"12:34"``, ``"1:02:03"``."""
    minutes, second = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{second:02}" if hours else f"{minutes}:{second:02}"


def number(value: float) -> str:
    """Return the value of a metric as a text of at most 8 columns."""
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e3 or not value else f"{value:.2e}"


def rate(samples: float, unit: str = "") -> str:
    """Return samples per second as text: ``"1,840/s"``, ``"1,840 samples/s"``."""
    return f"{samples:,.{0 if samples >= 10 else 1}f}{' ' * bool(unit)}{unit}/s"


def phase_in_words(phase: RunningPhase, *, amount: bool = True) -> str:
    """Return in words the work of a phase, such as loading data, and its finished amount if known and wanted."""
    words = DOING.get(phase.activity, phase.activity) + f" to {phase.address}" * bool(phase.address and amount)
    if not phase.total or not amount:
        return words
    if phase.unit == "bytes":
        return f"{words}, {size(phase.done)} of {size(phase.total)}" if phase.done else f"{words}, {size(phase.total)}"
    total = f"{phase.total:,} {phase.unit.removesuffix('s') if phase.total == 1 else phase.unit}"
    return (
        f"{words}, {phase.done:,} of {total}"
        if phase.done
        else words
        if phase.unit == "samples"
        else f"{words} {total}"
    )


def position(state: State) -> str:
    """Return the position of a run, such as ``"round 3/6"``."""
    if state.in_rounds:
        return f"round {max(state.round, 1)}/{state.rounds}"
    return f"update {state.record.version if state.record else 0}/{state.rounds * state.slots}"


def trouble(lane: WorkerLane, now: float) -> str:
    """Return in words why a worker does not work, such as a loss or a long silence; "" if there is no trouble."""
    reason = re.sub(rf"^{re.escape(lane.name)}( \(\S*\))?: ", "", lane.reason.partition("\n")[0])
    if lane.is_gone:
        return f"excluded: {reason}"
    if not lane.is_there:
        return f"lost {now - lane.since:.0f} s ago: {lane.refused or reason}"
    return ""


def waiting(state: State, now: float) -> str:
    """Return in one line the phases and workers that the run waits for; "" if there are none."""
    parts = []
    if state.is_training:
        remaining_s = state.left_s(now)
        parts.append(
            f"{position(state)}, {state.done:.0%} done"
            + (f", {duration(remaining_s)} left" if remaining_s is not None else "")
        )
    groups: dict[str, list[RunningPhase]] = {}
    for phase in list(state.phases.values()):
        groups.setdefault(phase_in_words(phase, amount=not phase.address), []).append(phase)
    for words, phases in groups.items():
        words = phase_in_words(phases[0]) if len(phases) == 1 else words
        master = ["master"] * any(not phase.worker for phase in phases)
        names = _names(state, [phase.worker for phase in phases if phase.worker], *master)
        parts.append(f"{names} {words} for {now - min(phase.since for phase in phases):.0f} s")
    lost = [lane for lane in list(state.lanes.values()) if not lane.is_there and not lane.is_gone]
    if state.waiting_until is not None:
        parts.append(f"no workers left; the run ends in {max(0.0, state.waiting_until - now):.0f} s")
    elif lost and state.app:
        parts.append(f"{_names(state, [lane.worker for lane in lost])} lost")
    parts += [f"{lane.name} not reached: {lane.refused}" for lane in [lane for lane in lost if lane.refused][:FEW]]
    silent = [lane for lane in list(state.lanes.values()) if lane.slot and lane.quiet_s(now) > SILENT_S]
    if silent:
        since = min(lane.quiet_s(now) for lane in silent)
        parts.append(f"{_names(state, [lane.worker for lane in silent])} silent for {since:.0f} s")
    return "; ".join(parts)


def _names(state: State, workers: Iterable[int], *before: str) -> str:
    numbers = sorted(workers)
    names = [state.lanes[n].name if n in state.lanes else f"worker {n}" for n in numbers]
    names = [*before, *([f"{len(numbers)} workers"] if len(numbers) > FEW else names)]
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
