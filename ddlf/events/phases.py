"""What takes time beside the training of slots: on the master, and on each worker before it can train.

Phases overlap: the master loads its data while the workers do, and evaluates while they train. So each has a number.
"""

from __future__ import annotations

from typing import Literal

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
