"""Clips updates, sums them, adds noise and divides: one release. Runs wherever updates are merged, and on peers.

The Gaussian mechanism of one release of ``K`` updates ``u_1 .. u_K``, with clip ``C``, noise multiplier ``z`` and
divisor ``D``::

    c_k = u_k min(1, C / |u_k|);  release = (c_1 + ... + c_K + N(0, (z C)^2)) / D

``|u|`` is the norm over all trained weights together. With or without one update, the sum differs by ``C`` at most. The
divisor is fixed before the run, because a number of updates would tell something, too. Each update counts once, however
many samples it comes from.

A release leaves weights that are not trained as they are: integers, frozen layers, and statistics of BatchNorm.

| trust | who clips | who adds noise |
|---|---|---|
| ``"server"`` | the server, when an update arrives | the server, N(0, (z C)^2) onto the sum |
| ``"nobody"`` | each peer, before it posts | each peer, N(0, (z C)^2 / L) onto its update |

``L`` (``least``) is the number of updates that each release has at least. So the noise of the sum is never less than
``z C``, even if only ``L`` peers have posted. An update alone has ``z / sqrt(L)`` of noise.

Source:
    Clipped updates of whole participants: McMahan et al. 2018, arXiv:1710.06963. Noise in shares: Goryczka, Xiong 2017.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from ddlf.algorithms.merge import Merge
from ddlf.algorithms.pairwise import Vector
from ddlf.algorithms.weights import Tensor, Weights, is_float
from ddlf.errors import BadUpdate, ConfigError

TRUSTED = ("server", "nobody")
LEAST_NOISE, MOST_NOISE = 1e-9, 1e100
"""Range of the noise multiplier. Less noise protects nothing, and the square of more is not finite."""
MOST_STD = 1e6
"""Most noise on a sum. Weights in float32 have 7 digits, which larger noise fills, and a training with them overflows."""
PAIRS = 1 << 16
"""Pairs of normal values that are made at once, from 1 MiB of random bytes."""
BEYOND = 10.0
"""The norm of normal noise in ``d`` values is below ``std (sqrt(d) + 10)``, except with a chance of e^-50."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mechanism:
    """How updates become a release. It is a merge rule: ``start`` begins one release.

    Args:
        clip: ``C``, the most norm of an update, over all trained weights together.
        noise: ``z``, the noise multiplier: the noise on the sum has the standard deviation ``z C``.
        divisor: ``D``, which divides the sum. It is fixed before the run.
        least: ``L``, the number of updates that each release has at least.
        trust: The ``"server"`` may see updates without noise, or ``"nobody"`` may.

    Raises:
        ConfigError: A value is out of range.
    """

    clip: float
    noise: float
    divisor: int
    least: int = 1
    trust: Literal["server", "nobody"] = "server"

    by_value: ClassVar[bool] = False
    useful: ClassVar[int] = 1

    def __post_init__(self) -> None:
        for name in ("clip", "noise"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
            if not (is_number and math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} must be a finite number above 0, got {value!r}")
        if not LEAST_NOISE <= self.noise <= MOST_NOISE:
            raise ConfigError(
                f"noise must be from {LEAST_NOISE:g} to {MOST_NOISE:g}, got {self.noise!r}",
                hint="usual values are 0.5 to 5",
            )
        if not 0 < self.std < math.inf:
            raise ConfigError(f"clip {self.clip:g} times noise {self.noise:g} must be a finite number above 0")
        for name in ("divisor", "least"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} must be a whole number of 1 or more, got {value!r}")
        if self.trust not in TRUSTED:
            raise ConfigError(f"trust must be {' or '.join(TRUSTED)}, got {self.trust!r}")

    @property
    def std(self) -> float:
        """Return the standard deviation of the noise on the sum: ``z C``."""
        return self.noise * self.clip

    @property
    def noise_of_one(self) -> float:
        """Return the noise multiplier of one update as the server sees it; 0 if it sees the update without noise."""
        return self.noise / math.sqrt(self.least) if self.trust == "nobody" else 0.0

    @property
    def std_of_one(self) -> float:
        """Return the standard deviation of the noise that each peer adds to its update; 0 if the server adds it."""
        return self.noise_of_one * self.clip

    @property
    def largest(self) -> float:
        """Return the most magnitude of a value of a clipped update with a peer's noise, except with a chance of 1e-23."""
        return self.clip + BEYOND * self.std_of_one

    def start(
        self, slots: int, like: Sequence[Tensor], names: Sequence[str] = (), trainable: Sequence[bool] = ()
    ) -> Release:
        """Begin one release.

        Args:
            slots: Number of updates that may come.
            like: Arrays with the shapes and types of the updates, such as the model's weights.
            names: Paths of the tensors, for errors.
            trainable: Per tensor, whether it is trained; empty if all floats are.
        """
        return Release(self, slots, like, names, trainable)

    def protected(self, update: Sequence[Tensor], trainable: Sequence[bool] = ()) -> Weights:
        """Return an update as a peer sends it: clipped, and with the peer's share of the noise if nobody is trusted.

        Raises:
            BadUpdate: A value is not finite.
        """
        parts = dict(zip(released(update, trainable), self._clipped(update, trainable), strict=True))
        if self.std_of_one:
            parts = {index: tensor + gaussian_like(tensor, self.std_of_one) for index, tensor in parts.items()}
        return [
            np.asarray(parts[index], tensor.dtype) if index in parts else np.zeros_like(tensor)
            for index, tensor in enumerate(update)
        ]

    def _clipped(self, update: Sequence[Tensor], trainable: Sequence[bool]) -> list[Vector]:
        return clipped([update[index] for index in released(update, trainable)], self.clip)

    def longest(self, values: int) -> float:
        """Return the most norm that an update of this number of values can have when it arrives at the server.

        It is infinite if the server itself clips.
        """
        return self.clip + self.std_of_one * (math.sqrt(values) + BEYOND) if self.std_of_one else math.inf


class Release(Merge):
    """One release: the noised mean of one round's updates. Real runs, tests and the audit use it.

    Args:
        mechanism: How updates become a release.
        slots, like, names: As ``Merge`` describes.
        trainable: Per tensor, whether it is trained; empty if all floats are.

    Attributes:
        count: Number of updates so far.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        slots: int,
        like: Sequence[Tensor],
        names: Sequence[str] = (),
        trainable: Sequence[bool] = (),
    ) -> None:
        super().__init__(slots, like, names)
        self.mechanism = mechanism
        self.count = 0
        self._trainable = trainable
        self._sums = {index: np.zeros(like[index].shape) for index in released(like, trainable)}
        self._result: Weights | None = None

    def _take(self, slot: int, update: Sequence[Tensor], count: int) -> None:
        tensors = [np.asarray(update[index], np.float64) for index in self._sums]
        if self.mechanism.trust == "server":
            tensors = clipped(tensors, self.mechanism.clip)
        for total, tensor in zip(self._sums.values(), tensors, strict=True):
            total += tensor
        self.count += 1

    def result(self) -> list[Tensor]:
        """Return the release. Called again, it returns the same one: other noise would be another release.

        Raises:
            ConfigError: Updates are missing, or there are fewer than ``least``, so that the noise would be too small.
        """
        if self._result is None:
            if not self._missing and self.count < self.mechanism.least:
                raise ConfigError(f"a release needs {self.mechanism.least} updates or more, got {self.count}")
            self._result = super().result()
        return self._result

    def _merged(self, index: int) -> Tensor:
        if (total := self._sums.get(index)) is None:
            return np.zeros(self._like[index].shape)
        if self.mechanism.trust == "server":
            total = total + gaussian_like(total, self.mechanism.std)
        return np.asarray(total / self.mechanism.divisor)


def released(like: Sequence[Tensor], trainable: Sequence[bool] = ()) -> list[int]:
    """Return the indices of the tensors that take part in a release: floats that are trained."""
    trained = trainable or [True] * len(like)
    return [
        index
        for index, (tensor, is_trained) in enumerate(zip(like, trained, strict=True))
        if is_trained and is_float(tensor)
    ]


def norm_of(update: Sequence[Tensor]) -> float:
    """Return the L2 norm of all tensors together, in float64."""
    with np.errstate(over="ignore"):  # then the norm is infinite
        return math.sqrt(sum(float(np.square(np.asarray(tensor, np.float64)).sum()) for tensor in update))


def clipped(update: Sequence[Tensor], clip: float) -> list[Vector]:
    """Return an update of norm ``clip`` at most, in float64. A shorter update stays as it is.

    Raises:
        BadUpdate: A value is not finite, or the values are too large for a norm.
    """
    length = norm_of(update)
    if not math.isfinite(length):
        raise BadUpdate(
            "the norm of an update is not finite, so it cannot be clipped",
            hint="lower the learning rate, or look for such values in the data",
        )
    factor = min(1.0, clip / length) if length else 1.0
    return [np.asarray(tensor, np.float64) * factor for tensor in update]


def gaussian_like(tensor: Tensor, std: float) -> Vector:
    """Return fresh normal noise in the shape of a tensor."""
    return gaussian(tensor.size, std).reshape(tensor.shape)


def gaussian(size: int, std: float, random: Callable[[int], bytes] = os.urandom) -> Vector:
    """Return normal values N(0, std^2), from the random source of the operating system.

    In each block, the first half of the random 64-bit numbers gives the lengths of pairs and the second half their
    angles (Box, Muller 1958). The browser's ``noise.js`` makes the same values from the same bytes.

    Args:
        size: Number of values.
        std: Standard deviation.
        random: Returns this number of random bytes.
    """
    values = np.empty(size)
    for begin in range(0, size, 2 * PAIRS):
        block = values[begin : begin + 2 * PAIRS]
        pairs = (block.size + 1) // 2
        bits = (np.frombuffer(random(16 * pairs), "<u8") >> np.uint64(11)).astype(np.float64)
        radius = std * np.sqrt(-2 * np.log((bits[:pairs] + 1) * 2.0**-53))  # above 0: log(0) would be infinite
        angle = 2 * math.pi * 2.0**-53 * bits[pairs:]
        block[:pairs] = radius * np.cos(angle)
        block[pairs:] = (radius * np.sin(angle))[: block.size - pairs]
    return values
