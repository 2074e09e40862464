"""The class ``IApp``, which users subclass to train a Keras model on a cluster.

The master has the user's object, which keeps the cluster and starts training. Every worker gets a copy of it without
data and model, and calls its ``load_dataset``, ``create_model`` and ``train``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddlf.errors import AppError, ConfigError, RemoteError
from ddlf.events import Event
from ddlf.events.record import History, RoundRecord, TrainingEvent, print_at_once
from ddlf.events.sinks import Sink
from ddlf.monitor.terminal.lines import line_without_hook, training_event
from ddlf.monitor.ui import shown
from ddlf.training.context import RunContext
from ddlf.training.progress import local
from ddlf.training.registry import DEFAULTS, GROUPS, SETTINGS, View, group_of, spread
from ddlf.training.roles import PRELOADED
from ddlf.training.slot.variables import get_weights, set_weights
from ddlf.training.spec import Data, Evaluation, Local, Output

if TYPE_CHECKING:
    import numpy as np

    from ddlf.cluster.cluster import Cluster
    from ddlf.extras import AdviceReport, TrainingPlan
    from ddlf.training.progress import SampleLedger
    from ddlf.training.slot.replica import Replica
    from ddlf.worker.worker import Worker


class IApp:
    """The base class of an app: subclass it, write ``load_dataset`` and ``create_model``, and call ``train_sync``.

    Class attributes are the defaults of a run. Attributes of the object override them. Arguments and command-line flags
    override both. You can set groups, such as ``mode = ddlf.Downpour(replicas=16)``, or single settings, such as
    ``replicas = 16`` and ``batch_size = 64``. The groups are in ``ddlf.training.spec``. The command
    ``ddlf config show`` lists all settings.

    Args:
        cluster: The workers. The default is the cluster of ``$DDLF_CONFIG`` or ``./cluster.yaml``. If neither exists,
            the app uses two new workers on this machine.

    Attributes:
        mode: The strategy of training: ``ddlf.Sync``, ``Async``, ``Downpour`` or ``LBFGS``, or its name. In a class, you
            can also write ``train = ddlf.Sync(...)``.
        exchange: How updates and weights travel: ``ddlf.Star``, ``Sharded``, ``Auto`` or ``Gradient``, or its name.
        checkpoint: A ``ddlf.Checkpoint``, or only the folder for checkpoints.
        data: A ``ddlf.Data``: the batches, and the samples of each slot.
        local: A ``ddlf.Local``: the training between two exchanges.
        evaluation: A ``ddlf.Evaluation``: when the model is tested, and when training can stop.
        output: A ``ddlf.Output``: the display, and the folder of the run.
        history: The records of all rounds since training last started fresh. ``history.history`` is a dict of lists,
            like in Keras.
        optimizers: The state of each slot's optimizer after these rounds, as a list of arrays in Keras's order. It is
            None for a slot that never trained, and with ``optimizer_state="fresh"``.
        ledger: How often these rounds trained on each sample. It counts the samples that ``replica.fit`` received. If
            your own ``train`` does not call ``replica.fit``, its whole partition counts.

    Example::

        class App(IApp):
            async def load_dataset(self):
                (self.x_train, self.y_train), (self.x_test, self.y_test) = load_mnist()

            async def create_model(self):
                self.model = keras.Sequential([...])
                self.model.compile(...)

        app = App(Cluster.local(2))
        await app.train_sync(master_epochs=10)
        await app.evaluate_model()
    """

    mode: Any = "sync"
    exchange: Any = "star"
    checkpoint: Any = None
    data: Any = View(Data)
    local: Any = View(Local)
    evaluation: Any = View(Evaluation)
    output: Any = View(Output)

    notation: Any = None  # replaces create_model: a file with model text, or the result of load_notation

    x_train: Any
    y_train: Any
    x_test: Any
    y_test: Any
    indices: np.ndarray[Any, Any]
    worker: Worker
    replica: Replica
    ledger: SampleLedger

    def __init__(self, cluster: Cluster | None = None) -> None:
        self.cluster = cluster
        self.history: History = History()

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        groups = [name for name, value in vars(cls).items() if group_of(name, value) is not None]
        values = spread(vars(cls), cls.__name__) if groups else {}
        for name in groups:
            delattr(cls, name)
        for name, value in values.items():
            if name in SETTINGS and vars(cls).get(name) is not value:
                setattr(cls, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in GROUPS or group_of(name, value) is None:
            super().__setattr__(name, value)
        else:
            vars(self).update(spread({name: value}))

    def __getattr__(self, name: str) -> Any:
        if name in SETTINGS:  # neither the class nor the object has set it
            return SETTINGS[name].default
        return object.__getattribute__(self, name)  # also raises the AttributeError of a property

    @property
    def optimizers(self) -> list[Any]:
        """The state of each slot's optimizer, as the attributes of the class describe it."""
        return [] if self.run_context.progress is None else self.run_context.progress.optimizers

    @property
    def model(self) -> Any:
        """The Keras model that ``create_model`` set. During training it has the weights of the last reported round."""
        model = vars(self).get("model")
        if model is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute 'model'", name="model", obj=self)
        if self.run_context.weights is not None:  # set only on access: a run that never reads the model saves the cost
            weights, self.run_context.weights = self.run_context.weights, None
            set_weights(model, local(weights))
        return model

    @model.setter
    def model(self, model: Any) -> None:
        vars(self)["model"] = model

    @model.deleter
    def model(self) -> None:
        if vars(self).pop("model", None) is None:
            raise AttributeError("model", name="model", obj=self)

    # -- methods that a user writes -------------------------------------------------------------------------------

    async def load_dataset(self) -> None:
        """Set ``x_train``, ``y_train`` and other data. Every app must write this method.

        The master and every worker call it. All of them must get equal training data. Data are arrays, or lists, tuples
        or dicts of arrays for a model with several inputs. A model without labels needs no ``y_`` attributes.

        - ``x_val`` and ``y_val`` are evaluated after each round, like ``validation_data`` of ``fit``.
        - ``x_test`` and ``y_test`` are evaluated at the end.
        - ``w_train``, ``w_val`` and ``w_test`` are sample weights.
        - ``train_data``, ``val_data`` and ``test_data`` replace the arrays. They accept partition files
          (``ddlf.data.open``), a ``PyDataset``, a ``tf.data`` pipeline or ``ddlf.data.generated``.

        All other attributes that this method sets stay on their node, where ``create_model`` and ``train`` can use
        them. Only attributes that ``__init__`` sets are sent to the workers.
        """
        hint = "write one that sets self.x_train and self.y_train"
        raise AppError(f"{type(self).__name__} has no load_dataset", hint=hint)

    async def load_test_dataset(self) -> None:
        """Set ``x_test`` and ``y_test`` on the master, if the training data is private (``private = True``).

        It may also set ``x_val`` and ``y_val``. Only the master calls this method, and only workers call
        ``load_dataset``. The default sets nothing. Then the workers evaluate the ``x_test`` that ``load_dataset`` sets
        on each of them, if it does.
        """

    async def create_model(self) -> None:
        """Set ``model`` to a compiled Keras model. The default is the model of ``notation``.

        Every node calls this method after ``load_dataset``, so it may use the data.
        """
        if self.notation is None:
            hint = "write one that sets self.model to a compiled Keras model, or name a text: notation = 'model.nnm'"
            raise AppError(f"{type(self).__name__} has no create_model", hint=hint)
        self.model = self.notation

    # -- methods that a user may override -------------------------------------------------------------------------

    def train(self, weights: list[Any], worker_epochs: int, batch_size: int) -> Any:
        """Train on this worker for one round, and return the update. Runs on the worker's Keras thread; may be async.

        ``self.indices`` has the samples of this round, in their order.

        Args:
            weights: The global weights, one array for each of ``model.weights``.
            worker_epochs: Local epochs in this round.
            batch_size: Samples in a batch.

        Returns:
            The update: weights before minus weights after, one array for each weight. Or a tuple of the update and a
            dict of metrics.
        """
        from ddlf.algorithms.weights import difference

        set_weights(self.model, weights)
        metrics = self.replica.fit(worker_epochs, batch_size, list(self.worker_callbacks))
        return difference(weights, get_weights(self.model), over=True), metrics

    def is_convergent(self, record: RoundRecord) -> Any:
        """Return whether training can stop. The master calls it after ``on_round``. May be async."""
        return False

    def on_round(self, record: RoundRecord) -> Any:
        """Print the line of a round. The master calls this after every round. May be async.

        In asynchronous training, the master calls it after every update.

        During the call ``model`` has the weights after this round, so ``evaluate_model`` and ``save_model`` use these
        weights. ``history`` ends with the record of this round. ``ledger`` and ``optimizers`` have their current
        values. If this round's weights are tested (``evaluate_every``), the call comes after the test, while the
        workers compute the next round.
        """
        if self.run_context.display is None or self.run_context.display.is_due(record):
            self.say(str(record))

    def on_event(self, event: TrainingEvent) -> Any:
        """Print a line for an unusual event of a slot or a worker. The master calls this for every event. May be async.

        During the call ``model`` and ``history`` are those of the last reported round. An error in this method ends the
        run. To observe events without this risk, use ``subscribe``.
        """
        if event.kind not in ("start", "finish") and event.text:
            self.say(f"{event.kind:<9} {event.text}")

    def say(self, text: str) -> None:
        """Print a line, if the setting ``verbose`` is on."""
        if self.verbose and (self.run_context.display is None or self.run_context.display.prints):
            print_at_once(text)

    def subscribe(self, sink: Sink) -> Callable[[], None]:
        """Call ``sink(event)`` on the master for each event of ``ddlf.events``. There may be any number of sinks.

        Training waits for a sink, so it must return at once. A sink that raises an error is unsubscribed: its traceback
        is logged, and the run continues.

        Returns:
            A function that unsubscribes the sink.
        """
        return self.run_context.events.subscribe(sink)

    @cached_property
    def run_context(self) -> RunContext:
        """The state that the runs of this app share on this node, for code that extends DDLF."""
        return RunContext(emit=self._emit, hook=self._hook, check=self._check, check_written=self._check_written)

    def _emit(self, event: Event) -> None:
        """Send an event to all subscribers, and print its line if no hook of the user does.

        The line follows records that wait for their evaluation.
        """
        self.run_context.events.emit(event)
        if self._is_heard and (text := line_without_hook(event)):
            self.say(text)

    @property
    def _is_heard(self) -> bool:
        """Whether lines that the app prints reach somebody: the terminal, or a ``say`` of the user's own."""
        return bool(self.verbose) or getattr(self.say, "__func__", None) is not IApp.say

    def _hook(self, event: Event) -> Any:
        """Pass an event to the user's ``on_event``, if it is an event of training."""
        if not self._is_heard and getattr(self.on_event, "__func__", None) is IApp.on_event:
            return None  # the default hook only prints
        return None if (training := training_event(event)) is None else self.on_event(training)

    # -- connection -----------------------------------------------------------------------------------------------

    async def connect(self) -> None:
        """Connect to the workers. You may call this again when they are connected."""
        from ddlf.cluster.cluster import default_cluster

        self.cluster = self.cluster or default_cluster()
        self.cluster.echo = self.cluster.echo and self.echo
        with shown(self, self.cluster):
            await self.cluster.connect(modules=PRELOADED)

    async def close(self) -> None:
        """Disconnect from the workers. They keep their data for the next run. You may call this again."""
        if self.cluster is not None:
            await self.cluster.close()

    async def shutdown(self) -> None:
        """End the workers' processes, and disconnect from them."""
        if self.cluster is not None:
            await self.cluster.shutdown()

    async def __aenter__(self) -> IApp:
        await self.connect()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # -- training ---------------------------------------------------------------------------------------------------

    async def train_model(self, *, fresh: bool = False) -> History:
        """Train with the attributes of the app, including ``mode``. For the details see ``train_sync``."""
        from ddlf.training.start import choose_settings

        SETTINGS["mode"].check("mode", self.mode)
        await choose_settings(self)
        strategy = partial(self._train, self.mode, None, None, None, None)  # a strategy of another package
        history: History = await getattr(self, f"train_{self.mode}", strategy)(fresh=fresh)
        return history

    async def train_sync(
        self,
        master_epochs: int | None = None,
        worker_epochs: int | None = None,
        batch_size: int | None = None,
        seed: int | None = None,
        *,
        fresh: bool = False,
    ) -> History:
        """Train synchronously: in each round every worker trains on its part, then the master merges the updates.

        A second call continues the last training of this app, like ``fit``. It uses the model's current weights, the
        states of the optimizers, and the numbers of the rounds. These numbers determine partitions and all random
        numbers. You may change settings and mode between calls.

        Args:
            master_epochs: Local epochs to train now. With ``resume`` set, local epochs of the whole training. The
                default of this and the next three arguments is the attribute of the same name.
            worker_epochs: Local epochs in a round.
            batch_size: Samples in a batch of each worker.
            seed: Seed of all random numbers.
            fresh: Whether to ignore the earlier training, except for the model's weights.

        Returns:
            A record for each round of this call. ``history`` has the records of all calls, and ``model`` the final
            weights.

        Raises:
            CheckpointMismatch: Data, model, optimizer, precision or number of slots have changed.
            DatasetMismatch: Two nodes have different training data. Nothing was trained.
            AppError: The app lacks something.
            RemoteError: The app raised an error on a worker.
        """
        return await self._train("sync", master_epochs, worker_epochs, batch_size, seed, fresh=fresh)

    async def train_async(
        self,
        master_epochs: int | None = None,
        worker_epochs: int | None = None,
        batch_size: int | None = None,
        seed: int | None = None,
        *,
        fresh: bool = False,
    ) -> History:
        """Train asynchronously: each worker's update is merged when it arrives.

        The arguments and errors are those of ``train_sync``.

        Returns:
            A record for each update of this call, in the order in which the updates were applied.
        """
        return await self._train("async", master_epochs, worker_epochs, batch_size, seed, fresh=fresh)

    async def train_downpour(self, *, fresh: bool = False) -> History:
        """Train with Downpour SGD and the attributes of the app.

        Returns:
            A record for each round of a slot, in the order in which the rounds ended.
        """
        return await self._train("downpour", None, None, None, None, fresh=fresh)

    async def _train(self, mode: str, *arguments: int | None, fresh: bool) -> History:
        from ddlf.monitor.runs.recording import recorded
        from ddlf.training.start import train

        await self.run_context.check_written()
        try:
            with shown(self), recorded(self):
                return await train(self, mode, *arguments, fresh=fresh)
        except RemoteError as error:  # it has the worker's traceback; the master's frames would not help
            raise error.with_traceback(None) from error.__cause__

    def stop_training(self) -> bool:
        """End training after the current round, as if it had converged. Asynchronous training ends after the next
        update.

        Returns:
            Whether there is a round to end. Before the first round and after the last one there is none.
        """
        if self.run_context.stop is None:
            return False
        self.run_context.stop = True
        return True

    async def _check(self) -> None:
        """Raise an error for wrong settings, methods and folders before anything starts."""
        from ddlf.training.start import check

        await self.run_context.check_written()
        check(self, self.mode)

    async def _check_written(self) -> None:
        """Raise an error for an app that lacks a method or an optional part of DDLF. Optional parts check it, too."""
        from ddlf.extras import check_settings, hooks

        check_settings(self, DEFAULTS)
        if type(self).load_dataset is IApp.load_dataset:
            await self.load_dataset()
        if type(self).create_model is IApp.create_model and self.notation is None:
            await self.create_model()
        for check in hooks("check_app"):
            await check(self)

    async def prepare(self, seed: int | None = None) -> int:
        """Connect all nodes, build the model and load the data on each, and check that all nodes have the same.

        Args:
            seed: Seed of the initial weights, if the model is created here. The default is the attribute ``seed``.

        Returns:
            The number of training samples.
        """
        from ddlf.training.crew.opening import prepare

        await self.run_context.check_written()
        with shown(self):
            return await prepare(self, seed)

    async def advise(self, level: str = "batch") -> AdviceReport:
        """Look for likely mistakes in this app, without changing it.

        Args:
            level: ``"quick"`` checks settings, arrays and the model. ``"batch"`` also trains a copy of the model on
                some batches. ``"cluster"`` also loads the data in a new process and checks the labels.

        Returns:
            The report. Its ``advice`` has the findings, the most serious first.

        Raises:
            ConfigError: There is no such level, or the adviser is not installed.
        """
        from ddlf.extras import hooks

        await self.run_context.check_written()
        for advise in hooks("advise"):
            report: AdviceReport = await advise(self, level)
            return report
        raise ConfigError("the adviser is not installed", hint="install DDLF with all parts of ddlf.extras")

    async def plan(self, budget_s: float | str | None = None) -> TrainingPlan:
        """Measure short rounds of this app on its workers, and predict how long training takes with other settings.

        The app does not change: a copy of it is trained.

        Args:
            budget_s: Time for all measurements, with the start of Keras on the workers: seconds, or a text such as
                ``"2m"``. None is a minute, or up to four if the machines are slow or busy.

        Returns:
            The plan. Its text has the lines that ``ddlf plan`` prints. Its ``best`` and ``now`` have the predictions for
            the best settings and for the settings of the app.

        Raises:
            ConfigError: A setting cannot be planned, the time is not above 0, or the planner is not installed.
        """
        from ddlf.extras import hooks

        for plan in hooks("plan"):
            result: TrainingPlan = await plan(self, budget_s)
            return result
        raise ConfigError("the planner is not installed", hint="install DDLF with all parts of ddlf.extras")

    # -- after training ---------------------------------------------------------------------------------------------

    async def evaluate_model(self) -> dict[str, float]:
        """Evaluate ``model`` on the test data, on the master. Return Keras's metrics by name, including ``"loss"``."""
        from ddlf.training.evaluation.master import evaluated

        with shown(self):
            return await evaluated(self)

    async def save_model(self, path: str | Path) -> None:
        """Save the model in Keras's format. The file is complete, or it does not exist.

        Args:
            path: The file. Its name ends with ``.keras``.
        """
        from ddlf.training.evaluation.master import save

        with shown(self):
            await save(self, path)

    async def load_model(self, path: str | Path) -> None:
        """Load the weights of a saved model, or the whole model if the app has none.

        Files that contain code are refused.

        Args:
            path: A ``.keras`` file.
        """
        from ddlf.training.evaluation.master import load

        with shown(self):
            await load(self, path)

    def __getstate__(self) -> dict[str, Any]:
        from ddlf.training.context import travels

        return travels(self)
