"""Tells whether a model can learn from its first weights. Runs on the master, with Keras."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cached_property

from ddlf.algorithms.weights import Weights
from ddlf.extras.advice.batch import activations, gradient_norms, rows_of
from ddlf.extras.advice.collect import facts_of
from ddlf.extras.advice.facts import AppFacts
from ddlf.extras.advice.network import has_own_train_step
from ddlf.extras.advice.rules import RULES
from ddlf.training.context import App
from ddlf.training.slot.gradients import Gradients
from ddlf.training.slot.variables import set_weights

log = logging.getLogger(__name__)
OF_STARTS = ("M25", "M26")
"""The rules about first weights: gradients that vanish or explode, and dead units."""


class StartCheck:
    """Checks first weights of one model, one after another, with one compiled step.

    Data in files are not read, so their models have no finding.

    Args:
        app: An app with data and a compiled model. The check sets the model's weights and replaces its optimizer.
    """

    def __init__(self, app: App) -> None:
        self._app, self._model, self._rows = app, app.model, rows_of(app)

    def __call__(self, weights: Weights) -> str:
        """Return the finding about first weights, one array for each of ``model.weights``; "" if there is none."""
        if self._rows is None:
            return ""
        try:
            set_weights(self._model, weights)
            observations = activations(self._model, self._rows, self._facts)
            if self._gradients is not None:
                observations |= gradient_norms(self._model, self._gradients.compute(self._rows, weights)[0])
            facts = replace(self._facts, observations=observations)
            findings = [finding.message for rule in RULES if rule.id in OF_STARTS for finding in rule.check(facts)]
        except Exception as error:  # a failed trial of the user's own layers does not count as a finding
            log.info("a start was not checked: %s", error)
            return ""
        return findings[0] if findings else ""

    @cached_property
    def _facts(self) -> AppFacts:
        return facts_of(self._app)

    @cached_property
    def _gradients(self) -> Gradients | None:
        return None if has_own_train_step(self._model) else Gradients(self._model)
