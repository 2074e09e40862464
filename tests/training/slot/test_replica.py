"""Tests of the worker's side of a round: it equals plain ``fit``, and the result does not depend on the worker."""

import asyncio
import gc
import importlib
from dataclasses import replace

import numpy as np
import pytest

from ddlf.data.app_data import check_data
from ddlf.errors import AppError
from ddlf.testing import FakeWorker
from ddlf.training.slot import keras_model
from ddlf.training.slot.build import describe_weights, has_large_products
from ddlf.training.slot.keras_model import reseed
from ddlf.training.slot.optimizers import final_weights, read_optimizer
from ddlf.training.slot.replica import Replica, run_train
from ddlf.training.strategies.lbfgs.replica import LbfgsReplica
from tests.training.models import Blobs, blobs, compiled, distance, equal, small_model, with_model
from tests.training.slot.replicas import arrays, replica_of, task, traces


def test_an_error_after_the_caller_was_cancelled_is_not_printed(monkeypatch):
    """Two parts of a model may fail at once. The master cancels the second part, which then fails, too."""
    replica, printed = replica_of(), []

    async def cancelled_and_failed():
        begun, stopped = asyncio.Event(), asyncio.Event()

        async def compute(function):
            begun.set()
            await stopped.wait()
            raise ValueError("a page of numbers")

        monkeypatch.setattr(replica._worker, "compute", compute)
        monkeypatch.setattr(replica, "_stop", stopped.set)
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: printed.append(context["message"]))
        training = asyncio.ensure_future(replica._on_thread(lambda: None))
        await begun.wait()
        training.cancel()
        await asyncio.wait([training])
        assert training.cancelled()
        del training
        gc.collect()

    asyncio.run(cancelled_and_failed())
    assert printed == []


def test_a_round_reports_its_progress_with_the_loss_so_far(monkeypatch):
    monkeypatch.setattr("ddlf.training.slot.replica.MOVED_EVERY_S", 0)
    replica = replica_of()
    reply = replica.carry(task(replica, epochs=2, round=1))
    messages = replica._worker.told
    assert [facts["done"] for facts in messages] == sorted({facts["done"] for facts in messages})
    assert {facts["total"] for facts in messages} == {406}
    assert [facts["epoch"] for facts in messages if facts["done"] in (203, 406)] == [3, 4]
    assert messages[-1] == {"what": "training", "done": 406, "total": 406, "epoch": 4, "loss": reply.metrics["loss"]}


def test_a_round_gives_weights_before_minus_weights_after_of_plain_fit():
    replica = replica_of()
    before = replica.app.model.get_weights()
    indices = np.random.default_rng(1).permutation(203)[:100].astype(np.uint8)
    reply = replica.carry(task(replica, indices=indices))
    plain = small_model()
    plain.set_weights(before)
    x, y = blobs(203)
    plain.fit(x[indices], y[indices], batch_size=16, shuffle=False, verbose=0)
    expected = [b - a for b, a in zip(before, plain.get_weights(), strict=True)]
    assert equal(arrays(reply, before), expected)
    assert reply.samples == 100
    assert set(reply.metrics) == {"loss", "accuracy"}
    assert reply.stopped is False


def test_rounds_trace_the_model_once():
    replica = replica_of()
    first = None
    for number in range(6):
        replica.carry(task(replica, round=number, indices=np.arange(100 + number, dtype=np.uint8), epochs=2))
        first = first or traces(replica.app.model)
    assert traces(replica.app.model) == first


