"""Reads a model file of WebNN, and returns its model text. Pure: the file is read as data, and nothing in it runs.

The file is JSON, or the JavaScript literal that WebNN (Goin, Cotton, Zhao 2018) published::

    module.exports = {inputs: [28, 28], outputs: [10], layers: [{conv2d: {filters: 8, ...}}, ..., {output: {...}}]}

A layer has one key: the name of its factory in TensorFlow.js, with its arguments. The accepted layers have the same
formulas in Keras 3. All other parts of JavaScript are refused.
"""

from __future__ import annotations

import re
from typing import Any

from ddlf.errors import NotationError
from ddlf.extras.text.language.problems import TextProblem

SUFFIXES = (".js", ".json")
"""Suffixes of these files."""
RATE = 0.01
"""Learning rate of TensorFlow.js's optimizers by name, unless a training names another."""
LAYERS = {
    "conv1d": "Conv1D",
    "conv2d": "Conv2D",
    "separableConv2d": "SeparableConv2D",
    "maxPooling1d": "MaxPooling1D",
    "maxPooling2d": "MaxPooling2D",
    "averagePooling1d": "AveragePooling1D",
    "averagePooling2d": "AveragePooling2D",
    "globalAveragePooling2d": "GlobalAveragePooling2D",
    "flatten": "Flatten",
    "dense": "Dense",
    "dropout": "Dropout",
    "activation": "Activation",
    "reshape": "Reshape",
    "batchNormalization": "BatchNormalization",
}
"""Layers of Keras by their factories in TensorFlow.js."""
ACTIVATIONS = {"swish": "silu"} | {
    name: name
    for name in ("elu", "linear", "relu", "relu6", "selu", "sigmoid", "softmax", "softplus", "softsign", "tanh")
}
"""Activations of Keras by their names in TensorFlow.js. Both have the same formula."""
INITIALIZERS = {
    "zeros": "Zeros",
    "ones": "Ones",
    "glorotNormal": "GlorotNormal",
    "glorotUniform": "GlorotUniform",
    "heNormal": "HeNormal",
    "heUniform": "HeUniform",
    "leCunNormal": "LecunNormal",
    "leCunUniform": "LecunUniform",
    "varianceScaling": "VarianceScaling",
}
LOSSES = {
    "categoricalCrossentropy": "CCE",
    "sparseCategoricalCrossentropy": "SCE",
    "binaryCrossentropy": "BCE",
    "meanSquaredError": "MSE",
    "meanAbsoluteError": "MAE",
}
OPTIMIZERS = {"sgd": "SGD", "adam": "Adam", "rmsprop": "RMSprop", "adagrad": "Adagrad", "adamax": "Adamax"}
WORDS = {"channelsLast": "channels_last"}
MOST_DEPTH = 20
TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*|/\*.*?\*/)|(?P<number>-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?![\w$])"""
    r"""|(?P<word>[A-Za-z_$][\w$]*)|(?P<text>'[^'\\\n]*'|"[^"\\\n]*")|(?P<sign>[{}\[\]:,;.=()])""",
    re.DOTALL,
)
ABOUT_FILES = "write the model as JSON, or as one literal: module.exports = {inputs: .., outputs: .., layers: [..]}"


def text_of_web_model(source: str, file: str, rate: float = RATE) -> str:
    """Return the model text of a model file of WebNN.

    Args:
        source: The content of the file.
        file: Its name, for errors.
        rate: Learning rate of the optimizer: these files have none.

    Raises:
        NotationError: The file is not a literal, or has a part that Keras lacks or computes in another way.
    """
    return _text(_Reader(source, file).model(), file, rate)


class _Reader:
    """Reads one literal."""

    def __init__(self, source: str, file: str) -> None:
        self._file, self._source, self._at = file, source, 0
        self._tokens: list[tuple[str, str, int]] = []
        at = 0
        while at < len(source):
            match = TOKEN.match(source, at)
            if match is None:
                raise self._error(f"{source[at : at + 10]!r} is not part of a literal", at)
            if match.lastgroup != "space":
                self._tokens.append((str(match.lastgroup), match[0], at))
            at = match.end()
        self._tokens.append(("end", "", len(source)))

    def model(self) -> dict[str, Any]:
        """Return the literal of the file."""
        if [text for _, text, _ in self._tokens[:4]] == ["module", ".", "exports", "="]:
            self._at = 4
        value = self._value(0)
        if self._peek() == ";":
            self._next_token()
        kind, text, at = self._next_token()
        if kind != "end":
            raise self._error(f"{text!r} follows the literal", at)
        if not isinstance(value, dict):
            raise self._error("the model is not an object", 0)
        return value

    def _peek(self) -> str:
        return self._tokens[self._at][1]

    def _next_token(self) -> tuple[str, str, int]:
        token = self._tokens[self._at]
        self._at += token[0] != "end"
        return token

    def _value(self, depth: int) -> Any:
        kind, text, at = self._next_token()
        if depth > MOST_DEPTH:
            raise self._error(f"the literal is nested more than {MOST_DEPTH} deep", at)
        if kind == "number":
            return float(text) if re.search(r"[.eE]", text) else int(text)
        if kind == "text":
            return text[1:-1]
        if text in ("true", "false", "null"):
            return {"true": True, "false": False, "null": None}[text]
        if text == "[":
            return self._items("]", lambda: self._value(depth + 1))
        if text == "{":
            pairs = self._items("}", lambda: self._pair(depth + 1))
            result = dict(pairs)
            if len(result) < len(pairs):
                raise self._error("the object has a key twice", at)
            return result
        if kind == "word":
            shown = f"{text}(..)" if self._peek() == "(" else text
            raise self._error(f"{shown} is code, and a model file is only read as data", at)
        raise self._error(
            f"a value is missing before {text!r}" if text else "the file ends in the middle of a literal", at
        )

    def _pair(self, depth: int) -> tuple[str, Any]:
        kind, text, at = self._next_token()
        if kind not in ("word", "text"):
            raise self._error(f"a key is missing before {text!r}", at)
        _, colon, colon_at = self._next_token()
        if colon != ":":
            raise self._error(f"a colon is missing after the key {text}", colon_at)
        return text.strip("'\""), self._value(depth)

    def _items(self, end: str, item: Any) -> list[Any]:
        result: list[Any] = []
        while self._peek() != end:
            result.append(item())
            if self._peek() == ",":
                self._next_token()
            elif self._peek() != end:
                _, text, at = self._tokens[self._at]
                raise self._error(f"{end} or a comma is missing before {text!r}", at)
        self._next_token()
        return result

    def _error(self, sentence: str, at: int) -> NotationError:
        before = self._source[:at]
        line, column = before.count("\n") + 1, at - before.rfind("\n")
        return NotationError(
            f"{self._file}:{line}:{column}: {sentence}",
            hint=ABOUT_FILES,
            problems=(TextProblem(line, column, sentence),),
        )


