"""Tests of model files of WebNN: the published file, JSON, and refusals."""

import json

import pytest

from ddlf.cli.main import main
from ddlf.errors import NotationError
from ddlf.extras.text.language.model import load, read
from ddlf.extras.text.language.web_model import text_of_web_model

PUBLISHED = """
// The model of the paper.
module.exports = {inputs: [28, 28], outputs: [10], layers: [
  {conv2d: {inputShape: [28, 28, 1], kernelSize: 5, filters: 8, strides: 1, activation: 'relu',
    kernelInitializer: 'varianceScaling'}},
  {maxPooling2d: {poolSize: [2, 2], strides: [2, 2]}}, /* halves it */
  {conv2d: {kernelSize: 5, filters: 16, strides: 1, activation: "relu", kernelInitializer: 'varianceScaling'}},
  {maxPooling2d: {poolSize: [2, 2], strides: [2, 2]}},
  {flatten: {}},
  {dense: {units: 10, kernelInitializer: 'varianceScaling', activation: 'softmax'}},
  {output: {optimizer: 'sgd', loss: 'categoricalCrossentropy', metrics: ['accuracy'],}},
]};
"""


def test_the_published_file_gives_its_parameters(tmp_path):
    path = tmp_path / "mnist.js"
    path.write_text(PUBLISHED)
    assert load(path).graph.parameters == 5994


def test_json_and_literal_give_the_same_text():
    layers = [{"flatten": {"inputShape": [4, 4]}}, {"dense": {"units": 3, "useBias": False, "activation": "softmax"}}]
    model = {"inputs": [4, 4], "outputs": [3], "layers": layers}
    literal = "{inputs:[4,4],outputs:[3],layers:[{flatten:{inputShape:[4,4]}},{dense:{units:3,useBias:false,activation:'softmax'}}]}"
    text = text_of_web_model(json.dumps(model), "a.json", 0.2)
    assert text == text_of_web_model(literal, "a.js", 0.2)
    assert "SGD(learning_rate=0.2)" in text
    assert read(text).graph.parameters == 48


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("const tf = require('tf');", "a.js:1:1: const is code"),
        ("module.exports = require('fs')", "1:18: require(..) is code"),
        ("{inputs: [process.exit()]}", "process is code"),
        ("{inputs: [1], inputs: [2]}", "a key twice"),
        ("{inputs: [1], outputs: [1]", "is missing before"),
        ("{inputs: `x`}", "is not part of a literal"),
        ("{} {}", "follows the literal"),
        ("[]", "not an object"),
        ("[" * 50, "nested more than"),
        ("{inputs: [1], outputs: [1], layers: [{lambda: {}}]}", "is 'lambda', which is none of"),
        ("{inputs: [1], outputs: [1], layers: [{dense: {activation: 'hardSigmoid'}}]}", "the activation 'hardSigmoid'"),
        ("{inputs: [1], outputs: [1], layers: [{dense: {'a);': 1}}]}", "which is not a name"),
        ("{inputs: [1], outputs: [1], layers: [{dense: {name: 'a);x'}}]}", "cannot be an argument"),
        ("{inputs: [1], outputs: [1], layers: [{output: {loss: 'mine'}}]}", "the loss 'mine'"),
        (
            "{inputs: [1], outputs: [1], layers: [{output: {loss: 'binaryCrossentropy'}}, {dense: {}}]}",
            "other layers follow",
        ),
    ],
)
def test_other_parts_of_javascript_and_of_models_are_refused(source, sentence):
    with pytest.raises(NotationError) as refused:
        text_of_web_model(source, "a.js")
    assert sentence in str(refused.value)


def test_a_model_file_is_converted_to_a_text_but_never_formatted(tmp_path, capsys):
    path, text = tmp_path / "mnist.js", tmp_path / "mnist.nnm"
    path.write_text(PUBLISHED)
    with pytest.raises(SystemExit) as ended:
        main(["model", "convert", str(path), str(text)])
    assert ended.value.code == 0
    assert load(text).graph.parameters == 5994
    with pytest.raises(SystemExit):
        main(["model", "format", str(path)])
    assert "ddlf model convert" in capsys.readouterr().err
    assert path.read_text() == PUBLISHED
