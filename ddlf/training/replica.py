"""A Keras model behind a few verbs. Runs in the executor of a worker; the functions below are the methods that a training master runs there.

Keras lives on the worker's one compute thread: imported, built and trained there, while the event loop goes on taking weights and indices.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import logging
import time
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ddlf.errors import AppError, AppMissing
from ddlf.training.exchange import WorkerEnd
from ddlf.training.feed import Feed, first_array, make_feed
from ddlf.training.precision import gain_of_bfloat16, set_precision
from ddlf.worker.datasets import fingerprint
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
        attributes: What ``load_dataset`` set on the app; the worker keeps it for later runs.
    """

    def __init__(self, app: App, run: str) -> None:
        self.app = app
        self.run = run
        self.stopping = False
        self.attributes: dict[str, Any] = {}
        self._feed: tuple[int, Feed] | None = None
        self._task: dict[str, Any] = {}
        self._exchange = WorkerEnd()
        self._like: list[np.ndarray[Any, Any]] = []
        self._lossless: list[bool] = []
        self._fresh: Weights = []
        self._optimizers: dict[
            int, tuple[int, Weights]
        ] = {}  # slot -> the round after which its optimizer was like this
        self._in_model: int | None = None

    # -- verbs; all on the compute thread ---------------------------------------------------------------------------

    def begin(self) -> None:
        """Import Keras and set what has to be set before anything is made with it."""
        set_precision(self.app.precision)

    def build(self) -> dict[str, Any]:
        """Create the model and say what it is."""
        import keras

        call(self.app.create_model)
        model = getattr(self.app, "model", None)
        if model is None:
            raise AppError(
                "create_model set no self.model", hint="end it with self.model = ... and self.model.compile(...)"
            )
        if not hasattr(model, "get_weights"):
            raise AppError(f"create_model set self.model to a {type(model).__name__}, which is no Keras model")
        if not model.compiled:
            raise AppError(
                f"the model {model.name!r} is not compiled",
                hint="end create_model with self.model.compile(optimizer, loss)",
            )
        use_fast_steps(model, self.app)
        trained = {id(weight) for weight in model.trainable_weights}
        self._lossless = [id(weight) not in trained for weight in model.weights]
        self._like = model.get_weights()
        if model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        self._fresh = read_optimizer(model)
        return {
            "weights": describe_weights(model),
            "keras": keras.__version__,
            "backend": keras.backend.backend(),
            "gain": gain_of_bfloat16() if self.app.precision == "auto" and self.app.worker.id == 1 else 0.0,
        }

    def load(self) -> None:
        """Run the app's ``load_dataset``."""
        before = dict(vars(self.app))
        call(self.app.load_dataset)
        self.attributes = {name: v for name, v in vars(self.app).items() if before.get(name, before) is not v}

    def train(self, task: dict[str, Any]) -> dict[str, Any]:
        """Carry one slot through one round.

        Args:
            task: ``slot``, ``round``, ``seed``, ``epochs``, ``batch_size``; ``indices`` of shape (n_j,); ``weights`` as
                ``WeightsOut`` encodes them, ``codec`` for the update; ``optimizer``, the state to begin with: ``"held"`` (what the slot's
                last round left here), ``"fresh"``, or its arrays; ``lost``, what the codec has lost so far, if it comes from elsewhere.

        Returns:
            ``update`` (weights before minus after, encoded), its relative ``error``, ``optimizer``, ``samples``, ``digest`` of the indices,
            ``metrics``, ``seconds``, ``stopped``, and ``lost`` if the task asks for it.

        Raises:
            AppMissing: The slot's last round did not leave its state here.
        """
        begin = time.perf_counter()
        self.stopping = False
        self._task = task
        slot = task["slot"]
        self._set_optimizer(slot, task["round"], task["optimizer"])
        if task["optimizer"] != "held":
            self._exchange.lost.pop(slot, None)
            if task.get("lost") is not None:
                self._exchange.lost[slot] = task["lost"]
        self.app.indices = task["indices"]
        reseed(self.app.model, (task["seed"], task["round"], slot))
        weights = self._exchange.read_weights(slot, task["weights"], self._like)
        outcome = call(self.app.train, weights, task["epochs"], task["batch_size"])
        update, metrics = outcome if isinstance(outcome, tuple) else (outcome, {})
        update = [np.asarray(array) for array in update]
        encoded, error = self._exchange.encode_update(slot, task["codec"], update, self._lossless)
        optimizer = read_optimizer(self.app.model)
        self._optimizers[slot] = task["round"], optimizer
        self._in_model = slot
        return {
            "update": encoded,
            "error": error,
            "optimizer": optimizer,
            **({"lost": self._exchange.lost[slot]} if task["give_lost"] else {}),
            "samples": len(task["indices"]),
            "digest": digest(task["indices"]),
            "metrics": metrics,
            "seconds": time.perf_counter() - begin,
            "stopped": self.stopping,
        }

    def _set_optimizer(self, slot: int, number: int, state: Any) -> None:
        """Let the optimizer go on from where the slot's last round left it, wherever that was."""
        in_model, self._in_model = self._in_model, None  # until this round is over nothing is known of it
        if isinstance(state, str) and state == "held":
            after, state = self._optimizers.get(slot, (None, []))
            if after != number - 1:
                raise AppMissing(f"slot {slot + 1} has left no optimizer state of round {number} here")
            if in_model == slot:
                return
        elif isinstance(state, str):
            state = self._fresh
        write_optimizer(self.app.model, state)

    # -- what the default ``IApp.train`` is made of -----------------------------------------------------------------

    def fit(self, epochs: int, batch_size: int, callbacks: list[Any]) -> dict[str, float]:
        """Run ``Model.fit`` over this round's partition.

        The first local epoch goes through it in the order that came, each later one in an own order made from the task's seed.

        Returns:
            Keras's metrics of the last epoch.
        """
        import keras

        replica, indices = self, self.app.indices
        if self._feed is None or self._feed[0] != batch_size:
            feed = make_feed((self.app.x_train, self.app.y_train), batch_size)
            # TensorFlow copies arrays into tensors; what is kept are views of these, so that the data is here once.
            kept = dict(zip(("x_train", "y_train"), feed.data, strict=True))
            vars(self.app).update(kept)
            self.attributes.update(kept)
            self._feed = batch_size, feed
        feed = self._feed[1]

        class Round(keras.callbacks.Callback):  # type: ignore[misc]
            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                feed.set_order(replica.order(indices, epoch))

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                if replica.stopping:
                    self.model.stop_training = True

        feed.set_order(indices)  # Keras looks at the data before the first epoch begins
        history = self.app.model.fit(
            feed.dataset, epochs=epochs, verbose=0, shuffle=False, callbacks=[Round(), *callbacks]
        ).history
        return {name: float(values[-1]) for name, values in history.items()}

    def order(self, indices: np.ndarray[Any, Any], epoch: int) -> np.ndarray[Any, Any]:
        """The order of one local epoch, the same whichever worker carries the slot."""
        if epoch == 0:
            return indices
        task = self._task
        seed = np.random.SeedSequence([task["seed"], task["round"], task["slot"], epoch])
        return np.random.Generator(np.random.PCG64(seed)).permutation(indices)

    @property
    def round(self) -> int:
        """Which round this is, from 1."""
        return int(self._task["round"]) + 1


