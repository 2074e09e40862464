"""Arrays brought to what a text wants: names, shapes, types, labels, parts. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ddlf.errors import DatasetError
from ddlf.extras.text.language.model import Model
from ddlf.extras.text.training.found import WHOLE, inputs_of

PARTS = ("train", "val", "test")
TEST_EVERY = 5
"""Of data that is not divided every fifth sample is for the test, as of the digits."""
ROWS_WANTED = ("CCE", "CCEL", "KLD", "MSE", "MAE", "HUL", "HIL")
"""Losses that compare an output of several values with a row of as many."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Wanted:
    """What a text wants of one of its ends.

    Attributes:
        block: Name of the input or output, as arrays have it.
        shape: Sizes of a sample.
        dtype: Its type.
        loss: Of an output, if it is written; else empty.
        classes: How many classes an output can tell apart; 0 if it has one value.
        at: File and line where the text says it.
    """

    block: str
    shape: tuple[int, ...]
    dtype: str
    at: str
    loss: str = ""
    classes: int = 0


def wanted(model: Model, loss: str = "") -> tuple[list[Wanted], list[Wanted]]:
    """What a text wants of inputs, and of labels; ``loss`` is that of outputs that have none of their own."""
    graph = model.graph

    def at(place: int) -> str:
        return f"{model.file}:{model.text.count(chr(10), 0, place) + 1}"

    into = [Wanted(node.name, _sizes(node.shape), node.dtype, at(node.at)) for node in inputs_of(graph)]
    out = []
    for head in graph.heads:
        shape = _sizes(head.wanted or graph.nodes[head.node].shape)
        classes = shape[-1] if shape and shape[-1] > 1 else 0
        dtype = graph.nodes[head.node].dtype
        out.append(Wanted(head.name, shape, dtype, at(head.at), head.loss or loss, classes))
    return into, out


def _sizes(shape: Any) -> tuple[int, ...]:
    return tuple(int(size or 0) for size in shape or ())


def dataset(
    arrays: dict[str, Array], source: str, model: Model, loss: str = "", held_out: float = 0.0
) -> tuple[dict[str, Any], list[str]]:
    """Bring arrays to what a text wants.

    Args:
        arrays: By name: ``x``, ``y`` or one for each block, as a whole or with ``_train``, ``_val``, ``_test``; or ``data``, with ``target`` or the
            labels as its last columns.
        source: Where they are from, for errors.
        model: The text.
        loss: Of outputs without one of their own.
        held_out: Share of the training samples that becomes validation data.

    Returns:
        What an ``IApp`` has as attributes, such as ``x_train``; and what was done that is not obvious, a sentence each.

    Raises:
        DatasetError: Something is missing, or has another shape or type.
    """
    into, out = wanted(model, loss)
    return _Fitting(arrays, Path(source).name, into, out).parts(held_out)


