"""Finds the part of a value that cannot be pickled, and the path to it, for an error. Pure; runs on the master, only
after a failure.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import types
from collections.abc import Callable, Iterator
from typing import Any

Cached = type(functools.cache(len))
"""The type that ``functools.cache`` and ``lru_cache`` make. It is neither a function nor a class."""


def find_culprit(value: Any, can_pickle: Callable[[Any], bool]) -> str | None:
    """Return the path to the innermost part of ``value`` that cannot be pickled, with its class; None if there is no
    such part.
    """
    return _find(value, name_of(value), can_pickle, 0, set())


def _find(value: Any, path: str, can_pickle: Callable[[Any], bool], depth: int, seen: set[int]) -> str | None:
    if id(value) in seen or depth > 6 or can_pickle(value):
        return None
    seen.add(id(value))
    for suffix, part in _parts(value):
        found = _find(part, f"{path}{suffix}", can_pickle, depth + 1, seen)
        if found:
            return found
    return f"{path} (a {type(value).__module__}.{type(value).__qualname__})"


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts that are pickled with ``value``, each with the path to it."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
        yield "", value.__func__
    elif isinstance(value, Cached):
        yield "", value.__wrapped__
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, types.FunctionType):
        yield from _parts_of_function(value)
    elif isinstance(value, type):
        # A class also lists its own descriptors, which are never pickled.
        own = ((name, item) for name, item in vars(value).items() if not isinstance(item, types.GetSetDescriptorType))
        yield from ((f".{name}", item) for name, item in own)
    else:
        yield from _parts_of_object(value)
        yield " -> class", type(value)


def _parts_of_object(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of an object's pickled state. ``__getstate__`` and ``__reduce__`` may omit attributes."""
    try:
        kind: Any = type(value)
        reduces = any(getattr(kind, name) is not getattr(object, name) for name in ("__reduce__", "__reduce_ex__"))
        reduced = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL) if reduces else None
        state = reduced[2:3] if isinstance(reduced, tuple) else (value.__getstate__(),)
    except Exception:  # the object cannot be pickled at all
        return
    if isinstance(reduced, tuple):
        yield from ((f" -> argument {place}", item) for place, item in enumerate(reduced[1], 1))
    for part in state:
        for names in part if isinstance(part, tuple) else (part,):  # attributes, slots
            if isinstance(names, dict):
                yield from ((f".{name}", item) for name, item in names.items())
            elif names is not None:
                yield " -> state", names


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            yield f" -> variable {name!r}", cell.cell_contents
    for name in _global_names(function.__code__):
        if name in function.__globals__:
            yield f" -> global {name!r}", function.__globals__[name]
    for item in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield " -> a default", item
    yield from ((f".{name}", item) for name, item in vars(function).items())


def _global_names(code: types.CodeType) -> Iterator[str]:
    """Yield the globals that a function uses, including the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def name_of(value: Any) -> str:
    """Return the name of a function or class, or of the class of any other value."""
    named = isinstance(value, types.FunctionType | types.MethodType | type)
    return str(value.__qualname__ if named else type(value).__qualname__)


def text_of(error: Exception) -> str:
    """Return the text of an exception, even if its ``__str__`` raises."""
    try:
        return str(error)
    except Exception:
        return "no text"
