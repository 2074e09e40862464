"""Finds the model to export: a ``.keras`` file, a model as text, or the folder of a run.

This module checks the model without importing Keras, so that errors come at once.
"""

from __future__ import annotations

import difflib
import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddlf.errors import ConfigError
from ddlf.extras import provided
from ddlf.monitor.runs import folder

TEXT = ".nnm"
SAVED = ".keras"
MODEL = "model.keras"
"""The file name of the model in the folder of a run."""
HALF = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class ExportSource:
    """A model to export.

    Attributes:
        path: Its file.
        stem: The name of the written files.
        custom_layers: The registered names of the user's own layers in the model.
        half_precision: The first layer that computes in 16 bits and its type policy, or None.
    """

    path: Path
    stem: str
    custom_layers: tuple[str, ...] = ()
    half_precision: tuple[str, str] | None = None

    @property
    def is_text(self) -> bool:
        """Return whether the model is a text, which has no weights."""
        return self.path.suffix == TEXT


def find(path: Path, code: Path | None) -> ExportSource:
    """Find the model to export: in a file, or in the folder of a run.

    Args:
        path: A file, the folder of a run, or the name of a run in the usual folder, such as ``last``.
        code: The Python file with the user's own layers, if there is one.

    Raises:
        ConfigError: The path is not a model, or the model is not loadable.
        NotationError: The text has mistakes.
    """
    if code is not None and not (code.is_file() and code.suffix == ".py"):
        raise ConfigError(f"--layers {code}: there is no such Python file")
    if not path.exists() and not path.suffix and len(path.parts) == 1:
        path = _run_named(path.name)
    if path.is_dir():
        if not (path / MODEL).is_file():
            raise ConfigError(
                f"{path} is a folder without {MODEL}", hint="name a .keras file, a .nnm text or the folder of a run"
            )
        stem, path = path.resolve().name, path / MODEL
    else:
        stem = path.stem
    if not path.is_file():
        raise ConfigError(f"there is no file {str(path)!r}", hint=_suggestion(path))
    if path.stat().st_size == 0:
        raise ConfigError(f"{path} is empty")
    if path.suffix == TEXT:
        source = _written(path, stem)
    elif path.suffix == SAVED:
        source = _saved(path, stem)
    else:
        raise ConfigError(f"{path} is neither a .keras file nor a .nnm text", hint=_advice(path))
    if source.custom_layers and code is None:
        raise ConfigError(
            f"{path} has custom layers: {', '.join(source.custom_layers)}",
            hint="name the Python file that has them: --layers FILE.py",
        )
    return source


def _run_named(name: str) -> Path:
    """Return the folder of the run that a name means, as for ``ddlf report``."""
    try:
        return folder.find(Path(folder.usual_out()), name)
    except ConfigError as error:
        error.message = f"there is no file {name!r}, and {error.message}"
        raise


def _written(path: Path, stem: str) -> ExportSource:
    """Return the model in a model text as an export source, after a check of the text."""
    custom_layers, half_precision = provided("layers_of_text", str(path))(path)
    return ExportSource(path, stem, custom_layers, half_precision)


def _suggestion(path: Path) -> str:
    siblings = {item.name: item for ending in (SAVED, TEXT) for item in path.parent.glob(f"*{ending}")}
    matches = difflib.get_close_matches(path.name, siblings, 1)
    return f"did you mean {str(siblings[matches[0]])!r}?" if matches else ""


def _advice(path: Path) -> str:
    if path.suffix == ".py":
        return f"train the app with: ddlf run {path} --save model.keras"
    if path.suffix in (".h5", ".hdf5"):
        return f"load it in Keras, and save it as {path.with_suffix(SAVED)}"
    if path.suffix == ".safetensors":
        return f"make a .keras file of it: ddlf model convert {path} {path.with_suffix(SAVED)}"
    return "save the model with model.save('model.keras')"


def _saved(path: Path, stem: str) -> ExportSource:
    """Return the model in a ``.keras`` file as an export source, after reading its config without Keras."""
    try:
        with zipfile.ZipFile(path) as file:
            config = json.loads(file.read("config.json"))
    except (zipfile.BadZipFile, KeyError, ValueError, OSError) as error:
        raise ConfigError(f"{path} is not a .keras file: {error}", hint="save the model again") from error
    custom_layers: dict[str, None] = {}
    half_precision = None
    for item in _objects(config):
        if item.get("class_name") == "Lambda" and _is_of_keras(item):
            raise ConfigError(
                f"{path} has a Lambda, the layer {item['config'].get('name')!r}: loading it would run code from the file",
                hint="write it as your own layer, registered with keras.saving.register_keras_serializable",
            )
        if not _is_of_keras(item):
            custom_layers[str(item.get("registered_name") or item["class_name"])] = None
        policy = _policy(item)
        if half_precision is None and policy.removeprefix("mixed_") in HALF:
            half_precision = (str(item["config"].get("name", stem)), policy)
    return ExportSource(path, stem, tuple(custom_layers), half_precision)


def _objects(config: Any) -> Iterator[dict[str, Any]]:
    """Yield each object of a serialized model that has a class, outer objects first. Leave out the optimizer, losses
    and metrics, which are not loaded."""
    if isinstance(config, dict):
        if "class_name" in config and isinstance(config.get("config"), dict):
            yield config
        for key, value in config.items():
            if key != "compile_config":
                yield from _objects(value)
    elif isinstance(config, list):
        for value in config:
            yield from _objects(value)


def _is_of_keras(config: dict[str, Any]) -> bool:
    """Return whether the class belongs to Keras or this package, so that loading it needs no file of the user."""
    module = str(config.get("module") or "")
    if module == "builtins":
        return True
    if config.get("registered_name") and ">" in str(config["registered_name"]):
        return module.startswith("ddlf.")
    return module.partition(".")[0] in ("keras", "ddlf") or "module" not in config


def _policy(config: dict[str, Any]) -> str:
    policy = config["config"].get("dtype")
    if isinstance(policy, dict):
        policy = policy.get("config", {}).get("name")
    return str(policy or "")
