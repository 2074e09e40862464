"""Run the short form of the trial that trains on simulated cards."""

import sys
import tempfile

import pytest

from ddlf.cluster.launch import local
from ddlf.training.crew import schedule
from tests.cards import Cards, card
from tests.patience import PATIENCE_S
from tests.templates import Standing
from tests.trials.cards import COUNT, FAULTS, Outcome, faults, is_right, widths


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """Let this machine seem to have eight cards, for all tests of this module. Their workers share an import of Keras."""
    sys.modules.pop("pynvml", None)
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("tmp")  # for the notes of lost cards, too
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))
        cards = Cards(tmp_path_factory.mktemp("cards"), patch)
        cards.compute_with("tensorflow")
        cards.has(*map(card, range(COUNT)))
        standing = Standing.of_keras()
        patch.setattr(local, "start_template", standing.instead(local.start_template))
        yield cards
        standing.end()
    sys.modules.pop("pynvml", None)


def test_any_number_of_cards_has_equal_bits(eight):
    lines = list(widths([1, 2]))
    assert [line.partition(" ")[0] for line in lines] == ["right", "right"], lines


def test_each_fault_of_a_card_has_the_promised_result(eight, monkeypatch):
    """A run without a fault gives the bits that all runs must have. No run ends before its master has noticed the loss:
    another worker would repeat the slot of a hung card after 5 s, and the card counts as lost after 8 s.
    """
    monkeypatch.setattr(schedule, "STRAGGLER_LEAST_S", float(PATIENCE_S))
    lines = list(faults(eight, 1, seed=1))
    assert [line.partition(":")[0] for line in lines] == [f"right {kind}" for kind in FAULTS], lines


def test_check_finds_wrong_results():
    assert not is_right(Outcome("lost", "b", "has fallen off the bus (Xid 79)"), "a")
    assert not is_right(Outcome("lost", "a", "its connection ended"), "a")
    assert not is_right(Outcome("full", "a"), "a")
    assert is_right(Outcome("killed", "a", "was ended by SIGKILL"), "a")
