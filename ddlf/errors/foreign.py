"""Finds exception classes of user code and libraries without importing them, and creates errors without running their
code.

Pure; runs on both sides.
"""

from __future__ import annotations

import builtins
import contextlib
import sys
from typing import Any


def known_class(name: str) -> type[BaseException] | None:
    """Return the exception class with that qualified name, if it is a builtin or its module is already imported."""
    found: Any = vars(builtins).get(name)
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module = sys.modules.get(".".join(parts[:cut]))
        if module is not None:
            found = module
            for part in parts[cut:]:
                found = getattr(found, "__dict__", {}).get(part)  # getattr could run a module's import
            break
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def qualified_name(kind: type) -> str:
    """Return the name of a class for the other side. A builtin has no module in its name."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def bare(kind: type[Any]) -> Any:
    """Return an error of that class without running its constructor or any code of a user's class."""
    builtin: Any
    for builtin in kind.__mro__:
        if builtin.__module__ == "builtins":
            with contextlib.suppress(TypeError):  # a different builtin determines the memory layout of this class
                return builtin.__new__(kind)
    raise TypeError(f"no {kind.__name__} can be made")


def builtin_base(kind: type[Any]) -> Any:
    """Return the nearest builtin base class."""
    return next(base for base in kind.__mro__ if base.__module__ == "builtins")
