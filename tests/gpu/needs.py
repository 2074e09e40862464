"""Find the card and the framework that the tests with a real card need."""

from __future__ import annotations

from ddlf.worker.cards import Card, build_of, find_cards

BACKENDS = ("tensorflow", "jax", "torch")


class NoCard(Exception):
    """This machine has no card for these tests."""


def first_card() -> Card:
    """Return the first card of this machine.

    Raises:
        NoCard: This machine has no card.
    """
    search = find_cards()
    if not search.cards:
        reason = search.problem or "this machine has no card of NVIDIA"
        raise NoCard(f"the tests in tests/gpu need a card: {reason}" + (f"; {search.do}" if search.do else ""))
    return search.cards[0]


def missing(backend: str) -> str:
    """Return why a backend cannot compute on cards here; empty if it can."""
    build = build_of(backend)
    if build.cuda:
        return ""
    problem = f"{build.package} computes on CPUs only" if build.package else f"{backend} is not installed"
    return f"{problem}; python -m pip install 'ddlf[{build.extra}]'"
