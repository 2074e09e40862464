"""Training of a model whose parts are on several workers. Runs on the master.

A round of s parts::

    the crew finds a worker for each part, and replaces a lost one
    when all s workers are there: introduce them, and send each its task, with the part's state if it lacks it
    the workers train the round together
    the run gets the weights and the optimizers of all parts

If a worker is lost, all others stop, and the round begins again from its first weights. The samples, the seeds and the
cut are the same, so the result has the same bits.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from ddlf.algorithms.weights import Weights
from ddlf.cluster.proxy import ProxyWorker
from ddlf.errors import BadUpdate, ClusterTooSmall, ConfigError, ConnectError, ProtocolError
from ddlf.events import PartTrained, SlotMoved, Warned
from ddlf.training.crew.recovery import end_all
from ddlf.training.exchanges.members import NOTICED_S, Members
from ddlf.training.exchanges.split.plan import Plan
from ddlf.training.run import Ended, Run
from ddlf.training.slot.task import OPTIMIZER, Reply, Task


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The master's training loop for a model in parts.

    Args:
        plan: How the model is cut.
    """

    plan: Plan

    def begin(self, run: Run) -> None:
        """Do nothing before training: each part has its optimizer."""

    async def train(self, run: Run) -> None:
        """Train until all rounds are done or the run has to end."""
        group = Group(run, self.plan)
        with contextlib.suppress(Ended):
            async for round in run.rounds():
                carrying = asyncio.ensure_future(group.carry(round.tasks[0]))
                try:
                    await run.meanwhile()
                    weights, reply, idle = await carrying
                finally:
                    await end_all([carrying])
                run.arrived = time.perf_counter()
                await run.commit(weights, [reply], **({"idle": idle} if len(self.plan.parts) > 1 else {}))
                group.committed(weights)


