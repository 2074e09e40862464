"""Collects the facts of an app's data, model and settings. Does not train, draw random numbers or change the app. Runs
on the master."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ddlf.data.app_data import NAMES, data_set_of, has_own_train
from ddlf.data.trees import first_array, grown, leaves
from ddlf.errors import AppError, DDLFError
from ddlf.extras.advice.arrays import compared, described
from ddlf.extras.advice.facts import AppFacts
from ddlf.extras.advice.network import has_own_step, heads_of, is_own, layers_of, optimizer_of
from ddlf.extras.advice.source import UserSources, text_of
from ddlf.rpc.code import own_modules
from ddlf.rpc.iworker import awaited
from ddlf.training.callbacks.checks import check, warnings, warnings_of_master
from ddlf.training.context import App
from ddlf.training.registry import flat, spec_of
from ddlf.training.roles import have_keras
from ddlf.training.slot.build import fresh_names, left_behind, ready_model
from ddlf.worker import machine

SETTINGS = (
    "mode",
    "master_epochs",
    "worker_epochs",
    "worker_steps",
    "batch_size",
    "slots",
    "shuffle",
    "optimizer_state",
    "class_weight",
    "codec",
    "exchange",
)
"""Settings that rules use."""


PARTS = ("train", "val", "test")
TAKEN_IN = 1 << 26
"""Maximum bytes of a data set to read into memory."""


def copy_of_app(app: App) -> Any:
    """Return a copy of the app with the same attributes. It keeps the adviser's data and model out of the app."""
    other = object.__new__(type(app))
    vars(other).update(vars(app))
    return other


async def load(app: App) -> None:
    """Call the app's ``load_dataset``, unless it has data already. The data is not checked."""
    from ddlf.data import app_data
    from ddlf.training.samples.policy import check_common

    check_common(app, "the adviser looks at samples, and only workers have them")
    if not (hasattr(app, "x_train") or hasattr(app, "train_data")):
        await awaited(app.load_dataset())
        app_data.take_made(app)


def read_into_arrays(app: App) -> bool:
    """Read a small data set into arrays, so that the rules for arrays apply. Return whether it was read.

    The data set is in files, a ``PyDataset`` or a pipeline.

    Args:
        app: The adviser's copy.
    """
    data_sets = {part: data_set for part in PARTS if (data_set := data_set_of(app, part)) is not None}
    if "train" not in data_sets or any(
        getattr(data_set, "endless", False) or not all(data_set.availability()) or _size(data_set) > TAKEN_IN
        for data_set in data_sets.values()
    ):
        return False
    for part, data_set in data_sets.items():
        columns = {name: data_set[name] for name in data_set}
        for letter in "xyw":
            setattr(app, f"{letter}_{part}", grown(columns, letter))
        setattr(app, f"{part}_data", None)
    return True


def _size(data_set: Any) -> int:
    """Return the size in bytes of all samples of a data set."""
    sample_bytes = sum(
        math.prod(column.shape) * np.dtype(column.dtype).itemsize for column in data_set.columns.values()
    )
    return int(data_set.manifest.samples) * int(sample_bytes)


async def build(app: App) -> None:
    """Call the app's ``create_model``, unless it has a model already.

    Raises:
        AppError: The app builds no model, or one that cannot be trained.
    """
    await have_keras()
    import keras

    if "model" not in vars(app):
        keras.utils.set_random_seed(app.seed)
        with fresh_names():
            await awaited(app.create_model())
    ready_model(app)


def facts_of(app: App, *, workers: int | None = None, observations: Mapping[str, Any] | None = None) -> AppFacts:
    """Collect the facts that the rules check: about an app's data, model and settings.

    Args:
        app: The app, with its data and model if they exist.
        workers: Number of workers.
        observations: The observations of other levels by name.
    """
    data = {name: value for name in NAMES if (value := getattr(app, name, None)) is not None}
    arrays = tuple(
        described(leaf, name[2:], array) for name, tree in data.items() for leaf, array in leaves(tree, name)
    )
    data_set = data_set_of(app, "train")
    samples = data_set.manifest.samples if data_set is not None else _count(data.get("x_train"))
    model = vars(app).get("model")
    layers = layers_of(model) if model is not None else ()
    return AppFacts(
        app=type(app).__name__,
        samples=samples,
        arrays=arrays,
        rows=compared(data),
        layers=layers,
        inputs=_inputs(model),
        heads=heads_of(model, layers, data.get("y_train")) if model is not None else (),
        optimizer=optimizer_of(model) if model is not None else None,
        settings=_settings(app),
        workers=workers if workers is not None else getattr(app.cluster, "N", None),
        callbacks=(*warnings_of_master(app, app.mode), *_refused(app, model)),
        worker_callbacks=tuple(warnings(app.worker_callbacks)),
        custom=_custom_parts(app, model),
        left_behind=tuple(left_behind(model)) if model is not None else (),
        from_files=data_set is not None,
        memory=machine.memory()[0],
        observations=dict(observations or {}),
    )


def _count(x: Any) -> int:
    try:
        return 0 if x is None else len(first_array(x))
    except (StopIteration, TypeError):
        return 0


def _inputs(model: Any) -> tuple[tuple[str, tuple[int | None, ...], str], ...]:
    try:
        inputs = list(model.inputs or ())
    except (AttributeError, ValueError):  # the model is subclassed
        return ()
    return tuple((tensor.name, tuple(tensor.shape[1:]), str(tensor.dtype)) for tensor in inputs)


def _settings(app: App) -> dict[str, Any]:
    try:
        values = flat(spec_of(app))
    except DDLFError:  # the run reports this error
        values = {name: getattr(app, name) for name in SETTINGS}
    settings = {name: values[name] for name in SETTINGS}
    settings["codec"] = type(values["codec"]).__name__
    settings["shuffle"] = values["shuffle"] and str(values["shuffle"])
    settings["callbacks"] = tuple(type(callback).__name__ for callback in app.callbacks)
    return settings


def _refused(app: App, model: Any) -> tuple[str, ...]:
    """Return the reason why a run would refuse the app's Keras callbacks; an empty tuple if it accepts them."""
    try:
        if model is not None:
            check(app)
    except AppError as error:
        return (f"{error.message}, so a run cannot begin" + (f": {error.hint}" if error.hint else ""),)
    return ()


def _custom_parts(app: App, model: Any) -> frozenset[str]:
    parts = {"train"} if has_own_train(app) else set()
    if model is not None:
        parts |= {name for name, is_custom in (("loss", is_own(model)), ("step", has_own_step(model))) if is_custom}
    return frozenset(parts)


def sources_of(app: App) -> UserSources:
    """Return the user's source files: the file with the app's class, the Python files beside it, and the model text, if
    the model is one."""
    paths: list[Path] = []
    for kind in type(app).__mro__:
        if kind.__module__.startswith("ddlf.") or kind is object:
            continue
        try:
            paths.append(Path(inspect.getfile(kind)))
        except (TypeError, OSError):  # the class is from a notebook or a console
            continue
    folder = paths[0].parent.resolve() if paths else None
    for module in own_modules():
        path = Path(module.__file__)
        if folder is not None and folder in path.resolve().parents and path.suffix == ".py":
            paths.append(path)
    return UserSources(paths, type(app).__name__, text_of(app))
