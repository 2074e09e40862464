"""Checkpoints of the whole state of a training, in a folder that always contains a complete one. Runs on the master.

Layout::

    DIR/owner.json                             the only writer (ddlf.training.checkpoints.ownership)
    DIR/records.jsonl                          records of all rounds (ddlf.training.checkpoints.journal)
    DIR/round-000012/manifest.json             round, facts, size, SHA-256 and arrays of each other file, extent of the
                                               records; sealed
                     weights.safetensors       one file for each group of arrays
                     slots_optimizer.safetensors
                     slice_0001.safetensors    parts of arrays, from a worker (ddlf.training.checkpoints.slices)
    DIR/round-000012.replaced/                 the previous checkpoint of the same round, for moments only
    DIR/.writing-..., DIR/.removing-...        incomplete: left by a killed writer, removed by the next one

Rules:
    A checkpoint is written under a temporary name. Every file and the folder are synced, then the folder is renamed. So
    it exists completely or not at all.
    An old checkpoint is removed after the new one is on the disk. It is renamed first, so half of it is never read.
    The newest checkpoint is the one with the highest number. Timestamps of files have no effect.
    Every byte of a file is checked against a SHA-256, and the manifest against its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from ddlf.errors import CheckpointCorrupt, CheckpointError, ConfigError
from ddlf.events.record import RoundRecord
from ddlf.training.checkpoints import journal, slices, tensors
from ddlf.training.checkpoints.contents import (
    REPLACED,
    ROUND,
    Checkpoint,
    Entry,
    File,
    bytes_in,
    check,
    is_checkpoint,
    manifest_of,
    read_files,
    read_manifest,
    stored,
)
from ddlf.training.checkpoints.durable import (
    EARLIER,
    MANIFEST,
    damaged,
    explained,
    free_bytes,
    no_space,
    seal,
    sync,
    write_new,
)
from ddlf.training.checkpoints.journal import JOURNAL, Extent, Journal
from ddlf.training.checkpoints.ownership import Ownership

WRITING, REMOVING = ".writing-", ".removing-"

log = logging.getLogger(__name__)


class CheckpointFolder:
    """A folder of checkpoints. Any process may read it. Call ``open`` to become its only writer.

    Args:
        path: The folder. ``open`` creates it.
        keep: Number of checkpoints to keep.

    Attributes:
        journal: Records of the rounds, beside the checkpoints.

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
        """Term of this writer, a number higher than that of every earlier writer of the folder; 0 if not open."""
        return self._ownership.own_entry.epoch if self._ownership.own_entry else 0

    # Writing

    def open(self, holder: str, *, takeover: bool = False) -> None:
        """Become the only process that writes into the folder, and remove incomplete files of killed writers.

        Args:
            holder: Name of this job for people, such as its command line.
            takeover: Also replace a writer that is alive, or may be alive on another machine. It can write nothing
                afterwards.

        Raises:
            LeaseError: Another writer has the folder.
            CheckpointError: The folder cannot be created or written to.
            ConfigError: The folder is itself a checkpoint.
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
            with self._ownership.exclusive():
                self._clean()

    def go_on_from(self, checkpoint: Checkpoint) -> None:
        """Let the next records of rounds follow the records of a checkpoint that was loaded from this folder."""
        with explained(self.path, "read"):
            if checkpoint.problem and self.journal.file.exists():
                os.replace(self.journal.file, f"{self.journal.file}.damaged")
            self.journal.go_on_after(checkpoint.extent)

    def begin(self, number: int, training: str) -> slices.Slices:
        """Begin a checkpoint after a round.

        Workers then write its slices (files with parts of the model), and ``save`` completes it.

        Raises:
            CheckpointError: The folder cannot be written to.
            LeaseError: Another master has taken over the job.
        """
        name = f"round-{number:06d}"
        temporary = self.path / f"{WRITING}{name}-{secrets.token_hex(4)}"
        with explained(self.path, "write a checkpoint in", unharmed=EARLIER):
            self._ownership.check()
            temporary.mkdir(mode=0o700)
        assert self._ownership.own_entry is not None
        session, identity = self._ownership.own_entry.session, slices.Identity(training, number)
        return slices.Slices(self.path, session, temporary, self.path / name, identity)

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint to the disk. It replaces one of the same round. After the return, it survives a power cut.

        This blocks until the disk has finished: call it from a thread, one call at a time. Arrays must not change
        meanwhile.

        Returns:
            The folder of the checkpoint.

        Raises:
            CheckpointError: The checkpoint cannot be written: no space, no permission, or a value that cannot be
                stored.
            LeaseError: Another master has taken over the job.

        On failure:
            No part of the checkpoint remains, earlier checkpoints stay complete, and ``save`` may be called again.
        """
        check(checkpoint)
        groups = {group: tensors.plain(arrays) for group, arrays in checkpoint.arrays.items()}
        lines = journal.spelled(checkpoint.records)
        need = sum(array.nbytes for arrays in groups.values() for array in arrays.values()) + sum(map(len, lines))
        name = f"round-{checkpoint.round:06d}"
        begun = checkpoint.slices
        temporary = self.path / f"{WRITING}{name}-{secrets.token_hex(4)}" if begun is None else begun.folder
        with explained(self.path, "write a checkpoint in", need=need, unharmed=EARLIER):
            self._ownership.check()
            self._refuse_older(checkpoint.round)
            free = free_bytes(self.path)
            if free is not None and free < need:
                raise no_space(self.path, need, EARLIER)
            try:
                if begun is None:
                    temporary.mkdir(mode=0o700)
                self._write(temporary, checkpoint, groups, self.journal.with_lines(lines))
                with self._ownership.exclusive():
                    self.journal.append(lines)
                    self._put(temporary, self.path / name)
                    if begun is not None:
                        begun.folder = begun.final
                    self._prune(checkpoint.round)
            except OSError:
                self._ownership.check()  # a new owner removes the files of the old one: this is not a disk error
                raise
            finally:
                shutil.rmtree(temporary, ignore_errors=True)  # after a success, it does not exist any more
        return self.path / name

    def close(self) -> None:
        """Give up the right to write, so that another process may have it. Do nothing if another one already has it."""
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
            files.append(File(name=path.name, bytes=path.stat().st_size, sha256=digest, arrays=list(arrays)))
        write_new(folder / MANIFEST, seal(manifest_of(checkpoint, files, extent, self.epoch)))
        sync(folder)

    def _put(self, temporary: Path, target: Path) -> None:
        """Rename a written checkpoint to its final name.

        At each moment a checkpoint of its round exists, if one existed before.
        """
        replaced = target.with_name(target.name + REPLACED)
        if target.exists():
            if replaced.exists():
                self._remove(replaced.name)
            os.rename(target, replaced)
        os.rename(temporary, target)
        sync(self.path)

    def _prune(self, newest: int) -> None:
        """Remove all checkpoints except the last few. A failure here is logged, and the next checkpoint tries again."""
        names = [name for number, name in self._candidates() if number <= newest]
        remaining = [name for name in names if not name.endswith(REPLACED)][: self.keep]
        for name in names:
            if name not in remaining:
                try:
                    self._remove(name)
                except OSError as error:
                    log.warning("cannot remove the old checkpoint %s: %s", self.path / name, error)

    def _remove(self, name: str) -> None:
        removing = self.path / f"{REMOVING}{name}-{secrets.token_hex(4)}"
        os.rename(self.path / name, removing)
        shutil.rmtree(removing)

    def _clean(self) -> None:
        """Remove the incomplete files that killed writers have left, or complete them."""
        for name in os.listdir(self.path):
            if name.startswith((WRITING, REMOVING)):
                shutil.rmtree(self.path / name, ignore_errors=True)
            elif name.startswith(".owner.json-"):
                (self.path / name).unlink(missing_ok=True)
            elif name.endswith(REPLACED) and ROUND.fullmatch(name.removesuffix(REPLACED)):
                if (self.path / name.removesuffix(REPLACED)).exists():
                    self._remove(name)
                else:
                    os.rename(self.path / name, self.path / name.removesuffix(REPLACED))
        sync(self.path)

    def _refuse_older(self, number: int) -> None:
        """Raise an error if the folder has a checkpoint of a later round than the one to be saved.

        Otherwise a later run would resume from that one instead.
        """
        for newer, name in self._candidates():
            if newer <= number:
                return
            with contextlib.suppress(CheckpointCorrupt):
                read_files(self.path / name)
                raise CheckpointError(
                    f"{self.path / name} is from a later round than {number}, the round to save",
                    hint="use another folder, or remove the later checkpoints",
                )

    def _highest_epoch(self) -> int:
        """Return the highest term (number of an owner) in which a checkpoint of the folder was written."""
        epochs = [0]
        for _, name in self._candidates():
            with contextlib.suppress(CheckpointError):
                epochs.append(read_manifest(self.path / name).epoch)
        return max(epochs)

    # Reading

    def newest(
        self,
        *,
        required: bool = False,
        report: Callable[[str], None] = log.warning,
        skip_slices: bool = False,
        known_damage: Mapping[str, CheckpointCorrupt] = MappingProxyType({}),
    ) -> Checkpoint | None:
        """Return the newest complete checkpoint. Skip damaged newer ones, and report them.

        Args:
            required: Whether to raise an error if there is none.
            report: Called with a warning for each skipped checkpoint.
            skip_slices: Whether to leave slices unread, as in ``load``.
            known_damage: Known damage, by name of the checkpoint.

        Returns:
            None if no checkpoint was ever completed here, or the folder does not exist.

        Raises:
            CheckpointError: There are checkpoints, but no complete one; or a newer DDLF wrote the newest one; or
                reading failed.
        """
        problems: list[CheckpointCorrupt] = []
        candidates = [name for _, name in self._candidates()]
        while candidates:
            name = candidates.pop(0)
            try:
                if name in known_damage:
                    raise known_damage[name]
                checkpoint = self.load(name, report=report, skip_slices=skip_slices)
            except CheckpointError as error:
                if not (self.path / name).exists():  # a writer has just removed it, so newer ones exist
                    return self.newest(
                        required=required, report=report, skip_slices=skip_slices, known_damage=known_damage
                    )
                if not isinstance(error, CheckpointCorrupt):
                    raise
                problems.append(error)
            else:
                for problem in problems:
                    report(f"{problem.message}; {name} is used instead")
                return checkpoint
        if problems:
            raise CheckpointError(
                f"no complete checkpoint in {self.path}; found {len(problems)} damaged, the newest because {problems[0].message}",
                hint="use a copy of the folder, or start again in another folder",
            )
        if required:
            if not self.path.is_dir():
                raise CheckpointError(f"there is no folder {self.path}", hint="check its name")
            entries = self.entries()
            incomplete = f"; found {len(entries)} incomplete" if entries else ""
            raise CheckpointError(
                f"no complete checkpoint in {self.path}{incomplete}", hint="check the name of the folder"
            )
        return None

    def load(
        self, path: str | os.PathLike[str], *, report: Callable[[str], None] = log.warning, skip_slices: bool = False
    ) -> Checkpoint:
        """Return one checkpoint of the folder, after checking its bytes.

        Args:
            path: Folder, absolute or relative to this one, such as ``"round-000012"``.
            report: Called with a warning if the records are damaged or missing. The checkpoint is then used without
                records.
            skip_slices: Whether to leave the slices of the checkpoint unread, so that workers can read them.

        Raises:
            CheckpointCorrupt: The checkpoint is damaged. The error names the file.
            CheckpointError: The checkpoint does not exist, cannot be read, or was written by a newer DDLF.
        """
        folder = self.path / path
        manifest, contents = read_files(folder, skip_slices=skip_slices)
        arrays = {}
        for file in manifest.files:
            file_path = folder / file.name
            named = tensors.read(contents.pop(file.name), file_path)  # popped: its bytes are freed
            if named.keys() != set(file.arrays) or len(named) != len(file.arrays):
                raise damaged(file_path, f"{len(file.arrays)} arrays named in the manifest", f"{len(named)} others")
            arrays[file.name.removesuffix(".safetensors")] = {name: named[name] for name in file.arrays}
        unread = stored(folder, manifest, arrays) if skip_slices and manifest.slices else None
        if manifest.slices and not skip_slices:
            files = [folder / file.name for file in manifest.slices]
            slice_contents = ((file, tensors.read(contents.pop(file.name), file)) for file in files)
            arrays = slices.assembled(slice_contents, manifest.listed, arrays, folder / MANIFEST)
        records: Sequence[RoundRecord] = ()
        extent, problem = manifest.records, ""
        try:
            with explained(folder, "read"):
                records = journal.read(folder.parent / JOURNAL, extent)
        except CheckpointError as error:
            extent, problem = Extent(), error.message
            report(f"{problem}; {folder.name} is used without its records, so the history starts again")
        return Checkpoint(
            round=manifest.round,
            arrays=arrays,
            facts=manifest.facts,
            records=records,
            extent=extent,
            problem=problem,
            slices=unread,
        )

    def newest_round(self) -> int | None:
        """Return the round of the newest checkpoint, complete or not; None if there is none. Reads names only."""
        return max((number for number, _ in self._candidates()), default=None)

    def paths(self) -> list[Path]:
        """Return the folder of each checkpoint, complete or not, newest first. Reads names only."""
        return [self.path / name for _, name in self._candidates()]

    def entries(self) -> list[Entry]:
        """Return a line of information about each checkpoint, complete or not, newest first.

        Reads and checks every byte.
        """
        entries = []
        for number, name in self._candidates():
            total, problem = bytes_in(self.path / name), ""
            try:
                manifest, _ = read_files(self.path / name)
            except CheckpointError as error:
                problem = str(error)
            else:
                total = sum(file.bytes for file in (*manifest.files, *manifest.slices))
            entries.append(Entry(name=name, round=number, bytes=total, complete=not problem, problem=problem))
        for name in self._listing():
            if name.startswith((WRITING, REMOVING)):
                total, problem = bytes_in(self.path / name), "its writer was interrupted"
                entries.append(Entry(name=name, round=None, bytes=total, complete=False, problem=problem))
        return entries

    def _listing(self) -> list[str]:
        with explained(self.path, "read the checkpoint folder"):
            try:
                return sorted(os.listdir(self.path))
            except FileNotFoundError:
                return []

    def _candidates(self) -> list[tuple[int, str]]:
        """Return number and name of every checkpoint that ``newest`` may use, newest first.

        A replaced checkpoint comes after its replacement.
        """
        candidates = []
        for name in self._listing():
            match = ROUND.fullmatch(name.removesuffix(REPLACED))
            if match and match[0] == f"round-{int(match[1]):06d}":
                candidates.append((int(match[1]), not name.endswith(REPLACED), name))
        return [(number, name) for number, _, name in sorted(candidates, reverse=True)]
