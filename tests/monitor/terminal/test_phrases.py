"""Words for what takes time."""

import pytest

from ddlf.monitor.state import RunningPhase
from ddlf.monitor.terminal.phrases import doing


@pytest.mark.parametrize(("total", "words"), [(1, "starting 1 worker"), (2, "starting 2 workers")])
def test_one_of_something_is_not_told_as_many(total, words):
    assert doing(RunningPhase(what="starting", worker=0, since=0.0, total=total, unit="workers")) == words
