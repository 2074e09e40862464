"""Test of the short form of ``benchmarks.checked``."""

from benchmarks import checked, network


def test_a_slow_link_and_a_slow_worker_after_a_plan_are_named():
    assert network.available(), "needs root on Linux, with ip, tc and network namespaces"
    assert checked.main(["--short"]) == {"link": 1, "worker": 1}
