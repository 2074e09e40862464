"""Tests of losses that leave entries out: updates are weighted by the counted entries."""

import numpy as np
import pytest

from ddlf.errors import ConfigError
from ddlf.training.slot.keras_model import entries_of
from tests.training.models import Blobs, app, distance


class Left:
    """A stand-in for the loss ``Masked``."""

    def entries_in(self, labels):
        return (labels != -1).sum(axis=1)


class Model:
    def __init__(self, loss):
        self.loss = loss


class Labels:
    y_train = np.array([[1, -1, 2], [-1, -1, -1], [0, 0, 0]])

    def __init__(self, loss):
        self.model = Model(loss)


def test_each_sample_has_the_entries_that_count():
    assert entries_of(Labels(Left())).tolist() == [2, 0, 3]
    assert not len(entries_of(Labels("mse")))


def test_several_outputs_are_refused_because_they_would_need_several_merges():
    with pytest.raises(ConfigError, match="with several outputs each has its own"):
        entries_of(Labels([Left(), "mse"]))


class Sequences(Blobs):
    """Points with labels for each of 3 copies. Half of the samples have one label, and the other half have three."""

    batch_size, samples, learning_rate, exchange = 16, 64, 0.1, "gradient"

    async def load_dataset(self):
        await super().load_dataset()
        labels = np.repeat(self.y_train.argmax(1)[:, None], 3, 1)
        labels[::3, 1:] = -1
        labels[1::5] = -1
        self.y_train = labels
        del self.x_test, self.y_test

    async def create_model(self):
        import keras

        from ddlf.extras.stabilisers import Masked

        layers = keras.layers
        self.model = keras.Sequential(
            [keras.Input((8,)), layers.RepeatVector(3), layers.Dense(4, activation="softmax", name="out")]
        )
        self.model.compile(keras.optimizers.SGD(self.learning_rate), Masked("sparse_categorical_crossentropy"))


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
async def test_the_mean_over_slots_is_that_of_one_process_with_all_entries(two_workers):
    two_slots = app(two_workers, Sequences, slots=2, master_epochs=3)
    await two_slots.train_model()
    one_slot = app(two_workers, Sequences, slots=1, batch_size=32, master_epochs=3)
    await one_slot.train_model()
    assert distance(two_slots.model.get_weights(), one_slot.model.get_weights()) < 1e-6


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
async def test_frozen_layers_keep_their_bits_and_do_not_come_back(two_workers):
    class Frozen(Blobs):
        """Two large layers of three are frozen. They have more than 75 % of the values."""

        master_epochs = 2

        async def create_model(self):
            import keras

            dense = keras.layers.Dense
            self.model = keras.Sequential(
                [
                    keras.Input((8,)),
                    dense(200, "relu", name="one"),
                    dense(200, "relu", name="two"),
                    dense(40, "relu", name="three"),
                    dense(4, "softmax", name="four"),
                ]
            )
            optimizer = keras.optimizers.Adam(0.01)
            if self.how == "factors":
                from ddlf.extras.stabilisers import Multipliers

                optimizer = Multipliers(optimizer, {"one": 0, "two": 0})
            for layer in self.model.layers[:2]:
                layer.trainable = self.how != "trainable"
            self.model.compile(optimizer, "categorical_crossentropy")

    back = {}
    for how in ("none", "trainable", "factors"):
        run = app(two_workers, Frozen, how=how, slots=2)
        await run.prepare()
        before = run.model.get_weights()
        records = await run.train_model()
        stayed = [a.tobytes() == b.tobytes() for a, b in zip(before, run.model.get_weights(), strict=True)]
        assert stayed == [how != "none"] * 4 + [False] * 4
        back[how] = records[-1].bytes_back
    assert max(back["trainable"], back["factors"]) < 0.3 * back["none"]
