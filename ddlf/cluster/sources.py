"""Sends a worker the source of modules in the script's folder on the master, and data files of packages there, when the
worker imports them. Runs on the master.

No module is imported for an answer. A name cannot lead out of the folder: its parts are identifiers, and the target of
a link must be inside the folder, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from ddlf.errors import DDLFError
from ddlf.extras import hooks
from ddlf.rpc.code import is_installed
from ddlf.rpc.messages import dumps

log = logging.getLogger(__name__)

KINDS = ("names", "module", "files", "data")
"""The kinds of questions that this module answers. Optional parts answer further kinds."""
MAX_FILE_BYTES = 256 * 1024**2
"""Largest data file. Put a larger file in ``DDLF_DATA``, or pass it as an argument."""
PIECE_BYTES = 256 * 1024
"""Bytes of one piece of an answer. Pieces are small because heartbeats share the control connection."""
MAX_FILES = 10_000
"""Largest number of files in a folder. The script's folder may be a home folder with very many files."""


def script_folder() -> Path | None:
    """Return the folder where the script's own imports begin; None if it is a folder for installed packages."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if isinstance(file, str) and getattr(main, "__spec__", None) is None and not is_installed(file):
        folder = Path(file).parent
    else:  # `ddlf run` puts the app's folder there; `python -m` and notebooks put the current one there
        folder = Path(sys.path[0] if sys.path else "")
    folder = folder.resolve()
    return folder if folder.is_dir() and folder.parent != folder and not is_installed(f"{folder}{os.sep}") else None


class Sources:
    """Answers the questions of one worker about modules in the script's folder on the master.

    Args:
        folder: The folder of the answers; None for the script's folder.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._sent_names: set[str] = set()

    async def give(
        self, ask: Callable[..., Awaitable[Any]], worker: str, id: int, question: str, name: str, file: str
    ) -> None:
        """Answer a question through ``ask``, in pieces. An unreadable file is treated as missing."""
        answer: Any = None
        try:
            answer = await asyncio.to_thread(self.answer, question, name, file)
        except (OSError, ValueError) as error:  # an unreadable folder, or a name that is not a path
            log.warning("%s asked for %s %s, which cannot be read: %s", worker, question, name[:80], error)
        data = dumps(answer)[0]
        remaining = memoryview(len(data).to_bytes(8, "little") + bytes(data))
        with contextlib.suppress(DDLFError):  # the worker may be lost meanwhile
            while True:
                piece, remaining = remaining[:PIECE_BYTES], remaining[PIECE_BYTES:]
                await ask("give", id, bytes(piece), not remaining)
                if not remaining:
                    return

    def answer(self, question: str, name: str, file: str = "") -> Any:
        """Return the answer to a question; None if no such module or file exists, or if the worker may not have it.

        Args:
            question: ``"names"`` of the top-level modules, a ``"module"``, the ``"files"`` of a package, or a ``"data"``
                file of a package. Optional parts answer other questions, and may also send files from the current
                folder.
            name: Name of the module or package, or the argument for an optional part.
            file: Path of the data file, relative to the package's folder.
        """
        folder = self._folder or script_folder()
        if question not in KINDS:
            folders = [candidate for candidate in (folder, Path.cwd().resolve()) if candidate is not None]
            answers = (answer(question, name, folders) for answer in hooks("answer"))
            return next((match for match in answers if match is not None), None)
        if folder is None:
            return None
        if question == "names":
            return _names(folder)
        match = find(folder, name)
        if match is None:
            return None
        if question == "module":
            self._sent_names.add(name)
            kind, path = match
            source = path.read_bytes() if kind != "namespace" else b""
            return {"kind": kind, "file": str(path), "source": source}
        if name not in self._sent_names or match[0] == "source":
            return None
        package_folder = match[1] if match[0] == "namespace" else match[1].parent
        if question == "files":
            return _files(package_folder)
        return _data(package_folder, file) if question == "data" else None


def _names(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        names = {
            entry.name.removesuffix(".py")
            for _, entry in zip(range(MAX_FILES), entries, strict=False)
            if entry.name.endswith(".py") or entry.is_dir()
        }
    return sorted(name for name in names if name.isidentifier())


def find(folder: Path, name: str) -> tuple[str, Path] | None:
    """Return the kind and the file of a module in a folder, by the rules of Python's own import system."""
    kind, path, current = "", folder, folder
    for part in name.split("."):
        if not part.isidentifier() or kind == "source":
            return None
        for kind, path in (
            ("package", current / part / "__init__.py"),
            ("source", current / f"{part}.py"),
            ("namespace", current / part),
        ):
            if path.is_dir() if kind == "namespace" else path.is_file():
                break
        else:
            return None
        current = current / part
    return (kind, path) if path.resolve().is_relative_to(folder.resolve()) else None


def _files(folder: Path) -> list[str] | None:
    """Return the relative paths, with ``/``, of the data files in a package's folder; None if there are too many."""
    paths: list[str] = []
    for at, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__" and not name.startswith("."))
        paths += [
            (Path(at) / name).relative_to(folder).as_posix()
            for name in files
            if not name.endswith((".py", ".pyc")) and not name.startswith(".")
        ]
        if len(paths) > MAX_FILES:
            return None
    return sorted(paths)


def _data(folder: Path, file: str) -> bytes | None:
    path = (folder / file).resolve()
    if not path.is_relative_to(folder.resolve()) or path.suffix in (".py", ".pyc") or not path.is_file():
        return None
    if any(part.startswith(".") for part in path.relative_to(folder.resolve()).parts):
        return None
    return path.read_bytes() if path.stat().st_size <= MAX_FILE_BYTES else None
