"""Loads data for the model of a model text, and converts arrays to the inputs and labels that the text describes.

Runs on the master and on workers. Does not import Keras.
"""

from __future__ import annotations

import difflib
import hashlib
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from ddlf.data import datasets
from ddlf.data.trees import first_array, leaves, tree_map
from ddlf.errors import ConfigError, DatasetError, NotationError
from ddlf.extras.text.language.graph import Shape, inputs_of
from ddlf.extras.text.language.model import Model
from ddlf.extras.text.language.operators import INTEGERS
from ddlf.extras.text.language.problems import Problems
from ddlf.extras.text.training.block import SETS

MAX_SHIPPED_BYTES = 64 * 2**20
"""Maximum size of a file to send to workers. A larger file must be at the same path on each machine."""
PARTS = ("train", "val", "test")
TEST_EVERY = 5
"""If the data has no parts, every fifth sample is for the test, like in the data set of digits."""
ROW_LOSSES = ("CCE", "CCEL", "KLD", "MSE", "MAE", "HUL", "HIL", "FOL")
"""Losses that compare an output of several values with a row of equal length."""
ROW_FOR_EACH = "give each array a row for each sample"
CHANGE_SHAPE = "change the text's shape=, or the array"

Array = np.ndarray[Any, Any]


class DataSource:
    """A built-in data set, or an ``.npz`` file. Workers receive the content of a small file.

    Args:
        name: One of ``SETS``, or the path of a ``.npz`` file.
        origin: The option or statement that names it, for errors.

    Raises:
        ConfigError: The name is neither a data set nor such a file.
    """

    def __init__(self, name: str, origin: str = "--data") -> None:
        self.name = name
        self.content: bytes | None = None
        self.digest = ""
        if name in SETS:
            return
        path = Path(name)
        if not path.is_file():
            matches = difflib.get_close_matches(name, [*SETS, *(file.name for file in path.parent.glob("*.npz"))], 1)
            problem = "is a folder" if path.is_dir() else "is neither a file nor a data set"
            hint = (
                f"did you mean {matches[0]!r}?"
                if matches
                else f"there are {', '.join(SETS)}, or a file that ends in .npz"
            )
            raise ConfigError(f"{origin} {name}: {problem}", hint=hint)
        if path.suffix != ".npz":
            raise ConfigError(f"{origin} {name}: a file with arrays ends in .npz", hint="numpy.savez writes one")
        self.name = str(path.resolve())

    def __getstate__(self) -> dict[str, Any]:
        content = self.content
        if content is None and self.name not in SETS:
            content = self._read() if Path(self.name).stat().st_size <= MAX_SHIPPED_BYTES else None
        digest = self.digest or (_digest(self.name) if content is None and self.name not in SETS else "")
        return {"name": self.name, "content": content, "digest": digest}

    def arrays(self) -> dict[str, Array]:
        """Load the data set, and return all its arrays by name.

        Raises:
            DatasetError: The file cannot be read.
        """
        if self.name in SETS:
            (x_train, y_train), (x_test, y_test) = datasets.with_classes(self.name)
            return {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test}
        if self.content is None and self.digest and _digest(self.name) != self.digest:
            raise DatasetError(
                f"{self.name} is another file here than on the master, and too large to be sent along",
                hint="copy it to the same place on each machine, or divide it with ddlf data split",
            )
        content = self.content if self.content is not None else self._read()
        try:
            with np.load(BytesIO(content), allow_pickle=False) as archive:
                return {name: archive[name] for name in archive.files}
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, AttributeError) as error:
            hint, reason = "write it again with numpy.savez", str(error)
            if "Object arrays" in reason:
                hint = "numpy.savez writes numbers and texts; turn objects into these"
            elif "pickled" in reason or isinstance(error, AttributeError):  # numpy's words for any other file
                reason = "it is no .npz file, or it is cut off"
            raise DatasetError(f"{self.name} cannot be read ({reason})", hint=hint) from None

    def _read(self) -> bytes:
        try:
            return Path(self.name).read_bytes()
        except OSError as error:
            raise DatasetError(
                f"{self.name} cannot be read here ({error.strerror})",
                hint="a file of more than 64 MiB is not sent along: copy it to the same place on each machine",
            ) from None


