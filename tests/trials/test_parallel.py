"""Test a worker on several simulated cards, with Keras's own distribution or a strategy of TensorFlow."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import unasked
from tests.patience import PATIENCE_S

JAX = """
import asyncio, hashlib, keras
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
            trained.evaluate_on, trained.evaluate_every = "workers", 2  # 100 samples, which 8 devices cannot divide
            try:
                await trained.train_sync()
                weights = b"".join(array.tobytes() for array in trained.model.get_weights())
                assert trained.history[-1].test["accuracy"] > 0.5
                assert keras.distribution.distribution() is None
                print("sha", hashlib.sha256(weights).hexdigest(), await cluster.run_method(devices))
            except AppError as error:
                print("error", error.message)

asyncio.run(main())
"""

TWO_DEVICES = """
import sys
from importlib.machinery import PathFinder

class Finder:
    def find_spec(name, path=None, target=None):
        if name != "tensorflow":
            return None
        spec = PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module
        def divided(module):
            execute(module)
            [cpu] = module.config.list_physical_devices("CPU")
            module.config.set_logical_device_configuration(cpu, [module.config.LogicalDeviceConfiguration()] * 2)
        spec.loader.exec_module = divided
        return spec

sys.meta_path.insert(0, Finder)
"""
"""The ``sitecustomize`` of all processes: TensorFlow has to know its devices before it computes."""

TENSORFLOW = """
import asyncio
import numpy as np
from ddlf.errors import DDLFError
from ddlf.testing import local_cluster
from tests.training.models import Blobs, app

class Alone(Blobs):
    async def load_dataset(self):
        await super().load_dataset()
        self.x_test, self.y_test = self.x_test[:99], self.y_test[:99]  # two cards share it unequally

class Parallel(Alone):
    async def create_model(self):
        import tensorflow as tf
        with tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"]).scope():
            await super().create_model()
        assert self.model.distribute_strategy.num_replicas_in_sync == 2

async def main():
    async with local_cluster(1) as cluster:
        for settings in CASES:
            found = []
            for kind in (Parallel, Parallel, Alone):
                trained = app(cluster, kind, **{"samples": 256, "batch_size": 32, "slots": 2, **settings})
                try:
                    await (trained.train_downpour() if "replicas" in settings else trained.train_sync())
                    found.append(trained.model.get_weights())
                    if "width" in settings:
                        found[-1].append(np.array([*(await trained.evaluate_model()).values()]))
                except DDLFError as error:
                    print("error", error.message)
                    break
            if len(found) == 3:
                two, again, one = found
                far = max(float(abs(a - b).max()) for a, b in zip(one, two))
                print("near" if far < 1e-5 else far, all(map(lambda a, b: a.tobytes() == b.tobytes(), two, again)))

asyncio.run(main())
"""


TRAINED: list[dict[str, object]] = [
    {"width": 16, "optimizer": "adam"},
    {"width": 24, "optimizer": "adam"},
    {"local_rule": "fedprox:0.5", "outer": "fedadam"},
    {"local_rule": "scaffold", "exchange": "sharded"},
    {"optimizer": "adam", "optimizer_state": "averaged", "codec": "int8"},
]
"""Settings of trainings that follow one another in one process. Two models have other shapes."""
REFUSED: list[dict[str, object]] = [{"samples": 262}, {"exchange": "gradient"}, {"replicas": 2}]


def lines_of(program: str, backend: str, **environment: str) -> list[str]:
    """Return the lines that a program prints with a backend of Keras."""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "KERAS_BACKEND": backend, **environment},
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_S,
    )
    assert not ended.returncode, ended.stderr
    return ended.stdout.splitlines()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return a line for each case: how near three trainings with and without a strategy are, or the error."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(Path(unasked.__file__).read_text() + TWO_DEVICES)
    path = os.pathsep.join(map(str, (folder, Path(__file__).parents[2], os.environ.get("PYTHONPATH", ""))))
    lines = lines_of(TENSORFLOW.replace("CASES", repr(TRAINED + REFUSED)), "tensorflow", PYTHONPATH=path)
    return [line for line in lines if line.startswith(("near", "error", "0"))]


def test_cards_of_one_worker_share_its_batches_with_jax():
    flags = "--xla_force_host_platform_device_count=8"
    lines = lines_of(JAX, "jax", XLA_FLAGS=flags)
    first, again, odd = [line for line in lines if line.startswith(("sha", "error"))]
    assert first == again
    assert first.endswith("[8]")
    assert odd == "error a batch of 29 samples cannot be divided among 8 cards"


def test_cards_of_one_worker_share_its_batches_with_tensorflow_also_in_models_of_other_shapes(outcomes: list[str]):
    assert outcomes[: len(TRAINED)] == ["near True"] * len(TRAINED)


def test_trainings_that_would_use_one_card_of_a_strategy_are_refused(outcomes: list[str]):
    odd, gradient, downpour = outcomes[len(TRAINED) :]
    assert odd == "error a batch of 3 samples cannot be divided among 2 cards"
    assert re.match(
        r"error exchange='gradient' computes on one card, but the model 'sequential\w*' is made in", gradient
    ), gradient
    assert downpour.startswith("error mode='downpour' computes on one card")
