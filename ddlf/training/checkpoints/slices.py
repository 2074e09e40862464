"""Slices of a checkpoint: files with parts of the model, written by workers or the master. Runs on both.

A slice contains flat parts of arrays. The name of a part says where it belongs: ``"weights 1024 0002 dense/kernel"``
are values of ``0002 dense/kernel`` in the group ``weights``, starting at value 1,024. So readers need not know the
number of slices or their limits. The manifest lists the arrays that were cut, with type and shape, as ``sliced``. All
other arrays are in one slice as a whole.

Before a worker writes, it checks that it sees the run's folder: ``owner.json`` there names the session of the writer.
If it sees another session or none, the master writes the worker's slice. A slice is written under a temporary name. The
master renames it, and thereby decides which of two attempts counts.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from ddlf.errors import CheckpointCorrupt, CheckpointError
from ddlf.training.checkpoints import tensors
from ddlf.training.checkpoints.durable import EARLIER, OWNER, damaged, in_words, sync, unseal

Arrays = dict[str, dict[str, tensors.Array]]
"""Group -> name -> array."""
WEIGHTS, OUTER, PUSHED = "weights", "state_outer", "state_push"
"""Groups of a checkpoint: the weights; the outer optimizer's state; and the rows of the push rules."""


def slice_name(number: int) -> str:
    """Return the file name of a slice of a checkpoint, numbered from 0."""
    return f"slice_{number + 1:04d}.safetensors"


def slice_number(name: str) -> int:
    """Return the number, from 0, of the slice with a file name that ``slice_name`` made."""
    return int(Path(name).stem.removeprefix("slice_")) - 1


def part_name(group: str, begin: int, name: str) -> str:
    """Return the name that a part of an array has in a slice's file. It says where the part belongs."""
    return f"{group} {begin} {name}"


def read_part(arrays: Mapping[str, tensors.Array], name: str, length: int) -> tensors.Array:
    """Return a part of an array, which has one dimension, from the arrays of a slice.

    Raises:
        CheckpointCorrupt: It is missing, or has another length.
    """
    array = arrays.get(name)
    if array is None or array.shape != (length,):
        size = "nothing" if array is None else f"{array.dtype} {array.shape}"
        raise damaged(Path("a slice of the checkpoint"), f"{length:,} values of {name!r}", size)
    return array


