"""Tests of the moving statistics of merged weights: workers measure them, the master merges them."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from ddlf.errors import AppError, BadUpdate, ConfigError, WorkerLost
from ddlf.testing import FakeCluster, FakeRun, FakeWorker
from ddlf.training.slot.batchnorm import measured, moving

START = {
    "dense/kernel": np.ones((4, 3), "f4"),
    "norm/gamma": np.ones(3, "f4"),
    "norm/mean": np.full(3, 5, "f4"),
    "norm/variance": np.full(3, 2, "f4"),
}
NORMAL = {
    "start": START,
    "frozen": frozenset(["norm/mean", "norm/variance"]),
    "norms": frozenset(["norm/gamma", "norm/mean", "norm/variance"]),
    "batchnorm": "recalibrated",
    "slots": 3,
    "master_epochs": 2,
}


class Known(FakeWorker):
    """Measures the mean and the variance of the numbers of a slot's samples."""

    def measure(self, task, weights):
        rows = task.indices.astype("f8")
        return [np.full(3, rows.mean(), "f4"), np.full(3, rows.var(), "f4")]


def run_of(kind, workers=3, **settings):
    cluster = FakeCluster()
    cluster.workers = [kind(number) for number in range(1, workers + 1)]
    return FakeRun(cluster, **{**NORMAL, **settings})


async def test_statistics_are_merged_by_samples_over_the_round():
    run = run_of(Known)
    await run.train_model()
    tasks = [task for worker in run.cluster.workers for verb, task, *_ in worker.asked if verb == "measure"]
    assert len(tasks) == 6  # after each of two merges, by each of three slots
    last = [task.indices.astype("f8") for task in tasks if task.round == 1]
    assert sorted(np.concatenate(last)) == list(range(203))
    mean, variance = run.model.get_weights()[2:]
    assert np.allclose(mean, np.mean(np.arange(203)), rtol=1e-6)
    assert np.allclose(variance, sum(len(rows) * rows.var() for rows in last) / 203, rtol=1e-6)


async def test_a_robust_merge_applies_to_statistics_too():
    class Wrong(Known):
        def measure(self, task, weights):
            statistics = super().measure(task, weights)
            return [statistic * 1e6 for statistic in statistics] if self.id == 2 else statistics

    run, plain = run_of(Wrong, merge="median"), run_of(Wrong)
    await run.train_model()
    await plain.train_model()
    assert run.model.get_weights()[2].max() < 203 < plain.model.get_weights()[2].max()


async def test_a_worker_that_is_lost_while_it_measures_changes_no_bit():
    lost = []

    class Losing(FakeWorker):
        def measure(self, task, weights):
            if not lost:
                lost.append(self.id)
                self.lost = True
                raise WorkerLost("it was lost", worker=self.name)
            return super().measure(task, weights)

    bits = []
    for kind in (FakeWorker, Losing):
        run = run_of(kind, weights_codec="delta:int8")
        await run.train_model()
        bits.append(b"".join(array.tobytes() for array in run.model.get_weights()))
    assert lost
    assert bits[0] == bits[1]


async def test_statistics_with_nan_end_the_run_and_name_the_weight():
    class Broken(Known):
        def measure(self, task, weights):
            mean, variance = super().measure(task, weights)
            return [mean, variance * np.nan if self.id == 2 else variance]

    with pytest.raises(BadUpdate, match="norm/variance"):
        await run_of(Broken).train_model()


@pytest.mark.parametrize("norms", [frozenset(), frozenset(["norm/gamma"])])
async def test_a_model_without_moving_statistics_refuses_to_recalibrate_them(norms):
    with pytest.raises(ConfigError, match="batchnorm='recalibrated' has no effect: the model has no trained layer"):
        await run_of(FakeWorker, norms=norms).train_model()


class Layer:
    """Moves its statistics towards the statistics of the batch in training, like ``BatchNormalization`` of Keras."""

    def __init__(self, trainable=True):
        self.trainable, self.momentum = trainable, 0.99
        self.moving_mean, self.moving_variance = Weight(), Weight()
        self.non_trainable_weights = [self.moving_mean, self.moving_variance]

    def __call__(self, x):
        for weight, now in ((self.moving_mean, x.mean(0)), (self.moving_variance, x.var(0))):
            weight.value = weight.value * self.momentum + now * (1 - self.momentum)


Layer.__name__ = "BatchNormalization"


class Weight:
    dtype = "float32"
    value = np.zeros(2)


class Model:
    """A model with a trained and a frozen layer."""

    def __init__(self):
        self.layers = [Layer(), Layer(trainable=False)]
        self.weights = [weight for layer in self.layers for weight in layer.non_trainable_weights]

    def _flatten_layers(self):
        return self.layers

    def set_weights(self, weights):
        for weight, value in zip(self.weights, weights, strict=True):
            weight.value = value

    def __call__(self, inputs, training):
        assert training
        self.layers[0](inputs)


@pytest.fixture
def no_keras(monkeypatch):
    ops = SimpleNamespace(convert_to_numpy=lambda weight: weight.value)
    monkeypatch.setitem(sys.modules, "keras", SimpleNamespace(ops=ops))


def test_statistics_are_means_of_batches_and_keep_the_momentum(no_keras):
    random, model = np.random.default_rng(3), Model()
    batches = [random.normal(size=(n, 2)) for n in (8, 8, 3)]
    statistics = measured(model, [np.full(2, 9.0) for _ in range(4)], [(x, len(x)) for x in batches])
    expected = [sum(len(x) * a(x) for x in batches) / 19 for a in (lambda x: x.mean(0), lambda x: x.var(0))]
    assert moving(model) == (0, 1)
    for a, b in zip(statistics, expected, strict=True):
        assert np.allclose(a, b, rtol=0, atol=1e-12)
    assert [layer.momentum for layer in model.layers] == [0.99, 0.99]


def test_a_model_whose_call_fails_is_named_and_keeps_its_momentum(no_keras, monkeypatch):
    model = Model()

    def call(inputs, training):
        raise NotImplementedError

    monkeypatch.setattr(Model, "__call__", lambda self, inputs, training: call(inputs, training))
    with pytest.raises(AppError, match="it has no call"):
        measured(model, [np.zeros(2) for _ in range(4)], [(np.zeros((1, 2)), 1)])
    assert model.layers[0].momentum == 0.99