def _digest(name: str) -> str:
    try:
        with open(name, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return "none"


# -- arrays of a file ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Endpoint:
    """An input or an output of a model text. It takes an array of the data.

    Attributes:
        name: The name of its array.
        shape: The shape of a sample.
        dtype: The type of its values.
        at: The file and line of its statement.
        loss: The loss of an output; empty if the text has none.
        classes: The number of classes of an output; 0 if it has one value.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    at: str
    loss: str = ""
    classes: int = 0


def dataset(
    arrays: dict[str, Array], source: str, model: Model, loss: str = "", validation: float = 0.0
) -> tuple[dict[str, Any], list[str]]:
    """Turn the arrays of a file into the data of an app.

    Args:
        arrays: By name: ``x``, ``y`` or one for each block, alone or with ``_train``, ``_val`` and ``_test``; or ``data``, with ``target`` or
            with the labels as its last columns.
        source: The file, for errors.
        model: The model text.
        loss: The loss of outputs without their own.
        validation: The fraction of training samples to hold out.

    Returns:
        The attributes of an ``IApp``, such as ``x_train``; and a sentence for each conversion that is not obvious.

    Raises:
        DatasetError: An array is missing, or has another shape or type.
    """
    graph = model.graph

    def endpoint(name: str, shape: Shape | None, dtype: str, at: int, loss: str = "", *, output: bool) -> Endpoint:
        sizes = tuple(int(size or 0) for size in shape or ())
        line = f"{model.file}:{model.text.count(chr(10), 0, at) + 1}"
        return Endpoint(name, sizes, dtype, line, loss, sizes[-1] if output and sizes and sizes[-1] > 1 else 0)

    inputs = [endpoint(node.name, node.shape, node.dtype, node.at, output=False) for node in inputs_of(graph)]
    outputs = []
    for head in graph.heads:
        node = graph.nodes[head.node]
        shape = head.declared_shape or node.shape
        outputs.append(endpoint(head.name, shape, node.dtype, head.at, head.loss or loss, output=True))
    return _DataFitter(arrays, Path(source).name, inputs, outputs).fit(validation)


class _DataFitter:
    def __init__(self, arrays: dict[str, Array], source: str, inputs: list[Endpoint], outputs: list[Endpoint]) -> None:
        self.arrays, self.source, self.inputs, self.outputs = dict(arrays), source, inputs, outputs
        names = {output.name for output in outputs}
        # Blocks with an input and an output.
        self.ambiguous_names = [endpoint.name for endpoint in inputs if endpoint.name in names]
        self.used: set[str] = set()
        self.notes: list[str] = []
        self.classes: dict[str, list[str]] = {}

    def fit(self, validation: float) -> tuple[dict[str, Any], list[str]]:
        self._split_table()
        data: dict[str, Any] = {}
        for part in (*PARTS, ""):
            x = self._side("x", part, self.inputs)
            if x is None:
                continue
            y = self._side("y", part, self.outputs)
            data[f"x_{part}"], data[f"y_{part}"] = x, self._inputs_as_labels(x, part) if y is None else y
            if (weights := self._array("w", part)) is not None:
                data[f"w_{part}"] = weights
            self._check_lengths(part, data)
        if "x_train" in data and "x_" in data:
            raise self._error("has x and x_train, which is twice the training data", "leave out one of them")
        if "x_" in data:
            self._divide(data)
        if "x_train" not in data:
            raise self._missing_inputs()
        if validation:
            if "x_val" in data:
                problem = "has x_val, and train:validation would hold out some of x_train as well"
                raise self._error(problem, "leave out one of both")
            every = max(round(1 / validation), 2)
            _hold_out(data, "train", "val", every)
            self.notes.append(f"1 of {every} samples of training is for validation")
        if unused := sorted(set(self.arrays) - self.used):
            self.notes.append(f"nothing reads {', '.join(unused)} of {self.source}")
        return data, self.notes

    # -- which arrays -------------------------------------------------------------------------------------------------

    def _split_table(self) -> None:
        """Take ``data`` and ``target`` as x and y, or the last columns of ``data`` as y."""
        if "data" not in self.arrays or {"x", "x_train"} & set(self.arrays):
            return
        table = self.arrays.pop("data")
        if "target" in self.arrays:
            self.arrays |= {"x": table, "y": self.arrays.pop("target")}
            return
        if table.ndim != 2 or len(self.inputs) != 1 or len(self.outputs) != 1:
            self.arrays["x"] = table
            return
        features, outputs = int(np.prod(self.inputs[0].shape)), int(np.prod(self.outputs[0].shape))
        labels = table.shape[1] - features
        if labels == 0 and _same_sizes(self.inputs[0].shape, self.outputs[0].shape):
            self.arrays["x"] = table
        elif labels in (1, outputs):
            self.arrays |= {"x": table[:, :features], "y": table[:, features:]}
            several = "s" * (labels != 1)
            self.notes.append(f"the last column{several} of data {'are' if several else 'is'} the labels")
        else:
            raise self._error(
                f"has a table data of {table.shape[1]} columns, and {self.inputs[0].at} wants {features} of them as "
                f"inputs and the last 1 or {outputs} as labels",
                "save inputs and labels apart, as x and y",
            )

    def _array(self, letter: str, part: str) -> Array | None:
        name = f"{letter}_{part}" if part else letter
        if name in self.arrays:
            self.used.add(name)
        return self.arrays.get(name)

    def _side(self, letter: str, part: str, endpoints: list[Endpoint]) -> Any:
        """Return the inputs or labels of a part of the data, such as the test, in the structure that Keras takes; None
        without them.
        """
        suffix = f"_{part}" if part else ""
        if len(endpoints) == 1 and (array := self._array(letter, part)) is not None:
            return self._fit(letter, f"{letter}{suffix}", array, endpoints[0])
        names = [f"{end.name}{suffix}" for end in endpoints]
        opposite = self.outputs if letter == "x" else self.inputs
        # If a block has an input and an output, its array belongs to the side without another array.
        clear = not self.ambiguous_names or (len(endpoints) > 1 and len(opposite) == 1)
        present = [name for name in names if name in self.arrays]
        if not clear or not present:
            return None
        if missing := [name for name in names if name not in self.arrays]:
            raise self._error(
                f"has no {' and no '.join(missing)}, beside {present[0]}",
                f"save an array for each of {', '.join(names)}",
            )
        self.used.update(names)
        fitted = {
            end.name: self._fit(letter, name, self.arrays[name], end)
            for name, end in zip(names, endpoints, strict=True)
        }
        return fitted if len(endpoints) > 1 else fitted[endpoints[0].name]

    def _inputs_as_labels(self, x: Any, part: str) -> Any:
        """Return the inputs as labels, for an autoencoder, whose outputs must equal its inputs."""
        if len(self.inputs) == len(self.outputs) == 1 and _same_sizes(self.inputs[0].shape, self.outputs[0].shape):
            if part in ("train", ""):
                self.notes.append(
                    "there are no labels, and the output has the shape of the input: the inputs are the labels"
                )
            return x.reshape(len(x), *self.outputs[0].shape)
        name = f"y_{part}" if part else "y"
        outputs = ", ".join(output.name for output in self.outputs)
        raise self._error(f"has no {name}{self._suggestion(name)}", f"{self.outputs[0].at} wants labels for {outputs}")

    def _missing_inputs(self) -> DatasetError:
        names = [input.name for input in self.inputs]
        if len(names) > 1 and len(self.outputs) > 1 and self.ambiguous_names:
            return self._error(
                f"cannot say which array is meant: {self.ambiguous_names[0]!r} is the name of an input and of an output",
                f"give the output its own name, such as {self.ambiguous_names[0]}:name score;",
            )
        expected = "x or x_train" if len(names) == 1 else f"arrays {', '.join(f'{name}_train' for name in names)}"
        hint = "save x and y, or x_train, y_train, x_test and y_test"
        if len(names) > 1:
            hint = "save an array for each input by the name of its block"
        present = ", ".join(sorted(self.arrays)[:12]) or "nothing"
        return self._error(f"has no {expected}{self._suggestion('x_train')}; it has {present}", hint)

    def _suggestion(self, name: str) -> str:
        """Return the end of an error's sentence that suggests a similar array name, unless that array has another
        meaning.
        """
        meanings = ("x", "y", "w", *(end.name for end in (*self.inputs, *self.outputs)))
        folded = {array.lower(): array for array in self.arrays if array.rpartition("_")[0] not in meanings}
        matches = difflib.get_close_matches(name.lower(), folded, 1, 0.7)
        return f", did you mean {name} by {folded[matches[0]]!r}?" if matches else ""

    # -- shapes and types ---------------------------------------------------------------------------------------------

    def _fit(self, letter: str, name: str, array: Array, end: Endpoint) -> Array:
        if array.ndim == 0:
            raise self._error(f"has {name} as a single number, and it needs a row for each sample")
        if not len(array):
            raise self._error(f"has no samples in {name}")
        if letter == "y" and array.dtype.kind in "US":
            array = self._class_numbers(name, array, end)
        if array.dtype.kind not in "fiub":
            raise self._error(
                f"has {name} of type {array.dtype}, and {end.at} wants numbers",
                "turn it into numbers before it is saved",
            )
        return self._fit_input(name, array, end) if letter == "x" else self._fit_labels(name, array, end)

    def _fit_input(self, name: str, array: Array, end: Endpoint) -> Array:
        if end.dtype in INTEGERS and array.dtype.kind == "f" and (fractions := array[array != np.trunc(array)]).size:
            raise self._error(
                f"has {name} with values such as {fractions[0]:g}, and {end.at} wants whole numbers ({end.dtype})"
            )
        if _same_sizes(array.shape[1:], end.shape):
            return array.reshape(len(array), *end.shape)
        raise self._error(
            f"has {name} with samples of shape {list(array.shape[1:])}, and {end.at} wants {end.name}: {list(end.shape)}",
            "axes are in another order: numpy.moveaxis(x, 1, -1) puts channels last"
            if sorted(array.shape[1:]) == sorted(end.shape)
            else CHANGE_SHAPE,
        )

    def _fit_labels(self, name: str, array: Array, end: Endpoint) -> Array:
        shape = array.shape[1:]
        if end.classes and shape in (end.shape[:-1], (*end.shape[:-1], 1)):
            array = array.reshape(len(array), *end.shape[:-1])
            low, high = array.min(), array.max()
            if not np.array_equal(array, np.trunc(array)) or low < 0 or high >= end.classes:
                from_one = low == 1 and high == end.classes
                raise self._error(
                    f"has labels from {low:g} to {high:g} in {name}, and {end.at} has {end.classes} classes for {end.name}: "
                    f"whole numbers from 0 to {end.classes - 1}",
                    "labels that begin with 1 lack a '- 1'"
                    if from_one
                    else "numpy.unique(y, return_inverse=True)[1] numbers classes",
                )
            if end.loss in ROW_LOSSES:
                return np.eye(end.classes, dtype=np.float32)[array.astype(np.int64)]
            return array.astype(np.int32)
        if shape == end.shape:
            if end.loss != "SCE":
                return array
            if not (np.all((array == 0) | (array == 1)) and np.all(array.sum(axis=-1) == 1)):
                problem = f"has rows in {name} that are not classes, and {end.at} has the loss SCE"
                raise self._error(problem, "write CCE or KLD for rows")
            classes: Array = array.argmax(axis=-1).astype(np.int32)
            return classes
        if _same_sizes(shape, end.shape):
            return array.reshape(len(array), *end.shape)
        expected = f"{list(end.shape)}"
        if end.shape[-1:] > (1,):
            expected += f", or class numbers of shape {list(end.shape[:-1])}"
        problem = f"has {name} with labels of shape {list(shape)}, and {end.at} wants {end.name}: {expected}"
        raise self._error(problem, CHANGE_SHAPE)

    def _class_numbers(self, name: str, array: Array, end: Endpoint) -> Array:
        """Number classes that are texts in the order of the alphabet, equally in all parts."""
        if end.name not in self.classes:
            texts = [labels for key, labels in self.arrays.items() if key[:1] == name[:1] and labels.dtype.kind in "US"]
            self.classes[end.name] = classes = sorted({str(text) for labels in texts for text in np.unique(labels)})
            shown = ", ".join(f"{number} {text}" for number, text in enumerate(classes[:10]))
            self.notes.append(f"labels of {end.name} are texts, and become {shown}{', ...' * (len(classes) > 10)}")
        return np.searchsorted(np.array(self.classes[end.name]), array.astype(str))

    # -- parts --------------------------------------------------------------------------------------------------------

    def _check_lengths(self, part: str, data: dict[str, Any]) -> None:
        lengths = {
            name: len(array)
            for key in ("x", "y", "w")
            if (whole := data.get(f"{key}_{part}")) is not None
            for name, array in leaves(whole, f"{key}_{part}".rstrip("_"))
        }
        if len(set(lengths.values())) > 1:
            rows = ", ".join(f"{name} {length:,}" for name, length in lengths.items())
            raise self._error(
                f"has another number of samples in each array: {rows}", "give each sample one row in all of them"
            )

    def _divide(self, data: dict[str, Any]) -> None:
        """Divide data that has no test part into training and test samples."""
        for letter in "xyw":
            if (whole := data.pop(f"{letter}_", None)) is not None:
                data[f"{letter}_train"] = whole
        if "x_test" in data:
            return
        _hold_out(data, "train", "test", TEST_EVERY)
        self.notes.append("every fifth sample is for the test")
        if not len(first_array(data["x_train"])):
            raise self._error("has one sample", "training needs more")

    def _error(self, problem: str, hint: str = "") -> DatasetError:
        return DatasetError(f"{self.source} {problem}", hint=hint)


def _same_sizes(shape: tuple[int, ...], other_shape: tuple[int, ...]) -> bool:
    """Return whether arrays of these two shapes have the same values in another form: they differ only in axes of size
    1, or one shape is the other one flattened.
    """
    is_same = [size for size in shape if size != 1] == [size for size in other_shape if size != 1]
    return is_same or (int(np.prod(shape)) == int(np.prod(other_shape)) and 1 in (len(shape), len(other_shape)))


def _hold_out(data: dict[str, Any], part: str, target: str, every: int) -> None:
    for letter in "xyw":
        if (array := data.get(f"{letter}_{part}")) is not None:
            data[f"{letter}_{part}"], data[f"{letter}_{target}"] = held_out(array, every)


def held_out(data: Any, every: int) -> tuple[Any, Any]:
    """Split the samples in a tree of arrays for validation: return the remaining samples, and every ``every``-th
    sample, which is held out.
    """
    remaining = tree_map(lambda array: array[np.arange(len(array)) % every != 0], data)
    return remaining, tree_map(lambda array: array[::every], data)


# -- arrays of a program ---------------------------------------------------------------------------------------------------


def arrays_by_name(
    data: Any, names: Mapping[str, Any], kind: str, file: str, texts: Collection[str] = ()
) -> dict[str, Any]:
    """Return arrays by the names of inputs or outputs.

    Args:
        data: A dict by these names, an array if there is one name, else a list or tuple in their order.
        names: The names, in the order of the model text.
        kind: ``"input"`` or ``"output"``.
        file: The name of the text, for errors.
        texts: Names of inputs that take text.

    Raises:
        NotationError: A name is unknown or missing.
        DatasetError: A value is not an array of numbers with a row for each sample.
    """
    if isinstance(data, Mapping):
        for name in data:
            if name not in names:
                choices = f"; there {'is' if len(names) == 1 else 'are'} {', '.join(names)}"
                suggestion = Problems("", file).suggestion(str(name), names) or choices
                raise NotationError(f"{file} has no {kind} {name!r}{suggestion}")
        if missing := [name for name in names if name not in data]:
            raise NotationError(f"{file}: no array is given for the {kind} {missing[0]!r}")
    elif len(names) == 1:
        data = dict.fromkeys(names, data)
    elif isinstance(data, list | tuple) and len(data) == len(names):
        data = dict(zip(names, data, strict=True))
    else:
        raise NotationError(f"{file} has {len(names)} {kind}s", hint=f"give a dict by their names: {', '.join(names)}")
    return {name: _as_array(data[name], f"{file}: the {kind} {name!r}", name in texts) for name in names}


def check_rows(inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
    """Refuse arrays without samples, or with different numbers of them.

    Args:
        inputs: Arrays by name.
        outputs: Arrays by name.

    Raises:
        DatasetError: Names the arrays.
    """
    rows = [(f"the input {name!r}", len(array)) for name, array in inputs.items()]
    rows += [(f"the output {name!r}", len(array)) for name, array in outputs.items()]
    first, samples = rows[0]
    if not samples:
        raise DatasetError(f"{first} has no samples", hint=ROW_FOR_EACH)
    for name, count in rows:
        if count != samples:
            raise DatasetError(f"{first} has {samples:,} samples, {name} {count:,}", hint=ROW_FOR_EACH)


def check_shapes(arrays: Mapping[str, Any], shapes: Mapping[str, Shape], file: str) -> None:
    """Refuse inputs whose samples have another shape than the model text says.

    Args:
        arrays: Inputs by name; other names, and values without a shape, are not checked.
        shapes: The shape of a sample by name; None is any size.
        file: The name of the text, for errors.

    Raises:
        DatasetError: Names the input and both shapes.
    """
    for name, array in arrays.items():
        if name not in shapes or not hasattr(array, "shape"):
            continue
        expected, shape = shapes[name], tuple(array.shape)
        # Keras accepts these, too.
        accepted = [expected, (*expected, 1), *([expected[:-1]] if expected[-1:] == (1,) else [])]
        if any(_fits(shape[1:], spelling) for spelling in accepted):
            continue
        hint = "give a row for each sample: of one sample x[None]" if _fits(shape, expected) else CHANGE_SHAPE
        sizes = ", ".join("none" if size is None else str(size) for size in expected)
        raise DatasetError(
            f"{file}: the input {name!r} has samples of shape [{sizes}], and the given ones have {list(shape[1:])}",
            hint=hint,
        )


def _fits(shape: tuple[int, ...], expected: Shape) -> bool:
    return len(shape) == len(expected) and all(b in (None, a) for a, b in zip(shape, expected, strict=True))


def _as_array(data: Any, label: str, text: bool) -> Any:
    """Return data as a NumPy array, converting it if necessary."""
    hint = "give an array with a row for each sample"
    if data is None:
        raise DatasetError(f"{label} is None", hint=hint)
    if not (hasattr(data, "shape") and hasattr(data, "dtype") and hasattr(data, "__len__")):
        try:
            data = np.asarray(data)
        except ValueError:
            raise DatasetError(f"{label} has rows of different lengths", hint=hint) from None
    kinds = "OSTU" if text else "biuf"
    if isinstance(data, np.ndarray) and data.dtype.kind not in kinds and data.dtype.name != "bfloat16":
        raise DatasetError(
            f"{label} is made of {_kind(data)}, not of {'text' if text else 'numbers'}",
            hint="turn it into an array of numbers: names of classes by numpy.unique(y, return_inverse=True)[1]",
        )
    if not len(getattr(data, "shape", ())):
        raise DatasetError(f"{label} is a single number", hint=hint)
    return data


def _kind(data: Array) -> str:
    if data.dtype.kind == "O" and data.size:
        return f"Python objects ({type(data.flat[0]).__name__})"
    kinds = {"U": "text", "S": "bytes", "M": "dates", "m": "times", "c": "complex numbers"}
    return kinds.get(data.dtype.kind, str(data.dtype))
