"""Brings workers into a run: connects each one and sends it the app and the data, with retries. Runs on the master."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from ddlf.cluster.proxy import ProxyWorker
from ddlf.errors import (
    AppMissing,
    ClusterTooSmall,
    ConnectError,
    DDLFError,
    ExecutorCrashed,
    LeaseError,
    RequestTimeout,
    WorkerLost,
)

log = logging.getLogger(__name__)

MAX_OPENINGS = 3
"""A worker leaves the run after this number of failed openings in a row, or if it has lost the app this number of times
without carrying a slot."""
RETRY_S = (0.2, 10.0)
"""First and longest pause, in seconds, between attempts to bring back a worker whose executor keeps ending."""
LOSS = (WorkerLost, ExecutorCrashed, ConnectError, AppMissing)

_left: set[asyncio.Future[Any]] = set()
"""Openings that continue although their run is over."""


async def end_all(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel the remaining tasks and wait for them, so that nothing continues after an error."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Host(Protocol):
    """The object that ``Recovery`` tells about each worker: a crew."""

    def entered(self, worker: ProxyWorker) -> None:
        """Let a worker take part in the run, since it has received everything that the run needs."""

    def not_reached(self, worker: ProxyWorker, error: DDLFError) -> None:
        """Note that a worker cannot be reached yet. ``Recovery`` tries again."""

    def exclude(self, worker: ProxyWorker, error: DDLFError) -> None:
        """Continue the run without a worker that cannot take part."""

    def changed(self) -> None:
        """Handle a change: a worker entered, cannot be reached, was excluded, or began to load its data."""


class Recovery:
    """Brings workers into a run: connects each one, and sends it what the run needs.

    Args:
        host: Receives the outcome for each worker.
        open_worker: Sends a worker what the run needs. An error other than a loss excludes the worker.
        spawn: Starts a task whose error ends the run.

    Attributes:
        coming: The tasks that bring workers in, by worker number.
        openings: The openings that load data and build models now.
    """

    def __init__(
        self,
        host: Host,
        open_worker: Callable[[ProxyWorker], Coroutine[Any, Any, Any]],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._host = host
        self._open_worker = open_worker
        self._spawn = spawn
        self.tries: Counter[int] = Counter()
        self.coming: dict[int, asyncio.Task[None]] = {}
        self.openings: set[asyncio.Future[Any]] = set()

    def bring(self, worker: ProxyWorker) -> None:
        """Connect a worker and send it what the run needs. Retry as long as necessary."""
        self.coming[worker.id] = self._spawn(self._bring(worker))

    def bring_back(self, worker: ProxyWorker, loss: Exception) -> None:
        """Bring back a worker that was lost while it worked on a slot, unless it has lost the app too often."""
        if isinstance(loss, AppMissing) and not self._may_try(worker):
            self._host.exclude(worker, _robbed(loss))
        else:
            self.bring(worker)

    def served(self, worker: int) -> None:
        """Reset the number of failures of a worker, because it has finished work on a slot."""
        self.tries.pop(worker, None)

    def end(self, *, at_once: bool) -> list[asyncio.Future[Any]]:
        """Stop bringing workers into the run.

        Args:
            at_once: Whether to cancel openings, too, which costs those workers their executors. Otherwise they
                continue in the background.

        Returns:
            The futures to cancel and to wait for.
        """
        if at_once:
            return [*self.coming.values(), *self.openings]
        for opening in self.openings:
            _left.add(opening)
            opening.add_done_callback(_left.discard)
        return list(self.coming.values())

    def _may_try(self, worker: ProxyWorker) -> bool:
        """Count a failed opening of a worker; return whether to try again.

        An opening sends a worker everything that it needs. It failed if it was undone before the worker finished any
        work.
        """
        self.tries[worker.id] += 1
        return self.tries[worker.id] < MAX_OPENINGS

    async def _bring(self, worker: ProxyWorker) -> None:
        pause = RETRY_S[0]
        try:
            while True:
                opening: asyncio.Future[Any] | None = None
                try:
                    await worker.reconnect()
                    opening = asyncio.ensure_future(self._open_worker(worker))
                    self.openings.add(opening)
                    opening.add_done_callback(self._finish_opening)
                    self._host.changed()  # the crew then waits for a worker that loads its data
                    await asyncio.shield(opening)
                    break
                except LeaseError:
                    raise
                except (*LOSS, RequestTimeout) as error:
                    log.debug("%s is not there yet: %s", worker.name, error)
                    undone = opening is not None and isinstance(error, AppMissing | ExecutorCrashed)
                    if undone and not self._may_try(worker):
                        raise _robbed(error) if isinstance(error, AppMissing) else error from None
                    self._host.not_reached(worker, error)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, RETRY_S[1])
        except DDLFError as error:
            self._host.exclude(worker, error)
        else:
            self._host.entered(worker)
        finally:
            self.coming.pop(worker.id, None)
            self._host.changed()

    def _finish_opening(self, opening: asyncio.Future[Any]) -> None:
        self.openings.discard(opening)
        if not opening.cancelled():
            opening.exception()  # marks it as retrieved, since nobody may await it


def _robbed(error: AppMissing) -> AppMissing:
    return AppMissing(
        f"{error.message}, for the {MAX_OPENINGS}rd time",
        hint="another program sends it apps, or restarts it",
        worker=error.worker,
    )


def no_worker_left(errors: Sequence[DDLFError], workers: int) -> DDLFError:
    """Return the error that explains why no worker is left.

    The app's own errors come first, and equal ones are joined.

    Args:
        errors: The error of each excluded worker.
        workers: The number of all workers.
    """
    first, *other_errors = [error for error in errors if not isinstance(error, LOSS)] or errors
    if other_errors:
        first.join(other_errors, workers)
    return first


def too_small(seconds: float, loss: Exception | None) -> ClusterTooSmall:
    """Return the error for a run that lost all its workers and got none back in time."""
    return ClusterTooSmall(
        f"all workers are lost, and none came back within {seconds:g} s",
        hint=f"find out why; the last loss was: {loss}" if loss is not None else "look at the workers' output",
    )


def first_line(error: object) -> str:
    """Return the first line of an error's text."""
    return str(error).partition("\n")[0]
