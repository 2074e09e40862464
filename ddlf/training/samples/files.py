"""Decides whether a run can train on partition files, and how it reads them. Runs on the master."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import numpy.typing as npt

from ddlf.algorithms.reading_order import SHUFFLE, Portion, SlotSamples
from ddlf.cluster.cluster import Cluster
from ddlf.cluster.proxy import ProxyWorker
from ddlf.data.data_set import DataSet
from ddlf.errors import DatasetError
from ddlf.events import Event, FilesChanged, Warned
from ddlf.training.context import App
from ddlf.training.crew.crew import Crew, Work
from ddlf.training.crew.recovery import LOSS
from ddlf.training.progress import Progress
from ddlf.training.refusals import USUAL_SHUFFLE, check_arrays, check_files

if TYPE_CHECKING:
    from ddlf.training.slot.task import Reply
    from ddlf.training.spec import RunSpec


def files_of(app: App) -> DataSet | None:
    """Return the data set in files that an app trains on; None if it trains on arrays."""
    data_set: DataSet | None = getattr(app, "train_data", None)
    return data_set


def settled(app: App, spec: RunSpec) -> RunSpec:
    """Return the run's settings with the rule that shuffles files.

    Raise an error for settings that do not fit the data.

    Args:
        app: The user's ``IApp``, with its data.
        spec: All settings of the run.

    Raises:
        ConfigError: A setting cannot be used. The error names it.
    """
    data = files_of(app)
    if data is None:
        some = any(getattr(app, f"{part}_data", None) is not None for part in ("val", "test"))
        check_arrays(spec, other_files=some)
        return spec
    rule = spec.data.shuffle or SHUFFLE.read("none" if data.in_order else USUAL_SHUFFLE)
    spec = replace(spec, data=replace(spec.data, shuffle=rule))
    check_files(spec, data)
    return spec


def left_out(
    reply: Reply, data: DataSet, warned: set[tuple[int, int]], emit: Callable[[Event], None]
) -> tuple[list[int], ...]:
    """Return the numbers of the damaged files that a worker left out, so that their samples do not count as trained.

    Args:
        reply: The worker's reply, which names them.
        data: The data set.
        warned: Version and number of the files that a warning has named; receives the files of the reply.
        emit: Receives a warning for each other file.
    """
    assert isinstance(reply.task.indices, Portion)  # the reply was checked when it was decoded
    version = reply.task.indices.version
    files = data.in_version(version).manifest.files
    for number, _ in reply.skipped:
        if (version, number) not in warned:
            warned.add((version, number))
            file = files[number]
            ids = f"{file.first:,} to {file.first + file.samples - 1:,}"
            sentence = (
                f"{file.name} cannot be used, and is left out (on_bad='skip'): samples {ids}; the ledger is not exact"
            )
            emit(Warned(about="data", why=sentence))
    return ([number for number, _ in reply.skipped],)


Files = npt.NDArray[np.bool_]
SHOWN = 5
"""Maximum number of file names in an error."""


def unpacked_files(packed: bytes | None, data: Any) -> Files:
    """Return which partition files a worker has on its disks, as one boolean for each file.

    Args:
        packed: The worker's answer: one bit for each file, packed by ``numpy.packbits``; None for all.
        data: The data set; None for arrays.
    """
    files = 0 if data is None else len(data.manifest.files)
    if packed is None:
        return np.ones(files, np.bool_)
    bits = np.unpackbits(np.frombuffer(packed, np.uint8), count=files)
    return bits.astype(np.bool_)


def check_all_present(data: Any, files_of_workers: Mapping[int, Files]) -> None:
    """Raise an error if no worker has some of the files, before training starts.

    Args:
        data: The data set of partition files, or None.
        files_of_workers: The files of each worker, by the worker's number.

    Raises:
        DatasetError: Names some of the missing files.
    """
    if data is None or not data.manifest.hosts or not files_of_workers:
        return
    missing = np.flatnonzero(~np.logical_or.reduce(list(files_of_workers.values())))
    if len(missing):
        raise DatasetError(
            f"{_named(data, missing)} on no worker of this run",
            hint="start the workers that have them, or: ddlf data send",
        )


class Nearby:
    """Locates the partition files of a run on the workers' disks.

    Args:
        app: The user's ``IApp``; ``run_context.local_files`` has the files of each opened worker.
        data: The data set for training, whose files are on the workers' disks.
        crew: The workers of the run.
        cluster: The cluster of these workers.
        introduces: Whether workers must be introduced to each other before they can exchange files.
    """

    def __init__(self, app: App, data: Any, crew: Crew, cluster: Cluster, *, introduces: bool) -> None:
        self._app, self._data, self._crew, self._cluster = app, data, crew, cluster
        self._introduces = introduces
        self._introduced: set[tuple[int, int]] = set()
        self._one_at_a_time = asyncio.Lock()

    def bytes_on_disks(self, partition: SlotSamples) -> dict[int, int]:
        """Return how many bytes of a slot's samples each worker has; empty if all workers can read all files.

        Args:
            partition: The samples of the slot in a round.
        """
        if not self._is_spread(partition):
            return {}
        files, rows = self._read(partition)
        row_bytes = self._data.manifest.row_bytes
        return {
            worker: int(rows[present[files]].sum()) * row_bytes
            for worker, present in self._app.run_context.local_files.items()
        }

    def after_files(self, partition: SlotSamples, work: Work) -> Work:
        """Return a function that does some work on a worker after it can get all files of a slot's partition.

        Before that, some worker must have each missing file, and the workers must be introduced.

        Args:
            partition: The samples of the slot.
            work: Function that does the work on a given worker.
        """
        if not self._is_spread(partition):
            return work

        async def carried(worker: ProxyWorker, holds: bool) -> Any:
            files = self._read(partition)[0]
            if not self._app.run_context.local_files[worker.id][files].all():
                await self._wait_for(files)
                await self._introduce(worker)
            return await work(worker, holds)

        return carried

    def _is_spread(self, partition: SlotSamples) -> TypeGuard[Portion]:
        return isinstance(partition, Portion)

    def _read(self, portion: Portion) -> tuple[Any, Any]:
        """Return the numbers of the files that a slot's portion reads, and the rows of each."""
        stretches = portion.stretches(self._data.manifest.sizes)
        return stretches[:, 0], stretches[:, 2] - stretches[:, 1]

    async def _wait_for(self, files: Any) -> None:
        """Wait for the return of lost workers, if no other worker has some of the files.

        Raises:
            DatasetError: They did not come in time.
        """
        seconds, happened = self._app.wait_for_workers_s, asyncio.Event()
        take_off = self._app.subscribe(lambda event: happened.set())
        try:
            async with asyncio.timeout(seconds):
                while len(self._missing(files)):
                    happened.clear()
                    await happened.wait()
        except TimeoutError:
            missing = self._missing(files)
            had = sorted(
                worker for worker, present in self._app.run_context.local_files.items() if present[missing].any()
            )
            raise DatasetError(
                f"{_named(self._data, missing)} on no present worker; lost with worker {', '.join(map(str, had))}",
                hint="start that worker again and continue with resume; ddlf data send --copies 2 puts each file on two workers",
            ) from None
        finally:
            take_off()

    def _missing(self, files: Any) -> Any:
        """Return the files that no reachable worker has on its disks."""
        present_files = [
            have for worker, have in self._app.run_context.local_files.items() if self._crew.member(worker) is not None
        ]
        return files[~np.logical_or.reduce([have[files] for have in present_files])] if present_files else files

    async def _introduce(self, worker: ProxyWorker) -> None:
        """Introduce all reachable workers to each other, so that they can exchange files.

        A missing network connection shows when a file is needed.
        """
        async with self._one_at_a_time:
            left_out: set[str] = set()
            while self._introduces:
                members = {other: self._crew.member(other.id) for other in self._cluster.workers}
                addresses = {
                    other: (other.id, at[1]) for other, at in members.items() if at and other.name not in left_out
                }
                if set(addresses.values()) <= self._introduced:
                    return
                try:
                    await self._cluster.introduced(list(addresses), self._app.run_context.name)
                except LOSS as error:
                    lost = getattr(error, "worker", "")
                    if not lost or lost == worker.name:
                        raise
                    left_out.add(lost)
                else:
                    self._introduced = set(addresses.values())


