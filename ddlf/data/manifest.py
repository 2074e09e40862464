"""The manifest of a data set, the file that lists its columns, its partition files and their hashes. Pure.

A manifest is JSON in one fixed layout. It ends with its own SHA-256, so every byte is checked. File names have the form
``v0001/00042.safetensors``, so a manifest cannot name other files.

Each sample has an id: its number in the order of the files when the data set was first split. An id never changes. A
file holds samples with consecutive ids.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ddlf.errors import DatasetError
from ddlf.events.record import size

FORMAT = 2
"""Format of manifest and files if a column is ragged; otherwise it is 1. A later DDLF reads earlier formats."""
NAME = "manifest.json"
BEFORE = re.compile(r"manifest-\d{4,9}\.json")
"""Name of the manifest of the previous version. It is kept beside the newest manifest, for runs that began with the
previous version."""
FILE = re.compile(r"v\d{4,9}/\d{5,9}\.safetensors")
KINDS = "biuf"
"""Kinds of numbers in NumPy and safetensors: booleans, signed and unsigned integers, floating-point numbers."""
MAX_CLASSES = 100_000
END = "\n}\n"


@dataclass(frozen=True, slots=True)
class Column:
    """The description of one column of a data set, an array with a row for each sample.

    Args:
        dtype: Type of the values, by NumPy's name, such as ``"uint8"``.
        shape: Shape of a row; ``()`` for a single value.
        ragged: Whether rows may be shorter along their first axis. ``shape`` is then the shape of the longest row.
    """

    dtype: str
    shape: tuple[int, ...]
    ragged: bool = False

    @property
    def row_bytes(self) -> int:
        """The bytes of one row of this column; if rows have different lengths, of the longest one."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class PartitionFile:
    """The entry of the manifest for one partition file, which holds a part of a data set's samples.

    Args:
        name: Path below the location.
        samples: Number of samples, > 0.
        nbytes: Size of the file.
        sha256: Hash of the whole file, 64 hex digits.
        first: Id of the first sample. The ids of the other samples follow it.
    """

    name: str
    samples: int
    nbytes: int
    sha256: str
    first: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content list of one version of a data set. A new version has the same samples in other files.

    Args:
        columns: The columns by name, in the order of the source.
        files: The files in the order of their ids.
        version: Number of the version, from 1.
        classes: Names of classes, by their label; empty if the source has none.
        origin: ``content`` of the first version, which was split from a source; empty if this is the first version.
        hosts: Number of machines that have parts of the data set on their own disks; 0 if each machine can reach all of
            it.
    """

    columns: Mapping[str, Column]
    files: Sequence[PartitionFile]
    version: int = 1
    classes: Sequence[str] = field(default=())
    origin: str = ""
    hosts: int = 0

    @property
    def samples(self) -> int:
        """Total number of samples."""
        return self.files[-1].first + self.files[-1].samples

    @property
    def nbytes(self) -> int:
        """Total bytes of all files."""
        return sum(file.nbytes for file in self.files)

    @property
    def row_bytes(self) -> int:
        """The bytes of one sample in memory, with all its columns."""
        return sum(column.row_bytes for column in self.columns.values())

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Number of samples in each file."""
        return np.array([file.samples for file in self.files], np.int64)

    @property
    def identity(self) -> str:
        """A hash of columns, samples and ids, 16 hex digits. All versions of a data set have the same one. Nodes
        compare it, to check that they train on the same data.
        """
        return self.origin or self.content

    @property
    def content(self) -> str:
        """A hash of this version with its files, 16 hex digits."""
        return hashlib.sha256(_spelled(_facts(self))).hexdigest()[:16]

    def lines(self) -> Iterator[str]:
        """Yield lines for people about columns, samples and files."""
        for name, column in self.columns.items():
            most = "up to " * column.ragged
            yield f"column    {name}: {column.dtype}, {most}{' x '.join(map(str, column.shape)) or 'a number'}"
        if self.classes:
            shown = ", ".join(self.classes[:10])
            yield f"classes   {len(self.classes):,}: {shown}{', ...' if len(self.classes) > 10 else ''}"
        sizes = self.sizes
        samples = f"{sizes.max():,}" if sizes.min() == sizes.max() else f"{sizes.min():,} to {sizes.max():,}"
        yield f"samples   {self.samples:,}, {size(self.nbytes)}"
        yield f"files     {len(self.files):,} of {samples} samples"
        if self.hosts:
            yield f"machines  {self.hosts:,}, each with some of them"

    def spelled(self) -> bytes:
        """Return the bytes to write to the manifest file. Equal manifests have equal bytes."""
        return _sealed(_spelled(_facts(self)))


