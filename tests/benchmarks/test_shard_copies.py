"""Workers with shards of Downpour are killed: a copy goes on, and each push counts once. Real workers, no Keras; the shortest form of a benchmark."""

import pytest

from benchmarks import shard_copies

pytestmark = pytest.mark.slow


def test_executors_with_shards_are_killed_and_each_push_counts_once():
    found = shard_copies.main(["kills", "--kills", "2", "--workers", "3", "--parameters", "3e4", "--cycles", "40"])
    assert found["exact"]
    assert found["kills"] >= 1
    assert found["taken over"] >= found["kills"]
