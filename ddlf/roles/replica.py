"""A Keras model behind a few verbs. Runs in the executor of a worker; the functions below are the methods that a training master runs there.

Keras lives on the worker's one compute thread: imported, built and trained there, while the event loop goes on taking weights and indices.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ddlf.algorithms.weights import is_float
from ddlf.data.held import HeldData
from ddlf.data.parts import batches, check_data, content, contents, rows_of
from ddlf.data.trees import first_array, tree_map
from ddlf.errors import AppError, AppMissing
from ddlf.roles.callbacks import look_at_batches
from ddlf.roles.describe import describe_optimizer
from ddlf.roles.exchange import read_weights, send_update
from ddlf.roles.feed import Feed, make_feed
from ddlf.roles.keras_model import fresh_names, is_built, ready_model
from ddlf.roles.metrics import NOTHING_COUNTED, counted_names, read_state, scalars
from ddlf.roles.optimizer_state import no_final_averages, read_optimizer, write_optimizer
from ddlf.roles.precision import gain_of_bfloat16, set_precision
from ddlf.roles.randomness import keeps_a_seed, reseed
from ddlf.roles.task import HELD, OPTIMIZER, RESIDUAL, KeptStates, Reply, SlotState, Task
from ddlf.worker.methods import concurrent

if TYPE_CHECKING:
    from ddlf.worker.worker import Worker

log = logging.getLogger(__name__)

Weights = list[np.ndarray[Any, Any]]


class App(Protocol):
    """What a replica needs of an app; ``ddlf.IApp`` has it."""

    precision: str
    callbacks: Any
    model: Any
    x_train: Any
    y_train: Any
    indices: np.ndarray[Any, Any]
    worker: Any
    replica: Any

    def load_dataset(self) -> Any:
        """Set ``x_train`` and ``y_train``; plain or async."""

    def create_model(self) -> Any:
        """Set ``model``; plain or async."""

    def train(self, weights: list[Any], worker_epochs: int, batch_size: int) -> Any:
        """Return the update, or a tuple of it and metrics; plain or async."""


class Replica:
    """One worker's copy of an app and its model.

    Args:
        app: As it came from the master, without data and model.
        run: Names the training run; a task of another one is refused.

    Attributes:
        stopping: Set when training is to end at the next batch.
    """

    def __init__(self, app: App, run: str) -> None:
        self.app = app
        self.run = run
        self.stopping = False
        self._found: dict[str, str] = {}
        self._held = HeldData()
        self._feed: tuple[int, Feed] | None = None
        self._task: Task
        self._fed: list[np.ndarray[Any, Any]] = []  # of each epoch of this round what it was given
        self._kept = KeptStates()
        self._like: list[np.ndarray[Any, Any]] = []
        self._lossless: list[bool] = []
        self._fresh: Weights = []
        self._in_model: int | None = None
        self._steps = 1
        self._told: dict[str, float] = {}
        self._names: list[str | None] | None = None
        self._step: Any = None
        self._step_keeps_a_seed = False

    # -- verbs; all on the compute thread ---------------------------------------------------------------------------

    def begin(self) -> None:
        """Import Keras and set what has to be set before anything is made with it."""
        set_precision(self.app.precision)

    def build(self) -> dict[str, Any]:
        """Create the model and say what it is."""
        import keras

        with fresh_names():
            call(self.app.create_model)
        model = ready_model(self.app)
        self._steps = model.steps_per_execution
        trained = {id(weight) for weight in model.trainable_weights}
        self._lossless = [id(weight) not in trained for weight in model.weights]
        self._like = model.get_weights()
        if model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        self._fresh = read_optimizer(model)
        return {
            "weights": describe_weights(model),
            "optimizer": describe_optimizer(model.optimizer),
            "keras": keras.__version__,
            "backend": keras.backend.backend(),
            "gain": gain_of_bfloat16() if self.app.precision == "auto" and self.app.worker.id == 1 else 0.0,
        }

    def load(self, wanted: dict[str, str], held: HeldData) -> dict[str, Any]:
        """Give the app its data by its own ``load_dataset``; arrays that are here already are kept once.

        Args:
            wanted: If nothing but arrays is to be set: the fingerprint of each. When all of them are here, nothing is loaded.
            held: What is here; it gets what is not.

        Returns:
            What the training data is, and whether it was loaded.
        """
        begin = time.perf_counter()
        app, found = self.app, wanted
        here = bool(wanted) and all(content in held for content in wanted.values())
        if not here:
            held.make_room()
            call(app.load_dataset)
            check_data(app)
            found = contents(app)
        for name, one in found.items():
            if one not in held:
                held[one] = tree_map(unchanging, getattr(app, name))
            setattr(app, name, held[one])
        held.use(found.values())
        self._found, self._held = found, held
        return {
            "fingerprint": content(found),
            **rows_of(app),
            "loaded": not here,
            "seconds": time.perf_counter() - begin,
        }

    def train(self, task: Task) -> Reply:
        """Carry one slot through one round.

        Args:
            task: With its weights as they came.

        Returns:
            The reply, with the update as it is to travel.

        Raises:
            AppMissing: The slot's last round did not leave its state here.
        """
        begin = time.perf_counter()
        self.stopping = False
        self._task, self._told, self._fed = task, {}, []
        state = self._kept.begin(task)
        self._set_optimizer(task, state.get(OPTIMIZER))
        self.app.indices = task.indices
        self._reseed(task)
        weights = read_weights(task.weights, state.get(HELD), self._like)
        update, metrics = run_train(self.app, weights, task.epochs, task.batch_size)
        encoded, residual, error = send_update(task.codec, update, self._lossless, state.get(RESIDUAL))
        left: SlotState = {RESIDUAL: residual, HELD: weights}
        if OPTIMIZER in task.keep:
            left[OPTIMIZER] = read_optimizer(self.app.model)
            self._in_model = task.slot
        self._kept.leave(task, left)
        return Reply(
            task=task,
            update=encoded,
            codec_error=error,
            samples=len(task.indices),
            fed=self._otherwise_fed(task),
            metrics=metrics,
            counted=self._counted(metrics),
            compute_s=time.perf_counter() - begin,
            stopped=self.stopping,
            state={name: left[name] for name in task.back},
        )

    def left(self, slot: int, number: int) -> SlotState:
        """What a round of a slot left here, from 0; any thread may ask."""
        return self._kept.left(slot, number)

    def _counted(self, metrics: dict[str, float]) -> dict[str, Any]:
        """What the metrics were computed from, as far as they are those that ``fit`` has told."""
        if not self._told:
            return NOTHING_COUNTED
        if self._names is None:
            self._names = counted_names(self.app.model, self._told)
        names = [name if name and metrics.get(name) == self._told.get(name) else None for name in self._names]
        return read_state(self.app.model, names)

    def _reseed(self, task: Task) -> None:
        """Set everything random from the slot's seed; a step that keeps the seed that it was compiled with is compiled again."""
        model = self.app.model
        reseed(model, (task.seed, task.round, task.slot))
        if self._step is not model.train_function:
            self._step, self._step_keeps_a_seed = model.train_function, keeps_a_seed(model)
        if self._step_keeps_a_seed:
            model.train_function = None

    def _chosen(self, indices: Any) -> np.ndarray[Any, Any]:
        """What an own ``train`` has set as ``self.indices``.

        Raises:
            AppError: It is no list of numbers of samples.
        """
        found, n = np.asarray(indices), len(first_array(self.app.x_train))
        if found.ndim != 1 or found.dtype.kind not in "iu" or not found.size:
            raise AppError(
                f"self.indices must be numbers of samples, got {found.dtype} of shape {found.shape}",
                hint="choose from the indices that are there when train is called",
            )
        if found.min() < 0 or found.max() >= n:
            outside = found.max() if found.max() >= n else found.min()
            raise AppError(
                f"self.indices has sample {outside}, but there are {n:,} samples, counted from 0",
                hint="choose from the indices that are there when train is called",
            )
        return found

    def _otherwise_fed(self, task: Task) -> np.ndarray[Any, Any] | None:
        """Which samples ``fit`` was given in this round, once for each epoch; None if it was the partition in each, or ``fit`` did not run."""
        as_given = len(self._fed) == task.epochs and all(indices is task.indices for indices in self._fed)
        if as_given or not self._fed:
            return None
        return np.concatenate([np.asarray(indices, np.int64).reshape(-1) for indices in self._fed])

    def _set_optimizer(self, task: Task, state: Weights | None) -> None:
        """Let the optimizer go on from where the slot's last round left it, wherever that was."""
        in_model, self._in_model = self._in_model, None  # until this round is over nothing is known of it
        if task.state is None and in_model == task.slot:
            return
        write_optimizer(self.app.model, self._fresh if state is None else state)

    # -- what the default ``IApp.train`` is made of -----------------------------------------------------------------

    def fit(self, epochs: int, batch_size: int, callbacks: Iterable[Any] = ()) -> dict[str, float]:
        """Run ``Model.fit`` over this round's partition, with the weights of its samples or classes if there are any.

        The first local epoch goes through it in the order that came, each later one in an own order made from the task's seed. Epochs are counted
        over the whole run, so that a ``LearningRateScheduler`` does what it would do in one ``fit``.

        Returns:
            Keras's metrics of the last epoch.
        """
        import keras

        replica, indices, model = self, self.app.indices, self.app.model
        if indices is not self._task.indices:
            indices = self.app.indices = self._chosen(indices)
        callbacks = list(callbacks)
        feed = self._feed_of(batch_size)
        first = self._task.first_epoch

        class Round(keras.callbacks.Callback):  # type: ignore[misc]
            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                replica._fed.append(indices)
                feed.set_order(replica.order(indices, epoch - first))

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                if replica.stopping:
                    self.model.stop_training = True

        feed.set_order(indices)  # Keras looks at the data before the first epoch begins
        use_fast_steps(model, callbacks, self._steps)
        with no_final_averages(model):
            history = model.fit(
                feed.dataset,
                epochs=first + epochs,
                initial_epoch=first,
                verbose=0,
                shuffle=False,
                callbacks=[Round(), *callbacks],
            ).history
        self._told = scalars({name: values[-1] for name, values in history.items()})
        return dict(self._told)

    def _feed_of(self, batch_size: int) -> Feed:
        """The feed of the training data; it is kept from round to round."""
        if self._feed is None or self._feed[0] != batch_size:
            feed = make_feed(batches(self.app, "train"), batch_size)
            # TensorFlow copies arrays into tensors; what is kept are views of these, so that the data is here once.
            for name, data in zip(("x_train", "y_train"), feed.data, strict=False):
                one = self._found.get(name, "")
                if getattr(self.app, name) is self._held.get(one):  # and not what create_model made of it
                    self._held[one] = data
                    setattr(self.app, name, data)
            self._feed = batch_size, feed
        return self._feed[1]

    def order(self, indices: np.ndarray[Any, Any], epoch: int) -> np.ndarray[Any, Any]:
        """The order of one local epoch, the same whichever worker carries the slot."""
        if epoch == 0:
            return indices
        task = self._task
        seed = np.random.SeedSequence([task.seed, task.round, task.slot, epoch])
        return np.random.Generator(np.random.PCG64(seed)).permutation(indices)

    @property
    def round(self) -> int:
        """Which round this is, from 1."""
        return self._task.round + 1


