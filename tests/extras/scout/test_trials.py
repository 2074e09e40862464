"""Tests of trials on one worker, without a cluster."""

from dataclasses import replace

import numpy as np
import pytest

from ddlf.data.array_cache import ArrayCache
from ddlf.extras.scout.trials import RateFactor, TrialReplica, highest_rate
from ddlf.testing import FakeWorker
from tests.training.models import Blobs, app, blobs, small_model
from tests.training.slot.replicas import task


class Validated(Blobs):
    async def load_dataset(self):
        await super().load_dataset()
        self.x_val, self.y_val = blobs(50, seed=2)


@pytest.fixture(params=["held out", pytest.param("validation data", marks=pytest.mark.slow)])
def trials(request):
    """Return a function that runs a trial of some steps at a multiple of the rate and returns the loss, and its replica."""
    held_out = np.arange(160, 203) if request.param == "held out" else None
    replica = TrialReplica(FakeWorker(2), app(None, Blobs if held_out is not None else Validated))
    replica.begin()
    replica.load_data({}, ArrayCache())
    replica.build()
    first = replica.app.model.get_weights()

    def loss(factor, steps):
        request_task = task(replica, weights=first, indices=np.arange(16 * steps))
        request_task = replace(
            request_task, keep=(), back=(), state={}, steps=(0, steps, steps, steps) if steps else ()
        )
        return replica.tried(request_task.to_message(), factor, 0, held_out)["loss"]

    return loss, replica


def test_a_trial_does_not_affect_the_next_one(trials):
    loss, _ = trials
    alone = [loss(0.0, 0), loss(2.0, 3), loss(4.0, 3)]
    assert len(set(alone)) == 3
    assert [loss(4.0, 3), loss(2.0, 3), loss(0.0, 0)] == alone[::-1]


def test_the_evaluation_is_compiled_once(trials):
    loss, replica = trials
    loss(0.0, 0)
    compiled = replica.app.model.test_function
    loss(2.0, 3)
    assert replica.app.model.test_function is compiled


def test_the_rate_of_a_model_in_a_strategy_of_tensorflow_is_multiplied():
    import tensorflow as tf

    with tf.distribute.MirroredStrategy(["/cpu:0"]).scope():
        model = small_model(0.25, optimizer="adam")
    assert highest_rate(model, 10) == 0.25
    RateFactor(model).set(2.0)
    assert float(model.optimizer._get_current_learning_rate()) == 0.5
