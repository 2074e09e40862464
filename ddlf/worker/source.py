"""A digest of DDLF's own source files.

Machines with the same version of DDLF may have other source: somebody has edited a checkout, or has installed an earlier
commit. Such a worker may compute other results, so a run names it. Runs on both sides; imports neither NumPy nor Keras.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ddlf.version import __version__

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

TEMPLATES = "templates"
"""The folder with the examples that ``ddlf new`` copies. Only an installed package has it."""


class Source(NamedTuple):
    """The DDLF of a process.

    Attributes:
        version: Its version.
        digest: The digest of its source files, as 16 hexadecimal digits.
    """

    version: str
    digest: str


@cache
def source() -> Source:
    """Return the source of this process's DDLF. It reads all source files, about 6 MB.

    A process that runs for long calls it once at its start: the source that it has imported stays the same if somebody
    edits the files.
    """
    digest = hashlib.sha256()
    for name, text in _files(_package(), ""):
        digest.update(f"{name} {len(text)}\n".encode())
        digest.update(text)
    return Source(__version__, digest.hexdigest()[:16])


def _package() -> Traversable:
    folder = Path(__file__).parents[1]
    if folder.is_dir():
        return folder
    from importlib.resources import files  # a package in a zip file; this import takes longer than all that is read

    return files("ddlf")


def _files(folder: Traversable, path: str) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each source file in a folder, in the order of their names."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        name = f"{path}{entry.name}"
        if entry.name.endswith(".py"):
            yield name, _text(entry)
        elif "." not in entry.name and entry.name not in ("__pycache__", TEMPLATES) and entry.is_dir():
            yield from _files(entry, f"{name}/")


def _text(file: Traversable) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # somebody edits the files just now, or it cannot be read: the digest differs, as it should
        return b""


def other_source(names: list[str], source_there: Source, source_here: Source) -> str:
    """Return the sentence that workers have other source of DDLF than the master.

    Args:
        names: Names of these workers.
        source_there: Their source. Its version is empty if their source is too early to report it.
        source_here: The master's source.
    """
    verb, pronoun = ("has", "it") if len(names) == 1 else ("have", "them")
    if source_there.version in (source_here.version, ""):
        difference = f"other source of DDLF {source_here.version} than this machine"
    else:
        difference = f"DDLF {source_there.version}, and this machine has DDLF {source_here.version}"
    return (
        f"{', '.join(names)} {verb} {difference}: results may differ. Install the same there, and start {pronoun} again"
    )
