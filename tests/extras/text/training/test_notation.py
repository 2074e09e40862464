"""Tests of a loaded text as an object: its decisions, the written text, and training with named inputs and outputs."""

import pickle

import numpy as np
import pytest

import ddlf
from ddlf.errors import AppError, ConfigError, DatasetError, NotationError
from ddlf.extras.text.conversion.weights import save
from ddlf.extras.text.language.model import read
from ddlf.extras.text.language.values import Word
from ddlf.extras.text.training.notation import Notation
from tests.extras.text.language.texts import DIGITS, HEADS, text_of
from tests.later import Later

keras, build = Later("keras"), Later("ddlf.extras.text.conversion.build", "build")

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(40, 64)).astype("float32")
Y = np.arange(40) % 10
OPEN = DIGITS.replace("digits:loss SCE;", "")
WEIGHTS = "a:layers Dense(units=3), Dense(units=1);\n"
LINE = "a:input shape=[2]; a:output shape=[1];\n" + WEIGHTS


def settled(text, x=X, y=Y, validation=False):
    return Notation(text).settled(x, y, validation=validation)


def test_text_with_its_decisions_decides_nothing_again():
    """The text of a run contains all decisions, so running it again gives the same model."""
    first = settled(OPEN + "# why\ntrain:penalty none; train:epochs 3;")
    assert {decision.key: decision.value for decision in first.decisions} == {
        **dict(loss="SCE", optimizer="adam", initial="by_activation", scaling="none", clipping="none"),
        **dict(loss_weights="none", patience="none", schedule="none", clip="none", class_weight="none"),
    }
    assert "# why" in first.text
    again = settled(first.text)
    assert again.decisions == ()
    assert again.digest == first.digest
    assert again.text == first.text


def test_written_keys_stay_with_any_data():
    text = (
        OPEN
        + "train:loss CCE; train:optimizer SGD(learning_rate=0.5); train:scaling none; train:patience 3; train:clipping 2; train:metrics none;"
    )
    notation = settled(text, X * 100, np.eye(10)[Y], validation=True)
    model = notation.compiled()
    assert {decision.key for decision in notation.decisions} == {
        "initial",
        "penalty",
        "loss_weights",
        "schedule",
        "class_weight",
    }
    assert isinstance(model.loss, keras.losses.CategoricalCrossentropy)
    assert isinstance(model.optimizer, keras.optimizers.SGD)
    assert float(model.optimizer.learning_rate) == 0.5
    assert model.optimizer.global_clipnorm == 2
    assert notation.patience == 3
    assert not any(isinstance(layer, keras.layers.Normalization) for layer in model.layers)


def test_optimizer_with_own_clipping_prevents_a_decision():
    text = (
        text_of("LSTM(units=4), dense(shape=[1], activation=linear)", "[5, 2]", "[1]")
        + "train:optimizer Adam(clipnorm=3.0);"
    )
    notation = settled(text, RANDOM.normal(size=(8, 5, 2)), RANDOM.normal(size=8))
    assert "clipping" not in {decision.key for decision in notation.decisions}
    assert notation.compiled().optimizer.clipnorm == 3


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ("train:schedule none;", "schedule"),
        ("train:optimizer Adam(learning_rate=CosineDecay(initial_learning_rate=0.1, decay_steps=9));", "schedule"),
        ("train:optimizer ScheduleFreeAdamW();", "schedule"),
        ("train:clip agc;", "clip"),
        ("train:optimizer SGD(clipvalue=3.0);", "clip"),
        ("train:clipping 3;", "clip"),
        ("train:class_weight [1, 2];", "class_weight"),
    ],
)
def test_written_key_prevents_related_decisions(more, key):
    assert key in {decision.key for decision in settled(OPEN).decisions}
    assert key not in {decision.key for decision in settled(OPEN + more).decisions}