class _Fitting:
    def __init__(self, arrays: dict[str, Array], source: str, into: list[Wanted], out: list[Wanted]) -> None:
        self.arrays, self.source, self.into, self.out = dict(arrays), source, into, out
        self.used: set[str] = set()
        self.notes: list[str] = []
        self.classes: dict[str, list[str]] = {}

    def parts(self, held_out: float) -> tuple[dict[str, Any], list[str]]:
        self._take_tables()
        found: dict[str, Any] = {}
        for part in (*PARTS, ""):
            x = self._side("x", part, self.into, found)
            if x is None:
                continue
            y = self._side("y", part, self.out, found)
            if y is None:
                y = self._own_inputs(x, part)
            found[f"x_{part}"], found[f"y_{part}"] = x, y
            weights = self._named("w", part)
            if weights is not None:
                found[f"w_{part}"] = weights
            self._same_length(part, found)
        if "x_train" in found and "x_" in found:
            raise self._error("has x and x_train, which is twice the training data", "leave out one of them")
        if "x_" in found:
            self._divide(found)
        if "x_train" not in found:
            raise self._lacking()
        if held_out:
            self._hold_out(found, held_out)
        if unused := sorted(set(self.arrays) - self.used):
            self.notes.append(f"nothing reads {', '.join(unused)} of {self.source}")
        return found, self.notes

    # -- which arrays -------------------------------------------------------------------------------------------------

    def _take_tables(self) -> None:
        """Have ``data`` with ``target`` as x and y, and of ``data`` alone the last columns as y."""
        if "data" not in self.arrays or {"x", "x_train"} & set(self.arrays):
            return
        table = self.arrays.pop("data")
        if "target" in self.arrays:
            self.arrays |= {"x": table, "y": self.arrays.pop("target")}
            return
        if table.ndim != 2 or len(self.into) != 1 or len(self.out) != 1:
            self.arrays["x"] = table
            return
        features = int(np.prod(self.into[0].shape))
        labels = table.shape[1] - features
        if labels == 0 and _same_sizes(self.into[0].shape, self.out[0].shape):
            self.arrays["x"] = table
        elif labels in (1, int(np.prod(self.out[0].shape))):
            self.arrays |= {"x": table[:, :features], "y": table[:, features:]}
            self.notes.append(
                f"the last column{'s' * (labels != 1)} of data {'is' if labels == 1 else 'are'} the labels"
            )
        else:
            raise self._error(
                f"has a table data of {table.shape[1]} columns, and {self.into[0].at} wants {features} of them as inputs and the last 1 "
                f"or {int(np.prod(self.out[0].shape))} as labels",
                "save inputs and labels apart, as x and y",
            )

    def _named(self, letter: str, part: str) -> Array | None:
        name = f"{letter}_{part}" if part else letter
        if name in self.arrays:
            self.used.add(name)
            return self.arrays[name]
        return None

    def _side(self, letter: str, part: str, ends: list[Wanted], found: dict[str, Any]) -> Any:
        """Inputs or labels of a part, as Keras takes them; None if there are none."""
        behind = f"_{part}" if part else ""
        names = [f"{end.block}{behind}" for end in ends]
        others = self.out if letter == "x" else self.into
        # Of a block that has an input and an output, an array of its name is what has no other name: one of several.
        clear = not self._both() or (len(ends) > 1 and len(others) == 1)
        made: dict[str, Array] = {}
        if len(ends) == 1 and (array := self._named(letter, part)) is not None:
            made[ends[0].block] = self._fit(letter, f"{letter}{behind}", array, ends[0])
        elif clear and any(name in self.arrays for name in names):
            if missing := [name for name in names if name not in self.arrays]:
                raise self._error(
                    f"has no {' and no '.join(missing)}, beside {next(name for name in names if name in self.arrays)}",
                    f"save an array for each of {', '.join(names)}",
                )
            for name, end in zip(names, ends, strict=True):
                self.used.add(name)
                made[end.block] = self._fit(letter, name, self.arrays[name], end)
        if not made:
            return None
        return next(iter(made.values())) if len(ends) == 1 else made

    def _both(self) -> list[str]:
        """Blocks that have an input and an output."""
        out = {end.block for end in self.out}
        return [end.block for end in self.into if end.block in out]

    def _own_inputs(self, x: Any, part: str) -> Any:
        """Of an autoencoder the inputs are the labels."""
        if len(self.into) == len(self.out) == 1 and _same_sizes(self.into[0].shape, self.out[0].shape):
            if part in ("train", ""):
                self.notes.append(
                    "there are no labels, and what comes out has the shape of what goes in: inputs are the labels"
                )
            return x.reshape(len(x), *self.out[0].shape)
        name = f"y_{part}" if part else "y"
        raise self._error(
            f"has no {name}{self._near(name)}",
            f"{self.out[0].at} wants labels for {', '.join(end.block for end in self.out)}",
        )

    def _lacking(self) -> DatasetError:
        names = [end.block for end in self.into]
        if len(names) > 1 and len(self.out) > 1 and (both := self._both()):
            return self._error(
                f"cannot say which array is meant: {both[0]!r} is the name of an input and of an output",
                f"give the output a name of its own, such as {both[0]}:name score;",
            )
        what = "x_train" if len(names) == 1 else f"arrays {', '.join(f'{name}_train' for name in names)}"
        there = ", ".join(sorted(self.arrays)[:12]) or "nothing"
        return self._error(
            f"has no {what}{self._near('x_train')}; it has {there}",
            "save x and y, or x_train, y_train, x_test and y_test"
            if len(names) == 1
            else "save an array for each input by the name of its block",
        )

    def _near(self, name: str) -> str:
        """What was probably meant by another array: none that has a meaning of its own."""
        heads = ("x", "y", "w", *(end.block for end in (*self.into, *self.out)))
        others = [each for each in self.arrays if each.rpartition("_")[0] not in heads]
        near = difflib.get_close_matches(name.lower(), {each.lower(): each for each in others}, 1, 0.7)
        return f", did you mean {name} by {next(one for one in others if one.lower() == near[0])!r}?" if near else ""

    # -- shapes and types ---------------------------------------------------------------------------------------------

    def _fit(self, letter: str, name: str, array: Array, end: Wanted) -> Array:
        if array.ndim == 0:
            raise self._error(f"has {name} as a single number, and it needs a row for each sample")
        if not len(array):
            raise self._error(f"has no samples in {name}")
        if letter == "y" and array.dtype.kind in "US":
            array = self._numbered(name, array, end)
        if array.dtype.kind not in "fiub":
            raise self._error(
                f"has {name} of type {array.dtype}, and {end.at} wants numbers",
                "turn it into numbers before it is saved",
            )
        return self._fit_input(name, array, end) if letter == "x" else self._fit_labels(name, array, end)

    def _fit_input(self, name: str, array: Array, end: Wanted) -> Array:
        if end.dtype in WHOLE and array.dtype.kind == "f" and not np.array_equal(array, np.trunc(array)):
            raise self._error(
                f"has {name} with values such as {_fraction(array):g}, and {end.at} wants whole numbers ({end.dtype})"
            )
        if array.shape[1:] == end.shape:
            return array
        if _same_sizes(array.shape[1:], end.shape):
            return array.reshape(len(array), *end.shape)
        turned = sorted(array.shape[1:]) == sorted(end.shape)
        raise self._error(
            f"has {name} with samples of shape {_shown(array.shape[1:])}, and {end.at} wants {end.block}: {_shown(end.shape)}",
            "axes are in another order: numpy.moveaxis(x, 1, -1) puts channels last"
            if turned
            else "change the text's shape=, or the array",
        )

    def _fit_labels(self, name: str, array: Array, end: Wanted) -> Array:
        each = array.shape[1:]
        single = each in (end.shape[:-1], (*end.shape[:-1], 1))
        if end.classes and single:
            array = array.reshape(len(array), *end.shape[:-1])
            low, high = array.min(), array.max()
            if not np.array_equal(array, np.trunc(array)) or low < 0 or high >= end.classes:
                raise self._error(
                    f"has labels from {low:g} to {high:g} in {name}, and {end.at} has {end.classes} classes for {end.block}: "
                    f"whole numbers from 0 to {end.classes - 1}",
                    "labels that begin with 1 lack a '- 1'"
                    if low == 1 and high == end.classes
                    else "numpy.unique(y, return_inverse=True)[1] numbers classes",
                )
            rows = end.loss in (*ROWS_WANTED, "FOL")
            return np.eye(end.classes, dtype=np.float32)[array.astype(np.int64)] if rows else array.astype(np.int32)
        if each == end.shape:
            one_hot = (
                end.loss == "SCE"
                and bool(np.all((array == 0) | (array == 1)))
                and bool(np.all(array.sum(axis=-1) == 1))
            )
            if end.loss == "SCE" and not one_hot:
                raise self._error(
                    f"has rows in {name} that are no classes, and {end.at} has the loss SCE",
                    "write CCE or KLD for rows",
                )
            return array.argmax(axis=-1).astype(np.int32) if one_hot else array
        if _same_sizes(each, end.shape):
            return array.reshape(len(array), *end.shape)
        either = f"{_shown(end.shape)}" + (
            f", or class numbers of shape {_shown(end.shape[:-1])}" if end.shape[-1:] > (1,) else ""
        )
        raise self._error(
            f"has {name} with labels of shape {_shown(each)}, and {end.at} wants {end.block}: {either}",
            "change the text's shape=, or the array",
        )

    def _numbered(self, name: str, array: Array, end: Wanted) -> Array:
        """Class numbers for texts, in the order of the alphabet, the same in all parts."""
        if end.block not in self.classes:
            beside = [each for key, each in self.arrays.items() if key[:1] == name[:1] and each.dtype.kind in "US"]
            self.classes[end.block] = sorted({str(one) for each in beside for one in np.unique(each)})
            shown = ", ".join(f"{number} {text}" for number, text in enumerate(self.classes[end.block][:10]))
            self.notes.append(
                f"labels of {end.block} are texts, and become {shown}{', ...' * (len(self.classes[end.block]) > 10)}"
            )
        return np.searchsorted(np.array(self.classes[end.block]), array.astype(str))

    # -- parts --------------------------------------------------------------------------------------------------------

    def _same_length(self, part: str, found: dict[str, Any]) -> None:
        lengths = {
            name: len(array)
            for key in ("x", "y", "w")
            for name, array in _leaves(f"{key}_{part}".rstrip("_"), found.get(f"{key}_{part}"))
        }
        if len(set(lengths.values())) > 1:
            rows = ", ".join(f"{name} {length:,}" for name, length in lengths.items())
            raise self._error(
                f"has another number of samples in each array: {rows}", "give each sample one row in all of them"
            )

    def _divide(self, found: dict[str, Any]) -> None:
        tested = "x_test" in found
        for letter in "xyw":
            whole = found.pop(f"{letter}_", None)
            if whole is None:
                continue
            if tested:
                found[f"{letter}_train"] = whole
                continue
            found[f"{letter}_train"] = _map(whole, lambda array: array[np.arange(len(array)) % TEST_EVERY != 0])
            found[f"{letter}_test"] = _map(whole, lambda array: array[::TEST_EVERY])
            if letter == "x":
                self.notes.append("every fifth sample is for the test")
        if "x_test" in found and not len(next(_leaves("", found["x_train"]))[1]):
            raise self._error("has one sample", "training needs more")

    def _hold_out(self, found: dict[str, Any], share: float) -> None:
        if "x_val" in found:
            raise self._error(
                "has x_val, and train:validation would hold out some of x_train as well", "leave out one of both"
            )
        every = max(round(1 / share), 2)
        for letter in "xyw":
            whole = found.get(f"{letter}_train")
            if whole is not None:
                found[f"{letter}_train"] = _map(whole, lambda array: array[np.arange(len(array)) % every != 0])
                found[f"{letter}_val"] = _map(whole, lambda array: array[::every])
        self.notes.append(f"1 of {every} samples of training is for validation")

    def _error(self, what: str, hint: str = "") -> DatasetError:
        return DatasetError(f"{self.source} {what}", hint=hint)


def _same_sizes(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether two shapes differ in axes of size 1, or one of them is flat."""
    same = [size for size in one if size != 1] == [size for size in other if size != 1]
    return same or (int(np.prod(one)) == int(np.prod(other)) and 1 in (len(one), len(other)))


def _map(data: Any, function: Any) -> Any:
    return {name: function(array) for name, array in data.items()} if isinstance(data, dict) else function(data)


def _leaves(name: str, data: Any) -> Iterator[tuple[str, Array]]:
    if isinstance(data, dict):
        yield from ((f"{key}", array) for key, array in data.items())
    elif data is not None:
        yield name, data


def _fraction(array: Array) -> float:
    flat = array.reshape(-1)
    return float(flat[np.argmax(flat != np.trunc(flat))])


def _shown(shape: tuple[int, ...]) -> str:
    return str(list(shape))
