"""Tells whether a model can learn from its first weights. Runs on the master, with Keras."""

from __future__ import annotations

import logging
from dataclasses import replace

from ddlf.extras.advice.batch import activations, gradients, rows_of
from ddlf.extras.advice.collect import facts_of
from ddlf.extras.advice.rules import RULES
from ddlf.training.context import App

log = logging.getLogger(__name__)
OF_STARTS = ("M25", "M26")
"""The rules about first weights: gradients that vanish or explode, and dead units."""


def broken_start(app: App) -> str:
    """Return the finding about the first weights of an app's model; "" if there is none.

    Data in files are not read, so their models have no finding.

    Args:
        app: An app with data and a compiled model. Its weights stay the same.
    """
    if (rows := rows_of(app)) is None:
        return ""
    try:
        facts = facts_of(app)
        facts = replace(facts, seen=activations(app.model, rows, facts) | gradients(app.model, rows, facts))
        findings = [finding.message for rule in RULES if rule.id in OF_STARTS for finding in rule.check(facts)]
    except Exception as error:  # a failed trial of the user's own layers does not count as a finding
        log.info("a start was not checked: %s", error)
        return ""
    return findings[0] if findings else ""
