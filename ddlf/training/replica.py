"""A Keras model behind a few verbs. Runs in the executor of a worker; the functions below are the methods that a training master runs there.

Keras lives on the worker's one compute thread: imported, built and trained there, while the event loop goes on taking weights and indices.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from ddlf.errors import AppError
from ddlf.training.feed import Feed, first_array, make_feed
from ddlf.worker.datasets import fingerprint
from ddlf.worker.methods import concurrent

if TYPE_CHECKING:
    from ddlf.app import IApp
    from ddlf.worker.worker import Worker

log = logging.getLogger(__name__)


class Replica:
    """One worker's copy of an app and its model.

    Args:
        app: As it came from the master, without data and model.

    Attributes:
        stopping: Set when training is to end at the next batch.
    """

    def __init__(self, app: IApp) -> None:
        self.app = app
        self.stopping = False
        self._feed: tuple[int, Feed] | None = None
        self._tasks: dict[str, Any] = {}

    # -- verbs; all on the compute thread ---------------------------------------------------------------------------

    def build(self) -> dict[str, Any]:
        """Create the model and say what it is."""
        import keras

        call(self.app.create_model)
        model = getattr(self.app, "model", None)
        if model is None:
            raise AppError(
                "create_model set no self.model", hint="end it with self.model = ... and self.model.compile(...)"
            )
        return {"weights": describe_weights(model), "keras": keras.__version__, "backend": keras.backend.backend()}

    def load(self) -> dict[str, Any]:
        """Run the app's ``load_dataset``.

        Returns:
            The attributes that it set.
        """
        before = dict(vars(self.app))
        call(self.app.load_dataset)
        return {name: value for name, value in vars(self.app).items() if before.get(name, before) is not value}

    def train(self, task: dict[str, Any]) -> dict[str, Any]:
        """Carry one slot through one round.

        Args:
            task: ``slot``, ``round``, ``seed``, ``epochs``, ``batch_size``; ``indices`` of shape (n_j,) and ``weights``, one array each.

        Returns:
            ``update`` (weights before minus after, one array each), ``samples``, ``metrics``, ``seconds``, ``stopped``.
        """
        begin = time.perf_counter()
        self.stopping = False
        self._tasks = task
        self.app.indices = task["indices"]
        reseed(self.app.model, (task["seed"], task["round"], task["slot"]))
        outcome = call(self.app.train, task["weights"], task["epochs"], task["batch_size"])
        update, metrics = outcome if isinstance(outcome, tuple) else (outcome, {})
        return {
            "update": [np.asarray(array) for array in update],
            "samples": len(task["indices"]),
            "metrics": metrics,
            "seconds": time.perf_counter() - begin,
            "stopped": self.stopping,
        }

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
            self._feed = batch_size, make_feed((self.app.x_train, self.app.y_train), batch_size)
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
        task = self._tasks
        seed = np.random.SeedSequence([task["seed"], task["round"], task["slot"], epoch])
        return np.random.Generator(np.random.PCG64(seed)).permutation(indices)


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


def reseed(model: Any, seed: tuple[int, ...]) -> None:
    """Set every random state of Keras from a slot's seed, so that a slot's result does not depend on who carries it.

    Dropout and the like hold seed generators, which are variables but no weights, so they do not come with the weights.
    """
    import keras

    words = np.random.SeedSequence(seed).generate_state(2)
    keras.utils.set_random_seed(int(words[0]))
    weights = {id(weight) for weight in model.weights}
    for number, variable in enumerate(model.non_trainable_variables):
        if id(variable) not in weights and str(variable.dtype) == "uint32" and tuple(variable.shape) == (2,):
            variable.assign(np.random.SeedSequence([*seed, number]).generate_state(2).astype(np.uint32))


# -- methods that the master runs on a worker -----------------------------------------------------------------------


async def open_app(self: Worker, app: IApp) -> dict[str, Any]:
    """Take an app and build its model."""
    app.worker = self
    self.replica = app.replica = Replica(app)  # type: ignore[attr-defined]
    facts: dict[str, Any] = await self.compute(self.replica.build)  # type: ignore[attr-defined]
    return facts


async def load_data(self: Worker, wanted: str) -> dict[str, Any]:
    """Give the app its data: what an earlier run left here if the content is the wanted one, else by ``load_dataset``.

    Args:
        self: The worker.
        wanted: Fingerprint of the master's training data; empty when the master has none.
    """
    begin = time.perf_counter()
    replica: Replica = self.replica  # type: ignore[attr-defined]
    held = wanted in self.datasets
    if held:
        vars(replica.app).update(self.datasets[wanted])
        content = wanted
    else:
        attributes = await self.compute(replica.load)
        content = await self.compute(fingerprint_of, replica.app)
        self.datasets[content] = attributes
    x = first_array(replica.app.x_train)
    return {
        "fingerprint": content,
        "samples": len(x),
        "shape": list(x.shape),
        "dtype": str(x.dtype),
        "loaded": not held,
        "seconds": time.perf_counter() - begin,
    }


async def train_slot(self: Worker, task: dict[str, Any]) -> dict[str, Any]:
    """Carry one slot through one round."""
    replica: Replica = self.replica  # type: ignore[attr-defined]
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
