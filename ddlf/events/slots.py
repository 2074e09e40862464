"""The slots of a run: who carries them, how far they are, and what becomes of their updates."""

from __future__ import annotations

from ddlf.events.event import Event


class SlotEvent(Event):
    """Something that has happened to a slot.

    Args:
        round: Round of the slot.
        slot: Number of the slot.
        worker: Number of the worker that carries it.
    """

    round: int
    slot: int
    worker: int


class SlotStarted(SlotEvent):
    """A slot was given to a worker."""


class SlotMoved(SlotEvent):
    """A worker has come further with a slot; told a few times a second at most, and not by an own ``train`` that does without ``replica.fit``.

    Args:
        done: Samples trained on so far in this round, those of each local epoch counted.
        total: Samples to be trained on in this round, counted likewise.
        epoch: Number of the local epoch, counted over the whole run.
        loss: Loss so far in this epoch; None when the model reports none.
    """

    done: int
    total: int
    epoch: int
    loss: float | None = None


class SlotFinished(SlotEvent):
    """A worker has brought the update of a slot."""


class UpdateArrived(SlotEvent):
    """The master has the update of a slot, and has not looked at it yet.

    Args:
        samples: Samples that it was trained on.
        epochs: Local epochs in it.
        compute_s: Seconds of local training, on the worker's clock.
        transfer_s: The other seconds from sending the weights to having the update.
        bytes_out: Bytes sent for it.
        bytes_back: Bytes received for it.
        files: Partition files that were opened for it, numbered from 1 as in the manifest; the first 100.
    """

    samples: int
    epochs: int
    compute_s: float
    transfer_s: float
    bytes_out: int
    bytes_back: int
    files: tuple[int, ...] = ()


class SlotBackedUp(SlotEvent):
    """A slot is late, and this second worker is about to compute it, too."""


class UpdateRejected(SlotEvent):
    """An update does not count.

    Args:
        why: The verdict on it.
    """

    why: str


class UpdateClipped(SlotEvent):
    """An update counts for less than was sent.

    Args:
        factor: By how much it was multiplied, below 1.
        why: The verdict on it.
    """

    factor: float
    why: str


class ResidualDropped(SlotEvent):
    """What a slot had left went with its worker: the bits differ from here on.

    Args:
        codec: Name of the codec of updates.
        why: How it went.
        groups: Names of what went: ``residual``; ``own``, its own weights, which are exchanged in fragments: it goes on with the global ones;
            ``optimizer``, the state of its optimizer, which begins anew.
    """

    codec: str
    why: str
    groups: tuple[str, ...] = ("residual",)


class PartsChanged(Event):
    """Slots of asynchronous training have parts of other sizes, because they were measured to be faster or slower.

    Args:
        round: First round that has them.
        samples: Samples of each slot in a round from there on.
    """

    round: int
    samples: tuple[int, ...]


class FilesChanged(Event):
    """Training goes over to other partition files of the same samples, which were made meanwhile.

    Args:
        round: First round that reads them.
        before: Version of the data set that was read before.
        version: Version that is read from there on.
        files: Partition files in it.
    """

    round: int
    before: int
    version: int
    files: int


class SlotsChanged(Event):
    """There are more slots, because there are more workers.

    Args:
        round: First round that has as many.
        slots: Number of slots from there on.
    """

    round: int
    slots: int
