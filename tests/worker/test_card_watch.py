"""Tests of how a worker watches its card: load, loss and hangs. A stand-in replaces NVML."""

import threading
import time

import pytest

from ddlf.errors import ConfigError
from ddlf.worker import card_watch, lost_cards
from ddlf.worker.assignment import NO_WISH, Assignment, CardWish, replacement_card, spread
from ddlf.worker.card_watch import CardWatch, Reading
from ddlf.worker.cards import find_cards
from ddlf.worker.lost_cards import forget_lost, remember_lost
from tests.cards import GIB, card
from tests.patience import PATIENCE_S

FIRST = "GPU-00000000-0000"


@pytest.fixture
def watch(cards, monkeypatch):
    monkeypatch.setattr(card_watch, "LOOK_S", 0.01)
    before = threading.enumerate()
    new_watch = CardWatch(find_cards().cards[:1])
    yield new_watch
    new_watch.stop()
    if "hangs" not in str(new_watch.loss()):  # otherwise the thread reads the stand-in while ``cards`` removes it
        for thread in threading.enumerate():
            if thread.name == "ddlf cards" and thread not in before:
                thread.join(PATIENCE_S)


def until(condition):
    end = time.monotonic() + PATIENCE_S
    while not (result := condition()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return result


def test_readings_contain_the_values_of_the_card(cards, watch):
    cards.has(card(0, free=4 * GIB, utilisation=87, watts=310.5, celsius=61), card(1))
    watch.start()
    assert until(lambda: watch.readings) == (Reading("0", "Test Card", 12 * GIB, 16 * GIB, 87, 310.5, 61),)
    cards.has(card(0))
    until(lambda: watch.readings == (Reading("0", "Test Card", 0, 16 * GIB, None, None, None),))
    assert watch.loss() is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"error": 15}, "has fallen off the bus, as NVML reports"),
        ({"error": 16}, "must be reset, as NVML reports"),
        ({"xid": 79}, "has fallen off the bus (Xid 79)"),
        ({"xid": 119}, "does not answer its driver (Xid 119)"),
    ],
)
def test_lost_card_has_a_reason(cards, watch, change, reason):
    watch.start()
    until(lambda: watch.readings)
    cards.has(card(0, **change), card(1))
    loss = until(watch.loss)
    assert str(loss) == f"the card 0 (Test Card) {reason}"


def test_card_that_nvml_does_not_find_is_lost(cards, watch):
    watch.start()
    until(lambda: watch.readings)
    cards.has(card(1))
    assert until(watch.loss).reason == "is not there any more, as NVML reports"


def test_card_that_hangs_is_lost_after_the_patience_of_the_master(cards, watch):
    watch.start()
    until(lambda: watch.readings)
    cards.has(card(0, hangs=True), card(1))
    assert watch.loss(PATIENCE_S) is None
    assert str(until(lambda: watch.loss(0.2))) == "the card 0 (Test Card) hangs: it has not answered for 0.2 s"


def test_fault_of_a_program_or_of_the_driver_is_not_a_loss_of_the_card(cards, watch):
    watch.start()
    until(lambda: watch.readings)
    cards.has(card(0, xid=31, utilisation=1), card(1))
    until(lambda: watch.readings and watch.readings[0].utilisation == 1)
    cards.has(card(0, error=999))
    assert until(lambda: watch.problem) == "NVML cannot read the cards: NVML error 999"
    assert watch.loss() is None
    cards.has(card(0, utilisation=2))
    until(lambda: watch.readings[0].utilisation == 2 and not watch.problem)


def test_next_worker_does_not_use_a_lost_card(cards):
    remember_lost(FIRST, "has fallen off the bus (Xid 79)")
    try:
        assert [free_card.number for free_card in Assignment.take(NO_WISH).cards] == ["1"]
        with pytest.raises(
            ConfigError, match=r"no card of this machine is free: the card 0 \(Test Card\) has fallen .* and 1"
        ):
            Assignment.take(NO_WISH)
        with pytest.raises(
            ConfigError,
            match=r"the card 0 \(Test Card\) cannot be used, because it has fallen off the bus \(Xid 79\) at ..:..:..; reset it",
        ):
            Assignment.take(CardWish(("0",)))
        assert Assignment().avoided()[0].startswith("the card 0 (Test Card) is left alone, because it has fallen off")
    finally:
        assert forget_lost(FIRST)
    assert not forget_lost(FIRST)
    assert Assignment().avoided() == []
    assert [free_card.number for free_card in Assignment.take(NO_WISH).cards] == ["0"]


def test_mask_of_a_lost_card_is_refused(cards, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    remember_lost(FIRST, "hangs")
    try:
        with pytest.raises(ConfigError, match=r"CUDA_VISIBLE_DEVICES=0 names the card 0 \(Test Card\), which hangs at"):
            Assignment.take(NO_WISH)
    finally:
        forget_lost(FIRST)


def test_a_card_that_hangs_is_not_queried_again(cards):
    cards.has(card(0, hangs=True), card(1))
    remember_lost(FIRST, "hangs")
    try:
        assert [bool(found_card.lost) for found_card in find_cards().cards] == [True, False]
    finally:
        forget_lost(FIRST)


def test_lost_cards_count_until_the_machine_restarts(cards, monkeypatch, tmp_path):
    remember_lost(FIRST, "hangs")
    try:
        monkeypatch.setattr(lost_cards, "BOOT", tmp_path / "boot_id")
        assert lost_cards.lost_cards() == {}
    finally:
        forget_lost(FIRST)


def test_other_cards_are_found_beside_one_that_fell_off(cards):
    cards.has(card(0, error=15), card(1))
    cards_of_machine = find_cards()
    assert [found_card.number for found_card in cards_of_machine.cards] == ["1"]
    assert (cards_of_machine.problem, cards_of_machine.do) == (
        "the card 0 has fallen off the bus",
        "reset it with nvidia-smi --gpu-reset, or restart the machine",
    )


def test_local_worker_whose_card_was_lost_gets_a_free_one(cards):
    (wish,) = spread(1, NO_WISH)
    assert wish.names == (FIRST,)
    assert replacement_card(wish) is wish
    remember_lost(FIRST, "hangs")
    try:
        assert replacement_card(wish).names == ("GPU-10000000-0000",)
        assignment = Assignment.take(CardWish(("1",)))
        with pytest.raises(ConfigError, match="no card of this machine is free"):
            replacement_card(wish)
        assignment.release()
    finally:
        forget_lost(FIRST)
