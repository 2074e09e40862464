"""Run the short forms of the trials of models in parts."""

import pytest

from tests.trials.killed import kills
from tests.trials.split import APP
from tests.trials.split_alike import BARS, METRICS, compared


@pytest.mark.usefixtures("one_template")
def test_bits_stay_when_parts_and_master_are_killed():
    result = kills(APP, kills=2, masters=1, workers=3, seed=1, iterations=10, pause_s=0.5)
    assert result["masters"] == 1, result
    assert result["same"], result
    assert result["ledger"], result


def test_stages_train_a_skip_over_two_cuts_like_one_process():
    weights, metrics = compared("skip over two cuts", "momentum", stages=3, steps=3)
    assert weights <= BARS["momentum"]
    assert metrics <= METRICS
