"""Tests of Downpour SGD with a Keras app on real workers: exact counts, killed workers, NaN, and early stopping."""

import os
import signal

import numpy as np
import pytest

from ddlf import Cluster
from ddlf.algorithms.weights import digest
from ddlf.events import SlotStarted, Warned
from tests.training.models import Blobs, small_model

pytestmark = [pytest.mark.slow, pytest.mark.asyncio, pytest.mark.usefixtures("one_template")]


class Pushing(Blobs):
    """An app with 22 batches for each of 2 slots."""

    mode, master_epochs, slots, samples, batch_size = "downpour", 1, 2, 2 * 22 * 16, 16
    n_fetch, n_push, norm, dropout = 5, 4, True, 0.1


class Bad(Pushing):
    """An app whose model has a loss of NaN on worker 2."""

    norm, update_policy = False, "reject"

    async def create_model(self):
        import keras

        class Model(keras.Sequential):
            bad = False

            def compute_loss(self, *arguments, **named):
                loss = super().compute_loss(*arguments, **named)
                return loss * keras.ops.cast(np.nan, "float32") if self.bad else loss

        plain = small_model(self.learning_rate)
        self.model = Model(plain.layers)
        self.model.compile(keras.optimizers.SGD(self.learning_rate), "categorical_crossentropy", metrics=["accuracy"])

    def train(self, weights, worker_epochs, batch_size):
        if self.model.bad != (self.worker.id == 2):
            self.model.bad, self.model.train_function = self.worker.id == 2, None
        self.model.set_weights(weights)
        metrics = self.replica.fit(worker_epochs, batch_size)
        return [np.zeros_like(w) for w in weights], metrics


def app_of(kind, cluster, **settings):
    app = kind(cluster)
    vars(app).update(settings)
    return app


async def test_counts_are_exact_with_one_and_several_replicas_in_a_slot():
    async with Cluster.local(2) as cluster:
        for replicas in (None, 3):
            app = app_of(Pushing, cluster, replicas=replicas)
            await app.train_model()
            assert app.ledger.is_exact(1)
            if replicas is None:
                assert [(len(record.fetches), len(record.pushes)) for record in app.history] == [(5, 6), (5, 6)]


async def test_downpour_survives_kills_and_nan_and_stops_early():
    async with Cluster.local(3) as cluster:
        plain = app_of(Pushing, cluster, slots=3, master_epochs=6, norm=False)
        await plain.train_model()
        accuracy = (await plain.evaluate_model())["accuracy"]
        app, received = app_of(Bad, cluster, slots=3, master_epochs=6), []
        app.subscribe(received.append)

        async def kill(record):
            if record.version == 6:
                os.kill((await cluster.workers[2].status()).executor_pid, signal.SIGKILL)

        app.on_round = kill
        await app.train_model()
        assert (await app.evaluate_model())["accuracy"] > accuracy - 0.02
        assert sum(record.recomputed for record in app.history) == 1
        assert any("NaN" in verdict for record in app.history for verdict in record.verdicts)
        moved = [event.why for event in received if isinstance(event, Warned) and event.about == "shards"]
        assert moved[0].startswith("shard 3 of 3 was on worker 3, which is lost")
        assert moved[0].endswith("worker 1 continues with its copy")
        assert not any("are lost" in verdict for record in app.history for verdict in record.verdicts)

        import keras

        class Seen(keras.callbacks.Callback):
            epochs = None

            def on_epoch_end(self, epoch, logs=None):
                self.epochs = [*(self.epochs or []), self.model.get_weights()]

        recorder, early = Seen(), keras.callbacks.EarlyStopping("loss", 10.0, patience=2, restore_best_weights=True)
        stopped = app_of(Pushing, cluster, slots=3, master_epochs=30, norm=False, callbacks=[recorder, early])
        await stopped.train_model()
        assert len(recorder.epochs) == 3
        assert digest(stopped.model.get_weights()) == digest(recorder.epochs[0])

        dedicated, received = (
            app_of(Pushing, cluster, slots=None, shard_workers=1, shard_cut="layers", master_epochs=6),
            [],
        )
        dedicated.subscribe(received.append)

        async def kill_the_server(record):
            if record.version == 3:
                os.kill((await cluster.workers[2].status()).executor_pid, signal.SIGKILL)

        dedicated.on_round = kill_the_server
        await dedicated.train_model()
        assert dedicated.ledger.is_exact(6)
        assert {event.worker for event in received if isinstance(event, SlotStarted)} == {1, 2}
        warnings = [event.why for event in received if isinstance(event, Warned) and event.about == "shards"]
        assert warnings[0].startswith("shard 1 of 1 was on worker 3, which is lost")
        assert (await dedicated.evaluate_model())["accuracy"] > accuracy - 0.02
