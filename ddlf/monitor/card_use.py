"""The use of cards over a run, from their readings, and readings as texts. Runs on the master."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ddlf import events as e


class CardValues(Protocol):
    """The values of a card, at a moment or over a run. None stands for a value that it does not report."""

    @property
    def utilisation(self) -> float | None:
        """Percent of the time in which it computes."""

    @property
    def memory(self) -> int:
        """Used bytes of its memory."""

    @property
    def total(self) -> int:
        """All bytes of its memory."""

    @property
    def watts(self) -> float | None:
        """Its power."""

    @property
    def celsius(self) -> int | None:
        """Its temperature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UseOfCard:
    """The use of a card by a worker over a run. The summary of a run has its fields.

    Args:
        worker: Name of the worker.
        card: The card, such as ``"0 (NVIDIA H100)"``.
        readings: Number of readings.
        utilisation: Mean percent of the time in which it computes; None if it does not report this, like the power and the
            temperature.
        watts: Mean power.
        memory: Largest used bytes of its memory.
        total: All bytes of its memory.
        celsius: Largest temperature.
    """

    worker: str
    card: str
    readings: int
    utilisation: float | None
    watts: float | None
    memory: int
    total: int
    celsius: int | None


class CardUse:
    """Adds up the readings of the cards of a run."""

    def __init__(self) -> None:
        self._read: dict[tuple[str, str], list[e.CardRead]] = {}

    def add(self, event: e.CardRead) -> None:
        """Add a reading."""
        self._read.setdefault((event.name, event.card), []).append(event)

    def rows(self) -> list[UseOfCard]:
        """Return the use of each card by each worker."""
        return [
            UseOfCard(
                worker=worker,
                card=card,
                readings=len(readings),
                utilisation=_mean([reading.utilisation for reading in readings]),
                watts=_mean([reading.watts for reading in readings]),
                memory=max(reading.memory for reading in readings),
                total=readings[-1].total,
                celsius=max((reading.celsius for reading in readings if reading.celsius is not None), default=None),
            )
            for (worker, card), readings in sorted(self._read.items())
        ]


def _mean(values: list[float | int | None]) -> float | None:
    present = [value for value in values if value is not None]
    return round(sum(present) / len(present), 1) if present else None


def as_text(card: CardValues) -> str:
    """Return a reading or the use of a card as one text, such as ``"87 %, 12.9 of 17.2 GB, 310 W, 61 °C"``."""
    memory = f"{card.memory / 1e9:.1f} of {card.total / 1e9:.1f} GB"
    watts = None if card.watts is None else f"{card.watts:.0f} W"
    return ", ".join(filter(None, (_busy(card), memory, watts, _warm(card))))


def short_reading(card: CardValues) -> str:
    """Return a reading as a short text, such as ``"87 %, 12.9 GB, 61 °C"``."""
    return ", ".join(filter(None, (_busy(card), f"{card.memory / 1e9:.1f} GB", _warm(card))))


def _busy(card: CardValues) -> str | None:
    return None if card.utilisation is None else f"{card.utilisation:.0f} %"


def _warm(card: CardValues) -> str | None:
    return None if card.celsius is None else f"{card.celsius} °C"