@pytest.mark.slow
def test_gradient_depends_on_weights_and_samples_only():
    fresh, used = (replica_of(exchange="gradient", dropout=0.3, norm=True) for _ in range(2))
    weights, rows = fresh.app.model.get_weights(), np.arange(5, 15)
    counts = []
    for number in range(4):
        used.carry(task(used, round=number, weights=weights, indices=rows[: 9 - number]))
        counts.append(traces(used.app.model))
    assert counts == counts[:1] * 4
    reply_of_fresh, reply_of_used = (
        replica.carry(task(replica, round=4, weights=weights, indices=rows)) for replica in (fresh, used)
    )
    assert equal(arrays(reply_of_fresh, weights), arrays(reply_of_used, weights))
    assert reply_of_fresh.samples == 10
    assert reply_of_fresh.counted.names == ["loss", "accuracy"] == list(reply_of_fresh.metrics)
    model = small_model(1.0, norm=True)
    model.set_weights(weights)
    reply_of_fresh, weights = replica_of(exchange="gradient", norm=True, optimizer="adam"), model.get_weights()
    reply = reply_of_fresh.carry(task(reply_of_fresh, weights=weights, indices=rows))
    model.train_on_batch(*(array[rows] for array in blobs(203)))
    stepped = [before - after for before, after in zip(weights, model.get_weights(), strict=True)]
    assert distance(arrays(reply, weights), stepped) < 1e-6


def test_order_of_later_epochs_depends_on_seed_round_and_slot():
    first, second = replica_of(), replica_of()
    indices = np.arange(50)
    first._task, second._task = task(first), task(second)
    assert np.array_equal(first.order(indices, 0), indices)
    assert np.array_equal(first.order(indices, 1), second.order(indices, 1))
    assert sorted(first.order(indices, 1)) == list(indices)
    assert not np.array_equal(first.order(indices, 1), first.order(indices, 2))
    second._task = task(second, slot=1)
    assert not np.array_equal(first.order(indices, 1), second.order(indices, 1))


def test_slot_does_not_depend_on_the_history_of_its_worker():
    fresh, used = replica_of(dropout=0.5), replica_of(dropout=0.5)
    weights = fresh.app.model.get_weights()
    used.carry(task(used, weights=weights, round=7, slot=3))
    reply_of_fresh = fresh.carry(task(fresh, weights=weights, round=2, slot=1))
    reply_of_used = used.carry(task(used, weights=weights, round=2, slot=1))
    assert equal(arrays(reply_of_fresh, weights), arrays(reply_of_used, weights))
    other_slot = used.carry(task(used, weights=weights, round=2, slot=2))
    assert not equal(arrays(reply_of_fresh, weights), arrays(other_slot, weights))


def test_reseeding_touches_no_weight():
    model = small_model(norm=True, dropout=0.5)
    before = model.get_weights()
    reseed(model, (1, 2, 3))
    assert equal(before, model.get_weights())


def test_a_round_does_not_make_the_step_ready_again(monkeypatch):
    from tensorflow.python.eager.context import Context, context

    replica, forgotten = replica_of(dropout=0.3), []
    # Functions that other tests in this process have compiled are not counted.
    monkeypatch.setattr(keras_model, "_functions", dict.fromkeys(context().list_function_names(), False))
    monkeypatch.setattr(Context, "_set_global_seed", lambda self, seed: forgotten.append(seed))
    for number in range(3):
        replica.carry(task(replica, round=number))
    assert forgotten == []


def test_random_numbers_of_tensorflow_depend_on_the_seed_only():
    import tensorflow as tf

    def drawn(number):
        reseed(model, (78, number))
        return [function().numpy() for function in functions for _ in range(2)]

    def step(x):
        return x + tf.random.normal([3])

    model = small_model()
    functions = [
        lambda: tf.random.normal([3]),
        tf.function(lambda: tf.while_loop(lambda _: True, step, [tf.zeros(3)], maximum_iterations=1)[0]),
    ]
    functions[1]()  # a compiled function keeps the seed that it was compiled with
    first, second = drawn(1), drawn(2)
    assert not equal(first[:2], second[:2])
    assert equal(drawn(1), first)
    assert equal(drawn(2), second)


