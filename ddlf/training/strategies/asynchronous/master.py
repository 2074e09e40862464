"""Asynchronous training. Runs on the master.

Each of the K slots loops independently (Phan and Do 2023, Algorithm 3)::

    read the current weights w and the number v of merges; send w with the slot's partition of this round
    on arrival of its update g:  w <- arrive(w, g, s(tau)),  tau = merges now - v

By default ``arrive`` subtracts ``g / K`` and ``s`` is 1. ``ddlf.algorithms.arrival`` and ``staleness`` have more.

A rejected update is dropped: an event reports it, the ledger does not count its samples, and its slot continues with
its next round.

If the worker of a slot is lost, another one starts the round again with the weights of that time. The lost work was
never applied.

The staleness of an update is the number of merges between reading the weights and applying the update. Updates that a
rule only puts into its buffer are not merges. Everything runs on one event loop, so a merge needs no lock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ddlf.algorithms.arrival import Arrival, Arrived, FedBuff, Published
from ddlf.algorithms.outer import OuterOptimizer, Subtract
from ddlf.algorithms.staleness import Constant, Staleness
from ddlf.events import Warned
from ddlf.events.record import accuracy
from ddlf.training.run import Run
from ddlf.training.slot.task import Reply
from ddlf.training.strategies.arrivals import arrivals


@dataclass(frozen=True, slots=True, kw_only=True)
class Asynchronous:
    """The loop of asynchronous training: it applies each update when it arrives.

    Args:
        arrival: The arrival rule, which changes the weights with an update.
        staleness: Scales an update by its staleness.
        outer: The outer optimizer, for arrival rules that use one.
        max_staleness: Rounds that a slot may be ahead of the slowest one; None for no limit.
        balance: ``"equal"`` rounds, or ``"speed"``: faster slots get more steps in a round (DyLU).
    """

    arrival: Arrival = field(default_factory=Published)
    staleness: Staleness = field(default_factory=Constant)
    outer: OuterOptimizer = field(default_factory=Subtract)
    max_staleness: int | None = None
    balance: str = "equal"

    def begin(self, run: Run) -> None:
        """Create the outer optimizer's state in ``run.state``, unless a checkpoint has restored it."""
        if "outer" not in run.state:
            run.state["outer"] = self.outer.init(run.weights)

    async def train(self, run: Run) -> None:
        """Train until every slot has done its rounds or the run has to end."""
        for name, group in {"outer": self.outer.init(run.weights), **self.arrival.init(run.weights)}.items():
            run.state.setdefault(name, group)
        finished, rounds = run.version + len(run.progress.dropped), range(len(run.progress.epochs))
        remaining = sum(map(run.progress.tasks_in, rounds)) - finished
        if isinstance(self.arrival, FedBuff) and self.arrival.size > remaining + int(run.state["buffered"][0]):
            sentence = (
                f"it merges {self.arrival.size} updates at once, but only {remaining} more will come: they are merged only at the end, "
                "as a small step; use a smaller size"
            )
            run.crew.emit(Warned(about="arrival", why=sentence))
        async for reply in arrivals(run, self.arrival.begin, self.max_staleness, paced=self.balance == "speed"):
            changed, weights = self.arrival.arrive(run.state, run.weights, self._arrived(run, reply))
            run.state.update(changed)
            await run.commit(weights, [reply])
        if waiting := int(run.state.get("buffered", [0])[0]):
            sentence = (
                f"{waiting} of its updates wait for others, and are not in the model: continued training merges them"
            )
            run.crew.emit(Warned(about="arrival", why=sentence))

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
