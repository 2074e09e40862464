"""Tests of a worker that trains on partition files: it has the bits of arrays, it stops at once, and it refuses damaged files."""

import itertools
import threading

import numpy as np
import pytest

import ddlf.data
from ddlf.algorithms.reading_order import portions
from ddlf.data.app_data import check_data
from ddlf.data.location import Folder
from ddlf.data.sources import open_source
from ddlf.data.split import split
from ddlf.errors import AppError, DatasetError
from ddlf.training.evaluation.metrics import MetricMerge
from ddlf.training.evaluation.model import counts, evaluate, fitting
from ddlf.training.evaluation.workers import added
from ddlf.training.slot.feed import FileFeed
from ddlf.training.slot.task import MetricCounts
from tests.patience import PATIENCE_S
from tests.training.models import Blobs, blobs, equal
from tests.training.slot.replicas import arrays, replica_of, task

pytestmark = pytest.mark.slow

SIZES = [70, 68, 65]


@pytest.fixture
def make_folder(tmp_path):
    def make(name="place", **more):
        x, y = blobs(203)
        columns = {"x": x, "y": y, **more}
        np.savez(tmp_path / f"{name}.npz", **{key: value for key, value in columns.items() if value is not None})
        split(open_source(tmp_path / f"{name}.npz"), Folder(tmp_path / name), SIZES, shuffle=False)
        return tmp_path / name

    return make


def of_files(location, **attributes):
    class App(Blobs):
        def load_dataset(self):
            self.train_data = self.test_data = ddlf.data.open(location)

    return replica_of(App, **attributes)


@pytest.mark.parametrize(("shuffle", "memory"), [("global", None), ("window:2", 10_000)])
def test_round_on_files_has_the_bits_of_arrays_in_that_order(make_folder, shuffle, memory):
    files, plain = of_files(make_folder(), data_memory=memory), replica_of()
    start, opened = plain.app.model.get_weights(), []
    for round, portion in enumerate(portions(SIZES, [103, 100], shuffle, seed=3, epoch=1)):
        reply = files.carry(task(files, weights=start, indices=portion, round=round))
        expected = plain.carry(task(plain, weights=start, indices=portion.ids(SIZES), round=round))
        assert equal(arrays(reply, start), arrays(expected, start))
        assert reply.metrics == expected.metrics
        assert reply.fed is None
        assert set(reply.files) <= set(portion.stretches(SIZES)[:, 0].tolist())
        opened += reply.files
    assert set(opened) == {0, 1, 2}


def test_epochs_of_a_round_have_the_same_samples_in_different_orders(make_folder):
    files, plain = of_files(make_folder()), replica_of()
    start = plain.app.model.get_weights()
    (portion,) = portions(SIZES, [203], "global", seed=3, epoch=1)
    reply = files.carry(task(files, weights=start, indices=portion, epochs=3))
    expected = plain.carry(task(plain, weights=start, indices=portion.ids(SIZES), epochs=3))
    assert equal(arrays(reply, start), arrays(expected, start))


