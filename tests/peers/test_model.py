"""Tests of a peer's model: it equals the server's model, and parts that a text cannot describe are refused by name."""

import importlib
from pathlib import Path

import numpy as np
import pytest

from ddlf.errors import ConfigError, DatasetError, DDLFError

keras = None
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(96, 8, 8, 1)).astype(np.float32)
Y = RANDOM.integers(0, 10, 96)


@pytest.fixture(autouse=True)
def imported():
    global keras
    keras = importlib.import_module("keras")


def model(last="softmax"):
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dense(10, activation=last),
        ]
    )


def peer_of(app_model):
    from ddlf.peers.model import settled_text, text_of_model, trained_from_text

    text = settled_text(text_of_model(app_model), "app.py", None).text
    return trained_from_text(text, {"x_train": X, "y_train": Y}, "mine.npz", lambda line: None, 0)


@pytest.mark.parametrize(
    ("optimizer", "loss", "last"),
    [
        pytest.param(
            lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
            "sparse_categorical_crossentropy",
            "softmax",
            marks=pytest.mark.slow,
        ),
        (lambda: keras.optimizers.Adam(0.01, beta_1=0.8, clipnorm=1.0), "categorical_crossentropy", "softmax"),
        pytest.param(
            lambda: keras.optimizers.AdamW(0.01),
            lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "linear",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_peer_takes_the_same_steps_as_the_model_of_the_app(optimizer, loss, last):
    app_model = model(last)
    app_model.compile(optimizer(), loss() if callable(loss) else loss, metrics=["accuracy"])
    trained = peer_of(app_model)
    assert trained.samples == 96
    trained.assign([np.array(weight) for weight in app_model.weights])
    order = np.random.default_rng(0).permutation(96)
    one_hot = np.eye(10, dtype=np.float32)[Y] if loss == "categorical_crossentropy" else Y
    for step in range(3):
        trained.batch(32)
        rows = order[32 * step : 32 * (step + 1)]
        app_model.train_on_batch(X[rows], one_hot[rows])
    for trained_weight, weight in zip(trained.weights(), app_model.weights, strict=True):
        np.testing.assert_allclose(trained_weight, np.array(weight), rtol=0, atol=1e-6)
    means = trained.means()
    assert 0 < means["loss"] < 10
    assert 0 <= means["accuracy"] <= 1


def test_validating_other_weights_does_not_change_the_live_ones():
    app_model = model()
    app_model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    trained = peer_of(app_model)
    live = trained.weights()
    accuracy, loss, samples = trained.test([np.zeros_like(weight) for weight in live])
    assert (samples, loss) == (64, pytest.approx(np.log(10), abs=1e-5))
    assert 0 <= accuracy <= 1
    for before, after in zip(live, trained.weights(), strict=True):
        np.testing.assert_array_equal(before, after)


def refused(app_model):
    from ddlf.peers.model import text_of_model

    with pytest.raises(DDLFError) as error:
        text_of_model(app_model)
    return str(error.value)


def test_parts_that_a_text_cannot_describe_are_refused_by_name():
    app_model = model()
    assert "not compiled" in refused(app_model)
    app_model.compile("sgd", lambda y, p: keras.ops.sum(p))
    assert "the loss '<lambda>'" in refused(app_model)
    app_model.compile("ftrl", "mean_squared_error")
    assert "the optimizer Ftrl" in refused(app_model)
    app_model.compile("sgd", keras.losses.CategoricalCrossentropy(label_smoothing=0.1))
    assert "categorical_crossentropy and label_smoothing=0.1" in refused(app_model)
    app_model.compile("sgd", keras.losses.Huber(delta=2.0))
    assert "the loss 'huber_loss'" in refused(app_model)
    app_model.compile(keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 10)), "mean_squared_error")
    assert "schedule of the learning rate" in refused(app_model)
    app_model.compile("sgd", keras.losses.CategoricalCrossentropy(from_logits=True))
    assert "from_logits=True, and the last activation is softmax" in refused(app_model)
    app_model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Lambda(lambda x: x, name="lambda"), keras.layers.Dense(2)]
    )
    app_model.compile("sgd", "mean_squared_error")
    assert "cannot train the layer 'lambda' (Lambda), whose code is in the app; use layers of Keras" in refused(
        app_model
    )


