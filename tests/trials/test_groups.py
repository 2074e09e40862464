"""Run the short form of the trial that compares groups of workers with whole models in Downpour."""

import pytest

from tests.trials.groups import compare

pytestmark = pytest.mark.usefixtures("one_template")


def test_groups_learn_like_whole_models(capsys):
    ((whole, groups),) = compare(seeds=1, rounds=3)
    assert groups > whole - 0.05, capsys.readouterr().out
