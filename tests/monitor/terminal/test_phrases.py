"""Tests of the words for a running phase."""

import pytest

from ddlf.monitor.state import RunningPhase
from ddlf.monitor.terminal.phrases import phase_in_words


@pytest.mark.parametrize(("total", "words"), [(1, "starting 1 worker"), (2, "starting 2 workers")])
def test_the_words_use_singular_and_plural(total, words):
    assert phase_in_words(RunningPhase(activity="starting", worker=0, since=0.0, total=total, unit="workers")) == words