def test_outlier_sample_turns_clip_on_except_in_bytes():
    x = X.copy()
    x[3] *= 1000
    assert settled(OPEN).settings["clip"] is None
    assert settled(OPEN, x).settings["clip"] == "rolling"
    assert settled(OPEN, np.eye(64, dtype="uint8")[:40] * 255).settings["clip"] is None


@pytest.mark.slow
def test_train_method_uses_written_and_decided_settings():
    """The last step has the final rate, even if training continues. Rare classes have a larger weight."""
    from ddlf.training.slot.optimizers import chain, innermost

    text = DIGITS + 'train:schedule "warmup:0.5,linear"; train:clip rolling; train:batch 16;'
    notation = Notation(text)
    for epochs in (2, 1):
        notation.train(X, np.zeros(40, int) + (np.arange(40) == 7), epochs=epochs)
        optimizer = notation.keras.optimizer
        rate = innermost(optimizer)._learning_rate
        assert float(rate(int(optimizer.iterations) - 1)) == pytest.approx(0, abs=1e-9)
        assert float(rate(int(optimizer.iterations) - 2)) > 1e-5
    assert [type(part).__name__ for part in chain(optimizer)] == ["RollingClip", "Adam"]
    assert notation.settings["class_weight"][1] == 20


TASKS = (
    "near:from trunk; near:output shape=[1]; near:layers Dense(units=1);"
    "far:from trunk; far:output shape=[1]; far:layers Dense(units=1);"
    "trunk:input shape=[2]; trunk:layers Dense(units=3, lrm=0.5);"
)


def test_uneven_losses_count_by_uncertainty(tmp_path):
    """The text is decided, trained, written, saved with the weights of the model only, and read again."""
    from ddlf.extras.stabilisers import Uncertain
    from ddlf.training.slot.optimizers import chain, unwrapped

    x = RANDOM.normal(size=(64, 2)).astype("float32")
    y = {"near": x[:, :1], "far": 100 * x[:, 1:]}
    notation = Notation(TASKS)
    history = notation.train(x, y, epochs=3)
    assert {decision.key: decision.value for decision in notation.decisions}["loss_weights"].startswith(
        "uncertainty(near="
    )
    assert {"near_loss", "far_loss"} <= set(history)
    trained = notation.be_compiled(x, y, validation=False)
    assert isinstance(trained, Uncertain)
    assert trained.notation.text == notation.text
    assert "Multipliers" in [type(part).__name__ for part in chain(trained.optimizer)]
    save(unwrapped(trained), notation.text, tmp_path / "model.safetensors")
    again = ddlf.load_notation(tmp_path / "model.safetensors")
    for name, value in notation.run(x).items():
        np.testing.assert_array_equal(again.run(x)[name], value)
    first = Notation(notation.text).settled(x, y, validation=False).compiled()
    assert first.log_variances.numpy() == pytest.approx(
        np.log([(y[name] ** 2).mean() for name in ("far", "near")]), rel=1e-3
    )
    with pytest.raises(NotationError, match="there is one output"):
        Notation(LINE + "train:loss_weights uncertainty;").train(x, x[:, :1])


def test_ignored_labels_count_in_no_loss_and_no_rule():
    text = "a:input shape=[3]; a:output shape=[3]; a:layers identity(); train:ignore -1;"
    x, y = np.zeros((3, 3), "float32"), np.array([0, -1, 2])
    x[1] = [9, 0, 0]
    notation = Notation(text)
    assert notation.test(x, y) == {"loss": pytest.approx(np.log(3), rel=1e-5)}
    assert {decision.key: decision.value for decision in notation.decisions}["loss"] == "SCE"


def test_scaling_adds_a_layer_with_the_training_statistics():
    x = np.stack([np.arange(10.0), 1000 * np.arange(10.0)], axis=1)
    notation = settled(LINE, x, x[:, 0])
    layer = next(layer for layer in notation.keras.layers if isinstance(layer, keras.layers.Normalization))
    np.testing.assert_allclose(np.asarray(layer(x)), (x - x.mean(0)) / x.std(0), rtol=1e-4)
    assert "Normalization(axis=-1, mean=[4.5, 4500]" in notation.text
    again = build(read(notation.text))
    again.set_weights(notation.keras.get_weights())
    np.testing.assert_array_equal(again.predict(x, verbose=0), notation.keras.predict(x, verbose=0))
    assert notation.keras.count_params() == Notation(LINE).keras.count_params()


