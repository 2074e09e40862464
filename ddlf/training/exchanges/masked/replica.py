"""A replica whose updates leave the worker only under masks, for one secure sum in each round. Runs in the executor.

``ddlf.privacy.secure_sum`` has the protocol. The master asks for one step after another. This replica refuses a step that could
unmask its update: a second list of survivors, or a second sum of an update that it has helped to unmask.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ddlf.algorithms.encoding import decode_update
from ddlf.algorithms.weights import Weights, digest, fault, is_float
from ddlf.errors import ProtocolError
from ddlf.privacy.secure_sum import LEAST, Answer, Identity, Numbers, Offer, Share
from ddlf.training.context import App
from ddlf.training.exchanges.masked.rule import rule_of
from ddlf.training.slot.parts import SlotRound
from ddlf.training.slot.replica import Replica
from ddlf.training.slot.task import NOTHING_COUNTED, Reply, Task
from ddlf.worker.calls import concurrent

if TYPE_CHECKING:
    from ddlf.worker.worker import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """An update that waits on its worker for a sum.

    Args:
        slot: Number of the slot, from 0.
        round: The round, from 0.
        weight: The samples that weigh it.
        base: Fingerprint of the weights that its training began with.
        update: The update.
    """

    slot: int
    round: int
    weight: int
    base: str
    update: Weights


class MaskedReplica(Replica):
    """One worker's copy of an app and its model, whose updates leave it only under masks.

    Args:
        worker: The replica's worker.
        app: App that the master sent.
        run: Name of the run.
    """

    def __init__(self, worker: Worker, app: App, run: str = "") -> None:
        super().__init__(worker, app, run)
        self._run = run
        self._rule = rule_of(limit=app.update_limit, clip=app.update_clip, noise=app.noise_multiplier)
        self._identity = Identity()
        self._base = ""
        self._pending: Pending | None = None
        self._share: Share | None = None
        self._summed = -1  # the last round whose sum this worker has helped to unmask

    # -- verbs of the master, in the order of a sum -------------------------------------------------------------------

    @concurrent
    async def offer(self, attempt: str, slot: int, number: int) -> Offer | None:
        """Make a fresh key for a sum, and return its signed offer; None if this worker has no update of that round.

        Args:
            attempt: Random name of the sum.
            slot: Number of the slot, from 0.
            number: Number of the round, from 0.

        Raises:
            ProtocolError: The update is in a sum already. Two sums that differ by one member would show its update.
        """
        if number <= self._summed:
            raise ProtocolError(
                f"the master asks for the update of round {number + 1} again, which this worker has helped to unmask in a sum"
            )
        pending = self._pending
        if pending is None or (pending.slot, pending.round) != (slot, number):
            return None
        self._share = Share(self._run, attempt, slot + 1, self._identity, LEAST)
        return self._share.offer

    @concurrent
    async def mask(self, attempt: str, offers: Sequence[Mapping[str, Any]], most: int) -> Numbers:
        """Return the update under masks, as its rule makes numbers of it, shape (values,).

        Args:
            attempt: Random name of the sum.
            offers: The fields of the offers of all members, in the order of their numbers.
            most: The most samples of a member.

        Raises:
            BadUpdate: A value of the update is beyond the limit.
            ProtocolError: The offers, or the number of samples, cannot be right.
        """
        share, pending = self._in(attempt)
        if most < pending.weight:
            raise ProtocolError(f"a member has {pending.weight:,} samples, and the master says at most {most:,}")
        share.meet([Offer(**offer) for offer in offers], f"{pending.round} {most} {self._rule.terms} {pending.base}")
        trainable = [not exact for exact in self._model.lossless]

        def masked() -> Numbers:
            return share.masked(self._rule.numbers(pending.update, trainable, pending.weight, most))

        return await asyncio.to_thread(masked)

    @concurrent
    async def sign(self, attempt: str, survivors: Sequence[int]) -> bytes:
        """Return the signature under the list of survivors, by their numbers in the sum.

        Raises:
            ProtocolError: It is another list than before, or cannot be one.
        """
        return self._in(attempt)[0].sign(survivors)

    @concurrent
    async def unmask(self, attempt: str, signatures: Mapping[int, bytes]) -> Answer:
        """Return this worker's part of the masks of the sum, if all survivors have signed the same list.

        Args:
            attempt: Random name of the sum.
            signatures: The signature of each survivor, by its number in the sum.

        Raises:
            ProtocolError: A signature is missing or invalid.
        """
        share, pending = self._in(attempt)
        answer = share.answer(signatures)
        self._summed, self._pending, self._share = pending.round, None, None
        return answer

    def _in(self, attempt: str) -> tuple[Share, Pending]:
        """Return this worker's part of a sum, and its update.

        Raises:
            ProtocolError: It is in no such sum.
        """
        if self._share is None or self._pending is None or self._share.attempt != attempt:
            raise ProtocolError("the master asks about a secure sum that this worker is not in")
        return self._share, self._pending

    # -- on the compute thread ----------------------------------------------------------------------------------------

    def carry(self, task: Task) -> Reply:
        """Train a slot for one round, and keep the update on this worker.

        The reply has no metrics, which would tell about the worker's data alone. In the place of the update, it has the
        reason why the update is unusable, or None.
        """
        self._pending = self._share = None
        reply = super().carry(task)
        like = self._model.like
        update = [array.copy() for array in decode_update(reply.update, like)]  # a user's train may change its result
        problem = fault(update, reply.weight, like, [weight.path for weight in self.app.model.weights])
        if problem is None:
            # No merge averages integers, such as counters. As numbers of the sum, they could be beyond the limit.
            update = [array if is_float(array) else np.zeros_like(array) for array in update]
            self._pending = Pending(
                slot=task.slot, round=task.round, weight=reply.weight, base=self._base, update=update
            )
        return dataclasses.replace(reply, update=problem, metrics={}, counted=NOTHING_COUNTED)

    def _begin_round(self, task: Task) -> SlotRound:
        round = super()._begin_round(task)
        self._base = digest(round.weights)
        return round

    def _tell(self, epoch: int, samples: int, logs: Any) -> None:
        """Report the progress of this round to the master, without the loss."""
        super()._tell(epoch, samples, None)
