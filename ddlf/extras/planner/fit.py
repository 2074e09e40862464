"""Least squares with coefficients that are not negative, and the intervals of its predictions. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
QUANTILES = (3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415, 1.397, 1.383, 1.372)
"""Student's t at 90 % for 1 to 10 degrees of freedom: between -t and t lie 80 %."""
NORMAL = 1.282
"""The same for the normal distribution."""


def nonnegative(matrix: Array, target: Array) -> Array:
    """Return the vector x >= 0 with the least ``|matrix @ x - target|``, by the active set of Lawson and Hanson (1974).

    Args:
        matrix: An array of m rows and n columns.
        target: m values.
    """
    columns = matrix.shape[1]
    solution = np.zeros(columns)
    free = np.zeros(columns, bool)
    tolerance = 1e-12 * max(1.0, float(np.abs(matrix.T @ target).max(initial=0.0)))
    for _ in range(10 * columns + 1):
        slope = matrix.T @ (target - matrix @ solution)
        slope[free] = -np.inf
        if free.all() or slope.max() <= tolerance:
            break
        free[int(np.argmax(slope))] = True
        while True:
            trial = np.zeros(columns)
            trial[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
            if (trial[free] > 0).all():
                break
            low = free & (trial <= 0)
            share = float(np.min(solution[low] / (solution[low] - trial[low])))
            solution = solution + share * (trial - solution)
            free &= solution > tolerance
            solution[~free] = 0.0
        solution = trial
    return solution


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted linear model with errors relative to its predictions.

    Args:
        values: One coefficient for each column, not negative.
        error: Standard deviation of the relative errors.
        freedom: Degrees of freedom: rows less coefficients that are not 0, at least 1.
        spread: Inverse of the weighted product of the matrix with itself, in the columns that are not 0.
        used: Which coefficients are not 0.
    """

    values: Array
    error: float
    freedom: int
    spread: Array
    used: Array

    def predict(self, row: Array) -> tuple[float, float]:
        """Return a prediction, and the half of its relative 80 % interval.

        The interval grows with the distance of ``row`` from the fitted rows.
        """
        seconds = float(row @ self.values)
        if seconds <= 0:
            return 0.0, 0.0
        scaled_row = row[self.used] / seconds
        distance = float(scaled_row @ self.spread @ scaled_row)
        t = QUANTILES[self.freedom - 1] if self.freedom <= len(QUANTILES) else NORMAL
        return seconds, t * self.error * float(np.sqrt(1.0 + distance))


def fitted(rows: Array, seconds: Array, least: float, weights: Array | None = None) -> Fit:
    """Fit coefficients to measured seconds; each row counts by its relative error and its weight.

    Args:
        rows: Array of measurements and columns.
        seconds: The measured seconds, more than 0.
        least: The least relative standard deviation to assume, from repeats: few rows can agree by chance.
        weights: A weight for each row; by default they are equal.
    """
    roots = np.ones(len(seconds)) if weights is None else np.sqrt(weights)
    scaled = rows / seconds[:, None]
    size = np.where(scaled.any(axis=0), np.abs(scaled).max(axis=0), 1.0)
    values = nonnegative(roots[:, None] * scaled / size, roots) / size
    used = values > 0
    freedom = max(1, len(seconds) - int(used.sum()))
    errors = scaled @ values - 1.0
    error = max(least, float(np.sqrt(errors @ errors / freedom)))
    spread = np.linalg.pinv(scaled[:, used].T @ scaled[:, used])
    return Fit(values, error, freedom, spread, used)
