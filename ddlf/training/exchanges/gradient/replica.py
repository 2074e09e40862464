"""The worker of the gradient exchange: a round is the gradient of one batch. Runs in the executor."""

from __future__ import annotations

from typing import Any, ClassVar

from ddlf.algorithms.weights import Weights
from ddlf.training.context import App
from ddlf.training.exchanges.gradient.settings import Gradient
from ddlf.training.slot.build import describe_optimizer
from ddlf.training.slot.gradients import Gradients
from ddlf.training.slot.keras_model import KerasModel
from ddlf.training.slot.parts import parts_named
from ddlf.training.slot.replica import Replica


class GradientModel(KerasModel):
    """A Keras model that computes the gradient of one batch in each round. The optimizer is on the master."""

    def __init__(self, app: App) -> None:
        described = describe_optimizer(app.model.optimizer)
        self._gradients = Gradients(app.model)
        super().__init__(app)
        self.gradient = self._gradient
        self._described = described  # the optimizer that the app compiled, and the master steps with

    def _gradient(self, batch: tuple[Any, ...], weights: Weights) -> tuple[Weights, dict[str, float]]:
        """Return the gradient of a batch as an update, and Keras's metrics; both from ``Gradients.of``."""
        update, self._told = self._gradients.of(batch, weights)
        return update, dict(self._told)


class GradientReplica(Replica):
    """One worker's copy of an app and its model, for the gradient exchange."""

    PARTS = parts_named(Gradient.slot_parts)
    MODEL: ClassVar[type[KerasModel]] = GradientModel
