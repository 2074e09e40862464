"""Lines about the cards of the workers, which a run and its dry run print."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator

from ddlf.cli.options import new_workers
from ddlf.worker.assignment import unused_cards


def card_lines(gpus: Iterable[str], deterministic: bool, options: argparse.Namespace) -> Iterator[str]:
    """Yield the cards of the workers for people, and why new workers leave cards of this machine unused.

    Args:
        gpus: The cards of each worker; empty for a worker without one.
        deterministic: Whether the run computes equal bits.
        options: The parsed options.
    """
    cards = Counter(name or "none" for name in gpus)
    if not set(cards) <= {"none"}:
        rows = "; ".join(f"{card} for {count} worker{'s' * (count != 1)}" for card, count in cards.items())
        yield rows if deterministic else f"{rows}. Two runs on cards may differ in bits: --deterministic prevents it"
    if new_workers(options) and options.gpus is None:
        yield from (f"unused: {reason}" for reason in unused_cards())
