"""Lines about the cards of the workers, which a run and its dry run print."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator


def card_lines(gpus: Iterable[str], deterministic: bool) -> Iterator[str]:
    """Yield the cards of the workers for people.

    Args:
        gpus: The cards of each worker; empty for a worker without one.
        deterministic: Whether the run computes equal bits.
    """
    cards = Counter(name or "none" for name in gpus)
    if not set(cards) <= {"none"}:
        rows = "; ".join(f"{card} for {count} worker{'s' * (count != 1)}" for card, count in cards.items())
        yield rows if deterministic else f"{rows}. Two runs on cards may differ in bits: --deterministic prevents it"