@dataclass(frozen=True, slots=True)
class Identity:
    """The training and the round of a checkpoint. Each of its slices names them, as proof that it belongs to it.

    Args:
        run: Name of the training.
        round: Number of completed rounds.
    """

    run: str
    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Where a worker or the master writes a slice.

    Args:
        folder: Folder of the checkpoints.
        session: Session of the writer, which the folder must name.
        file: Temporary file of the slice.
        name: Final name of the file, beside it.
        identity: The training and the round that the slice belongs to.
    """

    folder: Path
    session: str
    file: Path
    name: str
    identity: Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceFile:
    """The file of a slice, as the manifest lists it.

    Args:
        name: Final name of the file.
        bytes: Its size.
        sha256: Its hash.
        arrays: Names of its arrays, in their order.
        by: Number of the worker that wrote it; 0 for the master.
    """

    name: str
    bytes: int
    sha256: str
    arrays: Sequence[str]
    by: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NotWritten:
    """The answer of a worker that has not written its slice.

    Args:
        by: Number of the worker.
        reason: Why it has not.
        visible: Whether it sees the folder of the checkpoints.
    """

    by: int
    reason: str
    visible: bool


Result = TypeVar("Result")
Facts = TypeVar("Facts")
"""Facts about the content of a slice that the manifest does not list."""
Written = tuple[SliceFile | NotWritten, Facts]
"""The answer of ``write_if_seen``, and the facts."""
WriteOnWorker = Callable[[Destination], Awaitable[Written[Facts] | None]]
"""Has a worker write its slice; returns None if no worker answers."""
BringToMaster = Callable[[], Awaitable[tuple[dict[str, tensors.Array], Facts]]]
"""Brings the arrays of a slice to the master, by ``part_name``, and the same facts."""


def is_seen(folder: Path, session: str) -> bool:
    """Return whether this machine sees the same folder of checkpoints as the master.

    It must name the same session of the writer, and belong to the same user.
    """
    try:
        owner = unseal((folder / OWNER).read_bytes(), folder / OWNER)
        return owner.get("session") == session and folder.stat().st_uid == os.geteuid()
    except (CheckpointError, OSError):
        return False


def write(destination: Destination, arrays: Mapping[str, tensors.Array], by: int = 0) -> SliceFile:
    """Write a slice to the disk. After the return, it survives a power cut. This blocks until the disk has finished.

    Args:
        destination: Destination, from ``Slices.destination``.
        arrays: Arrays by ``part_name``. They must not change meanwhile.
        by: Number of this worker; 0 for the master.

    Raises:
        CheckpointError: It cannot be written.
    """
    path, plain, identity = destination.file, tensors.plain(arrays), destination.identity
    try:
        tensors.write(plain, path, {"run": identity.run, "round": str(identity.round)})
        sync(path)
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = path.stat().st_size
        return SliceFile(name=destination.name, bytes=size, sha256=digest, arrays=list(plain), by=by)
    except OSError as error:
        need = sum(array.nbytes for array in plain.values())
        raise in_words(error, path.parent, "write a slice of a checkpoint in", need=need, unharmed=EARLIER) from error


def write_if_seen(destination: Destination, arrays: Mapping[str, tensors.Array], by: int) -> SliceFile | NotWritten:
    """Write a slice on a worker with number ``by``, like ``write``, if it sees the folder of the checkpoints."""
    if not is_seen(destination.folder, destination.session):
        return not_seen(destination, by)
    try:
        return write(destination, arrays, by)
    except CheckpointError as error:
        return NotWritten(by=by, reason=error.message, visible=True)


def not_seen(destination: Destination, by: int) -> NotWritten:
    """Return the answer of a worker with number ``by`` that does not see the folder of the checkpoints."""
    return NotWritten(by=by, reason=f"there is no {destination.folder} of this run here", visible=False)


def foreign_slice_error(path: Path, arrays: Sequence[str], identity: Identity) -> CheckpointCorrupt | None:
    """Return the error for a slice of another run, round or cut; None if it belongs to this one.

    Args:
        path: The file.
        arrays: The names of its arrays in the manifest.
        identity: The training and the round that it should belong to.
    """
    try:
        with open(path, "rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(min(length, tensors.MAX_HEADER_BYTES)))
        facts = header.pop("__metadata__")
        run, number = facts["run"], facts["round"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if (run, number) == (identity.run, str(identity.round)):
        if sorted(header) == sorted(arrays):
            return None
        listed, present = f"{len(arrays)} arrays that the manifest names", f"{len(header)} arrays"
        text = f"{path} has other arrays than the manifest names: it is a slice of another worker or of another cut"
        return damaged(path, listed, present, text=text)
    actual = f"round {number} of this run" if run == identity.run else f"round {number} of another run, {run!s:.32}"
    return damaged(
        path,
        f"a slice of run {identity.run} after round {identity.round}",
        f"one of {actual}",
        text=f"{path} is a slice of {actual}, and not of round {identity.round} of run {identity.run}",
    )


def assembled(
    contents: Iterable[tuple[Path, Mapping[str, tensors.Array]]],
    sliced: Mapping[str, Sequence[tuple[str, str, Sequence[int]]]],
    arrays: Mapping[str, Mapping[str, tensors.Array]],
    manifest: Path,
) -> Arrays:
    """Return all arrays of a checkpoint, put together from the parts in its slices.

    Args:
        contents: File and arrays of each slice.
        sliced: For each group that was cut, its arrays in order: name, type and shape.
        arrays: Arrays that are in no slice.
        manifest: File with this list, for errors.

    Raises:
        CheckpointCorrupt: A part is missing, occurs twice, or does not fit.
    """
    complete: Arrays = {group: dict(parts_of_slice) for group, parts_of_slice in arrays.items()}
    for group, listed in sliced.items():
        unsliced = complete.get(group, {})
        complete[group] = {
            name: unsliced[name] if name in unsliced else np.empty(shape, tensors.dtype_of(kind))
            for name, kind, shape in listed
        }
    missing = {
        (group, name): complete[group][name].size
        for group, listed in sliced.items()
        for name, _, _ in listed
        if name not in arrays.get(group, {})
    }
    spans: dict[tuple[str, str], list[tuple[int, int]]] = {key: [] for key in missing}
    for path, parts_of_slice in contents:
        for key, values in parts_of_slice.items():
            group, begin, name = (*key.split(" ", 2), "", "")[:3]
            if (group, name) not in spans:
                if group in sliced or begin != "0" or not name:
                    raise damaged(path, "parts of arrays that the manifest names", repr(key))
                complete.setdefault(group, {})[name] = values
                continue
            into, low = complete[group][name], int(begin) if begin.isdecimal() else -1
            if low < 0 or values.ndim != 1 or values.dtype != into.dtype or low + values.size > into.size:
                raise damaged(path, f"a part of {into.dtype} {into.shape}", f"{values.dtype} {values.shape} at {begin}")
            into.reshape(-1)[low : low + values.size] = values
            spans[group, name].append((low, low + values.size))
    for (group, name), parts in spans.items():
        ends = [0, *(end for _, end in sorted(parts))]
        if [begin for begin, _ in sorted(parts)] != ends[:-1] or ends[-1] != missing[group, name]:
            raise damaged(manifest, f"slices with each value of {name!r} once", f"values {sorted(parts)[:4]}")
    return complete


class Slices:
    """The slices (files with parts of the model) of one checkpoint, on the master.

    Args:
        root: Folder of the checkpoints.
        session: Session of its writer.
        folder: Folder in which the checkpoint is being written.
        final: Its name when it is complete.
        identity: The training and the round of the checkpoint.

    Attributes:
        files: The files of the written slices, by name.
        sliced: Arrays that were cut, as in ``assembled``.
        arrays: Small arrays by group and name, which are written with the other files.
        left: For each slot with state in slices, the length of each group.
        through: Workers whose slices the master has written, and the reason; empty if they do not see the folder.
        began: Time when the checkpoint was begun, on the clock of its writer.
        manifest: SHA-256 of the manifest of a stored checkpoint.
    """

    def __init__(self, root: Path, session: str, folder: Path, final: Path, identity: Identity) -> None:
        self.root, self.session, self.folder, self.final, self.identity = root, session, folder, final, identity
        self.files: list[SliceFile] = []
        self.sliced: dict[str, list[tuple[str, str, list[int]]]] = {}
        self.arrays: Arrays = {}
        self.left: list[dict[str, int]] = []
        self.through: dict[int, str] = {}
        self.began = 0.0
        self.manifest = ""
        self._tried = 0

    @property
    def by_number(self) -> dict[int, SliceFile]:
        """The files by number of the slice. Numbers may be missing: a slot's state can be lost or not exist yet."""
        return {slice_number(file.name): file for file in self.files}

    def destination(self, number: int) -> Destination:
        """Return a new destination for a slice, numbered from 0."""
        self._tried += 1
        return Destination(
            folder=self.root,
            session=self.session,
            file=self.folder / f".slice-{self._tried:04d}",
            name=slice_name(number),
            identity=self.identity,
        )

    async def write_one(
        self, number: int, write_on_worker: WriteOnWorker[Facts], bring_to_master: BringToMaster[Facts]
    ) -> Facts:
        """Write one slice, on a worker or on the master. The file is the same in both cases.

        Args:
            number: The slice, from 0.
            write_on_worker: Has a worker write the slice.
            bring_to_master: Brings the slice's arrays to the master, if the worker cannot see or write the folder.

        Returns:
            The facts about the content of the slice.

        Raises:
            CheckpointError: The slice cannot be written.
        """
        destination = self.destination(number)
        match await write_on_worker(destination):
            case SliceFile() as file, facts:
                pass
            case answer:
                if answer is not None and isinstance(failure := answer[0], NotWritten):
                    self.through[failure.by] = failure.reason if failure.visible else ""
                arrays, facts = await bring_to_master()
                if not arrays:
                    return facts
                destination = self.destination(number)
                file = await asyncio.to_thread(write, destination, arrays)
        await asyncio.to_thread(self.add, destination, file)
        return facts

    def add(self, destination: Destination, file: SliceFile) -> None:
        """Add a written slice to the checkpoint, and give it its final name.

        Args:
            destination: Where it was written.
            file: Result of ``write``.

        Raises:
            CheckpointError: The file is missing or has another size.
        """
        begun = destination.file
        try:
            size = begun.stat().st_size
            if size != file.bytes:
                raise CheckpointError(f"{begun} has {size:,} bytes here, and {file.bytes:,} where it was written")
            os.rename(begun, self.folder / destination.name)
        except OSError as error:
            raise in_words(error, self.folder, "write a slice of a checkpoint in", unharmed=EARLIER) from error
        self.files = sorted([*self.files, replace(file, name=destination.name)], key=lambda file: file.name)

    def clear(self) -> None:
        """Remove all slices that were written and start again, because workers have other ranges now."""
        for file in self.files:
            (self.folder / file.name).unlink(missing_ok=True)
        self.files = []

    def drop(self) -> None:
        """Remove the files of a checkpoint that will not be completed."""
        if self.folder != self.final:
            shutil.rmtree(self.folder, ignore_errors=True)

    def read(self) -> Arrays:
        """Return the arrays of all slices, put together again, from the temporary or the final folder.

        Raises:
            CheckpointCorrupt: A slice is missing or damaged.
        """
        try:
            return self._read(self.folder)
        except CheckpointCorrupt:
            return self._read(self.final)  # it was completed meanwhile

    def read_one(self, number: int) -> dict[str, tensors.Array]:
        """Return the arrays of one slice, numbered from 0.

        Raises:
            CheckpointCorrupt: The slice is missing or damaged.
        """
        return self._with_slice(number, read)

    def look_at(self, number: int) -> None:
        """Check every byte of a slice, numbered from 0, like ``read_one``, without keeping it in memory."""
        self._with_slice(number, look_at)

    def _with_slice(self, number: int, do: Callable[[Path, SliceFile, Identity], Result]) -> Result:
        name = slice_name(number)
        file = next((file for file in self.files if file.name == name), None)
        if file is None:
            raise damaged(self.final / name, "a slice", "nothing", text=f"{self.final} has no {name}")
        try:
            return do(self.folder / name, file, self.identity)
        except CheckpointCorrupt:
            return do(self.final / name, file, self.identity)  # it was completed meanwhile

    def _read(self, folder: Path) -> Arrays:
        contents = ((folder / file.name, read(folder / file.name, file, self.identity)) for file in self.files)
        return assembled(contents, self.sliced, self.arrays, folder)