def test_layers_losses_and_optimizers_of_the_app_itself_are_refused_by_name():
    class Twice(keras.layers.Layer):
        def call(self, x):
            return 2 * x

    class MeanSquaredError(keras.losses.Loss):
        def call(self, y, p):
            return keras.ops.mean(p)

    class SGD(keras.optimizers.SGD):
        pass

    def mean_squared_error(y, p):
        return keras.ops.mean(p)

    inner = keras.Sequential([keras.Input((4,)), Twice(name="inside")])
    app_model = keras.Sequential([keras.Input((4,)), inner, keras.layers.Dense(2)])
    app_model.compile("sgd", "mse")
    assert "cannot train the layer 'inside' (Twice), whose code is in the app" in refused(app_model)
    app_model = model()
    for loss in (mean_squared_error, MeanSquaredError()):
        app_model.compile("sgd", loss)
        assert "cannot train with the loss 'mean_squared_error' of the app" in refused(app_model)
    app_model.compile(SGD(), "mse")
    assert "cannot train with the optimizer SGD" in refused(app_model)


def test_peers_report_no_metrics_except_accuracies_given_by_name():
    from ddlf.peers.model import metrics_of, text_of_model

    def own_accuracy(y, p):
        return keras.ops.mean(p)

    app_model = model()
    app_model.compile(
        "sgd", "sparse_categorical_crossentropy", metrics=[own_accuracy, keras.metrics.AUC(name="auc"), "mae"]
    )
    assert metrics_of(app_model) == ([], ["own_accuracy", "auc", "mae"])
    assert "train:metrics" not in text_of_model(app_model)
    for metric in ("acc", "sparse_categorical_accuracy", keras.metrics.SparseCategoricalAccuracy("right")):
        app_model.compile("sgd", "sparse_categorical_crossentropy", metrics=[metric])
        assert metrics_of(app_model)[1] == ([] if isinstance(metric, str) else ["right"])


def test_a_peer_reports_that_it_reshapes_samples():
    from ddlf.peers.model import settled_text, trained_from_text

    text = "a:input shape=[64];\na:output shape=[10];\na:layers Dense(units=10, activation=softmax);\na:loss SCE;\n"
    text = settled_text(text, "a.nnm", None).text
    for shape, expected in (((4, 16), ["data      samples of the shape [4, 16] become [64]"]), ((64, 1), [])):
        lines = []
        data = {"x_train": X.reshape(-1, *shape), "y_train": Y}
        trained_from_text(text, data, "mine.npz", lines.append, 0)
        assert lines == expected


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_data_with_values_that_are_not_finite_is_refused(wrong):
    from ddlf.peers.model import settled_text, text_of_model, trained_from_text

    app_model = model()
    app_model.compile("sgd", "sparse_categorical_crossentropy")
    text = settled_text(text_of_model(app_model), "app.py", None).text
    x = X.copy()
    x[7, 0, 0, 0] = wrong
    for name, data in (
        ("x", {"x": x, "y": Y}),  # the file has no part
        ("x_train", {"x_train": x, "y_train": Y}),
        ("x_test", {"x_train": X, "y_train": Y, "x_test": x, "y_test": Y}),
    ):
        with pytest.raises(
            DatasetError, match=rf"^1 of [\d,]+ values of {name} in mine.npz are not finite; replace NaN"
        ):
            trained_from_text(text, data, "mine.npz", lambda line: None, 0)


