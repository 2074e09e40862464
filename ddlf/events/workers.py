"""The workers of a run, which may come and go."""

from __future__ import annotations

from ddlf.events.event import Event


class WorkerEvent(Event):
    """Something that has happened to a worker.

    Args:
        round: Newest round that was begun, or that of the slot that it carries.
        worker: Number of the worker.
    """

    round: int
    worker: int


class WorkerReady(WorkerEvent):
    """A worker of the beginning has app, data and model.

    Args:
        name: Name of the worker.
    """

    name: str


class WorkerLost(WorkerEvent):
    """A worker was lost. The run tries to get it back.

    Args:
        slot: Number of the slot that it carried, which goes to another one; None if it carried none.
        why: How it was lost.
    """

    slot: int | None = None
    why: str


class WorkerReturned(WorkerEvent):
    """A lost worker is back, and has app, data and model again.

    Args:
        name: Name of the worker.
    """

    name: str


class WorkerJoined(WorkerEvent):
    """A worker that was not there at the beginning takes part.

    Args:
        name: Name of the worker.
        workers: Workers that take part now.
        slots: Number of slots if that stays what it is whoever comes, else None.
    """

    name: str
    workers: int
    slots: int | None = None


class WorkerGone(WorkerEvent):
    """A worker takes no part in this run any more.

    Args:
        rejected: How many of its updates in a row were rejected, if that is why, else 0.
        why: The error's text, of several lines maybe, if there was one.
    """

    rejected: int = 0
    why: str = ""


class WaitingForWorkers(Event):
    """No worker is left.

    Args:
        round: Newest round that was begun.
        seconds: Seconds until the run ends if none comes back.
    """

    round: int
    seconds: float