@pytest.mark.parametrize("weighted", [{"w": np.linspace(0, 2, 203)}, {"class_weight": {0: 2.0}}], ids=["w", "class"])
def test_samples_and_classes_are_weighted(make_folder, weighted):
    columns = {key: value for key, value in weighted.items() if key == "w"}
    attributes = {key: value for key, value in weighted.items() if key != "w"}

    class Weighted(Blobs):
        def load_dataset(self):
            self.x_train, self.y_train = blobs(203)
            self.w_train = weighted.get("w")

    files, plain = of_files(make_folder(**columns), **attributes), replica_of(Weighted, **attributes)
    start = plain.app.model.get_weights()
    (portion,) = portions(SIZES, [203], seed=3, epoch=1)
    reply = files.carry(task(files, weights=start, indices=portion))
    expected = plain.carry(task(plain, weights=start, indices=portion.ids(SIZES)))
    assert equal(arrays(reply, start), arrays(expected, start))


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_trees_of_inputs_come_as_batches_on_every_backend(make_folder, backend, monkeypatch):
    monkeypatch.setattr("keras.backend.backend", lambda: backend)
    data = ddlf.data.open(make_folder(x=None, **{"x['left']": np.arange(203), "x['right']": np.arange(203.0) * 2}))

    class App:
        train_data, data_memory = data, "1 MiB"

    check_data(App)
    feed = FileFeed(App, "train", 32)
    (portion,) = portions(SIZES, [203], seed=3, epoch=1)
    for _ in range(2):
        feed.set_order(portion)
        if backend == "jax":
            feed.dataset[0]  # Keras reads a first batch, and then restarts
            batches = [feed.dataset[number] for number in range(len(feed.dataset))]
        else:
            next(iter(feed.dataset))
            batches = list(feed.dataset)
        assert [len(y) for _, y in batches] == [32] * 6 + [11]
        left = np.concatenate([np.asarray(x["left"]) for x, _ in batches])
        assert np.array_equal(left, portion.ids(SIZES))
        assert np.array_equal(np.concatenate([np.asarray(x["right"]) for x, _ in batches]), left * 2)
    assert feed.take_stats()[1]


def test_a_stop_ends_a_round_that_waits_for_a_slow_store(make_folder):
    replica = of_files(make_folder())
    data, load_began, go_on = replica.app.train_data, threading.Event(), threading.Event()

    def load(number):
        load_began.set()
        go_on.wait(PATIENCE_S)
        return type(data).load(data, number)

    data.load = load
    (portion,) = portions(SIZES, [203], seed=3, epoch=1)
    round_task, replies = task(replica, indices=portion), []
    carrying = threading.Thread(target=lambda: replies.append(replica.carry(round_task)))
    carrying.start()
    assert load_began.wait(PATIENCE_S)
    replica._stop()
    carrying.join(PATIENCE_S)
    go_on.set()
    assert replies[0].stopped
    assert replies[0].wait_data_s > 0
    del data.load
    assert not replica.carry(task(replica, indices=portion)).stopped


def test_a_damaged_file_ends_a_round_with_its_name_and_without_an_update(make_folder):
    folder = make_folder()
    path = folder / "v0001" / "00001.safetensors"
    replica = of_files(folder)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    (portion,) = portions(SIZES, [203], seed=3, epoch=1)
    with pytest.raises(DatasetError, match=r"00001\.safetensors is damaged"):
        replica.carry(task(replica, indices=portion))


def test_an_own_train_cannot_choose_samples_of_files(make_folder):
    replica = of_files(make_folder())
    replica.app.indices = np.arange(3)
    (portion,) = portions(SIZES, [203], seed=3, epoch=1)
    replica._task = task(replica, indices=portion)
    with pytest.raises(AppError, match=r"train has set self\.indices"):
        replica.fit(1, 16)


def test_an_evaluation_of_files_equals_that_of_arrays(make_folder):
    files, plain = of_files(make_folder()).app, replica_of().app
    plain.x_test, plain.y_test = blobs(203)
    weights = plain.model.get_weights()
    assert evaluate(files, weights) == evaluate(plain, weights)
    assert evaluate(files, weights, batch_size=16) == evaluate(plain, weights, batch_size=16)


class Measured(Blobs):
    """An app with metrics of sums, metrics of confusion counts, and a penalty on weights."""

    custom = ""

    def load_dataset(self):
        self.x_train, self.y_train = blobs(203)
        (self.x_test, self.y_test), self.w_test = blobs(203, 1), np.linspace(0.1, 2, 203)

    def create_model(self):
        import keras

        class Largest(keras.metrics.Metric):
            def update_state(self, y, outputs, sample_weight=None):
                pass

            def result(self):
                return 1.0

        class Model(keras.Sequential):
            def test_step(self, data):
                return super().test_step(data) | {"more": 1.0}

        layers = [keras.Input((8,)), keras.layers.Dense(16, "tanh", kernel_regularizer="l2"), keras.layers.Dropout(0.5)]
        kind = Model if self.custom == "step" else keras.Sequential
        self.model = kind([*layers, keras.layers.Dense(4, "softmax")])
        metrics = [
            "accuracy",
            keras.metrics.AUC(),
            keras.metrics.F1Score(),
            *([Largest()] if self.custom == "metric" else []),
        ]
        self.model.compile("sgd", "categorical_crossentropy", metrics=metrics, weighted_metrics=["mse"])


