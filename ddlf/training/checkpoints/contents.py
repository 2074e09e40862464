"""Contents of a checkpoint, and its manifest. Reading checks every byte against a SHA-256. Runs on the master."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from ddlf.errors import CheckpointCorrupt, CheckpointError
from ddlf.events.record import RoundRecord
from ddlf.training.checkpoints import tensors
from ddlf.training.checkpoints.durable import MANIFEST, MAX_SEALED_BYTES, damaged, explained, unseal
from ddlf.training.checkpoints.journal import Extent
from ddlf.training.checkpoints.slices import Identity, SliceFile, Slices, foreign_slice_error
from ddlf.version import __version__

FORMAT = 3  # 1 had all records among the facts, and other names for slot states and algorithm states; 3 has slices
WHOLE = 2  # checkpoints without slices keep format 2
MAX_DEPTH = 100  # of nested facts, far below the limit of the JSON parser
REPLACED = ".replaced"

ROUND = re.compile(r"round-(\d{6,})")
_GROUP = re.compile(r"[a-z][a-z0-9_]{0,63}")
_FILE = re.compile(_GROUP.pattern + r"\.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """The state of a training after a round, as a checkpoint contains it.

    Args:
        round: Number of completed rounds.
        arrays: File -> name -> array, such as ``{"weights": {"dense/kernel": ...}, "ledger": {...}}``. Types, shapes,
            bits and order are preserved. A big-endian array comes back little-endian with the same values.
        facts: Everything else that is needed to resume: settings, seed, versions. Plain JSON data with text keys.
            Tuples are refused, because JSON would return lists. NaN and infinities are allowed.
        records: Records of the rounds. To save: the records that the folder's journal lacks or that have changed.
            Loaded: all records.
        extent: Part of the journal that belongs to a loaded checkpoint.
        problem: Reason why a loaded checkpoint lacks its records; empty if it has them.
        slices: Slices that workers have written or will read. None for a checkpoint loaded as a whole, whose arrays
            contain everything.
    """

    round: int
    arrays: Mapping[str, Mapping[str, tensors.Array]]
    facts: Mapping[str, Any]
    records: Sequence[RoundRecord] = ()
    extent: Extent = field(default_factory=Extent)
    problem: str = ""
    slices: Slices | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Information about one checkpoint in a folder, for a listing.

    Args:
        name: Name of the checkpoint's folder.
        round: Number of the round; None for leftover files.
        bytes: Size of all its files.
        complete: Whether every byte is as written.
        problem: The damage; empty if complete.
    """

    name: str
    round: int | None
    bytes: int
    complete: bool
    problem: str = ""


