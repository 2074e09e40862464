"""Workers on their way into a run: connected, and given the app and its data, again and again until that is done or cannot be. Runs on the master."""

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
"""A worker whose executor ends in so many openings in a row, or that has lost the app so often without carrying a slot, is out of the run."""
RETRY_S = (0.2, 10.0)
"""First and longest pause between two attempts to bring a worker back whose executor keeps ending."""
LOSS = (WorkerLost, ExecutorCrashed, ConnectError, AppMissing)

_left: set[asyncio.Future[Any]] = set()
"""Openings that go on although their run is over."""


class Host(Protocol):
    """Who takes the workers in: a crew."""

    def entered(self, worker: ProxyWorker) -> None:
        """A worker has what the run needs."""

    def absent(self, worker: ProxyWorker, error: DDLFError) -> None:
        """A worker is not there yet; it is tried again."""

    def put_out(self, worker: ProxyWorker, error: DDLFError) -> None:
        """A worker cannot take part."""

    def changed(self) -> None:
        """Something of the above has happened, or a worker has begun to load its data."""


class Recovery:
    """Brings workers into a run.

    Args:
        host: Is told of each.
        open_worker: Gives a worker what the run needs. Its errors other than losses put that worker out.
        spawn: Starts a task whose error ends the run.

    Attributes:
        coming: Workers on their way, by number.
        openings: What loads data and builds models now.
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
        self._tries: Counter[int] = Counter()
        self.coming: dict[int, asyncio.Task[None]] = {}
        self.openings: set[asyncio.Future[Any]] = set()

    def bring(self, worker: ProxyWorker) -> None:
        """Connect a worker and give it what the run needs, now and as long as it takes."""
        self.coming[worker.id] = self._spawn(self._bring(worker))

    def bring_back(self, worker: ProxyWorker, loss: Exception) -> None:
        """The same of one that was lost while it carried a slot, unless it has lost the app too often."""
        if isinstance(loss, AppMissing) and not self._may_try(worker):
            self._host.put_out(worker, _robbed(loss))
        else:
            self.bring(worker)

    def served(self, worker: int) -> None:
        """Say that a worker has carried a slot: what failed before counts no more."""
        self._tries[worker] = 0

    def end(self, *, at_once: bool) -> list[asyncio.Future[Any]]:
        """Let go of what is on its way.

        Args:
            at_once: Whether openings end, too. That costs those workers their executors; else they go on, and hold nobody up.

        Returns:
            What is to be cancelled and waited for.
        """
        if at_once:
            return [*self.coming.values(), *self.openings]
        for opening in self.openings:
            _left.add(opening)
            opening.add_done_callback(_left.discard)
        return list(self.coming.values())

    def _may_try(self, worker: ProxyWorker) -> bool:
        """Count a failed opening, or one that was undone before it served; whether there is to be another one."""
        self._tries[worker.id] += 1
        return self._tries[worker.id] < MAX_OPENINGS

    async def _bring(self, worker: ProxyWorker) -> None:
        pause = RETRY_S[0]
        try:
            while True:
                opening: asyncio.Future[Any] | None = None
                try:
                    await worker.reconnect()
                    opening = asyncio.ensure_future(self._open_worker(worker))
                    self.openings.add(opening)
                    opening.add_done_callback(self._over)
                    self._host.changed()  # nobody waits in vain for a worker that loads its data
                    await asyncio.shield(opening)
                    break
                except LeaseError:
                    raise
                except (*LOSS, RequestTimeout) as error:
                    log.debug("%s is not there yet: %s", worker.name, error)
                    undone = opening is not None and isinstance(error, AppMissing | ExecutorCrashed)
                    if undone and not self._may_try(worker):
                        raise _robbed(error) if isinstance(error, AppMissing) else error from None
                    self._host.absent(worker, error)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, RETRY_S[1])
        except DDLFError as error:
            self._host.put_out(worker, error)
        else:
            self._host.entered(worker)
        finally:
            self.coming.pop(worker.id, None)
            self._host.changed()

    def _over(self, opening: asyncio.Future[Any]) -> None:
        self.openings.discard(opening)
        if not opening.cancelled():
            opening.exception()  # it may be that nobody asks any more


def _robbed(error: AppMissing) -> AppMissing:
    return AppMissing(
        f"{error.message}, for the {MAX_OPENINGS}rd time",
        hint="something else gives it apps, or restarts it",
        worker=error.worker,
    )


def why_nobody(gone: Sequence[DDLFError], workers: int) -> DDLFError:
    """Why all workers are out: first of all what the app itself did wrong, and once if it did it everywhere.

    Args:
        gone: Why each is that cannot take part.
        workers: How many there were.
    """
    first, *others = [error for error in gone if not isinstance(error, LOSS)] or gone
    if others:
        first.join(others, workers)
    return first


def too_small(seconds: float, loss: Exception | None) -> ClusterTooSmall:
    """The error of a run all of whose workers are lost, and none came back in time."""
    return ClusterTooSmall(
        f"all workers are lost, and none came back within {seconds:g} s",
        hint="look at the workers' terminals; the last loss was: " + first_line(loss),
    )


def first_line(error: object) -> str:
    """What an error says in its first line."""
    return str(error).partition("\n")[0]