STEPS_PER_EXECUTION = 16
"""Batches in one call of the compiled step, when nothing watches single batches: ``docs/LAB.md`` has the figures."""


def use_fast_steps(model: Any, app: App) -> None:
    """Let one call of the compiled function take several batches, unless the user chose a number or has callbacks that may look at batches.

    Only with TensorFlow: there a short last group of batches is handled, and the weights are the same bits.
    """
    import keras

    if keras.backend.backend() == "tensorflow" and not app.callbacks and model.steps_per_execution == 1:
        model.steps_per_execution = STEPS_PER_EXECUTION


def call(function: Any, *args: Any) -> Any:
    """Call a method of the user's app, plain or async, on this thread."""
    result = function(*args)
    if inspect.iscoroutine(result):
        return asyncio.run(result)
    return result


def describe_weights(model: Any) -> list[list[Any]]:
    """Path, shape and type of each of ``model.weights``, to compare nodes by."""
    if not model.built:
        raise AppError(
            f"the model {model.name!r} is not built", hint="begin it with keras.Input(...), or call model.build(...)"
        )
    return [[weight.path, list(weight.shape), str(weight.dtype)] for weight in model.weights]


def read_optimizer(model: Any) -> Weights:
    """The state of a model's optimizer: its iterations, learning rate, and for each weight what it keeps, in Keras's order."""
    import keras

    return [] if model.optimizer is None else [keras.ops.convert_to_numpy(v) for v in model.optimizer.variables]


