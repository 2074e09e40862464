"""Tests of ``scripts/test --gpu``: where it cannot test a card, it fails and says why."""

import pytest

from ddlf.worker.cards import CardInventory
from tests.gpu.__main__ import main
from tests.gpu.needs import NoCard, first_card, missing


def test_command_fails_without_card(cards, capsys):
    cards.has()
    assert main([]) == 1
    assert "the tests in tests/gpu need a card: this machine has no card of NVIDIA" in capsys.readouterr().err


def test_command_names_broken_driver(monkeypatch):
    search = CardInventory(problem="the driver does not run", do="restart this machine")
    monkeypatch.setattr("tests.gpu.needs.find_cards", lambda: search)
    with pytest.raises(NoCard, match="need a card: the driver does not run; restart this machine"):
        first_card()


def test_command_fails_if_framework_computes_on_cpu_only(cards, capsys, monkeypatch):
    monkeypatch.setattr("tests.gpu.__main__.missing", lambda backend: f"{backend} computes on CPUs only")
    assert main(["tensorflow"]) == 1
    assert "tensorflow  missing: tensorflow computes on CPUs only" in capsys.readouterr().out


def test_command_knows_framework_with_cuda(cards):
    assert missing("jax") == ""


def test_command_refuses_unknown_backend(capsys):
    assert main(["numpy"]) == 2
    assert "Keras has no backend numpy for cards; there are: tensorflow, jax, torch" in capsys.readouterr().err


def test_command_returns_failure_of_tests(cards, capsys, monkeypatch):
    monkeypatch.setattr("tests.gpu.__main__.run", lambda backend, options: f"failed with {backend} {options}")
    assert main(["jax", "--", "-x"]) == 1
    assert "failed with jax ['-x']" in capsys.readouterr().out
