"""Checks from shapes whether a model can be evaluated on the app's test data, before hours of training."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddlf.data.parts import check_part, has, place_of
from ddlf.data.trees import grown, leaves
from ddlf.errors import AppError, DDLFError
from ddlf.training.context import App


def check_test(app: App) -> None:
    """Refuse test data that cannot be evaluated. An app without test data passes.

    Raises:
        AppError: Names the data that are missing or do not fit.
    """
    if (has(app, "test") or getattr(app, "y_test", None) is not None) and (wrong := wrong_with_test(app)):
        raise AppError(
            f"{wrong}: it cannot be evaluated",
            hint="let load_dataset make x_test and y_test as it makes those of training",
        )


def wrong_with_test(app: App) -> str:
    """Return why the model cannot be evaluated on the app's test data; empty if no reason is known."""
    try:
        if place_of(app, "test") is not None:
            check_part(app, "test")
    except DDLFError as error:
        return error.message
    if not has(app, "test"):
        return "there is no x_test"
    arrays = {f"{kind}_{part}": _shapes(app, kind, part) for part in ("train", "test") for kind in ("x", "y")}
    present = [name for name, shapes in arrays.items() if shapes]
    arrays = {name: arrays[name] for name in present}
    for kind in ("x", "y"):
        if f"{kind}_test" not in present and (kind == "x" or "y_train" in present):
            return f"there is no {kind}_test"
    lengths = {name: {shape[0] if shape else 0 for shape in arrays[name]} for name in present if "test" in name}
    if len(set.union(*lengths.values())) > 1:
        return " and ".join(f"{name} has {_either(sizes)} rows" for name, sizes in lengths.items())
    for kind in ("x", "y"):
        train, test = arrays.get(f"{kind}_train"), arrays.get(f"{kind}_test")
        if train and test and len(train) != len(test):
            return f"{kind}_test is of {len(test)} arrays, {kind}_train of {len(train)}"
    inputs: Any = getattr(getattr(app, "model", None), "inputs", None) or ()
    wanted = tuple(inputs[0].shape[1:]) if len(inputs) == 1 else ()
    found = next(iter(arrays["x_test"]))[1:]
    if len(wanted) == len(found) and any(a not in (None, b) for a, b in zip(wanted, found, strict=True)):
        return f"samples of x_test are of shape {found}, the model's input is of {wanted}"
    return ""


def _shapes(app: App, kind: str, part: str) -> list[tuple[int, ...]]:
    """Return the shape of each array of inputs (``"x"``) or labels (``"y"``); empty if there are none."""
    if (place := place_of(app, part)) is not None:
        columns, samples = place.columns, place.manifest.samples
        return [
            (samples, *columns[name].shape) for _, name in leaves(grown({name: name for name in columns}, kind)) if name
        ]
    if getattr(app, f"{kind}_{part}", None) is None:
        return []
    import keras

    return [tuple(np.shape(array)) for array in keras.tree.flatten(getattr(app, f"{kind}_{part}"))]


def _either(sizes: set[int]) -> str:
    return " or ".join(str(size) for size in sorted(sizes))