def test_stop_ends_local_training_at_the_next_batch():
    import keras

    class StopAtThird(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            batches.append(batch)
            if len(batches) == 3:
                replica.stopping = True

    batches = []
    replica = replica_of(worker_callbacks=[StopAtThird()])
    reply = replica.carry(task(replica, epochs=50))
    assert reply.stopped is True
    assert len(batches) <= 4


def test_callbacks_of_the_app_see_every_batch():
    import keras

    class Count(keras.callbacks.Callback):
        batches = 0

        def on_train_batch_end(self, batch, logs=None):
            self.batches += 1

    count = Count()
    replica = replica_of(worker_callbacks=[count])
    replica.carry(task(replica))
    assert count.batches == 13


@pytest.mark.slow
def test_worker_callbacks_keep_the_state_of_their_slot():
    import keras

    class Counts(keras.callbacks.Callback):
        epochs = 0

        def on_train_begin(self, logs=None):
            self.epochs = 0

        def on_epoch_end(self, epoch, logs=None):
            self.epochs += 1
            epochs.append((epoch, self.epochs))

    epochs = []
    first_replica, second_replica = replica_of(worker_callbacks=[Counts()]), replica_of(worker_callbacks=[Counts()])
    keeps = {"keep": ("callbacks",), "back": ("callbacks",)}
    first = first_replica.carry(replace(task(first_replica, epochs=2), **keeps))
    first_replica.carry(replace(task(first_replica, slot=1), **keeps))  # another slot begins without a state
    first_replica.carry(replace(task(first_replica, round=1, epochs=2), **keeps))
    second_replica.carry(replace(task(second_replica, round=1, epochs=2), state=first.state, **keeps))
    assert epochs == [(0, 1), (1, 2), (0, 1), (2, 3), (3, 4), (2, 3), (3, 4)]


def test_learning_rates_of_the_master_apply_to_their_epochs():
    replica = replica_of()
    weights = replica.app.model.get_weights()

    def trained(epochs, rates):
        reply = replica.carry(replace(task(replica, weights=weights, epochs=epochs), rates=rates))
        return arrays(reply, weights)

    assert max(np.abs(array).max() for array in trained(2, [[0.0], [0.0]])) == 0
    assert equal(trained(2, [[0.05], [0.0]]), trained(1, [[0.05]]))
    assert float(replica.app.model.optimizer.learning_rate) == pytest.approx(0.05)


def test_a_custom_train_step_runs():
    import keras

    class Custom(keras.Sequential):
        def train_step(self, data):
            logs = super().train_step(data)
            return {**logs, "mine": keras.ops.cast(1.5, "float32")}

    replica = replica_of(
        with_model(lambda app: compiled(Custom([keras.Input((8,)), keras.layers.Dense(4, "softmax")])))
    )
    assert replica.carry(task(replica)).metrics["mine"] == 1.5


def test_a_learning_rate_schedule_continues_over_rounds():
    import keras

    rate = keras.optimizers.schedules.PiecewiseConstantDecay([13], [0.05, 0.0])
    replica = replica_of(with_model(lambda app: compiled(optimizer=keras.optimizers.SGD(rate))))
    weights = replica.app.model.get_weights()
    first = arrays(replica.carry(task(replica)), weights)
    for number in range(1, 3):
        last = arrays(replica.carry(task(replica, round=number)), weights)
    assert max(np.abs(array).max() for array in first) > 0
    assert max(np.abs(array).max() for array in last) == 0


def test_a_missing_or_unbuilt_model_and_missing_data_are_named():
    import keras

    class Nothing(Blobs):
        async def create_model(self):
            pass

    app = Nothing()
    with pytest.raises(AppError, match=r"set no self\.model"):
        Replica(FakeWorker(2), app).build()
    with pytest.raises(AppError, match="is not built"):
        describe_weights(keras.Sequential([keras.layers.Dense(1)]))
    with pytest.raises(AppError, match=r"set no self\.x_train"):
        check_data(Nothing())
    app.x_train, app.y_train = np.zeros(3), np.zeros(2)
    with pytest.raises(AppError, match="x_train has 3 rows, y_train 2"):
        check_data(app)


class Exact(Replica):
    MIXED = False


def test_only_a_model_with_a_large_weight_gains_from_bfloat16():
    import keras

    def model(units):
        return keras.Sequential([keras.Input((512,)), keras.layers.Dense(units), keras.layers.Dense(1)])

    assert [has_large_products(model(units)) for units in (511, 512)] == [False, True]


@pytest.mark.parametrize(
    ("kind", "worker", "precision", "floatx", "gain"),
    [
        (Replica, 1, "auto", "float32", 2.0),
        (Replica, 2, "auto", "float32", 0.0),
        (Replica, 1, "float32", "float32", 0.0),
        (Replica, 1, "auto", "float64", 0.0),
        (Exact, 1, "auto", "float32", 0.0),
    ],
)
def test_one_worker_says_what_mixed_precision_would_gain_if_it_is_possible(
    monkeypatch, kind, worker, precision, floatx, gain
):
    import keras

    monkeypatch.setattr("ddlf.training.slot.replica.gain_of_bfloat16", lambda: 2.0)
    monkeypatch.setattr("ddlf.training.slot.build.LEAST_WEIGHT", 1)
    monkeypatch.setattr(keras.config, "floatx", lambda: floatx)
    replica = kind(FakeWorker(worker), Blobs(), "run")
    replica.app.precision = precision
    assert replica.build().gain == gain
    assert Replica.MIXED is not LbfgsReplica.MIXED


def test_epochs_are_counted_over_the_run_for_schedules():
    import keras

    calls = []

    def halved(epoch, rate):
        calls.append((epoch, round(float(rate), 6)))
        return 0.1 * 0.5**epoch

    replica = replica_of(worker_callbacks=[keras.callbacks.LearningRateScheduler(halved)])
    for number in range(3):
        replica.carry(task(replica, round=number, epochs=2))
    assert [epoch for epoch, _ in calls] == [0, 1, 2, 3, 4, 5]
    assert float(replica.app.model.optimizer.learning_rate) == pytest.approx(0.1 / 32)
    assert replica.app.model.steps_per_execution == 16  # the schedule does not act on single batches


def test_callbacks_that_an_own_train_gives_to_fit_see_every_batch():
    import keras

    batches = []

    class Own(Blobs):
        def train(self, weights, worker_epochs, batch_size):
            recorder = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: batches.append(batch))
            return super().train(weights, worker_epochs, batch_size), self.replica.fit(1, batch_size, [recorder])

    replica = replica_of(Own)
    with pytest.raises(AppError, match="train returned a tuple with a tuple first"):
        replica.carry(task(replica))
    assert batches == list(range(13))


