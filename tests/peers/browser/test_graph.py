"""Tests of the layer graph that browsers receive, and of models that cannot have one."""

import json

import pytest

from ddlf.errors import ConfigError
from ddlf.extras.text.conversion.weights import variables
from ddlf.peers.browser import supported
from ddlf.peers.browser.graph import _row, layer_graph
from tests.later import Later

keras = Later("keras")
layers = Later("keras.layers")
models = Later("tests.peers.browser.models")


def written(model):
    return json.loads(json.dumps(layer_graph(model, variables(model))))


def compiled(*stack, shape=(8, 8, 2), dtype="float32", batch=None, **settings):
    """Return a compiled Sequential model of these layers."""
    model = keras.Sequential([keras.Input(shape, batch, dtype), *stack])
    model.compile(**({"loss": "mse", "optimizer": "sgd"} | settings))
    return model


def refused(model):
    with pytest.raises(ConfigError, match="browsers cannot train ") as caught:
        written(model)
    return str(caught.value)


def test_graph_of_the_webnn_model_has_its_parameters_by_name_and_its_calls_in_order():
    graph = written(models.webnn())
    shapes = {weight["name"]: weight["shape"] for weight in graph["weights"]}
    first, second, last = (layer["name"] for layer in graph["layers"] if layer["weights"])
    assert list(shapes) == [
        f"{name}/{weight_name}" for name in (first, second, last) for weight_name in ("kernel", "bias")
    ]
    assert shapes[f"{second}/kernel"] == [5, 5, 8, 16]
    assert graph["inputs"][0]["shape"] == [28, 28, 1]
    assert [call["inputs"] for call in graph["calls"]] == [[n] for n in range(6)]
    assert graph["outputs"] == [6]
    assert graph["losses"][0]["kind"] == "categorical_crossentropy"
    assert graph["losses"][0]["metrics"] == [{"name": "accuracy", "kind": "accuracy_by_shape", "config": {}}]
    assert graph["optimizer"]["rate"]["config"]["value"] == pytest.approx(0.05)


def test_a_shared_layer_is_written_once_and_called_twice():
    graph = next(models.graph_cases()).written["graph"]
    assert [layer["name"] for layer in graph["layers"]].count("shared") == 1
    assert [call["number"] for call in graph["calls"] if call["layer"] == "shared"] == [0, 1]
    assert [loss["weight"] for loss in graph["losses"]] == [1.0, 0.3]
    inner = {weight["name"].rpartition("/")[2] for weight in graph["weights"] if weight["name"].startswith("inner/")}
    assert {"kernel", "gamma"} <= inner  # Keras numbers names by the models made before


def test_every_other_layer_of_keras_is_refused_by_name():
    kinds = {name: kind for name, kind in vars(keras.layers).items() if isinstance(kind, type)}
    kinds = {name: kind for name, kind in kinds.items() if issubclass(kind, keras.layers.Layer)}
    unlisted = {name: kind for name, kind in kinds.items() if kind.__name__ not in supported.LAYERS}
    assert len(unlisted) > 60
    for kind in unlisted.values():
        with pytest.raises(ConfigError, match=f"browsers cannot train the layer 'x' \\({kind.__name__}\\)"):
            _row(object.__new__(kind), supported.LAYERS, keras.layers, "the layer 'x'")


def test_parts_that_the_engine_cannot_compute_exactly_are_refused_by_name():
    dense = layers.Dense

    class Dense(keras.layers.Dense):
        """A class with the same name as a class of Keras."""

    def own_loss(labels, outputs):
        return keras.ops.mean(labels - outputs)

    def own_activation(x):
        return x

    def own_rate():
        return 0.1

    entry = keras.Input((4,))
    operation = keras.Model(entry, keras.ops.sin(entry))
    operation.compile("sgd", "mse")
    bare = keras.Sequential([keras.Input((4,)), dense(2)])
    kinds = keras.optimizers
    vector = {"shape": (4,)}
    for model, sentence in (
        (compiled(layers.Lambda(lambda x: x), **vector), "(Lambda)"),
        (compiled(Dense(2, name="mine"), **vector), "the layer 'mine' (Dense)"),
        (compiled(dense(2, activation=own_activation), **vector), "with the activation own_activation"),
        (compiled(dense(2, kernel_constraint="non_neg"), **vector), "with kernel_constraint"),
        (compiled(dense(2, activity_regularizer="l2"), **vector), "with activity_regularizer"),
        (
            compiled(dense(2, kernel_regularizer=keras.regularizers.OrthogonalRegularizer()), **vector),
            "OrthogonalRegularizer",
        ),
        (compiled(dense(2, dtype="float16"), **vector), "of type float16"),
        (compiled(layers.ZeroPadding2D(data_format="channels_first")), "data_format='channels_first'"),
        (compiled(layers.UpSampling2D(2, interpolation="bilinear")), "interpolation='bilinear'"),
        (compiled(layers.LSTM(2, stateful=True), shape=(3, 2), batch=4), "stateful=True"),
        (compiled(layers.GRU(2, dropout=0.5), shape=(3, 2)), "dropout=0.5"),
        (compiled(layers.Embedding(5, 2, mask_zero=True), shape=(3,), dtype="int32"), "mask_zero=True"),
        (compiled(dense(2), shape=(None, 4)), "of a fixed shape"),
        (compiled(dense(2), loss=own_loss, **vector), "(own_loss)"),
        (compiled(dense(2), loss=keras.losses.Dice(), **vector), "(Dice)"),
        (compiled(dense(2), loss=keras.losses.CosineSimilarity(axis=0), **vector), "axis=0"),
        (compiled(dense(2), loss=keras.losses.MeanSquaredError(reduction=None), **vector), "reduction=None"),
        (compiled(dense(2), metrics=[keras.metrics.AUC()], **vector), "(AUC)"),
        (compiled(dense(2), weighted_metrics=["mae"], **vector), "weighted_metrics"),
        (compiled(dense(2), optimizer="ftrl", **vector), "(Ftrl)"),
        (compiled(dense(2), optimizer=kinds.SGD(use_ema=True), **vector), "use_ema=True"),
        (
            compiled(dense(2), optimizer=kinds.Adam(gradient_accumulation_steps=2), **vector),
            "gradient_accumulation_steps=2",
        ),
        (compiled(dense(2), optimizer=kinds.SGD(own_rate), **vector), "a learning rate that is a function"),
        (
            compiled(dense(2), optimizer=kinds.SGD(kinds.schedules.CosineDecayRestarts(0.1, 5)), **vector),
            "CosineDecayRestarts",
        ),
        (operation, "the operation Sin"),
        (bare, "which is not compiled"),
    ):
        assert sentence in refused(model)
