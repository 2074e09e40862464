"""Switches to newer versions of the partition files while a training continues. Runs on the master.

The version from each round on is part of the progress, like the number of slots. So every checkpoint stores it, and
each task names it: a worker that comes back reads the same files as the lost one did.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from ddlf.errors import DatasetError
from ddlf.events import FilesChanged

if TYPE_CHECKING:
    from ddlf.training.run import Run


async def go_over(run: Run, first: Callable[[], int]) -> None:
    """Use the newest partition files from the beginning of an epoch on.

    The version stays the same if the place cannot be read now, or no longer has these samples: the current files are
    known. It also stays for files on the workers' own disks, which differ between workers.

    Args:
        run: The run.
        first: Returns the earliest round, from 0, that no slot has begun. Nothing happens in the middle of an epoch.
    """
    data, progress = run.facts.files, run.progress
    if data is None or data.manifest.hosts or not progress.begins_epoch(first()):
        return
    try:
        newer = await asyncio.to_thread(data.newer, _known(run))
    except DatasetError:
        return
    number, before = first(), _known(run)
    if newer is None or newer.manifest.version <= before or number >= len(progress.epochs):
        return
    kept = [(since, version) for since, version in progress.versions_from if since < number]
    progress.versions_from = [*kept, (number, newer.manifest.version)]
    run.crew.emit(
        FilesChanged(round=number + 1, before=before, version=newer.manifest.version, files=len(newer.manifest.files))
    )


def _known(run: Run) -> int:
    """Return the newest version that the run knows."""
    versions = [version for _, version in run.progress.versions_from if version]
    return max(versions, default=run.facts.files.manifest.version)
