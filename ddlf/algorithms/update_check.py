"""Judges the updates of one round. Runs on the master, before the merge.

``judge`` looks at each update alone (``fault`` in ``weights.py`` names what makes it unusable), and then compares all
of them: the L2 norm with the median of the others, and the direction with the other directions. A policy decides the
consequence.

| policy | unusable | too long | all zeros, too short, opposite |
|---|---|---|---|
| ``"stop"`` (default) | the run ends with ``BadUpdate`` | not checked | not checked |
| ``"reject"`` | not merged | not merged | not merged |
| ``"clip"`` | not merged | scaled to the median length of the others | not merged |

The caller leaves a rejected update out, or lets another worker compute it again.

These checks find a worker that is broken (a bad disk, an overflow, another version of the code), or a crude attack, as
long as fewer than half of the slots are bad. They do not find an attacker who knows them and stays within the limits;
against that use a robust rule of ``merge.py``, which limits what any few slots can do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median, median_high, median_low
from typing import Literal

import numpy as np
import numpy.typing as npt

from ddlf.algorithms.pairwise import cosines, norm
from ddlf.algorithms.weights import Fault, Tensor, fault, is_float
from ddlf.errors import BadUpdate, ConfigError

Action = Literal["accept", "clip", "reject"]

POLICIES = ("stop", "reject", "clip")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How far an update may be from the others of its round.

    The check allows for the amount of work, because an update grows at most in proportion to its steps. With ``r``
    times the samples of the others an update may be ``r`` times longer, and with ``1/r`` of the samples ``r`` times
    shorter.

    The defaults come from honest updates: IID partitions as unequal as 90:7:2:1 (``balance="speed"``), the digits and
    the MNIST CNN, SGD and Adam, 10 and 30 rounds (``python -m benchmarks.honest``; figures in
    docs/contributing/trials.md). The longest was 7 times (in a run from other weights 11) and the shortest 1/23 of the
    median of the others. The most opposite update with agreeing others had a cosine of -0.27. None was rejected.

    Args:
        longest: Maximum norm, as a multiple of the median norm of the others, > 1.
        shortest: Minimum norm, as a multiple of the same median, in [0, 1). All zeros are always too short.
        opposite: In (0, 1]. An update is opposite when its median cosine with the others is below ``-opposite`` while
            the median cosine between the others is above ``opposite``. The second half matters: once a model has
            converged, honest updates are noise around zero and agree on nothing.

    Raises:
        ConfigError: A value is out of range.

    Source:
        Bounding the norm of updates: Sun et al. 2019, arXiv:1911.07963. Median as reference because a minority cannot
        move it: Yin et al. 2018, arXiv:1803.01498. Cosine against sign flips: Cao et al. 2020 (FLTrust),
        arXiv:2012.13995, there with a trusted update instead of the others. The thresholds are ours.
    """

    longest: float = 20.0
    shortest: float = 0.01
    opposite: float = 0.5

    def __post_init__(self) -> None:
        if not (isfinite(self.longest) and self.longest > 1):
            raise ConfigError(f"longest must be finite and > 1, got {self.longest}")
        if not 0 <= self.shortest < 1:
            raise ConfigError(f"shortest must be in [0, 1), got {self.shortest}")
        if not 0 < self.opposite <= 1:
            raise ConfigError(f"opposite must be in (0, 1], got {self.opposite}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The judgement on one slot's update: accept it, scale it down or reject it.

    Args:
        slot: ``0 .. K-1``.
        action: ``"accept"``, ``"clip"`` or ``"reject"``.
        factor: Factor to scale the update by, in (0, 1]; 1 unless it is clipped.
        reason: Reason for clipping or rejecting the update; empty if it is accepted.
        fault: The fault that makes the update unusable; None if it is usable.
    """

    slot: int
    action: Action = "accept"
    factor: float = 1.0
    reason: str = ""
    fault: Fault | None = None

    def __str__(self) -> str:
        """Return the line about the update for logs and records, such as ``"slot 2 rejected: all zeros"``."""
        done = {"accept": "accepted", "clip": f"scaled by {self.factor:.3g}", "reject": "rejected"}[self.action]
        return f"slot {self.slot} {done}" + (f": {self.reason}" if self.reason else "")

    def error(self, worker: str = "") -> BadUpdate:
        """Return the error that reports the rejected update of a worker."""
        return (self.fault or Fault(self.reason)).error(self.slot, worker)


def judge(
    updates: Mapping[int, tuple[Sequence[Tensor], int]],
    like: Sequence[Tensor],
    policy: str = "stop",
    *,
    names: Sequence[str] = (),
    trainable: Sequence[bool] = (),
    limits: Limits | None = None,
) -> dict[int, Verdict]:
    """Return a verdict on each slot's update: whether it is accepted, scaled down or rejected.

    Norms and directions use the trained weights. For other weights (BatchNorm statistics) only too large norms count.

    With three slots or more, an even number of other slots has two middle norms. The larger one is the median for too
    long updates, and the smaller one for too short updates. So one bad slot of three cannot make the honest slots look
    bad. **With two slots nobody can say which of two different lengths is the wrong one.** Then the longer one counts
    as too long, because it does more harm, and the shorter one is accepted unless it is all zeros; directions are not
    compared. With one slot there is nothing to compare.

    Args:
        updates: For each slot, one array per tensor and the number of samples. Pass the size of the partition that the
            master sent, not the number that the worker reports.
        like: Arrays with the shapes and types of the model's weights.
        policy: ``"stop"``, ``"reject"`` or ``"clip"``, see the module. With ``"stop"`` only unusable updates are
            rejected: raise ``verdict.error(worker)``.
        names: Paths of the tensors, for the reasons.
        trainable: Whether each tensor is trained; all when empty.
        limits: Limits of norm and direction; None for the defaults.

    Raises:
        ConfigError: No policy has this name.
    """
    if policy not in POLICIES:
        raise ConfigError(f"unknown update_policy {policy!r}", hint=f"choose one of {', '.join(POLICIES)}")
    verdicts = verdicts_of({slot: fault(update, samples, like, names) for slot, (update, samples) in updates.items()})
    if policy == "stop":
        return verdicts
    usable = {slot: updates[slot] for slot, verdict in verdicts.items() if not verdict.fault}
    groups = compared(like, trainable)
    lengths = [{slot: norm([u[i] for i in group]) for slot, (u, _) in usable.items()} for group in groups]
    check = Comparison(lengths, {slot: samples for slot, (_, samples) in usable.items()}, policy, limits or Limits())
    return verdicts | check.verdicts(cosines([[usable[slot][0][i] for i in groups[0]] for slot in check.pointing]))


def verdicts_of(faults: Mapping[int, Fault | None]) -> dict[int, Verdict]:
    """Return a verdict for each slot, in order: rejected if its update has a fault, accepted otherwise."""
    return {
        slot: Verdict(slot=slot, action="reject", reason=fault.reason, fault=fault) if fault else Verdict(slot=slot)
        for slot, fault in sorted(faults.items())
    }


def scaled(update: Sequence[Tensor], factor: float) -> list[Tensor]:
    """Return an update that was too long, scaled down: its float tensors times ``factor``. Integers stay."""
    return [
        np.asarray(tensor * factor, tensor.dtype) if factor != 1 and is_float(tensor) else tensor for tensor in update
    ]


class Comparison:
    """Compares usable updates of a round by their lengths and directions.

    Args:
        lengths: Norm of each slot's update, for the trained weights and for the others.
        samples: Number of samples of each slot.
        policy: ``"reject"`` or ``"clip"``.
        limits: Limits of norm and direction.

    Attributes:
        pointing: Slots whose directions are compared: none, or at least three.
    """

    def __init__(
        self, lengths: Sequence[Mapping[int, float]], samples: Mapping[int, int], policy: str, limits: Limits
    ) -> None:
        self._limits = limits
        self._length_verdicts = [
            {
                slot: verdict
                for slot in samples
                if (verdict := _length(slot, norms, samples, policy, limits, trained=trained)) is not None
            }
            for trained, norms in zip((True, False), lengths, strict=True)
        ]
        too_long = {slot for slot, verdict in self._length_verdicts[0].items() if verdict.action != "clip"}
        pointing = [slot for slot in samples if lengths[0][slot] > 0 and slot not in too_long]
        self.pointing = pointing if len(pointing) > 2 else []

    def verdicts(self, cosine: npt.NDArray[np.float64]) -> dict[int, Verdict]:
        """Return the verdicts on the updates that must be scaled down or rejected.

        Args:
            cosine: Cosines of the trained weights of ``pointing``, shape (P, P).
        """
        trained, untrained = self._length_verdicts
        verdicts = trained | _directions(self.pointing, cosine, self._limits)
        for slot, verdict in untrained.items():
            if slot not in verdicts or verdict.factor < verdicts[slot].factor:
                verdicts[slot] = verdict
        return verdicts


def _length(
    slot: int, norms: Mapping[int, float], samples: Mapping[int, int], policy: str, limits: Limits, *, trained: bool
) -> Verdict | None:
    """Return the verdict on an update that is too long or too short; None if its length is within the limits."""
    other_norms = [norms[k] for k in norms if k != slot]
    if not other_norms:
        return None
    share = samples[slot] / median(samples[k] for k in samples if k != slot)
    norm, reference_name = norms[slot], "the median of the others" if len(other_norms) > 1 else "the other slot's"
    if trained and not norm and median_low(other_norms) > 0:
        return Verdict(slot=slot, action="reject", reason="all zeros")
    reference = median_high(other_norms)
    if reference and norm > limits.longest * reference * max(1, share):
        norm_name = "norm" if trained else "norm of the untrained weights"
        reason = f"{norm_name} {norm / reference:,.0f} times {reference_name}"
        if len(other_norms) == 1:
            reason += "; two slots do not show which one is wrong, and the longer update does more harm"
        if policy == "clip":
            return Verdict(slot=slot, action="clip", factor=reference / norm, reason=reason)
        return Verdict(slot=slot, action="reject", reason=reason)
    reference = median_low(other_norms)
    if trained and len(other_norms) > 1 and norm < limits.shortest * reference * min(1, share):
        return Verdict(slot=slot, action="reject", reason=f"norm 1/{reference / norm:,.0f} of {reference_name}")
    return None


def _directions(slots: Sequence[int], cosine: npt.NDArray[np.float64], limits: Limits) -> dict[int, Verdict]:
    """Return rejections of updates that point away from the direction that most others have in common."""
    verdicts: dict[int, Verdict] = {}
    for row, slot in enumerate(slots):
        other_rows = np.delete(np.arange(len(slots)), row)
        between = cosine[np.ix_(other_rows, other_rows)][np.triu_indices(len(other_rows), 1)]
        own_cosine = float(np.median(cosine[row, other_rows]))
        if own_cosine < -limits.opposite and np.median(between) > limits.opposite:
            verdicts[slot] = Verdict(
                slot=slot, action="reject", reason=f"opposite to the others (cosine {own_cosine:.2f})"
            )
    return verdicts


def compared(like: Sequence[Tensor], trainable: Sequence[bool]) -> tuple[list[int], list[int]]:
    """Return the indices of the trained and of the untrained float tensors, which are compared separately."""
    floats = [i for i, tensor in enumerate(like) if is_float(tensor)]
    trained = [i for i in floats if not trainable or trainable[i]]
    return trained, [i for i in floats if i not in trained]