def test_metrics_counted_by_batches_have_the_bits_of_one_evaluation():
    cuts = (0, 16, 32, 192, 203)
    replica, plain = replica_of(Measured, samples=203), replica_of(Measured)
    weights = replica.app.model.get_weights()
    expected = evaluate(plain.app, weights, batch_size=16)
    before = replica.app.model.steps_per_execution = 16
    counted = [counts(replica.app, weights, "test", 16, *part) for part in itertools.pairwise(cuts)]
    assert replica.app.model.steps_per_execution == before
    assert len(expected) == 8
    merged = MetricMerge(plain.app).of(
        MetricCounts(counted[0].names, added([part_counts.state for part_counts in counted]))
    )
    assert merged == expected
    assert evaluate(replica.app, weights, batch_size=16) == expected


@pytest.mark.parametrize(
    ("custom", "reason"),
    [("metric", "Largest is a metric with its own update_state"), ("step", "'more' is not a metric")],
)
def test_metrics_that_may_not_add_up_are_not_counted_batch_by_batch(custom, reason):
    replica = replica_of(Measured, custom=custom)
    assert reason in counts(replica.app, replica.app.model.get_weights(), "test", 16, 0, 203).reason


def test_evaluation_takes_smaller_batches_that_fit_the_memory(make_folder):
    app = of_files(make_folder(), data_memory=8 * 4 * 64 * 30).app
    assert fitting(app, "test", 512) < 512
    plain = replica_of().app
    plain.x_test, plain.y_test = blobs(203)
    weights = plain.model.get_weights()
    assert evaluate(app, weights) == evaluate(plain, weights, batch_size=fitting(app, "test", 512))


@pytest.mark.parametrize(
    ("columns", "more", "message"),
    [
        ({"x": None, "a": np.arange(203)}, {}, "has the columns y, a, but no x"),
        ({"y": None, "w": np.ones(203)}, {}, "has a column w, but no y"),
        ({"x": None, "x[1]": np.arange(203)}, {}, "do not form a tree"),
        ({}, {"x_train": np.ones(3)}, "both train_data and x_train are set"),
        ({}, {"train_data": "/shared/mnist"}, "a PyDataset or a tf.data pipeline, got a str"),
        ({"w": np.ones(203)}, {"class_weight": {0: 1.0}}, "both a column w of train_data and class_weight"),
    ],
)
def test_data_sets_that_cannot_be_trained_on_are_refused(make_folder, columns, more, message):
    class App:
        train_data = ddlf.data.open(make_folder(**columns))

    for name, value in more.items():
        setattr(App, name, value)
    with pytest.raises(AppError, match=message):
        check_data(App())


def of_source(make, **attributes):
    class App(Blobs):
        def load_dataset(self):
            self.train_data = self.test_data = make()

    return replica_of(App, **attributes)


