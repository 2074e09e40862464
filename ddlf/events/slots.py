"""Events about slots: their workers, their progress and their updates."""

from __future__ import annotations

from ddlf.events.event import Event


class SlotEvent(Event):
    """Base of all events about one slot.

    Args:
        round: Round of the slot.
        slot: Number of the slot.
        worker: Number of the worker that computes it.
    """

    round: int
    slot: int
    worker: int


class SlotStarted(SlotEvent):
    """A slot was given to a worker."""


class SlotMoved(SlotEvent):
    """A slot has progressed. This event comes at most a few times a second. Your own ``train`` reports progress only if
    it calls ``replica.fit``.

    Args:
        done: Samples trained on in this round so far, counted once for each local epoch.
        total: Samples of the whole round, counted the same way.
        epoch: Number of the local epoch, counted over the whole run.
        loss: Loss of this epoch so far; None without one.
    """

    done: int
    total: int
    epoch: int
    loss: float | None = None


class SlotFinished(SlotEvent):
    """A worker has returned the update of a slot."""


class UpdateArrived(SlotEvent):
    """The master has received the update of a slot, and has not checked it yet.

    Args:
        samples: Number of samples that it was trained on.
        epochs: Number of local epochs.
        compute_s: Seconds of local training, on the worker's clock.
        transfer_s: Remaining seconds from sending the weights to receiving the update.
        bytes_out: Bytes sent for it.
        bytes_back: Bytes received for it.
        files: Numbers, from 1, of the first 100 partition files that the worker opened.
    """

    samples: int
    epochs: int
    compute_s: float
    transfer_s: float
    bytes_out: int
    bytes_back: int
    files: tuple[int, ...] = ()


class SlotBackedUp(SlotEvent):
    """A slot is late, so a second worker computes it, too."""


class UpdateRejected(SlotEvent):
    """An update was rejected.

    Args:
        why: The verdict on it.
    """

    why: str


class UpdateClipped(SlotEvent):
    """An update was scaled down.

    Args:
        factor: Its factor, below 1.
        why: The verdict on it.
    """

    factor: float
    why: str


class ResidualDropped(SlotEvent):
    """State of a slot was lost with its worker. The bits differ from here on.

    Args:
        codec: Name of the codec of updates.
        why: How it was lost.
        groups: Names of the lost state: ``residual``; ``own``, the slot's own weights, replaced by the global ones;
            ``optimizer``, its optimizer state, which restarts.
    """

    codec: str
    why: str
    groups: tuple[str, ...] = ("residual",)


class PartsChanged(Event):
    """Asynchronous slots get other numbers of samples, because their measured speeds differ.

    Args:
        round: First round with these numbers.
        samples: Number of samples of each slot in a round.
    """

    round: int
    samples: tuple[int, ...]


class FilesChanged(Event):
    """Training changes to newer partition files with the same samples.

    Args:
        round: First round that reads them.
        before: Previous version of the data set.
        version: New version of the data set.
        files: Number of its partition files.
    """

    round: int
    before: int
    version: int
    files: int


class SlotsChanged(Event):
    """The number of slots has grown, because workers have joined.

    Args:
        round: First round with this number.
        slots: New number of slots.
    """

    round: int
    slots: int
