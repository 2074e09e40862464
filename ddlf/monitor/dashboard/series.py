"""Curves whose memory is bounded, however long a run is. Runs on the master."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

MOST_POINTS = 1000
"""Maximum number of points of a curve, about twice what a wide screen shows. More points are merged in pairs."""

Column = list[float | None]


class Series:
    """Curves over a common x. Each point except the last is the mean of equally many values.

    Attributes:
        thinned: How often points were merged in pairs, or curves removed. A viewer with an older number has to fetch all
            points again.
    """

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._most = most
        self._x: list[float] = []
        self._columns: dict[str, Column] = {}
        self._stride = 1
        self._open: list[tuple[float, Mapping[str, float]]] = []
        self.thinned = 0

    def __len__(self) -> int:
        """Return the number of finished points, which stay the same until they are thinned."""
        return len(self._x)

    def add(self, x: float, values: Mapping[str, float]) -> None:
        """Add values at an ``x`` above the previous ones. Leave out NaN and infinity."""
        self._open.append((x, {name: value for name, value in values.items() if math.isfinite(value)}))
        if len(self._open) < self._stride:
            return
        last, means = self._newest()
        self._open.clear()
        for name in means:
            self._columns.setdefault(name, [None] * len(self._x))
        self._x.append(last)
        for name, column in self._columns.items():
            column.append(means.get(name))
        if len(self._x) == self._most:
            self._thin()

    def points_after(self, received: int) -> tuple[list[float], dict[str, Column]]:
        """Return the points of the curves after the first ``received`` ones: the values of x, and for each curve equally
        many values, None where it has no value.
        """
        x, columns = self._x[received:], {name: column[received:] for name, column in self._columns.items()}
        if self._open:
            last, means = self._newest()
            for name in {*columns, *means}:
                columns.setdefault(name, [None] * len(x)).append(means.get(name))
            x.append(last)
        return x, columns

    def drop(self, names: Collection[str]) -> None:
        """Remove some of the curves."""
        self._columns = {name: column for name, column in self._columns.items() if name not in names}
        self._open = [
            (x, {name: value for name, value in values.items() if name not in names}) for x, values in self._open
        ]
        self.thinned += 1

    def _newest(self) -> tuple[float, dict[str, float]]:
        """Return x and the means of the newest point, which does not have all its values yet."""
        names = dict.fromkeys(name for _, values in self._open for name in values)
        return self._open[-1][0], {name: mean([values.get(name) for _, values in self._open]) or 0.0 for name in names}

    def _thin(self) -> None:
        self._x = self._x[1::2]
        self._columns = {
            name: [mean(column[begin : begin + 2]) for begin in range(0, len(column), 2)]
            for name, column in self._columns.items()
        }
        self._stride *= 2
        self.thinned += 1


def mean(values: Column) -> float | None:
    """Return the mean of the values that are not None; None if there are no such values."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None
