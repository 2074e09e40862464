"""The interface of the user's app for the other packages: ``UserApp``. Runs everywhere; imports no heavy modules."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol

from ddlf.events import Event
from ddlf.events.record import History

if TYPE_CHECKING:
    from pathlib import Path

    from ddlf.events.record import RoundRecord


class Display(Protocol):
    """Shows the progress of a run."""

    prints: bool

    def is_due(self, record: RoundRecord) -> bool:
        """Return whether to print this record now."""


class Recording(Protocol):
    """Writes the folder of a run."""

    is_over: bool
    path: Path

    def leave(self) -> None:
        """Stop writing to the folder of the run."""


class Context(Protocol):
    """State that all runs of one app share on one node. It contains the parts that packages below ``ddlf.training``
    use.

    ``ddlf.training.context.RunContext`` implements it.

    Attributes:
        arrays_only: Whether ``load_dataset`` sets only arrays, not data sets in files.
        display: The active display; None while the app is not displayed.
        recording: The writer of a run's folder.
        progress: The final state of the last run.
    """

    arrays_only: bool
    display: Display | None
    recording: Any

    @property
    def progress(self) -> Any: ...

    @property
    def emit(self) -> Callable[[Event], None]:
        """A function that sends an event of the run to all subscribers."""

    @property
    def check_written(self) -> Callable[[], Coroutine[Any, Any, None]]:
        """A function that raises an error if the app lacks a method that it must have."""


class UserApp(Protocol):
    """The user's object, which ``ddlf.IApp`` implements. Its settings can be read as attributes, too."""

    model: Any
    cluster: Any
    history: History
    ledger: Any
    mode: Any
    exchange: Any
    indices: Any
    worker: Any
    replica: Any

    @property
    def run_context(self) -> Context:
        """The context that the runs of this app share."""

    def load_dataset(self) -> Any:
        """Set the data attributes, such as ``x_train``."""

    def load_test_dataset(self) -> Any:
        """Set test data on the master, if the training data is private."""

    def create_model(self) -> Any:
        """Set ``model`` to a compiled Keras model."""

    def train(self, weights: list[Any], worker_epochs: int, batch_size: int) -> Any:
        """Train the model in one round, on a worker."""

    def on_round(self, record: RoundRecord) -> Any:
        """Receive the record of a finished round."""

    def is_convergent(self, record: RoundRecord) -> Any:
        """Return whether training can stop."""

    def subscribe(self, sink: Callable[[Event], Any]) -> Callable[[], None]:
        """Send all events to ``sink``, and return a function that unsubscribes it."""

    def connect(self) -> Awaitable[None]:
        """Connect to the workers."""

    def __getattr__(self, name: str) -> Any:
        """Return the value of a setting, or of an attribute that the user has set on the app."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a setting, or another attribute."""
