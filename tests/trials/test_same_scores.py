"""Run the short form of the trial that compares the scores of searches bit by bit."""

import pytest

from tests.trials.same_scores import is_right, tried


@pytest.mark.slow
async def test_scores_have_the_same_bits_on_one_two_and_three_workers_also_if_one_dies_or_returns(one_template):
    rows = await tried(steps=100, low=0.01, high=1.0)
    assert is_right(rows), rows
    assert not rows[3]["by worker"].endswith(", 0"), rows  # the returned worker had trials
