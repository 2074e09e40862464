"""The use of cards over a run, from their readings, and readings as texts. Runs on the master."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddlf import events as e


class CardUse:
    """Adds up the readings of the cards of a run."""

    def __init__(self) -> None:
        self._read: dict[tuple[str, str], list[e.CardRead]] = {}

    def tell(self, event: e.CardRead) -> None:
        """Add a reading."""
        self._read.setdefault((event.name, event.card), []).append(event)

    def rows(self) -> list[dict[str, Any]]:
        """Return the use of each card by each worker, as data: the means of utilisation and power, and the largest memory
        and temperature. A value that a card does not report is None.
        """
        return [
            {
                "worker": worker,
                "card": card,
                "readings": len(readings),
                "utilisation": _mean([reading.utilisation for reading in readings]),
                "watts": _mean([reading.watts for reading in readings]),
                "memory": max(reading.memory for reading in readings),
                "total": readings[-1].total,
                "celsius": max((reading.celsius for reading in readings if reading.celsius is not None), default=None),
            }
            for (worker, card), readings in sorted(self._read.items())
        ]


def _mean(values: list[float | int | None]) -> float | None:
    present = [value for value in values if value is not None]
    return round(sum(present) / len(present), 1) if present else None


def as_text(reading: Mapping[str, Any]) -> str:
    """Return a reading or the use of a card as one text, such as ``"87 %, 12.9 of 17.2 GB, 310 W, 61 °C"``."""
    memory = None if reading["memory"] is None else f"{reading['memory'] / 1e9:.1f} of {reading['total'] / 1e9:.1f} GB"
    watts = None if reading["watts"] is None else f"{reading['watts']:.0f} W"
    return ", ".join(filter(None, (_busy(reading), memory, watts, _warm(reading))))


def short_reading(reading: Mapping[str, Any]) -> str:
    """Return a reading as a short text, such as ``"87 %, 12.9 GB, 61 °C"``."""
    memory = None if reading["memory"] is None else f"{reading['memory'] / 1e9:.1f} GB"
    return ", ".join(filter(None, (_busy(reading), memory, _warm(reading))))


def _busy(reading: Mapping[str, Any]) -> str | None:
    return None if reading["utilisation"] is None else f"{reading['utilisation']:.0f} %"


def _warm(reading: Mapping[str, Any]) -> str | None:
    return None if reading["celsius"] is None else f"{reading['celsius']} °C"
