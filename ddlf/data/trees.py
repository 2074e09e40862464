"""Trees of arrays, as Keras takes them: an array, or nested lists, tuples, named tuples and dicts of arrays. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any


def tree_map(function: Callable[[Any], Any], data: Any) -> Any:
    """Apply a function to each array of a tree, and return the results in the same containers."""
    if isinstance(data, dict):
        return {key: tree_map(function, value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        children = [tree_map(function, value) for value in data]
        return type(data)(*children) if hasattr(data, "_fields") else type(data)(children)
    return function(data)


def leaves(data: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each array of a tree with its full name, such as ``x_train['left'][0]``."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from leaves(value, f"{name}[{key!r}]")
    elif isinstance(data, list | tuple):
        for number, value in enumerate(data):
            yield from leaves(value, f"{name}[{number}]")
    else:
        yield name, data


def named(trees: Any) -> dict[str, Any]:
    """Return all arrays in a dict of trees by their full names, such as ``x['left']``. ``grown`` is the inverse.

    Raises:
        TypeError: The object is not a dict.
    """
    import numpy as np

    if not isinstance(trees, Mapping):
        raise TypeError(f"a dict of arrays is wanted, such as {{'x': ..., 'y': ...}}, not a {type(trees).__name__}")
    return {leaf: np.asarray(array) for name, tree in trees.items() for leaf, array in leaves(tree, name)}


def grown(arrays: Mapping[str, Any], name: str) -> Any:
    """Build the tree with a name again, from arrays by the full names of ``leaves``. Return None if no array belongs to
    it.

    Args:
        arrays: Arrays by name. They may belong to other trees, too.
        name: Name of the tree, such as ``"x"``.

    Raises:
        ValueError: The names do not form a tree.
    """
    if name in arrays:
        return arrays[name]
    below = [path for path in arrays if path.startswith(f"{name}[")]
    if not below:
        return None
    matches = [re.match(r"\[('[^']*'|\d+)\]", path[len(name) :]) for path in below]
    keys = list(dict.fromkeys(match[1] if match else "" for match in matches))
    if all(key[:1] == "'" for key in keys):
        return {key[1:-1]: grown(arrays, f"{name}[{key}]") for key in keys}
    if sorted(keys, key=str) != sorted(map(str, range(len(keys)))):
        raise ValueError(f"{', '.join(below)} do not form a tree")
    return [grown(arrays, f"{name}[{number}]") for number in range(len(keys))]


def first_array(data: Any) -> Any:
    """Return one array of a tree. All arrays of a tree have the same length."""
    return next(array for _, array in leaves(data))


def tuples(data: Any) -> Any:
    """Return the tree with tuples instead of lists, because ``tf.data`` would turn a list into one tensor."""
    if isinstance(data, dict):
        return {key: tuples(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        children = [tuples(value) for value in data]
        return type(data)(*children) if hasattr(data, "_fields") else tuple(children)
    return data