@pytest.mark.parametrize(("features", "value"), [(500, "Normalization("), (501, "none"), (784, "none")])
def test_scaling_of_many_features_fits_in_a_statement(features, value):
    x = np.random.default_rng(0).uniform(size=(20, features))
    x[:, 0] *= 1e-3  # a rarely used pixel
    text = f"a:input shape=[{features}]; a:output shape=[1]; a:layers Dense(units=1);"
    assert f"train:scaling {value}" in settled(text, x, x[:, 1]).text


@pytest.mark.parametrize(
    ("centres", "value"),
    [((0.0, 0.0, 1000.0), "Normalization"), ((0.0, 500.0, 1000.0), "Normalization"), ((20.0, 20.0, 20.0), "Rescaling")],
)
def test_sequence_features_far_apart_are_scaled_separately(centres, value):
    x = np.random.default_rng(0).normal(centres, 3.0, (50, 9, 3))
    notation = settled(
        "a:input shape=[9, 3]; a:output shape=[1]; a:loss MSE; a:layers GRU(units=2), Dense(units=1);", x, x[:, 0, 0]
    )
    layer = next(layer for layer in notation.keras.layers if isinstance(layer, getattr(keras.layers, value)))
    scaled = np.asarray(layer(x))
    assert np.abs(scaled).max() < 6
    if value == "Normalization":
        np.testing.assert_allclose(scaled, (x - x.mean((0, 1))) / x.std((0, 1)), rtol=1e-3, atol=1e-3)


def test_penalty_applies_to_weights_but_not_biases():
    notation = settled(LINE + "train:penalty L2(l2=0.5);", np.ones((4, 2)), np.ones(4))
    model = notation.compiled()
    expected = sum(0.5 * float(np.sum(np.square(array))) for array in model.get_weights() if array.ndim == 2)
    assert float(sum(model.losses)) == pytest.approx(expected, rel=1e-5)


def test_written_initializer_draws_the_first_weights():
    notation = settled(OPEN + "train:initial he_normal;")
    assert notation.key_value("initial") == Word("he_normal", 0)
    first, bias, *_ = notation.keras.get_weights()
    assert np.abs(first).max() > np.sqrt(6 / 64)  # uniform values cannot exceed this limit
    assert not bias.any()


@pytest.mark.parametrize(
    ("name", "factors", "last", "y", "p", "expected"),
    [
        ("CCE", "", "softmax", [0, 1, 0], [0.2, 0.7, 0.1], 0.356675),
        ("MSE", "", "softmax", [0, 1, 0], [0.2, 0.7, 0.1], 0.0466667),
        ("FOL", "a:gamma 2; a:alpha 0.25;", "softmax", [0, 1, 0], [0.2, 0.7, 0.1], 0.00802519),
        ("SCE", "", "softmax", 1, [0.2, 0.7, 0.1], 0.356675),
        ("HUL", "a:delta 0.5;", "identity", [3.0], [1.0], 0.5 * (2 - 0.25)),
        ("KLD", "", "softmax", [0.5, 0.25, 0.25], [0.2, 0.7, 0.1], 0.5 * np.log(2.5) + 0.25 * np.log(0.25 / 0.7) + 0.25 * np.log(2.5)),
    ],
)  # fmt: skip
def test_losses_equal_their_formulas(name, factors, last, y, p, expected):
    size = len(p)
    notation = Notation(f"a:input shape=[{size}]; a:output shape=[{size}]; a:loss {name}; {factors} a:layers {last}();")
    notation = notation.settled(np.zeros((2, size)), np.array([y, y]), validation=False)
    model = notation.compiled()
    assert float(model.loss(np.array([y]), np.array([p]))) == pytest.approx(expected, rel=1e-5)


