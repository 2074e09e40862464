"""Events about the workers of a run, which may come and go."""

from __future__ import annotations

from ddlf.events.event import Event


class WorkerEvent(Event):
    """Base of all events about one worker of a run.

    Args:
        round: Newest round that has begun, or the round of the worker's slot.
        worker: Number of the worker.
    """

    round: int
    worker: int


class WorkerReady(WorkerEvent):
    """A worker has loaded app, data and model for the beginning of the run.

    Args:
        name: Name of the worker.
    """

    name: str


class WorkerLost(WorkerEvent):
    """A worker was lost. The run tries to reconnect it.

    Args:
        slot: Number of its slot, which moves to another worker; None without a slot.
        why: The reason.
    """

    slot: int | None = None
    why: str


class WorkerReturned(WorkerEvent):
    """A lost worker has returned, and has loaded app, data and model again.

    Args:
        name: Name of the worker.
    """

    name: str


class WorkerJoined(WorkerEvent):
    """A worker has joined during the run.

    Args:
        name: Name of the worker.
        workers: Number of workers now.
        slots: Number of slots if it is fixed, else None.
    """

    name: str
    workers: int
    slots: int | None = None


class WorkerGone(WorkerEvent):
    """A worker has left the run for good.

    Args:
        rejected: Number of its rejected updates in a row if this is the reason, else 0.
        why: The error's text, possibly several lines, if there was an error.
    """

    rejected: int = 0
    why: str = ""


class WaitingForWorkers(Event):
    """All workers are lost.

    Args:
        round: Newest round that has begun.
        seconds: Seconds until the run ends, unless a worker returns.
    """

    round: int
    seconds: float
