"""Spreads a data set over the disks of several machines: chooses their files, and sends them to the machines' workers.

``send`` runs on the machine with the whole data set. The functions that it calls run on workers. A worker checks a file
after its last piece, and then gives it its final name. The manifest comes last. If a transfer was interrupted, the next
one only sends the missing files.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ddlf.algorithms.partition import equal_sizes
from ddlf.algorithms.reading_order import portions
from ddlf.data import manifest
from ddlf.data.location import Folder, check_room, synced
from ddlf.data.manifest import Manifest, PartitionFile
from ddlf.data.os_errors import explained
from ddlf.errors import ConfigError, DatasetError

PIECE_BYTES = 2**23
"""Bytes of a file in one message."""

Moved = Callable[[str, int, int], None]


def shares(manifest: Manifest, hosts: int, copies: int) -> list[list[int]]:
    """Choose the files of each machine: the files that one of ``hosts`` slots reads, and for copies also the files of
    the neighbouring slots.

    Args:
        manifest: The manifest.
        hosts: Number of machines.
        copies: Number of machines that get each file.

    Returns:
        For each machine, the numbers of its files from 0, ascending.

    Raises:
        ConfigError: There are fewer machines than copies, or fewer samples than machines.
    """
    if not 0 < copies <= hosts:
        raise ConfigError(f"{copies} copies need {copies} machines, but there are {hosts}", hint="make fewer copies")
    if hosts > manifest.samples:
        raise ConfigError(f"{manifest.samples:,} samples cannot be spread over {hosts} machines", hint="name fewer")
    arcs = portions(manifest.sizes, equal_sizes(manifest.samples, hosts), "none", seed=0, epoch=0, stays=True)
    read = [set(arc.stretches(manifest.sizes)[:, 0].tolist()) for arc in arcs]
    return [sorted(set().union(*(read[(host + n) % hosts] for n in range(copies)))) for host in range(hosts)]


def laid_out(folder: Folder, hosts: int) -> Manifest:
    """Return the manifest of a data set that is spread over this number of machines. If it changes, it becomes a new
    version.

    Raises:
        DatasetError: The location cannot be written.
    """
    current = folder.manifest()
    if current.hosts == hosts:
        return current
    with folder.writing(after=current.version):
        new = replace(current, version=current.version + 1, hosts=hosts, origin=current.identity)
        folder.commit(new)
    return new


async def send(
    folder: Folder, workers: Sequence[Any], copies: int, moved: Moved = lambda action, done, of: None
) -> list[int]:
    """Send each machine its files of a data set, to a folder with the same path.

    Args:
        folder: Folder with the whole data set, on this machine.
        workers: A connected worker on each machine. The order of the workers decides which files each machine gets.
        copies: Number of machines that get each file.
        moved: Receives the present step, the sent bytes and all bytes.

    Returns:
        The number of files that each machine received. Each machine already had its other files.

    Raises:
        ConfigError: ``shares`` cannot spread the files.
        DatasetError: A file here is damaged, or a machine cannot store one.
    """
    share = shares(folder.manifest(), len(workers), copies)
    layout = laid_out(folder, len(workers))
    path, files = str(folder.path.absolute()), layout.files
    entries = [[(files[n].name, files[n].nbytes, files[n].sha256) for n in numbers] for numbers in share]
    pairs = zip(workers, entries, strict=True)
    names = await asyncio.gather(*(worker.run_method(lacking, path, listing) for worker, listing in pairs))
    by_name = {file.name: file for file in files}
    total, done = sum(by_name[name].nbytes for lacked in names for name in lacked), 0

    async def bring(worker: Any, lacked: list[str]) -> int:
        nonlocal done
        for name in lacked:
            async for begin, piece in _pieces(folder, by_name[name]):
                await worker.run_method(take, path, name, begin, piece)
                done += len(piece)
                moved("sending", done, total)
            await worker.run_method(keep, path, name, by_name[name].sha256)
        await worker.run_method(end, path, layout.spelled())
        return len(lacked)

    return list(await asyncio.gather(*(bring(*pair) for pair in zip(workers, names, strict=True))))


async def _pieces(folder: Folder, file: PartitionFile) -> Any:
    path = folder.path / file.name
    with explained(path, "read"):
        for begin in range(0, file.nbytes, PIECE_BYTES):
            count = min(PIECE_BYTES, file.nbytes - begin)
            yield begin, await asyncio.to_thread(np.fromfile, path, np.uint8, count, offset=begin)


# -- functions that run on a worker ------------------------------------------------------------------------------------


def lacking(path: str, files: Sequence[tuple[str, int, str]]) -> list[str]:
    """Return the names of the files that are missing or damaged on this worker's disk, so that only they are sent.

    Args:
        path: Path of the folder.
        files: Name, size and SHA-256 of each file.

    Raises:
        DatasetError: The folder cannot be made, or its disk has no room for the files.
    """
    folder = Path(path)
    with explained(folder, "write to"):
        folder.mkdir(parents=True, exist_ok=True)
        missing = [(name, nbytes) for name, nbytes, sha256 in files if _hash(folder / name) != sha256]
    with explained(folder, "write to", need=(need := sum(nbytes for _, nbytes in missing))):
        check_room(folder, need)
    return [name for name, _ in missing]


def take(path: str, name: str, begin: int, piece: Any) -> None:
    """Write a received piece of a file to this worker's disk, under a temporary name."""
    part = _part(path, name)
    with explained(path, "write to"):
        part.parent.mkdir(exist_ok=True)
        with open(part, "r+b" if begin else "wb") as file:
            file.seek(begin)
            file.write(piece.data)


def keep(path: str, name: str, sha256: str) -> None:
    """Check a completely received file, and give it its final name.

    Raises:
        DatasetError: The file differs from the manifest.
    """
    part = _part(path, name)
    if _hash(part) != sha256:
        part.unlink(missing_ok=True)
        raise DatasetError(
            f"the SHA-256 of {name} is not that of the manifest",
            hint="check the sender's copy: ddlf data verify",
        )
    with explained(path, "write to"):
        with open(part, "rb") as file:
            os.fsync(file.fileno())
        os.replace(part, Path(path) / name)
        synced(part.parent)


def end(path: str, spelled: bytes) -> None:
    """Make the version with this manifest the newest one on this worker's disk, and remove all others except the
    previous one.
    """
    folder = Folder(path)
    with explained(folder, "write to"):
        new, present = manifest.read(spelled, f"{path}/{manifest.NAME}"), set()
        if (folder.path / manifest.NAME).is_file():
            present = {file.name.partition("/")[0] for file in folder.manifest().files}
        folder.put(new)
        for old in folder.path.glob("v[0-9][0-9][0-9][0-9]*"):
            if old.name not in present | {file.name.partition("/")[0] for file in new.files}:
                shutil.rmtree(old)


def _part(path: str, name: str) -> Path:
    where = Path(path) / name
    return where.with_name(f".{where.name}-{os.getpid()}")


def _hash(path: Path) -> str:
    try:
        with open(path, "rb", buffering=0) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""
