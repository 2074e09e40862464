"""The workers of a cluster, whether they train, are called, or idle. ``cluster.subscribe`` gets these; an app's sinks do during its run, too."""

from __future__ import annotations

from typing import Literal

from ddlf.events.event import Event

Stream = Literal["stdout", "stderr"]
"""Where a program can write lines to."""


class ClusterEvent(Event):
    """Something that has happened to a worker of a cluster.

    Args:
        worker: Number of the worker.
        name: Name of the worker in cluster.yaml, else ``"worker 2"``.
    """

    worker: int
    name: str


class WorkerConnected(ClusterEvent):
    """A worker can be asked: its executor has answered.

    Args:
        address: Host and port of its daemon.
        host: Name that its machine has for itself.
        python: Version of Python there.
        cores: Cores that it may use.
        threads: Threads that it computes with; 0 where that is not known.
        again: Whether it had been connected before, and is back.
    """

    address: str
    host: str
    python: str
    cores: int
    threads: int
    again: bool = False


class WorkerDisconnected(ClusterEvent):
    """There is no connection to a worker any more.

    Args:
        why: The reason; empty when this side has left it.
    """

    why: str = ""


class WorkerNotReached(ClusterEvent):
    """A worker that was lost, or has not been there yet, was tried again in vain. It is tried again.

    Args:
        tries: How often it has been tried, one after the other.
        why: The reason of the last one.
    """

    tries: int
    why: str


class ExecutorEnded(ClusterEvent):
    """The process that ran user code on a worker has ended, and what it held is gone. Its daemon starts another one.

    Args:
        why: How it has ended.
    """

    why: str


class WorkerWrote(ClusterEvent):
    """User code on a worker has written lines: with ``print``, ``logging``, ``warnings``, or what else writes to Python's standard streams.

    What is written faster than a worker may send, or than it can be taken, is dropped, and counted here: the lines of all these events and what was
    dropped are together all lines that were written while this side had the worker.

    Args:
        stream: ``"stdout"`` or ``"stderr"``.
        lines: The lines, without their ends. A very long one is cut, and says so. None where only some are missing.
        dropped: How many lines of the worker are missing just before these, of both streams.
    """

    stream: Stream
    lines: tuple[str, ...]
    dropped: int = 0
