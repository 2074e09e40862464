"""What the runs of one app share on a node: ``RunContext``. It is in no pickle: each node has its own.

The user's object has what a user writes: data, model, methods, settings. Everything else that runs need of it is here, so that nobody reaches into
the object.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ddlf.events import Event
from ddlf.events.history import History
from ddlf.events.sinks import Events

if TYPE_CHECKING:
    from pathlib import Path

    from ddlf.algorithms.weights import Weights
    from ddlf.events.record import RoundRecord
    from ddlf.training.progress import Progress


class App(Protocol):
    """The user's object; ``ddlf.IApp`` has it. Its settings read as attributes, too."""

    model: Any
    cluster: Any
    history: History
    ledger: Any
    mode: Any
    indices: Any
    worker: Any
    replica: Any

    @property
    def run_context(self) -> RunContext:
        """What its runs share."""

    def load_dataset(self) -> Any:
        """Set the data."""

    def create_model(self) -> Any:
        """Set ``model``."""

    def train(self, weights: list[Any], worker_epochs: int, batch_size: int) -> Any:
        """Train in a round, on a worker."""

    def on_round(self, record: RoundRecord) -> Any:
        """Look at a round that is over."""

    def is_convergent(self, record: RoundRecord) -> Any:
        """Say whether training can stop."""

    def subscribe(self, sink: Callable[[Event], Any]) -> Callable[[], None]:
        """Send all events to ``sink``."""

    def connect(self) -> Awaitable[None]:
        """Connect to the workers."""

    def __getattr__(self, name: str) -> Any:
        """A setting, or what the user has set."""


class Display(Protocol):
    """What shows a run."""

    prints: bool

    def is_due(self, record: RoundRecord) -> bool:
        """Whether a record is to be printed now."""


class Recording(Protocol):
    """What writes the folder of a run."""

    is_over: bool
    path: Path

    def leave(self) -> None:
        """Write no more."""


@dataclass(slots=True, kw_only=True)
class RunContext:
    """What the runs of one app share on this node.

    Args:
        emit: Sends an event to all subscribers.
        hook: Gives an event to the user's ``on_event``, if it is one of those; the outcome may be awaitable.
        check: Refuses an app that no run can begin with.
        check_written: Refuses an app that lacks a method.

    Attributes:
        events: Where events go.
        name: The name of the run on the workers; "" before the first.
        is_training: Whether a run goes on.
        progress: What the last run has come to.
        weights: Weights that the model has not been given yet.
        stop: Whether to end after this round; None while no run goes on.
        content: Fingerprint of the training data.
        optimizer: The optimizer of the workers' models, described.
        threads: With how many threads all workers compute; None leaves each its own.
        local_files: Which partition files each worker has on its disks, by its number.
        arrays_only: Whether ``load_dataset`` sets arrays and nothing else.
        made: What ``load_dataset`` and ``create_model`` have set, with the value before, if there was one.
        feeds: What evaluations read, by part of the data.
        test_function: The compiled test step of the model.
        display: What shows the app, while something does.
        recording: What writes the folder of a run.
    """

    emit: Callable[[Event], None]
    hook: Callable[[Event], Any]
    check: Callable[[], Coroutine[Any, Any, None]]
    check_written: Callable[[], Coroutine[Any, Any, None]]
    events: Events = field(default_factory=Events)
    name: str = ""
    is_training: bool = False
    progress: Progress | None = None
    weights: Weights | None = None
    stop: bool | None = None
    content: str = ""
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    threads: int | None = None
    local_files: dict[int, Any] = field(default_factory=dict)
    arrays_only: bool = False
    made: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    feeds: Mapping[str, Any] = field(default_factory=dict)
    test_function: Any = None
    display: Display | None = None
    recording: Any = None
