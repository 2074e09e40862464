"""Tests of convolutions that are cut by image rows: they equal whole convolutions, and exchange only rows at borders."""

import numpy as np
import pytest

from ddlf.errors import ConfigError
from ddlf.training.exchanges.split.cut import CUT
from ddlf.training.exchanges.split.images import Window
from ddlf.training.exchanges.split.units import ROWS, between
from tests.training.models import distance
from tests.training.split.test_layer_plan import plan_of
from tests.training.split.test_parts import batches_of, compiled
from tests.training.split.together import Parts, trained_plain

CHANCE = np.random.default_rng(5)
PICTURES = CHANCE.normal(size=(44, 17, 13, 2)).astype("float32")
NUMBERS = np.eye(4, dtype="float32")[CHANCE.integers(0, 4, 44)]


def valid():
    """Return a model without padding, with kernels of 1, 3 and 5, a dilation, strides and pooling."""
    import keras

    layers = keras.layers
    hidden = [
        layers.Conv2D(4, 3, activation="relu", name="three"),
        layers.AveragePooling2D(2, strides=1, name="mean"),
        layers.Conv2D(3, 1, name="one"),
        layers.Conv2D(4, 3, dilation_rate=2, activation="softmax", name="dilated"),
        layers.Dropout(0.2, name="drop"),
        layers.Conv2D(5, 5, strides=2, kernel_regularizer="l2", name="five"),
        layers.Flatten(name="flat"),
        layers.Dense(6, activation="relu", name="dense"),
    ]
    last = layers.Dense(4, activation="softmax", name="last")
    return compiled(keras.Sequential([keras.Input((17, 13, 2)), *hidden, last]), keras.optimizers.SGD(0.5))


def padded():
    """Return a model with zeros at the edges, strides, padded pooling, batch normalization, a skip and a mean."""
    import keras

    layers = keras.layers
    x = keras.Input((17, 13, 2))
    first = layers.Conv2D(4, 3, padding="same", activation="relu", name="three")(x)
    hidden = layers.BatchNormalization(name="norm")(layers.Conv2D(4, 5, padding="same", name="five")(first))
    hidden = layers.Add(name="skip")([first, hidden])
    largest = layers.MaxPooling2D(3, strides=2, padding="same", name="most")(hidden)
    mean = layers.AveragePooling2D(3, strides=2, padding="same", name="mean")(hidden)
    hidden = layers.Concatenate(name="both")([largest, mean])
    hidden = layers.LayerNormalization(name="units")(layers.SpatialDropout2D(0.3, name="drop")(hidden))
    hidden = layers.Conv2D(6, 3, strides=2, padding="same", name="strides")(hidden)
    hidden = layers.GlobalAveragePooling2D(name="all")(hidden)
    return compiled(
        keras.Model(x, layers.Dense(4, activation="softmax", name="last")(hidden)), keras.optimizers.SGD(0.5)
    )


def filters():
    """Return a model whose first layers are cut by images, and whose other layers are cut by filters."""
    return padded()


CASES = {"valid": valid, "padded": padded}


def test_a_window_needs_the_rows_of_its_outputs():
    same_padding = Window.of(9, 3, 1, "same")
    assert (same_padding.count, same_padding.before) == (9, 1)
    assert [
        same_padding.inside(0, 3),
        same_padding.zeros(0, 3),
        same_padding.inside(6, 9),
        same_padding.zeros(6, 9),
    ] == [
        (0, 4),
        (1, 0),
        (5, 9),
        (0, 1),
    ]
    strides = Window.of(10, 3, 2, "same")
    assert (strides.count, strides.before, strides.zeros(0, 5)) == (5, 0, (0, 1))
    valid = Window.of(10, 5, 2, "valid")
    assert (valid.count, valid.inside(1, 3)) == (3, (2, 9))
    assert Window.of(6, 3, 1, "causal").zeros(0, 6) == (2, 0)
    assert strides.counted(0, 5).tolist() == [3, 3, 3, 3, 2]


