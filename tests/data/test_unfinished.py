"""Tests of resuming an interrupted split: it gives the bytes of an uninterrupted one, and never mixes two plans."""

import contextlib
import os
import subprocess
import sys

import fsspec
import numpy as np
import pytest

from ddlf.data import split as splitting
from ddlf.data.export import damage
from ddlf.data.location import LOCK, WORK, Folder
from ddlf.data.remote_folder import open_location
from ddlf.data.sources import open_source, state_of
from ddlf.data.split import sizes_of, split
from ddlf.errors import DatasetError

ROWS = 600
LITTLE = 28_000
"""Bytes of memory that are so few that a split needs several heaps."""


class Torn(KeyboardInterrupt):
    """Ctrl-C at a chosen moment."""


@pytest.fixture(autouse=True)
def no_disk(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


@pytest.fixture
def source(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(ROWS * 6, dtype=np.float32).reshape(ROWS, 6), y=np.arange(ROWS) // 60)
    return tmp_path / "a.npz"


@pytest.fixture(params=["folder", "store"])
def location(request, tmp_path, monkeypatch):
    monkeypatch.setenv("DDLF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(splitting, "NOTED_S", 0.0)
    return str(tmp_path / "place") if request.param == "folder" else f"memory://{tmp_path.name}/data"


class SplitCall:
    """One call of ``split``.

    Args:
        phase: The phase that is interrupted: "reading" or "writing".
        behind: The number of samples before the interruption.
    """

    def __init__(self, source, location, *, phase="", behind=0, broken=Torn, options="", files=6, **more):
        self.messages, self.read, self.wrote, self.manifest = [], 0, 0, None

        def moved(step, completed, of):
            if step == phase and completed > behind:
                raise broken
            self.read += step == "reading"
            self.wrote += step == "writing"

        opened = open_source(source)
        with contextlib.suppress(Torn, broken):
            self.manifest = split(
                opened,
                open_location(location),
                sizes_of(opened.samples, 1, files=files),
                **{"memory": LITTLE} | more,
                state=state_of(source, options),
                moved=moved,
                say=lambda phase, text: self.messages.append(f"{phase}: {text}"),
            )


@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"stratify": "y"}, {"memory": 10**9}], ids=str)
@pytest.mark.parametrize("phase", ["reading", "writing"])
def test_interrupted_split_continues_with_same_bytes(source, location, tmp_path, phase, options):
    uninterrupted = SplitCall(source, tmp_path / "whole", **options)
    first = SplitCall(source, location, phase=phase, behind=300, **options)
    with pytest.raises(DatasetError, match=r"unfinished|no data set|no folder"):
        open_location(location).manifest()
    second = SplitCall(source, location, **options)
    assert second.manifest == uninterrupted.manifest
    assert not list(damage(open_location(location), second.manifest))
    if phase == "writing":
        assert first.wrote == 3
        assert second.wrote == 3
        assert second.messages[0].startswith("continues: 3 of 6 files are finished")
    elif options in ({}, {"stratify": "y"}):
        assert 0 < second.read < uninterrupted.read
        assert second.messages[0].startswith("continues: 0 of 6 files are finished, ")
    if second.messages:
        assert "run the same command to continue" in first.messages[-1]
    if "://" not in location:
        assert sorted(os.listdir(location)) == [LOCK, "manifest.json", "v0001"]
    else:
        assert not [name for name in fsspec.filesystem("memory").find(location) if LOCK in name]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "the unfinished data set of an earlier call has other options, and is removed"),
        ({"files": 5}, "the unfinished data set of an earlier call has other options, and is removed"),
        (
            {"options": "x"},
            "the unfinished data set of an earlier call has another source, or a changed one, and is removed",
        ),
    ],
)
def test_split_with_another_plan_restarts(source, location, tmp_path, changes, message):
    SplitCall(source, location, phase="writing", behind=300)
    second = SplitCall(source, location, **changes)
    assert second.messages == [f"anew: {message}"]
    assert second.manifest == SplitCall(source, tmp_path / "whole", **changes).manifest
    assert not list(damage(open_location(location), second.manifest))


def test_written_source_has_another_state(source):
    before = state_of(source)
    assert state_of(source) == before != state_of(source, "y")
    os.utime(source, ns=(0, 0))
    assert state_of(source) != before


