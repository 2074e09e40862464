"""The gradient exchange: its refusals and its step. Runs everywhere; imports no heavy modules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ddlf.errors import AppError
from ddlf.training.spec import Refusal, RunSpec
from ddlf.training.strategy import CommonStep, Exchange

if TYPE_CHECKING:
    from ddlf.training.context import App

OF_LOCAL_TRAINING = (
    "worker_epochs",
    "local_rule",
    "balance",
    "partition",
    "optimizer_state",
    "batchnorm",
    "outer",
    "worker_callbacks",
)
"""Settings that only affect local training or its updates. The settings of other slot parts follow from
``slot_parts``."""


@dataclass(frozen=True)
class Gradient(Exchange):
    """The master averages the gradients of one batch over the samples and takes one step with the model's optimizer.

    So does one process with K times the batch size. Each step costs an exchange, which local training avoids.
    """

    name: ClassVar[str] = "gradient"
    strategies: ClassVar[tuple[str, ...]] = ("sync",)
    about: ClassVar[str] = "one gradient per batch"
    one_step: ClassVar[bool] = True
    slot_parts: ClassVar[tuple[str, ...] | None] = ("optimizer", "residual", "held")
    role: ClassVar[str] = "ddlf.training.exchanges.gradient.replica:GradientReplica"

    def check_app(self, app: App) -> None:
        """Raise an error for an app with its own ``train``, which trains locally.

        Raises:
            AppError: The app has its own ``train``.
        """
        if app.train.__module__ != "ddlf.app":
            raise AppError(
                f"{type(app).__name__}.train is local training: with exchange='gradient' there is none",
                hint="leave out train, or exchange='star'; an own compute_loss or train_step of the model can stay",
            )

    def step(self, app: App) -> CommonStep:
        """Return the function that makes the common step of all slots, with the model's own optimizer on the master."""
        from ddlf.training.exchanges.gradient.step import Step, check_model

        check_model(app)
        return Step(app.model)

    def refusals(self, spec: RunSpec) -> Iterator[Refusal]:
        """Yield an error for each setting that needs local training or unequal parts of a batch.

        Parts of other sizes would compile the step again.
        """
        local = spec.local
        for setting, value in spec.changed(OF_LOCAL_TRAINING):
            text = str(value) if hasattr(value, "family") else value
            yield Refusal(
                bool(value),
                f"{setting.name}={text!r} is for local training: with exchange='gradient' there is none",
                f"leave {setting.name} at {setting.default!r}, or use exchange='star'",
            )
        yield Refusal(
            local.steps not in (None, 1),
            f"worker_steps={local.steps} is for local training: with exchange='gradient' a round is one step",
            "leave out worker_steps, or use exchange='star'",
        )
        yield Refusal(
            local.round_samples is not None,
            "round_samples is for local training: with exchange='gradient' a round is one step",
            "leave it out, or use exchange='star'",
        )
        yield Refusal(
            local.precision == "mixed_float16",
            "precision='mixed_float16' scales the loss on each worker, but with exchange='gradient' all workers take one step",
            "use precision='mixed_bfloat16', or exchange='star'",
        )
