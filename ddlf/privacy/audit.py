"""Measures a lower bound on epsilon by running a release many times, with and without one worst-case update.

A stated epsilon is a promise about code. The audit tests the promise from outside: it plays an adversary who knows all
updates but one, looks at releases, and guesses whether the one is in. Right guesses prove a lower bound on epsilon. If this
bound is above the stated value, the code adds too little noise, or does not clip as stated.

A coin decides for each run whether it has the worst-case update, or zeros in its place. The first 1,000 runs, or a quarter
of few runs, choose how to guess: weights of a linear discriminant, and thresholds. The rest counts right and wrong guesses.
All bounds are 95 % sure.

Whatever the noise is: the adversary guesses only far from the middle between the two kinds of runs. A release that is
(epsilon, delta)-private tells no more than a coin that is right with probability ``e^epsilon / (1 + e^epsilon)``, except for
a share of delta of the runs, which may tell all (Kairouz et al. 2015, arXiv:1311.0776). So ``R`` right guesses of ``G`` prove::

    P(D + Binomial(G, p) >= R) > 5 %,   p = e^epsilon / (1 + e^epsilon),   D ~ Binomial(runs, delta)

The least such epsilon is the bound. The choosing runs fix ``G``, so ``D`` does not depend on it. Steinke et al. 2023
(arXiv:2305.08846) count guesses so, too.

If the release is a Gaussian mechanism, as is stated: the adversary always guesses. With Clopper-Pearson bounds at 97.5 % each,
``T`` (the least rate of true alarms) and ``F`` (the most rate of false alarms)::

    mu >= Phi^-1(T) - Phi^-1(F)

``mu`` is that of Gaussian differential privacy; the stated value is ``1 / z``, and each ``mu`` has its epsilon. This bound is
tighter, because all runs tell about one number (Nasr et al. 2023, arXiv:2302.07956).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, sqrt
from typing import Any

import numpy as np

from ddlf.algorithms.pairwise import Vector
from ddlf.algorithms.weights import Tensor, Weights
from ddlf.errors import ConfigError
from ddlf.privacy.accountant import DELTA, Noise, check_delta, dp_accounting, epsilon
from ddlf.privacy.release import Mechanism

RUNS = 20_000
LEAST_RUNS = 1_000
"""With fewer runs, the bounds say nothing."""
SHAPES = ((4, 3), (3,), (3, 2), (2,))
"""Shapes of the tensors of an audited update: kernels and biases of two small layers."""
MOST_CHOOSING = 1_000
"""Most runs that choose the guess, of a quarter of all. The others count."""
LENGTH = 1_000.0
"""Norm of a worst-case update, in units of the clip norm: it tells builds that clip from builds that do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of an audit.

    Attributes:
        runs: Number of releases.
        delta: The delta of all values of epsilon.
        stated: Epsilon of one release, as the accountant states it.
        as_gaussian: Lower bound (95 %) on epsilon, if the release is a Gaussian mechanism.
        as_any: Lower bound (95 %) on epsilon, whatever the noise is.
    """

    runs: int
    delta: float
    stated: float
    as_gaussian: float
    as_any: float

    @property
    def is_refuted(self) -> bool:
        """Whether a lower bound is above the stated value. By chance, this refutes a correct build in 1 of 20 audits at most."""
        return max(self.as_gaussian, self.as_any) > self.stated


class Canary:
    """The worst-case update of an audit: much longer than the clip norm, and equally long in each tensor.

    Args:
        clip: The clip norm.

    Raises:
        ConfigError: The update would be beyond float32.
    """

    def __init__(self, clip: float) -> None:
        if LENGTH * clip > float(np.finfo(np.float32).max):
            raise ConfigError(
                f"an audit needs an update of {LENGTH:g} times the clip {clip:g}, which float32 cannot hold",
                hint="use a smaller clip",
            )
        self._directions = [np.full(shape, 1 / sqrt(np.prod(shape) * len(SHAPES))) for shape in SHAPES]
        self.update: Weights = [np.asarray(LENGTH * clip * array, np.float32) for array in self._directions]
        self.zeros: Weights = [np.zeros_like(array) for array in self.update]

    def projections(self, release: Weights) -> Vector:
        """Return what the adversary looks at: for each tensor, the part of the release along the update."""
        return np.array(
            [float(np.vdot(direction, part)) for direction, part in zip(self._directions, release, strict=True)]
        )


def audit_mechanism(mechanism: Mechanism, *, runs: int = RUNS, delta: float = DELTA) -> Finding:
    """Audit the way from updates to a release that runs with workers and with peers use.

    Args:
        mechanism: How updates become a release.
        runs: Number of releases.
        delta: The delta of the stated epsilon.

    Raises:
        ConfigError: There are too few runs, or dp-accounting is not installed.
    """
    canary = Canary(mechanism.clip)
    other_updates = [[np.asarray(-array, np.float32) for array in canary.update]] * max(1, mechanism.least - 1)

    def draw(is_in: bool) -> Vector:
        updates = [canary.update if is_in else canary.zeros, *other_updates]
        return canary.projections(released(mechanism, updates))

    return audit(draw, Noise(multiplier=mechanism.noise), runs=runs, delta=delta)


def released(mechanism: Mechanism, updates: list[Weights]) -> list[Tensor]:
    """Return one release of updates: each is clipped, and noised on its peer if nobody is trusted."""
    release = mechanism.start(len(updates), updates[0])
    for slot, update in enumerate(updates):
        arrived = mechanism.protected(update) if mechanism.trust == "nobody" else update
        release.add(slot, arrived, 1)
    return release.result()


def audit(draw: Callable[[bool], Vector], noise: Noise, *, runs: int = RUNS, delta: float = DELTA) -> Finding:
    """Run a release many times, and return lower bounds on its epsilon beside the stated value.

    Args:
        draw: Runs the release, with the worst-case update or without, and returns what the adversary looks at.
        noise: The stated noise of the release.
        runs: Number of releases.
        delta: The delta of the stated epsilon.

    Raises:
        ConfigError: There are too few runs, delta is impossible, or dp-accounting is not installed.
    """
    check_delta(delta)
    if runs < LEAST_RUNS:
        raise ConfigError(f"an audit needs {LEAST_RUNS:,} runs or more, got {runs:,}")
    stated = epsilon({noise: 1}, delta)
    is_in = coins(runs)
    observations = np.array([draw(bool(coin)) for coin in is_in])
    choosing = min(runs // 4, MOST_CHOOSING)
    chooses = np.arange(runs) < choosing
    weights = _discriminant(observations[chooses & ~is_in], observations[chooses & is_in])
    scores = observations @ weights
    chosen = (scores[chooses & ~is_in], scores[chooses & is_in])
    counted = (scores[~chooses & ~is_in], scores[~chooses & is_in])
    mu = _mu(*_rates(_best(lambda threshold: _mu(*_rates(threshold, *chosen)), np.concatenate(chosen)), *counted))
    middle = (chosen[0].mean() + chosen[1].mean()) / 2
    counting = runs - choosing
    guesses = _guesses(chosen[0] - middle, chosen[1] - middle, counting, delta)
    far = scores[~chooses] - middle
    guessed = np.argsort(-np.abs(far), kind="stable")[:guesses]
    right = int(np.sum((far[guessed] > 0) == is_in[~chooses][guessed]))
    return Finding(
        runs=runs,
        delta=delta,
        stated=stated,
        as_gaussian=float(dp_accounting().get_epsilon_gaussian(1 / mu, delta)) if mu > 0 else 0.0,
        as_any=_epsilon_of(right, guesses, counting, delta),
    )


def coins(runs: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return for each run whether it has the worst-case update."""
    return np.random.default_rng().random(runs) < 0.5