def test_linear_output_counts_as_logits():
    text = "a:input shape=[3]; a:output shape=[3]; a:layers identity();"
    model = settled(text, np.zeros((3, 3)), np.arange(3)).compiled()
    assert float(model.loss(np.array([0]), np.zeros((1, 3)))) == pytest.approx(np.log(3))


@pytest.mark.slow  # it trains
def test_notation_runs_tests_and_trains_with_named_arrays(tmp_path, monkeypatch):
    (tmp_path / "heads.nnm").write_text(HEADS + "train:epochs 3;")
    monkeypatch.chdir(tmp_path)
    loaded = ddlf.load_notation("heads.nnm")
    assert loaded.inputs == {"trunk": (64,)}
    assert loaded.outputs == {"digit": (10,), "parity": (1,)}
    labels = {"digit": Y, "parity": Y % 2}
    history = loaded.train({"trunk": X}, labels, validation=(X, labels))
    assert len(history["loss"]) == 3
    assert {"digit_accuracy", "parity_accuracy", "val_loss"} <= set(history)
    assert {decision.key: decision.value for decision in loaded.decisions if decision.key in ("loss", "patience")}[
        "patience"
    ] == "10"
    assert {name: output.shape for name, output in loaded.run({"trunk": X}).items()} == {
        "digit": (40, 10),
        "parity": (40, 1),
    }
    assert loaded.test(X, labels)["loss"] == pytest.approx(history["val_loss"][-1], rel=1e-4)


@pytest.mark.slow  # it trains
def test_train_method_equals_keras_with_the_same_seed():
    loaded = Notation(DIGITS + "train:optimizer SGD(learning_rate=0.1); train:batch 8; train:penalty none;")
    loaded.train(X, Y, epochs=2, seed=5)
    keras.utils.set_random_seed(5)
    he = dict(activation="relu", kernel_initializer="he_uniform", bias_initializer=keras.initializers.Constant(0.01))
    sizes = [keras.layers.Dense(size, **he) for size in (48, 24)]
    usual = keras.Sequential([keras.Input((64,)), *sizes, keras.layers.Dense(10, activation="softmax")])
    usual.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
    usual.fit(X, Y, batch_size=8, epochs=2, verbose=0)
    for trained, expected in zip(loaded.get_weights(), usual.get_weights(), strict=True):
        np.testing.assert_array_equal(trained, expected)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda notation: notation.run({"trank": X}), "has no input 'trank', did you mean 'trunk'"),
        (lambda notation: notation.test(X, {"digit": Y}), "no array is given for the output 'parity'"),
        (
            lambda notation: notation.test(X, {"digit": Y, "parity": Y, "more": Y}),
            "has no output 'more'; there are digit, parity",
        ),
    ],
)
def test_unknown_array_name_is_refused(call, sentence):
    with pytest.raises(NotationError, match=sentence):
        call(Notation(HEADS))


PAIR = (
    "z:input shape=[3]; z:layers relu(name=held); a:input shape=[3]; a:layers mul(2), sub(to=held); a:output shape=[3];"
)
NO_ROW = "has samples of shape \\[64\\], and the given ones have"


