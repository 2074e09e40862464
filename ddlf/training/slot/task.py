"""The task of a slot's round, its reply, and the slot state. The master makes tasks, and workers carry them.

A slot state consists of named groups of arrays, one for each slot part (``parts``). One policy holds for all groups:
groups in the task's ``keep`` stay on the worker, and groups in its ``back`` come back with the reply. When the slot
moves to another worker, its task brings the groups along.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from ddlf.algorithms.encoding import decode_update
from ddlf.algorithms.outer import with_values_at
from ddlf.algorithms.reading_order import Portion
from ddlf.algorithms.weights import Fault, Weights
from ddlf.errors import AppMissing, ProtocolError
from ddlf.training.slot.optimizers import Steps
from ddlf.training.slot.pushes import RoundPushes

SlotState = dict[str, list[Any]]
"""Groups of arrays by name. An array is None if the slot has no value for this tensor."""

OPTIMIZER = "optimizer"
"""State of the slot's optimizer, in Keras's order."""
RESIDUAL = "residual"
"""Residual of a biased codec: the difference between the slot's updates and the encoded ones, for each tensor."""
OWN = "own"
"""The slot's own weights, where weights are exchanged in fragments (``parts.fragments``)."""
CONTROL = "control"
"""The slot's control variate, for each trained weight, if the local rule has one (``algorithms/local_rules.py``)."""
APART = "apart"
"""The slot's own batch normalization (``parts.batchnorm``), None for each other weight."""
CALLBACKS = "callbacks"
"""Attributes of the slot's ``worker_callbacks``."""
HELD = "held"
"""The weights that the slot holds if they travel as differences. The master has them, too, so they never travel."""


