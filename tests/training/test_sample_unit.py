"""Tests of whole runs that protect single samples: accuracy, epsilon of each worker, budget, resume, and refusals."""

import shutil

import numpy as np
import pytest

import ddlf
from ddlf import events
from ddlf.errors import AppError, BudgetSpent, CheckpointMismatch, ConfigError
from ddlf.privacy.accountant import Noise, epsilon
from ddlf.testing import in_process_cluster
from ddlf.training.checkpoints.releases import RELEASES
from tests.later import Later
from tests.training.private_apps import Private, kill_in_round

keras = Later("keras")

ENDS = {1: (0, 130), 2: (130, 530), 3: (530, 1437)}
"""The training digits of each worker."""
NOISE, BATCH = 1.1, 48


class Digits(ddlf.IApp):
    """Softmax regression of digits. Each worker has its own digits, and the master has the test set."""

    private = True
    verbose = False
    advice = "off"
    batch_size = BATCH
    master_epochs = 6
    worker_epochs = 3  # in each round
    evaluate_every = 1
    update_clip = 1.0
    noise_multiplier = NOISE
    privacy_unit = "sample"

    async def load_dataset(self):
        begin, end = ENDS[self.worker.id]
        (x, y), _ = ddlf.load_digits()
        self.x_train, self.y_train = x[begin:end], y[begin:end]

    async def load_test_dataset(self):
        _, (self.x_test, self.y_test) = ddlf.load_digits()

    async def create_model(self):
        self.model = keras.Sequential(
            [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10, activation="softmax")]
        )
        self.model.compile(keras.optimizers.SGD(1.0), "categorical_crossentropy", metrics=["accuracy"])


def by_hand(worker, rounds):
    """Return epsilon of a worker's samples after some rounds of three epochs, computed with dp-accounting."""
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    begin, end = ENDS[worker]
    samples = end - begin
    step = dp_accounting.PoissonSampledDpEvent(BATCH / samples, dp_accounting.GaussianDpEvent(NOISE))
    return PLDAccountant().compose(step, rounds * 3 * -(-samples // BATCH)).get_epsilon(1e-5)


@pytest.mark.slow
async def test_digits_are_learned_with_the_epsilon_of_each_worker():
    received = []
    async with in_process_cluster(3) as cluster:
        app = Digits(cluster)
        app.subscribe(received.append)
        history = await app.train_sync()
    assert history[-1].epsilons == {str(worker): pytest.approx(by_hand(worker, 2), abs=1e-3) for worker in ENDS}
    assert history[-1].test["accuracy"] > 0.6
    assert all(record.metrics.keys() == {"epsilon"} for record in history)
    assert not [event for event in received if isinstance(event, events.SlotMoved) and event.loss is not None]


class Own(Private):
    """An app whose attributes choose an unsuitable layer, or another form of the data."""

    master_epochs = 1
    update_clip = 1.0
    noise_multiplier = 1.0
    privacy_unit = "sample"
    layer = weighted = None

    async def load_dataset(self):
        await super().load_dataset()
        if self.weighted:
            self.w_train = np.ones(len(self.x_train), "f4")

    async def create_model(self):
        await super().create_model()
        if self.layer:
            layer = getattr(keras.layers, self.layer)()
            self.model = keras.Sequential([keras.Input((8,)), layer, *self.model.layers])
            self.model.compile("sgd", "categorical_crossentropy")


def epsilon_after(steps):
    """Return epsilon after some steps on all samples, because the batch size is larger than the number of samples."""
    return pytest.approx(epsilon({Noise(multiplier=1.0): steps}, 1e-5), abs=1e-9)


async def test_budget_ends_a_run_before_it_is_exceeded_and_a_resumed_run_keeps_the_count(tmp_path):
    async with in_process_cluster(3) as cluster:
        app = Own(cluster)
        app.checkpoint, app.privacy_budget, app.master_epochs, app.batch_size = tmp_path / "kept", 7.5, 3, 128
        history = await app.train_sync()
        assert [record.epsilons for record in history] == [dict.fromkeys("123", epsilon_after(n)) for n in (1, 2)]
        assert "above the privacy budget of 7.5" in history.ended
        assert len((tmp_path / "kept" / RELEASES).read_bytes().splitlines()) == 1 + 2 * 3

        shutil.copytree(tmp_path / "kept", tmp_path / "older")
        lines = (tmp_path / "older" / RELEASES).read_bytes().splitlines(keepends=True)
        (tmp_path / "older" / RELEASES).write_bytes(b"".join(lines[:-1]))
        app = Own(cluster)
        app.resume, app.master_epochs, app.batch_size = tmp_path / "older", 4, 128
        with pytest.raises(CheckpointMismatch, match="counts 5 releases, and at least 6 have left"):
            await app.train_sync()

        app = Own(cluster)
        app.resume, app.privacy_budget, app.batch_size = tmp_path / "kept", 7.5, 128
        with pytest.raises(BudgetSpent, match=r"above the privacy budget of 7\.5"):
            await app.train_sync()
        app = Own(cluster)
        app.resume, app.master_epochs, app.batch_size = tmp_path / "kept", 4, 128
        history = await app.train_sync()
        assert [record.epsilons for record in history] == [dict.fromkeys("123", epsilon_after(n)) for n in (3, 4)]
        app = Own(cluster)
        app.resume, app.master_epochs, app.batch_size, app.privacy_unit = tmp_path / "kept", 5, 128, "worker"
        with pytest.raises(CheckpointMismatch, match="privacy_unit: 'sample' in the checkpoint, 'worker' now"):
            await app.train_sync()


@pytest.mark.slow
async def test_a_round_that_a_worker_begins_again_counts_twice_for_it():
    async with in_process_cluster(3) as cluster:
        app = Own(cluster)
        app.master_epochs, app.batch_size = 2, 128
        kill_in_round(cluster, app, worker=2, round=2)
        history = await app.train_sync()
    assert history[1].recomputed == 1
    assert history[1].epsilons == {"1": epsilon_after(2), "2": epsilon_after(3), "3": epsilon_after(2)}


class OwnTrain(Own):
    """It makes its own steps."""

    def train(self, weights, worker_epochs, batch_size):
        return super().train(weights, worker_epochs, batch_size)


@pytest.mark.parametrize(
    ("kind", "settings", "error", "message"),
    [
        (
            Own,
            {"layer": "BatchNormalization"},
            ConfigError,
            r"\(BatchNormalization\): it keeps statistics over a batch",
        ),
        (Own, {"weighted": True}, ConfigError, "one array of inputs and one of labels, without sample weights"),
        (Own, {"delta": 0.02}, ConfigError, "delta = 0.02 would let a run publish the data of one of 100"),
        (OwnTrain, {}, AppError, "OwnTrain.train makes its own steps"),
    ],
)
async def test_runs_that_cannot_protect_samples_are_refused(kind, settings, error, message):
    async with in_process_cluster(2) as cluster:
        app = kind(cluster)
        vars(app).update(settings)
        with pytest.raises(error, match=message):
            await app.train_sync()
    assert not app.history
