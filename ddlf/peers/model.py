"""The model of a run as a text, and as the Keras model that a peer trains. Runs on peers and on the server.

A model travels as a text with all keys of its training decided, so a peer runs no code of the server. The server makes
the text from a ``.nnm`` file, or from the compiled Keras model of an app.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ddlf.algorithms.weights import Weights
from ddlf.errors import ConfigError, DatasetError
from ddlf.extras import provided
from ddlf.peers.classes import numbered
from ddlf.peers.sets import Layout, layout_of

PART = "ddlf peers"
"""The feature that needs the optional part for model texts, for errors."""
PICTURES = ("digits", "mnist", "cifar10")
"""Built-in pictures. DDLF loads them with values from -0.5 to 0.5."""
LOSSES = {
    "categorical_crossentropy": "CCE",
    "sparse_categorical_crossentropy": "SCE",
    "binary_crossentropy": "BCE",
    "mean_squared_error": "MSE",
    "mean_absolute_error": "MAE",
    "kl_divergence": "KLD",
    "hinge": "HIL",
}
"""Losses of Keras that a text can name, by their names."""
OPTIMIZERS = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adamax", "Nadam", "Lion", "Adadelta")
LEFT_OUT = ("name", "learning_rate", "loss_scale_factor", "gradient_accumulation_steps", "ema_overwrite_frequency")
"""Arguments of optimizers that a text needs not, or that need not have their default."""
ACCURACY = ("accuracy", "acc")
"""Ends of the names of metrics that are an accuracy."""
MOST_TESTED = 64
"""Samples that a peer tests a set with."""


class Trained:
    """A compiled Keras model with data: trains batch by batch.

    Args:
        model: The compiled model.
        data: ``x_train``, ``y_train``, and for tests ``x_test`` and ``y_test`` or the training data.
        seed: Seed of the order of samples.

    Attributes:
        layout: Layout of its exact sets.
        trainable: Per tensor, whether it is trained.
        samples: Number of training samples.
    """

    def __init__(self, model: Any, data: Mapping[str, Any], seed: int) -> None:
        self.model = model
        self._data: Mapping[str, Any] = {}
        self._variables = provided("named_weights", PART)(getattr(model, "inner", model))
        self.layout: Layout = layout_of({name: np.asarray(variable) for name, variable in self._variables.items()})
        self.trainable = trained_tensors(model, self._variables)
        self._random = np.random.default_rng(seed)
        self.take(data)
        self._sums: dict[str, float] = {}
        self._count = 0

    @property
    def data(self) -> Mapping[str, Any]:
        """The data."""
        return self._data

    def take(self, data: Mapping[str, Any]) -> None:
        """Train on these data from the next batch on."""
        self._data, self._order = data, np.empty(0, np.int64)
        self.samples = len(_first_array(data["x_train"]))

    def keep_test_data(self) -> None:
        """Forget the training data, unless it tests with them."""
        if "x_test" in self._data:
            self._data = {name: array for name, array in self._data.items() if name.endswith("_test")}
            self.samples = 0

    def batch(self, size: int) -> None:
        """Train one batch of the next samples. Each pass over the data has another order.

        Raises:
            DDLFError: Keras refuses the data.
        """
        if len(self._order) == 0:
            self._order = self._random.permutation(self.samples)
        rows, self._order = self._order[:size], self._order[size:]
        x, y = rows_of(self._data["x_train"], rows), rows_of(self._data["y_train"], rows)
        logs = self.model.train_on_batch(x, y, return_dict=True)
        self.model.reset_metrics()
        for name, value in logs.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(value) * len(rows)
        self._count += len(rows)

    def means(self) -> dict[str, float]:
        """Return the mean loss and metrics since the last call."""
        result = {name: value / self._count for name, value in self._sums.items()}
        self._sums, self._count = {}, 0
        return result

    def weights(self) -> Weights:
        """Return copies of the live weights."""
        return [np.array(variable) for variable in self._variables.values()]

    def assign(self, weights: Weights) -> None:
        """Replace the live weights. The optimizer keeps its state."""
        for variable, value in zip(self._variables.values(), weights, strict=True):
            variable.assign(value)

    def test(self, weights: Weights, most: int = MOST_TESTED) -> tuple[float, float, int]:
        """Return accuracy, loss and number of samples of other weights. The live weights stay.

        Args:
            weights: The weights to test.
            most: Largest number of samples; they are drawn at random.
        """
        part = "test" if "x_test" in self._data else "train"
        x, y = self._data[f"x_{part}"], self._data[f"y_{part}"]
        rows = np.arange(len(_first_array(x)))
        if len(rows) > most:
            rows = np.sort(self._random.choice(rows, most, replace=False))
        live = self.weights()
        self.assign(weights)
        try:
            logs = self.model.evaluate(rows_of(x, rows), rows_of(y, rows), verbose=0, return_dict=True)
        finally:
            self.assign(live)
        self.model.reset_metrics()
        return accuracy_of(logs), float(logs["loss"]), len(rows)

    @property
    def other_scale(self) -> str:
        """The scale of the inputs that it tests with, if they are pictures of another scale than in browsers; empty otherwise."""
        if not _takes_pictures(self.model):
            return ""
        x = np.asarray(_first_array(self._data["x_test" if "x_test" in self._data else "x_train"]))
        low, high = float(x.min()), float(x.max())
        return "" if low >= 0 and high <= 1 else f"from {low:g} to {high:g}; browsers make pictures 0 to 1"

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the optimizer."""
        self.model.optimizer.learning_rate = rate


