"""Finds and checks an app's data in its attributes, such as ``x_train``, and returns it as arguments for Keras's
``fit``.

Runs on the master and on workers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from math import isfinite
from numbers import Real
from typing import Any

import numpy as np

from ddlf.data.app import UserApp
from ddlf.data.data_set import DataSet
from ddlf.data.datasets import fingerprint
from ddlf.data.generators import as_data_set
from ddlf.data.trees import first_array, grown, leaves
from ddlf.errors import AppError, DatasetError

ONE_BY_ONE = "set the iterable of batches as self.train_data, instead of x_train and y_train"
"""Hint for a PyDataset or another iterable in ``x_train``."""
PARTS = ("train", "val", "test")
NAMES = tuple(f"{letter}_{part}" for part in PARTS for letter in "xyw")
"""Attributes of an app with arrays: inputs, labels and sample weights of each part."""
DATA_SETS = tuple(f"{part}_data" for part in PARTS)
"""Attributes of an app with data sets of partition files. Their columns ``x``, ``y``, ``w`` are inputs, labels and
sample weights."""

MEANT = {
    **dict.fromkeys(("sample_weight", "sample_weights", "weights_train", "train_weights", "sw_train"), "w_train"),
    **dict.fromkeys(("class_weights", "classes_weight", "classes_weights"), "class_weight"),
    **dict.fromkeys(("x_valid", "x_validation", "x_dev", "X_val", "X_valid", "val_x"), "x_val"),
    **dict.fromkeys(("y_valid", "y_validation", "y_dev", "Y_val", "val_y"), "y_val"),
    **dict.fromkeys(("validation_data", "validation_split"), "x_val and y_val"),
    **dict.fromkeys(("w_valid", "w_validation"), "w_val"),
    **dict.fromkeys(("X_train", "train_x"), "x_train"),
    **dict.fromkeys(("Y_train", "train_y"), "y_train"),
    **dict.fromkeys(("X_test", "test_x"), "x_test"),
    **dict.fromkeys(("Y_test", "test_y"), "y_test"),
}
"""Attribute names from other libraries and frequent misspellings, with the name that DDLF reads."""


def has_data(app: UserApp, part: str) -> bool:
    """Return whether the app has data of a part: ``"train"``, ``"val"`` or ``"test"``."""
    return getattr(app, f"x_{part}", None) is not None or data_set_of(app, part) is not None


def data_set_of(app: UserApp, part: str) -> DataSet | None:
    """Return the data set in files that the app uses for a part, such as ``"train"``; None if the part is arrays, or
    missing.
    """
    data: DataSet | None = getattr(app, f"{part}_data", None)
    return data


def samples_of(app: UserApp, part: str) -> int:
    """Return the number of samples in a part of the app's data, such as ``"train"``."""
    data_set = data_set_of(app, part)
    return len(first_array(getattr(app, f"x_{part}"))) if data_set is None else data_set.manifest.samples


def batches(app: UserApp, part: str) -> tuple[Any, ...]:
    """Return a part of the app's arrays as arguments for Keras's ``fit`` or ``evaluate``: ``(x,)``, ``(x, y)`` or ``(x,
    y, sample_weight)``.

    Like in Keras, class weights become weights of the training samples.
    """
    return fit_arguments(app, part, *(getattr(app, f"{letter}_{part}", None) for letter in "xyw"))


