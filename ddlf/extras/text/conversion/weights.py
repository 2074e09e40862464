"""Saves a model's weights in a safetensors file, with the model's text in the metadata. Runs where models are made.

The name of a tensor has the layer and the weight, such as ``dense/kernel``, or ``tower/dense/kernel`` in a nested
model. Loading a file never runs code from it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddlf.errors import ConfigError, DDLFError, NotationError
from ddlf.extras.text.language.inference import shown
from ddlf.extras.text.language.model import Model, read

TEXT = "ddlf.model"
"""The key of the text in the metadata."""
SMALL = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
"""Types of the format that NumPy only has with ml_dtypes, which Keras installs."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, and move that file to ``path`` at the end, so that no file is half-written.

    Raises:
        ConfigError: The file cannot be written.
    """
    from safetensors import SafetensorError

    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        yield temporary
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}") from error


def save(model: Any, text: str, path: Path) -> None:
    """Write the weights of a Keras model and its text to a file, atomically.

    Args:
        model: The model.
        text: The model text. ``build`` makes the same model from it.
        path: The file; an existing one is replaced.

    Raises:
        ConfigError: The file cannot be written.
    """
    import keras
    import numpy as np
    from safetensors.numpy import save_file

    arrays = {
        name: np.asarray(keras.ops.convert_to_numpy(variable), order="C") for name, variable in variables(model).items()
    }
    with replacing(path) as temporary:
        save_file(arrays, temporary, {TEXT: text})


def text_within(path: Path) -> str:
    """Return the model text in a file without reading its tensors.

    Raises:
        ConfigError: The file cannot be read, or contains no text.
    """
    import safetensors

    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            facts = file.metadata() or {}
    except (OSError, safetensors.SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", hint="copy it again, or save the weights again") from error
    return _text(facts, path)


def _text(facts: dict[str, str], path: Path) -> str:
    if TEXT not in facts:
        raise ConfigError(
            f"{path} has no text of a model in its metadata", hint="take a file that `ddlf model convert` wrote"
        )
    return facts[TEXT]


def save_with_text(model: Any, path: Path) -> None:
    """Write the weights of a model with its original text. A model without one is described by a new text.

    Raises:
        ConfigError: No text can describe the model; it is saved as a ``.keras`` file beside the path instead.
    """
    from ddlf.extras.text.conversion.describe import describe
    from ddlf.training.slot.optimizers import unwrapped

    notation = getattr(model, "notation", None)
    try:
        text = describe(model) if notation is None else notation.text
    except DDLFError as error:
        other = path.with_suffix(".keras")
        model.save(other)
        raise ConfigError(
            f"{path} cannot be written, because a text cannot contain this model: {error}; it is in {other}"
        ) from error
    save(model if notation is None else unwrapped(model), text, path)


def load(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the model text and the tensors of a file.

    Raises:
        ConfigError: The file cannot be read, is truncated, or contains no text of a model.
    """
    import numpy as np
    import safetensors

    try:
        data = path.read_bytes()
        with safetensors.safe_open(path, framework="numpy") as file:
            facts = file.metadata() or {}
        result = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except safetensors.SafetensorError as error:
        raise ConfigError(
            f"{path} is truncated, or is not a safetensors file: {error}",
            hint="copy it again, or save the weights again",
        ) from error
    return _text(facts, path), {
        name: np.frombuffer(item["data"], _dtype(item["dtype"], path)).reshape(item["shape"]) for name, item in result
    }


def _dtype(name: str, path: Path) -> Any:
    import numpy as np
    from safetensors.numpy import _TYPES

    if name in _TYPES:
        return np.dtype(_TYPES[name])
    if name in SMALL:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, SMALL[name]))
    raise ConfigError(f"{path} has a tensor of the type {name}, which NumPy does not have")


def fill(model: Any, tensors: dict[str, Any], path: Path) -> None:
    """Set the weights of a model to the weights that were loaded from a file.

    Args:
        model: The Keras model.
        tensors: The tensors that ``load`` returns.
        path: The file, for errors.

    Raises:
        ConfigError: The weights belong to another model, or the file has an additional tensor. In this case the model
            is unchanged.
    """
    model_variables = variables(model)
    for name, item in model_variables.items():
        if name not in tensors:
            raise ConfigError(f"{path} has weights of another model: {name!r} is not among them")
        if tuple(tensors[name].shape) != tuple(item.shape):
            sizes = f"{name!r} has {shown(tensors[name].shape)} there and {shown(tuple(item.shape))} here"
            raise ConfigError(f"{path} has weights of another model: {sizes}")
        if str(tensors[name].dtype) != str(item.dtype):
            raise ConfigError(
                f"{path} has weights of another model: {name!r} is {tensors[name].dtype} there and {item.dtype} here"
            )
    if surplus := [name for name in tensors if name not in model_variables]:
        many = f" and {len(surplus) - 1} more" * (len(surplus) > 1)
        raise ConfigError(f"{path} has a tensor too many: the model has no {surplus[0]!r}{many}")
    for name, item in model_variables.items():
        item.assign(tensors[name])
    for layer in model._flatten_layers():
        if hasattr(layer, "finalize_state"):  # Normalization computes with a copy
            layer.finalize_state()


def check_text(model: Model, text: str, path: Path) -> None:
    """Check that a model's text has the same content as the model text that its weights were saved with. Comments and
    layout do not count.

    Raises:
        ConfigError: The text has changed since the weights were saved.
    """
    try:
        is_same = read(text).graph.nodes == model.graph.nodes
    except NotationError:
        is_same = False
    if not is_same:
        raise ConfigError(
            f"{model.file} was changed since its weights were saved to {path}",
            hint=f"`ddlf model diff {model.file} {path}` shows the differences; use the text in the file with the weights, or train again",
        )


def variables(model: Any) -> dict[str, Any]:
    """Return every weight of a model by its name in the file, in the order of the model."""
    result: dict[str, Any] = {}
    seen_ids: set[int] = set()
    for name, item in _named(model):
        if id(item) in seen_ids:
            continue
        seen_ids.add(id(item))
        free, count = name, 1
        while free in result:
            count += 1
            free = f"{name}_{count}"
        result[free] = item
    return result


def _named(model: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    import keras

    for layer in model.layers:
        if isinstance(layer, keras.Model):
            yield from _named(layer, f"{before}{layer.name}/")
            continue
        for weight in layer.weights:
            _, separator, weight_name = str(weight.path).rpartition(f"{layer.name}/")
            # Keras numbers layers without a name.
            weight_name = re.sub(r"\bvariable_\d+$", "variable", weight_name if separator else weight.name)
            yield f"{before}{layer.name}/{weight_name}", weight
