"""What happens in a run, as values with facts only; whoever shows it, writes it down or reacts to it subscribes.

Rounds, slots and workers count from 1. Sentences are made of events in ``ddlf/observe``; only reasons (``why``) are texts here, as errors give them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, dataclass_transform

from ddlf.record import RoundRecord

How = Literal["complete", "converged", "stopped", "cancelled", "failed"]
"""How a run can end."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Event:
    """Something that has happened. Each kind is a frozen dataclass, whose arguments are given by name."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)


# -- a run ----------------------------------------------------------------------------------------------------------


class RunBegan(Event):
    """Training was asked for, and its settings can be used; nothing has been connected for it yet.

    Args:
        app: Name of the app's class.
        mode: ``"sync"`` or ``"async"``.
        epochs: Local epochs to train.
        worker_epochs: Local epochs in a round.
        batch_size: Samples in a batch of each worker.
        seed: Seed of everything random.
    """

    app: str
    mode: str
    epochs: int
    worker_epochs: int
    batch_size: int
    seed: int


class ModelBuilt(Event):
    """Every worker of the beginning that was not lost has built the model, and it is the same everywhere.

    Args:
        name: Name of the model.
        parameters: How many numbers its weights have.
        keras: Version of Keras on the workers.
        backends: Backends of Keras on the workers, each once.
        threads: Numbers of threads of the workers, each once.
        seconds: Seconds from the beginning of the connecting until model and data were ready.
        bfloat16_gain: How many times as fast matrix products are in bfloat16 on the first worker's machine; 0 where it was not measured.
    """

    name: str
    parameters: int
    keras: str
    backends: tuple[str, ...]
    threads: tuple[int, ...]
    seconds: float
    bfloat16_gain: float = 0.0


class DataLoaded(Event):
    """Every worker of the beginning that was not lost has the training data, and it is the same everywhere.

    Args:
        samples: Samples of training data.
        shape: Shape of one sample.
        content: Fingerprint of the training data.
        workers: How many workers have it.
        loaded: How many of them had to load it.
        seconds: Seconds that the slowest of them took to load it.
    """

    samples: int
    shape: tuple[int, ...]
    content: str
    workers: int
    loaded: int
    seconds: float


class Warned(Event):
    """Something of the app was found that is likely to be a mistake.

    Args:
        about: What it is of: ``"data"``, ``"model"`` or ``"callback"``.
        why: What was found.
    """

    about: str
    why: str


class TrainingBegan(Event):
    """The nodes are ready, and what the run goes on from is known.

    Args:
        mode: ``"sync"`` or ``"async"``.
        samples: Samples of training data.
        slots: Number of slots.
        fixed: Whether it stays this number whoever comes.
        workers: Workers of the cluster.
        version: Merges that the run goes on from; 0 for a new one.
        source: Path of the checkpoints that it goes on from; None for what the app was trained to before.
    """

    mode: str
    samples: int
    slots: int
    fixed: bool
    workers: int
    version: int = 0
    source: str | None = None


class NothingToTrain(Event):
    """A run that is gone on from has nothing left to train.

    Args:
        round: Rounds that were trained.
        epochs: Local epochs that were asked for.
        converged: Whether it had converged, rather than done them all.
    """

    round: int
    epochs: int
    converged: bool


class Committed(Event):
    """Updates were merged: the global weights are others.

    It comes when the record is complete, after the test of these weights if they are tested, and just before ``IApp.on_round``.

    Args:
        record: What the round, or in asynchronous training the update, was like.
    """

    record: RoundRecord


class RunEnded(Event):
    """Training has ended, and what there was to keep is kept.

    Args:
        how: ``"complete"``, ``"converged"``, ``"stopped"`` (by ``stop_training``), ``"cancelled"`` or ``"failed"``.
        version: Merges that the run has come to, those that it went on from included.
        why: The error's text if it has failed.
    """

    how: How
    version: int
    why: str = ""


class Evaluated(Event):
    """The master's model was evaluated on the test data by ``IApp.evaluate_model``.

    Args:
        metrics: Keras's metrics by name.
    """

    metrics: dict[str, float]


class ModelSaved(Event):
    """The master's model was saved.

    Args:
        path: Path of the file.
    """

    path: str


# -- slots and workers ----------------------------------------------------------------------------------------------


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
    """

    samples: int
    epochs: int
    compute_s: float
    transfer_s: float
    bytes_out: int
    bytes_back: int


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
    """What a biased codec still owed of a slot's updates went with its worker: the bits differ from here on.

    Args:
        codec: Name of the codec.
        why: How it went.
    """

    codec: str
    why: str


class SlotsChanged(Event):
    """There are more slots, because there are more workers.

    Args:
        round: First round that has as many.
        slots: Number of slots from there on.
    """

    round: int
    slots: int


class WorkerEvent(Event):
    """Something that has happened to a worker.

    Args:
        round: Newest round that was begun, or that of the slot that it carries.
        worker: Number of the worker.
    """

    round: int
    worker: int


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


# -- checkpoints ----------------------------------------------------------------------------------------------------


class CheckpointWritten(Event):
    """A checkpoint is complete and on the disk.

    Args:
        version: Merges that it is after, the number in its name.
        path: Path of the checkpoints' folder.
        seconds: Seconds from the beginning of the fetching of what workers hold for it.
    """

    version: int
    path: str
    seconds: float


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


KINDS: dict[str, type[Event]] = {
    name: kind
    for name, kind in list(globals().items())
    if isinstance(kind, type) and issubclass(kind, Event) and kind not in (Event, SlotEvent, WorkerEvent)
}
"""All events by name, in the order of this file."""
