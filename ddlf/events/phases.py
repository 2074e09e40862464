"""Events about phases: work that takes time, on the master, and on each worker before it can train.

Phases overlap: the master loads its data while the workers load theirs, and evaluates while they train. Therefore each
phase has a number.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from ddlf.events import Event, PhaseBegan, PhaseEnded, PhaseMoved, What

_numbers = itertools.count(1)


class Phase:
    """Emits the events of a phase, such as loading data, that lasts as long as a ``with`` block.

    Args:
        emit: Receives its events.
        kind: Kind of the phase.
        worker: Number of the worker that it concerns; 0 for the master.
        name: Name of that worker.
        total: Amount of work; 0 if unknown.
        unit: Unit of the total.
        address: Host and port that the phase connects to.
    """

    def __init__(
        self,
        emit: Callable[[Event], None],
        kind: What,
        *,
        worker: int = 0,
        name: str = "",
        total: int = 0,
        unit: str = "",
        address: str = "",
    ) -> None:
        self._emit = emit
        self._of: dict[str, Any] = {"phase": next(_numbers), "what": kind, "worker": worker, "name": name}
        self._amount: dict[str, Any] = {"total": total, "unit": unit, "address": address}
        self._begin = 0.0

    def __enter__(self) -> Self:
        self._begin = time.perf_counter()
        self._emit(PhaseBegan(**self._of, **self._amount))
        return self

    def move(self, done: int) -> None:
        """Report the amount of work done. Each call emits an event, so a few calls a second are enough."""
        self._emit(PhaseMoved(**self._of, done=done))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        cause = (
            ""
            if error is None
            else (str(error) or type(error).__name__ if isinstance(error, Exception) else "cancelled")
        )
        self._emit(PhaseEnded(**self._of, seconds=time.perf_counter() - self._begin, why=cause))


class PhasesInTurn:
    """Emits the events of the phases of one worker that follow each other, such as loading data, then building the
    model.

    Args:
        emit: Receives their events.
        worker: Number of the worker.
        name: Name of the worker.
    """

    def __init__(self, emit: Callable[[Event], None], worker: int, name: str) -> None:
        self._emit = emit
        self._owner: dict[str, Any] = {"worker": worker, "name": name}
        self._now: Phase | None = None

    def __enter__(self) -> Self:
        return self

    def begin(self, kind: What, *, total: int = 0, unit: str = "") -> None:
        """End the current phase of the worker, if there is one, and begin the next phase."""
        self.__exit__(None, None, None)
        self._now = Phase(self._emit, kind, **self._owner, total=total, unit=unit).__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        now, self._now = self._now, None
        if now is not None:
            now.__exit__(kind, error, traceback)
