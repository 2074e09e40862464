"""Tests of workers in the ranks of a real ``mpirun``, with Open MPI and with MPICH."""

import random

import pytest

from tests.patience import PATIENCE_S
from tests.trials.engines import series
from tests.trials.engines.mpi import MpichRig, OpenMpiRig
from tests.trials.engines.rig import CALLS

pytestmark = pytest.mark.timeout(6 * PATIENCE_S)


BOTH = [pytest.param(OpenMpiRig, id="Open MPI", marks=pytest.mark.short), pytest.param(MpichRig, id="MPICH")]
"""Both implementations. The short form runs Open MPI only, because both behave alike there."""


@pytest.fixture
def rig(request, tmp_path):
    (tmp_path / "engine").mkdir()
    rig = request.param(tmp_path / "engine")
    rig.places = 2
    with rig:
        yield rig


@pytest.mark.parametrize("rig", BOTH, indirect=True)
def test_same_bits_as_on_this_machine(rig, tmp_path):
    assert series.same(rig, tmp_path, 3, lambda text: None).problems == []


@pytest.mark.parametrize("rig", BOTH, indirect=True)
def test_lost_workers_come_back(rig, tmp_path, monkeypatch):
    assert_good(rig, tmp_path, monkeypatch, "losses", 2)


@pytest.mark.parametrize("rig", [OpenMpiRig, MpichRig], indirect=True)
def test_nothing_remains_whatever_ends_a_run(rig, tmp_path, monkeypatch):
    assert_good(rig, tmp_path, monkeypatch, "ends", 4)


def assert_good(rig, folder, monkeypatch, kind, count):
    """Lose ``count`` workers at random moments of a run, or end ``count`` runs, and fail if the result is wrong."""
    for limit in ("MARGIN_S", "END_S"):
        monkeypatch.setattr(series, limit, float(PATIENCE_S))
    rig.app = CALLS
    report = getattr(series, kind)(rig, folder, count, random.Random(1), lambda text: None)
    assert report.problems == []
    assert report.good == count
