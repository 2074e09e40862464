"""Run the short form of the flood trial of peers, without the joins: their rate needs a machine that does nothing else."""

import pytest

from tests.trials.peers_flooded import MOST_GROWTH_BYTES, measured


@pytest.mark.slow
@pytest.mark.parametrize("attack", ["quota", "readers"])
async def test_a_flood_does_not_slow_down_other_peers(attack):
    share, growth, line = await measured(attack, 0.5, 5)
    assert share >= 0.7, line  # the limit of the trial is 0.9, but other tests run beside this one
    assert growth <= 2 * MOST_GROWTH_BYTES, (
        line
    )  # the limit of the trial is half of it, but here posts wait for other tests
