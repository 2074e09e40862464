from __future__ import annotations

import pytest

from benchmarks import footprint


@pytest.mark.slow
def test_the_master_of_a_sharded_run_needs_no_memory_for_updates() -> None:
    found = footprint.main(["--parameters", "4e6", "--workers", "2", "--ways", "star,sharded"])
    assert found["sharded"]["until the end"] < found["star"]["until the end"]
    assert found["sharded"]["worker"] > 3  # its weights, those of the round, and its update, at least
