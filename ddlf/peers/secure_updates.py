"""Updates as whole numbers for a secure sum, and the next base from the sum. Pure; on peers and on the server.

With the weights ``w`` of the base and ``w_k`` of peer ``k``, its share ``s_k``, which follows from its number of samples, peer
``k`` masks ``s_k (w - w_k)`` as fixed-point numbers. The sum, divided by the sum of ``s_k``, is the mean of the updates,
weighted by samples (FedAvg).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from math import prod

import numpy as np

from ddlf.algorithms.outer import OUTER
from ddlf.algorithms.weights import Weights
from ddlf.errors import ConfigError
from ddlf.peers.plan import Plan
from ddlf.peers.sets import Layout
from ddlf.privacy.secure_sum import FixedPoint, Numbers


def check_layout(layout: Layout) -> None:
    """Refuse a model whose weights cannot be added up.

    Raises:
        ConfigError: Names the weight.
    """
    if other := [(name, kind) for name, _, kind in layout.tensors if kind != "float32"]:
        name, kind = other[0]
        raise ConfigError(
            f"secure aggregation adds up updates of float32 weights, and {name!r} is {kind}",
            hint="serve a model with float32 weights, or leave out --secure-aggregation",
        )


def values_in(layout: Layout) -> int:
    """Return the number of values of an update."""
    return sum(prod(shape) for _, shape, _ in layout.tensors)


def share_of(samples: int, most: int) -> float:
    """Return the share of a peer, from its number of samples: at most 1.

    Args:
        samples: Its samples.
        most: The samples of a whole share: the largest number that counts.
    """
    return min(samples / most, 1.0)


def terms_of(plan: Plan, samples: int, model: str, base: bytes) -> str:
    """Return what the numbers of a sum mean. Each member signs it, so that all of them add up the same.

    Args:
        plan: The plan.
        samples: The samples of a whole share.
        model: The model's text.
        base: The set that the training begins with.
    """
    limit = struct.pack(">d", plan.update_limit).hex()
    digests = f"{hashlib.sha256(model.encode()).hexdigest()} {hashlib.sha256(base).hexdigest()}"
    return f"{samples} {limit} {plan.updates} {plan.batch_size} {digests}"


def numbers_of(plan: Plan, base: Weights, live: Weights, share: float) -> Numbers:
    """Return a peer's weighted update as numbers.

    Args:
        plan: The plan.
        base: The weights that its training began with.
        live: Its weights.
        share: Its share (``share_of``).

    Raises:
        BadUpdate: A value is beyond the limit of the plan.
    """
    update = [np.subtract(old, new, dtype=np.float64).reshape(-1) for old, new in zip(base, live, strict=True)]
    return FixedPoint(plan.update_limit).numbers(np.concatenate(update), share)


def base_of(
    plan: Plan, base: Weights, total: Numbers, shares: Sequence[float], state: Weights, trainable: Sequence[bool]
) -> tuple[Weights, Weights]:
    """Return the next base and the new state of the outer optimizer.

    Args:
        plan: The plan.
        base: The base of the round.
        total: The sum of the members' numbers.
        shares: The share of each member, as in ``numbers_of``.
        state: State of the outer optimizer; empty at first.
        trainable: Per tensor, whether it is trained.

    Raises:
        ProtocolError: The sum cannot be that of these members.
    """
    mean = FixedPoint(plan.update_limit).values(total, len(shares)) / sum(shares)
    ends = np.cumsum([one.size for one in base])[:-1]
    update = [part.reshape(one.shape).astype(one.dtype) for part, one in zip(np.split(mean, ends), base, strict=True)]
    outer = OUTER.read(plan.outer)
    new_state, weights = outer.update(state or outer.init(base), base, update, trainable)
    return weights, new_state