def _takes_pictures(model: Any) -> bool:
    """Return whether a model takes pictures in grey or in colour, and does not scale bytes itself."""
    inner = getattr(model, "inner", model)
    shapes = [tuple(tensor.shape) for tensor in inner.inputs]
    scales = any(type(layer).__name__ == "Rescaling" for layer in inner.layers)
    return len(shapes) == 1 and len(shapes[0]) == 4 and shapes[0][-1] in (1, 3) and not scales


def trained_tensors(model: Any, variables: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return per variable of a Keras model whether it is trained."""
    learns = {id(variable) for variable in model.trainable_weights}
    return tuple(id(variable) in learns for variable in variables.values())


def accuracy_of(logs: Mapping[str, float]) -> float:
    """Return the accuracy among the metrics of a training; NaN without one."""
    accuracies = [float(value) for name, value in logs.items() if name.endswith(ACCURACY)]
    return accuracies[0] if accuracies else float("nan")


def trained_from_text(
    text: str,
    arrays: Mapping[str, Any],
    source: str,
    say: Callable[[str], None],
    seed: int,
    classes: Sequence[str] = (),
) -> Trained:
    """Build the model of a text, and fit private data to it.

    Args:
        text: The model's text.
        arrays: Arrays of a file, by name.
        source: The file, for errors.
        say: Gets a line for each conversion of data that is not obvious.
        seed: Seed of the order of samples.
        classes: Names of the classes, which number text labels.

    Raises:
        NotationError: The text has mistakes.
        DatasetError: The data do not fit the model.
    """
    notation = provided("Notation", PART)(text, "the server's model")
    data, notes = provided("dataset", PART)(
        numbered(arrays, classes, source), source, notation.parsed, notation.loss, 0.0
    )
    _check_finite(data, arrays, source)
    own_shape = next((np.shape(arrays[name])[1:] for name in ("x_train", "x") if name in arrays), None)
    fitted_shape = np.shape(_first_array(data["x_train"]))[1:]
    if own_shape is not None and [size for size in own_shape if size != 1] != [
        size for size in fitted_shape if size != 1
    ]:
        notes.append(f"samples of the shape {list(own_shape)} become {list(fitted_shape)}")
    for note in notes:
        say(f"data      {note}")
    return Trained(notation.compiled(), data, seed)


def _check_finite(data: Mapping[str, Any], in_file: Mapping[str, Any], source: str) -> None:
    """Refuse NaN and infinite values: one of them spoils all weights of a batch.

    Args:
        data: The arrays of each part, such as ``x_test``.
        in_file: The arrays of the file, which may not have this part.
        source: The file.

    Raises:
        DatasetError: Names the part.
    """
    for part, arrays in data.items():
        for array in arrays.values() if isinstance(arrays, dict) else (arrays,):
            if np.issubdtype(array.dtype, np.inexact) and not (finite := np.isfinite(array)).all():
                name = part if part in in_file else part.partition("_")[0]
                raise DatasetError(
                    f"{np.sum(~finite):,} of {finite.size:,} values of {name} in {source} are not finite",
                    hint="replace NaN and infinite values",
                )


def settled_text(text: str, file: str, data: Mapping[str, Any] | None) -> Any:
    """Return a model text (``Notation``) in which all keys of the training are decided.

    Args:
        text: The text.
        file: Its file, for errors.
        data: The server's data, whose statistics decide open keys; None without any.

    Raises:
        ConfigError: The text has no loss, and there is no data to choose one by.
    """
    notation = provided("Notation", PART)(text, file)
    x, y = (None, None) if data is None else (data["x_train"], data["y_train"])
    without = [head for head in notation.parsed.graph.heads if y is None and not notation.loss_of(head)[0]]
    if without:
        raise ConfigError(
            f"{file} has no loss for its output {without[0].name!r}",
            hint=f"write one into it, such as {without[0].block}:loss SCE; for classes or MSE; for numbers, or let the labels "
            "of --data choose one",
        )
    return notation.settled(x, y, validation=False)


def text_of_model(model: Any) -> str:
    """Return the text of a compiled Keras model, with its loss and its optimizer.

    Raises:
        ConfigError: A text cannot contain its loss, its optimizer or a layer; the error names it.
    """
    for layer in model._flatten_layers(include_self=False) if hasattr(model, "_flatten_layers") else ():
        if type(layer).__name__ == "Lambda" or not _has_code_of(type(layer), "keras", "ddlf"):
            raise ConfigError(
                f"peers cannot train the layer {layer.name!r} ({type(layer).__name__}), whose code is in the app",
                hint="use layers of Keras: peers build the model from a text, and run no code of the server",
            )
    text = provided("describe", PART)(model)
    lines = [f"train:loss {_loss_of(model)};", f"train:optimizer {_optimizer_of(model)};"]
    lines += [f"train:{key} none;" for key in ("scaling", "penalty", "clipping", "loss_weights")]
    if reports_accuracy(model):
        lines.append("train:metrics accuracy;")
    return f"{text.rstrip()}\n\n" + "\n".join(lines) + "\n"


def reports_accuracy(model: Any) -> bool:
    """Return whether a compiled Keras model has an accuracy among its metrics."""
    return bool(metrics_of(model)[0])


def metrics_of(model: Any) -> tuple[list[str], list[str]]:
    """Return the metrics of a compiled Keras model by name: the accuracies of Keras, and the others, which peers do not
    report.
    """
    import keras

    names: tuple[list[str], list[str]] = [], []
    for metric in _leaves((model.get_compile_config() or {}).get("metrics")):
        name, is_custom = metric, False
        if isinstance(metric, dict):  # as Keras writes a function or an object
            config = metric.get("config")
            name = str(config.get("name", metric["class_name"]) if isinstance(config, dict) else config)
            is_custom = not (hasattr(keras.metrics, name) or str(metric.get("module")).startswith("keras"))
        names[is_custom or not name.endswith(ACCURACY)].append(name)
    return names


def _leaves(metrics: Any) -> list[Any]:
    """Return the metrics in a list, or in a list for each output, by number or by name."""
    if isinstance(metrics, dict) and "class_name" not in metrics:
        metrics = list(metrics.values())
    if isinstance(metrics, list | tuple):
        return [leaf for item in metrics for leaf in _leaves(item)]
    return [] if metrics is None else [metrics]


def _has_code_of(kind: Any, *packages: str) -> bool:
    return str(kind.__module__).partition(".")[0] in packages


def _loss_of(model: Any) -> str:
    import keras

    if not model.compiled:
        raise ConfigError("the model is not compiled", hint="call self.model.compile in create_model")
    if len(model.outputs) != 1:
        raise ConfigError(f"the model has {len(model.outputs)} outputs, and peers train one", hint="give it one output")
    loss = model.loss
    if isinstance(loss, str):
        loss = keras.losses.get(loss)
    name = str(getattr(loss, "name", None) or getattr(loss, "__name__", ""))
    name = {"mse": "mean_squared_error", "mae": "mean_absolute_error"}.get(name, name)
    is_own = not _has_code_of(type(loss) if isinstance(loss, keras.Loss) else loss, "keras")
    if name not in LOSSES or is_own:
        raise ConfigError(
            f"peers cannot train with the loss {name or loss!r}{' of the app' * is_own}",
            hint=f"they can with these of Keras: {', '.join(sorted(LOSSES))}",
        )
    config: dict[str, Any] = loss.get_config() if hasattr(loss, "get_config") else {}
    fresh = type(loss)().get_config() if config else {}
    if lost := [key for key, value in config.items() if key not in ("name", "from_logits") and value != fresh.get(key)]:
        raise ConfigError(
            f"peers cannot train with the loss {name} and {', '.join(f'{key}={config[key]!r}' for key in lost)}",
            hint="leave it out: the text of a model has no key for it",
        )
    logits = bool(config.get("from_logits", False))
    last = getattr(getattr(model.layers[-1], "activation", None), "__name__", "")
    if name.endswith("crossentropy") and logits != (last == "linear"):
        raise ConfigError(
            f"the loss {name} has from_logits={logits}, and the last activation is {last or 'unknown'}",
            hint="use from_logits=True after a linear output, and False after softmax or sigmoid",
        )
    return LOSSES[name]


def _optimizer_of(model: Any) -> str:
    optimizer = model.optimizer
    name, config = type(optimizer).__name__, optimizer.get_config()
    if name not in OPTIMIZERS or not _has_code_of(type(optimizer), "keras"):
        raise ConfigError(
            f"peers cannot train with the optimizer {name}", hint=f"they can with {', '.join(OPTIMIZERS)}"
        )
    if not isinstance(config["learning_rate"], float):
        raise ConfigError("peers cannot train with a schedule of the learning rate", hint="give a number")
    usual = type(optimizer)().get_config()
    arguments = {"learning_rate": config["learning_rate"]}
    arguments |= {key: value for key, value in config.items() if key not in LEFT_OUT and value != usual.get(key)}
    return f"{name}({', '.join(f'{key}={_spell(value)}' for key, value in arguments.items())})"


def _spell(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return repr(round(value, 9))
    return str(value)


def _first_array(x: Any) -> Any:
    return next(iter(x.values())) if isinstance(x, dict) else x


def rows_of(x: Any, rows: Any) -> Any:
    """Return some samples of an array, or of a dict of arrays."""
    return {name: array[rows] for name, array in x.items()} if isinstance(x, dict) else x[rows]


def arrays_of(source: str) -> Mapping[str, Any]:
    """Return the arrays of ``digits`` or another built-in data set, or of a ``.npz`` file.

    Built-in pictures have values from 0 to 1, as the page in a browser makes them of any picture.

    Raises:
        ConfigError: There is no such data.
        DatasetError: The file cannot be read.
    """
    arrays: Mapping[str, Any] = provided("DataSource", PART)(source).arrays()
    if source in PICTURES:
        return {name: array + np.float32(0.5) if name.startswith("x_") else array for name, array in arrays.items()}
    return arrays


def samples_of(arrays: Mapping[str, Any]) -> int:
    """Return the number of training samples in the arrays of a file."""
    samples = next((_rows(arrays[key]) for key in ("x_train", "x", "data") if key in arrays), 0)
    return samples or max(map(_rows, arrays.values()), default=0)


def _rows(array: Any) -> int:
    """Return the number of rows of an array or a list; 0 without rows."""
    shape = getattr(array, "shape", None)
    rows = len(array) if shape is None and isinstance(array, list | tuple) else (shape or (0,))[0]
    return int(rows)


def read_text(path: Path, rate: float | None = None) -> str:
    """Return the text in a model text, or that of a model file of WebNN.

    Args:
        path: The file.
        rate: Learning rate for a model file of WebNN; None for the usual one.

    Raises:
        NotationError: It cannot be read.
        ConfigError: It is not in UTF-8.
    """
    read = provided("text_of_file", PART)
    text: bytes | str = read(path) if rate is None else read(path, rate)
    try:
        return text if isinstance(text, str) else text.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
