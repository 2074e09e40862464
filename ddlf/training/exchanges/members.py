"""The workers of a run that hold its weights and call each other. Runs on the master.

If two workers cannot reach each other when the run begins, the run is refused. If a link fails later, one of the two
workers leaves the run and the others carry its slots. The result has the same bits.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

from ddlf.algorithms.update_check import Verdict
from ddlf.algorithms.weights import Weights
from ddlf.cluster.cluster import Cluster
from ddlf.cluster.introduce import unreachable
from ddlf.cluster.proxy import ProxyWorker
from ddlf.data.app_data import content_of
from ddlf.errors import ConnectError, DDLFError
from ddlf.training.checkpoints.sliced_resume import Restoring
from ddlf.training.context import App
from ddlf.training.crew.crew import Crew
from ddlf.training.crew.recovery import LOSS, end_all
from ddlf.training.evaluation.model import EVALUATION_BATCH
from ddlf.training.roles import REPLICA
from ddlf.training.slot.parts import WeightsMessage
from ddlf.training.slot.task import Reply

Member = tuple[int, int]
"""A worker's number, and how often it received the app. A new count: the worker lost its earlier state."""
Link = frozenset[int]
"""The numbers of two workers that call each other."""
Unmet = Sequence[tuple[ProxyWorker, ProxyWorker, str]]
"""Pairs without a link: the calling worker, the worker that it cannot reach, and the error at each address."""
NOTICED_S = 10.0
"""Time in which the master notices the loss of a worker. After it, the link from the other worker has failed."""
HINT = (
    "open the port between the two, or set its address for other workers: ddlf-worker --advertise HOST:PORT; "
    "or use exchange='star', which sends everything through the master. ddlf doctor --pairs tries every pair"
)


