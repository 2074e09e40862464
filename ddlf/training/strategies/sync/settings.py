"""Synchronous training: its settings. Runs everywhere; imports no heavy modules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ddlf.settings.checks import MERGE, OneOf
from ddlf.settings.setting import FACT, Setting
from ddlf.training.spec import Refusal, RunSpec
from ddlf.training.strategy import OUTER, CommonStep, Loop, Strategy, strategy_and_exchange

if TYPE_CHECKING:
    from ddlf.algorithms.merge import Rule
    from ddlf.algorithms.outer import OuterOptimizer
    from ddlf.training.context import App


@dataclass(frozen=True)
class Sync(Strategy):
    """Synchronous training: all slots train from the same weights, and their updates become one in each round."""

    name: ClassVar[str] = "sync"
    words: ClassVar[str] = "synchronous"
    about: ClassVar[str] = "once per round"
    in_rounds: ClassVar[bool] = True
    backups: ClassVar[bool] = True

    merge: Setting[Rule, Rule | str] = Setting(
        "mean",
        MERGE,
        "how the updates of a round are merged",
        "RULE",
        FACT,
    )
    """The mean is weighted by samples. The other rules limit the influence of a few corrupt updates."""

    outer: Setting[OuterOptimizer, OuterOptimizer | str | None] = OUTER

    batchnorm: Setting[str, str] = Setting(
        "averaged",
        OneOf("averaged", "local", "recalibrated"),
        "batch normalization: averaged over the slots, kept per slot (local), or recomputed after each merge (recalibrated)",
        "",
        FACT,
    )
    """``local`` keeps the moving statistics, scale and offset of ``BatchNormalization`` separate for each slot during
    the whole run. The model that is evaluated and saved has their mean (FedBN, arXiv:2102.07623). Use it when the
    slots' data differ. ``recalibrated`` recomputes the moving statistics after each merge: the workers receive the
    merged weights and run the samples of their round through the model once more (SWA, arXiv:1803.05407). This costs
    a forward pass and sends the weights twice per round. Scale and offset are merged like other weights."""

    def loop(self, spec: RunSpec, step: CommonStep | None) -> Loop:
        """Return the master's training loop, whose rounds all slots end together."""
        from ddlf.training.strategies.sync.master import Synchronous
        from ddlf.training.strategies.sync.noise import Noise, NoisedSteps, NoisedSum, WithoutNoise

        exchange = strategy_and_exchange(spec)[1]
        merge, outer, balance = exchange.merge_rule(self.merge), step or self.outer, spec.data.balance
        exchange_loop = exchange.loop(merge, outer, balance)
        clip, noise = spec.data.update_clip, spec.data.noise_multiplier
        noised: Noise = WithoutNoise()
        if clip is not None and noise is not None:
            noised = NoisedSteps(noise=noise) if spec.data.protects_samples else NoisedSum(clip=clip, noise=noise)
        return exchange_loop or Synchronous(merge=merge, outer=outer, balance=balance, noise=noised)

    def check_model(self, app: App) -> None:
        """Raise an error if single samples are to be protected, and the app's model or data do not allow it."""
        if app.privacy_unit == "sample":
            from ddlf.training.slot.sample_noise import check_app

            check_app(app)

    def slot_warning(self, slots: int) -> str:
        """Return a warning if there are too few slots for the merge rule to find bad updates; "" otherwise."""
        useful = self.merge.useful
        if slots >= useful:
            return ""
        merge = f"merge={str(self.merge)!r} of {slots} slot{'s' * (slots > 1)}"
        return f"{merge} cannot tell a bad update from a good one: it needs at least {useful} slots"

    def slot_refusals(self, slots: int, fewest: int) -> Iterator[Refusal]:
        """Yield an error if there are too few slots for the merge rule."""
        least = self.merge.least
        yield Refusal(
            0 < slots < least,
            f"merge={str(self.merge)!r} needs {least} slots to find a bad update among the others, but there are {slots}",
            f"set slots={least}, which any number of workers can carry, or use another merge, such as 'median'",
        )
        yield Refusal(
            0 < fewest < least,
            f"merge={str(self.merge)!r} needs {least} slots, but the last round of an epoch has only samples for {fewest} slots",
            "choose another worker_steps or batch_size, so that the last round has more samples, or none",
        )
