"""Tests of ``deterministic=True`` on a real card: two runs have equal bits, also after a kill and a resume."""

from __future__ import annotations

import hashlib

import pytest

import ddlf
from ddlf.errors import AppError
from ddlf.testing import FaultPlan, local_cluster
from ddlf.worker.machine import keras_backend

pytestmark = pytest.mark.gpu


class Pictures(ddlf.IApp):
    """An app with convolutions, batch normalization and dropout. Atomic additions would make its gradients differ."""

    verbose = False
    batch_size = 64
    master_epochs = 4
    slots = 2
    deterministic = True

    async def load_dataset(self):
        import numpy as np

        random = np.random.default_rng(0)
        self.x_train = random.normal(size=(1024, 16, 16, 3)).astype("float32")
        self.y_train = random.integers(0, 10, 1024)

    async def create_model(self):
        import keras

        layers = keras.layers
        self.model = keras.Sequential(
            [
                keras.Input((16, 16, 3)),
                layers.Conv2D(32, 3, padding="same", activation="relu"),
                layers.BatchNormalization(),
                layers.Conv2D(64, 3, strides=2, padding="same", activation="relu"),
                layers.Dropout(0.2),
                layers.Flatten(),
                layers.Dense(10),
            ]
        )
        self.model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])


class Lacking(Pictures):
    """An app with a layer that TensorFlow and PyTorch cannot compute with equal bits on a card. XLA can for all ops."""

    async def create_model(self):
        import keras

        backend = keras.backend.backend()

        class Means(keras.layers.Layer):
            def call(self, x):
                if backend == "torch":
                    import torch

                    return torch.nn.functional.adaptive_avg_pool2d(x[:, None, :, None], (16, 1))[:, 0, :, 0]
                if backend == "tensorflow":
                    import tensorflow as tf

                    return tf.image.adjust_contrast(x[:, None, :, None] * tf.ones((1, 1, 1, 3)), 2.0)[:, 0, :, 0]
                return x

        layers = keras.layers
        self.model = keras.Sequential(
            [keras.Input((16, 16, 3)), layers.Flatten(), layers.Dense(64), Means(), layers.Dense(10)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.model.compile("adam", loss, jit_compile=backend == "jax")  # XLA can compute this layer with equal bits


def sha256(app):
    return hashlib.sha256(b"".join(array.tobytes() for array in app.model.get_weights())).hexdigest()


async def trained(cluster, plan=None, app_class=Pictures, **settings):
    app = app_class(cluster)
    for name, value in settings.items():
        setattr(app, name, value)
    if plan is None:
        await app.train_sync()
    else:
        async with plan.on(app):
            await app.train_sync()
    return app


async def test_runs_on_a_card_have_equal_bits_also_after_a_kill_and_a_resume(tmp_path):
    async with local_cluster(1) as cluster:
        assert cluster.workers[0].executor.gpus, "this worker computes on the CPU"
        expected = sha256(await trained(cluster))
        assert sha256(await trained(cluster)) == expected
        assert sha256(await trained(cluster, FaultPlan().kill(worker=1, at_round=2))) == expected
        await trained(cluster, master_epochs=2, checkpoint=tmp_path)
        assert sha256(await trained(cluster, resume=tmp_path)) == expected
    async with local_cluster(1) as cluster:  # a run in new processes
        assert sha256(await trained(cluster)) == expected


async def test_op_without_equal_bits_is_named_on_a_card():
    async with local_cluster(1) as cluster:
        if keras_backend() == "jax":
            once, again = [await trained(cluster, app_class=Lacking) for _ in range(2)]
            assert sha256(once) == sha256(again)
            return
        with pytest.raises(AppError, match=r"deterministic=True: \w+ cannot compute \S+ with equal bits in each run"):
            await Lacking(cluster).train_sync()
