"""The weights of a model in one safetensors file, with the model's text in its metadata. Runs where models are made.

Each tensor has the name of its layer and its own: ``dense/kernel``, within another model ``tower/dense/kernel``. Nothing in the file is ever run.
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
"""Under which name the metadata has the text."""
SMALL = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
"""Types of the format that NumPy has by ml_dtypes only, which Keras brings."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to, and move that file to ``path`` at the end, so that nobody sees a half-written file.

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
        text: The text from which ``build`` makes the model again.
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
    """Return the text of a file without reading a tensor.

    Raises:
        ConfigError: It cannot be read, or has none.
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
    """Write the weights of a model with its text: that which it was made of, else a description of it.

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
    """Return the text and the tensors of a file.

    Raises:
        ConfigError: It cannot be read, it is cut, or it has no text of a model.
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
            f"{path} is cut or no safetensors file: {error}", hint="copy it again, or save the weights again"
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
    """Give a model the weights of a file.

    Args:
        model: The model of Keras.
        tensors: As ``load`` gives them.
        path: The file, for errors.

    Raises:
        ConfigError: The weights belong to another model, or one is surplus. Then the model is unchanged.
    """
    wanted = variables(model)
    for name, item in wanted.items():
        if name not in tensors:
            raise ConfigError(f"{path} has weights of another model: {name!r} is not among them")
        if tuple(tensors[name].shape) != tuple(item.shape):
            sizes = f"{name!r} has {shown(tensors[name].shape)} there and {shown(tuple(item.shape))} here"
            raise ConfigError(f"{path} has weights of another model: {sizes}")
        if str(tensors[name].dtype) != str(item.dtype):
            raise ConfigError(
                f"{path} has weights of another model: {name!r} is {tensors[name].dtype} there and {item.dtype} here"
            )
    if more := [name for name in tensors if name not in wanted]:
        many = f" and {len(more) - 1} more" * (len(more) > 1)
        raise ConfigError(f"{path} has a tensor too many: the model has no {more[0]!r}{many}")
    for name, item in wanted.items():
        item.assign(tensors[name])
    for layer in model._flatten_layers():
        if hasattr(layer, "finalize_state"):  # Normalization computes with a copy
            layer.finalize_state()


def check_text(model: Model, text: str, path: Path) -> None:
    """Compare a model's text with the one that weights were saved with; comments and form do not count.

    Raises:
        ConfigError: It was changed since.
    """
    try:
        same = read(text).graph.nodes == model.graph.nodes
    except NotationError:
        same = False
    if not same:
        raise ConfigError(
            f"{model.file} was changed since its weights were saved to {path}",
            hint=f"`ddlf model diff {model.file} {path}` says what; take the text that the weights have, or train again",
        )


def variables(model: Any) -> dict[str, Any]:
    """Every weight of a model by its name in the file, in the order of the model."""
    result: dict[str, Any] = {}
    seen: set[int] = set()
    for name, item in _named(model):
        if id(item) in seen:
            continue
        seen.add(id(item))
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
            _, inside, own = str(weight.path).rpartition(f"{layer.name}/")
            own = re.sub(
                r"\bvariable_\d+$", "variable", own if inside else weight.name
            )  # Keras counts those without a name
            yield f"{before}{layer.name}/{own}", weight