def pydataset(x, y, batch=32):
    import keras

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return -(-len(x) // batch)

        def __getitem__(self, number):
            return x[number * batch : (number + 1) * batch], y[number * batch : (number + 1) * batch]

    return Batches()


def pipeline(x, y, batch=32):
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((x, y)).batch(batch)


def generated(x, y):
    ends = np.cumsum(SIZES)

    def batches(part):
        return pipeline(x[ends[part] - SIZES[part] : ends[part]], y[ends[part] - SIZES[part] : ends[part]], 9)

    return ddlf.data.generated(batches, SIZES)


def test_five_sources_in_one_order_give_the_same_bits(make_folder):
    x, y = blobs(203)
    batches = [32] * 6 + [11]
    plain, files = replica_of(), of_files(make_folder())
    made_up = [of_source(lambda make=make: make(x, y)) for make in (pydataset, pipeline, generated)]
    start = plain.app.model.get_weights()
    for round, (shuffle, epoch) in enumerate([("none", 0), ("global", 0), ("global", 1)]):
        ids = portions([203], [203], shuffle, seed=3, epoch=epoch)[0].ids([203])
        expected_reply = plain.carry(task(plain, weights=start, indices=ids, round=round))
        for replica, sizes in zip([files, *made_up], (SIZES, batches, batches, SIZES), strict=True):
            (portion,) = portions(sizes, [203], shuffle, seed=3, epoch=epoch)
            reply = replica.carry(task(files, weights=start, indices=portion, round=round))
            assert equal(arrays(reply, start), arrays(expected_reply, start))
            assert reply.metrics == expected_reply.metrics
    expected = evaluate(files.app, start)
    assert all(evaluate(replica.app, start) == expected for replica in made_up)


def test_slots_that_share_a_pipeline_have_each_of_its_samples_once():
    replica = of_source(lambda: pipeline(*blobs(203)))
    data, sizes = replica.app.train_data, [32] * 6 + [11]
    parts = [portion for epoch in (0, 1) for portion in portions(sizes, [103, 100], "none", seed=3, epoch=epoch)]
    start = replica.app.model.get_weights()
    for portion in parts:  # the second epoch starts the pipeline again
        feed = FileFeed(replica.app, "train", 32)
        feed.set_order(portion)
        samples = np.concatenate([np.asarray(x) for x, *_ in feed.batches(portion)])
        assert np.array_equal(samples, np.asarray(blobs(203)[0])[portion.ids(sizes)].astype("float32"))
    assert data.manifest.samples == 203
    assert start


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.repeat(), "train_data has no end"),
        (lambda data: data.filter(lambda x, y: True), "train_data does not say how many batches it has"),
        (lambda data: data.take(0), "train_data has 0 batches"),
        (
            lambda data: data.unbatch().shuffle(99).batch(32),
            "train_data (does not say|has another order in each pass)",
        ),
        (lambda data: data.shuffle(99), "train_data has another order in each pass"),
        (lambda data: data.map(lambda x, y: (x, y, y, y)), "is a tuple of 4"),
        (lambda data: data.concatenate(data), "batch 6 of train_data has 11 samples, not 32"),
    ],
)
def test_pipelines_that_cannot_be_shared_are_refused_in_one_sentence(change, message):
    def loaded():
        data = of_source(lambda: change(pipeline(*blobs(203)))).app.train_data
        return [data.load(number) for number in range(len(data.manifest.files))]

    with pytest.raises(DatasetError, match=message):
        loaded()


def test_a_pydataset_that_cannot_be_shared_is_refused_in_one_sentence():
    def of_no_length(endless):
        data = pydataset(*blobs(203))
        del type(data).__len__
        if endless:
            type(data).num_batches = property(lambda self: None)
        return data

    for endless in (True, False):
        with pytest.raises(DatasetError, match="train_data does not say how many batches it has"):
            of_source(lambda endless=endless: of_no_length(endless))


def test_damaged_files_are_skipped_when_allowed(make_folder):
    folder = make_folder()
    (folder / "v0001" / "00001.safetensors").write_bytes(b"")
    files, plain = of_files(folder, on_bad="skip"), replica_of()
    start = plain.app.model.get_weights()
    for round, portion in enumerate(portions(SIZES, [103, 100], "window:2", seed=3, epoch=1)):
        reply = files.carry(task(files, weights=start, indices=portion, round=round))
        ids = portion.ids(SIZES)
        remaining = ids[(ids < 70) | (ids >= 138)]
        expected = plain.carry(task(plain, weights=start, indices=remaining, round=round))
        assert equal(arrays(reply, start), arrays(expected, start))
        assert reply.samples == len(remaining)
        assert reply.skipped == ([(1, len(ids) - len(remaining))] if len(ids) > len(remaining) else [])
    for number in (0, 2):
        (folder / "v0001" / f"0000{number}.safetensors").unlink()
    files = of_files(folder, on_bad="skip")
    with pytest.raises(DatasetError, match=r"no samples remain to train on: .*safetensors"):
        files.carry(task(files, weights=start, indices=portion))
