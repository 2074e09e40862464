"""The secure sum of a plan: updates as whole numbers, and the next base from their sum. Pure; on peers and on the server.

The update of a peer is the weights of the base minus its own. ``ddlf.privacy.weighted_sum`` has the formulas.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from math import prod

import numpy as np

from ddlf.algorithms.outer import OUTER
from ddlf.algorithms.weights import Weights
from ddlf.peers.plan import Plan
from ddlf.peers.sets import Layout
from ddlf.privacy import weighted_sum
from ddlf.privacy.secure_sum import Numbers
from ddlf.privacy.weighted_sum import check_types, mean_of


def check_layout(layout: Layout) -> None:
    """Refuse a model whose weights cannot be added up.

    Raises:
        ConfigError: Names the weight.
    """
    check_types(
        ((name, kind) for name, _, kind in layout.tensors),
        hint="serve a model with float32 weights, or leave out --secure-aggregation",
    )


def values_in(layout: Layout) -> int:
    """Return the number of values of an update."""
    return sum(prod(shape) for _, shape, _ in layout.tensors)


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
    update = [np.subtract(old, new, dtype=np.float64) for old, new in zip(base, live, strict=True)]
    return weighted_sum.numbers_of(update, share, plan.update_limit)


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
    update = mean_of(total, len(shares), sum(shares), base, plan.update_limit)
    outer = OUTER.read(plan.outer)
    new_state, weights = outer.update(state or outer.init(base), base, update, trainable)
    return weights, new_state
