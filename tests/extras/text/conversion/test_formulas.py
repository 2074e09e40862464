"""Tests that compare operators with NumPy, and their gradients with central differences, in float64."""

import pytest

from ddlf.extras.text.language.operators import OPERATORS
from tests.extras.text.conversion.cases import CASES, hold_forward, hold_gradients

STATE = {"dropout", "batchNorm", "batchNormalization"}
"""Operators with a layer that has a state. Tests of whole models cover them."""
NAMES = [f"{number} {case.name}" for number, case in enumerate(CASES)]


def test_cases_cover_every_operator():
    assert {case.name for case in CASES} | STATE | {"cast", "part"} == set(OPERATORS)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_operator_equals_numpy(case):
    hold_forward(case)


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.smooth],
    ids=[name for name, case in zip(NAMES, CASES, strict=True) if case.smooth],
)
def test_operator_gradient_equals_the_central_difference(case):
    hold_gradients(case)
