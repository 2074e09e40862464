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
        title="a loss without a minimum",
        look=_endless,
        why="The loss has no smallest value, so outputs grow to infinity, away from the targets.",
        fix="Check the sign of the loss and the order of its arguments. Minimize a distance; maximize a likelihood.",
        source=RECIPE,
    ),
    Rule(
        id="L21",
        severity="E",
        level="batch",
        title="a loss that rewards wrong predictions",
        look=_away,
        why="A smaller loss means more wrong predictions: it does not measure the distance to the labels.",
        fix="Check the sign of the loss and the order of its arguments. Keras passes labels first, then outputs.",
        source=RECIPE,
    ),
    Rule(
        id="L22",
        severity="E",
        level="batch",
        title="a loss that compares each sample with all labels",
        look=_unlinked,
        why="Labels of shape (n,) and outputs of shape (n, 1) broadcast silently to (n, n). The model learns the mean of the labels.",
        fix="Give both the same shape: y[:, None], or keras.ops.squeeze(outputs, axis=-1).",
        source="NumPy, broadcasting; Humbatova et al., arXiv:1910.11015",
    ),
)
