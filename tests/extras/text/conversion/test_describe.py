"""Tests of describing models of Keras as texts.

A model from its text has the same config and, with the weights, the same bits. Unsupported parts are refused by name.
"""

import json

import numpy as np
import pytest

from ddlf.errors import NotationError
from ddlf.extras.text.conversion import weights
from ddlf.extras.text.language.model import read
from ddlf.extras.text.language.printer import format
from tests.extras.text.conversion import zoo
from tests.extras.text.language.texts import DIGITS, HEADS, LM
from tests.later import Later

keras, layers, ops = Later("keras"), Later("keras.layers"), Later("keras.ops")
build, building_of = (
    Later("ddlf.extras.text.conversion.build", "build"),
    Later("ddlf.extras.text.conversion.build", "_Building"),
)
describe = Later("ddlf.extras.text.conversion.describe", "describe")


def as_a_file_has_it(model):
    config = json.loads(json.dumps(model.get_config()))
    for layer in config["layers"]:
        layer.pop("compile_config", None)
    return config


def built(model):
    """Return the model of a text, and check that Keras has the same shapes and counts as the text."""
    building = building_of(model, model.form, model.graph, {})
    again = building.model()
    for node, output in zip(model.graph.nodes, building.outputs, strict=False):
        sizes = keras.tree.flatten(output)[0].shape[1:]
        assert node.shape is None or len(node.shape) == len(sizes), node
        assert all(size in (None, actual) for size, actual in zip(node.shape or (), sizes, strict=False)), node
    assert model.graph.parameters in (None, again.count_params())
    return again


def comes_back(name, tmp_path):
    model = zoo.model_named(name)
    random = np.random.default_rng(0)
    model.set_weights([random.normal(0, 0.1, array.shape) ** 2 for array in model.get_weights()])
    text = describe(model)
    assert format(text) == text
    weights.save(model, text, tmp_path / "m.safetensors")
    loaded_text, tensors = weights.load(tmp_path / "m.safetensors")
    again = built(read(loaded_text))
    weights.fill(again, tensors, tmp_path)
    assert type(again) is type(model)
    assert again.name == model.name
    assert as_a_file_has_it(again) == as_a_file_has_it(model)
    assert again.get_config() == model.get_config()
    x = zoo.inputs(model)
    for expected, output in zip(keras.tree.flatten(model(x)), keras.tree.flatten(again(x)), strict=True):
        assert np.asarray(output).tobytes() == np.asarray(expected).tobytes()
    return text


@pytest.mark.parametrize(
    "layer", ["LSTM(units=3, dropout=0.5)", "GRU(units=3)", "SimpleRNN(units=3, return_sequences=true)"]
)
def test_recurrent_layer_without_call_arguments_round_trips(layer):
    out = [4, 3] if "sequences" in layer else [3]
    model = build(read(f"a:input shape=[4, 2]; a:layers {layer}; a:output shape={out};"))
    text = describe(model)
    assert "call=" not in text
    assert build(read(text)).get_config() == model.get_config()


@pytest.mark.parametrize("name", zoo.SMALL_MODELS)
def test_model_round_trips_with_its_bits(name, tmp_path):
    comes_back(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*zoo.APPS, *zoo.SHORT])
def test_apps_and_applications_round_trip_with_their_bits(name, tmp_path):
    comes_back(name, tmp_path)


def test_describe_writes_a_stack_in_short_form():
    keras.backend.clear_session()
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(10, activation="softmax"),
        ],
        name="small",
    )
    assert describe(model) == (
        "small:model Sequential();\nsmall:input shape=[8, 8, 1] name=input_layer;\nsmall:layers\n"
        "    Conv2D(filters=32, kernel_size=3, activation=relu),\n    MaxPooling2D(),\n    Flatten(),\n"
        "    Dense(units=10, activation=softmax);\nsmall:output shape=[10];\n"
    )


SEVERAL = """m:input int32 shape=[6]; m:layers cast(float16), matmul(kernel, float16, shape=[5]), add(bias), relu(name=skip), dropout(p=0.25),
    matmul(kernel, shape=[5]), batchNorm(mean, variance, scale, shift), residual(to=skip), mul(0.5), clamp(minValue=-1), quantizeLinear(2, 1, uint8),
    dequantizeLinear(2, 1), softmax(), where(other, to=skip), gather(2), reshape(shape=[1]); m:output float32 shape=[1];"""
PLACES = """x:input shape=[4, 3];
    at:input int32 shape=[2]; rows:input int32 shape=[2, 1]; new:input shape=[2, 3]; x:layers add(2), gather(to=at), add(to=new),
    scatterND(to=[rows, new]), gatherND(to=rows), concat(to=new, axis=1), split(splits=[2, 4], index=1, axis=1); x:output shape=[2, 4];"""
IMAGE = """i:input shape=[3, 8, 8]; i:layers conv2d(f, kernel=[3, 3], padding=[1, 1, 1, 1], shape=[4, 8, 8]), instanceNormalization(s, b), prelu(a),
    maxPool2d(windowDimensions=[2, 2], strides=[2, 2]), convTranspose2d(f, kernel=[2, 2], shape=[2, 5, 5]), averagePool2d(), reshape(shape=[2]);
    i:output shape=[2];"""
