"""Asynchronous training. Runs on the master.

Each of the K slots loops on its own (Phan and Do 2023, Algorithm 3)::

    read the current weights w and count v of merges; send w with the slot's partition of this round
    on arrival of its update g:  w <- arrive(w, g, s(tau)),  tau = merges now - v

By default ``arrive`` subtracts ``g / K``, and ``s`` is 1; ``ddlf.algorithms.arrival`` and ``staleness`` have others.

An update that is rejected is dropped: it is told by an event, its samples are not in the ledger, and its slot goes on with its next round.

A slot whose worker is lost begins its round again on another one, with the weights of then; what was lost was never applied.

The staleness of an update is the number of merges applied between reading the weights and applying it; what a rule only put into its buffer is none.
All of this runs on one event loop, so a merge needs no lock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ddlf.algorithms.arrival import FedBuff, Published
from ddlf.algorithms.arrival_rule import Arrival, Arrived
from ddlf.algorithms.outer import OuterOptimizer, Subtract
from ddlf.algorithms.staleness import Constant, Staleness
from ddlf.events import Warned
from ddlf.events.record import accuracy
from ddlf.training.run import Run
from ddlf.training.slot.task import Reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Asynchronous:
    """Each update counts when it comes.

    Args:
        arrival: How an update changes the weights.
        staleness: How much it counts when others were merged meanwhile.
        outer: How what is merged changes the weights, with the rules that use it.
        max_staleness: Rounds that a slot may be ahead of the slowest one; None for no limit.
        balance: ``"equal"`` rounds, or with ``"speed"`` as many steps as each slot is fast (DyLU).
    """

    arrival: Arrival = field(default_factory=Published)
    staleness: Staleness = field(default_factory=Constant)
    outer: OuterOptimizer = field(default_factory=Subtract)
    max_staleness: int | None = None
    balance: str = "equal"

    def begin(self, run: Run) -> None:
        """See ``Loop``."""
        if "outer" not in run.state:
            run.state["outer"] = self.outer.init(run.weights)

    async def train(self, run: Run) -> None:
        """Train until every slot has done its rounds or the run is to end."""
        for name, group in {"outer": self.outer.init(run.weights), **self.arrival.init(run.weights)}.items():
            run.state.setdefault(name, group)
        done, rounds = run.version + len(run.progress.dropped), range(len(run.progress.epochs))
        left = sum(map(run.progress.tasks_in, rounds)) - done
        if isinstance(self.arrival, FedBuff) and self.arrival.size > left + int(run.state["buffered"][0]):
            why = (
                f"it merges when there are {self.arrival.size} updates, and {left} are to come: they are merged at the end only, "
                "as a small step; take a smaller size"
            )
            run.crew.emit(Warned(about="arrival", why=why))
        async for reply in run.arrivals(self.arrival.begin, self.max_staleness, paced=self.balance == "speed"):
            changed, weights = self.arrival.arrive(run.state, run.weights, self._arrived(run, reply))
            run.state.update(changed)
            await run.commit(weights, [reply])
        if waiting := int(run.state.get("buffered", [0])[0]):
            why = (
                f"{waiting} of its updates wait for others, and are not in the model: training that goes on merges them"
            )
            run.crew.emit(Warned(about="arrival", why=why))

    def _arrived(self, run: Run, reply: Reply) -> Arrived:
        return Arrived(
            update=reply.update,
            start=reply.task.weights,
            before=run.read[reply.slot],
            slot=reply.slot,
            slots=reply.task.slots,
            factor=self.staleness(run.merges - reply.task.version),
            trainable=run.facts.trainable,
            outer=self.outer,
            accuracy=accuracy(reply.metrics),
            last=run.is_last(reply),
        )
