"""The interface of a model for a replica: ``TrainableModel``. ``KerasModel`` and ``NumpyModel`` implement it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from ddlf.algorithms.local_rules import Control
from ddlf.algorithms.weights import Weights
from ddlf.training.slot.loss_scale import Overflow
from ddlf.training.slot.task import MetricCounts, Task

Gradient = Callable[[tuple[Any, ...], Weights], tuple[Weights, dict[str, float]]]


class LocalRuleSteps(Protocol):
    """Applies the local rule of a round (a change to the slots' gradients) in the steps of a model."""

    def begin(self, name: str, weights: Weights, control: Control | None, mean: Control | None) -> None:
        """Set the values that the local rule uses in the next round.

        Args:
            name: The rule as text.
            weights: Weights that local training begins with.
            control: The slot's control variate; None for zeros.
            mean: Mean of the control variates of all slots; None for zeros.
        """

    def count_steps(self) -> None:
        """Note that the learning rate may change after this call, since some rules depend on it."""

    def new_control(self, update: Weights) -> Control | None:
        """Return the slot's new control (estimate of its gradients) after its round; None if the rule has none.

        Args:
            update: Weights before minus weights after.
        """


class TrainableModel(Protocol):
    """The interface of a worker's model, which slots take turns to train, round by round.

    Attributes:
        like: Arrays with the shapes and types of the model's weights.
        lossless: Whether each weight must travel exactly, because it is not trained.
        gradient: Returns the gradient of a batch as an update, and its metrics, if a round is one gradient; None if slots
            train locally.
        rule: The local rule of the round.
    """

    like: Weights
    lossless: Sequence[bool]

    @property
    def gradient(self) -> Gradient | None: ...

    @property
    def rule(self) -> LocalRuleSteps: ...

    def begin(self, task: Task, optimizer: Weights | None) -> None:
        """Prepare a slot's round: set optimizer, learning rates and random numbers, but not the weights.

        Args:
            task: The round to train, with the slot and its samples.
            optimizer: State of the slot's optimizer; None for a fresh one.
        """

    def optimizer_state(self, task: Task) -> Weights:
        """Return the state of the slot's optimizer after its round."""

    def fit(
        self,
        data: Any,
        epochs: range,
        callbacks: Iterable[Any],
        begin_epoch: Callable[[int], None],
        end_batch: Callable[[int, int, Any], bool],
        begun: Callable[[], None],
    ) -> dict[str, float]:
        """Train the model on the feed's batches, from the weights that are set.

        Args:
            data: Dataset of a feed.
            epochs: Numbers of the epochs.
            callbacks: Callbacks of the user.
            begin_epoch: Called with the number of each epoch.
            end_batch: Called with the numbers of epoch and batch and the metrics so far; returns whether to stop.
            begun: Called after ``on_train_begin`` of all callbacks.

        Returns:
            Metrics of the last epoch.
        """

    def statistics(self, task: Task, weights: Weights, batches: Iterable[tuple[tuple[Any, ...], int]]) -> Weights:
        """Compute the moving statistics of batch normalization layers for given weights.

        Args:
            task: The round whose samples are used.
            weights: Weights to compute with.
            batches: Batches as ``fit`` takes them, and the number of samples in each.
        """

    def counted(self, metrics: dict[str, float]) -> MetricCounts:
        """Return the sums and counts behind the metrics of this round."""

    def overflow(self, task: Task) -> Overflow | None:
        """Return how a round with a scaled loss overflowed; None if it made a step.

        Raises:
            AppError: Gradients overflow even without a scale.
        """

    def entries(self, task: Task) -> int:
        """Return how many label entries of a round count in the loss, at least 1; 0 if the loss ignores no entries."""
