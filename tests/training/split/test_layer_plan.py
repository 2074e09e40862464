"""Tests of layers that are cut between the workers of a stage: they compute the results of whole layers."""

import numpy as np
import pytest

from ddlf.errors import ConfigError
from ddlf.training.exchanges.split.cut import CUT
from ddlf.training.exchanges.split.graph import Graph
from ddlf.training.exchanges.split.layer_plan import check_steps
from ddlf.training.exchanges.split.plan import Plan
from ddlf.training.exchanges.split.units import Piece, Units, joined, shares, take_indices
from tests.training.models import blobs, distance
from tests.training.split.test_parts import DIGITS, IMAGES, WORDS, attention, batches_of, compiled, layered, skips
from tests.training.split.together import Parts, build_model, trained_plain


def images():
    """Return a model with strides, both paddings, a branch, units that Flatten spreads, and a softmax over cut units."""
    import keras

    layers = keras.layers
    x = keras.Input((8, 8, 1))
    first = layers.Conv2D(10, 3, strides=2, padding="same", activation="relu", kernel_regularizer="l2", name="first")(x)
    hidden = layers.BatchNormalization(name="norm")(first)
    hidden = layers.SpatialDropout2D(0.3, name="drop")(layers.Conv2D(7, 2, name="second")(hidden))
    joined = layers.Concatenate(axis=1, name="joined")(
        [layers.Flatten(name="flat")(hidden), layers.GlobalMaxPooling2D(name="most")(first)]
    )
    hidden = layers.Dense(12, activation="softmax", name="soft")(joined)
    hidden = layers.Dropout(0.2, name="out")(layers.Activation("softmax", name="again")(hidden))
    return compiled(
        keras.Model(x, layers.Dense(4, activation="softmax", name="last")(hidden)), keras.optimizers.SGD(0.5)
    )


def block():
    """Return a model with a block of a transformer, in which heads drop attention."""
    import keras

    layers = keras.layers
    x = keras.Input((6,), dtype="int32")
    hidden = layers.Embedding(11, 8)(x)
    attend = layers.MultiHeadAttention(3, 4, dropout=0.3)
    hidden = layers.LayerNormalization()(layers.Add()([hidden, attend(hidden, hidden)]))
    hidden = layers.Add()([hidden, layers.Dense(8)(layers.Dense(16, activation="gelu")(hidden))])
    pooled = layers.GlobalAveragePooling1D()(hidden)
    return compiled(keras.Model(x, layers.Dense(4, activation="softmax")(pooled)), keras.optimizers.SGD(0.5))


def tied():
    """Return a model with a layer that uses the matrix of another layer, so this other layer stays whole."""
    import keras

    class Back(keras.layers.Layer):
        def __init__(self, forward_layer, **options):
            super().__init__(**options)
            self.forward_layer = forward_layer

        def call(self, x):
            return keras.ops.matmul(x, keras.ops.transpose(self.forward_layer.kernel))

    x, first = keras.Input((8,)), keras.layers.Dense(4, name="first")
    hidden = keras.layers.Dense(4, activation="tanh", name="second")(first(x))
    outputs = keras.layers.Dense(4, activation="softmax", name="last")(Back(first)(hidden))
    return compiled(keras.Model(x, outputs), keras.optimizers.SGD(0.5))


CASES = {
    "dense": (layered, batches_of(*blobs(44), 16), 1e-6),
    "skips": (skips, batches_of(*blobs(44), 16), 1e-6),
    "images": (images, batches_of(IMAGES, DIGITS, 16), 1e-6),
    "tied": (tied, batches_of(*blobs(44), 16), 1e-6),
    "block": (block, batches_of(WORDS, DIGITS, 16), 1e-6),
}


def plan_of(model, split, batch_size=16, micro_batches=1, replicas=1):
    return Plan.of(Graph.of(model), CUT("split", split), batch_size, micro_batches, replicas)


