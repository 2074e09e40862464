"""Events about writing and reading checkpoints."""

from __future__ import annotations

from ddlf.events.event import Event


class CheckpointWritten(Event):
    """A checkpoint is complete and on the disk.

    Args:
        version: Number of merges in it, as in its name.
        path: Path of the checkpoint folder.
        seconds: Seconds that it took, from the first request for state on workers.
        slices: Number of slices that workers have written; 0 if the master has written the whole checkpoint.
        through: Workers that cannot see the folder, so that the master has written their slices.
    """

    version: int
    path: str
    seconds: float
    slices: int = 0
    through: tuple[int, ...] = ()


class CheckpointFailed(Event):
    """A checkpoint could not be written. Training continues.

    Args:
        round: Newest complete round when the checkpoint began.
        why: The error's text.
        newest: Number of the newest complete checkpoint; None without one.
    """

    round: int
    why: str
    newest: int | None = None


class CheckpointDamaged(Event):
    """A part of a checkpoint is damaged. The run uses another one, or continues without this part.

    Args:
        why: The damaged part, and its replacement.
    """

    why: str
