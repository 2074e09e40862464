"""The short form of what a worker that prints much costs; the bar for time is for a machine that does nothing else."""

import pytest

from tests.trials import printing


@pytest.mark.slow
def test_each_of_many_lines_comes_or_is_counted_and_the_master_keeps_none():
    row = printing.main(["--lines", "300000", "--rounds", "6", "--samples", "6400"])
    assert row["came"] + row["dropped"] == row["printed"] == 300_000
    assert row["came"] > 1000
    assert row["grown_mib"] < 16
