"""Kills of workers with shards, and of their master, the short form."""

from tests.trials.counted import is_well, trial


def test_workers_with_shards_and_their_master_are_killed_and_each_push_counts_once():
    result = trial(kills=3, masters=2, workers=3, parameters=3e4, seed=1, pause_s=0.05)
    assert result["masters"] == 2, result
    assert result["kills"] >= 2, result
    assert is_well(result), result