def test_other_memory_keeps_finished_files(source, location, tmp_path):
    SplitCall(source, location, phase="writing", behind=300)
    second = SplitCall(source, location, memory=60_000)
    assert second.wrote == 3
    assert second.manifest == SplitCall(source, tmp_path / "whole").manifest


def test_damaged_heaps_and_finished_files_are_made_again(source, tmp_path, monkeypatch):
    monkeypatch.setattr(splitting, "NOTED_S", 0.0)
    location, expected = tmp_path / "place", SplitCall(source, tmp_path / "whole").manifest
    SplitCall(source, location, phase="writing", behind=300)
    third = location / "v0001" / "00002.safetensors"
    third.write_bytes(third.read_bytes()[:-1] + b"!")
    heap = max((location / WORK).glob("heap-*"))
    heap.write_bytes(bytes(heap.stat().st_size))
    with pytest.raises(DatasetError, match=r"heap-\d+, which .* is damaged.*run the command again"):
        SplitCall(source, location)
    second = SplitCall(source, location)
    assert second.manifest == expected
    SplitCall(source, tmp_path / "other", phase="reading", behind=300)
    heap = next((tmp_path / "other" / WORK).glob("heap-*"))
    heap.write_bytes(bytes(heap.stat().st_size))
    assert SplitCall(source, tmp_path / "other").manifest == expected


def test_full_disk_keeps_finished_files_bad_source_keeps_none(source, tmp_path, monkeypatch):
    location = tmp_path / "place"
    real = Folder.new

    def full(self, name):
        if name.endswith("3.safetensors"):
            raise OSError(28, "No space left on device")
        return real(self, name)

    with monkeypatch.context() as patched:
        patched.setattr(Folder, "new", full)
        with pytest.raises(DatasetError, match="no space in"):
            SplitCall(source, location)
    second = SplitCall(source, location)
    assert second.wrote == 3
    assert not list(damage(Folder(location), second.manifest))
    folder = tmp_path / "table.csv"
    folder.write_text("a,b\n" + "1,2\n" * 400 + "1,two\n")
    for _ in range(2):
        with pytest.raises(DatasetError, match="line 402"):
            SplitCall(folder, tmp_path / "table", shuffle=False)
        assert not (tmp_path / "table").exists()


def test_lock_of_killed_writer_is_recognised_on_its_machine(source, tmp_path, monkeypatch):
    monkeypatch.setenv("DDLF_CACHE", str(tmp_path / "cache"))
    url = f"memory://{tmp_path.name}/killed"
    SplitCall(source, url, phase="writing", behind=300)
    key = next((tmp_path / "cache" / "unfinished").glob("*/key")).read_text()
    files = fsspec.filesystem("memory")
    files.pipe(f"{url}/{LOCK}", f'{{"host": "h", "since": "then", "key": "{key}"}}'.encode())
    assert SplitCall(source, url).messages[0].startswith("continues")
    files.pipe(f"{url}2/{LOCK}", b'{"host": "h", "since": "then", "key": "of another machine"}')
    with pytest.raises(DatasetError, match=r"h since then writes to .*remove .*data.lock and run this again"):
        SplitCall(source, f"{url}2")


KILLED = """
import os, sys
from pathlib import Path
from tests.dying import dies_after
from ddlf.data import split as splitting
from ddlf.data.location import Folder
from ddlf.data.sources import open_source, state_of
from ddlf.data.split import sizes_of, split

splitting.NOTED_S = 0.0
source, where, said = Path(sys.argv[1]), sys.argv[2], []
whole = split(open_source(source), Folder(where + "-whole"), [100] * 6, memory=28_000)

NAMES = ("fsync", "rename", "replace", "mkdir", "unlink")

for moment in range(0, 600, 9):
    if not (child := os.fork()):
        dies_after(5 + moment % 37, NAMES)
        split(open_source(source), Folder(where), [100] * 6, memory=28_000, state=state_of(source))
        os._exit(0)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said.append(ended)
    if ended != -9:
        break
assert ended == 0, said
assert Folder(where).manifest() == whole
assert -9 in said
"""


def test_repeatedly_killed_split_ends_with_same_bytes(source, tmp_path):
    run = [sys.executable, "-c", KILLED, str(source), str(tmp_path / "place")]
    ran = subprocess.run(run, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert not list(damage(Folder(tmp_path / "place"), Folder(tmp_path / "place").manifest()))
