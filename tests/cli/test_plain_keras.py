"""Tests of the search for the first difference between an app and plain Keras, and of its report.

Slow tests run ``ddlf check`` itself with real workers.
"""

import numpy as np
import pytest

from ddlf.cli.check import lines
from ddlf.cli.plain_keras import Compared, Differs, differing, first_batch

ONE = [np.array([1.0, -2.0], "f4"), np.zeros((0, 3), "f4"), np.array(3, "i8"), np.array([0.5], "f2")]


def changed(index, value):
    other = [array.copy() for array in ONE]
    other[index] = np.asarray(value, other[index].dtype)
    return other


@pytest.mark.parametrize(
    ("other", "indices"),
    [
        (ONE, []),
        (changed(0, [1.00001, -2.0]), []),
        (changed(0, [1.001, -2.0]), [0]),
        (changed(0, [np.nan, -2.0]), [0]),
        (changed(0, [np.inf, -2.0]), [0]),
        (changed(2, 4), [2]),
        (changed(3, [0.6]), [3]),
    ],
)
def test_two_updates_differ_if_it_is_more_than_rounding(other, indices):
    assert differing(ONE, other) == indices
    assert differing(other, ONE) == indices


def test_nan_on_both_sides_is_equal():
    assert differing(changed(0, [np.nan, -2.0]), changed(0, [np.nan, -2.0])) == []


@pytest.mark.parametrize("wrong", range(1, 21))
async def test_the_first_batch_that_differs_is_found_in_few_trainings(wrong):
    trained = []

    async def expected(batches):
        trained.append(batches)
        return [np.array([float(batches)], "f4")]

    async def actual(batches):
        return [np.array([float(batches) + (batches >= wrong)], "f4")]

    assert await first_batch(expected, actual, 20) == wrong
    assert len(trained) <= 5  # 2 ** 5 > 20


def test_the_result_is_printed_in_lines():
    facts = dict(batches=20, batch_size=32)
    assert lines("App", Compared(**facts, same_bits=True, most=0.0)) == [
        "agrees    App, with one slot, over 20 batches of 32 samples: the same bits as plain Keras"
    ]
    assert lines("App", Compared(batches=1, batch_size=8, same_bits=False, most=3e-8)) == [
        "agrees    App, with one slot, over 1 batch of 8 samples: equal to rounding (at most 3.0e-08 apart) to plain Keras"
    ]
    differs = Differs(
        batch=5,
        tensor="dense/kernel",
        element=(1, 2),
        expected=0.25,
        actual=-1.0,
        tensors=3,
        most=2.5,
        cause="a reason",
    )
    assert lines("App", Compared(**facts, same_bits=False, most=9.0, differs=differs)) == [
        "differs   App, with one slot, from batch 5 on, of 20 batches of 32 samples",
        "where     dense/kernel [1, 2]: 0.25 with plain Keras, -1 with the app; 3 tensors differ, at most by 2.5",
        "cause     a reason",
    ]
