"""Events about the workers of a cluster, for ``cluster.subscribe`` and, during a run, for the sinks of an app."""

from __future__ import annotations

from typing import Literal

from ddlf.events.event import Event

Stream = Literal["stdout", "stderr"]
"""The standard streams of a program."""


class ClusterEvent(Event):
    """Base of all events about one worker of a cluster.

    Args:
        worker: Number of the worker.
        name: Name of the worker in cluster.yaml, else ``"worker 2"``.
    """

    worker: int
    name: str


class WorkerConnected(ClusterEvent):
    """The executor of a worker has answered, so the worker can be used.

    Args:
        address: Host and port of its daemon.
        host: The machine's own host name.
        python: Version of Python on the worker.
        cores: Number of cores that it may use.
        threads: Number of threads that it computes with; 0 if unknown.
        again: Whether it was connected before.
    """

    address: str
    host: str
    python: str
    cores: int
    threads: int
    again: bool = False


class WorkerDisconnected(ClusterEvent):
    """The connection to a worker has ended.

    Args:
        why: The reason; empty if this side closed the connection.
    """

    why: str = ""


class WorkerNotReached(ClusterEvent):
    """Another attempt to connect to a missing worker has failed. More attempts follow.

    Args:
        tries: Number of failed attempts in a row.
        why: The reason of the last failure.
    """

    tries: int
    why: str


class ExecutorEnded(ClusterEvent):
    """A worker's executor has ended and lost its state. The daemon starts another one.

    Args:
        why: The signal or exit code, with the last lines of its log.
    """

    why: str


class WorkerWrote(ClusterEvent):
    """User code on a worker has written lines to a standard stream of Python, for example with ``print`` or ``logging``.

    A worker drops lines above a certain rate and counts them. All lines of these events and all dropped lines together
    are the lines that the worker has written while this master had it.

    Args:
        stream: ``"stdout"`` or ``"stderr"``.
        lines: The lines, without line ends; a very long one is cut and says so. Empty if only dropped lines are
            reported.
        dropped: Number of dropped lines of both streams, just before these.
    """

    stream: Stream
    lines: tuple[str, ...]
    dropped: int = 0
