"""Synchronous training with secure aggregation: the master learns the sum of a round's updates, and no single one.

Runs on the master. One round::

    send the weights to the worker of each slot; wait for all replies, which have no update
    have these workers add up their updates under masks (``Sums``)
    w <- outer(w, merged), where the rule makes the merged update of the sum (``rule``)

If a worker is lost before anybody has helped to unmask a sum, the others make another one with fresh keys. If it is lost
later, or fewer than three workers are left, the round is void: its updates are dropped, and the weights stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ddlf.algorithms.outer import OuterOptimizer
from ddlf.algorithms.weights import Weights, is_float
from ddlf.cluster.proxy import ProxyWorker
from ddlf.errors import ClusterTooSmall, ProtocolError
from ddlf.privacy.secure_sum import LEAST, SECRET_BYTES, Answer, Numbers, unmasked
from ddlf.privacy.weighted_sum import check_types
from ddlf.training.crew.crew import SlotLeftOut
from ddlf.training.crew.recovery import LOSS, end_all
from ddlf.training.exchanges.masked.rule import Rule
from ddlf.training.run import Run, RunMustEnd
from ddlf.training.slot.task import Reply


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedRounds:
    """The training loop of synchronous rounds whose updates have masks.

    Args:
        outer: Changes the global weights with the merged update.
        rule: How updates are added up.
    """

    outer: OuterOptimizer
    rule: Rule

    def begin(self, run: Run) -> None:
        """Create the outer optimizer's state in ``run.state``, unless a checkpoint has restored it.

        Raises:
            ConfigError: A floating-point weight has another type than float32.
        """
        check_types(
            (
                (name, str(weight.dtype))
                for name, weight in zip(run.facts.names, run.weights, strict=True)
                if is_float(weight)
            ),
            hint="use a model with float32 weights, or leave out secure_aggregation",
        )
        if "outer" not in run.state:
            run.state["outer"] = self.outer.init(run.weights)

    async def train(self, run: Run) -> None:
        """Train until all rounds are done or the run has to end.

        Raises:
            ClusterTooSmall: Too many workers are away.
        """
        self.begin(run)
        sums = Sums(run, self.rule)
        with contextlib.suppress(RunMustEnd):
            async for round in run.rounds():
                trained = await run.all(round.tasks)
                if len(round.tasks) < LEAST:
                    raise ClusterTooSmall(
                        f"a secure sum needs {LEAST} workers with samples, and there are {len(round.tasks)}",
                        hint="look in load_dataset of the workers without samples",
                    )
                if len(trained) < LEAST:
                    raise ClusterTooSmall(
                        f"a secure sum needs {LEAST} workers, and {len(trained)} of {len(round.tasks)} are here",
                        hint="start the others again, and continue with resume",
                    )
                if (release := self.rule.cost(trained)) is not None:
                    await run.count(release)  # a sum that becomes void may have left, too
                summed, merged = await sums.of(trained)
                if merged is None:
                    await run.commit_void(trained)
                    continue
                run.state["outer"], weights = self.outer.update(
                    run.state["outer"], run.weights, merged, run.facts.trainable
                )
                await run.commit(weights, summed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """The outcome of one attempt at a sum.

    Args:
        members: The replies whose workers are still here.
        most: The most samples of a worker, which all of them have divided their own by.
        total: The sum of their numbers; None if somebody was lost meanwhile.
        is_opened: Whether a worker has helped to unmask it. Then its update may be in no other sum.
    """

    members: list[Reply]
    most: int = 0
    total: Numbers | None = None
    is_opened: bool = False


class Sums:
    """Has the workers of a run add up their updates, in one secure sum for each round. It passes messages between them.

    Args:
        run: The run.
        rule: How updates are added up.
    """

    def __init__(self, run: Run, rule: Rule) -> None:
        self._run, self._rule = run, rule
        self._values = sum(weight.size for weight in run.weights)
        self._at: dict[int, tuple[ProxyWorker, int] | None] = {}  # slot -> where its update is

    async def of(self, replies: Sequence[Reply]) -> tuple[list[Reply], Weights | None]:
        """Return the replies whose updates are in the sum of a round, and the merged update.

        The other slots are noted as left out. The merged update is None if the round is void.

        Args:
            replies: The replies of the round, in slot order. Their updates are on their workers.

        Raises:
            BadUpdate: A value of an update is beyond the limit.
            ProtocolError: A worker has refused a step, or has sent what cannot be right.
        """
        self._at = {reply.slot: self._run.crew.member(reply.worker) for reply in replies}
        tried = Tried(members=list(replies))
        while len(tried.members) >= LEAST and tried.total is None and not tried.is_opened:
            tried = await self._try(tried.members)
        if tried.total is None:
            reason = "a worker was lost while the sum was unmasked"
            if not tried.is_opened:
                reason = f"workers were lost, and a secure sum needs {LEAST}, not {len(tried.members)}"
            self._leave_out(replies, f"the round is void: {reason}")
            return [], None
        remaining_slots = {reply.slot for reply in tried.members}
        self._leave_out(
            [reply for reply in replies if reply.slot not in remaining_slots],
            "its worker was lost before the secure sum",
        )
        return tried.members, self._rule.merged(
            tried.total, tried.members, tried.most, self._run.weights, self._run.slots
        )

    async def _try(self, members: list[Reply]) -> Tried:
        """Make one attempt at a sum, with fresh keys."""
        attempt = secrets.token_hex(8)
        offers = await self._ask(members, "offer", lambda reply: (attempt, reply.slot, reply.task.round))
        members = [reply for reply in members if offers.get(reply.slot) is not None]
        if len(members) < LEAST:
            return Tried(members=members)
        roster, most = [asdict(offers[reply.slot]) for reply in members], max(reply.weight for reply in members)
        vectors = await self._ask(members, "mask", lambda reply: (attempt, roster, most))
        lost = {reply.slot + 1 for reply in members if reply.slot not in vectors}
        members = [reply for reply in members if reply.slot in vectors]
        if len(members) < LEAST:
            return Tried(members=members)
        member_numbers = [reply.slot + 1 for reply in members]
        signed_by_slot = await self._ask(members, "sign", lambda reply: (attempt, member_numbers))
        if len(signed_by_slot) < len(members):
            return Tried(members=[reply for reply in members if reply.slot in signed_by_slot])
        signatures = {slot + 1: signature for slot, signature in signed_by_slot.items()}
        answers = await self._ask(members, "unmask", lambda reply: (attempt, signatures))
        if len(answers) < len(members):
            return Tried(members=[], is_opened=True)
        total = unmasked(
            {reply.slot + 1: self._vector(reply, vectors[reply.slot]) for reply in members},
            {reply.slot + 1: _checked(reply, answers[reply.slot], lost) for reply in members},
        )
        return Tried(members=members, most=most, total=total, is_opened=True)

    async def _ask(
        self, members: Sequence[Reply], verb: str, arguments: Callable[[Reply], tuple[Any, ...]]
    ) -> dict[int, Any]:
        """Call a verb of the replicas that have the updates. Return the answers by slot. Lost workers have none."""
        answers: dict[int, Any] = {}

        async def ask(reply: Reply) -> None:
            member = self._at[reply.slot]
            if member is None or self._run.crew.member(reply.worker) != member:
                return  # it is lost, or back without its update
            try:
                answers[reply.slot] = await self._run.exchange.ask(member[0], verb, *arguments(reply))
            except LOSS as error:
                if self._run.crew.member(reply.worker) == member:
                    self._run.crew.lose(member[0], None, error)

        calls = [asyncio.ensure_future(ask(reply)) for reply in members]
        try:
            await asyncio.gather(*calls)
        except BaseException:
            await end_all(calls)
            raise
        return answers

    def _vector(self, reply: Reply, vector: Any) -> bytes:
        """Return the masked numbers of a worker as little-endian bytes."""
        if not (isinstance(vector, np.ndarray) and vector.dtype == np.uint32 and vector.shape == (self._values,)):
            raise ProtocolError(f"has sent no {self._values:,} masked numbers", worker=f"worker {reply.worker}")
        return vector.astype("<u4", copy=False).tobytes()

    def _leave_out(self, replies: Sequence[Reply], reason: str) -> None:
        """Note that the round is merged without some slots."""
        for reply in replies:
            self._run.leave_out(SlotLeftOut(reply.slot, reply.worker, reason))


def _checked(reply: Reply, answer: Answer, lost: set[int]) -> Answer:
    """Return a worker's part of the masks, after checking its form."""
    secrets = answer.seed, *answer.secrets.values()
    if set(answer.secrets) != lost or any(len(secret) != SECRET_BYTES for secret in secrets):
        raise ProtocolError("has sent masks that are not in the sum", worker=f"worker {reply.worker}")
    return answer
