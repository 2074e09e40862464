"""Tests of the data of an app: accepted forms, errors of other forms, and the cache on a worker."""

import collections

import numpy as np
import pytest

from ddlf.data.app_data import batches, check_data, class_weights, content, contents, look_alikes
from ddlf.data.array_cache import ArrayCache
from ddlf.data.data_set import DataSet
from ddlf.data.datasets import fingerprint, not_finite
from ddlf.data.location import Folder
from ddlf.data.sources import open_source
from ddlf.data.split import split
from ddlf.data.trees import leaves
from ddlf.errors import AppError, DatasetError
from ddlf.training.slot.feed import make_feed
from ddlf.training.slot.replica import Replica
from tests.training.models import Blobs, blobs

Pair = collections.namedtuple("Pair", ("left", "right"))


def app_with(**attributes):
    app = Blobs()
    vars(app).update({"x_train": np.zeros((4, 2)), "y_train": np.zeros(4), **attributes})
    return app


@pytest.mark.parametrize(
    ("attributes", "sentence"),
    [
        (dict(x_train=None, X_train=1), r"set no self\.x_train; you set self\.X_train: did you mean self\.x_train\?"),
        (dict(y_train=np.zeros(3)), "x_train has 4 rows, y_train 3"),
        (dict(x_train=[np.zeros(4), {"a": np.zeros(5)}]), r"x_train\[0\] has 4 rows, x_train\[1\]\['a'\] 5"),
        (dict(w_train=np.ones(3)), "x_train has 4 rows, w_train 3"),
        (dict(y_train=None, w_train=np.ones(4)), "there is w_train, but no y_train"),
        (
            dict(x_val=np.zeros(4), y_valid=1),
            r"there is x_val, but no y_val; set self.y_val, too.*did you mean self\.y_val",
        ),
        (dict(y_val=np.zeros(4)), "there is y_val, but no x_val"),
        (dict(y_train=["cat", "dog", "cat", "cat"]), r"y_train\[0\] must be a NumPy array, .* got a str"),
        (
            dict(y_train=np.array(["cat", "dog", "cat", "cat"])),
            r"y_train holds text .*not numbers; convert it to numbers",
        ),
        (dict(x_train=np.array([[1], [2, 3], [], []], object)), r"x_train holds Python objects \(object\)"),
        (dict(x_train=np.array(["2020-01-01"] * 4, "datetime64[D]")), "x_train holds dates"),
        (
            dict(x_train=np.ma.masked_array(np.zeros(4), [1, 0, 0, 0])),
            "x_train is a masked array, whose mask Keras does not",
        ),
        (dict(x_train=np.array(3.0)), "x_train is a single number"),
        (dict(x_train=np.zeros((0, 2)), y_train=np.zeros(0)), "x_train has no rows"),
        (dict(w_train=np.ones(4), class_weight={0: 1.0}), "both w_train and class_weight are set"),
        (dict(class_weight=[1.0, 2.0]), "class_weight must map class numbers"),
        (
            dict(class_weight={0: float("nan")}),
            "class_weight must map class numbers to finite weights",
        ),
        (dict(class_weight={0: "3"}), "class_weight must map class numbers to finite weights"),
        (dict(class_weight={0: 1.0}, y_train={"a": np.zeros(4)}), "class_weight needs one label for each sample"),
    ],
)
def test_unusable_data_is_refused_in_one_sentence(attributes, sentence):
    with pytest.raises((AppError, DatasetError), match=sentence):
        check_data(app_with(**attributes))


@pytest.mark.parametrize("part", ["val", "test"])
def test_labels_of_other_classes_are_refused(tmp_path, part):
    def placed(*labels):
        table = tmp_path / f"{'-'.join(labels)}.csv"
        if not table.exists():
            table.write_text("a,kind\n" + "".join(f"1,{label}\n" for label in labels))
            split(open_source(table, label="kind"), Folder(table.with_suffix("")), [len(labels)])
        return DataSet(table.with_suffix(""))

    app = Blobs()
    app.train_data = placed("cat", "dog", "eel")
    # A missing last class does not change the numbers.
    for accepted in (placed("cat", "dog", "eel"), placed("dog", "cat")):
        setattr(app, f"{part}_data", accepted)
        check_data(app)
    setattr(app, f"{part}_data", placed("dog", "eel"))
    with pytest.raises(AppError, match=rf"label 0 is 'cat' in train_data \(.*\), but 'dog' in {part}_data"):
        check_data(app)


def test_nested_arrays_have_distinct_fingerprints():
    a, b = np.arange(4.0), np.arange(4.0) * 10
    trees = [(a, b), [a, b], Pair(a, b), {"left": a, "right": b}, {"pair": [a, b]}, {"pair": (a, b)}, [[a], [b]]]
    assert len({fingerprint(tree) for tree in trees}) == len(trees)
    for tree in trees:
        check_data(app_with(x_train=tree))
        assert not_finite(tree) == ""
        assert len([name for name, _ in leaves(tree)]) == 2
    assert not_finite({"a": [np.array([1.0, np.nan])], "b": Pair(np.zeros(2), np.array([np.inf]))}) == "2 of 5 values"


