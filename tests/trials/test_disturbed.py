"""Training that is harmed, the short form: real masters and workers are killed."""

import asyncio

import pytest

from tests.trials.disturbed import kills, resume

pytestmark = pytest.mark.usefixtures("one_template")


def test_killed_executors_leave_no_trace_in_the_result():
    assert asyncio.run(kills(wanted=2, seed=1, rounds=4))


def test_a_master_that_is_killed_and_resumed_ends_with_the_same_bits():
    assert resume(wanted=1, seed=1, rounds=4, exchange="star")