def _discriminant(without: Vector, within: Vector) -> Vector:
    """Return the weights of Fisher's linear discriminant, which is the best guess about Gaussian noise."""
    spread = np.atleast_2d(np.cov(without.T) + np.cov(within.T))
    ridge = 1e-9 * np.trace(spread) + 1e-300  # noise may be missing in some direction
    return np.asarray(np.linalg.solve(spread + ridge * np.eye(len(spread)), within.mean(0) - without.mean(0)))


def _best(bound: Callable[[float], float], values: Vector) -> float:
    """Return the threshold with the largest bound: an alarm is a value above it."""
    thresholds = np.quantile(values, np.linspace(0, 1, 101))
    return max((float(threshold) for threshold in thresholds), key=bound)


def _rates(threshold: float, without: Vector, within: Vector) -> tuple[float, float]:
    """Return the least rate of true alarms and the most rate of false ones, each 97.5 % sure."""
    return _least(int(np.sum(within > threshold)), len(within)), 1 - _least(
        int(np.sum(without <= threshold)), len(without)
    )


def _least(hits: int, trials: int) -> float:
    """Return the lower Clopper-Pearson bound of a rate, 97.5 % sure."""
    return float(_scipy_stats().beta.ppf(0.025, hits, trials - hits + 1)) if hits else 0.0


