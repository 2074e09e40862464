"""Sends tasks to workers and receives their replies, for every exchange. Runs on the master."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol

from ddlf.algorithms.update_check import Verdict
from ddlf.algorithms.weights import Weights
from ddlf.cluster.proxy import ProxyWorker
from ddlf.events import Event, SlotMoved
from ddlf.training.checkpoints.restoring import Restoring
from ddlf.training.exchanges.states import SlotStates
from ddlf.training.roles import REPLICA
from ddlf.training.samples.steps import PlannedSteps
from ddlf.training.slot.parts import changed, exchanged
from ddlf.training.slot.task import Reply, Task


class WeightSource(Protocol):
    """The source of the weights for tasks: each exchange has one.

    Attributes:
        stays: Whether updates stay on the workers.
        restoring: Lets workers read slices of checkpoints, if the workers hold the weights.
        compares: Returns the verdicts on updates that stay on workers, by slot; None if the master has the updates.
        evaluation: An ``EvaluationThere``, if workers share evaluations.
        whole: Returns the message with whole weights, for workers that may hold nothing; None if workers have them.
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

    @property
    def whole(self) -> Callable[[Weights], dict[str, Any]] | None: ...


class Carrier:
    """Carries tasks and replies between a run and its workers.

    Args:
        name: Name of the run on the workers.
        samples: n, the number of samples in every node's data set.
        codec: Name of the codec for updates.
        weights_out: The source of the weights.
        states: The slot states, and where they are.
        emit: Receives the progress events of slots.
        steps: The step size of each slot's optimizer, if it depends on the progress of the run.
    """

    def __init__(
        self,
        name: str,
        samples: int,
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

    async def send(self, make: Callable[[], Task], worker: ProxyWorker, holds: bool) -> Reply:
        """Send a task to a worker, and return the reply.

        Args:
            make: Function that makes the task.
            worker: The worker that carries it.
            holds: Whether the worker holds the state of the slot's last round.

        Raises:
            AppMissing: The worker has lost the app of this run.
            ProtocolError: The worker trained on wrong samples.
        """
        begin = time.perf_counter()
        out, back = worker.bytes_sent, worker.bytes_received
        task = dataclasses.replace(
            make(), codec=self._codec, keep=self.states.keep, back=self.states.back, shared=self.states.shared
        )
        if self._steps is not None:
            task = dataclasses.replace(task, steps=tuple(self._steps.of(task.slot, task.round)))
        state, holds = await self.states.given(task, worker, holds)
        await self.weights_out.reach(worker)
        exact, stays = self.weights_out.lossless, self.weights_out.stays
        fresh = changed(task, task.since, task.weights, exact) if task.merged and not stays else None
        encoded = self.weights_out.encode(task.slot, task.weights, task.round, holds=holds, tensors=fresh)
        message = dataclasses.replace(task, state=state, weights=encoded).to_message()
        answer = await worker.call(self._role, "train", message, hear=partial(self._moved, task, worker.id))
        tensors = exchanged(task, task.weights, exact) if task.merged and not stays else None
        reply = Reply.from_message(answer, task, task.weights, self._samples, worker.name, tensors, stays=stays)
        self.states.check(reply, worker.name)
        return dataclasses.replace(
            reply,
            worker=worker.id,
            elapsed_s=time.perf_counter() - begin,
            bytes_out=worker.bytes_sent - out,
            bytes_back=worker.bytes_received - back,
        )

    async def measure(self, task: Task, worker: ProxyWorker) -> Any:
        """Have a worker compute the moving statistics for a task's weights again, over the task's samples.

        ``Replica.measure`` is the worker's side.
        """
        await self.weights_out.reach(worker)
        return await worker.call(self._role, "measure", task.to_message())

    def _moved(self, task: Task, worker: int, facts: dict[str, Any]) -> None:
        """Handle a worker's progress report on a task: emit it as an event."""
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
        """Send STOP: workers that still train stop after their current batch.

        Args:
            workers: All workers of the run.
            timeout_s: How long to wait for a worker that does not answer.
        """
        telling = (worker.call(self._role, "stop", timeout_s=timeout_s) for worker in workers)
        await asyncio.gather(*telling, return_exceptions=True)

    def count(self, replies: Sequence[Reply], *, whole_round: bool) -> None:
        """Accept updates, and store the slot states and held weights that belong to them.

        Args:
            replies: The replies with accepted updates.
            whole_round: Whether a round of all slots is over. Then slots with rejected updates hold its weights, too.
        """
        for reply in replies:
            self.states.left(reply)
        if whole_round:
            self.states.round_over(replies)
        held = self.weights_out.held
        for slot in held if whole_round else held.keys() & {reply.slot for reply in replies}:
            self.states.holds(slot, held[slot])
