"""Names of slow modules, imported at their first use: each process of ``scripts/test`` imports all test modules, and most
of these processes do not need the slow ones."""

from __future__ import annotations

import importlib
from typing import Any


class Later:
    """A stand-in for a module, a function or a class. It imports the module when a test first uses it.

    Args:
        module: The name of the module.
        name: The name of a function or class in the module; None stands for the module itself.
    """

    def __init__(self, module: str, name: str | None = None) -> None:
        self._module, self._name = module, name

    def __getattr__(self, name: str) -> Any:
        if name.startswith(
            "_"
        ):  # pytest looks for such names to find fixtures and mocks; this must not import the module
            raise AttributeError(name)
        return getattr(importlib.import_module(self._module), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(self._module), str(self._name))(*args, **kwargs)