def _mu(true: float, false: float) -> float:
    normal = _scipy_stats().norm
    return float(normal.ppf(true) - normal.ppf(false)) if true > 0 and false < 1 else 0.0


def _guesses(without: Vector, within: Vector, runs: int, delta: float) -> int:
    """Return the number of guesses, about the releases that are farthest from the middle, which is likely to prove most.

    It is that of normal scores, since few values are far out, unless another one has proved much more so far. No choice
    can make the bound wrong.

    Args:
        without: Scores that choose, from the middle, of releases without the update.
        within: Scores of releases with it.
        runs: Number of runs that count.
        delta: The delta of the bound.
    """
    far = np.abs(np.concatenate([without, within]))
    separation, spread = float(within.mean() - without.mean()), float(np.sqrt((within.var() + without.var()) / 2))

    def right_and_wrong(distance: float) -> tuple[float, float]:
        right, wrong = (
            runs * float(_scipy_stats().norm.sf((distance + side * separation / 2) / spread)) for side in (-1, 1)
        )
        return right, wrong

    def expected(distance: float) -> float:
        right, wrong = right_and_wrong(distance)
        wrong += sqrt(wrong)  # chance must not decide whether the bound is large
        return _epsilon_of(round(right), round(right) + round(wrong), runs, delta)

    def proved(distance: float) -> float:
        hits = int(np.sum(within >= distance) + np.sum(without <= -distance))
        return _epsilon_of(hits, int(np.sum(far >= distance)), len(far), delta)

    best = _best(proved, far)
    if spread > 0:
        normal = max((float(value) for value in spread * np.linspace(0, 5, 51)), key=expected)
        if proved(normal) > proved(best) / 4:
            return max(1, round(sum(right_and_wrong(normal))))
    return max(1, round(int(np.sum(far >= best)) * runs / len(far)))


def _epsilon_of(right: int, guesses: int, runs: int, delta: float) -> float:
    """Return the lower bound (95 %) on epsilon that right guesses about some of the runs prove."""
    stats = _scipy_stats()
    tell_all = np.arange(int(stats.binom.isf(1e-9, runs, delta)) + 1)
    weights = stats.binom.pmf(tell_all, runs, delta)

    def chance_of_hits(epsilon: float) -> float:
        return float(weights @ stats.binom.sf(right - tell_all - 1, guesses, 1 / (1 + exp(-epsilon)))) + 1e-9

    low, high = 0.0, 30.0
    if chance_of_hits(low) > 0.05:
        return 0.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if chance_of_hits(middle) > 0.05 else (middle, high)
    return low


def _scipy_stats() -> Any:
    dp_accounting()  # it needs SciPy, so both are there, or the error names the extra
    import scipy.stats

    return scipy.stats
