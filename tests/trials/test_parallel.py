"""Test a worker that computes on several simulated cards with Keras's own distribution: each run has equal bits."""

import os
import subprocess
import sys

from tests.patience import PATIENCE_S

PROGRAM = """
import asyncio, hashlib
from ddlf.errors import AppError
from ddlf.testing import local_cluster
from tests.training.models import Blobs, app

class Parallel(Blobs):
    async def create_model(self):
        import keras
        keras.distribution.set_distribution(keras.distribution.DataParallel())
        await super().create_model()

def devices():
    import jax
    return len(jax.devices())

async def main():
    async with local_cluster(1) as cluster:
        for samples in (256, 256, 250):
            trained = app(cluster, Parallel, samples=samples, batch_size=32, slots=2, optimizer="adam")
            try:
                await trained.train_sync()
                weights = b"".join(array.tobytes() for array in trained.model.get_weights())
                print("sha", hashlib.sha256(weights).hexdigest(), await cluster.run_method(devices))
            except AppError as error:
                print("error", error.message)

asyncio.run(main())
"""


def test_cards_of_one_worker_share_its_batches():
    flags = {"KERAS_BACKEND": "jax", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, **flags}, capture_output=True, text=True, timeout=PATIENCE_S
    )
    first, again, odd = [line for line in ended.stdout.splitlines() if line.startswith(("sha", "error"))]
    assert first == again
    assert first.endswith("[8]")
    assert odd == "error a batch of 29 samples cannot be divided among 8 cards"
