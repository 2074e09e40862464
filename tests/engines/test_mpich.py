"""Workers in the ranks of a real ``mpirun`` of MPICH."""

import pytest

from tests.engines.mpi_jobs import assert_good, assert_same_bits
from tests.patience import PATIENCE_S
from tests.trials.engines.mpi import MpichRig

pytestmark = pytest.mark.timeout(6 * PATIENCE_S)


@pytest.fixture
def rig(tmp_path):
    (tmp_path / "engine").mkdir()
    rig = MpichRig(tmp_path / "engine")
    rig.places = 2
    with rig:
        yield rig


def test_same_bits_as_on_this_machine(rig, tmp_path):
    assert_same_bits(rig, tmp_path)


def test_lost_workers_come_back(rig, tmp_path, monkeypatch):
    assert_good(rig, tmp_path, monkeypatch, "losses", 2)


def test_nothing_remains_whatever_ends_a_run(rig, tmp_path, monkeypatch):
    assert_good(rig, tmp_path, monkeypatch, "ends", 4)