MOST_FILES = 100
"""The largest number of opened files that a reply names."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Task:
    """The order from the master to a worker to train one slot (a share of the training) for one round.

    Args:
        slot: Number of the slot, from 0.
        round: The round, from 0.
        slots: Number of slots that train in this round: K, or fewer at the end of an epoch with few remaining samples.
        first_epoch: Local epochs of the slot before this round.
        epochs: Local epochs in this round.
        batch_size: Samples in a batch.
        seed: Seed of the run.
        indices: Numbers of the slot's samples, shape (n_j,), or its portion of the partition files.
        weights: The weights to begin with; in a message, the result of ``StarWeights.encode``.
        version: Number of merges in these weights.
        codec: Name of the codec of the update.
        rates: For each local epoch, the learning rates of the optimizer, or of each of several optimizers. Empty if
            no callback on the master has set them.
        keep: Groups of state that stay on the worker.
        back: Groups of state that come back with the reply.
        state: State that the slot begins with; None for the state that its last round left on this worker.
        shared: Groups of state that every slot begins with, instead of its own groups.
        local: The local rule, as text.
        control: Mean of the control variates of all slots; None for zeros, and if the rule has none.
        apart: Indices of the weights that each slot keeps for itself (``parts.batchnorm``).
        before: Number of the slot's last round; None for the one directly before this.
        merged: For each fragment of the weights, the last round that merged it, or -1; empty without fragments.
        wanted: Fragments whose updates come back.
        alpha: Share of its own values that the slot keeps in an exchanged fragment.
        steps: The steps of the slot's optimizer, as ``Steps`` has them; empty if no optimizer needs them.
    """

    slot: int
    round: int
    slots: int
    first_epoch: int
    epochs: int
    batch_size: int
    seed: int
    indices: Any  # SlotSamples, of any integer type
    weights: Any
    version: int
    codec: str = "float32"
    rates: Sequence[Sequence[float]] = ()
    keep: tuple[str, ...] = ()
    back: tuple[str, ...] = ()
    state: SlotState | None = None
    shared: SlotState = field(default_factory=dict)
    local: str = "plain"
    control: list[Any] | None = None
    apart: tuple[int, ...] = ()
    before: int | None = None
    merged: tuple[int, ...] = ()
    wanted: tuple[int, ...] = ()
    alpha: float = 0.0
    steps: tuple[int, ...] = ()

    @property
    def position(self) -> Steps | None:
        """How far the slot is in its run at this round, in steps; None if the master has not set it."""
        return Steps(*self.steps) if self.steps else None

    @property
    def since(self) -> int:
        """Number of the earlier round that left the state which the slot begins with."""
        return self.round - 1 if self.before is None else self.before

    def digest(self) -> str:
        """Return a fingerprint of the samples. The master uses it to check that the worker trained on them.

        It is the SHA-256 of the indices in order, as 64-bit integers. For partition files, it is the portion's digest.
        """
        if isinstance(self.indices, Portion):
            return self.indices.digest()
        return hashlib.sha256(np.ascontiguousarray(self.indices, "<i8").data).hexdigest()

    def to_message(self) -> dict[str, Any]:
        """Return the task as a message for the network."""
        message = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if isinstance(self.indices, Portion):
            message["indices"] = self.indices.to_message()
        return message

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Self:
        """Return the task that a message contains."""
        if isinstance(message["indices"], dict):
            message = message | {"indices": Portion.from_message(message["indices"])}
        return cls(**message)


@dataclass(frozen=True, slots=True, eq=False)
class MetricCounts:
    """The sums and counts behind a model's metrics. The counts of several slots can be added.

    Args:
        names: Names of the metrics; None in place of a name if the metric has another value than Keras. Empty if
            nothing is counted.
        state: An array for each variable of ``model.metrics``, which determine the named values. After an evaluation
            by batches, each array has one row for each batch.
    """

    names: Sequence[str | None] = ()
    state: Sequence[np.ndarray[Any, Any]] = ()


NOTHING_COUNTED = MetricCounts()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reply:
    """A worker's result of a task: the update, and facts about the training.

    Args:
        task: The task.
        update: Weights before minus weights after, one array each; in a message, encoded by the codec. If the update
            stays on its worker, the reason why it is unusable, or None.
        codec_error: Relative L2 error of the update as it travelled.
        samples: Number of samples trained on.
        fed: The samples that ``replica.fit`` received in all epochs, shape (m,), if they differ from the task's. For
            partition files, the number of epochs that were read, or the ranges of samples that count. For private
            data, the number of samples.
        metrics: Metrics of the last local epoch.
        counted: The counts behind the metrics.
        compute_s: Seconds of local training, on the worker's clock.
        wait_data_s: Seconds of waiting for samples within that time.
        files: Partition files that were opened for it, from 0, in order; empty with arrays.
        skipped: Damaged partition files, from 0, and the number of the task's samples that were left out with each.
        stopped: Whether it was ended early.
        state: Groups of state that the task asked for.
        worker: Number of the worker that carried out the task.
        openings: How often that worker had received the app by then. A worker that receives it again has lost its arrays.
        elapsed_s: Seconds from sending the task to receiving the update, on the master's clock.
        bytes_out: Bytes sent for it.
        bytes_back: Bytes received for it.
        pushed: The pushes and fetches of a Downpour round; None otherwise.
        entries: Number of label entries that count, at least 1, if the loss ignores some (``stabilisers/masked.py``);
            0 otherwise.
        overflow: The fields of ``Overflow`` if gradients overflowed in all steps; empty otherwise.
        swapped: Bytes that the worker's machine has read from swap for it.
    """

    task: Task
    update: Any
    codec_error: float
    samples: int
    fed: np.ndarray[Any, Any] | Sequence[Sequence[int]] | int | None
    metrics: dict[str, float]
    counted: MetricCounts
    compute_s: float
    wait_data_s: float
    files: Sequence[int]
    stopped: bool
    state: SlotState
    worker: int = 0
    openings: int = 0
    elapsed_s: float = 0.0
    bytes_out: int = 0
    bytes_back: int = 0
    pushed: RoundPushes | None = None
    skipped: Sequence[tuple[int, int]] = ()
    entries: int = 0
    overflow: Sequence[float] = ()
    swapped: int = 0

    @property
    def weight(self) -> int:
        """Weight of the update in a mean: its samples, or its counted label entries if the loss ignores some."""
        return self.entries or self.samples

    @property
    def slot(self) -> int:
        """The slot that was trained, from 0."""
        return self.task.slot

    def of_shards(self) -> dict[str, Any]:
        """Return the entries of a round's record about pushes and fetches; empty outside of Downpour."""
        if self.pushed is None:
            return {}
        pushes, fetches = (tuple(map(tuple, rows)) for rows in (self.pushed.pushes, self.pushed.fetches))
        return {"pushes": pushes, "fetches": fetches, "staleness": self.pushed.stalest}

    def to_message(self) -> dict[str, Any]:
        """Return the reply as a message: the worker's facts, and the fingerprint of the samples that it trained on."""
        facts = {name: getattr(self, name) for name in _FROM_WORKER}
        return {"digest": self.task.digest(), **facts, "overflow": tuple(self.overflow), "swapped": self.swapped}

    @classmethod
    def from_message(
        cls,
        message: dict[str, Any],
        task: Task,
        like: Weights,
        samples: int | None,
        worker: str,
        tensors: Sequence[int] | None = None,
        *,
        stays: bool = False,
    ) -> Self:
        """Return the reply that a message contains, after checking it, since it comes from another machine.

        Args:
            message: The result of ``to_message``.
            task: The task that it answers.
            like: The model's weights, for shapes and types.
            samples: n, the number of samples of all slots; None if the worker only reports how many it trained on.
            worker: Name of the worker, for errors.
            tensors: Numbers of the tensors whose updates come back; None for all. The others become zero.
            stays: Whether the update stays on the worker, so that the message only has its fault, if any.

        Raises:
            ProtocolError: The worker trained on wrong or nonexistent samples, or a fact is invalid.
            ConfigError: The update does not fit the model.
        """
        if message["digest"] != task.digest():
            raise ProtocolError("trained on other samples than it was given", worker=worker)
        facts = {name: message[name] for name in _FROM_WORKER}
        facts["update"] = _fault(facts["update"], worker) if stays else _decoded(facts["update"], like, tensors)
        facts["fed"] = _checked(facts["fed"], samples, worker, task.indices)
        expected = len(task.indices) - sum(samples for _, samples in _left_out(facts["skipped"], task, worker))
        if type(facts["samples"]) is not int or facts["samples"] != expected:  # it weighs the update
            raise ProtocolError(
                f"reports {facts['samples']!s:.40} trained samples, and was given {expected:,}", worker=worker
            )
        facts["files"] = tuple(int(file) for file in facts["files"][:MOST_FILES])
        facts["skipped"] = _left_out(facts["skipped"], task, worker)
        if type(facts["entries"]) is not int or facts["entries"] < 0:
            raise ProtocolError("reports no valid number of counted entries", worker=worker)
        facts["overflow"] = tuple(map(float, message.get("overflow", ())))  # earlier releases do not report it
        facts["swapped"] = int(message.get("swapped", 0))  # nor this
        facts["state"] = {name: list(facts["state"][name]) for name in task.back}
        return cls(task=task, **facts)