def dense(*units, optimizer="sgd", **options):
    import keras

    layers = [keras.layers.Dense(n, name=f"d{index}", **options) for index, n in enumerate(units)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.compile(optimizer, "mse")
    return model


def test_units_need_not_divide_evenly():
    assert shares(10, 3).counts == [4, 3, 3]
    units = Units(tuple(np.array(indices) for indices in ([0, 3, 4], [1, 5], [2])))
    values = np.arange(12.0).reshape(2, 6)
    assert np.array_equal(joined([take_indices(values, indices) for indices in units], units.of), values)
    piece = Piece(-1, units)
    assert np.array_equal(piece.join([piece.share_of(values, worker) for worker in range(3)]), values)
    assert [piece.fraction(worker) for worker in range(3)] == [3 / 6, 2 / 6, 1 / 6]


def test_nothing_is_gathered_between_columns_and_rows():
    plan = plan_of(dense(512, 10), "within:3")
    assert [way.name for way in plan.program.ways] == ["columns", "rows"]
    kinds = {name.kind for part in plan.program.segments for segment in part for name in segment.names.values()}
    assert kinds == {"addend"}
    n, first = 16, plan.parts[0]
    assert plan.bytes_sent(first) == 4 * n * 10
    assert plan.bytes_sent(plan.parts[-1]) == 2 * 4 * n * 10  # the gradients of the sums, to two workers
    assert max(share for _, _, share, _ in plan.layers()) <= 0.4


def test_each_border_value_goes_to_each_machine_once():
    plan = plan_of(dense(6, 60, 6), "within:3")
    assert [way.name for way in plan.program.ways] == ["columns", "columns", "rows"]
    n, workers = 16, 3
    gather = 4 * n * 6 * (workers - 1) // workers  # its gradient is a reduce-scatter with as many bytes
    assert plan.bytes_sent(plan.parts[0]) == 2 * gather + 4 * n * 6
    assert plan.bytes_sent(plan.parts[-1]) == 2 * gather + 2 * 4 * n * 6


def test_the_table_shows_how_each_layer_is_cut_and_which_layers_stay_whole():
    import keras

    model = build_model(attention)
    model.layers[-1].kernel_regularizer = model.layers[-1].kernel.regularizer = (
        keras.regularizers.OrthogonalRegularizer()
    )
    table = plan_of(model, "within:2").describe()
    rows = {line.split("  ")[0]: " ".join(line.split()) for line in table.splitlines()}
    assert rows["embedding"] == "embedding units 4, 4 50.0 % "[:-1]
    assert rows["multi_head_attention"] == "multi_head_attention heads 1, 1 50.0 %"
    assert rows["layer_normalization"] == "layer_normalization unit by unit 4, 4 50.0 %"
    assert rows["dense_1"] == "dense_1 whole 100.0 % its regularizer OrthogonalRegularizer needs whole weights"


def test_the_table_shows_layers_that_stay_whole_because_of_weights_or_types():
    import keras

    def uncut_layers(model):
        return {name: reason for name, way, _, reason in plan_of(model, "within:2").layers() if way == "whole"}

    assert uncut_layers(build_model(tied)) == {
        "first": "another layer uses its weights, too",
        "back": "a layer Back is not cut",
    }
    kinds = {"h": "mixed_bfloat16", "f": "float32", "g": "float32"}
    model = keras.Sequential(
        [keras.Input((8,)), *(keras.layers.Dense(4, name=name, dtype=kind) for name, kind in kinds.items())]
    )
    model.compile("sgd", "mse")
    assert uncut_layers(model) == {
        "h": (type_reason := "it computes in another type than its weights or its input have"),
        "f": type_reason,
    }


def test_the_table_explains_a_large_share_of_a_layer():
    import keras

    x = keras.Input((6, 8))
    attend = keras.layers.MultiHeadAttention(4, 2, name="attend")(x, x)
    model = keras.Model(x, keras.layers.GroupNormalization(2, name="groups")(attend))
    model.compile("sgd", "mse")
    rows = {name: (way, reason) for name, way, _, reason in plan_of(model, "within:3").layers()}
    assert rows["attend"] == ("heads 2, 1, 1", "4 heads do not divide evenly between 3 parts")
    assert rows["groups"] == ("whole", "a layer GroupNormalization is not cut")


def test_a_cut_that_cuts_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"cuts no layer of the model .* \(d0: it has 3 units for 4 parts; d1: "):
        plan_of(dense(3, 2), "within:4").check()
    plan_of(dense(4, 2), "within:4").check()


def test_optimizers_that_need_whole_weights_are_refused():
    import keras

    with pytest.raises(ConfigError, match="the steps of Adafactor may depend on whole weights"):
        check_steps(keras.optimizers.Adafactor())
    with pytest.raises(ConfigError, match="clipnorm needs the norm of each whole weight"):
        check_steps(keras.optimizers.Adam(clipnorm=1.0))
    check_steps(keras.optimizers.AdamW(global_clipnorm=1.0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("dense", "within:3"),
        ("skips", "stages:2,within:2"),
        ("images", "within:3"),
        ("tied", "within:2"),
        ("block", "within:2"),  # one worker has two of the three heads
    ],
)
def test_cut_layers_take_the_steps_of_whole_ones(name, split):
    build, batches, tolerance = CASES[name]
    parts = Parts(build, split, 16, 2)
    parts.begin_epoch()
    for number, batch in enumerate(batches):
        parts.train(batch, (0, number))
    weights, metrics = trained_plain(build, batches, 2)
    assert distance(parts.weights(), weights) < tolerance
    assert parts.metrics(44) == pytest.approx(metrics, rel=1e-5)
    sent = [44 / 16 * parts.plan.bytes_of_values(part) for part in parts.plan.parts]
    assert parts.sent_activations == pytest.approx(sent)
