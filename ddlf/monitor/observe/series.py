"""Numbers over the rounds of a run, in bounded memory: the more rounds, the more of them one point stands for. Runs anywhere."""

from __future__ import annotations

import math
from collections.abc import Mapping

MOST_POINTS = 1000
"""Before neighbours become one. Twice what a wide screen shows of a curve."""

Column = list[float | None]


class Series:
    """Curves over a common x. All points but the last stand for equally many values of x, and are their means.

    Attributes:
        thinned: How often neighbours have become one: who has seen fewer points of another number knows none of these.
    """

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._most = most
        self._x: list[float] = []
        self._columns: dict[str, Column] = {}
        self._stride = 1
        self._open: list[tuple[float, Mapping[str, float]]] = []
        self.thinned = 0

    def __len__(self) -> int:
        """How many points will not change until they are thinned."""
        return len(self._x)

    def add(self, x: float, values: Mapping[str, float]) -> None:
        """Add what there is at an ``x`` above those before; NaN and infinity are left out."""
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

    def since(self, known: int) -> tuple[list[float], dict[str, Column]]:
        """All points but the first ``known``: their x, and each curve by its name, equally long, with None where there is nothing."""
        x, columns = self._x[known:], {name: column[known:] for name, column in self._columns.items()}
        if self._open:
            last, means = self._newest()
            for name in {*columns, *means}:
                columns.setdefault(name, [None] * len(x)).append(means.get(name))
            x.append(last)
        return x, columns

    def _newest(self) -> tuple[float, dict[str, float]]:
        """The point that is not complete yet."""
        names = dict.fromkeys(name for _, values in self._open for name in values)
        return self._open[-1][0], {name: mean([values.get(name) for _, values in self._open]) or 0.0 for name in names}

    def _thin(self) -> None:
        self._x = self._x[1::2]
        self._columns = {
            name: [mean(column[at : at + 2]) for at in range(0, len(column), 2)]
            for name, column in self._columns.items()
        }
        self._stride *= 2
        self.thinned += 1


def mean(values: Column) -> float | None:
    """Of those that are there; None when there are none."""
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None
