"""Sends tasks to workers and receives their replies, for every exchange. Runs on the master.

Each exchange has a source of the weights for tasks. Without another source the master has them: ``StarWeights``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from ddlf.algorithms.codec import Float32, Outward
from ddlf.algorithms.encoding import encode_delta, encode_update
from ddlf.algorithms.outer import with_values_at
from ddlf.algorithms.update_check import Verdict
from ddlf.algorithms.weights import Weights
from ddlf.cluster.proxy import ProxyWorker
from ddlf.events import Event, SlotMoved
from ddlf.training.checkpoints.sliced_resume import Restoring
from ddlf.training.exchanges.states import SlotStates
from ddlf.training.roles import REPLICA
from ddlf.training.samples.partitions import PlannedSteps
from ddlf.training.slot.parts import WeightsMessage, changed_tensors, exchanged_tensors
from ddlf.training.slot.task import Reply, Task


class WeightSource(Protocol):
    """The interface of the object that supplies the weights for tasks. Each exchange has one.

    Attributes:
        stays: Whether updates stay on the workers.
        restoring: Lets workers read slices of checkpoints, if the workers hold the weights.
        compares: Returns the verdicts on updates that stay on workers, by slot; None if the master has the updates.
        evaluation: A ``WorkerEvaluation``, if workers share evaluations.
        encode_whole: Returns the message with whole weights, for workers that may hold nothing; None if workers have them.
    """

    differences: bool
    slot_weights: dict[int, Weights]
    lossless: Sequence[bool]
    stays: bool
    evaluation: Any
    compares: Callable[[dict[int, Reply]], Awaitable[dict[int, Verdict]]] | None

    @property
    def restoring(self) -> Restoring | None: ...

    async def reach(self, worker: ProxyWorker) -> None: ...

    def silent(self, worker: int, other: int, error: str) -> None: ...

    def encode(
        self, slot: int, weights: Weights, round: int, *, holds: bool = True, tensors: Sequence[int] | None = None
    ) -> Mapping[str, Any]: ...

    @property
    def encode_whole(self) -> Callable[[Weights], WeightsMessage] | None: ...


class StarWeights:
    """Supplies the weights for tasks from the master. ``ddlf.training.slot.parts`` has the worker's side.

    ``ddlf.algorithms.encoding`` applies the codecs. For delta codecs, the master keeps the exact weights that each
    slot's worker holds, so that another worker can get the same ones.

    Args:
        name: A codec that ``Outward`` can read, optionally with the prefix ``delta:``.
        lossless: For each tensor, whether it must arrive exactly.
        fragments: Whether only some tensors travel at a time; the slot keeps the others.

    Attributes:
        differences: Whether weights travel as differences.
        slot_weights: The weights that each slot holds, if they travel as differences.
        stays, restoring, compares, evaluation: The attributes of ``WeightSource``.
    """

    stays = False
    restoring: Restoring | None = None
    evaluation: Any = None
    compares: Callable[[dict[int, Reply]], Awaitable[dict[int, Verdict]]] | None = None

    def __init__(self, name: str, lossless: Sequence[bool], *, fragments: bool = False) -> None:
        outward = Outward.read(name)
        self._codec, self.differences = outward.codec, outward.delta or fragments
        self.lossless = lossless
        self.slot_weights: dict[int, Weights] = {}
        self._last: tuple[Weights, WeightsMessage] | None = None
        self._sent: dict[int, tuple[int, Weights, WeightsMessage | None]] = {}

    def encode(
        self, slot: int, weights: Weights, round: int, *, holds: bool = True, tensors: Sequence[int] | None = None
    ) -> WeightsMessage:
        """Return the message with the weights for a slot's worker. Without deltas, all slots share one encoding.

        Args:
            slot: Number of the slot, from 0.
            weights: The global weights.
            round: The slot's round. Within one round, the same list of weights gives the same message, so another
                worker gets what the first one got. In a later round, the same list (if no update was merged) gives a
                new difference, to the weights that the first message produced.
            holds: Whether the worker still has the last weights of this slot.
            tensors: Numbers of the tensors that may have changed; None for all.
        """
        if not self.differences:
            if self._last is None or self._last[0] is not weights:
                encoded, _ = encode_update(self._codec, weights, self.lossless)
                self._last = weights, {"delta": False, "encoded": encoded}
            return self._last[1]
        sent = self._sent.get(slot)
        if sent is None or sent[0] != round or sent[1] is not weights:
            self._sent[slot] = round, weights, self._difference(slot, weights, tensors)
        difference = self._sent[slot][2]
        if difference is not None and holds:
            return difference
        # Send exactly what the slot's own worker would have now, so that another one computes the same bits.
        encoded, _ = encode_update(Float32(), self.slot_weights[slot], self.lossless)
        return {"delta": False, "encoded": encoded}

    def encode_whole(self, weights: Weights) -> WeightsMessage:
        """Return the message with whole weights, for workers that may have no earlier weights.

        The weights are exact if they usually travel as differences, and encoded with the codec otherwise.
        """
        codec = Float32() if self.differences else self._codec
        return {"delta": False, "encoded": encode_update(codec, weights, self.lossless)[0]}

    async def reach(self, worker: ProxyWorker) -> None:
        """Do nothing to prepare a worker for weights, since the master sends them itself."""

    def silent(self, worker: int, other: int, error: str) -> None:
        """Ignore the report that two workers cannot reach each other, since the master reaches both."""

    def _difference(self, slot: int, weights: Weights, tensors: Sequence[int] | None) -> WeightsMessage | None:
        """Return the message that turns the weights on a slot's worker into new ones; None if it has no weights."""
        if slot not in self.slot_weights:
            self.slot_weights[slot] = weights
            return None
        indices, base = range(len(weights)) if tensors is None else tensors, self.slot_weights[slot]
        new, old, exact = ([values[i] for i in indices] for values in (weights, base, self.lossless))
        encoded, after = encode_delta(new, old, self._codec, exact)  # type: ignore[arg-type]
        self.slot_weights[slot] = with_values_at(base, indices, after)
        if tensors is None:
            return {"delta": True, "encoded": encoded}
        return {"delta": True, "encoded": encoded, "tensors": list(tensors)}


