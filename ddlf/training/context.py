"""State that all runs of one app share on one node: ``RunContext``. It is never pickled: each node has its own.

The user's object contains only the user's own things: data, model, methods and settings. Everything else that a run
needs is in the context, so that no module uses private attributes of the object.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ddlf.data.app import Display, UserApp
from ddlf.events import Event
from ddlf.events.sinks import Events

if TYPE_CHECKING:
    from ddlf.algorithms.weights import Weights
    from ddlf.training.checkpoints.releases import ReleaseAccount
    from ddlf.training.progress import Progress, WeightsRef


class App(UserApp, Protocol):
    """The interface of the user's app, as far as training needs it."""

    @property
    def run_context(self) -> RunContext:
        """The state that all runs of this app share on this node."""


@dataclass(slots=True, kw_only=True)
class RunContext:
    """State that all runs of one app share on this node.

    Args:
        emit: Sends an event to all subscribers.
        hook: Calls the user's ``on_event``, if the user wants this kind of event; the result may be awaitable.
        check: Raises an error if no run can begin with the app.
        check_written: Raises an error if the app lacks a method.

    Attributes:
        events: Distributes events.
        name: The name of the run on the workers; "" before the first run.
        is_training: Whether a run is in progress.
        progress: The final state of the last run.
        account: Counts the releases of the last run with noise.
        weights: New weights that the model has not received yet.
        first: The first weights of a model that has no memory for them; None if its initializers make them.
        stop: Whether to end after this round; None while no run is in progress.
        content: Fingerprint of the training data that all nodes have.
        data: The policy of the training data of the last run (``samples/policy.py``); None before the first run.
        optimizer: Description of the optimizer of the workers' models.
        threads: The number of compute threads of every worker; None leaves each worker its own number.
        local_files: The partition files that each worker has on its disks, by the worker's number.
        arrays_only: Whether ``load_dataset`` sets only arrays.
        created: The attributes that ``load_dataset`` and ``create_model`` have set, each with its previous value, if any.
        feeds: The inputs of evaluations, by part of the data.
        test_function: The compiled test step of the model.
        display: The active display; None while the app is not displayed.
        recording: The writer of a run's folder.
        typed: The options of the command line that change the run or name its workers, for messages; empty in a program.
    """

    emit: Callable[[Event], None]
    hook: Callable[[Event], Any]
    check: Callable[[], Coroutine[Any, Any, None]]
    check_written: Callable[[], Coroutine[Any, Any, None]]
    events: Events = field(default_factory=Events)
    name: str = ""
    is_training: bool = False
    progress: Progress | None = None
    account: ReleaseAccount | None = None
    weights: Weights | WeightsRef | None = None
    first: Weights | None = None
    stop: bool | None = None
    content: str = ""
    data: Any = None
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    threads: int | None = None
    local_files: dict[int, Any] = field(default_factory=dict)
    arrays_only: bool = False
    created: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    feeds: Mapping[str, Any] = field(default_factory=dict)
    test_function: Any = None
    display: Display | None = None
    recording: Any = None
    typed: Sequence[str] = ()


MASTER_ONLY = frozenset(
    {"cluster", "model", "worker", "run_context", "replica", "indices", "history", "ledger", "outer"}
    | {"x_train", "y_train", "x_test", "y_test", "x_val", "y_val", "w_train", "w_val", "w_test"}
    | {"train_data", "val_data", "test_data", "on_round", "on_event", "is_convergent", "callbacks", "peer"}
)
"""Attributes that do not travel from the master to the workers."""


SILENT = "_silent"
"""Attribute of an app that is trained only to measure it: no callback runs on its workers."""


def travels(app: App) -> dict[str, Any]:
    """Return the attributes of an app to send to workers.

    These are all except ``MASTER_ONLY`` and the results of ``load_dataset`` and ``create_model``.
    """
    state, created = {}, app.run_context.created
    for name, value in vars(app).items():
        values = created.get(name)
        if name in MASTER_ONLY or (values is not None and values[0] is value and len(values) == 1):
            continue
        state[name] = values[1] if values is not None and values[0] is value else value
    return state