@pytest.mark.parametrize(
    ("x", "y", "sentence"),
    [
        (X[:, :5], Y, f"the input 'digits' {NO_ROW} \\[5\\]; change"),
        (X[0], Y, f"{NO_ROW} \\[\\]; give a row for each sample"),
        (X.reshape(-1, 8, 8), Y, f"{NO_ROW} \\[8, 8\\]"),
        (X[:0], Y[:0], "the input 'digits' has no samples"),
        (X, Y[:4], "the input 'digits' has 40 samples, the output 'digits' 4;"),
        (None, Y, "the input 'digits' is None"),
        (X, None, "the output 'digits' is None"),
        (X.astype(str), Y, "the input 'digits' is made of text, not of numbers"),
        (X.astype(object), Y, "made of Python objects"),
        ([[1.0, 2.0], [1.0]], Y, "rows of different lengths"),
        (1.5, Y, "is a single number"),
        (X, Y.astype(str), "the output 'digits' is made of text"),
        (X, Y + 5, "'digits' has the loss SCE: classes are 0 to 9, and labels go from 5 to 14"),
        (X, Y - 5, "labels go from -5 to 4"),
        (X, Y + 0.5, "labels go from 0.5 to 9.5"),
        (X, np.eye(10)[Y], "write CCE for rows of 0 and 1"),
    ],
)
def test_unfit_arrays_are_refused_before_keras_gets_them(x, y, sentence):
    for model in (Notation(DIGITS), COMPILED):
        with pytest.raises((DatasetError, AppError), match=sentence):
            model.test(x, y)
        with pytest.raises((DatasetError, AppError), match=sentence):
            model.train(x, y)


COMPILED = Notation(DIGITS)
COMPILED._by_text = True


def test_app_data_of_another_shape_is_refused():
    with pytest.raises(DatasetError, match=f"{NO_ROW} \\[8, 8\\]; change"):
        settled(DIGITS, X.reshape(-1, 8, 8))


def test_list_of_inputs_follows_the_order_of_the_text():
    unit, tenfold = np.full((2, 3), 1.0), np.full((2, 3), 10.0)
    pair = Notation(PAIR)
    np.testing.assert_array_equal(pair.run([unit, tenfold]), np.full((2, 3), 19.0))
    np.testing.assert_array_equal(pair.run({"a": tenfold, "z": unit}), np.full((2, 3), 19.0))
    np.testing.assert_array_equal(pair.run([[[1, 1, 1]], [[10, 10, 10]]]), np.full((1, 3), 19.0))
    with pytest.raises(NotationError, match="has 2 inputs; give a dict by their names: z, a"):
        pair.run(unit)
    with pytest.raises(DatasetError, match="the input 'z' has 2 samples, the input 'a' 1;"):
        pair.run([unit, tenfold[:1]])


def test_patience_is_refused_without_validation_data():
    text = DIGITS + "\ntrain:patience 3;"
    with pytest.raises(NotationError, match=r"model.nnm:\d+:16: train:patience has no effect without validation data"):
        Notation(text).train(X, Y)
    assert Notation(text).settled(X, Y, validation=True).patience == 3


@pytest.mark.slow  # it trains
def test_train_method_holds_out_the_samples_of_a_run():
    loaded = Notation(DIGITS + "train:validation 0.25; train:patience 2;")
    history = loaded.train(X, Y, epochs=1)
    held_out = np.arange(40) % 4 == 0
    assert loaded.test(X[held_out], Y[held_out])["loss"] == pytest.approx(history["val_loss"][0], rel=1e-5)
    with pytest.raises(DatasetError, match="train:validation would hold out some of the samples, and validation is"):
        loaded.train(X, Y, validation=(X, Y))


def test_load_notation_refuses_a_wrong_path(tmp_path):
    for wrong, sentence in (
        (None, "must not be a NoneType"),
        (DIGITS, "a text is given where the path"),
        ("no.nnm", "No such file"),
    ):
        with pytest.raises(NotationError, match=sentence):
            ddlf.load_notation(wrong)
    (tmp_path / "model.keras").write_bytes(b"PK\x03\x04\x84\xff")
    with pytest.raises(NotationError, match="no UTF-8: this is a zip file, as"):
        ddlf.load_notation(tmp_path / "model.keras")


