"""Exception classes of others: found without importing them, made without running their code. Pure; runs on both sides."""

from __future__ import annotations

import builtins
import contextlib
import sys
from typing import Any


def known_class(name: str) -> type[BaseException] | None:
    """The exception class of that qualified name, if it is a builtin or its module is imported already."""
    found: Any = vars(builtins).get(name)
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module = sys.modules.get(".".join(parts[:cut]))
        if module is not None:
            found = module
            for part in parts[cut:]:
                found = getattr(found, "__dict__", {}).get(part)  # a module may answer getattr with an import
            break
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def qualified_name(kind: type) -> str:
    """How a class is named to the other side: a builtin without its module."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def bare(kind: type[Any]) -> Any:
    """An error of that class whose constructor has not run, nor any code of a user's class."""
    builtin: Any
    for builtin in kind.__mro__:
        if builtin.__module__ == "builtins":
            with contextlib.suppress(TypeError):  # another one of them lays out the memory of this class
                return builtin.__new__(kind)
    raise TypeError(f"no {kind.__name__} can be made")


def builtin_base(kind: type[Any]) -> Any:
    """The builtin class next above it."""
    return next(base for base in kind.__mro__ if base.__module__ == "builtins")
