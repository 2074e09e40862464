"""Means of whole sets, as the ledger asks for them. Pure; the server calls it on a thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddlf.algorithms.merge import MERGE
from ddlf.algorithms.outer import OUTER
from ddlf.algorithms.set_merge import WeightSet, mean_by_trainings
from ddlf.algorithms.update_check import judge
from ddlf.algorithms.weights import Weights, difference
from ddlf.peers.plan import Plan
from ddlf.peers.sets import Layout, layout_of


@dataclass(frozen=True, kw_only=True)
class Part:
    """A set of a mean.

    Args:
        weights: Its weights.
        trainings: Trainings that it went through.
        samples: Samples of the peer that trained it.
    """

    weights: Weights
    trainings: int
    samples: int


def mean_of_swaps(parts: Sequence[Part]) -> Weights:
    """Return the mean of sets, weighted by their trainings."""
    return mean_by_trainings([WeightSet(weights=part.weights, trainings=part.trainings) for part in parts]).weights


def state_layout(plan: Plan, base: Weights) -> Layout | None:
    """Return the layout of the state of the plan's outer optimizer; None if it has no state."""
    state = OUTER.read(plan.outer).init(base)
    return layout_of({str(number): array for number, array in enumerate(state)}) if state else None


def next_base(
    plan: Plan, base: Weights, parts: Mapping[int, Part], state: Weights, trainable: Sequence[bool]
) -> tuple[Weights, Weights, list[str]]:
    """Return the base of the next round.

    Each update is ``base - set``. The update check of the plan judges them, its merge rule makes one of them, weighted
    by samples, and its outer optimizer steps along it. With ``mean`` and the default optimizer this is FedAvg.

    Args:
        plan: The plan.
        base: The base of the round.
        parts: The posted sets, by the number of the set.
        state: State of the outer optimizer; empty at first.
        trainable: Per tensor, whether it is trained.

    Returns:
        The new base, the new state of the optimizer, and a line for each suspicious update.
    """
    outer = OUTER.read(plan.outer)
    updates = {slot: difference(base, part.weights) for slot, part in enumerate(parts.values())}
    samples = {slot: part.samples for slot, part in enumerate(parts.values())}
    verdicts = judge(
        {slot: (update, samples[slot]) for slot, update in updates.items()},
        base,
        plan.update_policy,
        trainable=trainable,
    )
    merge = MERGE.read(plan.merge).start(len(updates), base)
    lines = []
    taken = 0
    for slot, (number, update) in enumerate(zip(parts, updates.values(), strict=True)):
        verdict = verdicts[slot]
        if verdict.action != "accept":
            lines.append(f"set {number}: {verdict.reason}")
        if verdict.action == "reject":
            merge.leave_out(slot)
            continue
        taken += 1
        scaled = update if verdict.factor == 1 else [(u * verdict.factor).astype(u.dtype) for u in update]
        merge.add(slot, scaled, samples[slot], checked=True)
    if not taken:
        return base, state, lines
    new_state, weights = outer.update(state or outer.init(base), base, merge.result(), trainable)
    return weights, new_state, lines
