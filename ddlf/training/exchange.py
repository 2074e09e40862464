"""Tasks on their way to workers, and replies on their way back. Runs on the master; ``ddlf.training.slot.transfer`` is the worker's end.

The codecs are applied in ``ddlf.algorithms.encoding``; here is what the master remembers of each slot between rounds: for a delta exactly what the
slot's worker holds, so that another worker can be given the same.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol

from ddlf.algorithms.codec import Float32, Outward
from ddlf.algorithms.encoding import encode_delta, encode_update
from ddlf.algorithms.streaming import put
from ddlf.algorithms.update_check import Verdict
from ddlf.algorithms.weights import Weights
from ddlf.cluster.proxy import ProxyWorker
from ddlf.events import Event, SlotMoved
from ddlf.training.restoring import Restoring
from ddlf.training.roles import REPLICA
from ddlf.training.slot.parts import PARTS
from ddlf.training.slot.parts.fragments import changed, exchanged
from ddlf.training.slot.task import Reply, Task
from ddlf.training.states import SlotStates
from ddlf.training.steps import PlannedSteps


class WeightsOut:
    """The master's side of sending weights.

    Args:
        name: What ``Outward`` reads: a codec's text, or one after ``delta:``.
        lossless: Whether each tensor must arrive exactly.
        fragments: Whether only some tensors travel at a time: then those that a slot has stay where they are.

    Attributes:
        differences: Whether weights travel as differences.
        held: Weights that each slot holds, if they do.
        stays, restoring, compares, evaluation: See ``Outwards``.
    """

    stays = False
    restoring: Restoring | None = None
    evaluation: Any = None
    compares: Callable[[dict[int, Reply]], Awaitable[dict[int, Verdict]]] | None = None

    def __init__(self, name: str, lossless: Sequence[bool], *, fragments: bool = False) -> None:
        how = Outward.read(name)
        self._codec, self.differences = how.codec, how.delta or fragments
        self.lossless = lossless
        self.held: dict[int, Weights] = {}
        self._last: tuple[Weights, dict[str, Any]] | None = None
        self._sent: dict[int, tuple[int, Weights, dict[str, Any] | None]] = {}

    def encode(
        self, slot: int, weights: Weights, number: int, *, holds: bool = True, tensors: Sequence[int] | None = None
    ) -> dict[str, Any]:
        """What to send to the worker of a slot; without deltas it is encoded once for all of them.

        Args:
            slot: Which.
            weights: The global ones.
            number: Number of the slot's round. The same list in it again is not sent anew: another worker is given what the first one got. In a later
                round the same list, where nothing was merged meanwhile, is a difference to what the worker was brought to by the first.
            holds: Whether the worker has what was sent for this slot before.
            tensors: Numbers of those that are others than the slot holds; None if all may be.
        """
        if not self.differences:
            if self._last is None or self._last[0] is not weights:
                encoded, _ = encode_update(self._codec, weights, self.lossless)
                self._last = weights, {"delta": False, "encoded": encoded}
            return self._last[1]
        before = self._sent.get(slot)
        if before is None or before[0] != number or before[1] is not weights:
            self._sent[slot] = number, weights, self._difference(slot, weights, tensors)
        difference = self._sent[slot][2]
        if difference is not None and holds:
            return difference
        # Exactly what the slot's own worker would have now, so that the result is the same bits on another one.
        encoded, _ = encode_update(Float32(), self.held[slot], self.lossless)
        return {"delta": False, "encoded": encoded}

    def whole(self, weights: Weights) -> dict[str, Any]:
        """What to send to whoever need not hold anything: weights as they are, or as the codec makes them where they do not travel as differences."""
        codec = Float32() if self.differences else self._codec
        return {"delta": False, "encoded": encode_update(codec, weights, self.lossless)[0]}

    async def reach(self, worker: ProxyWorker) -> None:
        """Do what must be done before a worker can have its weights: nothing, when they come from here."""

    def silent(self, worker: int, other: int, why: str) -> None:
        """Hear that a worker hears nothing of another one: nobody needs that, when both are reached from here."""

    def _difference(self, slot: int, weights: Weights, tensors: Sequence[int] | None) -> dict[str, Any] | None:
        """What brings a slot to new weights; None where it holds nothing yet."""
        if slot not in self.held:
            self.held[slot] = weights
            return None
        chosen, held = range(len(weights)) if tensors is None else tensors, self.held[slot]
        new, old, exact = ([whole[i] for i in chosen] for whole in (weights, held, self.lossless))
        encoded, after = encode_delta(new, old, self._codec, exact)  # type: ignore[arg-type]
        self.held[slot] = put(held, chosen, after)
        return {"delta": True, "encoded": encoded} | ({} if tensors is None else {"tensors": list(tensors)})


class Outwards(Protocol):
    """How tasks get their weights: ``WeightsOut``, or ``Members`` of the sharded exchange.

    Attributes:
        stays: Whether updates do not come back.
        restoring: Has workers read slices of checkpoints, if they have the weights.
        compares: Gives the verdicts on updates that stay, by slot; None if they are here.
        evaluation: An ``EvaluationThere``, if workers share evaluations.
    """

    differences: bool
    held: dict[int, Weights]
    lossless: Sequence[bool]
    stays: bool
    evaluation: Any
    compares: Callable[[dict[int, Reply]], Awaitable[dict[int, Verdict]]] | None

    @property
    def restoring(self) -> Restoring | None: ...

    async def reach(self, worker: ProxyWorker) -> None: ...

    def silent(self, worker: int, other: int, why: str) -> None: ...

    def encode(
        self, slot: int, weights: Weights, number: int, *, holds: bool = True, tensors: Sequence[int] | None = None
    ) -> dict[str, Any]: ...

    def whole(self, weights: Weights) -> dict[str, Any]: ...


class Exchange:
    """What travels between a run and its workers.

    Args:
        name: Names the run on the workers.
        samples: n, in the data set of every node.
        codec: Name of the codec of updates.
        weights_out: How weights travel.
        states: What each slot has left for its next round, and where that is.
        emit: Takes the events of how far slots are.
        steps: What the optimizer of each slot makes, if something of it follows the run.
    """

    def __init__(
        self,
        name: str,
        samples: int,
        codec: str,
        weights_out: Outwards,
        states: SlotStates,
        emit: Callable[[Event], None] = lambda event: None,
        steps: PlannedSteps | None = None,
    ) -> None:
        self.states = states
        self._steps = steps
        self._emit = emit
        self._role = (name, REPLICA)
        self._samples = samples
        self._codec = codec
        self.weights_out = weights_out

    async def send(self, make: Callable[[], Task], worker: ProxyWorker, holds: bool) -> Reply:
        """Send a task to a worker, and wait for the reply.

        Args:
            make: Makes the task.
            worker: The worker that carries it.
            holds: Whether the slot's last round left its state there.

        Raises:
            AppMissing: The worker has lost what the run gave it.
            ProtocolError: It trained on other samples than those it was given.
        """
        begin = time.perf_counter()
        out, back = worker.bytes_sent, worker.bytes_received
        task = dataclasses.replace(
            make(), codec=self._codec, keep=self.states.keep, back=self.states.back, shared=self.states.shared
        )
        holds = await self.states.restored(task.slot, task.since, worker) or holds
        if self._steps is not None:
            task = dataclasses.replace(task, steps=tuple(self._steps.of(task.slot, task.round)))
        at, state = self.states.at(task.slot, holds), await self.states.of(task.slot, holds)
        await self.weights_out.reach(worker)
        exact, stays = self.weights_out.lossless, self.weights_out.stays
        fresh = changed(task, task.since, task.weights, exact) if task.merged and not stays else None
        encoded = self.weights_out.encode(task.slot, task.weights, task.round, holds=holds, tensors=fresh)
        message = dataclasses.replace(task, state=state, at=at, weights=encoded).to_message()
        answer = await worker.call(self._role, "train", message, hear=partial(self._moved, task, worker.id))
        tensors = None if stays else exchanged(task, task.weights, exact)
        reply = Reply.from_message(answer, task, task.weights, self._samples, worker.name, tensors, stays=stays)
        for part in PARTS:
            if part.name in reply.state:
                part.check(reply.state[part.name], task.weights, worker.name)
        return dataclasses.replace(
            reply,
            worker=worker.id,
            elapsed_s=time.perf_counter() - begin,
            bytes_out=worker.bytes_sent - out,
            bytes_back=worker.bytes_received - back,
        )

    async def measure(self, task: Task, worker: ProxyWorker) -> Any:
        """Have moving statistics computed anew with a task's weights, as ``whole`` made them, over its samples; see ``Replica.measure``."""
        await self.weights_out.reach(worker)
        return await worker.call(self._role, "measure", task.to_message())

    def whole(self, weights: Weights) -> dict[str, Any]:
        """See ``WeightsOut``."""
        return self.weights_out.whole(weights)

    def _moved(self, task: Task, worker: int, facts: dict[str, Any]) -> None:
        """Tell how far a worker says that it is with a task."""
        if facts["what"] == "silent":
            self.weights_out.silent(worker, facts["worker"], facts["why"])
            return
        loss = facts["loss"]
        self._emit(
            SlotMoved(
                round=task.round + 1,
                slot=task.slot + 1,
                worker=worker,
                done=int(facts["done"]),
                total=int(facts["total"]),
                epoch=int(facts["epoch"]),
                loss=None if loss is None else float(loss),
            )
        )

    async def stop(self, workers: Sequence[ProxyWorker], timeout_s: float) -> None:
        """Send STOP: what still trains ends at its next batch.

        Args:
            workers: All of the run.
            timeout_s: For how long one that does not take it is waited for.
        """
        telling = (worker.call(self._role, "stop", timeout_s=timeout_s) for worker in workers)
        await asyncio.gather(*telling, return_exceptions=True)

    def count(self, replies: Sequence[Reply], *, whole_round: bool) -> None:
        """Say whose updates count, and with them what these slots have left.

        Args:
            replies: With these updates.
            whole_round: Whether a round of all slots is over: those whose updates do not count hold its weights, too.
        """
        for reply in replies:
            self.states.left(reply)
        if whole_round:
            self.states.round_over(replies)
        held = self.weights_out.held
        for slot in held if whole_round else held.keys() & {reply.slot for reply in replies}:
            self.states.holds(slot, held[slot])
