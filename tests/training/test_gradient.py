"""Tests of the gradient exchange on real workers: it takes the steps of one process, also with losses and resumes."""

import numpy as np
import pytest

from apps.lstm import LSTM
from apps.mlp import MLP
from ddlf.algorithms.partition import shuffled
from tests.training.models import WIDE, Blobs, app, blobs, distance, equal, small_model
from tests.training.test_failures import kill_executor, kinds, with_faults
from tests.training.test_resume import Interrupted, stop_after

pytestmark = pytest.mark.asyncio(loop_scope="session")


class Clipped(Blobs):
    """Its optimizer uses all options that a step may depend on."""

    exchange = "gradient"
    class_weight = {0: 3.0}  # noqa: RUF012

    async def create_model(self):
        self.model = clipped(width=self.width, norm=self.norm, dropout=self.dropout)


def clipped(**options):
    import keras

    model = small_model(**options)
    rate = keras.optimizers.schedules.ExponentialDecay(0.01, 5, 0.5)
    optimizer = keras.optimizers.AdamW(rate, weight_decay=0.1, global_clipnorm=0.1)
    model.compile(optimizer, "categorical_crossentropy", metrics=["accuracy"])
    return model


@pytest.mark.slow
async def test_two_slots_take_the_steps_of_one_process_with_the_double_batch(two_workers):
    import keras

    trained = app(two_workers.options(workers=[1]), Clipped, slots=2)
    await trained.train_model()
    keras.utils.set_random_seed(0)
    plain, (x, y) = clipped(), blobs(203)
    for epoch in range(2):
        order = shuffled(203, 0, epoch)
        plain.fit(x[order], y[order], batch_size=32, shuffle=False, verbose=0, class_weight={0: 3.0})
    assert distance(trained.model.get_weights(), plain.get_weights()) < 1e-6
    assert len(trained.history) == trained.model.optimizer.iterations == 2 * 7
    assert trained.ledger.is_exact(2)
    assert {record.samples for record in trained.history} == {32, 11}


class Images:
    """Random images of the size of MNIST, for the models of the study."""

    shape = (28, 28, 1)
    exchange, verbose, master_epochs, batch_size = "gradient", False, 2, 100

    async def load_dataset(self):
        chance = np.random.default_rng(0)
        self.x_train = chance.random((600, *self.shape), "float32")
        self.y_train = np.eye(10, dtype="float32")[chance.integers(0, 10, 600)]


class ImagesMLP(Images, MLP):
    pass


class ImagesLSTM(Images, LSTM):
    shape = (28, 28)


@pytest.mark.slow
@pytest.mark.parametrize("study", [ImagesMLP, ImagesLSTM])
async def test_two_towers_of_100_samples_equal_one_batch_of_200(two_workers, study):
    import keras

    towers = app(two_workers, study)
    await towers.train_model()
    keras.utils.set_random_seed(0)
    plain = study(None)
    await plain.load_dataset()
    await plain.create_model()
    begin = plain.model.get_weights()
    for epoch in range(2):
        order = shuffled(600, 0, epoch)
        plain.model.fit(plain.x_train[order], plain.y_train[order], batch_size=200, shuffle=False, verbose=0)
    assert len(towers.history) == 2 * 3
    assert distance(towers.model.get_weights(), plain.model.get_weights()) < 1e-6
    assert distance(begin, plain.model.get_weights()) > 1e-3


@pytest.mark.slow
async def test_losses_and_a_resume_within_an_epoch_change_no_bit(two_workers, tmp_path):
    options = dict(app_class=Clipped, norm=True, dropout=0.3, width=WIDE, codec="float16", slots=3, master_epochs=3)
    undisturbed = app(two_workers, **options)
    await undisturbed.train_model()
    lost = with_faults(app(two_workers, checkpoint=tmp_path, **options), {(2, 1): kill_executor(two_workers, 1)})
    with pytest.raises(Interrupted):
        await stop_after(lost, 7).train_model()
    assert "lost" in kinds(lost)
    resumed = app(two_workers.options(workers=[2]), checkpoint=tmp_path, resume="auto", **options)
    await resumed.train_model()
    assert len(resumed.history) == len(undisturbed.history) == 3 * 5
    assert equal(resumed.model.get_weights(), undisturbed.model.get_weights())
    assert resumed.ledger.is_exact(3)
