"""What a strategy and an exchange say about themselves. Runs everywhere; imports nothing of weight.

A strategy says how a run trains: ``Sync``, ``Async``, ``Downpour``, or one of another package, which the entry point group ``ddlf.strategies``
names. It is a frozen dataclass of its settings. What starts a run asks it questions and knows none by name. Its half that runs on the master
is a ``Loop``, which is imported when a run begins.
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
    from ddlf.training.exchanges.gradient import Step
    from ddlf.training.run import Run
    from ddlf.training.spec import RunSpec

ENTRY_POINTS = "ddlf.strategies"
"""The group of entry points that name the strategies of other packages: ``name = "module:Class"``."""


class Refusal(NamedTuple):
    """A combination of settings that cannot work.

    Args:
        applies: Whether this run has it.
        sentence: What is wrong; it begins with ``setting=value``.
        hint: What to do.
    """

    applies: bool
    sentence: str
    hint: str


class Place(NamedTuple):
    """Where a run's weights can be.

    Args:
        run: The name of the run on the workers.
        crew: Its workers.
        cluster: The cluster that they are of.
        lossless: Whether each tensor travels as it is.
        fragments: Whether slots exchange fragments of the weights.
    """

    run: str
    crew: Crew
    cluster: Cluster
    lossless: Sequence[bool]
    fragments: bool


class Loop(Protocol):
    """A strategy's half on the master, made for one run."""

    def begin(self, run: Run) -> None:
        """Put into ``run.state`` what the loop keeps there, for callbacks that look at it before training."""

    async def train(self, run: Run) -> None:
        """Train until all rounds are over or the run is to end."""


class Strategy(Group):
    """How a run trains: a frozen dataclass of settings that only this strategy has.

    Attributes:
        name: How ``mode`` names it.
        words: How sentences name it, before "training".
        in_rounds: Whether all slots end a round together, so that a commit is a round. Else each slot's update is a commit.
        backups: Whether a second worker also gets the task of a slot that takes much longer than the others of its round.
        encodes_small: Whether tensors of any size are encoded on their way.
        keeps_optimizer: Whether a slot's optimizer goes on from round to round.
        about_rates: What a learning rate that a callback sets does not do here; "" if it does all.
        role: What trains on the workers, as ``"module:Class"``; "" for that of the exchange.
        unused: Settings of every run that have no effect here, and why.
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
        """Make its half on the master.

        Args:
            spec: The run, of which this is the strategy.
            step: Makes the common step, if the exchange has one.
        """
        raise NotImplementedError

    def weights(self, place: Place) -> Outwards | None:
        """Say where the weights are, for tasks; None if the exchange says it."""
        return None

    def check_model(self, model: Any) -> None:
        """Refuse a model that this strategy cannot train."""

    def has_fixed_slots(self, spec: RunSpec) -> bool:
        """Whether workers that come later get no slots of their own."""
        return False

    def slot_warning(self, slots: int) -> str:
        """Say what K slots are too few for, though the run begins; empty if nothing."""
        return ""

    @classmethod
    def compared(cls, saved: dict[str, Any]) -> dict[str, Any]:
        """Return those settings of a checkpoint that had an effect, by name."""
        return saved

    @property
    def extra_workers(self) -> int:
        """How many workers train no slot."""
        return 0

    def refusals(self, spec: RunSpec) -> Iterable[Refusal]:
        """Combinations of settings that this strategy cannot train."""
        return ()

    def file_refusals(self, spec: RunSpec) -> Iterable[Refusal]:
        """Settings that this strategy cannot train with on partition files."""
        return ()

    def worker_refusals(self, workers: int, one_at_a_time: bool) -> Iterable[Refusal]:
        """Workers that cannot carry it; arguments as of ``refusals.check_workers``."""
        return ()

    def slot_refusals(self, slots: int, fewest: int) -> Iterable[Refusal]:
        """Numbers of slots that are too small; arguments as of ``refusals.check_slots``."""
        return ()


class BaseExchange(Group):
    """How updates and weights travel: a frozen dataclass of settings.

    Attributes:
        name: How ``exchange`` names it; "" for settings of whichever exchange the run has.
        one_step: Whether a round is one step that all slots make together, and nothing is trained locally.
        on_workers: Whether the weights are on the workers, in slices.
        role: What trains on the workers, as ``"module:Class"``.
    """

    one_step: ClassVar[bool] = False
    on_workers: ClassVar[bool] = False
    role: ClassVar[str] = "ddlf.training.slot.replica:Replica"

    def check_app(self, app: App) -> None:
        """Refuse an app that cannot be trained like this, before anything starts."""

    def step(self, app: App) -> Step | None:
        """Make what makes the common step; None where slots train locally."""
        return None

    def weights(self, place: Place) -> Outwards:
        """Say where the weights are, for tasks."""
        raise NotImplementedError

    def refusals(self, spec: RunSpec) -> Iterable[Refusal]:
        """Combinations of settings that this exchange cannot carry."""
        return ()
