"""The parts of a slot's state: ``SlotPart``. Each file in ``parts`` defines one.

A different worker may carry each round of a slot. So a slot keeps everything that one round passes to the next in
parts. Each part is a list of arrays. A part has two halves. On the worker it begins and ends each round. On the master
it says whether the slots of a run keep it, and where it is between two rounds. Tasks, replies and checkpoints contain
it under the part's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ddlf.algorithms.encoding import EncodedUpdate
from ddlf.algorithms.weights import Weights
from ddlf.training.context import App
from ddlf.training.slot.model import TrainableModel
from ddlf.training.slot.task import SlotState, Task
from ddlf.training.spec import RunSpec

Left = list[Any]
"""The arrays that a part leaves after a round; None for a tensor without a value."""


@dataclass(slots=True)
class SlotRound:
    """One round of a slot on its worker.

    Args:
        task: The round.
        model: The model that is trained.

    Attributes:
        exact: Whether each tensor must travel exactly.
        weights: Global weights of the round, as the worker received them.
        begun: Weights that local training begins with.
        stopped: Whether local training was ended early.
        tensors: Numbers of the tensors whose updates travel back; None for all.
        encoded: The update as it travels.
        codec_error: Relative L2 error of the update as it travels.
    """

    task: Task
    model: TrainableModel
    exact: list[bool] = field(init=False)
    weights: Weights = field(default_factory=list)
    begun: Weights = field(default_factory=list)
    stopped: bool = False
    tensors: Sequence[int] | None = None
    encoded: EncodedUpdate | None = None
    codec_error: float = 0.0

    def __post_init__(self) -> None:
        self.exact = [flag or i in self.task.apart for i, flag in enumerate(self.model.lossless)]

    @property
    def trains(self) -> bool:
        """Whether the round has steps of local training."""
        return bool(len(self.task.indices)) and self.model.gradient is None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPlan:
    """Facts about a run, for a part to decide whether slots keep it.

    Args:
        spec: The spec of the run.
        optimizer: The optimizer of the compiled model, as ``describe_optimizer`` returns it.
        differences: Whether weights travel as differences.
        callbacks: Whether the app has ``worker_callbacks``.
    """

    spec: RunSpec
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    differences: bool = False
    callbacks: bool = False

    @property
    def sharded(self) -> bool:
        """Whether the workers exchange slices, so that the weights are not on the master."""
        return self.spec.exchange.on_workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Where a part is between two rounds, and how the master uses it.

    A part always stays on the worker that left it. If it does not come back, the master fetches it when another worker
    needs it, for a checkpoint, and at the end of the run.

    Args:
        back: Whether it also comes back with each reply.
        copied: Whether another worker keeps a copy in the sharded exchange, because losing it is expensive.
        mean: Computes the mean of this part over the slots, weighted by samples; receives None for a slot without the
            part. None if slots need no mean.
        shared: Whether each slot begins its next round with that mean instead of its own part.
        part: The class of the part, which ``kept_parts`` sets.
    """

    back: bool = False
    copied: bool = False
    mean: Callable[[Sequence[Any], Sequence[int]], Left] | None = None
    shared: bool = False
    part: type[SlotPart] | None = None


class SlotPart:
    """One part of a slot's state. Subclass it in a new file, and list the class in ``parts/__init__.py``.

    Args:
        app: The app on this worker.
        model: Its model.

    Attributes:
        name: Name of the part in tasks, replies and checkpoints.
        travels: Whether it travels. False if the master can compute it itself.
        finite: Whether its arrays must be finite.
        kept_with: The setting that makes slots keep it, and the beginning of its value. ``BackupAndRestore`` is refused
            with it, since it stores only weights and optimizer.
    """

    name: ClassVar[str]
    travels: ClassVar[bool] = True
    finite: ClassVar[bool] = False
    kept_with: ClassVar[tuple[str, str] | None] = None

    def __init__(self, app: App, model: TrainableModel) -> None: ...

    # -- on the worker ------------------------------------------------------------------------------------------------

    def is_needed(self, task: Task, state: SlotState) -> bool:
        """Return whether the part has something to do in a round; otherwise the round does not call it.

        The answer may depend on the run, and on the names in ``state``, but not on the round.

        Args:
            task: The round.
            state: State of the slot that the round begins with.
        """
        return self.name in task.keep or self.name in state

    def begin(self, round: SlotRound, weights: Weights, left: Left | None) -> Weights:
        """Begin a round, in the order of the list.

        Args:
            round: The round.
            weights: Weights that local training would begin with.
            left: The arrays that this part left after the slot's round before; None in its first round.

        Returns:
            Weights that local training begins with.
        """
        return weights

    def end(self, round: SlotRound, update: Weights) -> tuple[Weights, Left | None]:
        """End a round, in the reverse order of the list.

        Args:
            round: The round.
            update: Weights before minus weights after.

        Returns:
            The update that goes to the master, and the arrays that this part leaves for the slot's next round.
        """
        return update, None

    def fit_begins(self) -> Callable[[], None] | None:
        """Prepare a call of ``fit``. The returned function is called after ``on_train_begin`` of all callbacks."""

    def epoch_begins(self) -> None:
        """Prepare an epoch, before its learning rate is set."""

    # -- on the master ------------------------------------------------------------------------------------------------

    @classmethod
    def kept(cls, plan: SlotPlan) -> Kept | None:
        """Return how the slots of a run keep this part; None if they do not."""
        return None

    @classmethod
    def goes_on(cls, before: Mapping[str, Any], now: Mapping[str, Any], same: bool) -> bool:
        """Return whether a training that continues an earlier one can use the arrays that its slots left.

        Args:
            before: Settings of the earlier training.
            now: Settings of this one.
            same: Whether both merge by the same rules.
        """
        return True

    @classmethod
    def begins_with(cls, mean: Left, slots: int, like: Weights) -> dict[str, Any]:
        """Return the fields of a task that begins with the mean of this part, by name.

        Args:
            mean: The mean, or the sum over the slots.
            slots: Number of slots in the sum; 0 for a mean.
            like: Arrays with the types of the model's weights.
        """
        return {"shared": {cls.name: mean}}

    @classmethod
    def check(cls, left: Left, like: Weights, worker: str) -> None:
        """Check the arrays that came back from a worker.

        Args:
            left: The arrays.
            like: Arrays with the shapes and types of the model's weights.
            worker: Name of the worker.

        Raises:
            ProtocolError: The arrays cannot be used.
        """
