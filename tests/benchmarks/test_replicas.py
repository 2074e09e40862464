"""Whose turn it is where replicas that share a worker step one after the other."""

import pytest

from benchmarks.replicas import one_after_the_other, parser


@pytest.mark.parametrize(
    ("steps", "length", "alone"), [([3, 3, 3], 1, 0), ([4, 3, 3], 1, 0), ([5, 4, 4], 2, 3), ([2], 1, 2)]
)
def test_each_replica_makes_its_steps_and_the_last_one_the_last_step(steps, length, alone):
    drawn = one_after_the_other(steps, length, None, alone=alone)
    assert [drawn.count(replica) for replica in range(len(steps))] == steps
    assert drawn[:alone] == [0] * alone
    assert drawn[-1] == len(steps) - 1


def test_none_steps_twice_before_all_others_have_stepped():
    assert one_after_the_other([3, 3, 3], 1, None) == [0, 1, 2] * 3


def test_only_ways_of_downpour_can_be_asked_for():
    assert parser().parse_args([]).ways == ["downpour", "default"]
    with pytest.raises(SystemExit):
        parser().parse_args(["--ways", "sync"])
