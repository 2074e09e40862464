"""Checkpoints: the whole state of a training, in a folder that at any moment holds a complete one. Runs on the master.

Layout::

    DIR/owner.json                             who may write (ddlf.checkpoints.ownership)
    DIR/records.jsonl                          what rounds were like, for all checkpoints together (ddlf.checkpoints.journal)
    DIR/round-000012/manifest.json             round, facts, size, SHA-256 and array names of every other file, share of the records; sealed
                     weights.safetensors       one file for each group of arrays
                     slots_optimizer.safetensors
    DIR/round-000012.replaced/                 the one before of the same round, for moments only
    DIR/.writing-..., DIR/.removing-...        not complete: left by a writer that was killed, removed by the next one

Rules:
    A checkpoint is written under another name, every file and the folder synced, then renamed: it exists completely or not.
    An old one is removed after the new one is on the disk, and under another name, so that half of it is never read.
    The newest is the one with the highest number. Times of files decide nothing.
    Nothing is believed: every byte is under a SHA-256, and the manifest under its own.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from ddlf.checkpoints import journal, tensors
from ddlf.checkpoints.durable import (
    MAX_SEALED_BYTES,
    damaged,
    explained,
    free_bytes,
    no_space,
    seal,
    sync,
    unseal,
    write_new,
)
from ddlf.checkpoints.journal import JOURNAL, Extent, Journal
from ddlf.checkpoints.ownership import Ownership
from ddlf.errors import CheckpointCorrupt, CheckpointError, ConfigError
from ddlf.record import RoundRecord
from ddlf.version import __version__

FORMAT = 2  # 1 had all records among the facts, and other names for what slots and the algorithm left
MAX_DEPTH = 100  # of facts: far from where the JSON parser gives up
MANIFEST = "manifest.json"
REPLACED = ".replaced"
WRITING, REMOVING = ".writing-", ".removing-"

_ROUND = re.compile(r"round-(\d{6,})")
_GROUP = re.compile(r"[a-z][a-z0-9_]{0,63}")
_FILE = re.compile(_GROUP.pattern + r"\.safetensors")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """The state of a training after a round.

    Args:
        round: Rounds completed.
        arrays: File -> name -> array, as ``{"weights": {"dense/kernel": ...}, "ledger": {...}}``. Types, shapes, bits and order come back
            the same; a big-endian array comes back little-endian with the same values.
        facts: Whatever else is needed to go on: settings, seed, versions. Plain JSON data with text keys; tuples are refused, since they
            would come back as lists. NaN and infinities are allowed.
        records: What rounds were like. To be saved: those that the folder's journal does not have yet, or not like this. Loaded: all of them.
        extent: Of a loaded one, how much of the journal belongs to it.
        problem: Of a loaded one, why it has no records although it should; empty when it has.
    """

    round: int
    arrays: Mapping[str, Mapping[str, tensors.Array]]
    facts: Mapping[str, Any]
    records: Sequence[RoundRecord] = ()
    extent: Extent = field(default_factory=Extent)
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line in the listing of a folder.

    Args:
        name: Of the checkpoint's folder.
        round: Its number; None for leftovers.
        bytes: Of all its files.
        complete: Whether every byte is as it was written.
        problem: What is wrong; empty when complete.
    """

    name: str
    round: int | None
    bytes: int
    complete: bool
    problem: str = ""


