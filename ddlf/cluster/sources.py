"""What a worker may ask of the user's own modules: those below the script's folder, and the data files of packages among them. Runs on the master.

Nothing is imported to answer, and a name leads nowhere else: its parts are identifiers, and what a link points to must be below the folder, too.
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
from ddlf.rpc.values import dumps

log = logging.getLogger(__name__)

KINDS = ("names", "module", "files", "data")
"""What is answered here; other questions go to optional parts."""
MAX_FILE_BYTES = 256 * 1024**2
"""Of a data file: what is larger is data for ``DDLF_DATA`` or an argument."""
PIECE_BYTES = 256 * 1024
"""Of an answer on the control connection, on which heartbeats must not wait."""
MAX_FILES = 10_000
"""Of a folder. The script's may be somebody's home."""


def script_folder() -> Path | None:
    """The folder from which the script's own imports begin; None if that is a place for installed packages."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if isinstance(file, str) and getattr(main, "__spec__", None) is None and not is_installed(file):
        folder = Path(file).parent
    else:  # `ddlf run` puts the app's folder there, `python -m` and notebooks the current one
        folder = Path(sys.path[0] if sys.path else "")
    folder = folder.resolve()
    return folder if folder.is_dir() and folder.parent != folder and not is_installed(f"{folder}{os.sep}") else None


class Sources:
    """Answers one worker's questions.

    Args:
        folder: Below which the answers are; None for the script's.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._given: set[str] = set()

    async def give(
        self, ask: Callable[..., Awaitable[Any]], worker: str, id: int, what: str, name: str, file: str
    ) -> None:
        """Answer a question through ``ask``, in pieces; what cannot be read is not there."""
        answer: Any = None
        try:
            answer = await asyncio.to_thread(self.answer, what, name, file)
        except (OSError, ValueError) as error:  # a folder that may not be read, a name that is no path
            log.warning("%s asked for %s %s, which cannot be read: %s", worker, what, name[:80], error)
        data = dumps(answer)[0]
        rest = memoryview(len(data).to_bytes(8, "little") + bytes(data))
        with contextlib.suppress(DDLFError):  # it has gone meanwhile
            while True:
                piece, rest = rest[:PIECE_BYTES], rest[PIECE_BYTES:]
                await ask("give", id, bytes(piece), not rest)
                if not rest:
                    return

    def answer(self, what: str, name: str, file: str = "") -> Any:
        """What the worker gets; None if there is no such thing, or it may not have it.

        Args:
            what: ``"names"`` of the modules on top, a ``"module"``, the ``"files"`` of a package, or a ``"data"`` file of one. Optional parts
                answer other questions, and may also give files below the current folder.
            name: Name of the module or package, or what an optional part is asked for.
            file: File of the data file, below the package's folder.
        """
        folder = self._folder or script_folder()
        if what not in KINDS:
            folders = [each for each in (folder, Path.cwd().resolve()) if each is not None]
            answers = (answer(what, name, folders) for answer in hooks("answer"))
            return next((found for found in answers if found is not None), None)
        if folder is None:
            return None
        if what == "names":
            return _names(folder)
        found = find(folder, name)
        if found is None:
            return None
        if what == "module":
            self._given.add(name)
            kind, path = found
            source = path.read_bytes() if kind != "namespace" else b""
            return {"kind": kind, "file": str(path), "source": source}
        if name not in self._given or found[0] == "source":
            return None
        inside = found[1] if found[0] == "namespace" else found[1].parent
        if what == "files":
            return _files(inside)
        return _data(inside, file) if what == "data" else None


def _names(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        names = {
            entry.name.removesuffix(".py")
            for _, entry in zip(range(MAX_FILES), entries, strict=False)
            if entry.name.endswith(".py") or entry.is_dir()
        }
    return sorted(name for name in names if name.isidentifier())


def find(folder: Path, name: str) -> tuple[str, Path] | None:
    """The kind and file of a module below a folder, as Python's own search would find it there."""
    kind, path, inside = "", folder, folder
    for part in name.split("."):
        if not part.isidentifier() or kind == "source":
            return None
        for kind, path in (
            ("package", inside / part / "__init__.py"),
            ("source", inside / f"{part}.py"),
            ("namespace", inside / part),
        ):
            if path.is_dir() if kind == "namespace" else path.is_file():
                break
        else:
            return None
        inside = inside / part
    return (kind, path) if path.resolve().is_relative_to(folder.resolve()) else None


def _files(folder: Path) -> list[str] | None:
    """Data files below a package's folder, with ``/``."""
    found: list[str] = []
    for at, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__" and not name.startswith("."))
        found += [
            (Path(at) / name).relative_to(folder).as_posix()
            for name in files
            if not name.endswith((".py", ".pyc")) and not name.startswith(".")
        ]
        if len(found) > MAX_FILES:
            return None
    return sorted(found)


def _data(folder: Path, file: str) -> bytes | None:
    path = (folder / file).resolve()
    if not path.is_relative_to(folder.resolve()) or path.suffix in (".py", ".pyc") or not path.is_file():
        return None
    if any(part.startswith(".") for part in path.relative_to(folder.resolve()).parts):
        return None
    return path.read_bytes() if path.stat().st_size <= MAX_FILE_BYTES else None
