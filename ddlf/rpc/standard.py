"""Encodes values of the standard library as data: dates and times, Decimal, Path, UUID, range. Pure; runs on both
sides.

A worker's results may also contain objects of classes that the master knows: members of an Enum, dataclasses, named
tuples.

Decoding imports nothing and runs no code of the other side. A class must be in a module that is already imported. An
object gets its attributes without its constructor, like in pickle.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from enum import Enum, Flag
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any
from uuid import UUID

from ddlf.errors import ProtocolError, ResultNotData


def _zone(zone: tzinfo | None) -> list[Any] | None:
    if zone is None:
        return None
    if type(zone) is not timezone:
        raise _Other  # its time zone comes from a database, and the other side may have another version
    offset = zone.utcoffset(None)
    name = zone.tzname(None)
    return [_seconds(offset), None if timezone(offset).tzname(None) == name else name]


def _seconds(span: timedelta) -> list[int]:
    return [span.days, span.seconds, span.microseconds]


def _read_zone(fields: Any) -> timezone | None:
    if fields is None:
        return None
    offset, name = fields
    return timezone(timedelta(*offset)) if name is None else timezone(timedelta(*offset), name)


class _Other(Exception):
    """This file cannot encode the value."""


_DUMP: dict[type, tuple[str, Callable[[Any], list[Any]]]] = {
    datetime: (
        "datetime",
        lambda d: [d.year, d.month, d.day, d.hour, d.minute, d.second, d.microsecond, d.fold, _zone(d.tzinfo)],
    ),
    date: ("date", lambda d: [d.year, d.month, d.day]),
    time: ("time", lambda t: [t.hour, t.minute, t.second, t.microsecond, t.fold, _zone(t.tzinfo)]),
    timedelta: ("timedelta", _seconds),
    timezone: ("timezone", lambda zone: _zone(zone) or []),
    Decimal: ("decimal", lambda number: [str(number)]),
    UUID: ("uuid", lambda name: [name.bytes]),
    range: ("range", lambda r: [r.start, r.stop, r.step]),
    type(Path()): ("path", lambda path: [str(path)]),
    PurePosixPath: ("posixpath", lambda path: [str(path)]),
    PureWindowsPath: ("windowspath", lambda path: [str(path)]),
}
_LOAD: dict[str, Callable[..., Any]] = {
    "datetime": lambda y, mo, d, h, m, s, us, fold, zone: datetime(y, mo, d, h, m, s, us, _read_zone(zone), fold=fold),
    "date": date,
    "time": lambda h, m, s, us, fold, zone: time(h, m, s, us, _read_zone(zone), fold=fold),
    "timedelta": timedelta,
    "timezone": lambda *f: _read_zone(f),
    "decimal": lambda text: Decimal(_checked(str, text)),
    "uuid": lambda data: UUID(bytes=_checked(bytes, data)),
    "range": range,
    "path": lambda text: Path(_checked(str, text)),
    "posixpath": lambda text: PurePosixPath(_checked(str, text)),
    "windowspath": lambda text: PureWindowsPath(_checked(str, text)),
}


def _checked(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ProtocolError(f"expected {kind.__name__}, got a {type(value).__name__}")
    return value


def dump_standard(value: Any) -> list[Any] | None:
    """Return ``[name, *fields]`` for a value of the standard library, and None for any other object."""
    found = _DUMP.get(type(value))
    try:
        return [found[0], *found[1](value)] if found else None
    except _Other:
        return None


def load_standard(fields: list[Any]) -> Any:
    """Return the value that ``dump_standard`` encoded.

    Raises:
        ProtocolError: This kind of value does not exist. Other exceptions mean that the fields are wrong.
    """
    name, *rest = fields
    load = _LOAD.get(name) if type(name) is str else None
    if load is None:
        raise ProtocolError(f"value of kind {str(name)[:40]!r} not allowed")
    return load(*rest)


# -- objects of classes that both sides know --------------------------------------------------------------------------


def dump_known(value: Any) -> list[Any] | None:
    """Return ``[kind, module, name, content]`` for a member of an Enum, a dataclass or a named tuple; None for any
    other object.

    Local classes, and classes whose objects need their constructor, are not encoded, because the other side cannot
    restore their objects.
    """
    kind = type(value)
    module, name = kind.__module__, kind.__qualname__
    if "<" in name:
        return None
    if isinstance(value, Enum):
        return ["enum", module, name, value.value if value.name is None or "|" in value.name else value.name]
    if isinstance(value, tuple) and _is_named_tuple(kind):
        return ["namedtuple", module, name, list(value)]
    if _is_dataclass(kind):
        return ["dataclass", module, name, _state(value)]
    return None


def load_known(fields: list[Any]) -> Any:
    """Return the object that ``dump_known`` encoded.

    Raises:
        ResultNotData: This side lacks the class, or its class differs from the other side's.
        ProtocolError: The fields do not describe such an object.
    """
    what, module, name, content = fields
    if type(module) is not str or type(name) is not str:
        raise ProtocolError("a class is named by texts")
    kind = known(module, name)
    if what == "enum" and isinstance(kind, type) and issubclass(kind, Enum):
        if type(content) is str and content in kind.__members__:
            return kind.__members__[content]
        if type(content) is int and issubclass(kind, Flag):
            return kind(content)
    elif what == "namedtuple" and isinstance(kind, type) and _is_named_tuple(kind):
        if type(content) is list and len(content) == len(kind._fields):  # type: ignore[attr-defined]
            return tuple.__new__(kind, content)
    elif what == "dataclass" and isinstance(kind, type) and _is_dataclass(kind):
        if type(content) is dict:
            return _made(kind, content)
    elif what not in ("enum", "namedtuple", "dataclass"):
        raise ProtocolError(f"object of kind {str(what)[:40]!r} not allowed")
    problem = "is not what it is on the worker" if kind is not None else "is not known here"
    raise ResultNotData(
        f"the result holds a {module}.{name}, which {problem}",
        hint="import its module on this side before the call, or return a dict",
    )


def known(module: str, name: str) -> Any:
    """Return the object with a qualified name in an imported module, without running the module's code; None if there
    is none.
    """
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, "__dict__", {}).get(part)  # getattr could run a module's __getattr__
    return found


def _is_named_tuple(kind: Any) -> bool:
    fields = getattr(kind, "_fields", None)
    return kind.__bases__ == (tuple,) and isinstance(fields, tuple) and hasattr(kind, "_make") and _is_harmless(kind)


def _is_dataclass(kind: Any) -> bool:
    if "__dataclass_fields__" not in kind.__dict__ or not _is_harmless(kind):
        return False
    try:
        object.__new__(kind)
    except TypeError:  # abstract, or derived from a builtin with its own state
        return False
    return not issubclass(kind, BaseException)


def _is_harmless(kind: Any) -> bool:
    """Return whether deleting an object of this class runs no code."""
    return not hasattr(kind, "__del__")


def _state(value: Any) -> dict[str, Any]:
    """Return all attributes of a dataclass that are set, including those in slots."""
    slots = {name: getattr(value, name) for name in _slots(type(value)) if hasattr(value, name)}
    return slots | getattr(value, "__dict__", {})


def _slots(kind: type) -> list[str]:
    slots = [base.__dict__.get("__slots__", ()) for base in kind.__mro__]
    names = [name for given in slots for name in ((given,) if isinstance(given, str) else given)]
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _made(kind: type, state: dict[str, Any]) -> Any:
    value: Any = object.__new__(kind)
    slots = _slots(kind)
    for name, item in state.items():
        if type(name) is not str or (name.startswith("__") and name.endswith("__")):
            raise ProtocolError("attributes are named by texts")
        if name in slots:
            object.__setattr__(value, name, item)
        elif hasattr(value, "__dict__"):
            value.__dict__[name] = item  # directly into the object, because a property could run code
        else:
            raise ProtocolError(f"a {kind.__name__} has no {name[:40]!r}")
    return value
