"""How far honest updates are from each other is measured, here with tiny settings."""

from benchmarks import honest
from ddlf.algorithms.update_check import judge


def test_honest_updates_of_very_unequal_partitions_are_not_rejected():
    options = honest.arguments().parse_args(["--rounds", "1", "--samples", "300"])
    (updates,) = honest.rounds("digits-adam", (0.90, 0.07, 0.02, 0.01), options)
    assert [n for _, n in updates.values()] == [270, 21, 6, 3]
    assert len(list(honest.figures(updates))) == 4
    assert {verdict.action for verdict in judge(updates, updates[0][0], "reject").values()} == {"accept"}
