"""The user's app on a worker: its data, and checked calls of its methods.

Runs in the executor, on the thread of Keras.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from ddlf.algorithms.weights import Weights, is_float
from ddlf.data.array_cache import ArrayCache, unchanging
from ddlf.data.parts import NAMES, check_data, content, contents, place_of, rows_of, take_made
from ddlf.data.trees import tree_map
from ddlf.errors import AppError
from ddlf.rpc.iworker import awaited
from ddlf.training.context import App
from ddlf.training.roles.metrics import scalars


def call(function: Any, *args: Any) -> Any:
    """Call a method of the user's app, plain or async, on this thread, and return its result.

    Raises:
        AppError: The method called ``sys.exit``.
    """
    with no_exit(getattr(function, "__name__", type(function).__name__)):  # any callable can be set in its place
        result = function(*args)
        return asyncio.run(awaited(result)) if inspect.isawaitable(result) else result


@contextlib.contextmanager
def no_exit(method: str) -> Iterator[None]:
    """Turn ``sys.exit`` in a method of the user's app into an error: it would end a run or a worker silently."""
    try:
        yield
    except SystemExit as error:
        raise AppError(
            f"{method} called sys.exit({'' if error.code is None else repr(error.code)})",
            hint="raise an error that says what is wrong; to end training, use self.stop_training()",
        ) from None


def run_train(app: App, weights: Weights, epochs: int, batch_size: int) -> tuple[Weights, dict[str, float]]:
    """Call the app's ``train``, and check its result.

    Returns:
        The update and the metrics.

    Raises:
        AppError: The result has the wrong type or shape.
    """
    outcome = call(app.train, weights, epochs, batch_size)
    with_metrics = isinstance(outcome, tuple) and len(outcome) == 2 and not isinstance(outcome[1], np.ndarray)
    update, metrics = outcome if with_metrics else (outcome, {})
    try:
        if not isinstance(update, list | tuple):
            raise TypeError
        arrays = [np.asarray(array) for array in update]
    except (TypeError, ValueError):
        raise AppError(
            f"train returned a {type(outcome).__name__}" + (f" with a {type(update).__name__} first" * with_metrics),
            hint="return the update, weights before minus weights after, as a list of arrays; or (update, metrics)",
        ) from None
    told = scalars(metrics)
    for place, weight in enumerate(weights if len(arrays) == len(weights) else ()):
        if arrays[place].shape != weight.shape:
            raise AppError(
                f"{type(app).__name__}.train returned an array of shape {arrays[place].shape} for weight {place + 1} of shape {weight.shape}",
                hint="return weights before minus weights after, in the order of model.weights",
            )
    if len(arrays) != len(weights):
        raise AppError(
            f"{type(app).__name__}.train returned {len(arrays)} arrays for {len(weights)} weights",
            hint="return weights before minus weights after, one array for each of model.weights",
        )
    # NumPy computes much in float64. The update has the type of the weight, which could not hold more anyway.
    pairs = zip(arrays, weights, strict=True)
    return [a.astype(w.dtype) if is_float(a) and is_float(w) else a for a, w in pairs], told


def chosen(indices: Any, samples: int) -> np.ndarray[Any, Any]:
    """Return the indices that the user's ``train`` has set as ``self.indices``, after a check.

    Args:
        indices: The value of ``self.indices``.
        samples: The number of samples in the data set.

    Returns:
        Indices of samples, shape (m,), of an integer type.

    Raises:
        AppError: It is not a list of valid sample indices.
    """
    found = np.asarray(indices)
    if found.ndim != 1 or found.dtype.kind not in "iu" or not found.size:
        raise AppError(
            f"self.indices must be numbers of samples, got {found.dtype} of shape {found.shape}",
            hint="choose from the indices that are there when train is called",
        )
    if found.min() < 0 or found.max() >= samples:
        outside = found.max() if found.max() >= samples else found.min()
        raise AppError(
            f"self.indices has sample {outside}, but there are {samples:,} samples, counted from 0",
            hint="choose from the indices that are there when train is called",
        )
    return found


def load_data(app: App, wanted: dict[str, str], held: ArrayCache) -> tuple[dict[str, str], dict[str, Any]]:
    """Load the app's data with its ``load_dataset``. Equal arrays of several runs are kept once.

    Args:
        app: The app as the master sent it.
        wanted: The fingerprint of each array, if ``load_dataset`` sets only arrays. If the worker holds all of them,
            ``load_dataset`` is not called.
        held: The arrays that the worker holds; receives new ones.

    Returns:
        The fingerprint of each array and of each data set at a place; and facts about the training data, including
        whether it was loaded.
    """
    begin = time.perf_counter()
    found = wanted
    here = bool(wanted) and all(content in held for content in wanted.values())
    if not here:
        held.make_room()
        call(app.load_dataset)
        take_made(app)
        check_data(app)
        found = contents(app)
    arrays = {name: one for name, one in found.items() if name in NAMES}
    for name, one in arrays.items():
        if one not in held:
            held[one] = tree_map(unchanging, getattr(app, name))
        setattr(app, name, held[one])
    held.use(arrays.values())
    return found, {
        "fingerprint": content(found),
        **rows_of(app),
        "here": _files_here(app),
        "loaded": not here,
        "seconds": time.perf_counter() - begin,
    }


def _files_here(app: App) -> bytes | None:
    """Return one bit for each file of the training data: whether it is on a local disk. None if all are."""
    place = place_of(app, "train")
    found = () if place is None else place.here()
    return None if all(found) else np.packbits(np.array(found, np.bool_)).tobytes()
