"""Reads the bytes of a model text. A worker asks its master for them, so that both use the same text. Imports nothing
heavy.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ddlf.errors import NotationError

SUFFIX, WEIGHTS = ".nnm", ".safetensors"
"""The suffixes of a text, and of a file with weights and text.

A worker only gets the text; rounds bring the weights.
"""

ask: Callable[[str], Any] | None = None
"""In an executor: the function that asks the master for a text. It returns None if there is no answer."""


def text_of(path: Path | str) -> bytes:
    """Return the bytes of a model text, from this machine's disk or, on a worker, from the master.

    Args:
        path: The path in the program, relative to the current folder or the script's folder. On a worker, also a file
            with weights.

    Raises:
        NotationError: The text does not exist.
    """
    from ddlf.extras.text.language.model import read_bytes

    if not isinstance(path, str | os.PathLike):
        raise NotationError(f"the path of a text must not be a {type(path).__name__}", hint="name a file: digits.nnm")
    if isinstance(path, str) and ("\n" in path or ";" in path) and not Path(path[:200]).exists():
        raise NotationError(
            "a text is given where the path of one is meant",
            hint="write it to a file, or read it as such: ddlf.extras.text.language.model.read(text)",
        )
    if ask is not None:
        result = ask(str(path))
        if isinstance(result, bytes):
            return result
        raise NotationError(
            f"the master gives no text {str(path)!r} to this worker",
            hint=f"put it below the folder of the script or the current one on the master, with a name that ends in {SUFFIX} or {WEIGHTS}",
        )
    return read_bytes(place_of(path))


def begin_executor(ask_master: Callable[[str, str], Any]) -> None:
    """Make this executor, a worker's process, read model texts from its master."""
    global ask

    def ask_for_text(name: str) -> Any:
        return ask_master("text", name)

    ask = ask_for_text


def answer(kind: str, name: str, folders: Sequence[Path]) -> bytes | None:
    """Return the bytes of the model text that a worker asks for, if its file is below one of the folders.

    From a file with weights, return only the text.

    Args:
        kind: The kind of question; only ``"text"`` is answered.
        name: The path in the program.
        folders: The resolved paths of the allowed folders.
    """
    from ddlf.extras.text.language.model import read_bytes

    if kind != "text":
        return None
    path = place_of(name).resolve()
    is_below = any(path.is_relative_to(folder) for folder in folders)
    hidden = any(part.startswith(".") for part in Path(name).parts if part not in (".", ".."))
    if not is_below or hidden or not path.is_file():
        return None
    if path.suffix == WEIGHTS:
        from ddlf.extras.text.conversion.weights import text_within

        return text_within(path).encode()
    return read_bytes(path) if path.suffix == SUFFIX else None


def place_of(path: Path | str) -> Path:
    """Return the path of a model text that a program names, from the current folder, else beside the script."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    folders = [*([Path(script).parent] if script else []), *map(Path, sys.path[:1])]
    candidates = [folder / path for folder in folders if (folder / path).is_file()]
    return candidates[0] if candidates and not Path(path).is_file() else Path(path)