@pytest.mark.parametrize(
    ("text", "y", "sentence"),
    [
        (OPEN, Y + 1, "has no loss for an output: it has 10 values, and its labels are one number each, from 1 to 10"),
        (DIGITS, np.eye(10)[Y], "'digits' has the loss SCE: it takes the number of a class"),
        (OPEN, None, "write loss"),
    ],
)
def test_labels_that_do_not_fit_an_output_are_refused(text, y, sentence):
    with pytest.raises(AppError, match=sentence):
        settled(text, y=y)


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("optimizer SGD(momentum=9)", "model.nnm:5:17: train:optimizer: Keras says: .*momentum"),
        ("metrics [acuracy]", "model.nnm:5:15: train:metrics: .*no metric 'acuracy', did you mean 'accuracy'"),
        ("metrics [Acuracy()]", "model.nnm:5:15: train:metrics: Keras says: there is no Acuracy"),
        ("loss_weights [1, 2]", "model.nnm:5:20: train:loss_weights: Keras says: 2 numbers for 1 outputs"),
    ],
)
def test_error_of_keras_names_the_place_in_the_text(key, sentence):
    text = DIGITS + "\n" * (4 - DIGITS.count("\n")) + f"train:{key};"
    with pytest.raises(NotationError, match=sentence):
        settled(text).compiled()


def test_optimizer_keeps_its_place_without_a_new_value():
    notation = Notation("\n" + DIGITS + "train:optimizer SGD(momentum=9);", "model.nnm").with_values(
        {("train", "patience"): "3"}
    )
    assert notation.position_of("optimizer").startswith(f"model.nnm:{DIGITS.count(chr(10)) + 2}:")


def test_command_values_override_the_text():
    notation = Notation(DIGITS + "train:optimizer adam;").with_values(
        {("train", "optimizer"): "SGD(learning_rate=0.25)"}
    )
    assert float(notation.settled(X, Y, validation=False).compiled().optimizer.learning_rate) == 0.25
    assert "train:optimizer SGD(learning_rate=0.25);" in notation.text
    rate = Notation(DIGITS + "train:optimizer SGD(learning_rate=0.1, momentum=0.9);").with_values(
        {("train", "learning_rate"): "0.5"}
    )
    optimizer = Notation(rate.settled(X, Y, validation=False).text).settled(X, Y, validation=False).compiled().optimizer
    assert (float(optimizer.learning_rate), optimizer.momentum) == (0.5, 0.9)
    with pytest.raises(ConfigError, match="-p optimizer: optimizer must be"):
        notation.with_values({("train", "optimizer"): "fast"})


def test_saved_weights_load_with_their_text_to_the_same_bits(tmp_path):
    first = settled(OPEN, X * 100)
    first.compiled()
    save(first.keras, first.text, tmp_path / "some.safetensors")
    again = ddlf.load_notation(tmp_path / "some.safetensors")
    assert again.decisions == ()
    np.testing.assert_array_equal(again.keras(X), first.keras(X))
    loss = again.test(X, Y)["loss"]
    assert loss == pytest.approx(float(first.keras.evaluate(X, Y, verbose=0)[0]), rel=1e-6)


def test_notation_keeps_text_and_decisions_when_pickled():
    first = settled(OPEN)
    received = pickle.loads(pickle.dumps(first))
    assert received.text == first.text
    assert received.decisions == first.decisions
    assert received.digest == first.digest


def test_digest_ignores_comments_and_settings_of_the_run():
    same = [
        DIGITS,
        "# a comment\n" + DIGITS,
        DIGITS + "train:epochs 9; train:data digits;",
        DIGITS.replace(", ", ",  "),
    ]
    assert len({Notation(text).digest for text in same}) == 1
    different = [DIGITS.replace("[24]", "[25]"), DIGITS + "train:learning_rate 0.5;", DIGITS.replace("SCE", "CCE")]
    assert len({Notation(text).digest for text in [DIGITS, *different]}) == 4


def test_compiled_model_stays_as_it_is():
    loaded = Notation(DIGITS)
    loaded.compile("sgd", "mse")
    app = type("App", (), {"x_train": X, "y_train": Y, "notation": loaded})()
    assert loaded.ready(app) is loaded.keras
    assert loaded.keras.loss == "mse"