class Carrier:
    """Sends the tasks of a run to its workers, and receives their replies.

    Args:
        name: Name of the run on the workers.
        samples: n, the number of samples in every node's data set; None if each worker has its own.
        codec: Name of the codec for updates.
        weights_out: The source of the weights.
        states: The slot states, and where they are.
        emit: Receives the progress events of slots.
        steps: The step size of each slot's optimizer, if it depends on the progress of the run.
    """

    def __init__(
        self,
        name: str,
        samples: int | None,
        codec: str,
        weights_out: WeightSource,
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

    async def send(self, make_task: Callable[[], Task], worker: ProxyWorker, holds: bool) -> Reply:
        """Send a task to a worker, and return the reply.

        Args:
            make_task: Function that makes the task.
            worker: The worker that trains it.
            holds: Whether the worker holds the state of the slot's last round.

        Raises:
            AppMissing: The worker has lost the app of this run.
            ProtocolError: The worker trained on wrong samples.
        """
        begin = time.perf_counter()
        sent_before, received_before = worker.bytes_sent, worker.bytes_received
        task = self.completed(make_task())
        state, holds = await self.states.state_for(task, worker, holds)
        await self.weights_out.reach(worker)
        exact, stays = self.weights_out.lossless, self.weights_out.stays
        sent_tensors = changed_tensors(task, task.since, task.weights, exact) if task.merged and not stays else None
        encoded = self.weights_out.encode(task.slot, task.weights, task.round, holds=holds, tensors=sent_tensors)
        message = dataclasses.replace(task, state=state, weights=encoded).to_message()
        answer = await worker.call(self._role, "train", message, hear=partial(self._moved, task, worker.id))
        returned_tensors = exchanged_tensors(task, task.weights, exact) if task.merged and not stays else None
        reply = Reply.from_message(
            answer, task, task.weights, self._samples, worker.name, returned_tensors, stays=stays
        )
        self.states.check(reply, worker.name)
        return dataclasses.replace(
            reply,
            worker=worker.id,
            elapsed_s=time.perf_counter() - begin,
            bytes_out=worker.bytes_sent - sent_before,
            bytes_back=worker.bytes_received - received_before,
        )

    def completed(self, task: Task) -> Task:
        """Return a task with the codec, the parts of the slot state that it is about, and the steps of the run."""
        task = dataclasses.replace(
            task, codec=self._codec, keep=self.states.keep, back=self.states.back, shared=self.states.shared
        )
        if self._steps is not None:
            task = dataclasses.replace(task, steps=tuple(self._steps.of_round(task.slot, task.round)))
        return task

    async def measure(self, task: Task, worker: ProxyWorker) -> Any:
        """Have a worker compute batch normalization's moving statistics again, for a task's weights and samples.

        ``Replica.measure`` is the worker's side.
        """
        await self.weights_out.reach(worker)
        return await worker.call(self._role, "measure", task.to_message())

    async def ask(self, worker: ProxyWorker, verb: str, *arguments: Any) -> Any:
        """Call another verb of a worker's replica, and return its answer."""
        return await worker.call(self._role, verb, *arguments)

    def _moved(self, task: Task, worker: int, report: dict[str, Any]) -> None:
        """Emit an event for a worker's report of its progress in a task."""
        if report["what"] == "silent":
            self.weights_out.silent(worker, report["worker"], report["why"])
            return
        loss = report["loss"]
        self._emit(
            SlotMoved(
                round=task.round + 1,
                slot=task.slot + 1,
                worker=worker,
                done=int(report["done"]),
                total=int(report["total"]),
                epoch=int(report["epoch"]),
                loss=None if loss is None else float(loss),
            )
        )

    async def stop(self, workers: Sequence[ProxyWorker], timeout_s: float) -> None:
        """Tell workers that still train to stop after their current batch.

        Args:
            workers: All workers of the run.
            timeout_s: How long to wait for a worker that does not answer.
        """
        calls = (worker.call(self._role, "stop", timeout_s=timeout_s) for worker in workers)
        await asyncio.gather(*calls, return_exceptions=True)

    def count(self, replies: Sequence[Reply], *, whole_round: bool) -> None:
        """Accept the updates of replies, and store the slot states and weights that belong to them.

        Args:
            replies: The replies with accepted updates.
            whole_round: Whether a round of all slots is over. Then slots with rejected updates hold its weights, too.
        """
        for reply in replies:
            self.states.accept(reply)
        if whole_round:
            self.states.end_round(replies)
        slot_weights = self.weights_out.slot_weights
        for slot in slot_weights if whole_round else slot_weights.keys() & {reply.slot for reply in replies}:
            self.states.store_weights(slot, slot_weights[slot])
