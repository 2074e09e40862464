"""Evaluates, saves and loads the master's model on a separate thread, so that the event loop serves connections."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ddlf.algorithms.weights import Weights
from ddlf.data.app_data import check_part, data_set_of, has_data
from ddlf.data.trees import grown, leaves
from ddlf.errors import AppError, ConfigError, DDLFError
from ddlf.events import Evaluated, ModelSaved, Warned, What
from ddlf.events.phases import Phase
from ddlf.extras import hook_for, suffixes
from ddlf.rpc.iworker import awaited, drop_error
from ddlf.training.context import App
from ddlf.training.evaluation.model import EVALUATION_BATCH, Moved, end_reading, evaluate
from ddlf.training.progress import WeightsRef
from ddlf.training.samples.policy import data_of
from ddlf.training.slot.build import fresh_names, ready_model

KERAS = ".keras"
"""Suffix of a model in Keras's format."""


def validate(
    app: App, weights: list[Any], batch_size: int, callbacks: Any = None, *, moved: Moved | None = None
) -> dict[str, float]:
    """Return the validation metrics that ``fit`` would report after an epoch; empty without validation data.

    Args:
        app: The user's ``IApp``.
        weights: The weights after the round.
        batch_size: Batch size of the training, as in ``fit``.
        callbacks: Callbacks for ``evaluate``.
        moved: Receives the number of evaluated samples.

    Returns:
        Metrics by name; each name begins with ``val_``.
    """
    if not has_data(app, "val"):
        return {}
    values = evaluate(app, weights, "val", batch_size, moved=moved, callbacks=callbacks)
    return {f"val_{name}": value for name, value in values.items()}


def check_test_data(app: App) -> None:
    """Check that the model can be evaluated on the test data, before a training that may take hours.

    Raises:
        AppError: ``evaluate_every`` is set, and the test data is missing or does not fit; otherwise only a warning.
    """
    wrong = wrong_with_test(app)
    if wrong and app.evaluate_every:
        method = app.run_context.data.evaluated_in
        raise AppError(f"evaluate_every={app.evaluate_every}, but {wrong}", hint=f"set x_test, y_test in {method}")
    if wrong and (hasattr(app, "x_test") or data_set_of(app, "test") is not None):
        app.run_context.emit(Warned(about="data", why=f"{wrong}: it cannot be evaluated"))


async def measured(
    function: Any, app: App, weights: Weights | WeightsRef | None, *args: Any, worker_evaluation: Any = None
) -> dict[str, float]:
    """Run ``evaluate`` or ``validate`` on a thread of the master, or on the workers.

    The workers evaluate if they have the weights or share evaluations. A cancelled evaluation ends after its current
    batch.

    Args:
        function: ``evaluate`` or ``validate``.
        app: The function's first argument.
        weights: The function's second argument.
        args: The function's further arguments.
        worker_evaluation: A ``WorkerEvaluation``, if workers share evaluations.
    """

    def stop() -> None:
        vars(app)["model"].stop_evaluating = True
        end_reading(app)

    validates = function is validate
    part = "val" if validates else "test"
    activity: What = "validating" if validates else "evaluating"
    alone = args[1:] in ((), (None,))  # with callbacks, the master must evaluate
    values = None
    if isinstance(weights, WeightsRef):
        if alone:
            with Phase(app.run_context.emit, activity):
                values = await weights.evaluate(app, part, *args[:1])
        if values is None:
            weights = await weights.fetch()
    if worker_evaluation is not None and (alone or not has_data(app, part)) and values is None:
        with Phase(app.run_context.emit, activity, total=worker_evaluation.samples(part), unit="samples") as phase:
            values = await worker_evaluation(
                {"weights": weights}, part, *(args[:1] or (EVALUATION_BATCH,)), phase=phase
            )
    if values is not None:
        return {f"val_{name}": value for name, value in values.items()} if validates else values
    shapes = [getattr(array, "shape", ()) for _, array in leaves(getattr(app, f"x_{part}", None))]
    samples = next((shape[0] for shape in shapes if shape), 0)  # the evaluation itself refuses other types
    if (data_set := data_set_of(app, part)) is not None:
        samples = data_set.manifest.samples
    tell = asyncio.get_running_loop().call_soon_threadsafe
    with Phase(app.run_context.emit, activity, total=samples, unit="samples") as phase:
        evaluation = partial(function, moved=lambda done: tell(phase.move, min(done, samples)))
        metrics: dict[str, float] = await compute(evaluation, app, weights, *args, stop=stop)
    return metrics


