"""Tests of building models of Keras from texts: golden models, names, shapes, weights, training, and errors of Keras."""

import numpy as np
import pytest

from ddlf.cli import main
from ddlf.errors import NotationError
from ddlf.extras.text.language.model import read
from tests.extras.text.language.texts import DIGITS, HEADS, LM, SQUARE, text_of
from tests.later import Later
from tests.processes import python

keras, build = Later("keras"), Later("ddlf.extras.text.conversion.build", "build")


def model_of(text):
    return build(read(text))


def test_dense_macros_equal_dense_layers_of_keras():
    """Layers of Keras with the same weights give the same outputs."""
    model = model_of(DIGITS)
    assert model.count_params() == 4546
    x = np.random.default_rng(0).normal(size=(5, 64)).astype("float32")
    usual = keras.Sequential(
        [
            keras.layers.Dense(48, activation="relu"),
            keras.layers.Dense(24, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    usual.build((None, 64))
    usual.set_weights(model.get_weights())
    np.testing.assert_allclose(model(x), usual(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("text", "count"), [(HEADS, 2443), (LM, 99968)])
def test_built_model_has_the_parameter_count_of_the_text(text, count):
    assert model_of(text).count_params() == count == read(text).graph.parameters


def test_integers_are_squared_in_float16():
    model = model_of(SQUARE)
    squares = model(np.array([[1, 2, 3, 4, 5]], "int32"))
    assert squares.dtype == "float32"
    assert np.asarray(squares).tolist() == [[4, 9, 16, 25, 36]]


def test_outputs_train_by_the_names_of_their_blocks():
    model = model_of(HEADS)
    model.compile("sgd", loss={"digit": "sparse_categorical_crossentropy", "parity": "binary_crossentropy"})
    random = np.random.default_rng(0)
    x, y = random.normal(size=(32, 64)), random.integers(0, 10, 32)
    history = model.fit(x, {"digit": y, "parity": (y % 2)[:, None]}, verbose=0).history
    assert {"digit_loss", "parity_loss"} <= set(history)
    assert {name: output.shape for name, output in model(x).items()} == {"digit": (32, 10), "parity": (32, 1)}


def test_causal_mask_hides_the_future():
    model = model_of(LM)
    x = np.random.default_rng(0).integers(0, 256, (1, 96))
    other = x.copy()
    other[0, 50:] = 0
    one_of, another = np.asarray(model(x)), np.asarray(model(other))
    np.testing.assert_array_equal(one_of[:, :50], another[:, :50])
    assert (one_of[:, 50:] != another[:, 50:]).any()


def test_initial_values_follow_from_the_activation():
    text = text_of("dense(shape=[400], activation=relu), dense(shape=[300], activation=tanh)", "[500]", "[300]")
    w1, b1, w2, b2 = model_of(text).get_weights()
    assert np.abs(w1).max() == pytest.approx(np.sqrt(6 / 500), rel=0.02)
    assert np.abs(w2).max() == pytest.approx(np.sqrt(6 / 700), rel=0.02)
    assert set(b1.tolist()) == {np.float32(0.01)}
    assert set(b2.tolist()) == {0.0}


def test_batch_norm_uses_batch_moments_in_training_and_kept_ones_later():
    model = model_of(text_of("batchNorm(mean, variance, scale, bias)", after="[8]"))
    x = np.random.default_rng(0).normal(3, 2, (64, 8)).astype("float32")
    normalized = np.asarray(model(x, training=True))
    np.testing.assert_allclose(normalized, (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5), atol=1e-5)
    mean, variance = 0.01 * x.mean(0), 0.99 + 0.01 * x.var(0)
    np.testing.assert_allclose(model(x), (x - mean) / np.sqrt(variance + 1e-5), atol=1e-4)
    trained = {weight.name: weight.trainable for weight in model.layers[-1].weights}
    assert trained == {"mean1": False, "variance1": False, "scale1": True, "bias1": True}


def test_dropout_acts_only_in_training():
    model = model_of(text_of("dropout(p=0.5)"))
    x = np.ones((100, 8), "float32")
    np.testing.assert_array_equal(model(x), x)
    assert {0.0, 2.0} == set(np.asarray(model(x, training=True)).ravel().tolist())


def test_built_model_saves_and_loads_as_keras_file(tmp_path):
    model = model_of(LM)
    model.save(tmp_path / "lm.keras")
    again = keras.saving.load_model(tmp_path / "lm.keras")
    x = np.random.default_rng(0).integers(0, 256, (2, 96))
    np.testing.assert_array_equal(model(x), again(x))
    saved_configs, loaded_configs = (
        [layer.get_config() for layer in keras_model.layers if type(layer).__name__ == "Operator"]
        for keras_model in (model, again)
    )
    assert saved_configs == loaded_configs
    assert len(saved_configs) == 6


def test_layer_names_are_stable():
    text = text_of("Dense(units=8, name=first), Dense(units=8), Dense(units=8), dense(shape=[8], activation=relu)")
    names = [layer.name for layer in model_of(text).layers]
    assert names == ["a", "first", "dense", "dense_1", "matmul", "add", "relu"]
    assert names == [layer.name for layer in model_of(text).layers]


def test_shapes_known_only_to_keras_reach_later_layers():
    model = model_of(
        text_of(
            "Reshape(target_shape=[4, 2]), ZeroPadding1D(padding=1), reduceMean(axes=[0]), matmul(w), softmax()",
            "[8]",
            "[3]",
        )
    )
    assert model.output_shape == (None, 3)
    assert [weight.shape for weight in model.weights] == [(2, 3)]


def test_built_types_equal_those_of_the_text():
    model = model_of(text_of("matmul(w, float16), add(b), relu(), softmax()"))
    assert [str(weight.dtype) for weight in model.weights] == ["float16", "float32"]
    assert model.output.dtype == "float32"


@pytest.mark.parametrize(
    ("layers", "position", "sentence"),
    [
        ("Dropout(rate=3)", "2:10", "Dropout: Keras says:"),
        ("relu(), Dense(unitz=3, units=8)", "2:30", "no argument"),
        ("Conv2D(filters=8, kernel_size=3)", "2:10", "Keras says:"),
        ("relu(), Dense(units=3)", "1:20", "its layer gives [3]"),
        ("matmul(w, int4)", "2:10", "Keras has no type int4"),
        ("own>Missing(units=3)", "2:10", "there is no own>Missing"),
    ],
)
def test_error_of_keras_names_the_place_in_the_text(layers, position, sentence):
    with pytest.raises(NotationError) as caught:
        model_of(text_of(layers))
    assert sentence in str(caught.value), caught.value


def test_convert_writes_a_file_that_keras_loads(tmp_path, capsys):
    (tmp_path / "digits.nnm").write_text(DIGITS)
    with pytest.raises(SystemExit) as ended:
        main.main(["model", "convert", str(tmp_path / "digits.nnm"), str(tmp_path / "digits.keras")])
    assert not ended.value.code
    assert "digits.keras: 4,546 parameters" in capsys.readouterr().out
    assert keras.saving.load_model(tmp_path / "digits.keras").name == "digits"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["digits.keras", "digits.nnm"]


@pytest.mark.slow
def test_converted_model_loads_in_another_process(tmp_path):
    path = tmp_path / "digits.keras"
    model_of(DIGITS).save(path)
    code = f"import ddlf.extras.text.conversion.operator, keras; print(keras.saving.load_model({str(path)!r}).count_params())"
    assert python(code) == "4546\n"


def test_learning_rate_factor_applies_to_any_optimizer():
    import keras

    model = model_of(
        text_of('dense(shape=[8], activation=relu, lrm=0.5), Dense(units=8, name="end", lrm=2), relu(lrm=3)')
    )
    model.compile(keras.optimizers.SGD(0.1), "mse")
    trained = {weight.path.partition("/")[0] for weight in model.trainable_variables}
    assert model.optimizer.factors == {name: 2.0 if name == "end" else 0.5 for name in trained}
    model.compile(model.optimizer, "mse")
    assert isinstance(model.optimizer.inner_optimizer, keras.optimizers.SGD)
    plain = model_of(text_of("dense(shape=[8], activation=relu)"))
    plain.compile("sgd", "mse")
    assert isinstance(plain.optimizer, keras.optimizers.SGD)


def test_text_with_custom_layers_exports_with_their_file(tmp_path):
    from ddlf.extras.export import keras_model, steps

    head = "import keras\n@keras.saving.register_keras_serializable('exported')\nclass Twice(keras.layers.Layer):\n"
    (tmp_path / "exported_mine.py").write_text(f"{head}    def call(self, x):\n        return 2 * x\n")
    (tmp_path / "a.nnm").write_text(text_of("exported>Twice(), Dense(units=8)"))
    job = {"model": tmp_path / "a.nnm", "target": tmp_path / "a.keras", "code": str(tmp_path / "exported_mine.py")}
    steps.STEPS["build"](job, tmp_path)
    loaded = keras_model.load(tmp_path / "a.keras", tmp_path / "exported_mine.py")
    assert [type(layer).__name__ for layer in loaded.layers] == ["InputLayer", "Twice", "Dense"]