STEPS_PER_EXECUTION = 16
"""Batches in one call of the compiled step, when nothing watches single batches: ``docs/LAB.md`` has the figures."""


def use_fast_steps(model: Any, callbacks: Iterable[Any], chosen: int) -> None:
    """Let one call of the compiled function take several batches, unless the user chose a number or a callback may look at batches.

    Only with TensorFlow: there a short last group of batches is handled, and the weights are the same bits.

    Args:
        model: To be trained next.
        callbacks: Of this ``fit``.
        chosen: What the user compiled the model with.
    """
    import keras

    fast = keras.backend.backend() == "tensorflow" and chosen == 1 and not look_at_batches(callbacks)
    steps = STEPS_PER_EXECUTION if fast else chosen
    if model.steps_per_execution != steps:
        model.steps_per_execution = steps
        model.train_function = model.test_function = model.predict_function = None  # made for the other number


def call(function: Any, *args: Any) -> Any:
    """Call a method of the user's app, plain or async, on this thread."""
    result = function(*args)
    if inspect.iscoroutine(result):
        return asyncio.run(result)
    return result


def run_train(app: App, weights: Weights, epochs: int, batch_size: int) -> tuple[Weights, dict[str, float]]:
    """Call the app's ``train``, and check what it returns.

    Returns:
        The update, and the metrics.

    Raises:
        AppError: It returned something else.
    """
    outcome = call(app.train, weights, epochs, batch_size)
    with_metrics = isinstance(outcome, tuple) and len(outcome) == 2 and not isinstance(outcome[1], np.ndarray)
    update, metrics = outcome if with_metrics else (outcome, {})
    try:
        if not isinstance(update, list | tuple):
            raise TypeError
        arrays = [np.asarray(array) for array in update]
    except (TypeError, ValueError):
        raise AppError(
            f"train returned a {type(outcome).__name__}" + (f" with a {type(update).__name__} first" * with_metrics),
            hint="return the update, weights before minus weights after, as a list of arrays; or (update, metrics)",
        ) from None
    told = scalars(metrics)
    for place, weight in enumerate(weights if len(arrays) == len(weights) else ()):
        if arrays[place].shape != weight.shape:
            raise AppError(
                f"{type(app).__name__}.train returned an array of shape {arrays[place].shape} for weight {place + 1} of shape {weight.shape}",
                hint="return weights before minus weights after, in the order of model.weights",
            )
    if len(arrays) != len(weights):
        raise AppError(
            f"{type(app).__name__}.train returned {len(arrays)} arrays for {len(weights)} weights",
            hint="return weights before minus weights after, one array for each of model.weights",
        )
    # NumPy makes float64 of much; what the weight cannot hold the update cannot bring.
    pairs = zip(arrays, weights, strict=True)
    return [a.astype(w.dtype) if is_float(a) and is_float(w) else a for a, w in pairs], told


