"""The interfaces of a strategy and an exchange. Runs on the master; imports no heavy modules.

A strategy defines how a run trains: ``Sync``, ``Async``, ``Downpour``, or a class of another package that is
registered in the entry point group ``ddlf.strategies``. An exchange defines how updates and weights travel; the group
is ``ddlf.exchanges``. Both are frozen dataclasses of their settings. The code that starts a run uses these interfaces
only and knows no strategy by name. The strategy's half on the master is a ``Loop``, which is imported when a run
begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ddlf.errors import ConfigError
from ddlf.settings.checks import OUTER as OUTER_CHECK
from ddlf.settings.checks import Whole
from ddlf.settings.setting import FACT, Setting
from ddlf.training.spec import ExchangeSettings, RunSpec, StrategySettings

if TYPE_CHECKING:
    from ddlf.algorithms.merge import Rule
    from ddlf.algorithms.outer import OuterOptimizer, State
    from ddlf.algorithms.weights import Tensor
    from ddlf.cluster.cluster import Cluster
    from ddlf.training.context import App
    from ddlf.training.crew.crew import Crew
    from ddlf.training.exchanges.carrier import WeightSource
    from ddlf.training.exchanges.states import SlotStates
    from ddlf.training.run import Run
    from ddlf.training.slot.parts import Kept
    from ddlf.training.slot.task import SlotState


OUTER: Setting[OuterOptimizer, OuterOptimizer | str | None] = Setting(
    None,
    OUTER_CHECK,
    "optimizer that applies the merged update to the weights (default: subtract)",
    "RULE",
    FACT,
)
"""An optimizer on the master that treats the merged update as a gradient."""

STALENESS_HELP = "weight of an update that is based on old weights"
MAX_STALENESS: Setting[int | None, int | None] = Setting(
    None,
    Whole(0, none="no limit"),
    "maximum number of rounds a slot may be ahead of the slowest slot before it waits (default: no limit)",
    "N",
    FACT,
)
"""With 0 all slots start each round together with the same weights, as in synchronous training, but updates are added
as they arrive."""


class WeightContext(NamedTuple):
    """Everything that an exchange needs to find and fetch the weights of a run.

    Args:
        run: The name of the run on the workers.
        crew: The workers of the run.
        cluster: The cluster of these workers.
        lossless: For each tensor, whether it travels without a codec.
        spec: All settings of the run.
        fragments: Whether slots exchange fragments of the weights.
    """

    run: str
    crew: Crew
    cluster: Cluster
    lossless: Sequence[bool]
    spec: RunSpec
    fragments: bool


class Loop(Protocol):
    """The part of a strategy that runs on the master and trains. One object serves one run."""

    def begin(self, run: Run) -> None:
        """Store the loop's initial state in ``run.state``, where callbacks can read it before training."""

    async def train(self, run: Run) -> None:
        """Train until all rounds are done or the run has to end."""


class CommonStep(Protocol):
    """An outer optimizer that makes the common step of all slots, such as the model's own optimizer."""

    def plan(self, steps: int, epochs: int) -> None:
        """Receive the number of steps and epochs of the run, which the optimizer's schedules need."""

    def init(self, weights: Sequence[Tensor]) -> State:
        """Return the optimizer's initial state, as ``OuterOptimizer`` requires."""

    def update(
        self, state: State, weights: Sequence[Tensor], merged: Sequence[Tensor], trainable: Sequence[bool]
    ) -> tuple[State, list[Tensor]]:
        """Change the weights by the merged update, as ``OuterOptimizer`` requires."""


class Strategy(StrategySettings):
    """How a run trains: a frozen dataclass with the settings of one strategy."""

    def loop(self, spec: RunSpec, step: CommonStep | None) -> Loop:
        """Return the object that trains with this strategy on the master.

        Args:
            spec: The spec of the run, which contains this strategy.
            step: Function that makes the common step, if the exchange has one.
        """
        raise NotImplementedError

    def weights(self, weight_context: WeightContext) -> WeightSource | None:
        """Return the object that supplies the weights for tasks; None leaves this to the exchange."""
        return None

    def check_model(self, app: App) -> None:
        """Raise an error if this strategy cannot train the app's model."""


@dataclass(frozen=True)
class Exchange(ExchangeSettings):
    """How updates and weights travel. ``EXCHANGES`` in ``ddlf.training.registry`` lists DDLF's own exchanges."""

    async def chosen(self, app: App, crew: Crew, spec: RunSpec) -> tuple[Exchange, str]:
        """Return the exchange that this run uses, and why it was chosen; "" if there was no choice."""
        return self, ""

    async def preview(self, app: App, spec: RunSpec) -> str:
        """Return what a run would print about its exchange, for ``ddlf run --dry-run``; "" if it would print nothing."""
        return ""

    def loop(self, merge: Rule, outer: OuterOptimizer, balance: str) -> Loop | None:
        """Return the exchange's own loop of synchronous training; None to use the strategy's loop."""
        return None

    def merge_rule(self, chosen: Rule) -> Rule:
        """Return the rule that merges the updates of a round in synchronous training.

        An exchange with its own rule keeps the strategy's loop, and names ``merge`` in ``unused``.

        Args:
            chosen: The rule that the user chose, which is the result by default.
        """
        return chosen

    def step(self, app: App) -> CommonStep | None:
        """Return the function that makes the common step of all slots; None if slots train locally."""
        return None

    def weights(self, weight_context: WeightContext) -> WeightSource:
        """Return the object that supplies the weights for tasks. By default these come from the master."""
        from ddlf.training.exchanges.carrier import StarWeights

        return StarWeights(str(self.weights_codec), weight_context.lossless, fragments=weight_context.fragments)

    def states(
        self, weight_context: WeightContext, source: WeightSource, states: list[SlotState], parts: Mapping[str, Kept]
    ) -> SlotStates:
        """Return the object that keeps the states of the slots between rounds.

        Args:
            weight_context: The workers of the run, and what else locates its weights.
            source: The source of its weights.
            states: The initial state of each slot.
            parts: How slots keep their parts, by name.
        """
        from ddlf.training.exchanges.states import SlotStates

        return SlotStates(
            weight_context.run, weight_context.crew, states, parts, weight_context.spec.exchange.codec.name
        )


def strategy_and_exchange(spec: RunSpec) -> tuple[Strategy, Exchange]:
    """Return the strategy and the exchange of a run. Raise an error if one of them has no code that trains.

    Raises:
        ConfigError: A class that another package registered only has settings.
    """
    if isinstance(spec.train, Strategy) and isinstance(spec.exchange, Exchange):
        return spec.train, spec.exchange
    raise ConfigError(
        f"mode={spec.train.name!r} with exchange={spec.exchange.name!r} cannot train: one of them only has settings",
        hint="derive it from Strategy or Exchange in ddlf.training.strategy",
    )