@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize(("kernel", "stride"), [(1, 1), (3, 1), (5, 1), (3, 2), (5, 2), (2, 2)])
@pytest.mark.parametrize("workers", [2, 3])
def test_at_a_border_only_the_overlap_of_windows_travels(padding, kernel, stride, workers):
    for size in range(28, 40):
        has = between(
            [0, *np.cumsum([len(rows_of_worker) for rows_of_worker in np.array_split(np.arange(size), workers)])], ROWS
        )
        window = Window.of(size, kernel, stride, padding)
        bounds = window.shared(has, workers)
        rows = np.diff(bounds)
        assert bounds[-1] == window.count
        assert max(rows) <= max(-(-window.count // workers), 1.2 * window.count / workers)
        lacking = [
            len(np.setdiff1d(np.arange(*window.inside(low, high)), own_rows))
            for low, high, own_rows in zip(bounds, bounds[1:], has, strict=False)
        ]
        assert sum(lacking) <= (workers - 1) * (max(kernel - stride, 0) + stride - 1)


def test_rows_at_borders_travel_once():
    import keras

    layers = keras.layers
    x = keras.Input((12, 8, 1))
    first = layers.Conv2D(2, 3, padding="same", name="first")(x)
    branches = [layers.Conv2D(2, k, padding="same", name=f"k{k}")(first) for k in (5, 3, 1)]
    model = keras.Model(x, layers.GlobalAveragePooling2D()(layers.Add()(branches)))
    model.compile("sgd", "mse")
    plan = plan_of(model, "within:2,images:rows")
    row, n, mean = 8 * 2 * 4, 16, 2 * 4
    border = 2 * row  # a kernel of 5 needs 2 rows of the other worker; the other kernels need no more
    assert plan.bytes_of_values(plan.parts[0]) == n * (2 * border + mean)
    rows = {name: (way, reason) for name, way, _, reason in plan.layers()}
    assert rows["k5"] == ("image rows 6, 6", "each worker has all its weights")


def test_the_plan_cuts_images_where_fewer_bytes_travel():
    import keras

    layers = keras.layers
    convolutions = [layers.Conv2D(n, 3, strides=2, padding="same", name=f"c{n}") for n in (8, 16, 512)]
    model = keras.Sequential([keras.Input((64, 64, 3)), *convolutions, layers.GlobalAveragePooling2D()])
    model.compile("sgd", "mse")
    ways = {name: how for name, how, _, _ in plan_of(model, "within:2").layers()}
    assert ways["c8"] == "image rows 16, 16"
    assert ways["c512"] == "columns 256, 256"
    ways = {name: how for name, how, _, _ in plan_of(model, "within:2,images:filters").layers()}
    assert ways["c8"] == "columns 4, 4"


def test_a_cut_names_how_images_are_cut():
    assert CUT("split", "stages:2,within:3,images:rows").text == "stages:2,within:3,images:rows"
    with pytest.raises(ConfigError, match="has an unknown end 'images:columns'"):
        CUT("split", "within:3,images:columns")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("padded", "within:2,images:rows"),
        ("padded", "within:3,images:rows"),
        ("valid", "stages:2,within:2,images:rows"),
    ],
)
def test_image_rows_take_the_steps_of_whole_images(name, split):
    batches = batches_of(PICTURES, NUMBERS, 16)
    parts = Parts(CASES[name], split, 16, 2)
    assert sum("image rows" in how for _, how, _, _ in parts.plan.layers()) >= 5
    parts.begin_epoch()
    for number, batch in enumerate(batches):
        parts.train(batch, (0, number))
    weights, metrics = trained_plain(CASES[name], batches, 2)
    assert distance(parts.weights(), weights) < 1e-6
    assert parts.metrics(44) == pytest.approx(metrics, rel=1e-5)
    sent = [44 / 16 * parts.plan.bytes_of_values(part) for part in parts.plan.parts]
    assert parts.sent_activations == pytest.approx(sent)
