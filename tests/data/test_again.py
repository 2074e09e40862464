"""Tests of repartitioning a data set: samples keep their ids, and an interruption leaves a whole version."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from ddlf.data.data_set import DataSet
from ddlf.data.export import damage
from ddlf.data.location import Folder
from ddlf.data.remote_folder import open_location
from ddlf.data.sources import open_source
from ddlf.data.split import PartitionedSource, repartition, sizes_of, split
from ddlf.errors import ConfigError, DatasetError

X, Y = np.random.default_rng(0).random((600, 5), np.float32), np.arange(600) % 7


@pytest.fixture(params=["folder", "store"])
def location(request, tmp_path, monkeypatch):
    monkeypatch.setenv("DDLF_CACHE", str(tmp_path / "cache"))
    np.savez(tmp_path / "a.npz", x=X, y=Y)
    location = open_location(str(tmp_path / "place") if request.param == "folder" else f"memory://{tmp_path.name}")
    split(open_source(tmp_path / "a.npz"), location, sizes_of(600, 1, files=3))
    return location


def rows(location):
    """Return all samples in the order of their ids."""
    manifest = location.manifest()
    parts = [location.load(file, manifest.columns) for file in manifest.files]
    return [np.concatenate([part[name] for part in parts]).tobytes() for name in manifest.columns]


def test_repartition_keeps_ids_of_samples(location):
    before = rows(location)
    for version, files in ((2, 5), (3, 7)):
        manifest = repartition(location, PartitionedSource(location), sizes_of(600, 1, files=files))
        assert location.manifest() == manifest
        assert (manifest.version, manifest.samples, len(manifest.files)) == (version, 600, files)
        assert [file.first for file in manifest.files] == np.cumsum([0, *manifest.sizes[:-1]]).tolist()
        assert rows(location) == before
        assert not list(damage(location, manifest))


def test_previous_version_stays_until_next_or_removal(location):
    first, reader = location.manifest(), open_location(str(location))
    repartition(location, PartitionedSource(location), sizes_of(600, 1, files=5))
    assert len(reader.load(first.files[0], first.columns)["x"]) == 200
    second = location.manifest()
    repartition(location, PartitionedSource(location), sizes_of(600, 1, files=7))
    assert [str(error) for error in damage(location, first) if "is missing" in str(error)]
    location.retire(second)
    assert "is missing" in str(next(damage(location, second)))
    assert not list(damage(location, location.manifest()))


def test_open_data_set_finds_newer_and_older_version(location):
    early = DataSet(str(location))
    assert early.newer(1) is None
    repartition(location, PartitionedSource(location), sizes_of(600, 1, files=5))
    late, newer = DataSet(str(location)), early.newer(1)
    assert early.in_version(2) is newer
    assert newer.manifest == late.manifest
    assert late.in_version(1).manifest == early.manifest == early.in_version(0).manifest
    assert late.manifest.identity == early.manifest.identity == early.manifest.content != late.manifest.content
    assert np.array_equal(late.in_version(1).load(2)["x"], newer["x"][400:])
    repartition(location, PartitionedSource(location), sizes_of(600, 1, files=7))
    with pytest.raises(DatasetError, match=r"version 1 of the data set in .* no longer exists"):
        DataSet(str(location)).in_version(1)
    location.retire(late.manifest)
    with pytest.raises(DatasetError, match="version 2"):
        location.manifest(2)


def test_another_data_set_is_not_a_newer_version(tmp_path):
    np.savez(tmp_path / "a.npz", x=X, y=Y)
    np.savez(tmp_path / "b.npz", x=X + 1, y=Y)
    folder = tmp_path / "place"
    split(open_source(tmp_path / "a.npz"), Folder(folder), [300, 300])
    run = DataSet(folder)
    shutil.rmtree(folder)
    split(open_source(tmp_path / "b.npz"), Folder(folder), [300, 300])
    repartition(Folder(folder), PartitionedSource(Folder(folder)), [200] * 3)
    assert run.newer(1) is None
    with pytest.raises(DatasetError, match="now contains another data set"):
        run.in_version(2)


def test_repartition_refuses_equal_sizes_and_second_writer(location):
    with pytest.raises(ConfigError, match="has 3 files of these sizes already"):
        repartition(location, PartitionedSource(location), [200] * 3)
    with location.writing(after=1), pytest.raises(DatasetError, match=r"(is writing|writes) to .*wait"):
        repartition(location, PartitionedSource(location), [300] * 2)
    late = PartitionedSource(location)
    repartition(location, PartitionedSource(location), [300] * 2)
    with pytest.raises(DatasetError, match="another writer has changed"):
        repartition(location, late, [100] * 6)
    assert location.manifest().sizes.tolist() == [300, 300]


def test_interrupted_repartition_leaves_present_version(location, tmp_path):
    before = rows(location)

    def tear(phase, completed, of):
        if phase == "writing" and completed > 300:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        repartition(location, PartitionedSource(location), sizes_of(600, 1, files=5), moved=tear)
    assert location.manifest().version == 1
    assert rows(location) == before
    if isinstance(location, Folder):
        path = location.path / location.manifest().files[1].name
        path.write_bytes(path.read_bytes()[:-1] + b"!")
        with pytest.raises(DatasetError, match="is damaged"):
            repartition(location, PartitionedSource(location), sizes_of(600, 1, files=5))
        assert sorted(path.name for path in location.path.glob("v*")) == ["v0001"]


KILLED = """
import json, os, sys
import numpy as np
from tests.dying import dies_after
from ddlf.data import split
from ddlf.data.remote_folder import open_location
from ddlf.data.split import PartitionedSource, repartition
from ddlf.data.export import damage

location = open_location(sys.argv[1])

NAMES = ("fsync", "rename", "mkdir", "open", "fstat", "scandir", "unlink")

def rows():
    manifest = location.manifest()
    assert not list(damage(location, manifest))
    parts = [location.load(file, manifest.columns) for file in manifest.files]
    return [np.concatenate([part[name] for part in parts]).tobytes() for name in manifest.columns]

before, ends = rows(), []
for moment in range(50):
    before_version = location.manifest()
    files = {3: 5, 5: 7, 7: 3}[len(before_version.files)]
    sys.stdout.flush()
    if not (child := os.fork()):
        dies_after(moment, NAMES)
        repartition(open_location(sys.argv[1]), PartitionedSource(location), split.sizes_of(600, 1, files=files))
        os._exit(0)
    exit_code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    after_version = location.manifest()
    assert after_version == before_version or (after_version.version, len(after_version.files)) == (before_version.version + 1, files)
    assert rows() == before
    ends.append([exit_code, after_version.version - before_version.version])
print(json.dumps(ends))
"""


@pytest.mark.slow
def test_killed_repartition_leaves_old_or_new_version(tmp_path):
    np.savez(tmp_path / "a.npz", x=X, y=Y)
    split(open_source(tmp_path / "a.npz"), Folder(tmp_path / "place"), sizes_of(600, 1, files=3))
    ran = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "place")], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    ends = json.loads(ran.stdout)
    assert {ended for ended, _ in ends} <= {0, -9}
    assert sum(ended == -9 for ended, _ in ends) > 20
    # some processes were killed before the rename, some after it
    assert {version for ended, version in ends if ended == -9} == {0, 1}
