"""What the tests of both kinds of MPI have in common: real ranks of ``mpirun``, and what is lost or left."""

import random

from tests.patience import PATIENCE_S
from tests.trials.engines import series
from tests.trials.engines.rig import CALLS


def assert_good(rig, folder, monkeypatch, kind, count):
    """Lose ``count`` workers at random moments of a run, or end so many runs, and fail if something is wrong."""
    for limit in ("MARGIN_S", "END_S"):
        monkeypatch.setattr(series, limit, float(PATIENCE_S))
    rig.app = CALLS
    report = getattr(series, kind)(rig, folder, count, random.Random(1), lambda text: None)
    assert report.problems == []
    assert report.good == count


def assert_same_bits(rig, folder):
    report = series.same(rig, folder, 3, lambda text: None)
    assert report.problems == []
