"""Reading slices of a checkpoint: a worker reads its slice itself if it sees the folder. Runs on master and workers.

A worker sees the right folder if the manifest has the same bytes. A checkpoint of the current run has no manifest yet:
then the writer must be the same. So a missing slice differs from a folder on another machine.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from pathlib import Path

from ddlf.errors import CheckpointCorrupt
from ddlf.training.checkpoints.durable import MANIFEST, damaged
from ddlf.training.checkpoints.slices import Identity, SliceFile, Slices, is_seen, look_at, read, slice_name
from ddlf.training.checkpoints.tensors import Array
from ddlf.worker.calls import concurrent


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceLocation:
    """Where workers find a slice of a checkpoint.

    Args:
        root: Folder of the checkpoints.
        session: Session of the writer, which ``root`` must name if the checkpoint has no manifest yet.
        manifest: SHA-256 of the checkpoint's manifest; empty if it has none yet.
        folders: Folders of the checkpoint. It may move from the first to the second meanwhile.
        file: The slice.
        identity: The training and the round that it must belong to.
    """

    root: Path
    session: str
    manifest: str
    folders: tuple[Path, Path]
    file: SliceFile
    identity: Identity

    @classmethod
    def of(cls, slices: Slices, number: int) -> SliceLocation:
        """Return the location of a slice, numbered from 0."""
        return cls(
            root=slices.root,
            session=slices.session,
            manifest=slices.manifest,
            folders=(slices.folder, slices.final),
            file=next(file for file in slices.files if file.name == slice_name(number)),
            identity=slices.identity,
        )

    def visible_folder(self) -> Path | None:
        """Return the folder of the checkpoint on this machine; None if this machine does not see the right folder."""
        for folder in self.folders:
            if not self.manifest:
                if is_seen(self.root, self.session) and folder.is_dir():
                    return folder
                continue
            try:
                if hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest() == self.manifest:
                    return folder
            except OSError:
                continue
        return None


@dataclass(frozen=True, slots=True)
class Damage:
    """The damage of a slice, as a worker reports it. The fields are those of ``CheckpointCorrupt``, with its message."""

    file: str
    expected: str
    got: str
    message: str


@dataclass(frozen=True, slots=True)
class SliceReport:
    """The answer of a worker that has looked for a slice.

    Args:
        visible: Whether it sees the checkpoint.
        damage: The damage of the slice, if any.
    """

    visible: bool
    damage: Damage | None = None

    def check(self) -> None:
        """Raise an error if the slice is damaged.

        Raises:
            CheckpointCorrupt: The slice is missing, damaged, or belongs to another run.
        """
        if (damage := self.damage) is not None:
            raise damaged(Path(damage.file), damage.expected, damage.got, text=damage.message)


def read_location(location: SliceLocation, *, load: bool) -> tuple[SliceReport, dict[str, Array]]:
    """Look for a slice of a checkpoint on this machine, and read it.

    Args:
        location: Location of the slice.
        load: Whether to return the slice's arrays. Otherwise only its hash is checked, without keeping it in memory.

    Returns:
        The report for the master, and the slice's arrays; none if they are not loaded.
    """
    while (folder := location.visible_folder()) is not None:
        path = folder / location.file.name
        try:
            if load:
                return SliceReport(visible=True), read(path, location.file, location.identity)
            look_at(path, location.file, location.identity)
        except CheckpointCorrupt as error:
            if not folder.is_dir():  # it was completed and renamed meanwhile
                continue
            return SliceReport(True, Damage(error.file, error.expected, error.got, error.message)), {}
        return SliceReport(visible=True), {}
    return SliceReport(visible=False), {}


class Restored:
    """The checkpoint slices that one worker has received, until it uses them.

    Roles (objects that other processes can call) that hold weights extend this class.

    Attributes:
        restored: Arrays by slice number and ``part_name``, until ``take_restored`` returns them.
    """

    def __init__(self) -> None:
        self.restored: dict[int, dict[str, Array]] = {}

    @concurrent
    async def look_at(self, location: SliceLocation) -> SliceReport:
        """Check a slice in this worker's file system against its hash."""
        return (await asyncio.to_thread(read_location, location, load=False))[0]

    @concurrent
    async def read_slice(self, number: int, location: SliceLocation) -> SliceReport:
        """Read a slice from this worker's file system and keep it, if it is visible here."""
        report, arrays = await asyncio.to_thread(read_location, location, load=True)
        if arrays:
            self.restored[number] = arrays
        return report

    @concurrent
    async def take_slice(self, number: int, arrays: dict[str, Array]) -> None:
        """Receive and keep a slice of a checkpoint.

        The master has read and sent it because this worker cannot read it.
        """
        self.restored[number] = arrays

    def take_restored(self) -> dict[int, dict[str, Array]]:
        """Return all slices of a checkpoint that this worker has received, and forget them."""
        arrays, self.restored = self.restored, {}
        return arrays
