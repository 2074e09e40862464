"""Run the short form of the trial that trains on simulated cards."""

import pytest

from tests.cards import card
from tests.trials.cards import COUNT, FAULTS, Outcome, faults, is_right, widths


@pytest.fixture
def eight(cards):
    cards.compute_with("tensorflow")
    cards.has(*map(card, range(COUNT)))
    return cards


def test_any_number_of_cards_has_equal_bits(eight):
    lines = list(widths([1, 2]))
    assert [line.partition(" ")[0] for line in lines] == ["right", "right"], lines


def test_each_fault_of_a_card_has_the_promised_result(eight):
    """A run without a fault gives the bits that all runs must have."""
    lines = list(faults(eight, 1, seed=1))
    assert [line.partition(":")[0] for line in lines] == [f"right {kind}" for kind in FAULTS], lines


def test_check_finds_wrong_results():
    assert not is_right(Outcome("lost", "b", "has fallen off the bus (Xid 79)"), "a")
    assert not is_right(Outcome("lost", "a", "its connection ended"), "a")
    assert not is_right(Outcome("full", "a"), "a")
    assert is_right(Outcome("killed", "a", "was ended by SIGKILL"), "a")
