"""Partition files on the workers' own disks: which worker has the data of a slot. Runs on the master.

The bits of a result belong to the slot, so any worker may carry it. A slot goes to the worker that has most of its
bytes (``schedule.py``). That worker gets the missing files from other workers, never from the master. For
this the master introduces the workers to each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ddlf.algorithms.reading_order import Portion
from ddlf.cluster.cluster import Cluster
from ddlf.cluster.proxy import ProxyWorker
from ddlf.errors import DatasetError
from ddlf.training.context import App
from ddlf.training.crew import Crew, Work
from ddlf.training.recovery import LOSS

Files = npt.NDArray[np.bool_]
SHOWN = 5
"""Maximum number of file names in an error."""


def held(here: bytes | None, data: Any) -> Files:
    """Return which partition files a worker has, as one boolean for each file.

    Args:
        here: The worker's answer: one bit for each file, packed by ``numpy.packbits``; None for all.
        data: The data set; None for arrays.
    """
    files = 0 if data is None else len(data.manifest.files)
    if here is None:
        return np.ones(files, np.bool_)
    found = np.unpackbits(np.frombuffer(here, np.uint8), count=files)
    return found.astype(np.bool_)


def check_all_there(data: Any, held: Mapping[int, Files]) -> None:
    """Refuse to start if no worker has some of the files.

    Args:
        data: The data set of partition files, or None.
        held: The files of each worker, by the worker's number.

    Raises:
        DatasetError: Names some of the missing files.
    """
    if data is None or not data.manifest.hosts or not held:
        return
    gone = np.flatnonzero(~np.logical_or.reduce(list(held.values())))
    if len(gone):
        raise DatasetError(
            f"{_named(data, gone)} on no worker of this run",
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

    def of(self, part: Any) -> dict[int, int]:
        """Return the bytes of a slot's part that each worker has; empty if all workers can read all files.

        Args:
            part: The samples of the slot in a round.
        """
        if not self._is_spread(part):
            return {}
        files, rows = self._read(part)
        row_bytes = self._data.manifest.row_bytes
        return {
            worker: int(rows[there[files]].sum()) * row_bytes
            for worker, there in self._app.run_context.local_files.items()
        }

    def around(self, part: Any, work: Work) -> Work:
        """Return the same work, but started only when its worker can get all files.

        Before that, some worker must have each missing file, and the workers must be introduced.

        Args:
            part: The samples of the slot.
            work: The work for the crew.
        """
        if not self._is_spread(part):
            return work

        async def carried(worker: ProxyWorker, holds: bool) -> Any:
            files = self._read(part)[0]
            if not self._app.run_context.local_files[worker.id][files].all():
                await self._wait_for(files)
                await self._introduce(worker)
            return await work(worker, holds)

        return carried

    def _is_spread(self, part: Any) -> bool:
        return isinstance(part, Portion)

    def _read(self, part: Portion) -> tuple[Any, Any]:
        """Return the numbers of the files that are read, and the rows of each."""
        found = part.stretches(self._data.manifest.sizes)
        return found[:, 0], found[:, 2] - found[:, 1]

    async def _wait_for(self, files: Any) -> None:
        """Wait for workers whose files no other worker has.

        Raises:
            DatasetError: They did not come in time.
        """
        seconds, happened = self._app.wait_for_workers_s, asyncio.Event()
        take_off = self._app.subscribe(lambda event: happened.set())
        try:
            async with asyncio.timeout(seconds):
                while len(self._gone(files)):
                    happened.clear()
                    await happened.wait()
        except TimeoutError:
            gone = self._gone(files)
            had = sorted(worker for worker, there in self._app.run_context.local_files.items() if there[gone].any())
            raise DatasetError(
                f"{_named(self._data, gone)} on no worker that is there; lost with worker {', '.join(map(str, had))}",
                hint="start that one again and go on with resume; with ddlf data send --copies 2 another one has them, too",
            ) from None
        finally:
            take_off()

    def _gone(self, files: Any) -> Any:
        """Return the files that no reachable worker has."""
        there = [
            have for worker, have in self._app.run_context.local_files.items() if self._crew.member(worker) is not None
        ]
        return files[~np.logical_or.reduce([have[files] for have in there])] if there else files

    async def _introduce(self, worker: ProxyWorker) -> None:
        """Introduce all reachable workers to each other. Missing network connections show when a file is needed."""
        async with self._one_at_a_time:
            left_out: set[str] = set()
            while self._introduces:
                known = {other: self._crew.member(other.id) for other in self._cluster.workers}
                there = {other: (other.id, at[1]) for other, at in known.items() if at and other.name not in left_out}
                if set(there.values()) <= self._introduced:
                    return
                try:
                    await self._cluster.introduced(list(there), self._app.run_context.name)
                except LOSS as error:
                    lost = getattr(error, "worker", "")
                    if not lost or lost == worker.name:
                        raise
                    left_out.add(lost)
                else:
                    self._introduced = set(there.values())


def _named(data: Any, files: Any) -> str:
    names = [data.manifest.files[number].name for number in files[:SHOWN].tolist()]
    more = ", ..." if len(files) > SHOWN else ""
    what = "partition files" if len(files) > 1 else "a partition file"
    return f"{len(files):,} {what} of {data} ({', '.join(names)}{more}) {'are' if len(files) > 1 else 'is'}".replace(
        "1 a partition", "a partition"
    )
