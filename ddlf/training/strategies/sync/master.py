"""Synchronous training. Runs on the master.

One round with K slots and n samples (Phan and Do 2023, Algorithm 2, but with all samples and a weighted merge)::

    shuffle the indices with (seed, round); split them into K partitions P_j; send P_j and w to the worker of slot j
    worker: set weights w, fit P_j for worker_epochs, update g_j = w - w_j
    w <- outer(w, merge(g_1 .. g_K)), with the accepted updates only
    stop if is_convergent(record): the workers get STOP

Updates are summed in slot order, independent of their order of arrival and of the workers that carried them, so equal
seeds give equal bits. If a worker is lost, another one computes its slot again from the same weights, indices,
optimizer state and seeds.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from ddlf.algorithms.merge import Mean, Rule
from ddlf.algorithms.outer import OuterOptimizer, Subtract
from ddlf.training.exchanges.recalibration import recalibrated
from ddlf.training.exchanges.streaming import fragments_of
from ddlf.training.run import Run, RunMustEnd
from ddlf.training.strategies.sync.noise import Noise, WithoutNoise


@dataclass(frozen=True, slots=True, kw_only=True)
class Synchronous:
    """The loop of synchronous training: all slots train from the same weights, and their updates become one.

    Args:
        merge: The merge rule for the updates of a round.
        outer: Changes the global weights with the merged update.
        balance: ``"equal"`` partitions, or partitions in proportion to each slot's measured ``"speed"``.
        noise: The noise of private workers.
    """

    merge: Rule = field(default_factory=Mean)
    outer: OuterOptimizer = field(default_factory=Subtract)
    balance: str = "equal"
    noise: Noise = field(default_factory=WithoutNoise)

    def begin(self, run: Run) -> None:
        """Create the outer optimizer's state in ``run.state``, unless a checkpoint has restored it."""
        if "outer" not in run.state:
            run.state["outer"] = self.outer.init(run.weights)

    async def train(self, run: Run) -> None:
        """Train until all rounds are done or the run has to end."""
        self.begin(run)
        run.cost = self.noise.cost_of_task
        fragments = fragments_of(run, self.outer, run.weights)
        with contextlib.suppress(RunMustEnd):
            async for round in run.rounds(self.balance):
                tasks = round.tasks if fragments is None else fragments.tasks(round)
                merge = self.noise.merge(run, len(tasks), self.merge)
                await run.afford(tasks)
                replies = await run.all(tasks, into=merge)
                if (release := self.noise.cost_of_sum(replies)) is not None:
                    await run.count(release)
                if fragments is None:
                    run.state["outer"], weights = self.outer.update(
                        run.state["outer"], run.weights, merge.result(), run.facts.trainable
                    )
                else:
                    weights = fragments.update(merge.result())
                    fragments.were_merged(round.number)
                if run.facts.statistics:
                    weights = await recalibrated(run, weights, replies, self.merge)
                await run.commit(weights, replies)
        if fragments is not None:
            fragments.tell_late()
