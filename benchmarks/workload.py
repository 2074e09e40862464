"""The workload of every contender: the same model, data, batch size and epochs. Runs in each contender's processes.

Model and data come from DDLF's apps, so they are the same for all contenders. This module also defines the measurement:

- ``ready``: all processes run, Keras is imported, the data is loaded in each of them, and the model is built and
  compiled. No training step was traced yet.
- ``end``: the last updates are merged into the global weights.

The training time is ``end - ready``, so it contains one trace of each contender's training function (0.3-0.7 s of one
core). Evaluation comes after ``end`` and does not count. The start-up time is separate. It goes from the first line of
the contender's process to ``ready``.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

APPS = {
    "mnist": ("apps.mnist_cnn", "MNISTCNN"),
    "cifar10": ("apps.cifar10_cnn", "CIFAR10CNN"),
    "digits": ("apps.digits_cnn", "DigitsCNN"),
}
SINGLE_THREADED = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Environment of a process that computes on one thread. Set it before the import of TensorFlow."""

STEPS_PER_EXECUTION = 16
"""Batches in one call of the compiled step, for contenders that are tuned for speed. The weights keep the same bits."""

Weights = list[np.ndarray[Any, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One training run.

    Args:
        data: A name in ``APPS``.
        samples: Number of training samples, from the beginning of the training set; None for all.
        rounds: Number of exchanges of weights.
        local_epochs: Epochs of each worker in a round.
        batch_size: Batch size of each worker.
        workers: Number of processes that train.
        seed: Seed of the initial weights and, if the contender allows it, of the order of the samples.
        curve: Whether to keep the weights of each round, to evaluate them afterwards.
    """

    data: str = "mnist"
    samples: int | None = None
    rounds: int = 3
    local_epochs: int = 1
    batch_size: int = 64
    workers: int = 2
    seed: int = 0
    curve: bool = False

    @property
    def epochs(self) -> int:
        """Return the number of epochs of the whole run."""
        return self.rounds * self.local_epochs

    def app_class(self) -> type[Any]:
        """Return the app class of this data set. It loads only the wanted samples, and the seed sets its initial weights."""
        module, name = APPS[self.data]
        base: type[Any] = getattr(importlib.import_module(module), name)
        samples, seed = self.samples, self.seed

        async def load_dataset(app: Any) -> None:
            await base.load_dataset(app)
            app.x_train, app.y_train = app.x_train[:samples], app.y_train[:samples]

        async def create_model(app: Any) -> None:
            import keras

            keras.utils.set_random_seed(seed)
            await base.create_model(app)

        return type(f"Measured{name}", (base,), {"load_dataset": load_dataset, "create_model": create_model})

    def load(self) -> Any:
        """Return an app without a cluster, with ``x_train``, ``y_train``, ``x_test``, ``y_test`` and ``model``."""
        app = self.app_class()()
        asyncio.run(app.load_dataset())
        asyncio.run(app.create_model())
        return app

    def dump(self) -> str:
        """Return the workload as JSON, for another process."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Workload:
        """The inverse of ``dump``."""
        return cls(**json.loads(text))


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The result of a contender. Times are in seconds of ``time.monotonic``, which all processes of a machine share.

    Args:
        ready: See the module.
        end: See the module.
        weights: After training; None when there is no single model.
        bytes_out: Sent to the workers in training, None when nothing is or nobody knows.
        bytes_back: Received from them.
        snapshots: When the workload wants a curve: time and weights after each merge.
        notes: Further figures, by name.
    """

    ready: float
    end: float
    weights: Weights | None = None
    bytes_out: int | None = None
    bytes_back: int | None = None
    snapshots: list[tuple[float, Weights]] = field(default_factory=list)
    notes: dict[str, float] = field(default_factory=dict)


def batches(x: Any, y: Any, batch_size: int, *, shuffle_seed: int | None = None) -> Any:
    """A ``tf.data`` pipeline without autotuning.

    For arrays, Keras makes a pipeline with autotuning. Then the end of ``fit`` can wait for the tuning thread's next
    wake-up, which may double the time of the training (TensorFlow 2.21): a *stall*. Contenders that are tuned for speed use
    this function. Contenders that work like most users' programs give arrays to ``fit``, and have the stall.
    """
    import tensorflow as tf

    options = tf.data.Options()
    options.autotune.enabled = False
    options.threading.private_threadpool_size = 1
    data = tf.data.Dataset.from_tensor_slices((x, y))
    if shuffle_seed is not None:
        data = data.shuffle(len(x), seed=shuffle_seed)
    return data.batch(batch_size).prefetch(1).with_options(options)
