"""Other partition files of the same samples, which were made while a training goes on. Runs on the master.

Which version is read from which round on belongs to the progress of a training, as the number of slots does: every checkpoint has it, and each task
names the version, so a worker that comes back reads the same files as the one that was lost.
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
    """Have the newest files read from the beginning of an epoch on.

    A place that cannot be read just now, or is no longer of these samples, changes nothing: the files that are read are known. Neither do files on
    disks of workers, which are other ones on each.

    Args:
        run: The run.
        first: Gives the round, from 0, with which that could be: none of the slots has begun it. In the middle of an epoch nothing is done.
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
    """The newest version that the run knows of."""
    versions = [version for _, version in run.progress.versions_from if version]
    return max(versions, default=run.facts.files.manifest.version)