@pytest.mark.slow
def test_optimizer_averages_replace_the_weights_at_the_end_only():
    import keras

    averages = keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.9)
    replica = replica_of(with_model(lambda app: compiled(optimizer=averages)))
    before = weights = replica.app.model.get_weights()
    for number in range(3):
        reply = replica.carry(task(replica, weights=weights, round=number))
        weights = [old - new for old, new in zip(weights, arrays(reply, weights), strict=True)]
    plain = compiled(optimizer=averages.from_config(averages.get_config()))
    plain.set_weights(before)
    x, y = blobs(203)
    plain.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0)
    assert max(np.abs(a - b).max() for a, b in zip(weights, plain.get_weights(), strict=True)) > 0.01
    final = final_weights(replica.app.model, weights, [read_optimizer(replica.app.model)])
    assert max(np.abs(a - b).max() for a, b in zip(final, plain.get_weights(), strict=True)) < 1e-6


@pytest.mark.parametrize("exchange", ["star", pytest.param("gradient", marks=pytest.mark.slow)])
@pytest.mark.parametrize("library", ["keras", pytest.param("tensorflow", marks=pytest.mark.slow)])
def test_unseeded_random_numbers_do_not_depend_on_the_worker(library, exchange):
    import keras

    class Noise(keras.layers.Layer):
        def call(self, x):
            normal = importlib.import_module(library).random.normal
            return x + normal(keras.ops.shape(x))

    noisy = with_model(
        lambda app: compiled(keras.Sequential([keras.Input((8,)), Noise(), keras.layers.Dense(4, "softmax")]))
    )
    fresh, used = (replica_of(noisy, exchange=exchange) for _ in range(2))
    weights = fresh.app.model.get_weights()
    used.carry(task(used, weights=weights, round=7, slot=3))
    reply_of_fresh = fresh.carry(task(fresh, weights=weights, round=2, slot=1))
    reply_of_used = used.carry(task(used, weights=weights, round=2, slot=1))
    assert equal(arrays(reply_of_fresh, weights), arrays(reply_of_used, weights))
    other_slot = used.carry(task(used, weights=weights, round=2, slot=2))
    assert not equal(arrays(reply_of_fresh, weights), arrays(other_slot, weights))


