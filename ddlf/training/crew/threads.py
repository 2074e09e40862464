"""Chooses the number of threads that the workers of a run compute with. Runs on the master.

TensorFlow splits the gradient of a convolution into one partial sum per thread, so the bits of a round depend on the
number of threads. A run therefore has one number for all its workers: the setting, else the number of the training that
it continues, else a number chosen from machines and slots. The choice ignores the number of workers on a machine, so
that a slot gives the same bits on any worker.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence

from ddlf.errors import CheckpointError, ConfigError
from ddlf.training.checkpoints.checkpoint import CheckpointFolder
from ddlf.training.checkpoints.contents import is_checkpoint, read_manifest
from ddlf.training.checkpoints.resume import checkpoint_folders
from ddlf.training.context import App
from ddlf.worker.status import ExecutorInfo


def given_threads(app: App, *, fresh: bool = False) -> int | None:
    """Return the number of compute threads that the app, its cluster or the earlier training demands.

    Args:
        app: The user's ``IApp``.
        fresh: Whether the app's former training is ignored.

    Returns:
        None if a number is to be chosen.

    Raises:
        ConfigError: The app and its cluster ask for different numbers.
    """
    of_cluster = None if app.cluster is None else app.cluster.threads
    if app.threads is not None and of_cluster not in (None, app.threads):
        raise ConfigError(
            f"threads={app.threads} of the app and threads={of_cluster} of the cluster contradict each other",
            hint="leave out one of the two",
        )
    demanded: int | None = app.threads or of_cluster
    return demanded or _recorded(app, fresh)


def _recorded(app: App, fresh: bool) -> int | None:
    """Return the number of threads in the training that the run continues.

    Reads manifests only; later code checks whether they fit.
    """
    if app.resume is not None:
        target, source = checkpoint_folders(app)
        folder = source or target
        assert folder is not None  # otherwise resume="auto" would have been refused
        for path in [folder] if is_checkpoint(folder) else CheckpointFolder(folder).paths():
            with contextlib.suppress(CheckpointError):
                recorded: int | None = read_manifest(path).facts.get("settings", {}).get("threads")
                return recorded
    if app.run_context.progress is None or fresh:
        return None
    before: int | None = app.run_context.progress.settings.get("threads")
    return before


def chosen_threads(workers: Sequence[ExecutorInfo], slots: int, expected_workers: int) -> int:
    """Choose the number of compute threads, so that the slots of a run use all cores of the smallest machine.

    The slots count as spread evenly over the machines. If an engine has given each worker its own cores, they count as
    spread evenly over the places.

    Args:
        workers: The executor of each worker.
        slots: K, the number of slots.
        expected_workers: Number of workers. It includes workers that have not come yet.

    Returns:
        ``max(1, cores // ceil(slots / machines))``, with places instead of machines if each worker has its own cores.
    """
    parts = len({worker.host for worker in workers})
    if all(worker.has_own_cores for worker in workers):
        parts = expected_workers
    cores = min(worker.cores for worker in workers)
    return max(1, cores // -(-slots // parts))


def unused_cores(workers: Sequence[ExecutorInfo], threads: int) -> str:
    """Return a sentence about the machine with the most idle cores, for a warning; "" if the threads use all cores."""
    count = Counter(worker.host for worker in workers if not worker.has_own_cores)
    shares = {worker.host: worker.cores // (count[worker.host] or 1) for worker in workers}
    host, share = max(shares.items(), key=lambda item: item[1], default=("", 0))
    if share <= threads:
        return ""
    return (
        f"each worker computes with {threads} thread{'s' * (threads != 1)}, though {host} has {share} cores for each: "
        f"a slot has equal bits on all workers only with equal threads; threads={share} (--threads {share}) uses more"
    )