class File(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    name: str
    bytes: int
    sha256: str
    arrays: list[str]  # in their order, which the file itself does not preserve


class ManifestSlice(File):
    by: int  # number of the worker that wrote it; 0 for the master

    def file(self) -> SliceFile:
        return SliceFile(**self.model_dump())


class Whole(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    name: str
    type: str
    shape: list[int]


class Manifest(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    format: int
    ddlf: str
    round: int
    epoch: int  # term of the writer
    files: list[File]
    slices: list[ManifestSlice] = []
    sliced: dict[str, list[Whole]] = {}  # arrays that are cut into slices, by group, in their order
    records: Extent = Extent()
    facts: dict[str, Any]

    @property
    def identity(self) -> Identity:
        """The training and the round that every slice of the checkpoint must name."""
        return Identity(str(self.facts.get("training", "")), self.round)

    @property
    def listed(self) -> dict[str, list[tuple[str, str, list[int]]]]:
        """The arrays that are cut into slices (files with parts of the model), in the format of ``Slices.sliced``."""
        return {
            group: [(array.name, array.type, array.shape) for array in arrays] for group, arrays in self.sliced.items()
        }


def manifest_of(checkpoint: Checkpoint, files: list[File], extent: Extent, epoch: int) -> dict[str, Any]:
    """Return the manifest (list of files with sizes and hashes) of a checkpoint whose files are written."""
    begun = checkpoint.slices
    more: dict[str, Any] = {}
    if begun is not None:
        rows = {
            group: [Whole(name=name, type=kind, shape=list(shape)) for name, kind, shape in listed]
            for group, listed in begun.sliced.items()
        }
        more = {"slices": [ManifestSlice(**asdict(file)) for file in begun.files], "sliced": rows}
    manifest = Manifest(
        format=WHOLE if begun is None else FORMAT,
        ddlf=__version__,
        round=checkpoint.round,
        epoch=epoch,
        files=files,
        records=extent,
        facts=dict(checkpoint.facts),
        **more,
    )
    return manifest.model_dump(exclude={"slices", "sliced"} if begun is None else None)


def read_manifest(folder: Path) -> Manifest:
    """Read, check and return the manifest in a checkpoint's folder."""
    file = folder / MANIFEST
    if not folder.is_dir():
        raise CheckpointError(f"no checkpoint {folder}", hint="name a folder like round-000012")
    content = unseal(_read_file(file, limit=MAX_SEALED_BYTES), file)
    version, writer = content.get("format"), content.get("ddlf")
    if type(version) is int and version > FORMAT:
        raise CheckpointError(
            f"{folder} was written by DDLF {writer} in format {version}, this is DDLF {__version__} with format {FORMAT}",
            hint="update DDLF here",
        )
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise damaged(file, f"the entries of format {version}", f"{where}: {first['msg']}") from error
    names = [entry.name for entry in (*manifest.files, *manifest.slices)]
    for name in names:
        if not _FILE.fullmatch(name):
            raise damaged(
                file,
                "names of files beside it",
                repr(name),
                text=f"{file} names a file outside the checkpoint: {name!r}",
            )
    if len(set(names)) < len(names):
        raise damaged(file, "every file once", "one twice")
    called = ROUND.fullmatch(folder.name.removesuffix(REPLACED))
    if called and int(called[1]) != manifest.round:
        raise damaged(folder, f"round {manifest.round}, as its manifest says", f"round {int(called[1])} in its name")
    return manifest


def read_files(folder: Path, *, skip_slices: bool = False) -> tuple[Manifest, dict[str, bytes]]:
    """Return the manifest and the files of a checkpoint, after checking every byte.

    Args:
        folder: Folder of the checkpoint.
        skip_slices: Whether to leave out slices, so that workers can read them.
    """
    with explained(folder, "read"):
        manifest = read_manifest(folder)
        present = {name for name in os.listdir(folder) if not name.startswith(".")} - {MANIFEST}
        for name in sorted(present - {file.name for file in (*manifest.files, *manifest.slices)}):
            raise damaged(folder / name, "no such file", "a file that the manifest does not list")
        contents = {}
        for file in (*manifest.files, *(() if skip_slices else manifest.slices)):
            path = folder / file.name
            try:
                contents[file.name] = _checked(path, file)
            except CheckpointCorrupt as error:
                is_slice = isinstance(file, ManifestSlice)
                other = foreign_slice_error(path, file.arrays, manifest.identity) if is_slice else None
                raise other or error from error
        return manifest, contents


def stored(folder: Path, manifest: Manifest, arrays: Mapping[str, Mapping[str, tensors.Array]]) -> Slices:
    """Return the slices of a stored checkpoint, which workers read when a run resumes.

    Args:
        folder: Folder of the checkpoint.
        manifest: The checkpoint's manifest.
        arrays: The checkpoint's arrays that are not in slices.
    """
    slices = Slices(folder.parent, "", folder, folder, manifest.identity)
    slices.files = [listed.file() for listed in manifest.slices]
    slices.sliced = manifest.listed
    slices.arrays = {group: dict(arrays[group]) for group in slices.sliced if group in arrays}
    slices.manifest = hashlib.sha256(_read_file(folder / MANIFEST, limit=MAX_SEALED_BYTES)).hexdigest()
    return slices


def _checked(path: Path, file: File) -> bytes:
    data = _read_file(path, limit=file.bytes)
    if len(data) != file.bytes:
        raise damaged(path, f"{file.bytes:,} bytes", f"{len(data):,} bytes")
    digest = hashlib.sha256(data).hexdigest()
    if digest != file.sha256:
        raise damaged(path, f"SHA-256 {file.sha256}", f"SHA-256 {digest}")
    return data


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder is itself a checkpoint, whatever its name, rather than a folder of checkpoints."""
    return (path / MANIFEST).exists()


def bytes_in(folder: Path) -> int:
    """Return the size of all files in a folder. Skip files that are removed meanwhile."""
    total = 0
    for path in folder.glob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def _read_file(path: Path, *, limit: int) -> bytes:
    """Return the bytes of a regular file that belongs to a checkpoint.

    Raises:
        CheckpointCorrupt: The file is missing, not a regular file, longer than the limit, or the disk cannot read it.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a pipe could block indefinitely
            raise damaged(path, "a file", "something else")
        if status.st_size > limit:
            raise damaged(path, f"at most {limit:,} bytes", f"{status.st_size:,} bytes")
        return path.read_bytes()
    except FileNotFoundError as error:
        raise damaged(path, "a file", "nothing", text=f"{path} is missing") from error
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise damaged(path, "a file", f"one that the disk cannot read ({error.strerror})") from error


def check(checkpoint: Checkpoint) -> None:
    """Raise an error if a checkpoint cannot store these contents exactly.

    Raises:
        CheckpointError: The round is negative, a group's name is not a file name, or facts are not plain JSON.
    """
    if type(checkpoint.round) is not int or checkpoint.round < 0:
        raise CheckpointError(f"a checkpoint cannot be of round {checkpoint.round!r}")
    for group in checkpoint.arrays:
        if not _GROUP.fullmatch(group):
            raise CheckpointError(
                f"{group!r} cannot name a file of a checkpoint", hint="use small letters, digits and _"
            )
    _check_facts(dict(checkpoint.facts), "facts")


def _check_facts(value: Any, where: str, depth: int = 0) -> None:
    if depth > MAX_DEPTH:
        raise CheckpointError(f"facts are nested more than {MAX_DEPTH} deep, at {where[:60]}...")
    if type(value) is dict:
        for key, inner in value.items():
            if type(key) is not str:
                raise CheckpointError(f"{where} has the key {key!r}, which is not text", hint="use text keys")
            _check_facts(inner, f"{where}[{key!r}]", depth + 1)
    elif type(value) is list:
        for number, inner in enumerate(value):
            _check_facts(inner, f"{where}[{number}]", depth + 1)
    elif value is not None and type(value) not in (bool, int, float, str):
        raise CheckpointError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which JSON does not preserve",
            hint="use numbers, text, lists and dicts, or put it among the arrays",
        )