def test_metrics_have_the_same_names_in_every_run_on_a_worker():
    import keras

    replicas = [replica_of(with_model(lambda app: compiled(metrics=[keras.metrics.AUC()]))) for _ in range(2)]
    assert [set(replica.carry(task(replica)).metrics) for replica in replicas] == [{"loss", "auc"}] * 2


def test_a_metric_that_is_an_array_becomes_several_with_numbers():
    import keras

    replica = replica_of(with_model(lambda app: compiled(metrics=[keras.metrics.F1Score()])))
    assert list(replica.carry(task(replica)).metrics) == [*(f"f1_score_{number}" for number in range(4)), "loss"]


@pytest.mark.parametrize(
    ("outcome", "sentence"),
    [
        (None, "train returned a NoneType; return the update"),
        (5, "train returned a int"),
        (([], "good"), "metrics must be a dict of numbers by name, got a str"),
        (([], {"loss": "good"}), "the metric 'loss' is 'good', which is not a number"),
    ],
)
def test_a_wrong_return_value_of_train_is_refused_with_a_sentence(outcome, sentence):
    class Own(Blobs):
        def train(self, weights, worker_epochs, batch_size):
            return outcome

    replica = replica_of(Own)
    with pytest.raises(AppError, match=sentence):
        replica.carry(task(replica))


def test_numbers_of_any_library_are_metrics():
    class Own(Blobs):
        def train(self, weights, worker_epochs, batch_size):
            return tuple(weights), {"loss": np.float32(0.5), "steps": 3}

    class Bare(Blobs):
        def train(self, weights, worker_epochs, batch_size):
            return tuple(weights)

    replica = replica_of(Own)
    metrics = replica.carry(task(replica)).metrics
    assert metrics == {"loss": 0.5, "steps": 3.0}
    assert {type(value) for value in metrics.values()} == {float}
    replica = replica_of(Bare)
    assert replica.carry(task(replica)).metrics == {}


@pytest.mark.parametrize("inputs", ["subclassed", "sequential"])
def test_a_model_without_a_declared_input_is_built_on_samples(inputs):
    import keras

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden, self.out = keras.layers.Dense(3), keras.layers.Dense(4, activation="softmax")

        def call(self, x):
            return self.out(self.hidden(x))

    replica = replica_of(
        with_model(lambda app: compiled(Own() if inputs == "subclassed" else keras.Sequential([keras.layers.Dense(4)])))
    )
    assert len(replica.carry(task(replica)).metrics) == 1


