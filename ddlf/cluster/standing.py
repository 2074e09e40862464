"""Whether a worker can be asked, and why it, or its executor, is not there any more. Runs on the master.

When a data connection ends, the daemon says why on the control connection; when that one ends, what was said before does, or whoever started the
worker's process.
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
"""What a daemon tells of; what a newer one may tell besides is not heard."""
NEWS_S = 2.0
"""How long after the end of a data connection its daemon may take to say how the executor ended."""


async def unknown() -> None:
    """How a process ended that nobody here started."""


class Phase(Enum):
    """Where a link stands, with what there is to say and to do when nothing can be asked.

    NEW or LOST -> OPEN when the daemon has let this side in; OPEN -> LOST when control ends; anything -> CLOSED by ``close``; CLOSED -> NEW by the
    next ``connect``, which is that of a new master.
    """

    NEW = ("not connected yet", "connect first: await cluster.connect(), or async with cluster")
    OPEN = ("", "")
    LOST = ("the connection was lost", "connect again, or look at the worker's terminal")
    CLOSED = ("the connection was closed on this side", "connect again")


class Standing:
    """Where the link to one worker stands, and what is known of why it is not open.

    Args:
        how_ended: Returns the exit code of the worker's process, negative for a signal; None while it runs, or where nobody here started it.

    Attributes:
        phase: Where it stands.
        crash: How the last executor ended that did.
        news: Set when something of it has become known.
        lease: The error for a worker that another master has taken over; None if this one has it.
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
        """Whether this side has closed the link, and not begun again."""
        return self.phase is Phase.CLOSED

    @property
    def in_use(self) -> bool:
        """Whether this side has the worker as far as it is concerned, whatever has become of the connection."""
        return self.phase in (Phase.OPEN, Phase.LOST)

    def open(self) -> None:
        """A daemon has let this side in: what others did before says nothing about it."""
        self.phase, self.lease, self._stopped_by = Phase.OPEN, None, ""

    def lose(self) -> None:
        """The connection to the daemon has ended."""
        self.phase = Phase.CLOSED if self.is_closed else Phase.LOST
        self.news.set()

    def close(self) -> None:
        """This side ends the link."""
        self.phase, self.lease = Phase.CLOSED, None

    def reopen(self) -> None:
        """This side begins again, if it had closed the link."""
        self.phase = Phase.NEW if self.is_closed else self.phase

    def check_not_closed(self, worker: str) -> None:
        """Raise ``WorkerLost`` if this side has closed the link."""
        if self.is_closed:
            raise self.closed_here(worker, may_have_run=False)

    def closed_here(self, worker: str, **facts: Any) -> WorkerLost:
        """The error for what this side itself has ended."""
        return WorkerLost(Phase.CLOSED.value[0], worker=worker, **facts)

    def refusal(self, worker: str) -> RequestFailed:
        """The error for a request while there is no connection."""
        if self.lease is not None:
            return LeaseError(self.lease.message, hint=self.lease.hint, worker=worker)
        text, hint = self.phase.value
        return WorkerLost(text, worker=worker, hint=hint, may_have_run=False)

    def heard(self, event: str, facts: dict[str, Any], worker: str, *, epoch: int, first_id: int) -> None:
        """Note what the daemon says.

        Args:
            event: ``"executor_exited"``, ``"stopped_by"`` or ``"lease_lost"``.
            facts: What came with it.
            worker: As errors show it.
            epoch: Epoch of this side's lease.
            first_id: The lowest number of this side's requests.
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
                # Of another one's request, or of none, nothing follows for this side's.
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
        """How the executor of a data connection ended, as soon as its daemon says so; None if it does not, or it was this side that ended it."""
        if not isinstance(reason, ProtocolError):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(NEWS_S):
                    while self.phase is Phase.OPEN and not data.is_explained_by(self.crash):
                        self.news.clear()
                        await self.news.wait()
        return self.crash if data.is_explained_by(self.crash) else None

    async def of_worker(self, reason: object, worker: str, silent_s: float | None) -> DDLFError:
        """Why there is no connection to the daemon.

        Args:
            reason: What this side saw.
            worker: As errors show it.
            silent_s: How long the worker has given no sign of life.
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
        """The same, without what who started its process knows."""
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
    """The error for a worker that has given up starting its executor."""
    return ExecutorCrashed(
        f"it cannot start its executor, the last one {last_exit['text']}",
        worker=worker,
        hint="repair the cause, then: ddlf stop --restart",
        exit_code_of_process=last_exit["exit_code"],
        signal=last_exit["signal"],
        stderr_tail=last_exit["stderr_tail"],
    )
