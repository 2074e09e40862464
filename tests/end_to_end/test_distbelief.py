"""Tests of the demos of the parameter server: a user starts them with their smallest settings."""

import os
import re
from pathlib import Path

import numpy as np
import pytest

import ddlf
from ddlf.training.evaluation.master import compute
from tests.commands import several
from tests.mnist import folder_with_mnist
from tests.training.models import Blobs, app

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_template")]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Return the outputs of three commands: the classic demo, the comparison, and the comparison with an LSTM.

    They share a process, its workers' template, and the first images of MNIST.
    """
    folder = tmp_path_factory.mktemp("demos")
    data = folder / "data"
    data.mkdir()
    with np.load(folder_with_mnist(folder / "stand-in") / "mnist.npz") as mnist:
        counts = {"train": 2400, "test": 1000}
        np.savez(data / "mnist.npz", **{name: mnist[name][: counts[name[2:]]] for name in mnist})
    classic = "xor.py --hidden 2 -p examples=600 -p log_every=15 --ui plain"
    comparison = "mnist_distbelief.py -p ways=sync,default -p samples=2400 -p epochs=1 -p replicas=4"
    lstm = "mnist_distbelief.py --model lstm -p ways=default -p samples=1200 -p epochs=1 -p replicas=2"
    commands = [
        [ROOT / "apps" / app, "--local", "2", *words] for app, *words in map(str.split, (classic, comparison, lstm))
    ]
    return several(commands, folder, env={**os.environ, "DDLF_DATA": str(data)}, with_errors=True)


def test_the_classic_demo_logs_what_many_replicas_read_and_update(outputs):
    output, _, _ = outputs
    assert "xor: 9 parameters" in output
    for action in (
        "layer 0 weights read",
        "layer 1 weights read",
        "layer 0 weights updated",
        "layer 1 weights updated",
    ):
        assert len(set(re.findall(rf"{action} by model replica (\d+)", output))) > 12, action
    outputs = re.findall(r"replica id (\d+), output: (0\.\d{5}), target ([01])\.0", output)
    assert {int(replica) for replica, _, _ in outputs} <= set(range(25))
    assert re.search(r"^test +loss 0\.\d+  within [01]\.\d+", output, re.M)


def test_comparison_lists_time_and_bytes_of_each_way_to_train(outputs):
    _, output, _ = outputs
    rows = {
        row[0]: [float(x) for x in row[1:]]
        for row in re.findall(r"^(sync|default) +(\S+) +(\S+) +(\S+) +(\S+)%", output, re.M)
    }
    (_, master, workers, accuracy), (_, of_shards, between, learned) = rows["sync"], rows["default"]
    assert accuracy > 25
    assert learned > 25
    assert workers == 0 < between
    assert of_shards < between
    assert master == pytest.approx(4 * 79_510 * 4e-6, rel=0.1)  # weights to two workers, and updates back


def test_an_lstm_is_trained_by_downpour_too(outputs):
    _, _, output = outputs
    assert re.search(r"^default +\S+ +\S+ +\S+ +\d+\.\d\d%", output, re.M)


class Fitted(Blobs):
    """An app that has validation data, too."""

    async def load_dataset(self):
        await super().load_dataset()
        self.x_val, self.y_val = self.x_test[:40], self.y_test[:40]


class Best(Fitted):
    """An app whose validation labels are wrong: its validation loss rises with each epoch of training."""

    async def load_dataset(self):
        await super().load_dataset()
        self.y_val = np.roll(self.y_val, 1, axis=1)

    async def create_model(self):
        import keras

        await super().create_model()
        self.callbacks = [keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)]


async def test_downpour_is_evaluated_converges_and_restores_the_best_weights(
    monkeypatch,
):
    """The master fetches the weights for callbacks that read them, and at the end. Only then it computes metrics itself."""
    on_master, settings = [], {"mode": "downpour", "slots": 2, "push_rule": "sgd:rate=0.05", "staleness": "constant"}
    monkeypatch.setattr(
        "ddlf.training.evaluation.master.compute",
        lambda *args, **more: on_master.extend(args[1:2]) or compute(*args, **more),
    )
    async with ddlf.Cluster.local(2) as cluster:
        trained = app(cluster, Fitted, master_epochs=3, evaluate_every=1, **settings)
        await trained.train_model()
        assert len(trained.history) == 6
        assert all(record.test.keys() == {"loss", "accuracy"} for record in trained.history)
        assert len(on_master) == 2, "the last commit's weights are on the master anyway"
        tests = [record.test["loss"] for record in trained.history]
        assert tests[-1] < tests[0]
        assert trained.history[-1].test == pytest.approx(await trained.evaluate_model(), rel=1e-5)
        reached = app(cluster, Fitted, master_epochs=9, converge="target:metric=val_loss,value=1e9", **settings)
        on_master.clear()
        await reached.train_model()
        assert reached.run_context.progress.converged
        assert len(reached.history) < 18
        assert reached not in on_master
        best = app(cluster, Best, master_epochs=9, **settings)
        await best.train_model()
        losses = [record.metrics["val_loss"] for record in best.history if "val_loss" in record.metrics]
        assert 3 <= len(losses) < 9, "the losses after the first epoch were higher, so training stopped"
        assert losses.index(min(losses)) == 0
        best.x_test, best.y_test = best.x_val, best.y_val
        assert (await best.evaluate_model())["loss"] == pytest.approx(min(losses), rel=1e-5)
