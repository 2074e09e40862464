"""The plan of a training by peers: how they work together, and when it ends. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean
from typing import Literal

from ddlf.algorithms.merge import MERGE
from ddlf.algorithms.outer import OUTER
from ddlf.algorithms.partitioners import PARTITION
from ddlf.algorithms.set_merge import SET_MERGE
from ddlf.algorithms.update_check import POLICIES
from ddlf.errors import ConfigError

LAST = 5
"""Number of validations in the means that end a training or lower its learning rate."""
MOST_SAMPLES = 10**9
"""Largest number of samples that a peer may claim."""
MOST_SHARDS = 10_000
MOST_CLASSES, LONGEST_CLASS = 1_000, 100
"""Limits of the names of classes, which are part of each welcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How peers work together. Every peer receives the plan.

    Args:
        way: ``"swap"``: a peer posts when it likes and gets another peer's set. ``"rounds"``: the posts of a round
            become the next base.
        merge: In swaps, the merge of a peer's own weights and the weights that it gets (``SET_MERGE``). In rounds, the merge
            of all updates (``MERGE``).
        outer: Outer optimizer of rounds.
        update_policy: What to do with a suspicious update of a round.
        updates: Batches that a peer trains between two posts.
        seconds: Most seconds between two posts of a peer; 0 for no limit.
        batch_size: Samples in a batch.
        quorum: Posts that a round needs to close at its deadline.
        deadline_s: Seconds after the first post of a round until it closes.
        validate_s: Seconds between two validations; 0 for none.
        validated_by: ``"peers"`` in turn on their own data, or the ``"server"`` on its test data.
        end: Mean accuracy of the last 5 validations that ends the training, if it is below 1. From 1 on, seconds since
            the first peer; 0 for no end.
        rate: Learning rate of the model at the beginning; 0 if it has none that is constant.
        decay: Whether validations lower the learning rate.
        shards: Parts of the server's own training data, each leased to one peer; 0 if peers train on their own data.
        partition: Rule that divides these data (``PARTITION``).
        classes: Names of the classes in the order of their numbers, so that text labels mean the same on all peers; empty
            if the labels are numbers.

    Raises:
        ConfigError: A value is invalid.
    """

    way: Literal["swap", "rounds"] = "swap"
    merge: str = "weighted"
    outer: str = "subtract"
    update_policy: str = "reject"
    updates: int = 20
    seconds: float = 0.0
    batch_size: int = 32
    quorum: int = 1
    deadline_s: float = 30.0
    validate_s: float = 1.0
    validated_by: Literal["peers", "server"] = "peers"
    end: float = 0.0
    rate: float = 0.0
    decay: bool = False
    shards: int = 0
    partition: str = "equal"
    classes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.way not in ("swap", "rounds"):
            raise ConfigError(f"peers work in swaps or in rounds, got {self.way!r}", hint="choose swap or rounds")
        (SET_MERGE if self.way == "swap" else MERGE).read(self.merge)
        OUTER.read(self.outer)
        if self.update_policy not in POLICIES:
            raise ConfigError(
                f"unknown update policy {self.update_policy!r}", hint=f"choose one of {', '.join(POLICIES)}"
            )
        PARTITION.read(self.partition)
        if type(self.shards) is not int or not 0 <= self.shards <= MOST_SHARDS:
            raise ConfigError(f"shards must be a whole number from 1 to {MOST_SHARDS:,}, got {self.shards}")
        for name, least in (("updates", 1), ("batch_size", 1), ("quorum", 1)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= MOST_SAMPLES:
                raise ConfigError(f"{name} must be a whole number from {least} to {MOST_SAMPLES:,}, got {value}")
        for name in ("seconds", "deadline_s", "validate_s", "end", "rate"):
            value = getattr(self, name)
            if not (isfinite(value) and value >= 0):
                raise ConfigError(f"{name} must be finite and 0 or more, got {value}")
        check_classes(self.classes)


def check_classes(classes: Sequence[str]) -> None:
    """Refuse names of classes that are empty, too long, or equal.

    Raises:
        ConfigError: Names the class.
    """
    if classes and not 2 <= len(classes) <= MOST_CLASSES:
        raise ConfigError(f"there are {len(classes):,} classes, and a model tells 2 to {MOST_CLASSES:,} apart")
    for number, name in enumerate(classes):
        if not isinstance(name, str) or not name.strip() or len(name) > LONGEST_CLASS:
            raise ConfigError(f"the name of class {number} must have 1 to {LONGEST_CLASS} characters")
        if name in classes[:number]:
            raise ConfigError(f"two classes have the name {name!r}", hint="give each class its own name")


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """The result of a test of a set."""

    accuracy: float
    loss: float
    samples: int


def why_over(plan: Plan, validations: Sequence[Validation], since_first_peer_s: float | None) -> str:
    """Return why the training is over; empty if it is not.

    Args:
        plan: The plan.
        validations: The last validations.
        since_first_peer_s: Seconds since the first peer arrived; None before.

    Source:
        Goin, Cotton, Zhao 2018, WebNN, by its code: the mean of the last 5 accuracies.
    """
    if plan.end >= 1:
        over = since_first_peer_s is not None and since_first_peer_s >= plan.end
        return f"{plan.end:g} s since the first peer have passed" if over else ""
    if plan.end > 0 and len(validations) >= LAST:
        mean = fmean(one.accuracy for one in validations[-LAST:])
        if mean >= plan.end:
            return f"the mean of the last {LAST} accuracies is {mean:.4f}"
    return ""


def how_it_ends(plan: Plan, *, by_app: bool) -> str:
    """Return a sentence about what ends the training.

    Args:
        plan: The plan.
        by_app: Whether ``is_convergent`` of an app can end it.
    """
    by_hand = "by ddlf peers stop; Ctrl-C ends this server"
    if plan.end >= 1:
        return f"{plan.end:g} s after the first peer has come, or {by_hand}"
    if plan.end > 0:
        return f"at an accuracy of {plan.end:g}, or {by_hand}"
    if by_app:
        return f"by is_convergent of the app, or {by_hand}"
    return f"{by_hand}; --end 0.97 would end it at that accuracy, --end 600 after ten minutes"


def decayed(plan: Plan, rate: float, validations: Sequence[Validation], count: int) -> float:
    """Return the learning rate after a validation: ``r_0^2 (1 - A^(L t))``, if it is above 0 and below the current rate.

    ``A`` and ``L`` are the means of the last 5 accuracies and losses, and ``t`` is the number of validations so far
    (``count``). With fewer than 5 validations the rate stays.

    Source:
        Goin, Cotton, Zhao 2018, WebNN, by its code (``learning_decay``).
    """
    if not plan.decay or len(validations) < LAST:
        return rate
    accuracy = fmean(one.accuracy for one in validations[-LAST:])
    loss = fmean(one.loss for one in validations[-LAST:])
    candidate = candidate_rate(plan.rate, accuracy, loss, count)
    return candidate if 0 < candidate < rate else rate


def candidate_rate(first: float, accuracy: float, loss: float, validations: int) -> float:
    """Return ``first^2 (1 - accuracy^(loss validations))``."""
    return float(first**2 * (1 - accuracy ** (max(loss, 0.0) * validations)))
