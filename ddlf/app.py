"""``IApp``: what a user subclasses to train a Keras model on a cluster.

The same object lives on both sides. On the master it leads: it holds the cluster and starts training. A copy of it, without
data and model, goes to every worker, where ``load_dataset``, ``create_model`` and ``train`` run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddlf.errors import AppError, ConfigError, RemoteError
from ddlf.events import Event
from ddlf.events.history import History
from ddlf.events.record import RoundRecord, TrainingEvent, put
from ddlf.events.sinks import Sink
from ddlf.monitor.terminal.lines import line_without_hook, training_event
from ddlf.monitor.ui import shown
from ddlf.training.context import RunContext
from ddlf.training.registry import DEFAULTS, GROUPS, SETTINGS, View, group_of, spread
from ddlf.training.roles import PRELOADED
from ddlf.training.spec import Data, Evaluation, Local, Output
from ddlf.training.weights_ref import local

if TYPE_CHECKING:
    import numpy as np

    from ddlf.cluster.cluster import Cluster
    from ddlf.extras import AdviceReport
    from ddlf.training.samples.ledger import Ledger
    from ddlf.training.slot.replica import Replica
    from ddlf.worker.worker import Worker


class IApp:
    """Subclass it, write ``load_dataset`` and ``create_model``, and train.

    Class attributes are the defaults of a run. Attributes of the object win over them, arguments and command-line flags over both. There are two
    ways to set them: groups, such as ``mode = ddlf.Downpour(replicas=16)`` and ``data = ddlf.Data(batch_size=64)``, or each setting by its name,
    such as ``batch_size = 64``. The groups are in ``ddlf.training.spec``; ``ddlf config show`` lists all settings.

    Args:
        cluster: The workers. By default those of ``$DDLF_CONFIG`` or ``./cluster.yaml``, else two new ones on this machine.

    Attributes:
        mode: How it trains: ``ddlf.Sync``, ``Async`` or ``Downpour``, or the name of one; ``train = ddlf.Sync(...)`` in the class sets it, too.
        exchange: How updates and weights travel: ``ddlf.Star``, ``Sharded``, ``Auto`` or ``Gradient``, or the name of one.
        checkpoint: ``ddlf.Checkpoint``, or the folder alone.
        data: ``ddlf.Data``: batches, and which samples each slot has.
        local: ``ddlf.Local``: training between two exchanges.
        evaluation: ``ddlf.Evaluation``: tests, and when training can stop.
        output: ``ddlf.Output``: what is shown, and the folder of the run.
        history: The records of all rounds so far, of every training since the last fresh one; ``history.history`` is a dict of lists, as Keras's.
        optimizers: The state of each slot's optimizer after them, as lists of arrays in Keras's order; None for a slot that never trained,
            and with ``optimizer_state="fresh"``.
        ledger: How often each sample was trained on in them: what ``replica.fit`` was given; what an own ``train`` feeds without it counts as its
            whole partition.

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

    notation: Any = None  # a text in the place of create_model: its file, or what load_notation gives

    x_train: Any
    y_train: Any
    x_test: Any
    y_test: Any
    indices: np.ndarray[Any, Any]
    worker: Worker
    replica: Replica
    ledger: Ledger

    def __init__(self, cluster: Cluster | None = None) -> None:
        self.cluster = cluster
        self.history: History = History()

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        groups = [name for name, value in vars(cls).items() if group_of(name, value) is not None]
        given = spread(vars(cls), cls.__name__) if groups else {}
        for name in groups:
            delattr(cls, name)
        for name, value in given.items():
            if name in SETTINGS and vars(cls).get(name) is not value:
                setattr(cls, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in GROUPS or group_of(name, value) is None:
            super().__setattr__(name, value)
        else:
            vars(self).update(spread({name: value}))

    def __getattr__(self, name: str) -> Any:
        if name in SETTINGS:  # which nothing has set
            return SETTINGS[name].default
        return object.__getattribute__(self, name)  # raises what a property raised, too

    @property
    def optimizers(self) -> list[Any]:
        """The state of each slot's optimizer; see the class."""
        return [] if self.run_context.progress is None else self.run_context.progress.optimizers

    @property
    def model(self) -> Any:
        """The Keras model that ``create_model`` set. While training goes on it has the weights after the last round that was reported."""
        model = vars(self).get("model")
        if model is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute 'model'", name="model", obj=self)
        if self.run_context.weights is not None:  # a run that does not look pays nothing
            weights, self.run_context.weights = self.run_context.weights, None
            model.set_weights(local(weights))
        return model

    @model.setter
    def model(self, model: Any) -> None:
        vars(self)["model"] = model

    @model.deleter
    def model(self) -> None:
        if vars(self).pop("model", None) is None:
            raise AttributeError("model", name="model", obj=self)

    # -- what a user writes -----------------------------------------------------------------------------------------

    async def load_dataset(self) -> None:
        """Set ``x_train``, ``y_train`` and, if wanted, others. Runs on the master and on every worker; must be written.

        ``train_data``, ``val_data``, ``test_data`` are the same as partition files (``ddlf.data.open``), a ``PyDataset``, a ``tf.data`` pipeline or
        ``ddlf.data.generated``.
        ``x_val``, ``y_val`` are evaluated after each round, as ``fit`` does with ``validation_data``; ``x_test``, ``y_test`` at the end. ``w_train``,
        ``w_val``, ``w_test`` weigh samples. Models that need no labels need no ``y_``.

        What else it sets is there for ``create_model`` and ``train`` of the same node. It never travels; what ``__init__`` sets does.

        Arrays, or lists, tuples or dicts of arrays for a model of several inputs. All nodes must get equal training data.
        """
        how = "write one that sets self.x_train and self.y_train"
        raise AppError(f"{type(self).__name__} has no load_dataset", hint=how)

    async def create_model(self) -> None:
        """Set ``model`` to a compiled Keras model; by default to ``notation``. Runs on every node, after ``load_dataset``, so it may use the data."""
        if self.notation is None:
            how = "write one that sets self.model to a compiled Keras model, or name a text: notation = 'model.nnm'"
            raise AppError(f"{type(self).__name__} has no create_model", hint=how)
        self.model = self.notation

    # -- what a user may override -----------------------------------------------------------------------------------

    def train(self, weights: list[Any], worker_epochs: int, batch_size: int) -> Any:
        """What a worker does in a round. Runs on the worker, on the thread that Keras lives on; may be async.

        ``self.indices`` holds the partition: the samples of this round, in their order.

        Args:
            weights: The global weights, one array for each of ``model.weights``.
            worker_epochs: Local epochs in this round.
            batch_size: Samples in a batch.

        Returns:
            The update, weights before minus weights after, one array each; or a tuple of it and a dict of metrics.
        """
        from ddlf.algorithms.weights import difference

        self.model.set_weights(weights)
        metrics = self.replica.fit(worker_epochs, batch_size, list(self.worker_callbacks))
        return difference(weights, self.model.get_weights(), over=True), metrics

    def is_convergent(self, record: RoundRecord) -> Any:
        """Whether training can stop. Called on the master after ``on_round``, with the same to look at. May be async."""
        return False

    def on_round(self, record: RoundRecord) -> Any:
        """Called on the master after every round (every update in asynchronous training); prints its line. May be async.

        ``model`` has the weights after this round, so ``evaluate_model`` and ``save_model`` are of these; ``history`` ends with
        its record; ``ledger`` and ``optimizers`` are those of now. When this round's weights are tested (``evaluate_every``), it is called when
        the test is over, while the workers compute the next one.
        """
        if self.run_context.display is None or self.run_context.display.is_due(record):
            self.say(str(record))

    def on_event(self, event: TrainingEvent) -> Any:
        """Called on the master when something happens to a slot or a worker; prints a line for what is out of the ordinary. May be async.

        ``model`` and ``history`` are those of the last round that was reported. An error here ends the run; who only looks on takes ``subscribe``.
        """
        if event.kind not in ("start", "finish"):
            self.say(f"{event.kind:<9} {event.text}")

    def say(self, text: str) -> None:
        """Print a line, if ``verbose``."""
        if self.verbose and (self.run_context.display is None or self.run_context.display.prints):
            put(text)

    def subscribe(self, sink: Sink) -> Callable[[], None]:
        """Have ``sink(event)`` called on the master for all that happens, with the events of ``ddlf.events``; as many as you like.

        It is to return at once, for training waits for it. One that raises is told no more, and its traceback is logged; the run goes on.

        Returns:
            Takes the sink off.
        """
        return self.run_context.events.subscribe(sink)

    @cached_property
    def run_context(self) -> RunContext:
        """What the runs of this app share on this node, for those who extend DDLF."""
        return RunContext(emit=self._emit, hook=self._hook, check=self._check, check_written=self._check_written)

    def _emit(self, event: Event) -> None:
        """Send it to all subscribers, and print what no hook prints: behind a record that the display has held back."""
        self.run_context.events.emit(event)
        if self.verbose and (text := line_without_hook(event)):
            self.say(text)

    def _hook(self, event: Event) -> Any:
        """Give an event to ``on_event``, if it is one of those."""
        if not self.verbose and getattr(self.on_event, "__func__", None) is IApp.on_event:
            return None  # it would only print
        return None if (told := training_event(event)) is None else self.on_event(told)

    # -- life -------------------------------------------------------------------------------------------------------

    async def connect(self) -> None:
        """Connect to the workers. Safe to call again."""
        from ddlf.cluster.cluster import default_cluster

        self.cluster = self.cluster or default_cluster()
        self.cluster.echo = self.cluster.echo and self.echo
        with shown(self, self.cluster):
            await self.cluster.connect(modules=PRELOADED)

    async def close(self) -> None:
        """Leave the workers; they keep their data for the next run. Safe to call again."""
        if self.cluster is not None:
            await self.cluster.close()

    async def shutdown(self) -> None:
        """End the workers' processes."""
        if self.cluster is not None:
            await self.cluster.shutdown()

    async def __aenter__(self) -> IApp:
        await self.connect()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # -- training ---------------------------------------------------------------------------------------------------

    async def train_model(self, *, fresh: bool = False) -> History:
        """Train as the attributes say, ``mode`` among them; see ``train_sync``."""
        SETTINGS["mode"].check("mode", self.mode)
        strategy = partial(self._train, self.mode, None, None, None, None)  # of another package
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
        """Train synchronously: in each round every worker trains on its part, then the updates are merged.

        Called again, it goes on where the last training of this app ended, as ``fit`` does: with the model's weights of now, the optimizers' states
        and the numbers of the rounds, from which partitions and everything random follow. Settings and mode may be others each time.

        Args:
            master_epochs: Local epochs to train now; with ``resume`` set, of the whole training. By default, as for the others, the attribute
                of the same name.
            worker_epochs: Local epochs in a round.
            batch_size: Samples in a batch of each worker.
            seed: Seed of everything random.
            fresh: Whether to begin anew, from the model's weights.

        Returns:
            A record for each round of this call; ``history`` has all. ``model`` has the final weights.

        Raises:
            CheckpointMismatch: Data, model, optimizer, precision or number of slots are others than before.
            DatasetMismatch: Two nodes hold different training data; nothing was trained.
            AppError: The app lacks something.
            RemoteError: The app raised on a worker.
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
        """Train asynchronously: each worker's update is merged when it comes, and nobody waits. Otherwise as ``train_sync``.

        Returns:
            A record for each update of this call, in the order in which they were applied.
        """
        return await self._train("async", master_epochs, worker_epochs, batch_size, seed, fresh=fresh)

    async def train_downpour(self, *, fresh: bool = False) -> History:
        """Train by Downpour SGD, as the attributes say; returns a record for each round of a slot, in the order in which they ended."""
        return await self._train("downpour", None, None, None, None, fresh=fresh)

    async def _train(self, mode: str, *given: int | None, fresh: bool) -> History:
        from ddlf.monitor.runs.recording import recorded
        from ddlf.training.start import train

        await self.run_context.check_written()
        try:
            with shown(self), recorded(self):
                return await train(self, mode, *given, fresh=fresh)
        except RemoteError as error:  # it has the worker's lines; where its answer was received says nothing
            raise error.with_traceback(None) from error.__cause__

    def stop_training(self) -> bool:
        """End training after the round that goes on (in asynchronous training the next update), as if it had converged.

        Returns:
            Whether there is one: before the first round and after the last there is nothing to end.
        """
        if self.run_context.stop is None:
            return False
        self.run_context.stop = True
        return True

    async def _check(self) -> None:
        """Refuse what can be seen to be wrong before anything is started."""
        from ddlf.training.start import check

        await self.run_context.check_written()
        check(self, self.mode)

    async def _check_written(self) -> None:
        """Refuse an app that lacks a method or needs an optional part that is not installed, and have those parts check it."""
        from ddlf.extras import check_settings, hooks

        check_settings(self, DEFAULTS)
        if type(self).load_dataset is IApp.load_dataset:
            await self.load_dataset()
        if type(self).create_model is IApp.create_model and self.notation is None:
            await self.create_model()
        for check in hooks("check_app"):
            await check(self)

    async def prepare(self, seed: int | None = None) -> int:
        """Bring every node to where training can begin: connected, model built, data loaded and the same everywhere.

        Args:
            seed: Seed of the initial weights, when the model is made here; by default the attribute.

        Returns:
            The number of training samples.
        """
        from ddlf.training.crew.opening import prepare

        await self.run_context.check_written()
        with shown(self):
            return await prepare(self, seed)

    async def advise(self, level: str = "batch") -> AdviceReport:
        """Look for likely mistakes in this app, without changing it. The report's ``advice`` has the findings, the worst first.

        Args:
            level: ``"quick"`` looks at settings, arrays and the model; ``"batch"`` also trains a copy on some batches; ``"cluster"`` also loads
                the data in a fresh process and checks the labels.

        Raises:
            ConfigError: There is no such level, or the adviser is not installed.
        """
        from ddlf.extras import hooks

        await self.run_context.check_written()
        for advise in hooks("advise"):
            report: AdviceReport = await advise(self, level)
            return report
        raise ConfigError("the adviser is not installed", hint="install DDLF with all parts of ddlf.extras")

    # -- after training ---------------------------------------------------------------------------------------------

    async def evaluate_model(self) -> dict[str, float]:
        """Evaluate ``model`` on the test data, on the master; returns Keras's metrics by name, ``"loss"`` among them."""
        from ddlf.training.evaluation.master import evaluated

        with shown(self):
            return await evaluated(self)

    async def save_model(self, path: str | Path) -> None:
        """Save the model in Keras's format; the file is complete or not there.

        Args:
            path: Ends with ``.keras``.
        """
        from ddlf.training.evaluation.master import save

        with shown(self):
            await save(self, path)

    async def load_model(self, path: str | Path) -> None:
        """Take the weights of a saved model, or the whole model when there is none yet. Files that carry code are refused.

        Args:
            path: A ``.keras`` file.
        """
        from ddlf.training.evaluation.master import load

        with shown(self):
            await load(self, path)

    def __getstate__(self) -> dict[str, Any]:
        from ddlf.training.context import travels

        return travels(self)
