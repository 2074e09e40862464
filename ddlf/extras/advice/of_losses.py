"""Rules of level batch about what a loss leads to: what some steps have shown (``steps``). Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ddlf.extras.advice.facts import Facts
from ddlf.extras.advice.of_batches import LEARNT, RECIPE
from ddlf.extras.advice.rule import Found, Rule

ENDLESS = 100.0
"""Times the first loss below 0 that no likelihood or similarity reaches in so few steps."""
AGAINST = -0.2
"""Correlation of outputs with labels that no step towards them leaves."""


def _endless(facts: Facts) -> Iterator[Found]:
    first, least = facts.seen.get("first", math.nan), facts.seen.get("least", math.nan)
    if least < -ENDLESS * max(1.0, abs(first)):
        yield Found(f"in some 260 steps the loss falls from {first:.4g} to {least:.4g}, and further", ("loss", ""))


def _away(facts: Facts) -> Iterator[Found]:
    first, least = facts.seen.get("first", math.nan), facts.seen.get("least", math.nan)
    agrees = facts.seen.get("agrees")
    # Keras's own losses have the right sign, and steps that fail come anywhere.
    is_own = any(head.loss == "own" for head in facts.heads)
    if is_own and agrees is not None and agrees < AGAINST and least < first - (1 - LEARNT) * abs(first):
        yield Found(
            f"in some steps on 16 samples the loss falls from {first:.4g} to {least:.4g}, and outputs then say the opposite of labels "
            f"(their correlation is {agrees:.2f})",
            ("loss", ""),
        )


def _unlinked(facts: Facts) -> Iterator[Found]:
    if facts.seen.get("unlinked"):
        yield Found("the loss of a batch is the same when its labels are exchanged among its samples", ("loss", ""))


LOSSES = (
    Rule(
        id="L16",
        severity="E",
        level="batch",
        title="a loss without a floor",
        look=_endless,
        why="What is made as small as possible has no smallest value: outputs go off to infinity, away from the targets.",
        fix="Look at the sign of the loss, and at the order of its arguments: a distance is to become small, a likelihood large.",
        source=RECIPE,
    ),
    Rule(
        id="L21",
        severity="E",
        level="batch",
        title="a loss that leads away from labels",
        look=_away,
        why="What is made small is not the distance to the labels: the better it is learnt, the more often the model is wrong.",
        fix="Look at the sign of the loss, and at the order of its arguments: Keras gives labels first, then outputs.",
        source=RECIPE,
    ),
    Rule(
        id="L22",
        severity="E",
        level="batch",
        title="a loss that compares each sample with all labels",
        look=_unlinked,
        why="Labels of the shape (n,) against outputs of (n, 1) are stretched to (n, n), without a word: what is learnt is the mean of the labels.",
        fix="Give both one shape: y[:, None], or keras.ops.squeeze(outputs, axis=-1).",
        source="NumPy, broadcasting; Humbatova et al., arXiv:1910.11015",
    ),
)
