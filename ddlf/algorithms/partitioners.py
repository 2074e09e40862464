"""Rules that assign each sample to a slot for a whole run, so that the data of slots differ. Runs on the master.

Machines with their own data have different labels or different amounts. A rule here assigns each sample to a slot
once, from the run's seed. In each round a slot's samples come in the order of ``partition.shuffled``, so every epoch
has every sample once.
"""

from dataclasses import dataclass
from math import isfinite
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from ddlf.algorithms.partition import check_split, equal_sizes, sizes_by_speed
from ddlf.algorithms.rule_text import Family, Named
from ddlf.errors import ConfigError

Labels = npt.NDArray[np.int64]
Owners = npt.NDArray[np.signedinteger[Any]]
"""The slot of each sample, from 0."""


class Partition(Protocol):
    """The interface of partition rules: each assigns samples to slots.

    A rule that fixes the samples of each slot has the class attribute ``ignores``: the names of settings without effect
    then. The run refuses them.

    Attributes:
        goes_by_labels: Whether the rule needs the labels of the samples.
    """

    goes_by_labels: ClassVar[bool]

    def owners(self, samples: int, slots: int, seed: int, labels: Labels) -> Owners | None:
        """Return the slot that each sample belongs to during the whole run.

        Args:
            samples: n, at least one for each slot.
            slots: K.
            seed: Seed of the run.
            labels: Class number of each sample, shape (n,), if the rule uses labels; else empty.

        Returns:
            Slot of each sample, shape (n,), with at least one sample for each slot; None if it changes in each round.

        Raises:
            ConfigError: There are too few samples.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Equal(Named):
    """Divide all samples again in each round: into nearly equal parts, or by the workers' speeds (``balance``)."""

    goes_by_labels: ClassVar[bool] = False

    def owners(self, samples: int, slots: int, seed: int, labels: Labels) -> Owners | None:
        check_split(samples, slots)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dirichlet(Named):
    """Each slot draws its own class shares from a Dirichlet distribution. All slots have equally many samples.

    With ``p`` the share of each class in the whole data set, for one slot after another::

        q ~ Dir(alpha * p)
        draw the class of each of its n/K samples from q, without replacement

    An exhausted class leaves ``q``, and ``q`` is scaled to a sum of 1 again. A large ``alpha`` makes slots similar.
    With ``alpha`` near 0 each slot has a single class, while samples last. Papers that write Dir(alpha) with one
    ``alpha`` for each of C equally common classes mean ``alpha * C`` here.

    Args:
        alpha: Concentration, dimensionless, > 0.

    Raises:
        ConfigError: ``alpha`` is out of range.

    Source:
        Hsu, Qi, Brown 2019, arXiv:1909.06335, section 3.
    """

    alpha: float = 1.0
    goes_by_labels: ClassVar[bool] = True
    ignores: ClassVar[tuple[str, ...]] = ("balance", "worker_steps", "round_samples")

    def __post_init__(self) -> None:
        if not (isfinite(self.alpha) and self.alpha > 0):
            raise ConfigError(f"alpha must be finite and > 0, got {self.alpha}")

    def owners(self, samples: int, slots: int, seed: int, labels: Labels) -> Owners | None:
        chance = _chance(seed, slots)
        _, class_of_sample, class_sizes = np.unique(labels, return_inverse=True, return_counts=True)
        remaining = class_sizes.copy()
        counts = np.zeros((slots, len(class_sizes)), np.int64)
        for slot, size in enumerate(equal_sizes(samples, slots)):
            q = chance.dirichlet(self.alpha * class_sizes / samples)
            while missing := size - int(counts[slot].sum()):
                share = np.where(remaining > 0, q, 0.0)
                share = share if share.sum() > 0 else remaining / remaining.sum()  # all its classes are exhausted
                # Draw again if a class has too few samples, as if it had left ``q`` after its last sample.
                drawn = np.minimum(chance.multinomial(missing, share / share.sum()), remaining)
                counts[slot] += drawn
                remaining -= drawn
        owner = np.empty(samples, np.int64)
        for class_index, of_slots in enumerate(counts.T):
            owner[chance.permutation(np.flatnonzero(class_of_sample == class_index))] = np.repeat(
                np.arange(slots), of_slots
            )
        return owner


