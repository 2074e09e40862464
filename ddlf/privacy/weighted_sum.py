"""Updates as whole numbers for a secure sum, and their mean from the sum. Pure; on members and on the server or master.

With the update ``u_k`` of member ``k``, and its share ``s_k``, which follows from its number of samples, member ``k`` masks
``s_k u_k`` as fixed-point numbers. The sum, divided by the sum of ``s_k``, is the mean of the updates, weighted by samples
(FedAvg).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite

import numpy as np

from ddlf.algorithms.weights import Tensor, Weights
from ddlf.errors import ConfigError
from ddlf.privacy.secure_sum import FixedPoint, Numbers

UPDATE_LIMIT = 8.0
"""Usual limit of the values of updates in secure sums. Source: ``clipping_range`` of Flower's SecAgg+."""
MOST_UPDATE_LIMIT = 1_000.0
"""A secure sum rounds values to ``limit / 2^25``: with this limit, to 3e-5. A larger one would lose usual updates."""


def check_update_limit(limit: float) -> None:
    """Refuse a limit of the values of updates that a secure sum cannot have.

    Raises:
        ConfigError: It is not finite, not above 0, or too large.
    """
    if not (isfinite(limit) and limit > 0):
        raise ConfigError(f"update_limit must be finite and above 0, got {limit}")
    if limit > MOST_UPDATE_LIMIT:
        raise ConfigError(
            f"a secure sum with update_limit = {limit:g} would round usual updates to 0",
            hint=f"use {MOST_UPDATE_LIMIT:g} or less; the usual limit is {UPDATE_LIMIT:g}",
        )


def check_types(tensors: Iterable[tuple[str, str]], hint: str) -> None:
    """Refuse a model whose weights cannot be added up.

    Args:
        tensors: The name and the type of each weight.
        hint: What to do.

    Raises:
        ConfigError: Names the weight.
    """
    for name, kind in tensors:
        if kind != "float32":
            raise ConfigError(
                f"secure aggregation adds up updates of float32 weights, and {name!r} is {kind}", hint=hint
            )


def share_of(samples: int, most: int) -> float:
    """Return the share of a member, from its number of samples: at most 1.

    Args:
        samples: Its samples.
        most: The samples of a whole share: the largest number that counts.
    """
    return min(samples / most, 1.0)


def numbers_of(update: Sequence[Tensor], share: float, limit: float) -> Numbers:
    """Return a member's weighted update as numbers.

    Args:
        update: One array for each weight.
        share: The member's share (``share_of``).
        limit: Largest magnitude of a value.

    Raises:
        BadUpdate: A value is beyond the limit, or not finite.
    """
    values = np.concatenate([np.asarray(tensor, np.float64).reshape(-1) for tensor in update])
    return FixedPoint(limit).numbers(values, share)


def mean_of(total: Numbers, count: int, divisor: float, like: Sequence[Tensor], limit: float) -> Weights:
    """Return the mean of the updates.

    Args:
        total: The sum of the members' numbers.
        count: Number of the members.
        divisor: Divides the sum. For the mean by samples, it is the sum of the members' shares.
        like: Arrays with the shapes and types of the weights.
        limit: Largest magnitude of a value of an update.

    Raises:
        ProtocolError: The sum cannot be that of these members.
    """
    mean = FixedPoint(limit).values(total, count) / divisor
    ends = np.cumsum([tensor.size for tensor in like])[:-1]
    return [
        part.reshape(tensor.shape).astype(tensor.dtype) for part, tensor in zip(np.split(mean, ends), like, strict=True)
    ]
