"""Run the short form of the trial that kills workers and the master of L-BFGS."""

import pytest

from tests.trials.killed import kills
from tests.trials.lbfgs import APP, uneven


@pytest.mark.usefixtures("one_template")
def test_bits_stay_when_workers_and_master_are_killed():
    result = kills(APP, kills=2, masters=1, workers=3, seed=1, iterations=12, pause_s=0.5)
    assert result["masters"] == 1, result
    assert result["same"], result
    assert result["ledger"], result


@pytest.mark.parametrize("how", [{"slow": 4.0}, {"stops": True}])
async def test_other_workers_compute_the_portions_of_a_slow_worker(how):
    result = await uneven(**how)
    assert result["exact"], result
    assert result["share"] < 1, result
