"""The interfaces of a strategy and an exchange. Runs everywhere; imports no heavy modules.

A strategy defines how a run trains: ``Sync``, ``Async``, ``Downpour``, or a class of another package that is
registered in the entry point group ``ddlf.strategies``. It is a frozen dataclass of its settings. The code that starts
a run uses this interface only and knows no strategy by name. The strategy's half on the master is a ``Loop``, which is
imported when a run begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from ddlf.training.context import App
from ddlf.training.settings.setting import Group

if TYPE_CHECKING:
    from ddlf.cluster.cluster import Cluster
    from ddlf.training.crew import Crew
    from ddlf.training.exchange import Outwards
    from ddlf.training.exchanges.gradient.step import Step
    from ddlf.training.run import Run
    from ddlf.training.spec import RunSpec

ENTRY_POINTS = "ddlf.strategies"
"""The entry point group in which other packages register strategies: ``name = "module:Class"``."""


class Refusal(NamedTuple):
    """A combination of settings that cannot work.

    Args:
        applies: Whether this run has the combination.
        sentence: The problem; begins with ``setting=value``.
        hint: Advice for the user.
    """

    applies: bool
    sentence: str
    hint: str


class Place(NamedTuple):
    """Everything that an exchange needs to locate the weights of a run.

    Args:
        run: The name of the run on the workers.
        crew: The workers of the run.
        cluster: The cluster of these workers.
        lossless: For each tensor, whether it travels without a codec.
        fragments: Whether slots exchange fragments of the weights.
    """

    run: str
    crew: Crew
    cluster: Cluster
    lossless: Sequence[bool]
    fragments: bool


class Loop(Protocol):
    """A strategy's half on the master. One object serves one run."""

    def begin(self, run: Run) -> None:
        """Put the loop's initial state into ``run.state``, where callbacks can read it before training."""

    async def train(self, run: Run) -> None:
        """Train until all rounds are done or the run has to end."""


class Strategy(Group):
    """How a run trains: a frozen dataclass with the settings of one strategy.

    Attributes:
        name: The value of ``mode`` that selects it.
        words: Its name in sentences, before the word "training".
        in_rounds: Whether all slots end a round together, so that a commit is a round. Otherwise each slot's update is
            a commit.
        backups: Whether a second worker also gets the task of a slot that is much slower than the others of its round.
        encodes_small: Whether codecs are applied to tensors of any size.
        keeps_optimizer: Whether a slot's optimizer keeps its state from round to round.
        about_rates: The effect that a learning rate set by a callback lacks here; "" if it has its full effect.
        role: The role that trains on the workers, as ``"module:Class"``; "" for the role of the exchange.
        unused: Settings of every run that have no effect here, each with the reason.
    """

    words: ClassVar[str]
    in_rounds: ClassVar[bool] = False
    backups: ClassVar[bool] = False
    encodes_small: ClassVar[bool] = False
    keeps_optimizer: ClassVar[bool] = True
    about_rates: ClassVar[str] = ""
    role: ClassVar[str] = ""
    unused: ClassVar[dict[str, str]] = {}

    def loop(self, spec: RunSpec, step: Step | None) -> Loop:
        """Return the strategy's half on the master.

        Args:
            spec: The spec of the run, which contains this strategy.
            step: Makes the common step, if the exchange has one.
        """
        raise NotImplementedError

    def weights(self, place: Place) -> Outwards | None:
        """Return the source of the weights for tasks; None leaves this to the exchange."""
        return None

    def check_model(self, model: Any) -> None:
        """Raise an error if this strategy cannot train the model."""

    def has_fixed_slots(self, spec: RunSpec) -> bool:
        """Return whether workers that join later get no slot."""
        return False

    def slot_warning(self, slots: int) -> str:
        """Return a warning if K slots are few, though enough to run; "" otherwise."""
        return ""

    @classmethod
    def compared(cls, saved: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of a checkpoint that had an effect, by name."""
        return saved

    @property
    def extra_workers(self) -> int:
        """The number of workers that train no slot."""
        return 0

    def refusals(self, spec: RunSpec) -> Iterable[Refusal]:
        """Return the combinations of settings that this strategy cannot train."""
        return ()

    def file_refusals(self, spec: RunSpec) -> Iterable[Refusal]:
        """Return the settings that this strategy cannot train with on partition files."""
        return ()

    def worker_refusals(self, workers: int, one_at_a_time: bool) -> Iterable[Refusal]:
        """Return refusals of too few or unsuitable workers; same arguments as ``refusals.check_workers``."""
        return ()

    def slot_refusals(self, slots: int, fewest: int) -> Iterable[Refusal]:
        """Return refusals of too few slots; same arguments as ``refusals.check_slots``."""
        return ()


class BaseExchange(Group):
    """How updates and weights travel: a frozen dataclass of settings.

    Attributes:
        name: The value of ``exchange`` that selects it; "" for a group of settings that every exchange has.
        one_step: Whether a round is one step that all slots make together, without local training.
        on_workers: Whether the workers hold the weights, in slices.
        role: The role that trains on the workers, as ``"module:Class"``.
    """

    one_step: ClassVar[bool] = False
    on_workers: ClassVar[bool] = False
    role: ClassVar[str] = "ddlf.training.slot.replica:Replica"

    def check_app(self, app: App) -> None:
        """Raise an error before anything starts if the app cannot be trained with this exchange."""

    def step(self, app: App) -> Step | None:
        """Return the factory of the common step; None if slots train locally."""
        return None

    def weights(self, place: Place) -> Outwards:
        """Return the source of the weights for tasks."""
        raise NotImplementedError

    def refusals(self, spec: RunSpec) -> Iterable[Refusal]:
        """Return the combinations of settings that this exchange cannot carry."""
        return ()