def _text(model: dict[str, Any], file: str, rate: float) -> str:
    unknown = [key for key in model if key not in ("inputs", "outputs", "layers")]
    missing = [key for key in ("inputs", "outputs", "layers") if not isinstance(model.get(key), list)]
    if unknown or missing:
        raise _error(
            file, f"the model has the unknown key {unknown[0]!r}" if unknown else f"{missing[0]!r} is not a list"
        )
    lines, training, shape = [], ["train:optimizer SGD(learning_rate={rate});"], list(model["inputs"])
    for number, layer in enumerate(model["layers"], 1):
        if not isinstance(layer, dict) or len(layer) != 1 or not isinstance(next(iter(layer.values())), dict):
            raise _error(file, f"layer {number} is not an object with one key, such as {{dense: {{units: 10}}}}")
        (name, settings), is_last = next(iter(layer.items())), number == len(model["layers"])
        if name == "output":
            if not is_last:
                raise _error(file, f"layer {number} is the output, and other layers follow")
            training = _training(settings, file)
            continue
        if name not in LAYERS:
            raise _error(file, f"layer {number} is {name!r}, which is none of {', '.join(LAYERS)}")
        arguments = dict(settings)
        first = arguments.pop("inputShape", None)
        if first is not None and number == 1:
            shape = first
        elif first is not None:
            raise _error(file, f"layer {number} has an inputShape, which only the first layer may have")
        lines.append(
            f"    {LAYERS[name]}({', '.join(_argument(key, argument, number, file) for key, argument in arguments.items())})"
        )
    if not lines:
        raise _error(file, "the model has no layers")
    head = [f"net:input shape={_spelled(shape, file)};", f"net:output shape={_spelled(model['outputs'], file)};"]
    body = "net:layers\n" + ",\n".join(lines) + ";"
    return "\n".join([*head, body, "", *(line.format(rate=rate) for line in training), ""])


def _training(settings: dict[str, Any], file: str) -> list[str]:
    """Return the statements of the training: the output of a model names its optimizer, loss and metrics."""
    if unknown := [key for key in settings if key not in ("optimizer", "loss", "metrics")]:
        raise _error(file, f"the output has the unknown key {unknown[0]!r}")
    optimizer, loss, metrics = settings.get("optimizer", "sgd"), settings.get("loss"), settings.get("metrics", [])
    if optimizer not in OPTIMIZERS:
        raise _error(file, f"the optimizer {optimizer!r} is none of {', '.join(OPTIMIZERS)}")
    if loss not in LOSSES:
        raise _error(file, f"the loss {loss!r} is none of {', '.join(LOSSES)}")
    if metrics not in ([], ["accuracy"], ["acc"]):
        raise _error(file, f"the metrics {metrics!r} are not ['accuracy']")
    lines = [f"train:loss {LOSSES[loss]};", f"train:optimizer {OPTIMIZERS[optimizer]}(learning_rate={{rate}});"]
    return [*lines, "train:metrics accuracy;"] if metrics else lines


def _argument(key: str, value: Any, number: int, file: str) -> str:
    if not re.fullmatch(r"[a-z][A-Za-z]*", key):
        raise _error(file, f"layer {number} has the argument {key!r}, which is not a name")
    name = {"batchInputShape": "batch_shape", "targetShape": "target_shape"}.get(key) or re.sub(
        "[A-Z]", lambda match: f"_{match[0].lower()}", key
    )
    for end, names in (("activation", ACTIVATIONS), ("initializer", INITIALIZERS)):
        if name.endswith(end):
            if value not in names:
                raise _error(file, f"layer {number} has the {end} {value!r}, which is none of {', '.join(names)}")
            return f"{name}={names[value]}{'()' * (end == 'initializer')}"
    return f"{name}={_spelled(value, file)}"


def _spelled(value: Any, file: str) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list):
        return f"[{', '.join(_spelled(item, file) for item in value)}]"
    if isinstance(value, str) and re.fullmatch(r"\w+", word := WORDS.get(value, value)):
        return word
    raise _error(file, f"{value!r} cannot be an argument of a layer")


def _error(file: str, sentence: str) -> NotationError:
    return NotationError(f"{file}:1:1: {sentence}", hint=ABOUT_FILES, problems=(TextProblem(1, 1, sentence),))
