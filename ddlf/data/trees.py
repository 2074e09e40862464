"""Arrays as Keras takes them: one, or nested lists, tuples, named tuples and dicts of them. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any


def tree_map(function: Callable[[Any], Any], data: Any) -> Any:
    """Apply to an array, or to each in nested lists, tuples and dicts of them; the containers stay of their kind."""
    if isinstance(data, dict):
        return {key: tree_map(function, value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        made = [tree_map(function, value) for value in data]
        return type(data)(*made) if hasattr(data, "_fields") else type(data)(made)
    return function(data)


def leaves(data: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Each array with its name, such as ``x_train['left'][0]``."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from leaves(value, f"{name}[{key!r}]")
    elif isinstance(data, list | tuple):
        for number, value in enumerate(data):
            yield from leaves(value, f"{name}[{number}]")
    else:
        yield name, data


def named(trees: Any) -> dict[str, Any]:
    """The leaves of a dict of trees as arrays, by name: what ``grown`` undoes.

    Raises:
        TypeError: It is no dict.
    """
    import numpy as np

    if not isinstance(trees, Mapping):
        raise TypeError(f"a dict of arrays is wanted, such as {{'x': ..., 'y': ...}}, not a {type(trees).__name__}")
    return {leaf: np.asarray(array) for name, tree in trees.items() for leaf, array in leaves(tree, name)}


def grown(arrays: Mapping[str, Any], name: str) -> Any:
    """The tree whose leaves have these names, as ``leaves`` gives them; None where there is none of that name.

    Args:
        arrays: Arrays by name, those of other trees among them.
        name: Name of the tree, as ``"x"``.

    Raises:
        ValueError: Names do not make a tree.
    """
    if name in arrays:
        return arrays[name]
    below = [other for other in arrays if other.startswith(f"{name}[")]
    if not below:
        return None
    found = [re.match(r"\[('[^']*'|\d+)\]", other[len(name) :]) for other in below]
    keys = list(dict.fromkeys(match[1] if match else "" for match in found))
    if all(key[:1] == "'" for key in keys):
        return {key[1:-1]: grown(arrays, f"{name}[{key}]") for key in keys}
    if sorted(keys, key=str) != sorted(map(str, range(len(keys)))):
        raise ValueError(f"{', '.join(below)} are no tree")
    return [grown(arrays, f"{name}[{number}]") for number in range(len(keys))]


def first_array(data: Any) -> Any:
    """One array of a tree; all have the same length."""
    return next(array for _, array in leaves(data))


def tuples(data: Any) -> Any:
    """The same tree with tuples for lists: ``tf.data`` would make one tensor of a list."""
    if isinstance(data, dict):
        return {key: tuples(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        made = [tuples(value) for value in data]
        return type(data)(*made) if hasattr(data, "_fields") else tuple(made)
    return data
