"""What several benchmarks share."""

import argparse

import pytest

from benchmarks.measure import some_of


def test_names_that_are_not_known_are_named():
    read = some_of(["mean", "krum"])
    assert read("krum,mean") == ["krum", "mean"]
    with pytest.raises(argparse.ArgumentTypeError, match="unknown: krun; choose of mean, krum"):
        read("mean,krun")
