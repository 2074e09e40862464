"""Operators against NumPy, and their gradients against central differences, in float64."""

import pytest

from ddlf.extras.text.language.operators import OPERATORS
from tests.extras.text.conversion.cases import CASES, hold_forward, hold_gradients

STATE = {"dropout", "batchNorm", "batchNormalization"}
"""Those whose layer has a state; tests of models that are built have them."""
NAMES = [f"{number} {case.name}" for number, case in enumerate(CASES)]


def test_every_operator_is_tried():
    assert {case.name for case in CASES} | STATE | {"cast", "part"} == set(OPERATORS)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_an_operator_gives_what_numpy_gives(case):
    hold_forward(case)


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.smooth],
    ids=[name for name, case in zip(NAMES, CASES, strict=True) if case.smooth],
)
def test_its_gradient_is_the_central_difference(case):
    hold_gradients(case)