class Members:
    """The workers of one run that hold its weights, as the master sees them. It replaces ``StarWeights``.

    Args:
        run: Name of the run on the workers.
        crew: Workers.
        cluster: The cluster of these workers.
        lossless: For each tensor, whether it travels without loss, as in ``StarWeights``.
        holder: Name of the role that holds the weights on workers.

    Attributes:
        role: Run and name of the replicas on the workers.
        holder: Run and name of the role that holds the weights.
        begin: Function that makes sure that some workers have the weights.
        says: Returns the task's entry about weights, for a slot, the number of its round, and whether the worker holds
            the slot's state.
        checkpoints: Brings slices of checkpoints to the workers.
        restoring: The same for the checkpoint that the run resumes from; None if the master has to read it.
        compares: Judges the updates of replies by slot, as in ``WeightSource``; None until the exchange sets it.
    """

    differences = False
    stays = True
    encode_whole: Callable[[Weights], WeightsMessage] | None = None

    def __init__(
        self,
        run: str,
        crew: Crew,
        cluster: Cluster,
        lossless: Sequence[bool],
        holder: str,
    ) -> None:
        self._run = run
        self.role, self.holder = (run, REPLICA), (run, holder)
        self._crew = crew
        self._cluster = cluster
        self.lossless = lossless
        self.slot_weights: dict[int, Weights] = {}
        self.says: Callable[[int, int, bool], dict[str, Any]] = _unsaid
        self.begin: Callable[[], Awaitable[None]] = _nothing
        self.compares: Callable[[dict[int, Reply]], Awaitable[dict[int, Verdict]]] | None = None
        self.checkpoints = Restoring(self.holder, lambda: list(self.members().values()), crew)
        self.restoring: Restoring | None = self.checkpoints
        self.evaluation: Any = None  # a ``WorkerEvaluation``, if workers share evaluations
        self._introduced: set[Member] = set()
        self._links: frozenset[Link] | None = None  # the pairs that call each other; None for all
        self._content: dict[tuple[Any, ...], dict[str, str]] = {}
        self._one_at_a_time = asyncio.Lock()
        self._searches: set[asyncio.Task[None]] = set()

    def proxies(self) -> Sequence[ProxyWorker]:
        """Return all workers of the cluster, whether they take part in the run or not."""
        return self._cluster.workers

    def members(self) -> dict[Member, ProxyWorker]:
        """Return the workers that take part in the run now."""
        members = [(worker.id, self._crew.member(worker.id)) for worker in self.proxies()]
        return {(number, member[1]): member[0] for number, member in members if member is not None}

    def member(self, worker: int) -> Member | None:
        """Return the worker with this number, as it takes part now; None if it does not."""
        member = self._crew.member(worker)
        return None if member is None else (worker, member[1])

    def encode(
        self, slot: int, weights: Weights, round: int, *, holds: bool = True, tensors: Sequence[int] | None = None
    ) -> dict[str, Any]:
        """Return the entry about weights in a slot's task, which says where the worker finds them."""
        return self.says(slot, round, holds)

    async def evaluated(
        self,
        candidates: Sequence[Member],
        reference: dict[str, Any],
        app: App,
        part: str,
        batch_size: int = EVALUATION_BATCH,
    ) -> dict[str, float] | None:
        """Have a worker evaluate weights, with the same bits as an evaluation on the master.

        Args:
            candidates: Workers that have the weights, or can get them, in the order in which to ask them.
            reference: Names the weights, for the replica's ``evaluate``.
            app: The user's ``IApp``.
            part: ``"test"`` or ``"val"``.
            batch_size: Samples in a batch.

        Returns:
            The metrics. None if the workers have other data of that part, or compute with fewer bits than the master:
            then the master has to evaluate.
        """
        if self.evaluation is not None:
            shared: dict[str, float] | None = await self.evaluation(
                reference, part, batch_size, [candidate[0] for candidate in candidates]
            )
            return shared
        if app.precision not in ("float32", "auto"):
            return None
        key = part, *(id(getattr(app, f"{letter}_{part}", None)) for letter in "xyw")
        if key not in self._content:
            self._content[key] = await asyncio.to_thread(content_of, app, part)
        present = self.members()
        for member in candidates:
            if member in present:
                try:
                    arguments = reference, part, batch_size, self._content[key]
                    metrics: dict[str, float] | None = await present[member].call(self.role, "evaluate", *arguments)
                    return metrics
                except LOSS:
                    continue  # the crew notices the loss
        return None

    async def reach(self, worker: ProxyWorker | None = None, links: Collection[Link] | None = None) -> None:
        """Introduce all workers to each other, and make sure that some of them have the weights.

        Args:
            worker: The worker that receives a task; None if several workers act together.
            links: The pairs of workers that call each other; None for all pairs.

        Raises:
            ConnectError: Two workers that meet for the first time cannot reach each other.
        """
        async with self._one_at_a_time:
            left_out: set[str] = set()
            while True:
                present = {member: proxy for member, proxy in self.members().items() if proxy.name not in left_out}
                links_are_known = self._links is None or (links is not None and self._links >= {*links})
                if present.keys() <= self._introduced and links_are_known:
                    break
                self._links = None if links is None else frozenset(links)
                try:
                    unmet = await self._met(list(present.values()))
                except LOSS as error:
                    lost = getattr(error, "worker", "")
                    if not lost or (worker is not None and lost == worker.name):
                        raise
                    left_out.add(lost)  # a call that needs this worker reports its loss
                    continue
                if unmet and not self._introduced:
                    refusal = unreachable(unmet, HINT)
                    self._crew.end(refusal)
                    raise refusal
                self._introduced = set(present)
                self._leave_out(
                    [
                        (caller.id, callee.id, f"{cannot_reach(caller, callee)}: {error}")
                        for caller, callee, error in unmet
                    ]
                )
            await self.begin()

    async def _met(self, workers: Sequence[ProxyWorker]) -> Unmet:
        """Introduce workers to each other, and return the pairs without a link."""
        if self._links is None:
            return await self._cluster.introduced(workers, self._run)
        present = {worker.id for worker in workers}
        calls: dict[int, set[int]] = {number: set() for number in present}
        for first, second in (link for link in self._links if len(link) == 2 and link <= present):
            calls[first].add(second)
            calls[second].add(first)
        return await self._cluster.introduced(workers, self._run, calls=calls)

    async def cut(self, worker: int, other: int, error: str) -> None:
        """Exclude one of two workers whose link has failed, and continue without it.

        Args:
            worker: Number of the worker that cannot reach the other one.
            other: Number of the other worker.
            error: The error that this worker saw.
        """
        async with self._one_at_a_time:
            present = {number: proxy for (number, _), proxy in self.members().items()}
            if worker not in present or other not in present:
                return
            try:  # find all broken links: the worker with the most of them leaves the run
                unmet: Unmet = await self._met(list(present.values()))
            except LOSS:
                unmet = []
            broken = [
                (caller.id, callee.id, f"{cannot_reach(caller, callee)} any more: {reason}")
                for caller, callee, reason in unmet
            ]
            broken.insert(0, (worker, other, f"{cannot_reach(present[worker], present[other])} any more: {error}"))
            self._leave_out(broken)

    def silent(self, worker: int, other: int, error: str) -> None:
        """Find out whether a silent worker is lost, or only its link to another worker has failed."""
        search = asyncio.ensure_future(self._look(worker, other, error))
        self._searches.add(search)
        search.add_done_callback(self._searches.discard)

    async def close(self) -> None:
        """Cancel the searches for failed links that are still running."""
        await end_all(list(self._searches))

    async def _look(self, worker: int, other: int, error: str) -> None:
        present = {number: proxy for (number, _), proxy in self.members().items()}
        if worker not in present or other not in present:
            return
        try:
            async with asyncio.timeout(NOTICED_S):
                await present[other].status()  # its daemon answers even if its executor is busy
        except (DDLFError, TimeoutError):
            return  # the worker is lost, and the crew notices it
        await self.cut(worker, other, error)

    def _leave_out(self, broken: Sequence[tuple[int, int, str]]) -> None:
        """Exclude workers from the run until all remaining workers reach each other.

        The workers with the most broken links leave first.
        """
        while True:
            present = {number: proxy for (number, _), proxy in self.members().items()}
            broken = [link for link in broken if present.keys() >= {*link[:2]}]
            if not broken:
                return
            pairs = {frozenset(link[:2]) for link in broken}
            links = Counter(number for pair in pairs for number in pair)
            worst = max(links, key=lambda number: (links[number], number))
            error = next(text for *pair, text in broken if worst in pair)
            self._crew.exclude(present[worst], ConnectError(f"{error}; {present[worst].name} is left out", hint=HINT))
            self._crew.changed()


def cannot_reach(caller: ProxyWorker, callee: ProxyWorker) -> str:
    """Return the sentence which says that one worker cannot reach another one."""
    return f"{caller.name} cannot reach {callee.name}"


async def _nothing() -> None: ...


def _unsaid(slot: int, round: int, holds: bool) -> dict[str, Any]:
    raise AssertionError("the exchange has not begun")
