"""The benchmark of computing while gradients travel, in its shortest form."""

import pytest

from benchmarks import network, overlap


@pytest.mark.slow
def test_cycles_are_measured_with_and_without_computing():
    assert network.available(), "needs root on Linux, with ip, tc and network namespaces"
    said = "--workers 2 --parameters 2e5 --rate 20mbit --steps 8 --repeats 1"
    ((transfer, both, others),) = overlap.main(said.split())
    assert transfer > 0.1  # half of 0.8 MB each way, fetched and pushed, at 2.5 MB/s
    assert both < 1.9 * transfer  # one after the other it is twice as much
    assert others < 2.5 * both