class _File(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    name: str
    bytes: int
    sha256: str
    arrays: list[str]  # in their order, which the file itself does not keep


class _Manifest(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    format: int
    ddlf: str
    round: int
    epoch: int  # of the writer
    files: list[_File]
    records: Extent = Extent()
    facts: dict[str, Any]


class CheckpointFolder:
    """A folder of checkpoints. Everybody may read; to write, become the one writer with ``open``.

    Args:
        path: The folder. ``open`` makes it.
        keep: How many checkpoints to keep.

    Attributes:
        journal: What rounds were like, beside the checkpoints.

    Raises:
        ConfigError: ``keep`` is below 1.
    """

    def __init__(self, path: str | os.PathLike[str], *, keep: int = 3) -> None:
        if keep < 1:
            raise ConfigError(f"keep must be at least 1, not {keep}")
        self.path = Path(path).absolute()
        self.keep = keep
        self.journal = Journal(self.path / JOURNAL)
        self._ownership = Ownership(self.path)

    @property
    def epoch(self) -> int:
        """Of this writer: it grows with every writer of the folder, and never goes back. 0 when not open."""
        return self._ownership.mine.epoch if self._ownership.mine else 0

    # Writing

    def open(self, holder: str, *, takeover: bool = False) -> None:
        """Become the one writer, and remove what killed ones have left.

        Args:
            holder: What to call this job, for people: its command line or its name.
            takeover: Also when another writer lives, or may live on another machine. It can write nothing from then on.

        Raises:
            LeaseError: Another writer has the folder.
            CheckpointError: The folder cannot be made or written to.
            ConfigError: It is itself a checkpoint.
        """
        if is_checkpoint(self.path):
            raise ConfigError(
                f"{self.path} is a checkpoint, not a folder of checkpoints",
                hint=f"name another one, as {self.path.parent}",
            )
        with explained(self.path, "use the checkpoint folder"):
            if not self.path.is_dir():
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
                sync(self.path.parent)
            self._ownership.claim(holder, takeover=takeover, epoch_above=self._highest_epoch)
            with self._ownership.held():
                self._clean()

    def go_on_from(self, checkpoint: Checkpoint) -> None:
        """Write the next rounds' records behind those of a checkpoint that was loaded from here."""
        with explained(self.path, "read"):
            if checkpoint.problem and self.journal.file.exists():
                os.replace(self.journal.file, f"{self.journal.file}.damaged")
            self.journal.go_on_after(checkpoint.extent)

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint; when this returns, it survives a power cut. Takes the place of one of the same round.

        Blocks for as long as the disk takes: call it from a thread, one call at a time. Arrays must not change meanwhile.

        Returns:
            Its folder.

        Raises:
            CheckpointError: It cannot be written: no space, not permitted, or it holds what cannot be stored.
            LeaseError: The job was taken over by another master.

        On failure:
            Nothing of it stays, the checkpoints before are whole, and ``save`` may be called again.
        """
        _check(checkpoint)
        groups = {group: tensors.plain(arrays) for group, arrays in checkpoint.arrays.items()}
        lines = journal.spelled(checkpoint.records)
        need = sum(array.nbytes for arrays in groups.values() for array in arrays.values()) + sum(map(len, lines))
        name = f"round-{checkpoint.round:06d}"
        temporary = self.path / f"{WRITING}{name}-{secrets.token_hex(4)}"
        with explained(self.path, "write a checkpoint in", need=need):
            self._ownership.check()
            self._refuse_older(checkpoint.round)
            free = free_bytes(self.path)
            if free is not None and free < need:
                raise no_space(self.path, need)
            try:
                temporary.mkdir(mode=0o700)
                self._write(temporary, checkpoint, groups, self.journal.with_lines(lines))
                with self._ownership.held():
                    self.journal.append(lines)
                    self._put(temporary, self.path / name)
                    self._prune(checkpoint.round)
            except OSError:
                self._ownership.check()  # a new owner removes what the old one was writing: that is not a fault of the disk
                raise
            finally:
                shutil.rmtree(temporary, ignore_errors=True)  # not there any more when all went well
        return self.path / name

    def close(self) -> None:
        """Let the next writer have the folder at once. Does nothing when another one has it already."""
        with explained(self.path, "close the checkpoint folder"):
            self._ownership.release()

    def _write(
        self, folder: Path, checkpoint: Checkpoint, groups: dict[str, dict[str, tensors.Array]], extent: Extent
    ) -> None:
        files = []
        for group, arrays in groups.items():
            path = folder / f"{group}.safetensors"
            tensors.write(arrays, path)
            sync(path)
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            files.append(_File(name=path.name, bytes=path.stat().st_size, sha256=digest, arrays=list(arrays)))
        manifest = _Manifest(
            format=FORMAT,
            ddlf=__version__,
            round=checkpoint.round,
            epoch=self.epoch,
            files=files,
            records=extent,
            facts=dict(checkpoint.facts),
        )
        write_new(folder / MANIFEST, seal(manifest.model_dump()))
        sync(folder)

    def _put(self, temporary: Path, target: Path) -> None:
        """Give a written checkpoint its name. Between any two steps, one of its round is there if one was before."""
        replaced = target.with_name(target.name + REPLACED)
        if target.exists():
            if replaced.exists():
                self._remove(replaced.name)
            os.rename(target, replaced)
        os.rename(temporary, target)
        sync(self.path)

    def _prune(self, newest: int) -> None:
        """Remove all but the last ones. What fails here fails no checkpoint: the next one tries again."""
        names = [name for number, name in self._candidates() if number <= newest]
        kept = [name for name in names if not name.endswith(REPLACED)][: self.keep]
        for name in names:
            if name not in kept:
                try:
                    self._remove(name)
                except OSError as error:
                    log.warning("cannot remove the old checkpoint %s: %s", self.path / name, error)

    def _remove(self, name: str) -> None:
        removing = self.path / f"{REMOVING}{name}-{secrets.token_hex(4)}"
        os.rename(self.path / name, removing)
        shutil.rmtree(removing)

    def _clean(self) -> None:
        """Finish what killed writers have left."""
        for name in os.listdir(self.path):
            if name.startswith((WRITING, REMOVING)):
                shutil.rmtree(self.path / name, ignore_errors=True)
            elif name.startswith(".owner.json-"):
                (self.path / name).unlink(missing_ok=True)
            elif name.endswith(REPLACED) and _ROUND.fullmatch(name.removesuffix(REPLACED)):
                if (self.path / name.removesuffix(REPLACED)).exists():
                    self._remove(name)
                else:
                    os.rename(self.path / name, self.path / name.removesuffix(REPLACED))
        sync(self.path)

    def _refuse_older(self, number: int) -> None:
        """A later run would go on from the newest checkpoint, so one before it must not be written unseen."""
        for newer, name in self._candidates():
            if newer <= number:
                return
            with contextlib.suppress(CheckpointCorrupt):
                self._read(self.path / name)
                raise CheckpointError(
                    f"{self.path / name} is of a later round than {number}, which is to be saved",
                    hint="use another folder, or remove the later checkpoints",
                )

    def _highest_epoch(self) -> int:
        """The highest one that a checkpoint was written in."""
        epochs = [0]
        for _, name in self._candidates():
            with contextlib.suppress(CheckpointError):
                epochs.append(self._manifest(self.path / name).epoch)
        return max(epochs)

    # Reading

    def newest(self, *, required: bool = False, report: Callable[[str], None] = log.warning) -> Checkpoint | None:
        """The newest complete checkpoint. Damaged newer ones are reported and passed over.

        Args:
            required: Whether having none is an error.
            report: Is called with a sentence for each that is passed over.

        Returns:
            None when no checkpoint was ever completed here, or the folder does not exist.

        Raises:
            CheckpointError: There are checkpoints, but no complete one; or the newest was written by a newer DDLF; or reading failed.
        """
        problems: list[CheckpointCorrupt] = []
        candidates = [name for _, name in self._candidates()]
        while candidates:
            name = candidates.pop(0)
            try:
                found = self.load(name, report=report)
            except CheckpointError as error:
                if not (self.path / name).exists():  # a writer has just removed it, so there are newer ones
                    return self.newest(required=required, report=report)
                if not isinstance(error, CheckpointCorrupt):
                    raise
                problems.append(error)
            else:
                for problem in problems:
                    report(f"{problem.message}; {name} is used instead")
                return found
        if problems:
            raise CheckpointError(
                f"no complete checkpoint in {self.path}; found {len(problems)} damaged, the newest because {problems[0].message}",
                hint="use a copy of it, or another folder to begin anew",
            )
        if required:
            if not self.path.is_dir():
                raise CheckpointError(f"there is no folder {self.path}", hint="check its name")
            entries = self.entries()
            also = f"; found {len(entries)} incomplete" if entries else ""
            raise CheckpointError(f"no complete checkpoint in {self.path}{also}", hint="check the name of the folder")
        return None

    def load(self, path: str | os.PathLike[str], *, report: Callable[[str], None] = log.warning) -> Checkpoint:
        """One checkpoint.

        Args:
            path: Its folder, absolute or relative to this one, as ``"round-000012"``.
            report: Is called with a sentence when its records are damaged or not there; without them it is used all the same.

        Raises:
            CheckpointCorrupt: It is damaged; names the file.
            CheckpointError: It does not exist, cannot be read, or was written by a newer DDLF.
        """
        folder = self.path / path
        manifest, contents = self._read(folder)
        arrays = {}
        for file in manifest.files:
            where = folder / file.name
            found = tensors.read(contents.pop(file.name), where)  # popped: its bytes are freed
            if found.keys() != set(file.arrays) or len(found) != len(file.arrays):
                raise damaged(where, f"{len(file.arrays)} arrays named in the manifest", f"{len(found)} others")
            arrays[file.name.removesuffix(".safetensors")] = {name: found[name] for name in file.arrays}
        records: Sequence[RoundRecord] = ()
        extent, problem = manifest.records, ""
        try:
            with explained(folder, "read"):
                records = journal.read(folder.parent / JOURNAL, extent)
        except CheckpointError as error:
            extent, problem = Extent(), error.message
            report(f"{problem}; {folder.name} is used without them, so the history begins anew")
        return Checkpoint(
            round=manifest.round, arrays=arrays, facts=manifest.facts, records=records, extent=extent, problem=problem
        )

    def newest_round(self) -> int | None:
        """The highest number of a checkpoint here, whole or not; None when there is none. Reads names only."""
        return max((number for number, _ in self._candidates()), default=None)

    def entries(self) -> list[Entry]:
        """Everything in the folder that is, or would have become, a checkpoint, newest first. Reads and checks every byte."""
        found = []
        for number, name in self._candidates():
            try:
                manifest, _ = self._read(self.path / name)
            except CheckpointError as error:
                found.append(
                    Entry(name=name, round=number, bytes=_weight(self.path / name), complete=False, problem=str(error))
                )
            else:
                total = sum(file.bytes for file in manifest.files)
                found.append(Entry(name=name, round=number, bytes=total, complete=True))
        found += [
            Entry(
                name=name,
                round=None,
                bytes=_weight(self.path / name),
                complete=False,
                problem="its writer was interrupted",
            )
            for name in self._listing()
            if name.startswith((WRITING, REMOVING))
        ]
        return found

    def _listing(self) -> list[str]:
        with explained(self.path, "read the checkpoint folder"):
            try:
                return sorted(os.listdir(self.path))
            except FileNotFoundError:
                return []

    def _candidates(self) -> list[tuple[int, str]]:
        """Number and name of every checkpoint, newest first. One that is being replaced comes after the one that replaces it."""
        found = []
        for name in self._listing():
            match = _ROUND.fullmatch(name.removesuffix(REPLACED))
            if match and match[0] == f"round-{int(match[1]):06d}":
                found.append((int(match[1]), not name.endswith(REPLACED), name))
        return [(number, name) for number, _, name in sorted(found, reverse=True)]

    def _manifest(self, folder: Path) -> _Manifest:
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
            manifest = _Manifest.model_validate(content)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise damaged(file, f"the entries of format {FORMAT}", f"{where}: {first['msg']}") from error
        names = [entry.name for entry in manifest.files]
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
        called = _ROUND.fullmatch(folder.name.removesuffix(REPLACED))
        if called and int(called[1]) != manifest.round:
            raise damaged(
                folder, f"round {manifest.round}, as its manifest says", f"round {int(called[1])} in its name"
            )
        return manifest

    def _read(self, folder: Path) -> tuple[_Manifest, dict[str, bytes]]:
        """A checkpoint's files, after every byte was checked."""
        with explained(folder, "read"):
            manifest = self._manifest(folder)
            present = {name for name in os.listdir(folder) if not name.startswith(".")} - {MANIFEST}
            for name in sorted(present - {file.name for file in manifest.files}):
                raise damaged(folder / name, "no such file", "one that the manifest does not name")
            contents = {}
            for file in manifest.files:
                path = folder / file.name
                data = _read_file(path, limit=file.bytes)
                if len(data) != file.bytes:
                    raise damaged(path, f"{file.bytes:,} bytes", f"{len(data):,} bytes")
                digest = hashlib.sha256(data).hexdigest()
                if digest != file.sha256:
                    raise damaged(path, f"SHA-256 {file.sha256}", f"SHA-256 {digest}")
                contents[file.name] = data
            return manifest, contents


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is itself a checkpoint, under whichever name."""
    return (path / MANIFEST).exists()


def _read_file(path: Path, *, limit: int) -> bytes:
    """The bytes of a regular file.

    Raises:
        CheckpointCorrupt: It is missing, no regular file, longer than the limit, or the disk cannot read it.
    """
    try:
        what = path.stat()
        if not stat.S_ISREG(what.st_mode):  # a pipe would let us wait for ever
            raise damaged(path, "a file", "something else")
        if what.st_size > limit:
            raise damaged(path, f"at most {limit:,} bytes", f"{what.st_size:,} bytes")
        return path.read_bytes()
    except FileNotFoundError as error:
        raise damaged(path, "a file", "nothing", text=f"{path} is missing") from error
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise damaged(path, "a file", f"one that the disk cannot read ({error.strerror})") from error


def _weight(folder: Path) -> int:
    """Bytes of the files in a folder; of those that are still there."""
    total = 0
    for path in folder.glob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def _check(checkpoint: Checkpoint) -> None:
    """Refuse what would not come back the same.

    Raises:
        CheckpointError: The round is negative, a group's name is no file name, or facts are not plain JSON.
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
                raise CheckpointError(f"{where} has the key {key!r}, which is no text", hint="use text keys")
            _check_facts(inner, f"{where}[{key!r}]", depth + 1)
    elif type(value) is list:
        for number, inner in enumerate(value):
            _check_facts(inner, f"{where}[{number}]", depth + 1)
    elif value is not None and type(value) not in (bool, int, float, str):
        raise CheckpointError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which JSON does not give back as it was",
            hint="use numbers, text, lists and dicts, or put it among the arrays",
        )
