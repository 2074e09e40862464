"""Small trainings. Their checkpoints and run folders, which earlier versions of DDLF wrote, are beside this file.

``python -m tests.earlier.trainings FOLDER`` writes them with the present code. For each training it writes the checkpoint
after half of the epochs, the run folder, and ``final.npz``. This file has the weights after all epochs of a run that
continued from the checkpoint.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import ddlf

HALF, WHOLE = 3, 6
"""Number of epochs before the checkpoint and in the whole training."""


class Iris(ddlf.IApp):
    """A small network on 150 generated points."""

    verbose = False
    echo = False
    batch_size = 16
    optimizer = "sgd"
    normalized = False

    async def load_dataset(self) -> None:
        """Generate points of 3 classes in 4 dimensions."""
        chance = np.random.default_rng(0)
        labels = chance.integers(0, 3, 150)
        points = (chance.normal(size=(150, 4)) + 2 * labels[:, None]).astype("float32")
        self.x_train, self.y_train = points, np.eye(3, dtype="float32")[labels]

    async def create_model(self) -> None:
        """Make a network with 4 inputs, 16 hidden units and 3 classes."""
        import keras
        from keras import layers

        hidden = [layers.BatchNormalization()] if self.normalized else []
        self.model = keras.Sequential(
            [keras.Input((4,)), layers.Dense(16, "tanh"), *hidden, layers.Dense(3, "softmax")], name="iris"
        )
        optimizers = {"sgd": keras.optimizers.SGD(0.05), "adam": keras.optimizers.Adam(0.01)}
        self.model.compile(optimizers[self.optimizer], "categorical_crossentropy", metrics=["accuracy"])


TRAININGS: dict[str, dict[str, Any]] = {
    "star": {"slots": 3, "optimizer": "adam", "codec": "int8", "weights_codec": "delta:int8", "merge": "median"},
    "sharded": {"slots": 2, "optimizer": "adam", "exchange": "sharded", "outer": "nesterov"},
    "scaffold": {"slots": 2, "local_rule": "scaffold", "normalized": True, "batchnorm": "local"},
    "streaming": {"slots": 2, "outer": "streaming:fragments=2", "worker_steps": 3},
    "gradient": {"slots": 2, "exchange": "gradient", "optimizer": "adam"},
    "async": {"slots": 1, "mode": "async", "optimizer": "adam", "staleness": "polynomial:0.5"},
    "downpour": {"slots": 1, "mode": "downpour", "shards": 2, "push_rule": "adagrad", "n_push": 2, "n_fetch": 2},
    "dirichlet": {"slots": 2, "partition": "dirichlet:0.5", "converge": "target:accuracy,2.0"},
}
"""The settings of each training by its name."""
SLICED = ("sharded", "downpour")
"""Trainings whose workers write slices of a checkpoint during training. They keep the last two checkpoints."""


def make(name: str, cluster: Any, **more: Any) -> Iris:
    """Return the app of a training with its settings."""
    app = Iris(cluster)
    vars(app).update(TRAININGS[name], **more)
    return app


async def write(folder: Path) -> None:
    """Train each app for half of its epochs, and continue it to the end from the checkpoint."""
    from ddlf.testing import local_cluster

    async with local_cluster(2) as cluster:
        for name in TRAININGS:
            target = folder / name
            with tempfile.TemporaryDirectory() as out:
                often = {"checkpoint_keep": 2} if name in SLICED else {"checkpoint_keep": 1, "checkpoint_every": 1000}
                app = make(name, cluster, checkpoint=target / "checkpoints", out=out, **often)
                app.run_name = name
                app.master_epochs = HALF
                await app.train_model()
                (run,) = (path for path in Path(out).iterdir() if path.is_dir() and not path.is_symlink())  # noqa: ASYNC240
                shutil.copytree(run, target / "run", ignore=shutil.ignore_patterns("*.html", "*.lock"))
            with tempfile.TemporaryDirectory() as copied:
                shutil.copytree(target / "checkpoints", copied, dirs_exist_ok=True)
                finished = make(name, cluster, checkpoint=copied, resume="auto", master_epochs=WHOLE)
                await finished.train_model()
            np.savez(target / "final.npz", *finished.model.get_weights())
            print(name, sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()))


if __name__ == "__main__":
    asyncio.run(write(Path(sys.argv[1])))
