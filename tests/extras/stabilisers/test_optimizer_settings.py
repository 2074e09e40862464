"""Tests of the settings ``schedule``, ``clip`` and ``multipliers`` in optimizers and in Downpour, and of a plateau on the master."""

import numpy as np
import pytest

from ddlf.errors import AppError, ConfigError
from ddlf.extras.stabilisers.optimizer_settings import stabilised
from ddlf.training.slot.optimizers import chain
from tests.training.models import Blobs, app, distance, small_model

pytestmark = pytest.mark.slow


def named(model):
    return [type(optimizer).__name__ for optimizer in chain(model.optimizer)]


@pytest.mark.parametrize(
    ("rule", "kinds"),
    [
        ("freeze:0.4", ["Multipliers", "SGD"]),
        ("freeze:0.4,0", ["Unfreezing", "SGD"]),
        ("freeze:0", ["SGD"]),
        ("dense_1=0.5", ["Multipliers", "SGD"]),
        ("none", ["SGD"]),
    ],
)
def test_multipliers_wrap_the_optimizer(rule, kinds):
    from ddlf.training.slot.build import fresh_names

    with fresh_names():
        model = small_model()
    stabilised(model, None, None, rule)
    assert named(model) == kinds
    stabilised(model, None, None, rule)
    assert named(model) == kinds


def test_all_settings_wrap_one_optimizer_inside_the_scaling_of_the_loss():
    import keras

    model = small_model()
    model.optimizer = keras.optimizers.LossScaleOptimizer(model.optimizer)
    stabilised(model, "cosine", "agc", "freeze:0.4")
    assert named(model) == ["LossScaleOptimizer", "Multipliers", "AGC", "SGD"]


@pytest.mark.parametrize(
    ("rule", "kind", "sentence"),
    [
        ("first=0.1", ConfigError, "a factor is given for 'first', but the model trains no such layer"),
        ("freeze:1", ConfigError, "all weights are frozen"),
    ],
)
def test_multipliers_of_unknown_layers_are_refused_at_once(rule, kind, sentence):
    with pytest.raises(kind, match=sentence):
        stabilised(small_model(), None, None, rule)


def test_multipliers_cannot_be_given_twice():
    from ddlf.extras.stabilisers import Multipliers

    model = small_model()
    model.optimizer = Multipliers(model.optimizer, {"dense": 0.5})
    with pytest.raises(AppError, match="has some already, of Multipliers"):
        stabilised(model, None, None, "freeze:0.4")
    model = small_model()
    stabilised(model, None, None, "freeze:0.4")
    with pytest.raises(ConfigError, match=r"multipliers='freeze:0\.4', and now they are schedule='cosine'"):
        stabilised(model, "cosine", None)


# -- Downpour ------------------------------------------------------------------------------------------------------------


def test_a_replica_of_downpour_clips_by_agc_like_the_optimizer():
    import keras

    from ddlf.extras.stabilisers import AGC
    from ddlf.training.strategies.downpour.replica import Stepper

    x, y = np.ones((16, 8), "float32") * 50, np.eye(4, dtype="float32")[np.arange(16) % 4]
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(0)
        models.append(small_model())
        models[-1].optimizer = AGC(models[-1].optimizer, share=0.001)
    plain, replica = models
    before = replica.get_weights()
    stepper = Stepper(replica)
    for model in models:
        model.train_on_batch(x, y)
    assert distance(plain.get_weights(), replica.get_weights()) < 1e-6
    unpushed = stepper.rows.arrays(stepper.unpushed(), stepper.rows.trained)
    for old, now, gradient in zip(before, replica.get_weights(), unpushed, strict=True):
        assert old - 0.05 * gradient == pytest.approx(now, abs=1e-6)
    assert np.abs(unpushed[0]).max() < 0.01 < np.abs(x).max()
    assert stepper.steps == 1


@pytest.mark.parametrize(
    ("name", "more", "reason"),
    [
        ("RollingClip", (), "the replicas of a worker share one optimizer"),
        ("Multipliers", ({"dense": 0.5},), "the rule of the shards decides how far"),
        ("Unfreezing", ([{"dense": 0.0}],), "the rule of the shards decides how far"),
    ],
)
def test_settings_that_downpour_does_not_support_are_refused_with_the_reason(name, more, reason):
    from ddlf.extras import stabilisers
    from ddlf.training.strategies.downpour.replica import check_optimizer

    with pytest.raises(ConfigError, match=f"mode='downpour' does not support {name}.*{reason}"):
        check_optimizer(getattr(stabilisers, name)(small_model().optimizer, *more))


# -- a plateau -----------------------------------------------------------------------------------------------------------


class Still(Blobs):
    """An app with a loss that never decreases."""

    learning_rate, master_epochs, slots, rate_decay = 0.5, 5, 2, "plateau:factor=0.5,patience=1"
    stop_at = None

    def train(self, weights, worker_epochs, batch_size):
        rate = float(np.asarray(self.model.optimizer.learning_rate))
        return [np.zeros_like(array) for array in weights], {"loss": 1.0, "rate": rate}

    def on_round(self, record):
        if record.round == self.stop_at:
            self.stop_training()


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_plateau_of_the_merged_loss_lowers_the_rate_of_all_slots(two_workers, tmp_path, mode):
    history = await app(two_workers, Still, mode=mode).train_model()
    rates = [record.metrics["learning_rate"] for record in history if "learning_rate" in record.metrics]
    assert rates == [0.5, 0.5, 0.25, 0.125, 0.0625]
    if mode == "sync":
        assert [record.metrics["rate"] for record in history] == rates
        for stop_at in (2, None):
            parts = app(two_workers, Still, checkpoint=tmp_path, resume="auto", stop_at=stop_at)
            await parts.train_model()
        assert [record.metrics for record in parts.history] == [record.metrics for record in history]
