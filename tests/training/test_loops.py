"""What the training loops promise to those who hook into them, on workers in this process: no test here waits for one to start."""

import keras
import numpy as np
import pytest
import pytest_asyncio

from ddlf.algorithms.outer import Nesterov
from ddlf.errors import AppError
from ddlf.testing import in_process_cluster
from tests.training.models import Blobs, app, distance, equal

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


# -- settings that both modes use or refuse ------------------------------------------------------------------------------


async def test_an_outer_optimizer_of_asynchronous_training_keeps_its_state(cluster):
    outer = Nesterov(learning_rate=0.7, momentum=0.9)
    one = cluster.options(workers=[1])
    runs = []
    for mode in ("sync", "async"):  # with one slot they are the same
        trained = app(one, mode=mode, outer=outer, master_epochs=3)
        await trained.train_model()
        runs.append(trained.model.get_weights())
    assert equal(*runs)


async def test_each_asynchronous_update_moves_the_velocity_by_its_share(cluster):
    seen = []

    class Recorder:
        def init(self, weights):
            return Nesterov().init(weights)

        def update(self, state, weights, merged, trainable):
            after = Nesterov(learning_rate=0.5, momentum=0.8).update(state, weights, merged, trainable)
            seen.append((weights, merged, after[1]))
            return after

    trained = app(cluster, mode="async", outer=Recorder())
    await trained.train_model()
    assert len(seen) == 4
    velocity = [0 * array for array in seen[0][0]]
    for before, share, after in seen:
        velocity = [np.float32(0.8 * v + g) for v, g in zip(velocity, share, strict=True)]
        expected = [w - 0.5 * (g + 0.8 * v) for w, g, v in zip(before, share, velocity, strict=True)]
        assert distance(after, expected) < 1e-6
    assert equal(seen[-1][2], trained.model.get_weights())


async def test_evaluating_what_is_not_there_is_refused_before_anything_is_trained(cluster):
    class App(Blobs):
        evaluate_every = 1

        async def load_dataset(self):
            await super().load_dataset()
            del self.y_test

    trained = App(cluster)
    trained.on_event = lambda event: pytest.fail("training has begun")
    with pytest.raises(AppError, match="evaluate_every=1, but there is no y_test"):
        await trained.train_sync()
