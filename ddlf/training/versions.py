"""Switches to newer versions of the partition files while a training continues. Runs on the master.

The version from each round on is part of the progress, like the number of slots. So every checkpoint stores it, and
each task names it: a worker that comes back reads the same files as the lost one did.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ddlf.data.data_set import DataSet
from ddlf.errors import DatasetError
from ddlf.events import Event, FilesChanged
from ddlf.training.progress import Progress


async def go_over(data: DataSet, progress: Progress, emit: Callable[[Event], None], first: Callable[[], int]) -> None:
    """Use the newest partition files from the beginning of an epoch on.

    The version stays the same if the place cannot be read now, or no longer has these samples: the current files are
    known. It also stays for files on the workers' own disks, which differ between workers.

    Args:
        data: The data set, as the master has opened it.
        progress: The progress of the run, which receives the version.
        emit: Receives the event of a change.
        first: Returns the earliest round, from 0, that no slot has begun. Nothing happens in the middle of an epoch.
    """
    if data.manifest.hosts or not progress.begins_epoch(first()):
        return
    try:
        newer = await asyncio.to_thread(data.newer, _known(data, progress))
    except DatasetError:
        return
    number, before = first(), _known(data, progress)
    if newer is None or newer.manifest.version <= before or number >= len(progress.epochs):
        return
    kept = [(since, version) for since, version in progress.versions_from if since < number]
    progress.versions_from = [*kept, (number, newer.manifest.version)]
    emit(FilesChanged(round=number + 1, before=before, version=newer.manifest.version, files=len(newer.manifest.files)))


def _known(data: DataSet, progress: Progress) -> int:
    """Return the newest version that the run knows."""
    versions = [version for _, version in progress.versions_from if version]
    return max(versions, default=data.manifest.version)
