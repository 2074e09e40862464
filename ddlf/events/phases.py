"""What takes time beside the training of slots: on the master, and on each worker before it can train.

Phases overlap: the master loads its data while the workers do, and evaluates while they train. So each has a number.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, Self

from ddlf.events.event import Event

What = Literal[
    "starting",
    "connecting",
    "importing",
    "sending",
    "loading",
    "building",
    "evaluating",
    "validating",
    "saving",
    "writing",
]
"""What a phase can be: starting workers' processes, connecting to workers, importing the backend, sending code, loading data, building the model,
evaluating test or validation data, saving the model, writing a checkpoint."""


class PhaseEvent(Event):
    """Something that takes time, and a screen that stands still should say what for.

    Args:
        phase: Number of the phase, another one for each in this process.
        what: What is being done; one of ``ddlf.events.What``.
        worker: Number of the worker that does it, or for which it is done; 0 for the master.
        name: Name of that worker in cluster.yaml, else ``"worker 2"``; empty for the master.
    """

    phase: int
    what: What
    worker: int = 0
    name: str = ""


class PhaseBegan(PhaseEvent):
    """It has begun.

    Args:
        total: How much there is to do; 0 where that is not known.
        unit: Unit of the total: ``"workers"``, ``"bytes"``, ``"samples"``; empty where there is none.
        address: Host and port of what is connected to; empty where nothing is.
    """

    total: int = 0
    unit: str = ""
    address: str = ""


class PhaseMoved(PhaseEvent):
    """A part of it is done.

    Args:
        done: How much so far, in the unit that was told when it began.
    """

    done: int


class PhaseEnded(PhaseEvent):
    """It is over, well or not.

    Args:
        seconds: Seconds that it took.
        why: The error's text if it has failed, or ``"cancelled"``.
    """

    seconds: float
    why: str = ""


_numbers = itertools.count(1)


class Phase:
    """A phase, from ``with`` to the end of its block.

    Args:
        emit: Takes its events.
        what: What is being done.
        worker: Number of the worker that does it, or for which it is done; 0 for the master.
        name: Name of that worker.
        total: How much there is to do; 0 where that is not known.
        unit: Unit of the total.
        address: Of what is connected to.
    """

    def __init__(
        self,
        emit: Callable[[Event], None],
        what: What,
        *,
        worker: int = 0,
        name: str = "",
        total: int = 0,
        unit: str = "",
        address: str = "",
    ) -> None:
        self._emit = emit
        self._of: dict[str, Any] = {"phase": next(_numbers), "what": what, "worker": worker, "name": name}
        self._amount: dict[str, Any] = {"total": total, "unit": unit, "address": address}
        self._begin = 0.0

    def __enter__(self) -> Self:
        self._begin = time.perf_counter()
        self._emit(PhaseBegan(**self._of, **self._amount))
        return self

    def move(self, done: int) -> None:
        """Say how much is done; each time it is told, so a few times a second is enough."""
        self._emit(PhaseMoved(**self._of, done=done))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        why = (
            ""
            if error is None
            else (str(error) or type(error).__name__ if isinstance(error, Exception) else "cancelled")
        )
        self._emit(PhaseEnded(**self._of, seconds=time.perf_counter() - self._begin, why=why))


class PhasesInTurn:
    """Phases of one worker, of which each begins when the one before is over.

    Args:
        emit: Takes their events.
        worker: Number of the worker.
        name: Name of the worker.
    """

    def __init__(self, emit: Callable[[Event], None], worker: int, name: str) -> None:
        self._emit = emit
        self._who: dict[str, Any] = {"worker": worker, "name": name}
        self._now: Phase | None = None

    def __enter__(self) -> Self:
        return self

    def begin(self, what: What, *, total: int = 0, unit: str = "") -> None:
        """End the phase of now, and begin the next one."""
        self.__exit__(None, None, None)
        self._now = Phase(self._emit, what, **self._who, total=total, unit=unit).__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        now, self._now = self._now, None
        if now is not None:
            now.__exit__(kind, error, traceback)
