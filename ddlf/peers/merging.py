"""Means of whole sets, as the ledger asks for them. Pure; the server calls it on a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median_low

import numpy as np

from ddlf.algorithms.merge import MERGE
from ddlf.algorithms.outer import OUTER
from ddlf.algorithms.update_check import judge
from ddlf.algorithms.weights import Weights, difference, is_float
from ddlf.errors import BadUpdate
from ddlf.peers.plan import Plan
from ddlf.peers.sets import Layout, layout_of
from ddlf.privacy.release import Mechanism, norm_of, released

HEAVIEST = 10
"""A peer counts in a round with at most so many times the usual number of samples. Nobody can check its number."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A set of a mean.

    Args:
        read: Returns its weights. They are read when they are needed, since a rounded set needs more memory in full.
        trainings: Trainings that it went through.
        samples: Samples of the peer that trained it.
    """

    read: Callable[[], Weights]
    trainings: int
    samples: int


def most_samples(samples: Iterable[int]) -> int:
    """Return the largest number of samples that counts as the weight of a peer in a round.

    Args:
        samples: The number of samples of each peer of the round, by its own account.

    Returns:
        ``HEAVIEST`` times their lower median, which one of two peers, or a minority, cannot raise.
    """
    return HEAVIEST * median_low(samples)


def mean_of_swaps(parts: Sequence[Part]) -> Weights:
    """Return the mean of sets, weighted by their trainings: the weights of ``mean_by_trainings``, bit for bit.

    The sets are read one after another.
    """
    counted = [part for part in parts if part.trainings] or list(parts)
    like = counted[0].read()
    sums: Weights = [np.zeros(array.shape, np.float64) if is_float(array) else array for array in like]
    for part in counted:
        for index, array in enumerate(part.read()):
            if is_float(array):
                sums[index] += (part.trainings or 1) * np.asarray(array, np.float64)
            else:
                sums[index] = np.maximum(sums[index], array)
    total = sum(part.trainings or 1 for part in counted)
    return [
        np.asarray(summed / total, array.dtype) if is_float(array) else np.asarray(summed)
        for summed, array in zip(sums, like, strict=True)
    ]


def state_layout(plan: Plan, base: Weights) -> Layout | None:
    """Return the layout of the state of the plan's outer optimizer; None if it has no state."""
    state = OUTER.read(plan.outer).init(base)
    return layout_of({str(number): array for number, array in enumerate(state)}) if state else None


def next_base(
    plan: Plan, base: Weights, received: Weights, parts: Mapping[int, Part], state: Weights, trainable: Sequence[bool]
) -> tuple[Weights, Weights, list[str]]:
    """Return the base of the next round.

    Each update is ``given - set``. The update check of the plan judges them, its merge rule makes one of them, weighted
    by samples, and its outer optimizer steps along it. With ``mean`` and the default optimizer this is FedAvg. If a codec
    rounds the base on its way to the peers, the lost part does not count as their update: it stays in the next base. With
    noise, the plan's mechanism takes the place of the merge rule.

    Args:
        plan: The plan.
        base: The base of the round.
        received: The base as the peers got it.
        parts: The posted sets, by the number of the set.
        state: State of the outer optimizer; empty at first.
        trainable: Per tensor, whether it is trained.

    Returns:
        The new base, the new state of the optimizer, and a line for each suspicious update.
    """
    outer = OUTER.read(plan.outer)
    if (mechanism := plan.mechanism) is not None:
        step, lines = released_step(mechanism, base, received, parts, trainable)
        if step is None:
            return base, state, lines
        new_state, weights = outer.update(state or outer.init(base), base, step, trainable)
        return weights, new_state, lines
    updates = {slot: difference(received, part.read()) for slot, part in enumerate(parts.values())}
    samples = {slot: part.samples for slot, part in enumerate(parts.values())}
    verdicts = judge(
        {slot: (update, samples[slot]) for slot, update in updates.items()},
        base,
        plan.update_policy or "reject",
        trainable=trainable,
    )
    merge = MERGE.read(plan.merge).start(len(updates), base)
    lines = []
    accepted = 0
    for slot, (number, update) in enumerate(zip(parts, updates.values(), strict=True)):
        verdict = verdicts[slot]
        if verdict.action != "accept":
            lines.append(f"set {number}: {verdict.reason}")
        if verdict.action == "reject":
            merge.leave_out(slot)
            continue
        accepted += 1
        scaled = update if verdict.factor == 1 else [(u * verdict.factor).astype(u.dtype) for u in update]
        merge.add(slot, scaled, samples[slot], checked=True)
    if not accepted:
        return base, state, lines
    new_state, weights = outer.update(state or outer.init(base), base, merge.result(), trainable)
    return weights, new_state, lines


def released_step(
    mechanism: Mechanism, base: Weights, received: Weights, parts: Mapping[int, Part], trainable: Sequence[bool]
) -> tuple[Weights | None, list[str]]:
    """Return the release of a round's updates, and a line for each unusable one.

    An update is judged alone, because another peer's update must not decide whether it counts. The release is None if
    too few updates are usable.
    """
    release = mechanism.start(len(parts), base, trainable=trainable)
    lines = []
    for slot, (number, part) in enumerate(parts.items()):
        try:
            with np.errstate(over="ignore"):  # then it is not finite, and refused
                update = difference(received, part.read())
            release.add(slot, update, part.samples)
        except BadUpdate as error:
            lines.append(f"set {number}: {error.message}")
            if slot in release.missing:
                release.leave_out(slot)
    return (release.result() if release.count >= mechanism.least else None), lines


def too_long(mechanism: Mechanism, received: Weights, posted: Weights, trainable: Sequence[bool]) -> str:
    """Return why a posted set cannot come from a peer that clips and adds its share of the noise; empty if it can.

    If the server itself clips, it accepts any length.
    """
    indices = released(received, trainable)
    most = mechanism.longest(sum(received[index].size for index in indices))
    with np.errstate(over="ignore"):
        update = [np.subtract(received[index], posted[index], dtype=np.float64) for index in indices]
    length = norm_of(update) if most < inf else 0.0
    return (
        f"its update has the norm {length:,.4g}, and clip and noise give {most:,.4g} at most" if length > most else ""
    )
