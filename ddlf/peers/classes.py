"""Names of classes: all peers number text labels alike. Runs on peers and on the server."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ddlf.errors import DatasetError


def classes_of(arrays: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names in the text labels of some arrays, in the order of the alphabet; nothing if there are no texts."""
    return tuple(sorted({str(name) for labels in _texts(arrays).values() for name in np.unique(labels)}))


def numbered(arrays: Mapping[str, Any], classes: Sequence[str], source: str) -> dict[str, Any]:
    """Return the arrays with numbers instead of text labels.

    Args:
        arrays: Arrays of a file, by name.
        classes: The agreed names, in the order of their numbers.
        source: The file, for errors.

    Raises:
        DatasetError: No names are agreed, or a label is none of them.
    """
    result = dict(arrays)
    for name, labels in _texts(arrays).items():
        if not classes:
            raise DatasetError(
                f"{source} has texts as labels in {name}, and the server has agreed on no names of classes",
                hint="ask its owner to add --classes cat,dog to ddlf peers serve, or save the labels as numbers",
            )
        numbers = {name_of_class: number for number, name_of_class in enumerate(classes)}
        values, indices = np.unique(labels, return_inverse=True)
        if unknown := [str(value) for value in values if str(value) not in numbers]:
            similar = difflib.get_close_matches(unknown[0], classes, 1)
            names = f"{', '.join(classes[:10])}{', ...' * (len(classes) > 10)}"
            raise DatasetError(
                f"{source} has the label {unknown[0]!r} in {name}, and this model has no such class",
                hint=f"did you mean {similar[0]!r}?" if similar else f"the classes are {names}",
            )
        result[name] = np.array([numbers[str(value)] for value in values], np.int32)[indices].reshape(labels.shape)
    return result


def _texts(arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: array
        for name, array in arrays.items()
        if getattr(getattr(array, "dtype", None), "kind", "") in "US" and name.partition("_")[0] != "x"
    }
