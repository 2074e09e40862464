"""The orders to the workers of the parts of a split model, and their results. Runs on both sides.

An order travels as a dict of its fields, so that arrays in it are not copied. Results of workers travel as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from ddlf.algorithms.weights import Fault
from ddlf.training.exchanges.split.plan import PlanArguments
from ddlf.training.messages import Message
from ddlf.training.slot.pushes import RoundPushes
from ddlf.training.slot.task import MetricCounts, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSource(Message):
    """Where a worker gets the state of a part that it does not have. Only one field is set.

    Args:
        worker: Number of another worker that has the state.
        seed: Seed of the first weights.
        arrays: The arrays of the state, by name.
        slices: For each name in the state, its name in the slices of a checkpoint that this worker has received.
    """

    worker: int | None = None
    seed: int | None = None
    arrays: Mapping[str, np.ndarray[Any, Any]] | None = None
    slices: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOrder(Message):
    """The fields of an order to the worker of a part that training and evaluation share.

    Args:
        part: Number of the part.
        plan: How the model is cut.
        workers: Number of the worker of each part.
        attempt: Number of the attempt.
        backend: The master's backend of Keras.
        version: Version of the weights.
        copy: Number of the worker that keeps a copy of the state after the round; None for no copy.
        source: Where the worker gets the state; None if it has it, or if servers have the weights.
        entry: The entry of a strategy whose servers have the weights; None without servers.
    """

    part: int
    plan: PlanArguments
    workers: Sequence[int]
    attempt: int
    backend: str
    version: int
    copy: int | None
    source: PartSource | None
    entry: Mapping[str, Any] | None

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Self:
        """Return the order that a message contains."""
        source = None if message["source"] is None else PartSource.from_message(message["source"])
        return cls(**{**message, "plan": PlanArguments.from_message(message["plan"]), "source": source})


@dataclass(frozen=True, slots=True)
class PartTask:
    """The round that a part trains.

    Args:
        task: The task of the part's replica, without weights and state.
        samples: Number of samples of each replica's task.
    """

    task: Task
    samples: Sequence[int]

    def to_message(self) -> dict[str, Any]:
        """Return the round as a message for the network."""
        return {"task": self.task.to_message(), "samples": self.samples}

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Self:
        """Return the round that a message contains."""
        return cls(Task.from_message(message["task"]), message["samples"])


@dataclass(frozen=True, slots=True)
class PartEvaluation(Message):
    """The data that all parts evaluate.

    Args:
        data: ``"val"`` or ``"test"``.
        batch_size: Samples in a batch.
        samples: Number of samples.
        content: The fingerprints that the data must have.
    """

    data: str
    batch_size: int
    samples: int
    content: dict[str, str]


# -- results ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedPart:
    """The result of a part that has evaluated.

    Args:
        metrics: The metrics; empty for all parts but the last.
        losses: Sum of the losses that the layers of the part add.
    """

    metrics: Mapping[str, float]
    losses: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedPart:
    """The result of a part that has trained a round.

    Args:
        metrics, losses: The fields of ``EvaluatedPart``.
        counted: The counts behind the metrics.
        digest: Fingerprint of the samples.
        compute_s: Seconds of training.
        idle_s: Seconds of waiting for other parts within that time.
        wait_data_s: Seconds of waiting for samples within that time.
        pushed: The pushes and fetches, if servers have the weights.
    """

    metrics: Mapping[str, float]
    losses: float
    counted: MetricCounts
    digest: str
    compute_s: float
    idle_s: float
    wait_data_s: float
    pushed: RoundPushes | None = None


@dataclass(frozen=True, slots=True)
class PartUnreached:
    """The failure of a part that has not reached another worker.

    Args:
        worker: Number of the other worker.
        reason: The error, in one line.
    """

    worker: int
    reason: str


@dataclass(frozen=True, slots=True)
class PartRefused:
    """The failure of a part that cannot evaluate on its worker, so that the master must evaluate.

    Args:
        reason: Why it cannot.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class PartStopped:
    """The failure of a part whose training was stopped."""


@dataclass(frozen=True, slots=True)
class BadTensor:
    """The failure of a part that has computed a tensor with NaN or infinite values.

    Args:
        message, hint: The text of the error.
    """

    message: str
    hint: str


@dataclass(frozen=True, slots=True)
class UnusableWeights:
    """The failure of a part whose new weights cannot be used.

    Args:
        fault: The reason.
    """

    fault: Fault


Interrupted = PartUnreached | PartStopped | BadTensor
"""The failures of a part's passes."""
Trained = TrainedPart | Interrupted | UnusableWeights
Evaluated = EvaluatedPart | Interrupted | PartRefused
