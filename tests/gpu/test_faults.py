"""Tests of errors and readings of a real card: full memory names the largest batch that fits, and NVML reads the card."""

from __future__ import annotations

import asyncio

import pytest

import ddlf
from ddlf.cluster.cluster import Cluster
from ddlf.errors import OutOfMemory
from ddlf.events import CardRead
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.gpu


class Wide(ddlf.IApp):
    """An app whose activations take 17 GB with a batch of 4,096 samples, and 1 GB with a batch of 256 samples."""

    verbose = False
    batch_size = 4096
    master_epochs = 1

    async def load_dataset(self):
        import numpy as np

        self.x_train = np.zeros((4096, 8), "float32")
        self.y_train = np.zeros((4096, 1), "float32")

    async def create_model(self):
        import keras

        layers = keras.layers
        self.model = keras.Sequential(
            [
                keras.Input((8,)),
                layers.Dense(256),
                layers.Reshape((16, 16, 1)),
                layers.UpSampling2D(16),
                *(layers.Conv2D(8, 3, padding="same", activation="relu") for _ in range(2)),
                layers.GlobalAveragePooling2D(),
                layers.Dense(1),
            ]
        )
        self.model.compile("sgd", "mse")


async def test_full_memory_of_a_card_names_the_largest_batch_that_fits():
    async with Cluster.local(1, gpus=[0], gpu_memory="6GiB") as cluster:
        with pytest.raises(OutOfMemory) as caught:
            await Wide(cluster).train_sync()
    error = caught.value
    assert error.batch_size == 4096
    assert 0 < error.fitted < 4096
    assert error.card.endswith("at most 6.4 GB")
    assert 0 < error.peak <= 6.5e9
    assert f"the largest batch that fitted has {error.fitted:,} samples" in error.message


async def test_status_has_the_readings_of_the_card():
    async with Cluster.local(1, gpus=[0]) as cluster:
        read = asyncio.Event()
        cluster.subscribe(lambda event: read.set() if isinstance(event, CardRead) else None)
        async with asyncio.timeout(PATIENCE_S):
            await read.wait()
        (card,) = (await cluster.workers[0].status()).cards
    assert card.number == "0"
    assert card.total > card.memory > 0
    assert 0 <= card.utilisation <= 100
    assert card.watts > 10
    assert 10 < card.celsius < 110