def rows(app: UserApp, part: str, columns: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return some rows of a part's partition files as arguments for Keras's ``fit``.

    Args:
        app: The user's ``IApp``.
        part: ``"train"``, ``"val"`` or ``"test"``.
        columns: The rows of each column, by name.
    """
    return fit_arguments(app, part, *(grown(columns, letter) for letter in "xyw"))


def fit_arguments(app: UserApp, part: str, x: Any, y: Any, w: Any) -> tuple[Any, ...]:
    """Return inputs, labels and sample weights as the tuple that Keras's ``fit`` takes, without missing ones."""
    if part == "train" and getattr(app, "class_weight", None) is not None:
        w = class_weights(y, app.class_weight)
    return (x,) if y is None else (x, y) if w is None else (x, y, w)


def class_weights(y: Any, weights: Any) -> np.ndarray[Any, Any]:
    """Return the weight of each sample from the weight of its class. Like in Keras, a class without a weight counts 1.

    Args:
        y: Class numbers of shape ``(n,)`` or ``(n, 1)``, or one-hot rows.
        weights: Weights by class number.
    """
    if not isinstance(weights, Mapping) or not all(
        isinstance(number, int | np.integer) and number >= 0 and isinstance(weight, Real) and isfinite(weight)
        for number, weight in weights.items()
    ):
        raise AppError(
            f"class_weight must map class numbers to finite weights, got {weights!r}",
            hint="for instance {0: 1.0, 1: 5.0}",
        )
    if not isinstance(y, np.ndarray) or y.ndim > 2:
        raise AppError(
            "class_weight needs one label for each sample", hint="give weights of samples in w_train instead"
        )
    classes = _classes(y)
    table = np.ones(int(classes.max(initial=0)) + 1, np.float32)
    for number, weight in weights.items():
        if number < len(table):  # otherwise no sample has this class
            table[number] = weight
    chosen: np.ndarray[Any, Any] = np.where(classes >= 0, table[classes], np.float32(1))
    return chosen


def _classes(y: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the class number of each sample; ``class_weights`` describes the argument."""
    classes = y if y.ndim == 1 else y[:, 0] if y.shape[1] == 1 else y.argmax(axis=1)
    numbers: np.ndarray[Any, Any] = np.round(classes).astype(np.int64)
    return numbers


def check_data(app: UserApp) -> None:
    """Refuse data that training or evaluation cannot use.

    Raises:
        AppError: Data is missing, or arrays do not fit together.
        DatasetError: A value is not an array of numbers.
    """
    if not has_data(app, "train"):
        raise AppError(
            f"load_dataset set no self.x_train{suggestion(app, 'x_train')}",
            hint="set x_train, y_train and, for the test, x_test, y_test",
        )
    for part in (
        "train",
        "val",
        # The test data is not checked here: evaluation.check_test_data checks it separately, so training need not wait
        # for it.
    ):
        check_part(app, part)
    _check_classes(app)
    if getattr(app, "class_weight", None) is not None:
        if (data_set := data_set_of(app, "train")) is not None:
            if "w" in data_set:
                raise AppError("both a column w of train_data and class_weight are set", hint="leave out one of them")
            return
        if getattr(app, "w_train", None) is not None:
            raise AppError("both w_train and class_weight are set", hint="multiply w_train by the weights of classes")
        labels: Any = getattr(app, "y_train", None)
        class_weights(labels, app.class_weight)  # a rare class may be in no sample here: the adviser names it (T11)


def check_part(app: UserApp, part: str) -> None:
    """Refuse data of one part, such as ``"test"``, that cannot be used. ``check_data`` lists the errors."""
    if (data_set := data_set_of(app, part)) is not None:
        _check_data_set(app, part, data_set)
        return
    values = {name: getattr(app, name, None) for name in (f"x_{part}", f"y_{part}", f"w_{part}")}
    x, y, w = values
    arrays = [leaf for name, value in values.items() if value is not None for leaf in leaves(value, name)]
    if not arrays:
        return
    if values[x] is None:
        raise AppError(f"there is {arrays[0][0]}, but no {x}", hint=f"set self.{x}, too{suggestion(app, x)}")
    if values[w] is not None and values[y] is None:
        raise AppError(f"there is {w}, but no {y}", hint="weights of samples need labels")
    if part != "train" and values[y] is None and getattr(app, "y_train", None) is not None:
        raise AppError(f"there is {x}, but no {y}", hint=f"set self.{y}, too{suggestion(app, y)}")
    for name, array in arrays:
        _check_array(name, array)
    first, samples = arrays[0][0], len(arrays[0][1])
    for name, array in arrays:
        if len(array) != samples:
            raise AppError(
                f"{first} has {samples} rows, {name} {len(array)}", hint="give every sample one row in each array"
            )
    if not samples:
        raise DatasetError(f"{first} has no rows", hint="check how load_dataset finds its files")


def _check_classes(app: UserApp) -> None:
    """Refuse test or validation data in which a label number means another class than in the training data, because
    evaluation would be meaningless.
    """
    train = data_set_of(app, "train")
    for part in ("val", "test"):
        held_out = data_set_of(app, part)
        named = [getattr(data_set, "manifest", None) for data_set in (train, held_out)]
        pairs = zip(*(manifest.classes if manifest else () for manifest in named), strict=False)
        for number, (expected, name) in enumerate(pairs):
            if expected != name:
                raise AppError(
                    f"the label {number} is {expected!r} in train_data ({train}), but {name!r} in {part}_data ({held_out})",
                    hint="split both from sources that have samples of the same classes",
                )


def _check_data_set(app: UserApp, part: str, data_set: Any) -> None:
    name = f"{part}_data"
    if not isinstance(data_set, DataSet):
        raise AppError(
            f"{name} must be a data set of partition files, a PyDataset or a tf.data pipeline, got a {type(data_set).__name__}",
            hint=f"write self.{name} = ddlf.data.open(place) in load_dataset; arrays are self.x_{part}, self.y_{part}",
        )
    if arrays := [
        attribute for attribute in NAMES if attribute.endswith(f"_{part}") and getattr(app, attribute, None) is not None
    ]:
        raise AppError(f"both {name} and {' and '.join(arrays)} are set", hint="set one of them")
    try:
        x, y, w = (grown({column: column for column in data_set}, letter) for letter in "xyw")
    except ValueError as error:
        raise AppError(f"{name}: {error}", hint="columns of a tree are named as x['left'] or x[0], from 0") from None
    if x is None:
        raise AppError(
            f"{data_set} has the columns {', '.join(data_set)}, but no x",
            hint="name the input column: ddlf data split --columns x=NAME",
        )
    if w is not None and y is None:
        raise AppError(f"{data_set} has a column w, but no y", hint="weights of samples need labels")


def is_given_one_by_one(data: Any) -> bool:
    """Return whether an object yields batches, like a PyDataset, a generator or a pipeline, and is not an array."""
    return not (hasattr(data, "__array__") or hasattr(data, "shape")) and (
        hasattr(data, "__getitem__") or hasattr(data, "__iter__")
    )


def _check_array(name: str, array: Any) -> None:
    if not isinstance(array, np.ndarray):
        raise DatasetError(
            f"{name} must be a NumPy array, or a list, tuple or dict of them, got a {type(array).__name__}",
            hint=ONE_BY_ONE
            if is_given_one_by_one(array)
            else "convert it in load_dataset, for instance with numpy.asarray",
        )
    if isinstance(array, np.ma.MaskedArray):
        raise DatasetError(
            f"{name} is a masked array, whose mask Keras does not see",
            hint="fill it with .filled(...), and give the rows that do not count the weight 0 in w_train",
        )
    if array.dtype.hasobject or array.dtype.names or array.dtype.kind in "OUSMm":
        content = {"O": "Python objects", "U": "text", "S": "bytes", "M": "dates", "m": "times"}.get(
            array.dtype.kind, ""
        )
        raise DatasetError(
            f"{name} holds {content or 'records'} ({array.dtype}), not numbers",
            hint="convert it to numbers in load_dataset, for instance labels with numpy.unique(y, return_inverse=True)[1]",
        )
    if not array.ndim:
        raise DatasetError(f"{name} is a single number, not an array", hint="give it one row for each sample")


def suggestion(app: UserApp, name: str) -> str:
    """Return the question whether the user meant this attribute by a similar one; empty if the app has no similar one."""
    similar = next((attribute for attribute, right in MEANT.items() if right == name and hasattr(app, attribute)), None)
    return f"; you set self.{similar}: did you mean self.{name}?" if similar else ""


def take_made(app: UserApp) -> None:
    """Convert the data sets of Keras and TensorFlow that ``load_dataset`` has set to data sets of DDLF.

    Raises:
        DatasetError: A data set cannot be used.
    """
    for name in DATA_SETS:
        if getattr(app, name, None) is not None and (converted := as_data_set(name, getattr(app, name))) is not None:
            setattr(app, name, converted)


def has_own_train(app: UserApp) -> bool:
    """Return whether the user has written ``train``, which then decides how to train."""
    return any("train" in vars(kind) for kind in type(app).__mro__ if kind.__module__ != "ddlf.app")


def look_alikes(app: UserApp) -> list[str]:
    """Return a sentence for each attribute or column that has no effect, but whose name is close to an effective one,
    such as ``x_trian``.

    An app with its own ``train`` may use any attribute, so it gets none.
    """
    if has_own_train(app):
        return []
    unused = [
        f"nothing reads the column {column} of {name}: x, y and w are read"
        for name in DATA_SETS
        if (data_set := getattr(app, name, None)) is not None
        for column in data_set
        if column[0] not in "xyw" or column[1:2] not in ("", "[")
    ]
    return unused + [
        f"self.{attribute} has no effect by that name; did you mean {' and '.join('self.' + n for n in right.split(' and '))}?"
        for attribute, right in MEANT.items()
        if attribute in vars(app) or hasattr(type(app), attribute)
    ]


def contents(app: UserApp) -> dict[str, str]:
    """Return the fingerprint (a hash of the content) of each attribute of the app with data. Test data that cannot have
    one is left out.
    """
    fingerprints = {
        name: data_set.manifest.identity for name in DATA_SETS if (data_set := getattr(app, name, None)) is not None
    }
    for name in NAMES:
        if getattr(app, name, None) is not None:
            try:
                fingerprints[name] = fingerprint(getattr(app, name))
            except DatasetError:
                if not name.endswith("_test"):
                    raise
    return fingerprints


def content_of(app: UserApp, part: str) -> dict[str, str]:
    """Return the fingerprint (a hash of the content) of each attribute with data of a part. Return an empty dict if one
    of them cannot have one.
    """
    names = [name for name in NAMES if name.endswith(f"_{part}") and getattr(app, name, None) is not None]
    try:
        return {name: fingerprint(getattr(app, name)) for name in names}
    except DatasetError:
        return {}


def content(fingerprints: dict[str, str]) -> str:
    """Return a hash of the training data, 16 hex digits, which all nodes must share.

    Args:
        fingerprints: The result of ``contents``.
    """
    rows = [
        f"{name} {fingerprints[name]}"
        for name in ("x_train", "y_train", "w_train", "train_data")
        if name in fingerprints
    ]
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()[:16]


def rows_of(app: UserApp) -> dict[str, Any]:
    """Return the number of training samples, and the shape and type of the first input array."""
    if (data_set := data_set_of(app, "train")) is not None:
        name = next(column for column in data_set if column == "x" or column.startswith("x["))
        column = data_set.columns[name]
        return {
            "samples": data_set.manifest.samples,
            "shape": [data_set.manifest.samples, *column.shape],
            "dtype": column.dtype,
        }
    x = first_array(app.x_train)
    return {"samples": len(x), "shape": list(x.shape), "dtype": str(x.dtype)}