@dataclass(frozen=True, slots=True, kw_only=True)
class Classes(Named):
    """Give each slot samples of few classes.

    The samples are sorted by class and divided into ``per_slot * K`` equal shares. Each slot gets ``per_slot`` random
    shares. A share at the border of two classes contains both.

    Args:
        per_slot: Number of shares for each slot, 1 or more.

    Raises:
        ConfigError: ``per_slot`` is out of range.

    Source:
        McMahan et al. 2016, arXiv:1602.05629, section 3 (there called shards, two of them).
    """

    per_slot: int = 2
    goes_by_labels: ClassVar[bool] = True
    ignores: ClassVar[tuple[str, ...]] = ("balance", "worker_steps", "round_samples")

    def __post_init__(self) -> None:
        if self.per_slot < 1:
            raise ConfigError(f"per_slot must be 1 or more, got {self.per_slot}")

    def owners(self, samples: int, slots: int, seed: int, labels: Labels) -> Owners | None:
        shares = self.per_slot * slots
        if samples < shares:
            raise ConfigError(
                f"{samples} samples cannot be cut into {shares} shares, {self.per_slot} for each of {slots} slots"
            )
        chance = _chance(seed, slots)
        by_class = chance.permutation(samples)
        by_class = by_class[np.argsort(labels[by_class], kind="stable")]
        slot_of_share = chance.permutation(np.repeat(np.arange(slots), self.per_slot))
        owner = np.empty(samples, np.int64)
        owner[by_class] = np.repeat(slot_of_share, equal_sizes(samples, shares))
        return owner


@dataclass(frozen=True, slots=True, kw_only=True)
class Power(Named):
    """The number of samples of slot j, from 1, is proportional to ``j ** -exponent``, at least 1.

    The samples are random.

    Args:
        exponent: From -10 to 10. 0 gives equal numbers, and 1 Zipf's law. Below 0 the last slot has the most samples.

    Raises:
        ConfigError: ``exponent`` is out of range.

    Source:
        Zipf's law; rounded as in ``partition.sizes_by_speed``.
    """

    exponent: float = 1.0
    goes_by_labels: ClassVar[bool] = False
    ignores: ClassVar[tuple[str, ...]] = ("balance", "worker_steps", "round_samples")

    def __post_init__(self) -> None:
        if not -10 <= self.exponent <= 10:
            raise ConfigError(f"exponent must be from -10 to 10, got {self.exponent}")

    def owners(self, samples: int, slots: int, seed: int, labels: Labels) -> Owners | None:
        sizes = sizes_by_speed(samples, [float(slot) ** -self.exponent for slot in range(1, slots + 1)])
        return _chance(seed, slots).permutation(np.repeat(np.arange(slots), sizes))


PARTITION: Family[Partition] = Family("partition", equal=Equal, dirichlet=Dirichlet, classes=Classes, power=Power)
"""Every rule by name."""


def labels_of(y: Any) -> Labels:
    """Return the class number of each sample from its labels.

    Args:
        y: Whole numbers of shape (n,) or (n, 1), of any type, or one-hot rows.

    Raises:
        ConfigError: The labels have another form.
    """
    if isinstance(y, np.ndarray) and y.ndim <= 2 and y.dtype.kind in "biuf":
        if y.ndim == 1 or y.shape[1] == 1:
            numbers = y.reshape(len(y))
            if np.all(np.isfinite(numbers)) and np.all(numbers == np.round(numbers)):
                return numbers.astype(np.int64)
        elif np.all((y == 0) | (y == 1)) and np.all(np.count_nonzero(y, axis=1) == 1):
            return np.asarray(y.argmax(axis=1), np.int64)
    description = f"{y.dtype} of shape {y.shape}" if isinstance(y, np.ndarray) else f"a {type(y).__name__}"
    raise ConfigError(
        f"this partition needs whole numbers or one-hot rows as labels; y_train is {description}",
        hint="use partition='power:1' or 'equal', which need no labels",
    )


def counts_of(owners: Owners, labels: Labels, slots: int) -> list[dict[int, int]]:
    """Return for each slot the number of samples of each of its labels, in the order of labels."""
    counted = []
    for slot in range(slots):
        slot_labels, slot_counts = np.unique(labels[owners == slot], return_counts=True)
        counted.append({int(label): int(count) for label, count in zip(slot_labels, slot_counts, strict=True)})
    return counted


def _chance(seed: int, slots: int) -> np.random.Generator:
    # Five words: no round's order, and no local epoch's, begins with as many.
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, slots, 0, 0, 1])))