def write_optimizer(model: Any, state: Weights) -> None:
    """Set what ``read_optimizer`` read, of an equal model.

    Raises:
        AppError: The optimizer is another one.
    """
    variables = [] if model.optimizer is None else model.optimizer.variables
    if [tuple(v.shape) for v in variables] != [array.shape for array in state]:
        raise AppError(
            f"the optimizer's state has {len(state)} arrays, here it has {len(variables)} of other shapes",
            hint="create the same model on the master and on every worker",
        )
    for variable, array in zip(variables, state, strict=True):
        variable.assign(array)


def digest(indices: np.ndarray[Any, Any]) -> str:
    """Names a partition: SHA-256 of its indices in order, as 64-bit integers."""
    return hashlib.sha256(np.ascontiguousarray(indices, "<i8").data).hexdigest()


def reseed(model: Any, seed: tuple[int, ...]) -> None:
    """Set every random state of Keras from a slot's seed, so that a slot's result does not depend on who carries it.

    Dropout and the like hold seed generators, which are variables but no weights, so they do not come with the weights.
    """
    import keras

    words = np.random.SeedSequence(seed).generate_state(2)
    keras.utils.set_random_seed(int(words[0]))
    states = [v for v in model.non_trainable_variables if v.path.endswith("seed_generator_state")]
    for number, state in enumerate(states):
        # 31 bits fit every type that a backend keeps the state in.
        words = np.random.SeedSequence([*seed, number]).generate_state(2) >> np.uint32(1)
        state.assign(words.astype(str(state.dtype)))


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


async def open_app(self: Worker, run: str, wanted: str | None = None) -> dict[str, Any] | None:
    """Give the app its data, then build its model, in the order of the master: ``create_model`` may use the data.

    Args:
        self: The worker.
        run: Names the training run.
        wanted: Fingerprint of the master's training data; empty when the master has none, None when it does not know it yet.

    Returns:
        What there is now; None when this worker holds data of earlier runs and has to know first which is wanted.

    Raises:
        AppMissing: ``take_app`` did not come before.
    """
    replica = replica_of(self, run)
    await self.compute(replica.begin)
    if wanted is None and self.datasets:
        return None
    begin = time.perf_counter()
    held = wanted in self.datasets
    if held:
        content = str(wanted)
        replica.attributes = self.datasets[content]
        vars(replica.app).update(replica.attributes)
    else:
        await self.compute(replica.load)
        content = await self.compute(fingerprint_of, replica.app)
        self.datasets[content] = replica.attributes
    x = first_array(replica.app.x_train)
    data = {
        "fingerprint": content,
        "samples": len(x),
        "shape": list(x.shape),
        "dtype": str(x.dtype),
        "loaded": not held,
        "seconds": time.perf_counter() - begin,
    }
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


async def train_slot(self: Worker, task: dict[str, Any]) -> dict[str, Any]:
    """Carry one slot through one round."""
    replica = replica_of(self, task["run"])
    computing = asyncio.ensure_future(self.compute(replica.train, task))
    try:
        result: dict[str, Any] = await asyncio.shield(computing)
    except asyncio.CancelledError:
        replica.stopping = True
        await asyncio.wait([computing])
        raise
    return result


@concurrent
def stop_training(self: Worker) -> None:
    """STOP: end local training at the next batch."""
    replica = getattr(self, "replica", None)
    if replica is not None:
        replica.stopping = True


def fingerprint_of(app: Any) -> str:
    """The content of an app's training data.

    Raises:
        AppError: ``load_dataset`` set no ``x_train`` or ``y_train``.
    """
    for name in ("x_train", "y_train"):
        if not hasattr(app, name):
            raise AppError(
                f"load_dataset set no self.{name}", hint="set x_train, y_train and, for the test, x_test, y_test"
            )
    x, y = len(first_array(app.x_train)), len(first_array(app.y_train))
    if x != y:
        raise AppError(f"x_train has {x} rows, y_train {y}", hint="give every sample its label")
    return fingerprint(app.x_train, app.y_train)
