"""Tests of Sandblaster L-BFGS with a Keras app on real workers: full gradients, kills, evaluations and refused settings."""

import os
import signal

import numpy as np
import pytest

from ddlf import Cluster
from ddlf.errors import ConfigError
from ddlf.events import Warned
from tests.training.models import Blobs

pytestmark = [pytest.mark.slow, pytest.mark.asyncio, pytest.mark.usefixtures("one_template")]


class Smooth(Blobs):
    """An app without randomness."""

    mode, master_epochs, slots, threads, evaluate_every, tolerance = "lbfgs", 8, 3, 1, 4, 0
    batch_size, kind = 32, "float32"

    async def create_model(self):
        import keras

        keras.config.set_floatx(self.kind)
        await super().create_model()


def app_of(cluster, **settings):
    app = Smooth(cluster)
    vars(app).update(settings)
    return app


async def test_a_keras_model_is_minimized_and_a_killed_or_stopped_owner_of_the_shard_changes_no_bit():
    async with Cluster.local(3) as cluster:
        for settings, sentence in (
            ({"dropout": 0.3}, r"needs a loss without chance, but the same samples gave .*; remove dropout"),
            ({"norm": True}, r"the model changes .*moving_mean when it trains; freeze batch normalization"),
        ):
            with pytest.raises(ConfigError, match=sentence):
                await app_of(cluster, **settings).train_model()

        doubles = app_of(cluster, kind="float64", master_epochs=2, evaluate_every=0)
        await doubles.train_model()
        assert {w.dtype.name for w in doubles.model.get_weights()} == {"float64"}

        plain = app_of(cluster)
        await plain.train_model()
        losses = [record.loss for record in plain.history]
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] < 0.5 * losses[0]
        assert plain.ledger.is_exact(8)
        loss, _ = plain.model.evaluate(plain.x_train, plain.y_train, batch_size=203, verbose=0)
        assert losses[-1] == pytest.approx(loss, rel=1e-5)
        tested, _ = plain.model.evaluate(plain.x_test, plain.y_test, verbose=0)
        assert plain.history[-1].test["loss"] == pytest.approx(tested, rel=1e-5)

        killed, received = app_of(cluster), []
        killed.subscribe(received.append)

        async def kill(record):
            if record.version in (2, 5):
                worker = cluster.workers[0 if record.version == 2 else 1]
                if pid := (await worker.status()).executor_pid:
                    os.kill(pid, signal.SIGKILL if record.version == 2 else signal.SIGSTOP)

        killed.on_round = kill
        await killed.train_model()
        for plain_weight, killed_weight in zip(plain.model.get_weights(), killed.model.get_weights(), strict=True):
            assert np.array_equal(plain_weight, killed_weight)
        lost = [event.why for event in received if isinstance(event, Warned) and "which is lost" in event.why]
        assert [reason.split(", which")[0] for reason in lost] == [
            "shard 1 of 1 was on worker 1",
            "shard 1 of 1 was on worker 2",
        ]