def describe_weights(model: Any) -> list[list[Any]]:
    """Path, shape and type of each of ``model.weights``, to compare nodes by."""
    if not is_built(model):
        raise AppError(
            f"the model {model.name!r} is not built", hint="begin it with keras.Input(...), or call it on some samples"
        )
    return [[weight.path, list(weight.shape), str(weight.dtype)] for weight in model.weights]


# -- methods that the master runs on a worker -----------------------------------------------------------------------


@concurrent
def take_app(self: Worker, app: App, run: str) -> None:
    """Take an app; answered at once, so that the master knows that it came before it begins to load its own data.

    Args:
        self: The worker.
        app: As it came.
        run: Names the training run.
    """
    app.worker = self
    self.replica = app.replica = Replica(app, run)  # type: ignore[attr-defined]


async def open_app(self: Worker, run: str, wanted: dict[str, str] | None = None) -> dict[str, Any] | None:
    """Give the app its data, then build its model, in the order of the master: ``create_model`` may use the data.

    Args:
        self: The worker.
        run: Names the training run.
        wanted: As ``Replica.load`` takes it; None when the master does not know it yet.

    Returns:
        What there is now; None when this worker holds data of earlier runs and has to know first which is wanted.

    Raises:
        AppMissing: ``take_app`` did not come before.
    """
    replica = replica_of(self, run)
    await self.compute(replica.begin)
    if wanted is None and self.datasets:
        return None
    data: dict[str, Any] = await self.compute(replica.load, wanted or {}, self.datasets)
    model: dict[str, Any] = await self.compute(replica.build)
    return data | model


