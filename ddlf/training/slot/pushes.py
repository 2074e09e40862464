"""The pushes and fetches of a slot's round in Downpour, as its reply reports them. Runs on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPushes:
    """The pushes and fetches of the replicas of a slot in one round.

    Args:
        pushes: For each push that all servers have: its replica and its number; then for each server its staleness;
            then for each server the number of earlier pushes.
        fetches: For each fetch: its replica; then for each server the number of pushes in the fetched weights.
        lost: For servers that have lost pushes of the round: the server, and the number of these pushes.
        refused: Number of pushes that were left out because of NaN or infinite values.
        unreached: Number of a worker whose servers could not be reached; None if all servers were reached.
        reason: Why they could not be reached.
    """

    pushes: Sequence[Sequence[int]] = ()
    fetches: Sequence[Sequence[int]] = ()
    lost: Sequence[tuple[int, int]] = ()
    refused: int = 0
    unreached: int | None = None
    reason: str = ""

    @property
    def stalest(self) -> int:
        """The largest staleness of a push at any server; 0 without pushes."""
        return max((max(push[2 : len(push) // 2 + 1]) for push in self.pushes), default=0)
