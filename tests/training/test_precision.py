"""Tests of mixed precision: weights stay float32, the scale of the loss survives rounds, and overflow is reported."""

import numpy as np
import pytest

from ddlf.errors import AppError, ConfigError
from ddlf.events import GradientsOverflowed
from ddlf.monitor.terminal.lines import line
from ddlf.testing import FaultPlan, in_process_cluster
from tests.training.models import Blobs, app, equal, small_model, with_model

GROWTH = 5
"""After so many steps without an overflow the scale doubles, so it changes in each round."""


def app_with_scale(scale=2.0**5):
    def build(self):
        import keras

        model = small_model()
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.Adam(0.01), initial_scale=scale, dynamic_growth_steps=GROWTH
        )
        model.compile(optimizer, "categorical_crossentropy", metrics=["accuracy"])
        return model

    return with_model(build)


def scales(trained):
    """Return for each slot the counter of good steps and the scale of the loss, after the last round."""
    return [tuple(float(array) for array in state["optimizer"][2:4]) for state in trained.run_context.progress.states]


def run_of(cluster, epochs=4, app_class=None, **settings):
    return app(
        cluster,
        app_class or app_with_scale(),
        precision="mixed_float16",
        batch_size=16,
        slots=2,
        master_epochs=epochs,
        **settings,
    )


async def test_scale_of_the_loss_survives_rounds():
    async with in_process_cluster(1) as cluster:
        uninterrupted = run_of(cluster)
        await uninterrupted.train_sync()
        steps = 4 * 7  # steps of a slot: 102 or 101 samples in batches of 16
        assert scales(uninterrupted) == [(steps % GROWTH, 2.0 ** (5 + steps // GROWTH))] * 2
        assert {array.dtype for array in uninterrupted.model.get_weights()} == {np.dtype("float32")}


@pytest.mark.slow
async def test_scale_of_the_loss_survives_a_kill_and_a_resume(tmp_path):
    async with in_process_cluster(2) as cluster:
        uninterrupted = run_of(cluster)
        await uninterrupted.train_sync()
        killed = run_of(cluster)
        async with FaultPlan().kill(worker=2, at_round=3).on(killed):
            await killed.train_sync()
        assert equal(killed.model.get_weights(), uninterrupted.model.get_weights())
        assert scales(killed) == scales(uninterrupted)
        first = run_of(cluster, epochs=2, checkpoint=tmp_path)
        await first.train_sync()
        resumed = run_of(cluster, resume=tmp_path)
        await resumed.train_sync()
        assert equal(resumed.model.get_weights(), uninterrupted.model.get_weights())
        assert scales(resumed) == scales(uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"exchange": "sharded"}, {"optimizer_state": "averaged"}, {"mode": "async"}])
async def test_float16_learns_with_other_training_settings(settings):
    settings = dict(settings)
    mode = settings.pop("mode", "sync")
    async with in_process_cluster(2) as cluster:
        trained = run_of(cluster, **settings)
        await (trained.train_async() if mode == "async" else trained.train_sync())
        assert trained.history[-1].metrics["loss"] < 0.8 * trained.history[0].metrics["loss"]
        assert {array.dtype for array in trained.model.get_weights()} == {np.dtype("float32")}
        assert all(scale > 2.0**5 for _, scale in scales(trained))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"exchange": "gradient"}, {"exchange": "sharded"}])
async def test_bfloat16_learns_with_each_exchange(settings):
    async with in_process_cluster(2) as cluster:
        trained = app(cluster, precision="mixed_bfloat16", optimizer="adam", learning_rate=0.01, **settings)
        await trained.train_sync()
        assert {array.dtype for array in trained.model.get_weights()} == {np.dtype("float32")}
        assert trained.history[-1].metrics["loss"] < trained.history[0].metrics["loss"]


@pytest.mark.asyncio(loop_scope="session")
async def test_bfloat16_learns_with_downpour(two_workers):
    trained = app(two_workers, precision="mixed_bfloat16", mode="downpour", learning_rate=0.01, master_epochs=3)
    await trained.train_model()
    assert {array.dtype for array in trained.model.get_weights()} == {np.dtype("float32")}
    assert (await trained.evaluate_model())["accuracy"] > 0.5


@pytest.mark.parametrize(
    ("mode", "settings", "sentence"),
    [
        ("train_downpour", {}, "precision='mixed_float16' scales the loss on each worker, but replicas push gradients"),
        ("train_sync", {"exchange": "gradient"}, "but with exchange='gradient' all workers take one step"),
        ("train_sync", {"split": "stages:2"}, "precision='mixed_float16' is not supported with split"),
    ],
)
async def test_float16_is_refused_where_no_scale_can_follow(mode, settings, sentence):
    async with in_process_cluster(2) as cluster:
        with pytest.raises(ConfigError, match=sentence):
            await getattr(app(cluster, precision="mixed_float16", **settings), mode)()


@pytest.mark.slow
async def test_overflow_in_all_steps_of_a_round_is_an_event():
    async with in_process_cluster(1) as cluster:
        trained, received = app(cluster, app_with_scale(2.0**60), precision="mixed_float16", master_epochs=2), []
        trained.subscribe(received.append)
        await trained.train_sync()
        overflows = [event for event in received if isinstance(event, GradientsOverflowed)]
        assert overflows[0] == GradientsOverflowed(round=1, slot=1, worker=1, steps=13, scale=2.0**47)
        assert line(overflows[0]) == (
            "overflow  slot 1 on worker 1 has learned nothing: float16 overflowed in all 13 steps of its round; the loss is now "
            "scaled by 1.40737e+14"
        )


class Huge(Blobs):
    """An app with inputs that float16 cannot represent."""

    async def load_dataset(self):
        await super().load_dataset()
        self.x_train = self.x_train * 1e6


async def test_overflow_without_a_scale_is_an_error():
    async with in_process_cluster(1) as cluster:
        trained = app(cluster, Huge, precision="mixed_float16", master_epochs=5)
        with pytest.raises(
            AppError,
            match="float16 overflows in all steps of round 2 of slot 1, even without a scaled loss; use precision='mixed_bf",
        ):
            await trained.train_sync()
