"""Run the short form of the trial of arrivals: one random order, and one worker with one core and with two."""

import pytest

from tests.trials.arrivals import run

pytestmark = pytest.mark.slow


async def test_bits_and_numbers_do_not_depend_on_the_order_of_arrival(capsys):
    assert await run(orders_=1, most=3, rounds=3, seed=0, counts=(1,)) == 0
    assert capsys.readouterr().out.endswith("4 of 4 runs with the same bits, numbers and an exact ledger\n")