_FROM_WORKER = (
    *(
        field.name
        for field in dataclasses.fields(Reply)
        if field.name != "task" and field.default is dataclasses.MISSING
    ),
    "pushed",
    "skipped",
    "entries",
)


def _decoded(update: Any, like: Weights, tensors: Sequence[int] | None) -> Weights:
    if tensors is None:
        return decode_update(update, like)
    return with_values_at([np.zeros_like(w) for w in like], tensors, decode_update(update, [like[i] for i in tensors]))


def _fault(update: Any, worker: str) -> Fault | None:
    if update is not None and not isinstance(update, Fault):
        raise ProtocolError("sends an update that should stay there", worker=worker)
    return update


def _checked(
    fed: Any, samples: int | None, worker: str, indices: Any
) -> np.ndarray[Any, Any] | list[list[int]] | int | None:
    if fed is None or ((isinstance(indices, Portion) or samples is None) and type(fed) is int and fed >= 0):
        return fed
    if samples is None:
        raise ProtocolError("reports no valid number of trained samples", worker=worker)
    if isinstance(indices, Portion) and isinstance(fed, list):
        positions = [int(position) for begin, end in fed for position in (begin, end - 1)]
        if positions != sorted(positions) or (positions and not 0 <= positions[0] <= positions[-1] < len(indices)):
            raise ProtocolError("reports training on samples that it was not given", worker=worker)
        return fed
    if not isinstance(fed, np.ndarray) or fed.dtype != np.int64 or fed.ndim != 1 or not fed.size:
        raise ProtocolError("reports no valid numbers of trained samples", worker=worker)
    if fed.min() < 0 or fed.max() >= samples:
        raise ProtocolError(f"reports training on samples beyond the {samples:,} samples of the data", worker=worker)
    return fed


def _left_out(skipped: Any, task: Task, worker: str) -> Sequence[tuple[int, int]]:
    files = [(int(file), int(samples)) for file, samples in skipped]
    if files and not (
        isinstance(task.indices, Portion)
        and all(file >= 0 and samples > 0 for file, samples in files)
        and sum(samples for _, samples in files) < len(task.indices)
    ):
        raise ProtocolError("reports leaving out samples that it was not given", worker=worker)
    return files


class KeptStates:
    """The states that rounds of slots (shares of the training) left on one worker, for the slots' next rounds.

    Each slot has the states of its last two rounds: until the last round counts, the master may ask for the state
    before it. Groups that the master has itself are kept for the last round only.
    """

    def __init__(self) -> None:
        # slot -> number of its round, from 0 -> groups of the state after that round
        self._left: dict[int, dict[int, SlotState]] = {}

    def begin(self, task: Task) -> SlotState:
        """Return the state that a slot's round begins with: from the task, or left here by the slot's last round.

        Raises:
            AppMissing: The task expects the state of the slot's last round on this worker, but it is missing.
        """
        state = (self.state_after(task.slot, task.since) if task.state is None else task.state) | task.shared
        self._left[task.slot] = {task.since: state}
        return state

    def receive(self, slot: int, number: int, state: SlotState) -> None:
        """Store a slot's state here that the slot's round, numbered from 0, left on another worker."""
        self._left[slot] = {number: state}

    def store(self, task: Task, state: SlotState) -> None:
        """Store those groups of a slot's state, after its round, that the task says to keep on this worker."""
        ((number, before),) = self._left[task.slot].items()
        elsewhere = (*task.back, HELD)
        self._left[task.slot] = {
            number: {name: before[name] for name in task.keep if name in before and name not in elsewhere},
            task.round: {name: state[name] for name in task.keep},
        }

    def state_after(self, slot: int, number: int) -> SlotState:
        """Return the state that a slot's round, numbered from 0, left here. Any thread may call it.

        Raises:
            AppMissing: This worker does not have it, or has dropped it.
        """
        try:
            return self._left[slot][number]
        except KeyError:
            raise AppMissing(f"this worker has no state of slot {slot + 1} after round {number + 1}") from None
