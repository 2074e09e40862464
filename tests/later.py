"""What takes long to import, for the top of a test's module: each process of ``scripts/test`` imports all modules, and most need none of it."""

from __future__ import annotations

import importlib
from typing import Any


class Later:
    """A module that is imported when something of it is first asked for, or something of a module, imported when that is first called.

    Args:
        module: Its name.
        name: Of a function or a class in it; None for the module itself.
    """

    def __init__(self, module: str, name: str | None = None) -> None:
        self._module, self._name = module, name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest, which asks every object in a module whether it is a fixture or a mock
            raise AttributeError(name)
        return getattr(importlib.import_module(self._module), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(self._module), str(self._name))(*args, **kwargs)
