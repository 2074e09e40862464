"""Tests of the temporary folder of a daemon: it is removed after the daemon ended, and no other folder is."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ddlf.worker.daemon import DaemonFolder, remove_abandoned

KILLED = "from ddlf.worker.daemon import DaemonFolder; import os; print(DaemonFolder().path, flush=True); os.kill(os.getpid(), 9)"


@pytest.fixture(autouse=True)
def own_tmp(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_a_folder_is_private_and_can_be_removed(tmp_path):
    folder = DaemonFolder()
    (folder.path / "tmp").mkdir()
    (folder.path / "tmp" / "file").touch()
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_killed_daemon_is_removed_and_the_folder_of_a_running_one_stays(tmp_path):
    living = DaemonFolder()
    dead = subprocess.run([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True, check=False).stdout.strip()
    assert Path(dead).is_dir()
    assert remove_abandoned() == [Path(dead)]
    assert list(tmp_path.iterdir()) == [living.path]
    assert remove_abandoned() == []
    living.remove()


def test_folders_with_other_names_are_kept(tmp_path):
    (tmp_path / "ddlf-file").touch()
    (tmp_path / "ddlf-folder").mkdir()  # a starting daemon may have such a folder
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "lock").touch()
    (tmp_path / "ddlf-link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "ddlf-lock").mkdir()
    (tmp_path / "ddlf-lock" / "lock").symlink_to(tmp_path / "elsewhere" / "lock")
    before = sorted(tmp_path.rglob("*"))
    assert remove_abandoned() == []
    assert sorted(tmp_path.rglob("*")) == before


def test_folders_of_other_users_are_kept(tmp_path, monkeypatch):
    folder = tmp_path / "ddlf-other"
    folder.mkdir()
    (folder / "lock").touch()
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    assert remove_abandoned() == []
    assert folder.is_dir()