async def evaluated(app: App) -> dict[str, float]:
    """Evaluate the app's current model on its test data, and return the metrics.

    Raises:
        AppError: There is no test data, or it does not fit the model.
    """
    if not has_data(app, "test"):
        raise AppError(
            "there is no test data to evaluate on",
            hint="set self.x_test and self.y_test, or self.test_data, in load_dataset",
        )
    try:
        metrics = await measured(evaluate, app, None)
    except Exception as error:
        if not isinstance(error, DDLFError):
            check_test(app)
        raise
    app.run_context.emit(Evaluated(metrics=metrics))
    return metrics


async def save(app: App, path: str | Path) -> None:
    """Save the model to a file. The file is complete, or does not exist.

    Args:
        app: The user's ``IApp``.
        path: The file. Its name ends with ``.keras``, Keras's format, or with a suffix that an optional part of DDLF
            writes.
    """
    path = Path(path)
    check_path(path)
    with Phase(app.run_context.emit, "saving"):
        await compute(write_model, app.model, path)
    app.run_context.emit(ModelSaved(path=str(path)))


def write_model(model: Any, path: Path) -> None:
    """Write a Keras model to a file, as ``save`` does for that of an app.

    Args:
        model: The model.
        path: The file, which ``check_path`` accepts.
    """
    if (save_model := hook_for("save_model", "saved_types", path.suffix)) is not None:
        save_model(model, path)
        return
    temporary = path.with_name(f".{path.stem}.new.keras")
    try:
        model.save(temporary)
        temporary.replace(path)
    except FileNotFoundError:
        raise ConfigError(f"the folder of {str(path)!r} does not exist", hint="make it first") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def check_path(path: Path) -> None:
    """Raise an error for a path that no model can be saved to, before there is a model.

    Raises:
        ConfigError: The suffix is unknown, or the folder is missing or read-only.
    """
    folder = path.parent
    kinds = (KERAS, *suffixes("saved_types"))
    if path.suffix not in kinds:
        raise ConfigError(f"a model is saved as a {' or '.join(kinds)} file, got {str(path)!r}")
    if path.is_dir():
        raise ConfigError(f"a model is saved as a file, but {str(path)!r} is a folder")
    if path.exists() and not os.access(path, os.W_OK):
        raise ConfigError(f"{str(path)!r} already exists and is read-only", hint="choose another name")
    if not folder.is_dir():
        raise ConfigError(f"the folder of {str(path)!r} does not exist", hint="make it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"the folder of {str(path)!r} cannot be written to", hint="choose another one")


async def load(app: App, path: str | Path) -> None:
    """Read the weights of a saved model, or the whole model if the app has none. Files that contain code are refused.

    If a whole model uses classes that are not registered with Keras, ``create_model`` makes it, and it gets the weights
    of the file.

    Args:
        app: The user's ``IApp``.
        path: A ``.keras`` file.
    """
    import keras

    if not Path(path).is_file():  # noqa: ASYNC240
        raise ConfigError(f"there is no model file {str(path)!r}")
    if not hasattr(app, "model"):
        try:
            app.model = await compute(keras.models.load_model, str(path))
            return
        except TypeError as error:
            if "Could not locate" not in str(error):
                raise
        if not has_data(app, "train"):
            await data_of(app).load(app)
        with fresh_names():
            await awaited(app.create_model())
    ready_model(app)
    try:
        await compute(app.model.load_weights, str(path))
    except ValueError as error:
        raise AppError(
            f"the weights of {str(path)!r} do not fit the app's model {app.model.name!r}: {error}",
            hint="load the file of an equal model, or a whole model into an app that has none yet",
        ) from error


async def compute(function: Any, *args: Any, stop: Callable[[], None] = lambda: None) -> Any:
    """Run a function that uses Keras on a separate thread, so that the event loop serves connections meanwhile.

    Args:
        function: The function to run.
        args: The function's arguments.
        stop: Asks the function to end early, because the caller was cancelled. It is called until the function has
            ended, since the model is in use until then.
    """
    executor = ThreadPoolExecutor(1, "compute")
    computing = asyncio.get_running_loop().run_in_executor(executor, function, *args)
    try:
        return await asyncio.shield(computing)
    except asyncio.CancelledError:
        computing.add_done_callback(drop_error)
        while not computing.done():
            stop()
            await asyncio.wait([computing], timeout=0.05)
        raise
    finally:
        executor.shutdown(wait=False)


async def to_its_end(coroutine: Coroutine[Any, Any, None]) -> None:
    """Wait until a coroutine has ended, even if the wait is cancelled: Ctrl-C must not interrupt a write."""
    task = asyncio.ensure_future(coroutine)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
        except Exception:  # the coroutine's own error, raised below
            break
    task.result()
    if cancelled is not None:
        raise cancelled


def check_test(app: App) -> None:
    """Raise an error for test data that the model cannot be evaluated on. An app without test data passes.

    Raises:
        AppError: Names the data that are missing or do not fit.
    """
    if (has_data(app, "test") or getattr(app, "y_test", None) is not None) and (wrong := wrong_with_test(app)):
        raise AppError(
            f"{wrong}: it cannot be evaluated",
            hint="let load_dataset make x_test and y_test like x_train and y_train",
        )


def wrong_with_test(app: App) -> str:
    """Return the reason why the model cannot be evaluated on the app's test data; empty if none is known."""
    try:
        if data_set_of(app, "test") is not None:
            check_part(app, "test")
    except DDLFError as error:
        return error.message
    if not has_data(app, "test"):
        return "there is no x_test"
    arrays = {f"{kind}_{part}": _shapes(app, kind, part) for part in ("train", "test") for kind in ("x", "y")}
    present = [name for name, shapes in arrays.items() if shapes]
    arrays = {name: arrays[name] for name in present}
    for kind in ("x", "y"):
        if f"{kind}_test" not in present and (kind == "x" or "y_train" in present):
            return f"there is no {kind}_test"
    lengths = {name: {shape[0] if shape else 0 for shape in arrays[name]} for name in present if "test" in name}
    if len(set.union(*lengths.values())) > 1:
        return " and ".join(f"{name} has {_sizes_text(sizes)} rows" for name, sizes in lengths.items())
    if lengths["x_test"] == {0}:
        return "x_test has no rows"
    for kind in ("x", "y"):
        train, test = arrays.get(f"{kind}_train"), arrays.get(f"{kind}_test")
        if train and test and len(train) != len(test):
            return f"{kind}_test is of {len(test)} arrays, {kind}_train of {len(train)}"
    inputs: Any = getattr(getattr(app, "model", None), "inputs", None) or ()
    input_shape = tuple(inputs[0].shape[1:]) if len(inputs) == 1 else ()
    sample_shape = next(iter(arrays["x_test"]))[1:]
    if len(input_shape) == len(sample_shape) and any(
        a not in (None, b) for a, b in zip(input_shape, sample_shape, strict=True)
    ):
        return f"samples of x_test are of shape {sample_shape}, the model's input is of {input_shape}"
    return ""


def _shapes(app: App, kind: str, part: str) -> list[tuple[int, ...]]:
    """Return the shape of each array of inputs (``"x"``) or labels (``"y"``); empty if there are none."""
    if (data_set := data_set_of(app, part)) is not None:
        columns, samples = data_set.columns, data_set.manifest.samples
        return [
            (samples, *columns[name].shape) for _, name in leaves(grown({name: name for name in columns}, kind)) if name
        ]
    if getattr(app, f"{kind}_{part}", None) is None:
        return []
    import keras

    return [tuple(np.shape(array)) for array in keras.tree.flatten(getattr(app, f"{kind}_{part}"))]


def _sizes_text(sizes: set[int]) -> str:
    return " or ".join(str(size) for size in sorted(sizes))