def replica_of(worker: Worker, run: str) -> Replica:
    """The replica of a run.

    Raises:
        AppMissing: This worker has none, or that of another run.
    """
    replica: Replica | None = getattr(worker, "replica", None)
    if replica is None or replica.run != run:
        raise AppMissing("it holds no app of this run")
    return replica


async def train_slot(self: Worker, run: str, task: dict[str, Any]) -> dict[str, Any]:
    """Carry one slot through one round."""
    replica = replica_of(self, run)
    computing = asyncio.ensure_future(self.compute(replica.train, Task.from_message(task)))
    try:
        reply: Reply = await asyncio.shield(computing)
    except asyncio.CancelledError:
        replica.stopping = True
        await asyncio.wait([computing])
        raise
    return reply.to_message()


@concurrent
def give_state(self: Worker, run: str, slot: int, number: int, groups: tuple[str, ...]) -> SlotState:
    """Groups of what a round of a slot left here, from 0; also while another slot is trained.

    Raises:
        AppMissing: It is not here, or not any more.
    """
    left = replica_of(self, run).left(slot, number)
    return {name: left[name] for name in groups if name in left}


@concurrent
def stop_training(self: Worker) -> None:
    """STOP: end local training at the next batch."""
    replica = getattr(self, "replica", None)
    if replica is not None:
        replica.stopping = True


def unchanging(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same memory as an array that cannot be written to: it is found by its content later."""
    view = array.view()
    view.flags.writeable = False
    return view
