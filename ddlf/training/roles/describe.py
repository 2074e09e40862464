"""Settings that are objects, as text that is the same in every process. A resumed run compares its settings by it."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import numpy as np

_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+")


def describe_optimizer(optimizer: Any) -> dict[str, Any]:
    """Return class and configuration of a Keras optimizer, entry by entry, without the names that Keras numbers."""
    facts: dict[str, Any] = {"optimizer": type(optimizer).__name__}
    config = {} if optimizer is None else optimizer.get_config()
    for name, value in config.items():
        if name != "name":
            facts[f"optimizer {name}"] = (
                _shortest(value) if isinstance(value, bool | int | float | str) else without_numbers(describe(value))
            )
    return facts


def without_numbers(described: str) -> str:
    """Return a described configuration without the numbers that Keras appends to the names of further objects."""
    return re.sub(r"('name': '\w+?)_\d+'", r"\1'", described)


def _shortest(value: Any) -> Any:
    """Return 0.1 for the float32 nearest to it, because Keras keeps the learning rate in a float32 variable."""
    if isinstance(value, float) and float(np.float32(value)) == value:
        return float(str(np.float32(value)))
    return value


def describe(value: Any, depth: int = 0) -> str:
    """Return a value's class and plain attributes as text, without memory addresses: the same in every process."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        return f"{array.dtype}{list(array.shape)}:{hashlib.sha256(array.tobytes()).hexdigest()[:16]}"
    if depth > 5:
        return type(value).__qualname__
    if isinstance(value, dict):
        return "{" + ", ".join(f"{describe(k, depth + 1)}: {describe(v, depth + 1)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(describe(entry, depth + 1) for entry in value)}]"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(describe(entry, depth + 1) for entry in value))}}}"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if not _ADDRESS.search(text := repr(value)):
        return text
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    attributes = {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})
    shown = ", ".join(f"{name}={describe(entry, depth + 1)}" for name, entry in sorted(attributes.items()))
    return f"{type(value).__qualname__}({shown})"
