"""What a data set at a place is: columns, partition files, ids. Pure.

A manifest is JSON in one fixed spelling that ends with its own SHA-256, so every byte of it is checked. It names files of its own version only,
``v0001/00042.safetensors``, so nothing else can be read through it.

Each sample has an id: its number in the order of the files when the data set was first split. It keeps that for life. A file holds consecutive ones.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ddlf.errors import DatasetError

FORMAT = 2
"""Of the manifest and the files that it names, where a column is ragged; else it is 1. A later DDLF reads earlier ones."""
NAME = "manifest.json"
BEFORE = re.compile(r"manifest-\d{4,9}\.json")
"""The manifest of a version before, beside that: for runs that have begun with it."""
FILE = re.compile(r"v\d{4,9}/\d{5,9}\.safetensors")
KINDS = "biuf"
"""Numbers as NumPy and safetensors have them: truth values, whole numbers with and without sign, floating-point numbers."""
MAX_CLASSES = 100_000
END = "\n}\n"


@dataclass(frozen=True, slots=True)
class Column:
    """One array of the data set, a row for each sample.

    Args:
        dtype: Type of its values as NumPy names it, as ``"uint8"``.
        shape: Shape of a row, ``()`` for a single value.
        ragged: Whether rows may be shorter along their first axis; ``shape`` is that of the longest.
    """

    dtype: str
    shape: tuple[int, ...]
    ragged: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, the longest."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class PartitionFile:
    """One file of a data set.

    Args:
        name: Its path below the place.
        samples: How many it has, > 0.
        nbytes: Its size.
        sha256: Hash of the whole file, 64 hex digits.
        first: Id of its first sample; those of the others follow.
    """

    name: str
    samples: int
    nbytes: int
    sha256: str
    first: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """A version of a data set.

    Args:
        columns: By name, in the order of the source.
        files: In the order of their ids.
        version: Number of the version, from 1.
        classes: Names of classes, by the number that is their label; empty when the source has none.
        origin: ``content`` of the version that was split from a source; empty if it is this one.
        hosts: Machines that have parts of it on disks of their own; 0 if each machine can reach all of it.
    """

    columns: Mapping[str, Column]
    files: Sequence[PartitionFile]
    version: int = 1
    classes: Sequence[str] = field(default=())
    origin: str = ""
    hosts: int = 0

    @property
    def samples(self) -> int:
        """How many there are."""
        return self.files[-1].first + self.files[-1].samples

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)

    @property
    def row_bytes(self) -> int:
        """Bytes of a sample in memory."""
        return sum(column.row_bytes for column in self.columns.values())

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Samples in each file."""
        return np.array([file.samples for file in self.files], np.int64)

    @property
    def identity(self) -> str:
        """One name for columns, samples and their ids, whatever their files are: by it nodes compare what they have. 16 hex digits."""
        return self.origin or self.content

    @property
    def content(self) -> str:
        """One name for this version: 16 hex digits."""
        return hashlib.sha256(_spelled(_facts(self))).hexdigest()[:16]

    def spelled(self) -> bytes:
        """The bytes of the file. The same manifest gives the same bytes."""
        return _sealed(_spelled(_facts(self)))


def name_of(version: int) -> str:
    """The name of the manifest of a version that is not the newest."""
    return f"manifest-{version:04}.json"


def read(data: bytes, where: str) -> Manifest:
    """The manifest in the bytes of a file.

    Args:
        data: All of the file.
        where: Its name, for errors.

    Raises:
        DatasetError: It is no manifest, is of a newer version of DDLF, or is not what was written.
    """
    try:
        facts = json.loads(data)
    except (ValueError, RecursionError):
        raise _damaged(where, "is empty" if not data else "is no JSON") from None
    if type(facts) is not dict or type(facts.get("ddlf_data")) is not int:
        raise DatasetError(
            f"{where} is not of a data set of DDLF", hint="name a place that ddlf data split has written"
        )
    if facts["ddlf_data"] > FORMAT:
        raise DatasetError(f"{where} is of a newer DDLF (format {facts['ddlf_data']})", hint="install a newer one here")
    facts.pop("sha256", None)
    try:
        found = _manifest(facts) if data == _sealed(_spelled(facts)) else None
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise _damaged(where, f"says what cannot be ({error})") from None
    if found is None:
        raise _damaged(where, "is not what was written: it is damaged, or was edited")
    return found


