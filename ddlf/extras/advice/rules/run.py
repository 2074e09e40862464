"""Watches a run: checks the rules of class R after each record, and reports each finding once.

It receives each record (the metrics of a round or an epoch) as a sink, and runs on the master.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Iterator
from typing import Any

from ddlf.events import Advised, Committed, Event
from ddlf.extras.advice.facts import AppFacts
from ddlf.extras.advice.rule import Finding, rule
from ddlf.training.context import App

log = logging.getLogger(__name__)
MOST_RECORDS = 1_000
"""Maximum number of recent records that the rules use."""
RISING, TIMES = 3, 2.0
"""A loss diverges if it rises in this number of successive records, by this total factor."""
TURNS, WINDOW, SWING = 6, 8, 0.2
"""A loss oscillates if it changes direction this number of times in a window of this number of records, and its range
is at least this share of its mean."""
STUCK, LEAST = 8, 0.01
"""A loss is stuck if it falls by at most this share of the first loss in this number of records."""
APART, WORSE = 4, 1.1
"""A model overfits if validation gets worse by this factor over this number of records, while training improves."""
STALE, LEAST_UPDATES = 2.0, 3
"""Updates of a slot are too stale if their mean age over this number of updates is more than this number of merges per
slot.

The mean age over all slots is at most K - 1.
"""


@rule("R01", "E", "NaN", level="run")
def not_finite(facts: AppFacts) -> Iterator[Finding]:
    """After a weight has become NaN, it stays NaN.

    Fix: Use a smaller learning rate or clip gradients (clipnorm=1.0), and look for NaN in the data with ddlf advise.
    Source: Zhang et al., AutoTrainer, ICSE 2021, doi:10.1109/ICSE43902.2021.00043
    """
    for record in facts.records:
        if "loss" in record.metrics and not math.isfinite(record.loss):
            yield Finding(f"the loss is {record.loss:g} since round {record.round}", ("optimizer", "rate"))
            return


@rule("R02", "W", "diverging", level="run")
def _diverging(facts: AppFacts) -> Iterator[Finding]:
    """Each step increases the loss, up to NaN.

    Fix: Use a third of the learning rate.
    Source: Zhang et al., AutoTrainer, ICSE 2021, doi:10.1109/ICSE43902.2021.00043
    """
    losses = [record.loss for record in facts.records]
    last = losses[-RISING - 1 :]
    if len(last) <= RISING or not all(map(math.isfinite, losses)):
        return
    if all(a < b for a, b in itertools.pairwise(last)) and last[-1] > TIMES * min(losses) > 0:
        yield Finding(
            f"the loss has risen for {RISING} rounds, from {min(losses):.4g} to {last[-1]:.4g}", ("optimizer", "rate")
        )


@rule("R03", "W", "oscillating", level="run")
def _oscillating(facts: AppFacts) -> Iterator[Finding]:
    """Each step jumps from one side of the minimum to the other.

    Fix: Use a third of the learning rate, or larger batches.
    Source: Zhang et al., AutoTrainer, ICSE 2021, doi:10.1109/ICSE43902.2021.00043
    """
    last = [record.loss for record in facts.records][-WINDOW - 1 :]
    if len(last) <= WINDOW or not all(map(math.isfinite, last)):
        return
    steps = [b - a for a, b in itertools.pairwise(last)]
    turns = sum(a * b < 0 for a, b in itertools.pairwise(steps))
    mean = sum(last) / len(last)
    if turns >= TURNS and mean > 0 and sum(map(abs, steps)) / len(steps) > SWING * mean:
        yield Finding(
            f"the loss has turned {turns} times in {WINDOW} rounds, between {min(last):.4g} and {max(last):.4g}",
            ("optimizer", "rate"),
        )


@rule("R04", "W", "stuck", level="run")
def _stuck(facts: AppFacts) -> Iterator[Finding]:
    """If a model has not started to learn after so many rounds, it rarely starts later.

    Fix: Run ddlf advise, which checks whether the model can learn one batch. Then try 10 times the learning rate.
    Source: Zhang et al., AutoTrainer, ICSE 2021, doi:10.1109/ICSE43902.2021.00043
    """
    losses = [record.loss for record in facts.records]
    if len(losses) < STUCK or not all(map(math.isfinite, losses[:STUCK])) or losses[0] <= 0:
        return
    if losses[0] - min(losses) < LEAST * losses[0]:
        yield Finding(
            f"the loss was {losses[0]:.4g} in the first round and is {losses[-1]:.4g} after {len(losses)}",
            ("optimizer", "rate"),
        )


@rule("R05", "W", "overfitting", level="run")
def _overfitting(facts: AppFacts) -> Iterator[Finding]:
    """Since this round the model memorizes training samples, and gets worse on other samples.

    Fix: Put EarlyStopping('val_loss', patience=3, restore_best_weights=True) into callbacks; or add dropout or
    augmentation.
    Source: Prechelt, Early Stopping - But When?, 1998
    """
    rows = [
        (record.loss, record.metrics["val_loss"], record.round)
        for record in facts.records
        if "val_loss" in record.metrics
    ]
    last = rows[-APART - 1 :]
    if len(last) <= APART or not all(math.isfinite(value) for loss, val, _ in rows for value in (loss, val)):
        return
    best = min(rows, key=lambda row: row[1])
    worse = all(a[1] < b[1] and a[0] >= b[0] for a, b in itertools.pairwise(last))
    if worse and last[-1][1] > WORSE * best[1] > 0:
        yield Finding(
            f"val_loss was lowest, {best[1]:.4g}, after round {best[2]}, and is {last[-1][1]:.4g} while the loss falls",
            ("setting", "callbacks"),
        )


@rule("R06", "W", "stale updates", level="run")
def _stale(facts: AppFacts) -> Iterator[Finding]:
    """An update that was computed with old weights does not point to the minimum any more.

    Fix: Set max_staleness, or staleness='polynomial:0.5', which gives old updates less weight.
    Source: Zhang et al., Staleness-aware Async-SGD, arXiv:1511.05950
    """
    ages: dict[int | None, list[int]] = {}
    for record in facts.records:
        ages.setdefault(record.slot, []).append(record.staleness)
    slots = len(ages)
    means = {
        slot: sum(slot_ages) / len(slot_ages) for slot, slot_ages in ages.items() if len(slot_ages) >= LEAST_UPDATES
    }
    slot = max(means, key=means.__getitem__, default=None)
    if slot is not None and slots > 1 and means[slot] > STALE * slots:
        yield Finding(
            f"updates of slot {slot} are {means[slot]:.1f} merges old when they are applied, with {slots} slots",
            ("setting", "max_staleness"),
        )


RUN_RULES = (not_finite, _diverging, _oscillating, _stuck, _overfitting, _stale)


@contextlib.contextmanager
def watched(app: App) -> Iterator[None]:
    """Report, within this context, the findings that the rules of class R yield for the records of the app's run.

    In a plain round, this is the only file of the adviser that runs.
    """
    if app.advice == "off":
        yield
        return
    records: list[Any] = []
    remaining = list(RUN_RULES)

    def hear(event: Event) -> None:
        if type(event) is not Committed or not remaining:
            return
        records.append(event.record)
        del records[:-MOST_RECORDS]
        facts = AppFacts(records=records)
        for run_rule in list(remaining):
            try:
                finding = next(iter(run_rule.check(facts)), None)
            except Exception as error:
                log.warning("the rule %s failed: %s: %s", run_rule.id, type(error).__name__, error)
                remaining.remove(run_rule)
                continue
            if finding is not None:
                remaining.remove(run_rule)
                advised = Advised(rule=run_rule.id, severity=run_rule.severity, what=finding.message, fix=run_rule.fix)
                app.run_context.emit(advised)

    unsubscribe = app.subscribe(hear)
    try:
        yield
    finally:
        unsubscribe()
