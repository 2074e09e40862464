"""Asynchronous training: its settings. Runs everywhere; imports no heavy modules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ddlf.settings.checks import ARRIVAL, STALENESS
from ddlf.settings.setting import FACT, Setting
from ddlf.training.spec import Refusal, RunSpec
from ddlf.training.strategy import MAX_STALENESS, OUTER, STALENESS_HELP, CommonStep, Loop, Strategy

if TYPE_CHECKING:
    from ddlf.algorithms.arrival import Arrival
    from ddlf.algorithms.outer import OuterOptimizer
    from ddlf.algorithms.staleness import Staleness


@dataclass(frozen=True)
class Async(Strategy):
    """Asynchronous training: each update changes the weights when it arrives, and slots do not wait for each other."""

    name: ClassVar[str] = "async"
    words: ClassVar[str] = "asynchronous"
    about: ClassVar[str] = "on arrival"

    arrival: Setting[Arrival, Arrival | str] = Setting(
        "published", ARRIVAL, "how an arriving update is applied to the weights", "RULE", FACT
    )

    staleness: Setting[Staleness, Staleness | str] = Setting(
        "constant", STALENESS, STALENESS_HELP, "RULE", FACT, unset=None
    )
    """The staleness of an update is the number of merges between reading the weights that it is based on and applying
    it. The staleness of a push is the number of steps that the server took in between. The default is ``constant`` in
    asynchronous training and ``inverse``, which is 1 / max(1, staleness), in Downpour."""

    outer: Setting[OuterOptimizer, OuterOptimizer | str | None] = OUTER
    max_staleness: Setting[int | None, int | None] = MAX_STALENESS

    def loop(self, spec: RunSpec, step: CommonStep | None) -> Loop:
        """Return the master's training loop, in which each slot has its own rounds."""
        from ddlf.training.strategies.asynchronous.master import Asynchronous

        return Asynchronous(
            arrival=self.arrival,
            staleness=self.staleness,
            outer=self.outer,
            max_staleness=self.max_staleness,
            balance=spec.data.balance,
        )

    @classmethod
    def compared(cls, saved: dict[str, Any]) -> dict[str, Any]:
        """Return those settings of a checkpoint that had an effect, to compare them with a run that resumes.

        Release 0.1 accepted ``balance`` with rounds of whole epochs, where it has no effect.
        """
        return saved if saved.get("worker_steps") else {name: saved[name] for name in saved if name != "balance"}

    def has_fixed_slots(self, spec: RunSpec) -> bool:
        """Return whether the number of slots stays the same.

        It does with ``balance="speed"``, which gives each slot its own number of steps.
        """
        return spec.data.balance == "speed"

    def refusals(self, spec: RunSpec) -> Iterator[Refusal]:
        """Yield an error for each setting that only works if all slots end a round together."""
        yield Refusal(
            spec.local.optimizer_state == "averaged",
            "optimizer_state='averaged' is for synchronous training: asynchronous slots end no round together",
            "use 'kept' or 'fresh', or train in mode 'sync'",
        )
        yield Refusal(
            spec.data.balance == "speed" and spec.local.steps is None,
            "balance='speed' in asynchronous training sets the steps of a round, and without worker_steps a round is of whole epochs",
            "set worker_steps, the steps of the fastest slot, or leave balance at 'equal'",
        )
