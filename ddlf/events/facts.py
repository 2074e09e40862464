"""Convert dataclasses of facts (numbers, texts, tuples, dicts, nested dataclasses) to JSON data and back."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from math import isfinite
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
PLAIN = frozenset({str, int, bool, type(None)})
"""Types that JSON contains as they are."""


def to_data(value: Any) -> Any:
    """Convert a value, such as a dataclass of facts, to data that JSON can contain.

    NumPy numbers and arrays become Python numbers and lists, because metrics of users may be either. JSON has no NaN
    and no infinity, so they become the texts ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, which ``float`` accepts.
    """
    if type(value) in PLAIN or (type(value) is float and isfinite(value)):  # most values, so they come first
        return value
    if dataclasses.is_dataclass(value):
        return {name: to_data(getattr(value, name)) for name in _names(type(value))}  # type: ignore[arg-type]  # a class can be hashed
    if isinstance(value, dict):
        return {str(name): to_data(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_data(item) for item in value]
    if hasattr(value, "tolist"):
        return to_data(value.tolist())
    if isinstance(value, float) and not isfinite(value):
        return json.dumps(value)
    return value if value is None or isinstance(value, str | int | float) else str(value)


def from_data(kind: type[T], data: dict[str, Any]) -> T:
    """Create an object of a dataclass from JSON data. Unknown entries are ignored, and missing entries take their
    defaults.

    Raises:
        TypeError: An entry without a default is missing, or an entry has another type.
        ValueError: A text is not a number.
    """
    hints: dict[str, Any] = _hints(kind)  # type: ignore[arg-type]  # a class can be hashed
    return kind(**{name: _value(hint, data[name]) for name, hint in hints.items() if name in data})


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _value(hint: Any, data: Any) -> Any:
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):  # of one type and None
        return None if data is None else _value(inner[0], data)
    if kind is tuple:
        return tuple(_value(inner[0], item) for item in data)
    if kind is dict:
        return {name: _value(inner[1], item) for name, item in data.items()}
    if dataclasses.is_dataclass(kind):
        return from_data(kind, data)  # type: ignore[arg-type]
    return float(data) if kind is float else data
