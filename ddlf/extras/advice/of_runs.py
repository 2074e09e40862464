"""Rules of class R: what the records of a run say. Pure; ``watch`` has them asked after each record."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from ddlf.extras.advice.facts import Facts
from ddlf.extras.advice.of_models import AUTOTRAINER
from ddlf.extras.advice.rule import Found, Rule

RISING, TIMES = 3, 2.0
"""Records in a row in which the loss rises, and by what in all, before it diverges."""
TURNS, WINDOW, SWING = 6, 8, 0.2
"""Turns in the last records, and how far it swings, as a share of its mean, before a loss oscillates."""
STUCK, LEAST = 8, 0.01
"""Records in which the loss came down by no more than that share of the first."""
APART, WORSE = 4, 1.1
"""Records in which validation gets worse while training gets better, and by what in all, before a model overfits."""
STALE, LEAST_UPDATES = 2.0, 3
"""Merges for each slot that are between reading weights and applying an update of a slow one, and updates of it. The mean of all is K - 1 at most."""


def _losses(facts: Facts) -> list[float]:
    return [record.loss for record in facts.seen.get("records", ())]


def _rounds(facts: Facts) -> Sequence[Any]:
    records: Sequence[Any] = facts.seen.get("records", ())
    return records


def _nan(facts: Facts) -> Iterator[Found]:
    for record in _rounds(facts):
        if "loss" in record.metrics and not math.isfinite(record.loss):
            yield Found(f"the loss is {record.loss:g} since round {record.round}", ("optimizer", "rate"))
            return


def _diverging(facts: Facts) -> Iterator[Found]:
    losses = _losses(facts)
    last = losses[-RISING - 1 :]
    if len(last) <= RISING or not all(map(math.isfinite, losses)):
        return
    if all(a < b for a, b in itertools.pairwise(last)) and last[-1] > TIMES * min(losses) > 0:
        yield Found(
            f"the loss has risen for {RISING} rounds, from {min(losses):.4g} to {last[-1]:.4g}", ("optimizer", "rate")
        )


def _oscillating(facts: Facts) -> Iterator[Found]:
    last = _losses(facts)[-WINDOW - 1 :]
    if len(last) <= WINDOW or not all(map(math.isfinite, last)):
        return
    steps = [b - a for a, b in itertools.pairwise(last)]
    turns = sum(a * b < 0 for a, b in itertools.pairwise(steps))
    mean = sum(last) / len(last)
    if turns >= TURNS and mean > 0 and sum(map(abs, steps)) / len(steps) > SWING * mean:
        yield Found(
            f"the loss has turned {turns} times in {WINDOW} rounds, between {min(last):.4g} and {max(last):.4g}",
            ("optimizer", "rate"),
        )


def _stuck(facts: Facts) -> Iterator[Found]:
    losses = _losses(facts)
    if len(losses) < STUCK or not all(map(math.isfinite, losses[:STUCK])) or losses[0] <= 0:
        return
    if losses[0] - min(losses) < LEAST * losses[0]:
        yield Found(
            f"the loss was {losses[0]:.4g} in the first round and is {losses[-1]:.4g} after {len(losses)}",
            ("optimizer", "rate"),
        )


def _overfitting(facts: Facts) -> Iterator[Found]:
    rows = [
        (record.loss, record.metrics["val_loss"], record.round)
        for record in _rounds(facts)
        if "val_loss" in record.metrics
    ]
    last = rows[-APART - 1 :]
    if len(last) <= APART or not all(math.isfinite(value) for loss, val, _ in rows for value in (loss, val)):
        return
    best = min(rows, key=lambda row: row[1])
    worse = all(a[1] < b[1] and a[0] >= b[0] for a, b in itertools.pairwise(last))
    if worse and last[-1][1] > WORSE * best[1] > 0:
        yield Found(
            f"val_loss was least, {best[1]:.4g}, after round {best[2]}, and is {last[-1][1]:.4g} while the loss falls",
            ("setting", "callbacks"),
        )


def _stale(facts: Facts) -> Iterator[Found]:
    ages: dict[int, list[int]] = {}
    for record in _rounds(facts):
        ages.setdefault(record.slot, []).append(record.staleness)
    slots = len(ages)
    means = {slot: sum(each) / len(each) for slot, each in ages.items() if len(each) >= LEAST_UPDATES}
    slot = max(means, key=means.__getitem__, default=None)
    if slot is not None and slots > 1 and means[slot] > STALE * slots:
        yield Found(
            f"updates of slot {slot} are {means[slot]:.1f} merges old when they are applied, with {slots} slots",
            ("setting", "max_staleness"),
        )


RUNS = (
    Rule(
        id="R01",
        severity="E",
        level="run",
        title="NaN",
        look=_nan,
        why="A weight that has become NaN stays NaN.",
        fix="Use a smaller learning rate or clip gradients (clipnorm=1.0), and look for NaN in the data with ddlf advise.",
        source=AUTOTRAINER,
    ),
    Rule(
        id="R02",
        severity="W",
        level="run",
        title="diverging",
        look=_diverging,
        why="Each step increases the loss, up to NaN.",
        fix="Use a third of the learning rate.",
        source=AUTOTRAINER,
    ),
    Rule(
        id="R03",
        severity="W",
        level="run",
        title="oscillating",
        look=_oscillating,
        why="Steps jump from one side of the minimum to the other.",
        fix="Use a third of the learning rate, or larger batches.",
        source=AUTOTRAINER,
    ),
    Rule(
        id="R04",
        severity="W",
        level="run",
        title="stuck",
        look=_stuck,
        why="A model that has not started to learn after so many rounds rarely does so later.",
        fix="Run ddlf advise, which checks whether the model can learn one batch. Then try 10 times the learning rate.",
        source=AUTOTRAINER,
    ),
    Rule(
        id="R05",
        severity="W",
        level="run",
        title="overfitting",
        look=_overfitting,
        why="From here on the model memorizes samples and gets worse on others.",
        fix="Put EarlyStopping('val_loss', patience=3, restore_best_weights=True) into callbacks; or add dropout or augmentation.",
        source="Prechelt, Early Stopping - But When?, 1998",
    ),
    Rule(
        id="R06",
        severity="W",
        level="run",
        title="stale updates",
        look=_stale,
        why="An update computed for old weights points to where the minimum was.",
        fix="Set max_staleness, or staleness='polynomial:0.5', which gives old updates less weight.",
        source="Zhang et al., Staleness-aware Async-SGD, arXiv:1511.05950",
    ),
)
