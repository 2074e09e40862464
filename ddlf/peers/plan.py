"""The plan of a training by peers: how they work together, and when it ends. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean
from typing import Any, Literal

from ddlf.algorithms.merge import MERGE, revealed_by
from ddlf.algorithms.outer import OUTER
from ddlf.algorithms.partitioners import PARTITION
from ddlf.algorithms.set_merge import SET_MERGE
from ddlf.algorithms.update_check import POLICIES
from ddlf.errors import ConfigError
from ddlf.peers.wire import FLOAT32, check_codec
from ddlf.privacy.accountant import check_budget, check_delta
from ddlf.privacy.contradictions import Choice, check
from ddlf.privacy.release import Mechanism
from ddlf.privacy.weighted_sum import UPDATE_LIMIT, check_update_limit

LAST = 5
"""Number of validations in the means that end a training or lower its learning rate."""
MOST_SAMPLES = 10**9
"""Largest number of samples that a peer may claim."""
MOST_SHARDS = 10_000
MOST_CLASSES, LONGEST_CLASS = 1_000, 100
"""Limits of the names of classes, which are part of each welcome."""
LONGEST = 6.0
"""The usual limit of the length of a training, as a multiple of the usual one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How peers work together. Every peer receives the plan.

    Args:
        way: ``"swap"``: a peer posts when it likes and gets another peer's set. ``"rounds"``: the posts of a round
            become the next base.
        merge: In swaps, the merge of a peer's own weights and the weights that it gets (``SET_MERGE``). In rounds, the merge
            of all updates (``MERGE``).
        outer: Outer optimizer of rounds.
        update_policy: What to do with a suspicious update of a round. None stands for ``"reject"``; with noise, each update is
            judged alone, and in a secure sum none is.
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
        longest: Most length of the training of a post, and of a step in swaps, as a multiple of the usual training; 0 for
            no check.
        trial: A posted set is tested on the server's test data first, and rejected if its accuracy is lower than the mean
            of the last validations by more than this; 0 for no test.
        codec: How sets travel: ``float32``, or ``bfloat16`` and ``float16`` with half of the bytes.
        clip: Most norm of a peer's update, over all trained weights; None without noise.
        noise: Noise multiplier: the noise on the sum of a round has the standard deviation ``noise * clip``. None without.
        trust: ``"server"`` if the server may see updates without noise, or ``"nobody"``. None stands for the server.
        divisor: Divides the noised sum of a round; None stands for the quorum.
        delta: The probability that a stated epsilon does not hold; None stands for 1e-5.
        privacy_budget: Largest epsilon of a peer. The training ends before a release would exceed it. None for no limit.
        secure_aggregation: Whether the server learns only the sum of the updates of a round.
        update_limit: Largest magnitude of a value of an update in a secure sum.

    Raises:
        ConfigError: A value is invalid.
    """

    way: Literal["swap", "rounds"] = "swap"
    merge: str = "weighted"
    outer: str = "subtract"
    update_policy: str | None = None
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
    longest: float = LONGEST
    trial: float = 0.0
    codec: str = FLOAT32
    clip: float | None = None
    noise: float | None = None
    trust: Literal["server", "nobody"] | None = None
    divisor: int | None = None
    delta: float | None = None
    privacy_budget: float | None = None
    secure_aggregation: bool = False
    update_limit: float = UPDATE_LIMIT

    def __post_init__(self) -> None:
        if self.way not in ("swap", "rounds"):
            raise ConfigError(f"peers work in swaps or in rounds, got {self.way!r}", hint="choose swap or rounds")
        _check_merge(self.way, self.merge)
        OUTER.read(self.outer)
        if self.update_policy is not None and self.update_policy not in POLICIES:
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
        for name in ("seconds", "deadline_s", "validate_s", "end", "rate", "longest", "trial"):
            value = getattr(self, name)
            if not (isfinite(value) and value >= 0):
                raise ConfigError(f"{name} must be finite and 0 or more, got {value}")
        if self.way == "rounds" and (least := MERGE.read(self.merge).least) > self.quorum:
            raise ConfigError(
                f"the merge {self.merge} needs {least} posts in a round, and a round closes with {self.quorum}",
                hint=f"add --quorum {least}, or choose another merge",
            )
        if 0 < self.longest <= 1:
            raise ConfigError(
                f"longest must be above 1, got {self.longest:g}: half of all trainings are longer than the usual one",
                hint="use 6, or 0 for no check",
            )
        if self.trial >= 1:
            raise ConfigError(f"trial must be below 1, got {self.trial:g}: it is a difference of accuracies")
        if self.trial and self.validated_by != "server":
            raise ConfigError("a trial of each set needs test data of the server", hint="name them with --data")
        check_classes(self.classes)
        check_codec(self.codec)
        check_update_limit(self.update_limit)
        _ = self.mechanism  # it refuses values without sense
        check(self.choice)
        if self.delta is not None:
            check_delta(self.delta, self.quorum)
        check_budget(self.privacy_budget)

    @property
    def choice(self) -> Choice:
        """The settings that decide who sees updates and samples."""
        return Choice(
            trainers="peers",
            clip=self.clip,
            noise=self.noise,
            trust=self.trust,
            divisor=self.divisor,
            quorum=self.quorum,
            way=self.way,
            merge=self.merge,
            reveals=revealed_by(MERGE.read(self.merge)) if self.way == "rounds" else "",
            update_policy=self.update_policy,
            codec=self.codec,
            shards=self.shards > 0,
            delta=self.delta,
            budget=self.privacy_budget,
            secure=self.secure_aggregation,
            decay=self.decay,
            longest=None if self.longest == LONGEST else self.longest,
            trial=self.trial,
        )

    @property
    def tests_sets(self) -> bool:
        """Whether somebody tests sets: the server on its own data, or in swaps the peers in turn."""
        return self.validate_s > 0 and (self.validated_by == "server" or self.way == "swap")

    @property
    def mechanism(self) -> Mechanism | None:
        """How the updates of a round become a release; None without noise."""
        if self.clip is None or self.noise is None:
            return None
        trust = self.trust or "server"
        return Mechanism(
            clip=self.clip,
            noise=self.noise,
            divisor=self.quorum if self.divisor is None else self.divisor,
            least=self.quorum if trust == "nobody" else 1,
            trust=trust,
        )

    @property
    def least_posts(self) -> int:
        """Posts without which a round has no result, not even at the end: with fewer, peers would have too little noise."""
        return self.mechanism.least if self.mechanism is not None else 1


@dataclass(frozen=True, kw_only=True)
class Offer:
    """The plan and the model of a server, as the answer to ``/model``. A Python peer reads it before it uses the code of
    its link.

    Args:
        plan: How the peers work together.
        model: The model's text.
        layout: SHA-256 of the header of sets.
    """

    plan: Plan
    model: str
    layout: str


def usual_merge(way: str) -> str:
    """Return the merge of a way of working together, if the user names none."""
    return "mean" if way == "rounds" else "weighted"


def _check_merge(way: str, merge: str) -> None:
    """Refuse a merge that does not exist, or that belongs to the other way."""
    rules: dict[str, Any] = {"swap": SET_MERGE, "rounds": MERGE}
    name, [other] = merge.partition(":")[0], rules.keys() - {way}
    if name not in rules[way].names and name in rules[other].names:
        raise ConfigError(
            f"the merge {name} works with --way {other}, and not with --way {way}",
            hint=f"add --way {other}, or choose one of {', '.join(rules[way].names)}",
        )
    rules[way].read(merge)


def check_classes(classes: Sequence[str]) -> None:
    """Refuse names of classes that are empty, too long, or equal.

    Raises:
        ConfigError: Names the class.
    """
    if classes and not 2 <= len(classes) <= MOST_CLASSES:
        count = f"is {len(classes)} class" if len(classes) == 1 else f"are {len(classes):,} classes"
        raise ConfigError(f"there {count}, and a model tells 2 to {MOST_CLASSES:,} apart")
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


def end_reason(plan: Plan, validations: Sequence[Validation], since_first_peer_s: float | None) -> str:
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
        return f"the first peer came {plan.end:g} s ago" if over else ""
    if plan.end > 0 and len(validations) >= LAST:
        mean = fmean(validation.accuracy for validation in validations[-LAST:])
        if mean >= plan.end:
            return f"the mean of the last {LAST} accuracies is {mean:.4f}"
    return ""


def describe_end(plan: Plan, *, by_app: bool) -> str:
    """Return a sentence about what ends the training.

    Args:
        plan: The plan.
        by_app: Whether ``is_convergent`` of an app can end it.
    """
    by_hand = "by ddlf peers stop; Ctrl-C ends this server"
    if plan.privacy_budget is not None:
        by_hand = f"before epsilon of a peer is above {plan.privacy_budget:g}, or {by_hand}"
    if plan.end >= 1:
        return f"{plan.end:g} s after the first peer has come, or {by_hand}"
    if plan.end > 0:
        return f"at an accuracy of {plan.end:g}, or {by_hand}"
    if by_app:
        return f"by is_convergent of the app, or {by_hand}"
    at_accuracy = "--end 0.97 would end it at that accuracy, " * plan.tests_sets
    return f"{by_hand}; {at_accuracy}--end 600{' would end it' * (not at_accuracy)} after ten minutes"


def decayed(plan: Plan, rate: float, validations: Sequence[Validation], count: int) -> float:
    """Return the learning rate after a validation: ``r_0^2 (1 - A^(L t))``, if it is above 0 and below the current rate.

    ``A`` and ``L`` are the means of the last 5 accuracies and losses, and ``t`` is the number of validations so far
    (``count``). With fewer than 5 validations the rate stays.

    Source:
        Goin, Cotton, Zhao 2018, WebNN, by its code (``learning_decay``).
    """
    if not plan.decay or len(validations) < LAST:
        return rate
    accuracy = fmean(validation.accuracy for validation in validations[-LAST:])
    loss = fmean(validation.loss for validation in validations[-LAST:])
    candidate = candidate_rate(plan.rate, accuracy, loss, count)
    return candidate if 0 < candidate < rate else rate


def candidate_rate(first: float, accuracy: float, loss: float, validations: int) -> float:
    """Return ``first^2 (1 - accuracy^(loss validations))``."""
    return float(first**2 * (1 - accuracy ** (max(loss, 0.0) * validations)))
