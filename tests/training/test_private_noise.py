"""Tests of clipped and noised updates of private workers: the mathematics, and the metrics that records leave out."""

import numpy as np
import pytest

from ddlf import events
from ddlf.algorithms.partition import shuffled
from ddlf.testing import in_process_cluster
from tests.training.models import Quick, blobs
from tests.training.private_apps import SIZES, Private, private_samples


class Noised(Private):
    """Two rounds with negligible noise."""

    train = Quick.train

    master_epochs = 2
    update_clip = 0.1
    noise_multiplier = 1e-9


def clipped_averaging(app, weights, rounds):
    """Return the weights after adding means of clipped updates. Each worker counts once."""
    for round in range(rounds):
        total = [np.zeros(w.shape) for w in weights]
        for number in SIZES:
            x, y = private_samples(number)
            order = shuffled(len(x), 0, round)
            app.model.set_weights(weights)
            for begin in range(0, len(x), app.batch_size):
                batch = order[begin : begin + app.batch_size]
                app.model.train_on_batch(x[batch], y[batch])
            update = [
                before - after.astype(float) for before, after in zip(weights, app.model.get_weights(), strict=True)
            ]
            norm = np.sqrt(sum(np.sum(u**2) for u in update))
            assert norm > app.update_clip
            total = [t + u * app.update_clip / norm for t, u in zip(total, update, strict=True)]
        weights = [(w - t / len(SIZES)).astype("f4") for w, t in zip(weights, total, strict=True)]
    return weights


async def test_weights_are_the_mean_of_clipped_updates_and_records_have_no_metrics():
    async with in_process_cluster(3) as cluster:
        app = Noised(cluster)
        await app.prepare()
        first = app.model.get_weights()
        history = await app.train_sync()
        trained = app.model.get_weights()
        expected = clipped_averaging(app, first, 2)
    assert max(np.abs(a - b).max() for a, b in zip(trained, expected, strict=True)) < 1e-6
    assert all(record.metrics.keys() == {"epsilon"} and not record.test for record in history)


class Loud(Noised):
    """One round in which noise is the only change. The master has test data."""

    master_epochs = 1
    evaluate_every = 1
    update_clip = 1e-3
    noise_multiplier = 3e3

    async def load_test_dataset(self):
        self.x_test, self.y_test = blobs(20, seed=5)


async def test_the_noise_of_a_release_has_the_stated_deviation_and_differs_with_equal_seeds():
    noises = []
    async with in_process_cluster(3) as cluster:
        for _ in range(2):
            app = Loud(cluster)
            await app.prepare()
            first = app.model.get_weights()
            history = await app.train_sync()
            after = app.model.get_weights()
            noises.append(np.concatenate([(a - b).ravel() for a, b in zip(after, first, strict=True)]))
            assert set(history[-1].test) == {"loss", "accuracy"}  # the master evaluates its own data
    size = noises[0].size
    for noise in noises:  # 3e3 times 1e-3, divided by 3 workers
        assert noise.std() == pytest.approx(1.0, abs=5 / np.sqrt(2 * size))
    assert abs(np.corrcoef(*noises)[0, 1]) < 5 / np.sqrt(size)


async def test_weights_that_are_not_trained_stay_and_are_named():
    class Frozen(Noised):
        train = Private.train
        master_epochs = 1

        async def create_model(self):
            await super().create_model()
            self.model.layers[-1].trainable = False
            self.model.compile("sgd", self.model.loss, metrics=["accuracy"])

    received = []
    async with in_process_cluster(2) as cluster:
        app = Frozen(cluster)
        app.subscribe(received.append)
        await app.prepare()
        first = app.model.get_weights()
        await app.train_sync()
        after = app.model.get_weights()
    np.testing.assert_array_equal(after[-1], first[-1])
    assert not np.array_equal(after[0], first[0])
    [line] = [event.why for event in received if isinstance(event, events.Warned) and event.about == "noise"]
    assert "left out of the noised sum" in line
