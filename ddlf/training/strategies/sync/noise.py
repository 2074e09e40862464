"""The noise of private workers in synchronous training: on sums of updates, or in the workers' steps. Runs on the master.

| noise | what is a release | when it is counted |
|---|---|---|
| ``NoisedSum`` | the sum of a round's updates, with the master's noise | before the master uses the sum |
| ``NoisedSteps`` | the update of each worker, whose steps have noise | before the master sends a task, again for each try |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ddlf.algorithms.merge import Merge, Rule
from ddlf.privacy.accountant import Cost
from ddlf.privacy.accountant import Noise as Multiplier
from ddlf.privacy.poisson import PoissonBatches
from ddlf.privacy.release import Mechanism
from ddlf.training.run import Run
from ddlf.training.slot.task import Reply, Task


class Noise(Protocol):
    """How a run protects the data of its workers."""

    def merge(self, run: Run, slots: int, rule: Rule) -> Merge:
        """Begin the merge of a round.

        Args:
            run: The run.
            slots: Number of slots that train in this round.
            rule: The merge rule of the run.
        """

    def cost_of_task(self, task: Task) -> Cost | None:
        """Return the cost of the update that answers a task; None if it stays with the master."""

    def cost_of_sum(self, replies: Sequence[Reply]) -> Cost | None:
        """Return the cost of the merged update; None if it tells no more than the updates."""


@dataclass(frozen=True, slots=True)
class WithoutNoise:
    """No noise, and so no release to count."""

    def merge(self, run: Run, slots: int, rule: Rule) -> Merge:
        """Begin the merge of a round by the rule."""
        return rule.start(slots, run.weights, run.facts.names)

    def cost_of_task(self, task: Task) -> Cost | None:
        """Return None."""
        return None

    def cost_of_sum(self, replies: Sequence[Reply]) -> Cost | None:
        """Return None."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisedSum(WithoutNoise):
    """The master clips updates, and noises their sum, which hides all data of a worker.

    Args:
        clip: Most norm of an update.
        noise: Noise multiplier of the sum.
    """

    clip: float
    noise: float

    def merge(self, run: Run, slots: int, rule: Rule) -> Merge:
        """Begin the release of a round. The divisor is the number of all slots, even if some miss the round."""
        mechanism = Mechanism(clip=self.clip, noise=self.noise, divisor=run.slots)
        return mechanism.start(slots, run.weights, run.facts.names, run.facts.trainable)

    def cost_of_sum(self, replies: Sequence[Reply]) -> Cost | None:
        """Return the cost of the release of a round: each slot whose update is in it pays."""
        return Cost(members=tuple(str(reply.slot + 1) for reply in replies), noise=Multiplier(multiplier=self.noise))


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisedSteps(WithoutNoise):
    """Workers clip the gradients of single samples, and noise their sum, which hides a sample of a worker.

    Args:
        noise: Noise multiplier of each step.
    """

    noise: float

    def cost_of_task(self, task: Task) -> Cost | None:
        """Return the cost of the steps that a task asks for. Its own slot pays."""
        batches = PoissonBatches(samples=len(task.indices), batch_size=task.batch_size)
        return batches.cost(str(task.slot + 1), self.noise, task.epochs)
