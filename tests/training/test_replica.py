"""The worker's side of a round: still plain ``fit``, and nothing that depends on who carries a slot."""

import numpy as np
import pytest

from ddlf.algorithms.codec import codec, encode_update
from ddlf.errors import AppError
from ddlf.training.replica import Replica, describe_weights, fingerprint_of, reseed
from tests.training.models import Blobs, blobs, equal, small_model


class FakeWorker:
    id = 2


@pytest.fixture
def make_replica():
    def make(app_class=Blobs, **attributes):
        app = app_class()
        for name, value in attributes.items():
            setattr(app, name, value)
        app.worker = FakeWorker()
        replica = app.replica = Replica(app, "a run")
        replica.begin()
        replica.load()
        replica.build()
        return replica

    return make


def task(replica, *, weights=None, indices=None, epochs=1, round=0, slot=0, seed=5, name="float32"):
    weights = replica.app.model.get_weights() if weights is None else weights
    encoded, _ = encode_update(codec("float32"), weights, [False] * len(weights))
    return {
        "slot": slot,
        "round": round,
        "optimizer": "held" if replica._optimizers.get(slot, (None,))[0] == round - 1 else "fresh",
        "give_lost": False,
        "seed": seed,
        "epochs": epochs,
        "batch_size": 16,
        "indices": np.arange(203, dtype=np.uint8) if indices is None else indices,
        "codec": name,
        "weights": {"delta": False, "encoded": encoded},
    }


def arrays(reply, like):
    from ddlf.algorithms.codec import decode_update

    return decode_update(reply["update"], like)


def test_a_round_gives_weights_before_minus_weights_after_of_plain_fit(make_replica):
    replica = make_replica()
    before = replica.app.model.get_weights()
    indices = np.random.default_rng(1).permutation(203)[:100].astype(np.uint8)
    reply = replica.train(task(replica, indices=indices))
    plain = small_model()
    plain.set_weights(before)
    x, y = blobs(203)
    plain.fit(x[indices], y[indices], batch_size=16, shuffle=False, verbose=0)
    expected = [b - a for b, a in zip(before, plain.get_weights(), strict=True)]
    assert equal(arrays(reply, before), expected)
    assert reply["samples"] == 100
    assert set(reply["metrics"]) == {"loss", "accuracy"}
    assert reply["stopped"] is False


def test_rounds_trace_the_model_once(make_replica):
    from tests.training.test_feed import _traces

    replica = make_replica()
    first = None
    for number in range(6):
        replica.train(task(replica, round=number, indices=np.arange(100 + number, dtype=np.uint8), epochs=2))
        first = first or _traces(replica.app.model)
    assert _traces(replica.app.model) == first


def test_later_local_epochs_have_an_own_order_that_depends_on_seed_round_and_slot_only(make_replica):
    one, other = make_replica(), make_replica()
    indices = np.arange(50)
    one._task, other._task = task(one), task(other)
    assert np.array_equal(one.order(indices, 0), indices)
    assert np.array_equal(one.order(indices, 1), other.order(indices, 1))
    assert sorted(one.order(indices, 1)) == list(indices)
    assert not np.array_equal(one.order(indices, 1), one.order(indices, 2))
    other._task = task(other, slot=1)
    assert not np.array_equal(one.order(indices, 1), other.order(indices, 1))


def test_a_slots_result_does_not_depend_on_what_its_worker_did_before_even_with_dropout(make_replica):
    fresh, used = make_replica(dropout=0.5), make_replica(dropout=0.5)
    weights = fresh.app.model.get_weights()
    used.train(task(used, weights=weights, round=7, slot=3))
    one = fresh.train(task(fresh, weights=weights, round=2, slot=1))
    other = used.train(task(used, weights=weights, round=2, slot=1))
    assert equal(arrays(one, weights), arrays(other, weights))
    elsewhere = used.train(task(used, weights=weights, round=2, slot=2))
    assert not equal(arrays(one, weights), arrays(elsewhere, weights))


def test_reseeding_touches_no_weight():
    model = small_model(norm=True, dropout=0.5)
    before = model.get_weights()
    reseed(model, (1, 2, 3))
    assert equal(before, model.get_weights())


def test_stop_ends_local_training_at_the_next_batch(make_replica):
    import keras

    class StopAtThird(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(batch)
            if len(seen) == 3:
                replica.stopping = True

    seen = []
    replica = make_replica(callbacks=[StopAtThird()])
    reply = replica.train(task(replica, epochs=50))
    assert reply["stopped"] is True
    assert len(seen) <= 4


def test_callbacks_of_the_app_see_every_batch(make_replica):
    import keras

    class Count(keras.callbacks.Callback):
        batches = 0

        def on_train_batch_end(self, batch, logs=None):
            self.batches += 1

    count = Count()
    replica = make_replica(callbacks=[count])
    replica.train(task(replica))
    assert count.batches == 13


def test_a_custom_train_step_runs(make_replica):
    class Custom(Blobs):
        async def create_model(self):
            import keras

            class Model(keras.Model):
                def train_step(self, data):
                    logs = super().train_step(data)
                    return {**logs, "mine": keras.ops.cast(1.5, "float32")}

            inputs = keras.Input((8,))
            outputs = keras.layers.Dense(4, activation="softmax")(inputs)
            self.model = Model(inputs, outputs)
            self.model.compile("sgd", "categorical_crossentropy")

    replica = make_replica(Custom)
    assert replica.train(task(replica))["metrics"]["mine"] == 1.5


def test_a_learning_rate_schedule_goes_on_over_rounds(make_replica):
    class Scheduled(Blobs):
        async def create_model(self):
            import keras

            self.model = small_model()
            rate = keras.optimizers.schedules.PiecewiseConstantDecay([13], [0.05, 0.0])
            self.model.compile(keras.optimizers.SGD(rate), "categorical_crossentropy")

    replica = make_replica(Scheduled)
    weights = replica.app.model.get_weights()
    first = arrays(replica.train(task(replica)), weights)
    for number in range(1, 3):
        last = arrays(replica.train(task(replica, round=number)), weights)
    assert max(np.abs(array).max() for array in first) > 0
    assert max(np.abs(array).max() for array in last) == 0


def test_a_model_that_is_not_there_not_built_or_without_data_is_named():
    import keras

    class Nothing(Blobs):
        async def create_model(self):
            pass

    app = Nothing()
    app.worker = FakeWorker()
    with pytest.raises(AppError, match=r"set no self\.model"):
        Replica(app, "a run").build()
    with pytest.raises(AppError, match="is not built"):
        describe_weights(keras.Sequential([keras.layers.Dense(1)]))
    with pytest.raises(AppError, match=r"set no self\.x_train"):
        fingerprint_of(Nothing())
    app.x_train, app.y_train = np.zeros(3), np.zeros(2)
    with pytest.raises(AppError, match="x_train has 3 rows, y_train 2"):
        fingerprint_of(app)