def test_a_text_without_a_loss_needs_data_to_choose_one():
    from ddlf.peers.model import settled_text

    text = "a:input shape=[64];\na:output shape=[10];\na:layers Dense(units=10, activation=softmax);\n"
    with pytest.raises(DDLFError, match="no loss for its output 'a'; write one into it, such as a:loss SCE;"):
        settled_text(text, "a.nnm", None)
    data = {"x_train": np.zeros((20, 64), np.float32), "y_train": np.arange(20) % 10}
    assert "a:loss SCE" in settled_text(text, "a.nnm", data).text


def test_a_file_without_parts_is_entirely_test_data_on_the_server(tmp_path):
    from ddlf.peers.serving import read_model

    (tmp_path / "a.nnm").write_text(
        "a:input shape=[4];\na:output shape=[3];\na:layers Dense(units=3, activation=softmax);\n"
    )
    np.savez(tmp_path / "test.npz", x=np.zeros((20, 4), np.float32), y=np.arange(20) % 3)
    served = read_model(tmp_path / "a.nnm", str(tmp_path / "test.npz"), Path, 0)
    assert served.test(served.model.layout.decode(served.model.first))[2] == 20


def test_statistics_of_batchnorm_travel_exactly():
    from ddlf.peers.wire import Wire

    app_model = model()
    app_model.compile("sgd", "categorical_crossentropy")
    peer = peer_of(app_model)
    kinds = {name: kind for name, _, kind in Wire(peer.layout, "bfloat16", peer.trainable).layout.tensors}
    exact = sorted(name.partition("/")[2] for name, kind in kinds.items() if kind == "float32")
    assert exact == ["moving_mean", "moving_variance"]
    assert len(kinds) == 8


def test_data_that_does_not_exist_is_named():
    from ddlf.peers.model import arrays_of

    with pytest.raises(ConfigError, match=r"mine\.npz"):
        arrays_of("mine.npz")


def test_a_link_with_an_impossible_port_is_refused():
    from ddlf.peers.sessions import read_link

    with pytest.raises(ConfigError, match="no usable port"):
        read_link("http://127.0.0.1:89301/#code")


@pytest.mark.parametrize(
    "values",
    [
        {"merge": "copy"},
        {"end": 0.97},
        {"decay": True},
        {"trial": 0.2, "validated_by": "server"},
    ],
)
def test_a_server_refuses_settings_that_need_an_accuracy_for_a_model_without_one(values):
    from ddlf.peers.plan import Plan
    from ddlf.peers.serving import check_accuracy

    app_model = model()
    app_model.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.raises(ConfigError, match="the model reports none"):
        check_accuracy(Plan(**values), app_model)
    check_accuracy(Plan(end=600), app_model)
    app_model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    check_accuracy(Plan(**values), app_model)


def test_a_server_refuses_decay_of_a_schedule():
    import keras

    from ddlf.peers.plan import Plan
    from ddlf.peers.serving import check_accuracy

    app_model = model()
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 100, 0.9)
    app_model.compile(keras.optimizers.SGD(schedule), "sparse_categorical_crossentropy", metrics=["accuracy"])
    with pytest.raises(ConfigError, match="has a schedule"):
        check_accuracy(Plan(decay=True), app_model)


@pytest.mark.parametrize("values", [{"end": 0.97}, {"decay": True}, {"trial": 0.2}])
def test_a_server_refuses_settings_that_need_validation_without_it(values):
    from ddlf.peers.plan import Plan
    from ddlf.peers.serving import check_tests

    served = values | {"validated_by": "server"}
    if "trial" not in values:
        with pytest.raises(ConfigError, match="in rounds, peers do not test the model"):
            check_tests(Plan(way="rounds", merge="mean", **values))
        check_tests(Plan(**values))
    with pytest.raises(ConfigError, match="--validate-s 0 turns tests off"):
        check_tests(Plan(validate_s=0.0, **served))
    check_tests(Plan(way="rounds", merge="mean", **served))
    check_tests(Plan(way="rounds", merge="mean", end=600))