def test_a_model_without_labels_trains():
    import keras

    class Autoencoder(keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            assert y is None
            return keras.ops.mean((x - y_pred) ** 2)

    class Unlabelled(Blobs):
        async def load_dataset(self):
            self.x_train, _ = blobs(self.samples)

        async def create_model(self):
            self.model = Autoencoder([keras.Input((8,)), keras.layers.Dense(2), keras.layers.Dense(8)])
            self.model.compile("adam")

    replica = replica_of(Unlabelled)
    first = replica.carry(task(replica)).metrics["loss"]
    assert replica.carry(task(replica, round=1)).metrics["loss"] < first


@pytest.mark.slow
def test_weights_of_samples_and_of_classes_count_as_in_fit():
    x, y = blobs(203)
    w = np.linspace(0, 3, 203)
    by_class = {0: 0.5, 2: 4.0}
    for attributes, fit_arguments in (
        (dict(w_train=w), dict(sample_weight=w)),
        (dict(class_weight=by_class), dict(class_weight=by_class)),
    ):
        replica = replica_of(weighted_metrics=True, **attributes)
        replica.app.model.compile("sgd", "categorical_crossentropy", metrics=["accuracy"], weighted_metrics=["mse"])
        plain = small_model()
        plain.compile("sgd", "categorical_crossentropy", metrics=["accuracy"], weighted_metrics=["mse"])
        plain.set_weights(before := replica.app.model.get_weights())
        replica._model._fresh = read_optimizer(replica.app.model)
        reply = replica.carry(task(replica))
        metrics = plain.fit(x, y, batch_size=16, shuffle=False, verbose=0, **fit_arguments).history
        assert {name: values[0] for name, values in metrics.items()} == pytest.approx(reply.metrics, abs=1e-6)
        after = [b - u for b, u in zip(before, arrays(reply, before), strict=True)]
        assert max(np.abs(a - b).max() for a, b in zip(after, plain.get_weights(), strict=True)) < 1e-6


@pytest.mark.parametrize(
    ("outcome", "sentence"),
    [
        ([np.zeros(3)], "Mine.train returned 1 arrays for 2 weights; return weights before minus"),
        (([np.zeros(3)] * 2, {}), r"Mine.train returned an array of shape \(3,\) for weight 2 of shape \(2, 2\)"),
        ((np.zeros(3), np.zeros((2, 2)), 5), "Mine.train returned 3 arrays for 2 weights"),
    ],
)
def test_an_update_of_other_shapes_is_refused_on_the_worker(outcome, sentence):
    weights = [np.zeros(3, np.float32), np.zeros((2, 2), np.float32)]
    with pytest.raises(AppError, match=sentence):
        run_train(type("Mine", (), {"train": lambda *_: outcome})(), weights, 1, 1)


def test_an_update_of_float64_becomes_one_of_the_weights_type():
    weights = [np.zeros(3, np.float32), np.zeros(1, np.int64)]
    update, _ = run_train(type("Mine", (), {"train": lambda *_: [np.ones(3), np.zeros(1, np.int64)]})(), weights, 1, 1)
    assert [array.dtype for array in update] == [np.float32, np.int64]


def test_moving_statistics_follow_the_formula_and_change_no_training():
    """The statistics are compared with the output of the layer before, computed by hand: two batches of 16 and one of 8."""
    replica = replica_of(norm=True, dropout=0.5)
    indices = np.random.default_rng(1).permutation(203)[:40].astype(np.uint8)
    weights = replica.app.model.get_weights()
    weights[-4] += 7  # the earlier moving mean has no influence
    round_task = task(replica, weights=weights, indices=indices)
    mean, variance = replica.statistics(round_task)
    hidden = np.tanh(blobs(203)[0][indices].astype("f8") @ weights[0] + weights[1])
    batches = [hidden[begin : begin + 16] for begin in (0, 16, 32)]
    expected = [sum(len(batch) * statistic(batch, axis=0) for batch in batches) / 40 for statistic in (np.mean, np.var)]
    assert np.allclose(mean, expected[0], rtol=1e-5, atol=1e-6)
    assert np.allclose(variance, expected[1], rtol=1e-4, atol=1e-6)
    assert not np.allclose(
        variance, hidden.var(axis=0), rtol=1e-3
    )  # the variance of all samples also has the differences between batches
    first = arrays(replica.carry(round_task), weights)
    replica.statistics(round_task)
    second = arrays(replica.carry(replace(round_task, state={})), weights)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