SEQUENCE = """s:input int32 shape=[6]; s:layers Embedding(input_dim=9, output_dim=4), gru(w, r, b, b, returnSequence=true, shape=[6, 4]),
    attend(q, k, v, heads=2, mask=causal), lstm(w, r, shape=[3]), Dense(units=2), batchNormalization(mean, variance); s:output shape=[2];"""


@pytest.mark.parametrize(
    "text", [DIGITS, HEADS, LM, SEVERAL, PLACES, IMAGE, SEQUENCE, DIGITS + "train:initial orthogonal;"]
)
def test_describe_writes_operators_as_operators(text):
    model = build(read(text))
    described = describe(model)
    assert "Operator" not in described
    assert ("train:initial orthogonal;" in described) == ("train:initial" in text)
    assert build(read(described)).get_config() == model.get_config()


def test_describe_writes_a_changed_operator_as_a_layer():
    model = build(read(DIGITS))
    model.layers[1].trainable = False
    assert "ddlf>Operator(operator=matmul" in describe(model)


def function(x):
    return x


def unregistered():
    class Unregistered(layers.Layer):
        def call(self, x):
            return x

    return Unregistered(name="u")


def subclassed():
    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(3)

        def call(self, x):
            return self.dense(x)

    return Subclassed()


def stack(*more):
    return keras.Sequential([keras.Input((4,)), *more], name="m")


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: stack(layers.Lambda(lambda x: x, name="twice")), "'twice' is a Lambda"),
        (lambda: stack(layers.Dense(3, activation=lambda x: x, name="d")), "the layer 'd' has a function"),
        (lambda: stack(layers.Dense(3, activation=function, name="d")), r"'d' has a function \(function\)"),
        (lambda: stack(unregistered()), "'u' is a Unregistered of tests.extras.text.conversion.test_describe, which is not registered"),
        (subclassed, "subclassed model"),
        (lambda: keras.Sequential([layers.Dense(3)]), "has no input shape yet"),
        (lambda: keras.Model(x := keras.Input((4,)), ops.where(x > 0, x, np.ones((2000, 4), "float32"))), "2,000 values"),
    ],
    ids=["lambda", "lambda-argument", "function", "layer", "subclassed", "unbuilt", "constant"],
)  # fmt: skip
def test_describe_refuses_unwritable_objects_by_name(make, sentence):
    from ddlf.extras.text.conversion.objects import CannotBeWritten

    with pytest.raises(CannotBeWritten, match=sentence):
        describe(make())


def test_describe_assumes_the_defaults_of_a_fresh_keras():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        text = describe(stack(layers.Dense(3, name="d")))
        assert "Dense(units=3, dtype=mixed_float16" in text
        assert keras.config.dtype_policy().name == "mixed_float16"
    finally:
        keras.config.set_dtype_policy("float32")


WRONG = [
    ("a:model ~Sequentail(); a:input shape=[3]; a:output shape=[3];", "'Sequential'"),
    ("a:model ~Sequential; a:input shape=[3]; a:output shape=[3];", "a class of models"),
    ("a:input shape=[3]; a:output shape=[3]; a:layers b(); b:model ~x=[3]; b:layers relu();", "one value, without a key"),
    ("a:input shape=[3]; a:output shape=[3]; a:layers Dense(units=3, share=~b);", "nothing above is called 'b'"),
    ("a:input shape=[3]; a:output shape=[3]; a:layers ReLU(name=b), Dense(~share=b);", "must name a Dense, and this is a ReLU"),
    ("a:input shape=[3]; a:output shape=[3]; a:layers Dense(units=3, name=b), Dense(share=b, ~units=4);", "where it is called first"),
    ("a:input shape=[3]; a:output shape=[3]; a:layers Dense(units=3, call=~it);", "call=with(it"),
    ("b:input shape=[3]; a:input shape=[3]; a:output shape=[3]; a:layers Add(call=~with([b, b]));", "the layer's input is not used"),
    ("a:input shape=[3]; a:output shape=[3]; a:layers relu(), ~part(1);", "part selects a tensor of a Keras layer"),
    ("a:input shape=[3]; a:output shape=[3]; a:layers Dense(units=3), part(~w);", "the number of a tensor"),
    ("a:model ~Functional(); a:input shape=[3]; a:output shape=[3]; b:model Functional(); b:input shape=[3]; b:output shape=[3];", ""),
    ("a:model ~Functional(); a:input shape=[3]; a:output shape=[3]; a:layers a();", "is called by another one or itself"),
    ("a:input ~string shape=[3]; a:output shape=[3]; a:layers relu();", ""),
    ("a:input shape=[3] ~bach=3; a:output shape=[3];", "'batch'"),
    ("a:input shape=[3] batch=~0; a:output shape=[3];", "batch must be"),
    ("a:input shape=[3]; a:output shape=[3]; a:layers StackedRNNCells(cells=[~Lambda()]);", "never runs code"),
    ("a:input shape=[3]; a:output shape=[3]; a:layers ~TFSMLayer(filepath=b);", "never runs code"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "sentence"), WRONG, ids=[str(number) for number in range(len(WRONG))])
def test_error_in_a_model_statement_names_its_place(text, sentence):
    at = text.index("~")
    with pytest.raises(NotationError) as caught:
        read(text.replace("~", ""))
    sentences = {column: message for _, column, message in caught.value.problems}
    assert sentence in " ".join(sentences.values())
    assert at + 1 in sentences or not sentence
