"""Checkpoints that are written and read."""

from __future__ import annotations

from ddlf.events.event import Event


class CheckpointWritten(Event):
    """A checkpoint is complete and on the disk.

    Args:
        version: Merges that it is after, the number in its name.
        path: Path of the checkpoints' folder.
        seconds: Seconds from the beginning of the fetching of what workers hold for it.
        slices: Slices of it, each written by who holds that part of the model; 0 if the master has written all of it.
        through: Workers whose slices the master has written, since they do not see the folder.
    """

    version: int
    path: str
    seconds: float
    slices: int = 0
    through: tuple[int, ...] = ()


class CheckpointFailed(Event):
    """A checkpoint could not be written. Training goes on.

    Args:
        round: Newest round that was complete when the checkpoint was begun.
        why: The error's text.
        newest: Number of the newest checkpoint that is whole; None if there is none.
    """

    round: int
    why: str
    newest: int | None = None


class CheckpointDamaged(Event):
    """Something of a checkpoint was found damaged when it was read, and is done without.

    Args:
        why: What is damaged, and what is used instead.
    """

    why: str
