"""Whether a worker can be called, and why its connection or executor has ended. Runs on the master.

When a data connection ends, the daemon reports the reason on the control connection. When the control connection ends,
the reason is an earlier report, or the exit code from the process that started the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Any

from ddlf.cluster.channels import DataChannel
from ddlf.errors import DDLFError, ExecutorCrashed, LeaseError, ProtocolError, RequestFailed, WorkerLost

log = logging.getLogger(__name__)

EVENTS = frozenset({"executor_exited", "lease_lost", "stopped_by", "wanted", "wrote"})
"""Events that a daemon reports. Other events, from newer daemons, are ignored."""
NEWS_S = 2.0
"""Seconds after the end of a data connection in which the daemon may report how the executor ended."""


async def unknown() -> None:
    """Return None, the exit code of a process that this process did not start."""


class Phase(Enum):
    """The state of a link, with the message and the hint for a call that cannot be sent.

    NEW or LOST becomes OPEN when the daemon has accepted the master. OPEN becomes LOST when control ends. ``close``
    turns any state into CLOSED. The next ``connect`` turns CLOSED into NEW, and is the connect of a new master.
    """

    NEW = ("not connected yet", "connect first: await cluster.connect(), or async with cluster")
    OPEN = ("", "")
    LOST = ("the connection was lost", "connect again, or look at the worker's terminal")
    CLOSED = ("the connection was closed on this side", "connect again")


class Standing:
    """The state of the link to one worker, and the known reasons why it is not open.

    Args:
        how_ended: Returns the exit code of the worker's process, negative for a signal. None means that it runs, or
            that this process did not start it.

    Attributes:
        phase: State of the link.
        crash: How the last crashed executor ended.
        news: Set when a new fact about the link is known.
        lease: The error for a worker that another master has taken over; None otherwise.
    """

    def __init__(self, how_ended: Callable[[], Awaitable[int | None]]) -> None:
        self.phase = Phase.NEW
        self.crash: ExecutorCrashed | None = None
        self.lease: LeaseError | None = None
        self._stopped_by = self._stopped_hint = ""
        self._how_ended = how_ended
        self.news = asyncio.Event()

    @property
    def is_closed(self) -> bool:
        """Whether the master has closed the link and not reopened it."""
        return self.phase is Phase.CLOSED

    @property
    def in_use(self) -> bool:
        """Whether the master has connected and not closed since, even if the connection was lost."""
        return self.phase in (Phase.OPEN, Phase.LOST)

    def open(self) -> None:
        """Note that a daemon has accepted the master, which makes earlier reports irrelevant."""
        self.phase, self.lease, self._stopped_by = Phase.OPEN, None, ""

    def lose(self) -> None:
        """Note that the connection to the daemon has ended."""
        self.phase = Phase.CLOSED if self.is_closed else Phase.LOST
        self.news.set()

    def close(self) -> None:
        """Note that the master ends the link."""
        self.phase, self.lease = Phase.CLOSED, None

    def reopen(self) -> None:
        """Return a closed link to its first state."""
        self.phase = Phase.NEW if self.is_closed else self.phase

    def check_not_closed(self, worker: str) -> None:
        """Raise ``WorkerLost`` if the master has closed the link."""
        if self.is_closed:
            raise self.closed_here(worker, may_have_run=False)

    def closed_here(self, worker: str, **facts: Any) -> WorkerLost:
        """Return the error for requests that the master itself has ended."""
        return WorkerLost(Phase.CLOSED.value[0], worker=worker, **facts)

    def refusal(self, worker: str) -> RequestFailed:
        """Return the error for a request while there is no connection."""
        if self.lease is not None:
            return LeaseError(self.lease.message, hint=self.lease.hint, worker=worker)
        text, hint = self.phase.value
        return WorkerLost(text, worker=worker, hint=hint, may_have_run=False)

    def heard(self, event: str, facts: dict[str, Any], worker: str, *, epoch: int, first_id: int) -> None:
        """Note an event that the daemon reports.

        Args:
            event: ``"executor_exited"``, ``"stopped_by"`` or ``"lease_lost"``.
            facts: Facts of the event.
            worker: The worker's name in error messages.
            epoch: Epoch of this master's lease.
            first_id: The lowest number of this master's requests.
        """
        if event == "executor_exited":
            gave_up, ran = facts.get("gave_up") is True, int(facts["id"])
            method = f" while it ran {facts['method']!r}" if facts["method"] and not gave_up else ""
            self.crash = ExecutorCrashed(
                f"the executor {facts['text']}{method}",
                worker=worker,
                hint=facts["hint"],
                exit_code_of_process=facts["exit_code"],
                signal=facts["signal"],
                stderr_tail=facts["stderr_tail"],
                pid=facts.get("pid"),
                gave_up=gave_up,
                # If it ran another master's request, or none, the crash says nothing about this master's requests.
                begun=max(ran, int(facts.get("beside", 2**64))) if ran >= first_id else 2**64,
            )
            self.news.set()
            if gave_up:
                log.warning("%s; what methods kept in it is gone", self.crash)
        elif event == "stopped_by":
            self._stopped_by = str(facts["by"])
            self._stopped_hint = str(facts.get("hint", "ask them, and start it again"))
        else:
            self.lease = LeaseError(
                f"was taken over by {facts['by']} at {facts['since']}, epoch {facts['epoch']} > {epoch}",
                hint="end this run, or close the cluster and connect again",
                worker=worker,
                may_have_run=True,
            )

    async def of_executor(self, data: DataChannel, reason: BaseException | None) -> ExecutorCrashed | None:
        """Return how the executor of a data connection ended, as soon as its daemon reports that.

        The result is None if the daemon does not report it in time, or if the master itself ended the connection.
        """
        if not isinstance(reason, ProtocolError):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(NEWS_S):
                    while self.phase is Phase.OPEN and not data.is_explained_by(self.crash):
                        self.news.clear()
                        await self.news.wait()
        return self.crash if data.is_explained_by(self.crash) else None

    async def of_worker(self, reason: object, worker: str, silent_s: float | None) -> DDLFError:
        """Return the reason why there is no connection to the daemon.

        Args:
            reason: The reason that the master has seen.
            worker: The worker's name in error messages.
            silent_s: Seconds since the worker's last sign of life.
        """
        lost = self.lost(reason, worker, silent_s)
        code = await self._how_ended() if not self.is_closed else None
        if code is not None and isinstance(lost, WorkerLost):
            lost.signal = signal.Signals(-code).name if code < 0 else None
            lost.message = (
                f"its process was ended by {lost.signal}" if code < 0 else f"its process ended with exit code {code}"
            )
            lost.hint = "connect again: that starts a new one"
        return lost

    def lost(self, reason: object, worker: str, silent_s: float | None) -> LeaseError | WorkerLost:
        """Return the reason like ``of_worker``, but without asking for the exit code of the worker's process."""
        if self.lease is not None:
            return self.lease
        lost = WorkerLost(
            f"the connection was lost ({reason or 'the other side closed it'})",
            worker=worker,
            hint="look at the worker's terminal, or ask with: ddlf status",
            last_seen_s=silent_s,
        )
        if self._stopped_by:
            lost.message, lost.hint = f"was stopped by {self._stopped_by}", self._stopped_hint
        return lost


def of_start(last_exit: dict[str, Any], worker: str) -> ExecutorCrashed:
    """Return the error for a worker that has given up starting its executor."""
    return ExecutorCrashed(
        f"it cannot start its executor, the last one {last_exit['text']}",
        worker=worker,
        hint="repair the cause, then: ddlf stop --restart",
        exit_code_of_process=last_exit["exit_code"],
        signal=last_exit["signal"],
        stderr_tail=last_exit["stderr_tail"],
    )
