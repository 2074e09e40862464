"""Checks of an app before anything starts. Runs on the master; does not import Keras."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import os
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import zip_longest
from pathlib import Path
from types import CodeType
from typing import Any

from ddlf.errors import AppError, CheckpointMismatch, ConfigError
from ddlf.training.context import App
from ddlf.training.registry import SETTINGS

TRAINING = ("tensorflow", "jax", "torch")
SIMILAR = 0.84
"""Similarity above which a name counts as a misspelt setting: one letter of eight is wrong."""


def check_app(app: App) -> None:
    """Refuse an app with a misspelt setting, or with a method that has wrong arguments.

    Raises:
        ConfigError: An attribute looks like a misspelt setting.
        AppError: A method has the wrong arguments.
    """
    base = next(cls for cls in type(app).__mro__ if cls.__module__ == "ddlf.app")
    _check_misspelt(app, base)
    _check_train(app)


def _check_misspelt(app: App, base: type) -> None:
    own = {
        name: value for cls in reversed(type(app).__mro__) if issubclass(cls, base) for name, value in vars(cls).items()
    }
    for name, value in {**own, **vars(app)}.items():
        if (
            name.startswith("_")
            or hasattr(base, name)
            or name in SETTINGS
            or callable(value)
            or isinstance(value, property)
        ):
            continue
        near = _settings_like(name)
        # An attribute of another type, or one that the app's own methods read, is not a misspelt setting.
        if near and _alike(value, SETTINGS[near[0]].default) and not _is_read(type(app), base, name):
            raise ConfigError(
                f"{type(app).__name__}.{name} is not a setting, so it would have no effect; did you mean {near[0]}?",
                hint=f"rename the attribute if you did not mean {near[0]}",
            )


@cache
def _settings_like(name: str) -> list[str]:
    return difflib.get_close_matches(name, [known for known in SETTINGS if known != "callbacks"], 1, SIMILAR)


def _alike(value: Any, setting: Any) -> bool:
    return setting is None or type(value) is type(setting)


def _is_read(cls: type, base: type, name: str) -> bool:
    functions = [vars(part).values() for part in cls.__mro__ if issubclass(part, base) and part is not base]
    codes = [function.__code__ for values in functions for function in values if inspect.isfunction(function)]
    while codes:
        code = codes.pop()
        if name in code.co_names or name in code.co_consts:
            return True
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    return False


def _check_train(app: App) -> None:
    try:
        inspect.signature(app.train).bind([], 1, 1)
    except TypeError:
        raise AppError(
            f"{type(app).__name__}.train cannot be called with its arguments",
            hint="write train(self, weights, worker_epochs, batch_size)",
        ) from None


def check_same_model(stored: Mapping[str, Any], described: Sequence[Sequence[Any]]) -> None:
    """Refuse the weights of another model, and name the first one that differs.

    Args:
        stored: The weights of a checkpoint, by number and path, such as ``"0002 dense/kernel"``.
        described: Path, shape and more of each weight of this model.

    Raises:
        CheckpointMismatch: A weight differs. The message shows both weights.
    """
    theirs = [(name.partition(" ")[2], tuple(array.shape)) for name, array in stored.items()]
    mine = [(str(row[0]), tuple(row[1])) for row in described]
    for number, (old, new) in enumerate(zip_longest(theirs, mine), 1):
        if old is None or new is None or old[1] != new[1]:
            was, now = (f"{found[0]} of shape {found[1]}" if found else "not there" for found in (old, new))
            raise CheckpointMismatch(
                f"the checkpoint is of another model: weight {number} is {was} in it, but {now} here",
                hint="use the model of the checkpoint, or start again in another folder",
            )


def check_backend() -> None:
    """Refuse a Keras backend that cannot train here.

    Raises:
        ConfigError: The backend cannot train here. The error lists the backends that can.
    """
    name = os.environ.get("KERAS_BACKEND")
    if name and name not in TRAINING:
        near = difflib.get_close_matches(name, TRAINING, 1)
        guess = f", did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"KERAS_BACKEND must be one of {', '.join(TRAINING)}, got {name!r}{guess}")
    if not _is_installed("keras"):
        raise ConfigError(
            "keras, which trains the models, is not installed", hint="install it: pip install keras tensorflow"
        )
    if not name:
        home = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras")
        name = None if (home / "keras.json").is_file() else "tensorflow"  # the file may name another backend
    if name and not _is_installed(name):
        others = [other for other in TRAINING if _is_installed(other)]
        raise ConfigError(
            f"{name}, which Keras would use here, is not installed",
            hint=f"set KERAS_BACKEND={others[0]}, which is installed" if others else f"install it: pip install {name}",
        )


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
