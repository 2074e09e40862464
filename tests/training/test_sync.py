"""Tests of synchronous training on real workers: its results equal the formulas."""

import numpy as np
import pytest

from ddlf.algorithms.partition import equal_sizes, partition, shuffled
from tests.training.models import Quick, app, blobs, distance, equal, small_model

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def one_worker(two_workers):
    return two_workers.options(workers=[1])


async def initial_weights(seed=0, **options):
    import keras

    keras.utils.set_random_seed(seed)
    return small_model(**options).get_weights()


@pytest.fixture(scope="module")
def fitted():
    """The weights after plain ``fit``. The tests share one compiled model, because SGD has no state."""
    plain = small_model()

    def fit(weights, x, y, batch_size=16):
        plain.set_weights(weights)
        plain.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)
        return plain.get_weights()

    return fit


async def test_one_slot_equals_plain_fit(one_worker, fitted):
    trained = app(one_worker, master_epochs=3)
    await trained.train_model()
    weights = await initial_weights()
    x, y = blobs(203)
    for number in range(3):
        order = shuffled(203, 0, number)
        weights = fitted(weights, x[order], y[order])
    assert distance(trained.model.get_weights(), weights) < 1e-6


@pytest.mark.slow
async def test_two_slots_of_one_batch_equal_one_process_with_double_batch(one_worker, fitted):
    trained = app(one_worker, slots=2, master_epochs=4, samples=64, batch_size=32)
    await trained.train_model()
    weights = await initial_weights()
    for _ in range(4):
        weights = fitted(weights, *blobs(64), batch_size=64)
    assert distance(trained.model.get_weights(), weights) < 1e-6


async def test_each_round_is_the_mean_of_local_training_weighted_by_samples(one_worker, fitted):
    trained = app(one_worker, slots=2, master_epochs=1)
    await trained.train_model()
    start = await initial_weights()
    x, y = blobs(203)
    total = [np.zeros(w.shape) for w in start]
    for part in partition(shuffled(203, 0, 0), equal_sizes(203, 2)):
        total = [t + len(part) / 203 * w for t, w in zip(total, fitted(start, x[part], y[part]), strict=True)]
    assert distance(trained.model.get_weights(), total) < 1e-6


@pytest.mark.slow
async def test_same_seed_gives_the_same_bits_for_any_assignment_of_slots(
    two_workers,
):
    swapped, one_worker = two_workers.options(workers=[2, 1]), two_workers.options(workers=[1])
    runs = []
    for cluster, seed in ((two_workers, 1), (swapped, 1), (one_worker, 2)):
        trained = app(cluster, slots=2, seed=seed, dropout=0.3, norm=True)
        await trained.train_model()
        runs.append(trained.model.get_weights())
    assert equal(runs[0], runs[1])
    assert not equal(runs[0], runs[2])


async def test_record_of_each_round_has_all_samples_and_its_cost(one_worker):
    trained = app(one_worker, slots=2)
    for record in await trained.train_model():
        assert record.samples == 203
        assert record.slot is None
        assert record.staleness == 0
        assert 0 < record.compute_s <= record.seconds
        assert record.transfer_s >= 0
        assert record.wait_s >= 0
        assert 0 < record.accuracy <= 1
        assert record.loss > 0
        assert str(record).startswith(f"round {record.round}/2 ")


async def test_only_the_own_partition_and_the_weights_travel(two_workers):
    trained = app(two_workers, Quick, samples=50_000, batch_size=1024)
    records = await trained.train_model()
    weights = sum(array.nbytes for array in trained.model.get_weights())
    for record in records[1:]:  # the first one also carries the code
        indices = 50_000 * 2  # uint16 indices of all partitions together
        assert indices + 2 * weights < record.bytes_out < indices + 2 * weights + 4000
        assert 2 * weights < record.bytes_back < 2 * weights + 4000


async def test_speed_balance_gives_the_faster_worker_more_samples(two_workers):
    class Uneven(Quick):
        balance = "speed"
        samples = 4000

        def train(self, weights, worker_epochs, batch_size):
            import time

            outcome = super().train(weights, worker_epochs, batch_size)
            time.sleep(len(self.indices) * (0.0004 if self.worker.id == 2 else 0.0001))
            self.worker.data.setdefault("sizes", []).append(len(self.indices))
            return outcome

    records = await Uneven(two_workers).train_sync(master_epochs=5)
    sizes = await two_workers.run_code("self.data.pop('sizes')")
    assert all(record.samples == 4000 for record in records)
    assert sizes[0][0] == sizes[1][0] == 2000
    assert sizes[0][-1] > 1.5 * sizes[1][-1]


async def test_coded_updates_and_weights_cost_fewer_bytes_and_train_as_well(two_workers):
    # The model is so large that numbers take more bytes than names.
    exact, coded = (app(two_workers, Quick, master_epochs=6, width=2000, learning_rate=0.005) for _ in range(2))
    coded.codec, coded.weights_codec = "int8", "delta:int8"
    exact_history = await exact.train_model()
    records = await coded.train_model()
    assert records[-1].bytes_out + records[-1].bytes_back < 0.4 * (
        exact_history[-1].bytes_out + exact_history[-1].bytes_back
    )
    assert 0 < records[-1].error < 0.2
    assert "update error" in str(records[-1])
    assert abs(records[-1].loss - exact_history[-1].loss) < 0.02


async def test_a_model_of_two_inputs_and_an_adam_optimizer_train(one_worker):
    trained = app(one_worker, slots=2, master_epochs=4)
    trained.load_dataset, trained.create_model = two_input_data.__get__(trained), two_input_model.__get__(trained)
    records = await trained.train_model()
    assert records[-1].loss < records[0].loss


async def two_input_data(self):
    x, self.y_train = blobs(200)
    self.x_train = {"left": x[:, :4], "right": x[:, 4:]}


async def two_input_model(self):
    import keras

    left, right = keras.Input((4,), name="left"), keras.Input((4,), name="right")
    joined = keras.layers.Concatenate()([left, right])
    self.model = keras.Model({"left": left, "right": right}, keras.layers.Dense(4, activation="softmax")(joined))
    self.model.compile("adam", "categorical_crossentropy")


@pytest.mark.parametrize("precision", ["mixed_bfloat16", pytest.param("mixed_float16", marks=pytest.mark.slow)])
async def test_mixed_precision_trains_and_weights_stay_float32(one_worker, precision):
    trained = app(one_worker, slots=2, precision=precision, master_epochs=3)
    records = await trained.train_model()
    assert records[-1].loss < records[0].loss
    assert {array.dtype for array in trained.model.get_weights()} == {np.dtype("float32")}