def read(path: Path, file: SliceFile, identity: Identity) -> dict[str, tensors.Array]:
    """Return the arrays in a slice's file, after checking every byte.

    Args:
        path: The file.
        file: Its entry in the manifest.
        identity: The training and the round that it must belong to.

    Raises:
        CheckpointCorrupt: The slice is missing, damaged, or belongs to another run.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise damaged(path, "a file", "nothing", text=f"{path} is missing") from error
    _compare(path, file, identity, len(data), hashlib.sha256(data).hexdigest())
    return tensors.read(data, path)


def look_at(path: Path, file: SliceFile, identity: Identity) -> None:
    """Check every byte of a slice's file, like ``read``, without keeping it in memory."""
    try:
        with open(path, "rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        size = path.stat().st_size
    except OSError as error:
        raise damaged(path, "a file", "nothing", text=f"{path} is missing") from error
    _compare(path, file, identity, size, digest)


def _compare(path: Path, file: SliceFile, identity: Identity, size: int, digest: str) -> None:
    if digest == file.sha256:
        return
    if error := foreign_slice_error(path, file.arrays, identity):
        raise error
    if size != file.bytes:
        raise damaged(path, f"{file.bytes:,} bytes", f"{size:,} bytes")
    raise damaged(path, f"SHA-256 {file.sha256}", f"SHA-256 {digest}")
