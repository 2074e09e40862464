"""Turns the news of a link about its worker into events. Runs on the master."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from operator import itemgetter
from typing import Any

from ddlf.events import (
    Event,
    ExecutorEnded,
    Stream,
    WorkerConnected,
    WorkerDisconnected,
    WorkerNotReached,
    WorkerWrote,
)

STREAMS: dict[int, Stream] = {1: "stdout", 2: "stderr"}


class News:
    """Emits events about one worker, while it is connected.

    Args:
        emit: Receives the events.
        session: Has the worker's number under ``id``; the number may change.
        called: Name in cluster.yaml; empty without one.
    """

    def __init__(self, emit: Callable[[Event], None], session: dict[str, Any], called: str) -> None:
        self._emit = emit
        self._session = session
        self._called = called
        self._is_connected = False
        self._was_connected = False

    @property
    def name(self) -> str:
        """The worker's name for people."""
        return self._called or f"worker {self._session['id']}"

    def _who(self) -> dict[str, Any]:
        return {"worker": self._session["id"], "name": self.name}

    def connected(self, address: str, facts: dict[str, Any]) -> None:
        """Report that the executor has answered, with facts about itself. Only the first of several calls counts."""
        if self._is_connected:
            return
        self._emit(
            WorkerConnected(
                **self._who(),
                address=address,
                host=str(facts["host"]),
                python=str(facts["python"]),
                cores=int(facts["cores"]),
                threads=int(facts["threads"]),
                again=self._was_connected,
            )
        )
        self._is_connected = self._was_connected = True

    def disconnected(self, why: str) -> None:
        """Report that the connection to the daemon has ended."""
        if self._is_connected:
            self._is_connected = False
            self._emit(WorkerDisconnected(**self._who(), why=why))

    def not_reached(self, tries: int, error: BaseException | None) -> None:
        """Report a failed attempt to reconnect."""
        self._emit(WorkerNotReached(**self._who(), tries=tries, why=getattr(error, "message", str(error))))

    def executor_ended(self, why: str) -> None:
        """Report the daemon's reason for the end of an executor."""
        if self._is_connected:
            self._emit(ExecutorEnded(**self._who(), why=why))

    def wrote(self, facts: dict[str, Any]) -> None:
        """Report the lines that user code wrote to both streams, in their order, as the daemon sent them."""
        dropped = int(facts["dropped"])
        for stream, lines in groupby(facts["lines"], itemgetter(0)):
            texts = tuple(str(text) for _, text in lines)
            self._emit(WorkerWrote(**self._who(), stream=STREAMS[stream], lines=texts, dropped=dropped))
            dropped = 0
        if dropped:
            self._emit(WorkerWrote(**self._who(), stream="stdout", lines=(), dropped=dropped))
