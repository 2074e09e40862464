"""A pool as a backend of joblib, and of libraries that use joblib, such as scikit-learn. Runs on the master."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from joblib.parallel import AutoBatchingMixin, ParallelBackendBase


class PoolBackend(AutoBatchingMixin, ParallelBackendBase):  # type: ignore[misc]
    """Runs each of joblib's batches on a free worker.

    Args:
        pool: Pool that runs them.
        count: Number of its workers.
    """

    supports_retrieve_callback = True
    default_n_jobs = -1

    def __init__(self, pool: Executor, count: int) -> None:
        super().__init__()
        self._pool = pool
        self._count = count
        self._open: set[Future[Any]] = set()

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """Return the number of parallel jobs: the number of workers, or fewer if the caller wants fewer."""
        return self._count if n_jobs is None or n_jobs < 0 else min(n_jobs, self._count)

    def submit(self, func: Callable[[], Any], callback: Callable[[Future[Any]], Any] | None = None) -> Future[Any]:
        """Run a batch on a free worker."""
        future = self._pool.submit(func)
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        if callback is not None:
            future.add_done_callback(callback)
        return future

    def retrieve_result_callback(self, out: Future[Any]) -> Any:
        """Return the result of a batch, or raise its error."""
        return out.result()

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """Cancel all running batches."""
        for future in list(self._open):
            future.cancel()
