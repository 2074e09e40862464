"""Arrays as Keras takes them: one, or nested lists, tuples, named tuples and dicts of them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