@dataclass(slots=True)
class _Attempt:
    """One attempt of a group at a round.

    Args:
        number: Its number in the run.
        workers: The worker of each part, by number.
        results: The results of the parts that have ended.
        over: Set when the attempt has failed, or all parts have ended.
    """

    number: int
    workers: dict[int, ProxyWorker] = field(default_factory=dict)
    results: dict[int, dict[str, Any]] = field(default_factory=dict)
    together: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Group:
    """The workers that together train one copy of a model, each a part of it.

    Args:
        run: The run.
        plan: How the model is cut.
    """

    def __init__(self, run: Run, plan: Plan) -> None:
        members = run.exchange.weights_out
        assert isinstance(members, Members)
        self._run, self._plan, self._members = run, plan, members
        self._attempt = _Attempt(1)
        self._held: dict[int, tuple[Any, int]] = {}  # part -> its worker, and the version of the weights there
        self._version = 0
        self._weights: Any = None  # the weights that the workers hold
        self._reached = asyncio.Lock()

    def committed(self, weights: Weights) -> None:
        """Note that the weights that the parts hold are the weights of the run now."""
        self._weights = weights

    async def carry(self, task: Task) -> tuple[Weights, Reply, float]:
        """Train a round.

        Returns:
            The weights after it; the reply of the group; and the mean share of the time that parts have waited for
            each other.
        """
        run, begin = self._run, time.perf_counter()
        if run.progress.weights is not self._weights:  # the first round, or a callback has set weights
            self._held.clear()
        task = run.exchange.completed(task)
        state, _ = await run.exchange.states.given(task, self._members.proxies()[0], False)
        optimizer = (state or {}).get(OPTIMIZER)
        parts = range(len(self._plan.parts))
        works = [
            run.crew.carry(part, task.round, partial(self._work, part, task, optimizer), leaves=False) for part in parts
        ]
        found: list[dict[str, Any]] = await asyncio.gather(*works)
        self._version += 1
        for part, result in enumerate(found):
            seconds, idle_s = float(result["compute_s"]), float(result["idle_s"])
            of = dict(round=task.round + 1, slot=part + 1, worker=result["worker"])
            run.crew.emit(PartTrained(**of, seconds=seconds, idle_s=idle_s))
        idle = sum(result["idle_s"] / max(result["compute_s"], 1e-9) for result in found) / len(found)
        return self._together(found), self._reply(task, found, begin), idle

    # -- one part -----------------------------------------------------------------------------------------------------

    async def _work(
        self, part: int, task: Task, optimizer: Weights | None, worker: ProxyWorker, holds: bool
    ) -> dict[str, Any]:
        """Have a worker train a part, as often as the other parts need it. Return the result."""
        try:
            while True:
                attempt = self._attempt
                attempt.workers[part] = worker
                if len(attempt.workers) == len(self._plan.parts):
                    attempt.together.set()
                result = await self._try(attempt, part, task, optimizer, worker)
                if result is not None:
                    return result
        except BaseException:
            self._fail(part)
            raise

    async def _try(
        self, attempt: _Attempt, part: int, task: Task, optimizer: Weights | None, worker: ProxyWorker
    ) -> dict[str, Any] | None:
        """Take part in an attempt. Return the result; None if the attempt has failed because of another part."""
        over = asyncio.ensure_future(attempt.over.wait())
        doing = asyncio.ensure_future(self._one(attempt, part, task, optimizer, worker))
        try:
            await asyncio.wait([over, doing], return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                result = doing.result()
                if "peer" in result:
                    await self._unreached(attempt, worker, result)
                    return None
                attempt.results[part] = result
                if len(attempt.results) == len(self._plan.parts):
                    self._attempt = _Attempt(attempt.number + 1)
                    attempt.over.set()
                await over
            return attempt.results.get(part) if len(attempt.results) == len(self._plan.parts) else None
        finally:
            await end_all([over, doing])

    async def _one(
        self, attempt: _Attempt, part: int, task: Task, optimizer: Weights | None, worker: ProxyWorker
    ) -> dict[str, Any]:
        """Wait for the workers of all parts, have this one train its part, and return its checked result."""
        import keras

        await self._all_there(attempt, part)
        async with self._reached:
            await self._members.reach(worker)
        member = self._members.member(worker.id)
        holds = self._held.pop(part, None) == (member, self._version)
        order = {
            "task": replace(task, weights=None, state=None).to_message(),
            "part": part,
            "ends": self._plan.ends,
            "micro_batches": self._plan.micro_batches,
            "workers": [attempt.workers[one].id for one in range(len(self._plan.parts))],
            "attempt": attempt.number,
            "backend": keras.backend.backend(),
            "version": self._version,
            "state": None if holds else self._state(part, optimizer),
        }
        result: dict[str, Any] = await worker.call(
            self._members.role, "step", order, hear=partial(self._moved, task, attempt)
        )
        if "peer" in result:
            return result
        if "fault" in result:
            raise BadUpdate(result["fault"], hint=result["hint"])
        if result.get("stopped"):
            raise ConnectError("its training was stopped", worker=worker.name)
        self._check(part, task, result, worker)
        self._held[part] = member, self._version + 1
        return result | {"worker": worker.id}

    async def _all_there(self, attempt: _Attempt, part: int) -> None:
        """Wait until each part has a worker.

        Raises:
            ClusterTooSmall: Too few workers are there, and no more come in time.
        """
        wait_s, needed = self._run.crew.wait_s, len(self._plan.parts)
        if self._run.crew.size < needed and part == min(attempt.workers):
            why = f"the model has {needed} parts, and {_there(self._run.crew.size)}: the run waits {wait_s:g} s for others"
            self._run.crew.emit(Warned(about="workers", why=why))
        while not attempt.together.is_set():
            try:
                async with asyncio.timeout(wait_s):
                    await attempt.together.wait()
            except TimeoutError:
                if self._run.crew.size < needed:
                    raise ClusterTooSmall(
                        f"the model has {needed} parts, and {_there(self._run.crew.size)} after {wait_s:g} s",
                        hint="start more workers, and continue with resume; or cut the model into fewer parts",
                    ) from None

    def _fail(self, part: int) -> None:
        """Begin a new attempt without the worker of a part, and let all other parts join it."""
        attempt = self._attempt
        if part not in attempt.workers:
            return
        self._held.clear()
        self._attempt = _Attempt(attempt.number + 1)
        attempt.over.set()

    async def _unreached(self, attempt: _Attempt, worker: ProxyWorker, result: dict[str, Any]) -> None:
        """Wait until the crew notices the loss of a worker that another one has not reached.

        Raises:
            ConfigError: The worker is there, so the link between the two has failed.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(NOTICED_S):
                await attempt.over.wait()
                return
        raise ConfigError(
            f"{worker.name} does not reach worker {result['peer']}: {result['why']}",
            hint="check the network between the two workers, or set the address of that worker: ddlf-worker --advertise HOST:PORT",
        )

    def _moved(self, task: Task, attempt: _Attempt, facts: dict[str, Any]) -> None:
        """Tell the progress that the last part reports. All parts are as far."""
        if facts["what"] != "training":
            return
        loss = None if facts["loss"] is None else float(facts["loss"])
        done = {name: int(facts[name]) for name in ("done", "total", "epoch")}
        for part, worker in sorted(attempt.workers.items()):
            of = dict(round=task.round + 1, slot=part + 1, worker=worker.id)
            is_last = part == len(self._plan.parts) - 1
            self._run.crew.emit(SlotMoved(**of, **done, loss=loss if is_last else None))

    # -- state --------------------------------------------------------------------------------------------------------

    def _state(self, part: int, optimizer: Weights | None) -> dict[str, Any]:
        """Return the weights and the optimizer that a part begins the round with."""
        weights, layout = self._run.weights, self._plan.optimizer
        known = None if not optimizer else dict(zip(layout.paths, optimizer, strict=True))
        mine = {*self._plan.parts[part].weights, None}
        of = dict(zip(layout.paths, layout.of, strict=True))
        return {
            "weights": [weights[place] for place in self._plan.parts[part].all_weights],
            "optimizer": None if known is None else {path: value for path, value in known.items() if of[path] in mine},
        }

    def _check(self, part: int, task: Task, result: dict[str, Any], worker: ProxyWorker) -> None:
        """Check a part's result, since it comes from another machine.

        Raises:
            ProtocolError: It does not fit the part.
        """
        if result["digest"] != task.digest():
            raise ProtocolError("trained on other samples than it was given", worker=worker.name)
        places, like = self._plan.parts[part].weights, task.weights
        got = [(array.shape, array.dtype) for array in result["weights"]]
        if got != [(like[place].shape, like[place].dtype) for place in places]:
            raise ProtocolError(f"returned weights that do not fit part {part + 1}", worker=worker.name)

    def _together(self, results: Sequence[dict[str, Any]]) -> Weights:
        """Return the weights of the whole model from the weights of its parts."""
        found: dict[int, np.ndarray[Any, Any]] = {}
        for part, result in zip(self._plan.parts, results, strict=True):
            found.update(zip(part.weights, result["weights"], strict=True))
        return [found[place] for place in range(len(found))]

    def _reply(self, task: Task, results: Sequence[dict[str, Any]], begin: float) -> Reply:
        """Return the reply of the whole group to a task."""
        last, samples = results[-1], len(task.indices)
        variables = {path: value for result in reversed(results) for path, value in result["optimizer"].items()}
        metrics = dict(last["metrics"])
        if "loss" in metrics:
            metrics["loss"] += sum(result["losses"] for result in results) / samples
        return Reply(
            task=task,
            update=None,
            codec_error=0.0,
            samples=samples,
            fed=None,
            metrics=metrics,
            counted=last["counted"],
            compute_s=max(result["compute_s"] for result in results),
            wait_data_s=max(result["wait_data_s"] for result in results),
            files=(),
            stopped=False,
            state={OPTIMIZER: [variables[path] for path in self._plan.optimizer.paths]}
            if OPTIMIZER in task.keep
            else {},
            worker=last["worker"],
            elapsed_s=time.perf_counter() - begin,
        )


def _there(workers: int) -> str:
    return f"{workers} worker{' is' if workers == 1 else 's are'} there"
