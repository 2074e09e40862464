"""What the training loops promise to those who hook into them, on workers in this process: no test here waits for one to start."""

import keras
import numpy as np
import pytest
import pytest_asyncio

from ddlf.errors import AppError
from ddlf.testing import in_process_cluster
from tests.training.models import Blobs, equal

pytestmark = pytest.mark.asyncio(loop_scope="session")

both_modes = pytest.mark.parametrize("mode", ["sync", "async"])


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def cluster():
    async with in_process_cluster(2) as workers:
        yield workers


# -- weights of every type ---------------------------------------------------------------------------------------------


@both_modes
async def test_weights_of_bfloat16_are_trained(cluster, mode):
    class App(Blobs):
        async def create_model(self):
            import keras

            layers = [keras.Input((8,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(4, "softmax")]
            self.model = keras.Sequential(
                [
                    layers[0],
                    *(keras.layers.Dense.from_config({**x.get_config(), "dtype": "bfloat16"}) for x in layers[1:]),
                ]
            )
            self.model.compile(keras.optimizers.SGD(0.5), "categorical_crossentropy")

    trained = App(cluster)
    await trained.prepare()
    before = trained.model.get_weights()
    records = await getattr(trained, f"train_{mode}")(master_epochs=3)
    assert all(array.dtype == "bfloat16" for array in before)
    assert not any(equal([a], [b]) for a, b in zip(before, trained.model.get_weights(), strict=True))
    assert records[-1].loss < records[0].loss


class Masked(keras.layers.Layer):
    """Multiplies by a mask of booleans, a weight that is not trained, and counts its calls in another."""

    kind = "bool"

    def __init__(self, trainable_mask=False, kind="bool", **options):
        super().__init__(**options)
        self.mask = self.add_weight(
            shape=(8,), dtype=kind, initializer="ones", trainable=trainable_mask, name="mask", autocast=False
        )

    def call(self, x):
        return x * keras.ops.cast(self.mask, x.dtype)


def with_mask(**options):
    class App(Blobs):
        async def create_model(self):
            import keras

            self.model = keras.Sequential([keras.Input((8,)), Masked(**options), keras.layers.Dense(4, "softmax")])
            self.model.compile(keras.optimizers.SGD(0.05), "categorical_crossentropy")

    return App


@both_modes
async def test_boolean_weights_stay_what_they_are_and_the_others_train(cluster, mode):
    trained = with_mask()(cluster)
    records = await getattr(trained, f"train_{mode}")(master_epochs=2)
    assert records[-1].loss < records[0].loss
    assert np.all(trained.model.layers[0].mask.numpy())


async def test_a_weight_that_is_trainable_and_no_float_is_refused_by_name(cluster):
    with pytest.raises(AppError, match=r"'masked_?\d*/mask' is of type int32 and trainable, but only floats"):
        await with_mask(trainable_mask=True, kind="int32")(cluster).train_sync()
