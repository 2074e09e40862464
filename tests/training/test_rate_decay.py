"""Tests of the setting ``rate_decay`` on real workers."""

import numpy as np
import pytest

from ddlf.errors import AppError
from tests.training.models import Blobs, app, blobs, equal

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

RATE = 0.5


class Decays(Blobs):
    slots, master_epochs, learning_rate, rate_decay = 2, 5, RATE, "webnn:power=1,last=2"
    stop_at = None

    async def load_dataset(self):
        await super().load_dataset()
        self.x_val, self.y_val = blobs(60, seed=2)
        self.y_val[::5] = np.roll(
            self.y_val[::5], 1, 1
        )  # wrong labels, because the rate does not fall at full accuracy

    def on_round(self, record):
        if record.round == self.stop_at:
            self.stop_training()


def rates(records):
    """Return the rates by the formula, from the validations of each epoch."""
    results, now = [], RATE
    for t, _ in enumerate(records):
        accuracies = [record.metrics["val_accuracy"] for record in records[max(0, t - 1) : t + 1]]
        losses = [record.metrics["val_loss"] for record in records[max(0, t - 1) : t + 1]]
        low = RATE * (1 - (sum(accuracies) / len(accuracies)) ** (sum(losses) / len(losses) * t))
        now = low if 0 < low < now else now
        results.append(now)
    return results


async def test_all_slots_train_at_the_rate_that_the_validations_so_far_give(two_workers, tmp_path):
    uninterrupted = app(two_workers, Decays, checkpoint=tmp_path / "whole")
    records = await uninterrupted.train_sync()
    assert [record.metrics["learning_rate"] for record in records] == pytest.approx(rates(records), rel=1e-6)
    assert records[-1].metrics["learning_rate"] < RATE / 2
    one_worker = two_workers.options(workers=[1])  # one worker compiles once, and carries both slots
    usual = app(one_worker, Decays, slots=2, rate_decay="never")
    untouched = await usual.train_sync()
    assert "learning_rate" not in untouched[-1].metrics
    # The rate does not fall at the first validation, so results differ from the second one on.
    are_equal = [
        one_worker.metrics["val_loss"] == usual_record.metrics["val_loss"]
        for one_worker, usual_record in zip(records, untouched, strict=True)
    ]
    assert are_equal == [True, True, False, False, False]
    for stop_at in (3, None):
        parts = app(one_worker, Decays, slots=2, checkpoint=tmp_path / "parts", resume="auto", stop_at=stop_at)
        await parts.train_sync()
    assert parts.history.history == uninterrupted.history.history
    assert equal(parts.model.get_weights(), uninterrupted.model.get_weights())


async def test_in_asynchronous_training_the_rate_falls_once_an_epoch(two_workers):
    records = await app(two_workers, Decays, mode="async").train_model()
    with_rate = [record for record in records if "learning_rate" in record.metrics]
    assert len(with_rate) == 5
    assert [record.metrics["learning_rate"] for record in with_rate] == pytest.approx(rates(with_rate), rel=1e-6)


async def test_rate_decay_without_validation_data_or_accuracy_is_refused(two_workers):
    class NoValidation(Decays):
        async def load_dataset(self):
            await Blobs.load_dataset(self)

    class NoAccuracy(Decays):
        async def create_model(self):
            await super().create_model()
            self.model.compile("sgd", "categorical_crossentropy", metrics=["mse"])

    class Scheduled(Decays):
        async def create_model(self):
            import keras

            await super().create_model()
            rate = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
            self.model.compile(keras.optimizers.SGD(rate), "categorical_crossentropy", metrics=["accuracy"])

    refused = {
        NoValidation: r"rate_decay='webnn:power=1.0,last=2' looks at validation data, but there is no x_val; set x_val",
        NoAccuracy: r"looks at the accuracy of validation data, and the model reports none; .*metrics=\['accuracy'\]",
        Scheduled: r"sets the optimizer's learning rate, which follows a schedule; .*leave rate_decay='webnn",
    }
    for kind, sentence in refused.items():
        with pytest.raises(AppError, match=sentence):
            await kind(two_workers).train_sync()
