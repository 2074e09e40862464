"""How updates of workers become numbers of a secure sum, and the sum an update. Pure; on workers and on the master.

| rule | numbers of a worker | merged update |
|---|---|---|
| ``BySamples`` | its update, times its samples divided by the most samples of a worker at the begin | the mean by samples |
| ``Noised`` | its clipped update with its share of the noise | the sum, divided by the number of all slots |

A sum has three updates at least, so a share of the noise has the variance ``(z C)^2 / 3``. More workers add more noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ddlf.algorithms.weights import Tensor, Weights
from ddlf.privacy.accountant import Cost, Noise
from ddlf.privacy.release import Mechanism
from ddlf.privacy.secure_sum import LEAST, Numbers
from ddlf.privacy.weighted_sum import UPDATE_LIMIT, mean_of, numbers_of
from ddlf.training.slot.task import Reply


class Rule(Protocol):
    """How the updates of a round are added up."""

    @property
    def terms(self) -> str:
        """The meaning of the numbers. Each worker signs it, so that all of them add up the same."""

    def numbers(self, update: Weights, trainable: Sequence[bool], weight: int, most: int) -> Numbers:
        """Return the numbers of a worker's update.

        Args:
            update: The update.
            trainable: For each weight, whether it is trained.
            weight: The worker's samples.
            most: The most samples of a worker that has offered a key for the sum.

        Raises:
            BadUpdate: A value is beyond the limit, or not finite.
        """

    def merged(
        self, total: Numbers, replies: Sequence[Reply], most: int, like: Sequence[Tensor], slots: int
    ) -> Weights:
        """Return the merged update.

        Args:
            total: The sum of the numbers.
            replies: The replies whose updates are in it.
            most: The most samples of a worker, as in ``numbers``. This worker may have been lost since.
            like: Arrays with the shapes and types of the weights.
            slots: Number of all slots.

        Raises:
            ProtocolError: The sum cannot be that of these workers.
        """

    def cost(self, replies: Sequence[Reply]) -> Cost | None:
        """Return the cost of a sum for the slots of these replies; None if it has no noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BySamples:
    """The mean by samples (FedAvg), as in ``ddlf.privacy.weighted_sum``.

    Args:
        limit: Largest magnitude of a value of an update.
    """

    limit: float = UPDATE_LIMIT

    @property
    def terms(self) -> str:
        """The limit."""
        return self.limit.hex()

    def numbers(self, update: Weights, trainable: Sequence[bool], weight: int, most: int) -> Numbers:
        """Return the weighted update as numbers."""
        return numbers_of(update, weight / most, self.limit)

    def merged(
        self, total: Numbers, replies: Sequence[Reply], most: int, like: Sequence[Tensor], slots: int
    ) -> Weights:
        """Return the mean by samples."""
        return mean_of(total, len(replies), sum(reply.weight / most for reply in replies), like, self.limit)

    def cost(self, replies: Sequence[Reply]) -> Cost | None:
        """Return None."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Noised:
    """The sum of clipped updates with noise, which each worker adds in a share (``ddlf.privacy.release``).

    Args:
        clip: Most norm of an update.
        noise: Noise multiplier of the sum.
        limit: Largest magnitude of a value of a clipped and noised update.
    """

    clip: float
    noise: float
    limit: float

    @property
    def terms(self) -> str:
        """Limit, clip and noise."""
        return " ".join(value.hex() for value in (self.limit, self.clip, self.noise))

    def numbers(self, update: Weights, trainable: Sequence[bool], weight: int, most: int) -> Numbers:
        """Return the clipped update with its share of the noise as numbers. Each worker counts once."""
        return numbers_of(mechanism(self.clip, self.noise).protected(update, trainable), 1.0, self.limit)

    def merged(
        self, total: Numbers, replies: Sequence[Reply], most: int, like: Sequence[Tensor], slots: int
    ) -> Weights:
        """Return the sum, divided by the number of all slots. Weights that are not trained have 0."""
        return mean_of(total, len(replies), slots, like, self.limit)

    def cost(self, replies: Sequence[Reply]) -> Cost | None:
        """Return the cost of the sum: each slot pays for the noise that three shares have."""
        return Cost(members=tuple(str(reply.slot + 1) for reply in replies), noise=Noise(multiplier=self.noise))


def mechanism(clip: float, noise: float) -> Mechanism:
    """Return the mechanism of a worker, whose share of the noise is enough if three workers add theirs."""
    return Mechanism(clip=clip, noise=noise, divisor=1, least=LEAST, trust="nobody")


def rule_of(*, limit: float | None, clip: float | None, noise: float | None) -> Rule:
    """Return the rule that the settings ``update_limit``, ``update_clip`` and ``noise_multiplier`` choose.

    The usual limit of noised values is beyond each of them (``Mechanism.largest``). A lower one is refused.
    """
    if clip is None or noise is None:
        return BySamples(limit=UPDATE_LIMIT if limit is None else float(limit))
    usual = mechanism(clip, noise).largest
    return Noised(clip=float(clip), noise=float(noise), limit=float(usual if limit is None else limit))
