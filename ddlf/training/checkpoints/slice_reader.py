"""Reading slices of a checkpoint: a worker reads its slice itself if it sees the folder. Runs on master and workers.

A worker sees the right folder if the manifest has the same bytes. A checkpoint of the current run has no manifest yet:
then the writer must be the same. So a missing slice differs from a folder on another machine.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddlf.errors import CheckpointCorrupt
from ddlf.training.checkpoints.durable import MANIFEST, damaged
from ddlf.training.checkpoints.slices import Slices, is_seen, look_at, read, slice_name
from ddlf.training.checkpoints.tensors import Array
from ddlf.worker.calls import concurrent


def location_of(slices: Slices, number: int) -> dict[str, Any]:
    """Return a message that tells workers where to find a slice of a checkpoint. Slices are numbered from 0."""
    file = next(file for file in slices.files if file["name"] == slice_name(number))
    return {
        "folder": str(slices.root),
        "session": slices.session,
        "manifest": slices.manifest,
        "in": [str(slices.folder), str(slices.final)],  # it may be completed meanwhile
        "file": {name: file[name] for name in ("name", "bytes", "sha256", "arrays")},
        "of": slices.of,
    }


def read_location(location: Mapping[str, Any], *, load: bool) -> tuple[dict[str, Any], dict[str, Array]]:
    """Look for a slice of a checkpoint on this machine, and read it.

    Args:
        location: Location of the slice, from ``location_of``.
        load: Whether to return the slice's arrays. Otherwise only its hash is checked, without keeping it in memory.

    Returns:
        A dict and the slice's arrays. ``seen`` in the dict says whether the checkpoint is visible here, and ``wrong``
        describes any damage for ``raised``.
    """
    while (folder := _visible_folder(location)) is not None:
        path = folder / location["file"]["name"]
        try:
            if load:
                return {"seen": True}, read(path, location["file"], location["of"])
            look_at(path, location["file"], location["of"])
        except CheckpointCorrupt as error:
            if not folder.is_dir():  # it was completed and renamed meanwhile
                continue
            return {"seen": True, "wrong": [error.file, error.expected, error.got, error.message]}, {}
        return {"seen": True}, {}
    return {"seen": False}, {}


def raised(answer: Mapping[str, Any]) -> CheckpointCorrupt | None:
    """Return the error that a worker reports after it looked for a slice with ``read_location``; None if it reports none."""
    if "wrong" not in answer:
        return None
    file, expected, got, text = map(str, answer["wrong"])
    return damaged(Path(file), expected, got, text=text)


def _visible_folder(location: Mapping[str, Any]) -> Path | None:
    """Return the folder of a checkpoint on this machine; None if this machine does not see the right folder."""
    for folder in map(Path, location["in"]):
        if not location["manifest"]:
            if is_seen(location) and folder.is_dir():
                return folder
            continue
        try:
            if hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest() == location["manifest"]:
                return folder
        except OSError:
            continue
    return None


class Restored:
    """The checkpoint slices that one worker has received, until it uses them.

    Roles (objects that other processes can call) that hold weights extend this class.

    Attributes:
        restored: Arrays by slice number and ``part_name``, until ``take_restored`` returns them.
    """

    def __init__(self) -> None:
        self.restored: dict[int, dict[str, Array]] = {}

    @concurrent
    async def look_at(self, location: dict[str, Any]) -> dict[str, Any]:
        """Check a slice in this worker's file system against its hash.

        Return the answer of ``read_location`` for the master.
        """
        return (await asyncio.to_thread(read_location, location, load=False))[0]

    @concurrent
    async def read_slice(self, number: int, location: dict[str, Any]) -> dict[str, Any]:
        """Read a slice from this worker's file system and keep it, if it is visible here.

        Return the answer of ``read_location``.
        """
        answer, arrays = await asyncio.to_thread(read_location, location, load=True)
        if arrays:
            self.restored[number] = arrays
        return answer

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