def test_nested_inputs_reach_model():
    import keras

    x, y = blobs(60)
    a, b = keras.Input((4,)), keras.Input((4,))
    outputs = [keras.layers.Dense(4)(keras.layers.Concatenate()([a, b])), keras.layers.Dense(2)(a)]
    model = keras.Model([a, b], outputs)
    model.compile("sgd", "mse")
    losses = []
    for inputs in ([x[:, :4], x[:, 4:]], Pair(x[:, :4], x[:, 4:])):
        feed = make_feed((inputs, [y, y[:, :2]]), 16)
        feed.set_order(np.arange(60))
        assert type(feed.data[0]) is type(inputs)
        losses.append(model.evaluate(feed.dataset, verbose=0))
    plain = model.evaluate([x[:, :4], x[:, 4:]], [y, y[:, :2]], batch_size=16, verbose=0)
    assert losses == [pytest.approx(plain, abs=1e-6)] * 2


def test_numbers_of_64_bits_reach_model_in_type_of_keras():
    x = np.arange(6.0)
    feed = make_feed((x, np.arange(6)), 3)
    feed.set_order(np.arange(6))
    batch = next(iter(feed.dataset))
    assert [str(part.dtype.name) for part in batch] == ["float32", "int64"]
    assert feed.data[0] is x


@pytest.mark.parametrize(
    "labels",
    [np.array([0, 1, 2, 5]), np.array([[0], [1], [2], [5]]), np.eye(6)[[0, 1, 2, 5]], np.array([0.0, 1, 2, 5])],
)
def test_class_weights_apply_to_labels_of_any_form(labels):
    assert class_weights(labels, {1: 3.0, 2: 0.5}).tolist() == [1.0, 3.0, 0.5, 1.0]
    assert class_weights(labels, {1: 3, 10**12: np.float32(2)}).tolist() == [1.0, 3.0, 1.0, 1.0], (
        "of a class without samples"
    )
    assert len(batches(app_with(y_train=labels, class_weight={1: 3.0}), "train")) == 3
    assert len(batches(app_with(x_val=np.zeros(1), y_val=np.zeros(1), class_weight={1: 3.0}), "val")) == 2


def test_ineffective_attributes_are_named_unless_train_is_own():
    class Own(Blobs):
        def train(self, weights, worker_epochs, batch_size): ...

    custom = Own()
    custom.sample_weight = Blobs.sample_weights = 1
    try:
        assert look_alikes(custom) == []
        assert look_alikes(Blobs()) == ["self.sample_weights has no effect by that name; did you mean self.w_train?"]
    finally:
        del Blobs.sample_weights


def replica_with(cache, cached_contents=None, **attributes):
    app = Blobs()
    vars(app).update(attributes)
    replica = Replica(None, app)
    return replica, replica.load_data(cached_contents or {}, cache)


def test_equal_arrays_are_cached_once():
    class Scaled(Blobs):
        scale = 1.0

        async def load_dataset(self):
            await super().load_dataset()
            self.used = self.scale

    cache, apps = ArrayCache(), []
    for scale in (1.0, 2.0):
        app = Scaled()
        app.scale = scale
        Replica(None, app).load_data({}, cache)
        apps.append(app)
    assert [app.used for app in apps] == [1.0, 2.0]
    assert apps[0].x_train is apps[1].x_train
    with pytest.raises(ValueError, match="read-only"):  # a change would give another content with the same fingerprint
        apps[0].x_train[0] = 1


def test_cached_arrays_are_not_loaded_again():
    cache = ArrayCache()
    replica, first = replica_with(cache)
    contents_of_app = contents(replica.app)
    second_replica, second = replica_with(cache, contents_of_app, load_dataset=None)
    assert (first.loaded, second.loaded) == (True, False)
    assert second.description.fingerprint == first.description.fingerprint == content(contents_of_app)
    assert second_replica.app.y_test is replica.app.y_test
    _, changed = replica_with(cache, {**contents_of_app, "x_train": "another"})
    assert changed.loaded


def test_cache_drops_data_of_older_runs():
    cache = ArrayCache()
    sizes = []
    for samples in (100, 200, 300, 400):
        replica_with(cache, samples=samples)
        sizes.append(cache.nbytes)
    sample_nbytes = (8 + 4) * 4
    test_nbytes = 100 * sample_nbytes
    assert sizes == [
        100 * sample_nbytes + test_nbytes,
        300 * sample_nbytes + test_nbytes,
        500 * sample_nbytes + test_nbytes,
        700 * sample_nbytes + test_nbytes,
    ]


def test_cache_drops_earlier_data_above_its_limit():
    cache = ArrayCache(max_bytes=1000)
    for name, size in (("a", 400), ("b", 500), ("c", 800)):
        cache[name] = np.zeros(size, np.uint8)
        cache.use([name])
    assert list(cache) == ["c"]
    assert ArrayCache().use(["not here yet"]) is None


def test_evaluations_of_the_same_data_share_one_feed():
    from ddlf.training.evaluation.model import _feed

    app = app_with(x_test=np.zeros((3, 2)), y_test=np.zeros(3))
    first = _feed(app, "test", 2)
    assert _feed(app, "test", 2) is first
    assert _feed(app, "test", 3) is not first
    app.x_test = np.ones((4, 2))
    app.y_test = np.ones(4)
    assert len(_feed(app, "test", 3).data[0]) == 4