def name_of(version: int) -> str:
    """Return the file name of the manifest of an older version."""
    return f"manifest-{version:04}.json"


def read(data: bytes, where: str) -> Manifest:
    """Return the manifest in the bytes of a file.

    Args:
        data: All bytes of the file.
        where: Name of the file, for errors.

    Raises:
        DatasetError: The file is not a manifest, comes from a newer DDLF, or is damaged.
    """
    try:
        facts = json.loads(data)
    except (ValueError, RecursionError):
        raise _damaged(where, "is empty" if not data else "is no JSON") from None
    if type(facts) is not dict or type(facts.get("ddlf_data")) is not int:
        raise DatasetError(
            f"{where} is not the manifest of a DDLF data set", hint="name a place that ddlf data split has written"
        )
    if facts["ddlf_data"] > FORMAT:
        raise DatasetError(
            f"{where} was written by a newer DDLF (format {facts['ddlf_data']})", hint="install a newer DDLF here"
        )
    facts.pop("sha256", None)
    try:
        manifest = _manifest(facts) if data == _sealed(_spelled(facts)) else None
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise _damaged(where, f"has an impossible entry ({error})") from None
    if manifest is None:
        raise _damaged(where, "is damaged or was edited")
    return manifest


def check_columns(columns: Mapping[str, Column]) -> None:
    """Refuse columns that partition files cannot hold.

    Raises:
        ValueError: The message names the column and the problem.
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
    for name, (dtype, shape, *flags) in facts["columns"].items():
        if flags not in ([], ["ragged"]):
            raise ValueError(f"column {name!r} is {flags}")
        columns[name] = Column(dtype, tuple(map(_count, shape)), bool(flags))
    check_columns(columns)
    files, first = [], 0
    for name, samples, nbytes, sha256, start in facts["files"]:
        file = PartitionFile(name, _count(samples), _count(nbytes), sha256, _count(start))
        if not FILE.fullmatch(name):
            raise ValueError(f"it names {name!r}, which is not the name of a partition file")
        if start != first or samples < 1 or not re.fullmatch("[0-9a-f]{64}", sha256):
            raise ValueError(f"ids or hash of {name}")
        first += samples
        files.append(file)
    if not files or len({file.name for file in files}) != len(files):
        raise ValueError("it names no file, or a file twice")
    classes = facts["classes"]
    origin = facts.get("origin", "")
    if "origin" in facts and not re.fullmatch("[0-9a-f]{16}", origin):
        raise ValueError(f"{origin!r} is not a valid origin")
    hosts = facts.get("hosts", 0)
    if "hosts" in facts and not _count(hosts) > 0:
        raise ValueError("hosts")
    if type(classes) is not list or not all(type(name) is str for name in classes) or len(classes) > MAX_CLASSES:
        raise ValueError("classes")
    return Manifest(columns, files, _count(facts["version"]), tuple(classes), origin, hosts)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is not a valid count")
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
    """Return a manifest as JSON with one line for each fact and each file, so that people can read it."""
    lines = []
    for name, value in facts.items():
        text = json.dumps(value)
        if name == "files":  # one call for all files, because a hundred thousand calls would take seconds
            text = text.replace("], [", "],\n[")
        lines.append(f"{json.dumps(name)}: {text}")
    return ("{\n" + ",\n".join(lines) + END).encode()


def _sealed(spelled: bytes) -> bytes:
    """Add the hash of a manifest's JSON as its last line, so that damage is found."""
    return spelled.removesuffix(END.encode()) + f',\n"sha256": "{hashlib.sha256(spelled).hexdigest()}"{END}'.encode()


def _damaged(where: str, problem: str) -> DatasetError:
    return DatasetError(f"{where} {problem}", hint="bring it back from a copy, or split the data set again")
