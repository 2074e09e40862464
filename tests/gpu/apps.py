"""Apps for the tests with a real card, and functions that their workers run."""

from __future__ import annotations

import os
from typing import Any

import ddlf

SIX_GB = 6 * 10**9


class Digits(ddlf.IApp):
    """Handwritten digits and a small network, which recognizes most digits after a few epochs."""

    verbose = False
    master_epochs, worker_epochs, batch_size = 6, 2, 16

    async def load_dataset(self) -> None:
        (self.x_train, self.y_train), (self.x_test, self.y_test) = ddlf.load_digits()

    async def create_model(self) -> None:
        import keras
        from keras import layers

        parts = [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(32, activation="relu"),
            layers.Dense(10, activation="softmax", dtype="float32"),
        ]
        self.model = keras.Sequential(parts)
        self.model.compile(keras.optimizers.SGD(0.1, momentum=0.5), "categorical_crossentropy", metrics=["accuracy"])


class Greedy(Digits):
    """An app that needs more memory than its worker may have."""

    def train(self, weights: list[Any], worker_epochs: int, batch_size: int) -> Any:
        import keras

        large = keras.ops.ones((SIX_GB // 4,), "float32")
        return super().train(weights, worker_epochs, batch_size) if float(large[0]) else None


async def trained(cluster: ddlf.Cluster, app_class: type[Digits] = Digits, **settings: Any) -> Digits:
    """Return an app after its training with some settings."""
    app = app_class(cluster)
    for name, value in settings.items():
        setattr(app, name, value)
    await app.train_model()
    return app


async def accuracy(app: Digits) -> float:
    """Return the accuracy of an app's model on the test data."""
    metrics = await app.evaluate_model()
    return metrics["accuracy"]


def device_here() -> dict[str, Any]:
    """Return facts about the device of the process that calls this: its mask, its kind, and the number of devices."""
    import keras

    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    match keras.backend.backend():
        case "jax":
            import jax

            return {"mask": mask, "kind": jax.default_backend(), "count": jax.device_count()}
        case "torch":
            import torch

            kind = "gpu" if torch.cuda.is_available() else "cpu"
            return {"mask": mask, "kind": kind, "count": torch.cuda.device_count()}
    import tensorflow as tf

    count = len(tf.config.list_physical_devices("GPU"))
    return {"mask": mask, "kind": "gpu" if count else "cpu", "count": count}


def error_of_product() -> float:
    """Return the relative error of a matrix product in float32, with the backend's default."""
    import keras
    import numpy as np

    chance = np.random.default_rng(0)
    left, right = chance.standard_normal((2, 512, 512)).astype(np.float32)
    exact = left.astype(np.float64) @ right
    product = keras.ops.convert_to_numpy(
        keras.ops.matmul(keras.ops.convert_to_tensor(left), keras.ops.convert_to_tensor(right))
    )
    return float(np.linalg.norm(product - exact) / np.linalg.norm(exact))