def check_columns(columns: Mapping[str, Column]) -> None:
    """Refuse what files cannot hold.

    Raises:
        ValueError: Says what it is.
    """
    if not columns:
        raise ValueError("there are no columns")
    for name, column in columns.items():
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_./\[\]'-]*", name):
            raise ValueError(f"a column cannot be named {name!r}")
        if np.dtype(column.dtype).kind not in KINDS or np.dtype(column.dtype).name != column.dtype:
            raise ValueError(f"column {name!r} holds {column.dtype}, not numbers")
        if any(length < 1 for length in column.shape) or len(column.shape) > 31:
            raise ValueError(f"column {name!r} has rows of shape {tuple(column.shape)}")
        if column.ragged and not column.shape:
            raise ValueError(f"column {name!r} holds single numbers, which have no length")


def _manifest(facts: dict[str, Any]) -> Manifest:
    columns = {}
    for name, (dtype, shape, *more) in facts["columns"].items():
        if more not in ([], ["ragged"]):
            raise ValueError(f"column {name!r} is {more}")
        columns[name] = Column(dtype, tuple(map(_whole, shape)), bool(more))
    check_columns(columns)
    files, first = [], 0
    for name, samples, size, sha256, start in facts["files"]:
        file = PartitionFile(name, _whole(samples), _whole(size), sha256, _whole(start))
        if not FILE.fullmatch(name):
            raise ValueError(f"it names {name!r}, which is no partition file")
        if start != first or samples < 1 or not re.fullmatch("[0-9a-f]{64}", sha256):
            raise ValueError(f"ids or hash of {name}")
        first += samples
        files.append(file)
    if not files or len({file.name for file in files}) != len(files):
        raise ValueError("no file, or one twice")
    classes = facts["classes"]
    origin = facts.get("origin", "")
    if "origin" in facts and not re.fullmatch("[0-9a-f]{16}", origin):
        raise ValueError(f"{origin!r} is no origin")
    hosts = facts.get("hosts", 0)
    if "hosts" in facts and not _whole(hosts) > 0:
        raise ValueError("hosts")
    if type(classes) is not list or not all(type(name) is str for name in classes) or len(classes) > MAX_CLASSES:
        raise ValueError("classes")
    return Manifest(columns, files, _whole(facts["version"]), tuple(classes), origin, hosts)


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is no number of something")
    return value


def _facts(manifest: Manifest) -> dict[str, Any]:
    ragged = any(column.ragged for column in manifest.columns.values())
    return {
        "ddlf_data": FORMAT if ragged else 1,
        "version": manifest.version,
        "columns": {
            name: [column.dtype, list(column.shape), *["ragged"] * column.ragged]
            for name, column in manifest.columns.items()
        },
        "classes": list(manifest.classes),
        **({"origin": manifest.origin} if manifest.origin else {}),
        **({"hosts": manifest.hosts} if manifest.hosts else {}),
        "files": [[file.name, file.samples, file.nbytes, file.sha256, file.first] for file in manifest.files],
    }


def _spelled(facts: dict[str, Any]) -> bytes:
    """A line for each fact, and one for each file, so that people can read it."""
    lines = []
    for name, value in facts.items():
        text = json.dumps(value)
        if name == "files":  # all of them at once: a hundred thousand calls would take seconds
            text = text.replace("], [", "],\n[")
        lines.append(f"{json.dumps(name)}: {text}")
    return ("{\n" + ",\n".join(lines) + END).encode()


def _sealed(spelled: bytes) -> bytes:
    """The same with its hash as the last line."""
    return spelled.removesuffix(END.encode()) + f',\n"sha256": "{hashlib.sha256(spelled).hexdigest()}"{END}'.encode()


def _damaged(where: str, what: str) -> DatasetError:
    return DatasetError(f"{where} {what}", hint="bring it back from a copy, or split the data set again")