def _named(data: Any, files: Any) -> str:
    names = [data.manifest.files[number].name for number in files[:SHOWN].tolist()]
    more = ", ..." if len(files) > SHOWN else ""
    noun = "partition files" if len(files) > 1 else "a partition file"
    return f"{len(files):,} {noun} of {data} ({', '.join(names)}{more}) {'are' if len(files) > 1 else 'is'}".replace(
        "1 a partition", "a partition"
    )


async def use_newest_version(
    data: DataSet, progress: Progress, emit: Callable[[Event], None], first: Callable[[], int]
) -> None:
    """Switch to the newest version of the partition files, at the beginning of an epoch.

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
        newer = await asyncio.to_thread(data.newer, _newest_known(data, progress))
    except DatasetError:
        return
    number, before = first(), _newest_known(data, progress)
    if newer is None or newer.manifest.version <= before or number >= len(progress.epochs):
        return
    earlier_versions = [(since, version) for since, version in progress.versions_from if since < number]
    progress.versions_from = [*earlier_versions, (number, newer.manifest.version)]
    emit(FilesChanged(round=number + 1, before=before, version=newer.manifest.version, files=len(newer.manifest.files)))


def _newest_known(data: DataSet, progress: Progress) -> int:
    """Return the newest version of the partition files that the run knows."""
    versions = [version for _, version in progress.versions_from if version]
    return max(versions, default=data.manifest.version)
