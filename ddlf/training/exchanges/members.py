"""Weights that are on the workers, and not on the master. Runs on the master."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NoReturn

from ddlf.algorithms.update_check import Verdict
from ddlf.algorithms.weights import Weights
from ddlf.cluster.cluster import Cluster
from ddlf.cluster.proxy import ProxyWorker
from ddlf.data.parts import content_of
from ddlf.training.crew import Crew
from ddlf.training.early import chosen_exchange
from ddlf.training.links import Links
from ddlf.training.recovery import LOSS
from ddlf.training.restoring import Restoring
from ddlf.training.roles import REPLICA
from ddlf.training.roles.evaluation import EVALUATION_BATCH
from ddlf.training.slot.task import Reply

Member = tuple[int, int]
"""A worker's number, and how often it was given the app: when that has changed, what it held before is gone."""


class WeightsThere:
    """Where the weights are, for tasks; in the place of ``WeightsOut``.

    Args:
        run: Name of the run on the workers.
        crew: Workers.
        cluster: The cluster that they are of.
        lossless: As of ``WeightsOut``.
        codec: How weights travel from worker to worker, as text.

    Attributes:
        role: How its replicas are called on the workers.
        generation: Of the weights that rounds begin with.
        at: Workers that have them.
        means: Groups of what slots have left whose means rounds begin with, and of how many slots each is the sum; 0 for what is a mean.
        begin: Sees that some have.
        links: Links between them that are broken.
        restoring: Brings slices of checkpoints to them.
        compares: See ``Outwards``.
    """

    differences = False
    stays = True

    def __init__(
        self, run: str, crew: Crew, cluster: Cluster, lossless: Sequence[bool], codec: str = "float32"
    ) -> None:
        self._run = run
        self.role = run, REPLICA
        self._crew = crew
        self._cluster = cluster
        self.lossless, self.codec = lossless, codec
        self.held: dict[int, Weights] = {}
        self.generation = 0
        self.at: Sequence[Member] = ()
        self.means: dict[str, int] = {}
        self.begin: Callable[[], Awaitable[None]] = _nothing
        self.links = Links(self.role, crew, lambda: {number: one for (number, _), one in self.members().items()})
        self.compares: Callable[[dict[int, Reply]], Awaitable[dict[int, Verdict]]] | None = None
        self.restoring = Restoring(self.role, lambda: list(self.members().values()), crew)
        self.evaluation: Any = None  # an ``EvaluationThere``, if workers share evaluations
        self._introduced: set[Member] = set()
        self._content: dict[tuple[Any, ...], dict[str, str]] = {}
        self._one_at_a_time = asyncio.Lock()

    def proxies(self) -> Sequence[ProxyWorker]:
        """All workers of the cluster, whether they take part or not."""
        return self._cluster.workers

    def members(self) -> dict[Member, ProxyWorker]:
        """Workers that are there."""
        found = [(worker.id, self._crew.member(worker.id)) for worker in self.proxies()]
        return {(number, member[1]): member[0] for number, member in found if member is not None}

    def member(self, worker: int) -> Member | None:
        """A worker as it is now; None if it is not there."""
        found = self._crew.member(worker)
        return None if found is None else (worker, found[1])

    def encode(
        self, slot: int, weights: Weights, number: int, *, holds: bool = True, tensors: Sequence[int] | None = None
    ) -> dict[str, Any]:
        """What a task says of its weights."""
        there = self.members()
        at = [one[0] for one in self.at if one in there]
        return {"generation": self.generation, "at": at, **({"means": self.means} if self.means else {})}

    def silent(self, worker: int, other: int, why: str) -> None:
        """See ``Links``."""
        self.links.silent(worker, other, why)

    def whole(self, weights: Weights) -> NoReturn:
        """Not for runs of this kind: what needs it is refused."""
        raise NotImplementedError

    async def evaluated(
        self,
        at: Sequence[Member],
        which: dict[str, Any],
        app: Any,
        part: str,
        batch_size: int = EVALUATION_BATCH,
    ) -> dict[str, float] | None:
        """Have a worker evaluate weights, to the bits that this side would come to.

        Args:
            at: Workers that have them, or can get them; the first that is there is asked first.
            which: Which, as their ``evaluate`` reads it.
            app: The user's ``IApp``.
            part: ``"test"`` or ``"val"``.
            batch_size: Samples in a batch.

        Returns:
            The metrics; None if workers have other data of that part, or compute with fewer bits than this side: then it is to be done here.
        """
        if self.evaluation is not None:
            shared: dict[str, float] | None = await self.evaluation(which, part, batch_size, [one[0] for one in at])
            return shared
        if app.precision not in ("float32", "auto"):
            return None
        of = part, *(id(getattr(app, f"{letter}_{part}", None)) for letter in "xyw")
        if of not in self._content:
            self._content[of] = await asyncio.to_thread(content_of, app, part)
        there = self.members()
        for member in at:
            if member in there:
                try:
                    asked = which, part, batch_size, self._content[of]
                    found: dict[str, float] | None = await there[member].call(self.role, "evaluate", *asked)
                    return found
                except LOSS:
                    continue  # the crew will hear of it
        return None

    async def reach(self, worker: ProxyWorker | None = None) -> None:
        """Have all workers know each other, that are there, and some of them have the weights.

        Args:
            worker: The one that a task goes to; None if several are to do something together.

        Raises:
            ConnectError: Two that meet for the first time have no way to each other, and none around.
        """
        async with self._one_at_a_time:
            left_out: set[str] = set()
            while True:
                there = {one: proxy for one, proxy in self.members().items() if proxy.name not in left_out}
                if there.keys() <= self._introduced:
                    break
                try:
                    unmet = await self._cluster.introduced(list(there.values()), self._run)
                except LOSS as error:
                    lost = getattr(error, "worker", "")
                    if not lost or (worker is not None and lost == worker.name):
                        raise
                    left_out.add(lost)  # who needs it will hear of its loss
                else:
                    first, self._introduced = not self._introduced, set(there)
                    await self.links.met(unmet, first=first)
            await self.begin()


class ShardsThere(WeightsThere):
    """Where the shards of Downpour are, for tasks.

    Attributes:
        serving: Tells what a task says of its replicas.
    """

    serving: Any

    def encode(
        self, slot: int, weights: Weights, number: int, *, holds: bool = True, tensors: Sequence[int] | None = None
    ) -> dict[str, Any]:
        """See ``WeightsThere``."""
        told: dict[str, Any] = self.serving.told(slot, number)
        return told


async def chosen(app: Any, crew: Crew, settings: dict[str, Any]) -> tuple[str, str]:
    """What ``exchange="auto"`` becomes, and why: what is faster, if the workers have a way to each other.

    Args:
        app: The user's ``IApp``, prepared.
        crew: Workers.
        settings: Every setting as it is used, by name.
    """
    exchange, why = chosen_exchange(settings, app.cluster.N, sum(w.nbytes for w in app.model.get_weights()))
    there = {worker.id: worker for worker in app.cluster.workers if crew.member(worker.id) is not None}
    if exchange == "sharded":
        try:
            unmet = await app.cluster.introduced(list(there.values()), app._run)
        except LOSS:
            unmet = []  # who is lost is met when it is back
        if missing := Links((app._run, REPLICA), crew, lambda: there).missing(unmet):
            return "star", f"{missing}, and no third worker reaches both"
    return exchange, why


async def _nothing() -> None: ...
