"""Tests of the sentences of ``ddlf doctor`` for each state of cards and driver. A stand-in replaces NVML."""

import os
from importlib.metadata import version

import pytest

from ddlf.cli.findings import card_problems
from ddlf.worker import cards as module
from ddlf.worker.cards import facts_of_cards
from ddlf.worker.lost_cards import forget_lost, remember_lost
from tests.cards import GIB, card

FULL = dict(free=GIB // 4, processes=[1])


def sentences(mask=None, backend="jax"):
    return [f"{problem.what}; {problem.do}" for problem in card_problems(facts_of_cards(backend, mask), "here")]


@pytest.mark.parametrize(
    ("machine", "mask", "backend", "sentence"),
    [
        (dict(error=9), None, "jax", "it has a card of NVIDIA, but no driver that runs; install the driver"),
        (
            dict(error=18),
            None,
            "jax",
            "the driver of NVIDIA was updated, and the old one still runs; restart the machine",
        ),
        (
            dict(cards=[card()], cuda=11040, driver="470.82.01"),
            None,
            "jax",
            f"jax {version('jax')} is built for CUDA 12, and the driver 470.82.01 supports CUDA up to 11.4; install a driver for CUDA 12",
        ),
        (
            dict(cards=[card()]),
            None,
            "tensorflow",
            f"tensorflow-cpu {version('tensorflow-cpu')} computes on CPUs only, and the machine has cards; python -m pip uninstall -y tensorflow-cpu",
        ),
        (
            dict(cards=[card(**FULL)]),
            None,
            "jax",
            "the card 0 (Test Card) has 0.3 GB of 17.2 GB memory free; end what uses it (processes 1)",
        ),
        (
            dict(cards=[card(processes=[2**30])]),
            None,
            "jax",
            f"the card 0 (Test Card) is busy with process {2**30}: a worker would be slow there; wait for it",
        ),
        (
            dict(cards=[card(instances=[])]),
            None,
            "jax",
            "the card 0 is divided (MIG), but has no instance; make one with nvidia-smi mig -cgi PROFILE -C",
        ),
        (
            dict(cards=[card(), card(1)]),
            "3",
            "jax",
            "CUDA_VISIBLE_DEVICES=3 names the card 3, which this machine does not have; it has: 0 (Test Card), 1",
        ),
        (
            dict(cards=[card(), card(1)]),
            "GPU-ffffffff",
            "jax",
            "CUDA_VISIBLE_DEVICES=GPU-ffffffff names the card GPU-ffffffff, which this machine does not have; it has: 0",
        ),
        (
            dict(cards=[card(error=15), card(1)]),
            None,
            "jax",
            "the card 0 has fallen off the bus; reset it with nvidia-smi --gpu-reset, or restart the machine",
        ),
    ],
)
def test_each_state_of_cards_has_its_sentence(cards, monkeypatch, machine, mask, backend, sentence):
    monkeypatch.setattr(module, "_has_card", lambda: True)
    cards.has(*machine.get("cards", ()), **{name: value for name, value in machine.items() if name != "cards"})
    (printed,) = sentences(mask, backend)
    assert printed.startswith(sentence)


def test_lost_card_is_named(cards):
    remember_lost(card()["uuid"], "has fallen off the bus (Xid 79)")
    try:
        (sentence,) = sentences()
    finally:
        forget_lost(card()["uuid"])
    assert sentence.startswith("no worker takes the card 0 (Test Card), because it has fallen off the bus (Xid 79) at ")


def test_executor_of_a_worker_makes_no_card_busy(cards, monkeypatch):
    cards.has(card(processes=[os.getpid()]))
    monkeypatch.setattr(module, "program_of", lambda pid: "ddlf:9000")
    assert sentences() == []


def test_hidden_cards_and_healthy_cards_have_no_findings(cards):
    cards.has(card(**FULL), card(1))
    assert sentences("1") == []


def test_instance_of_a_divided_card_is_used_like_a_card(cards):
    cards.has(card(instances=[{"uuid": "MIG-0", "name": "Test Card MIG 1g", "memory": 10 * GIB}]))
    assert sentences() == []
    assert sentences("MIG-0") == []
