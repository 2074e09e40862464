"""Tests of the matrix product that ``ddlf doctor`` runs on each card. NumPy replaces the framework."""

import json

import numpy as np
import pytest

from ddlf.worker import card_check as module
from ddlf.worker.card_check import BEGINNING, Checked, _measured, check_card, main


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Make the matrices small, so that a product is fast."""
    monkeypatch.setattr(module, "EXACT_SIZE", 8)
    monkeypatch.setattr(module, "TIMED_SIZE", 64)


def identity(array):
    return array


def test_right_product_has_a_rate():
    checked = _measured("Test Card", identity, lambda a: a @ a, identity)
    assert (checked.device, checked.problem) == ("Test Card", "")
    assert checked.teraflops > 0


def test_wrong_product_is_a_problem():
    checked = _measured("Test Card", identity, lambda a: np.where(a == 3, 0, a @ a), identity)
    assert checked == Checked(problem="its matrix product has wrong values, so the card or its driver is faulty")


def test_error_of_a_framework_is_one_line(monkeypatch, capsys):
    def fail():
        raise RuntimeError("Unable to initialize backend 'cuda'\nand ten more lines")

    monkeypatch.setitem(module.PRODUCTS, "jax", fail)
    main(["card_check", "jax"])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(BEGINNING)]
    assert (
        json.loads(line.removeprefix(BEGINNING))["problem"] == "jax cannot use it: Unable to initialize backend 'cuda'"
    )


async def test_child_reports_its_result():
    checked = await check_card("numpy", "GPU-0")
    assert checked == Checked(problem="numpy cannot use it: 'numpy'")


async def test_variable_that_hides_cards_from_jax_is_named(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert await check_card("jax", "GPU-0") == Checked(
        problem="JAX_PLATFORMS=cpu hides it from jax", do="unset JAX_PLATFORMS"
    )


async def test_child_that_crashes_is_a_problem(monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys; print('CUDA error', file=sys.stderr, flush=True); os._exit(9)"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    checked = await check_card("jax", "GPU-0")
    assert checked.problem == "a matrix product with jax ended with exit code 9: CUDA error"


async def test_child_that_hangs_is_ended(monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import signal; signal.pause()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    checked = await check_card("jax", "GPU-0", 0.1)
    assert checked.problem == "it has not computed a matrix product with jax within 0.1 s"
