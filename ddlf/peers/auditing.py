"""Audits the rounds of a plan: from posted sets to the next base, as the server computes it. Runs anywhere."""

from __future__ import annotations

from functools import partial

import numpy as np

from ddlf.algorithms.pairwise import Vector
from ddlf.algorithms.weights import Weights, difference
from ddlf.peers.merging import Part, next_base
from ddlf.peers.plan import Plan
from ddlf.privacy.accountant import DELTA, Noise
from ddlf.privacy.audit import RUNS, Canary, Finding, audit


def audit_rounds(plan: Plan, *, runs: int = RUNS) -> Finding:
    """Run rounds of a plan many times, with and without a worst-case update, and return bounds on the epsilon of one round.

    The peers post sets, which are rounded to float32. If nobody is trusted, each peer clips and adds its noise before.

    Args:
        plan: A plan with clip and noise.
        runs: Number of rounds.

    Raises:
        ConfigError: There are too few runs, or dp-accounting is not installed.
    """
    mechanism = plan.mechanism
    assert mechanism is not None
    canary = Canary(mechanism.clip)
    base, trainable = canary.zeros, [True] * len(canary.zeros)
    other_updates = [[-array for array in canary.update]] * max(1, mechanism.least - 1)

    def posted(update: Weights) -> Weights:
        leaves = mechanism.protected(update, trainable) if mechanism.trust == "nobody" else update
        return difference(base, leaves)

    def draw(is_in: bool) -> Vector:
        updates = [canary.update if is_in else canary.zeros, *other_updates]
        parts = {
            number: Part(read=partial(posted, update), trainings=1, samples=1) for number, update in enumerate(updates)
        }
        new_base, _, _ = next_base(plan, base, base, parts, [], trainable)
        return canary.projections([np.asarray(array, np.float64) for array in difference(base, new_base)])

    return audit(draw, Noise(multiplier=mechanism.noise), runs=runs, delta=DELTA if plan.delta is None else plan.delta)
