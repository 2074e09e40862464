"""Tests of folders of runs: their names, their states, finding one by name, and removing old ones."""

import os
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

from ddlf.errors import ConfigError
from ddlf.monitor.runs import folder


@pytest.fixture
def three_runs(tmp_path):
    """Make the folders of three ended runs, the oldest first."""
    paths = [tmp_path / name for name in ("20260101-120000-one", "20260101-120000-one-2", "20260102-080000-two")]
    for began, path in enumerate(paths):
        path.mkdir()
        folder.write_json(path / folder.STATE, replace(folder.begun("App"), state="finished", began=float(began)))
    return paths


def test_runs_of_the_same_second_get_different_folders(tmp_path):
    paths = {folder.make(tmp_path / "runs", "a") for _ in range(3)}
    assert len(paths) == 3
    assert {path.parent for path in paths} == {tmp_path / "runs"}
    assert (tmp_path / "runs" / ".gitignore").read_text() == "*\n"


def test_two_runs_may_create_the_first_folder_at_the_same_time(tmp_path, monkeypatch):
    first = folder.make(tmp_path / "runs", "a")
    monkeypatch.setattr("pathlib.Path.exists", lambda path: False)  # the second run has seen no folder
    assert folder.make(tmp_path / "runs", "b").parent == first.parent


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("my run/2", "-my-run-2"),
        ("../../etc", "-etc"),
        ("..", "-run"),
        ("", "-run"),
        ("a.b", "-a.b"),
        ("thí nghiệm", "-thí-nghiệm"),
        ("thi\u0301", "-thí"),
        ("x" * 300, "-" + "x" * 100),
        ("é" * 200, "-" + "é" * 50),
        ("a\nb\x1b[31m\udc80", "-a-b-31m"),
    ],
)
def test_any_name_gives_a_folder_inside_the_folder_of_runs(tmp_path, name, end):
    path = folder.make(tmp_path, name)
    assert path.parent == tmp_path
    assert folder.STAMP.sub("-", path.name) == end


def test_a_run_is_running_while_its_process_lives(tmp_path):
    folder.write_json(tmp_path / folder.STATE, folder.begun("App"))
    assert folder.read_state(tmp_path).state == "running"


def test_a_run_without_its_process_was_stopped(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    state = replace(folder.begun("App"), pid=process.pid, started=folder.process_started(process.pid))
    folder.write_json(tmp_path / folder.STATE, state)
    assert folder.read_state(tmp_path).state == "running"
    process.kill()
    process.communicate()
    assert folder.read_state(tmp_path).state == "stopped"
    assert folder.read_state(tmp_path).why == f"its process {process.pid} was killed"


def test_another_process_with_the_same_id_does_not_count(tmp_path):
    folder.write_json(tmp_path / folder.STATE, replace(folder.begun("App"), pid=os.getpid(), started="long ago"))
    assert folder.read_state(tmp_path).state == "stopped"


def test_the_state_of_a_run_on_another_machine_is_read_from_its_folder(tmp_path):
    state = replace(folder.begun("App"), host=socket.gethostname() + "-other", pid=2**22 + 1)
    folder.write_json(tmp_path / folder.STATE, state)
    assert folder.read_state(tmp_path) == state


@pytest.mark.parametrize("text", ["", "{", "[]", '{"state": "running"}', '{"state": "running", "began": "x"}'])
def test_a_folder_with_a_damaged_state_is_a_stopped_run(tmp_path, text):
    (tmp_path / folder.STATE).write_text(text)
    assert folder.read_state(tmp_path).state == "stopped"


def test_only_runs_are_listed_newest_first(tmp_path, three_runs):
    (tmp_path / "notes").mkdir()
    (tmp_path / "20260101-120000-file").write_text("")
    assert folder.runs_in(tmp_path) == three_runs[::-1]
    assert folder.runs_in(tmp_path / "none") == []


def test_a_run_is_found_by_the_beginning_of_its_name_or_as_last(tmp_path, three_runs):
    assert folder.find(tmp_path) == folder.find(tmp_path, "last") == three_runs[2]
    assert folder.find(tmp_path, "20260102") == folder.find(tmp_path, "tw") == three_runs[2]
    assert folder.find(tmp_path, "20260101-120000-one") == three_runs[0]
    assert folder.find(tmp_path, str(three_runs[1])) == three_runs[1]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("2026", "3 runs in .* begin with '2026': 20260102-080000-two, .*; give more letters of the name"),
        ("x", "no run in .* begins with 'x'; list the runs with: ddlf runs"),
        ("./x", "'./x' is not the folder of a run"),
    ],
)
def test_an_unknown_or_ambiguous_name_is_refused(tmp_path, three_runs, name, sentence):
    with pytest.raises(ConfigError, match=sentence):
        folder.find(tmp_path, name)


def test_a_folder_without_runs_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"there are no runs in .*; start one with ddlf run"):
        folder.find(tmp_path)


def test_the_oldest_runs_are_removed_except_a_running_one(tmp_path, three_runs):
    folder.write_json(three_runs[0] / folder.STATE, folder.begun("App"))
    assert folder.prune(tmp_path, 1) == ([three_runs[1]], {three_runs[0]: "it is still running"}, {})
    assert [path.exists() for path in three_runs] == [True, False, True]


def test_a_run_that_cannot_be_removed_is_reported_unless_another_process_removed_it(tmp_path, three_runs, monkeypatch):
    def rmtree(path):
        if path == three_runs[0]:
            raise OSError(30, "Read-only file system", "run.csv")
        raise FileNotFoundError(path)

    monkeypatch.setattr("shutil.rmtree", rmtree)
    assert folder.prune(tmp_path, 1) == ([], {}, {three_runs[0]: "Read-only file system"})


@pytest.mark.parametrize("facts", ["checkpoints", "goes_on_from"])
def test_a_run_with_checkpoints_of_a_kept_run_is_not_removed(tmp_path, three_runs, monkeypatch, facts):
    monkeypatch.chdir(tmp_path)
    checkpoints = f"{three_runs[0].name}/checkpoints"
    summary = (
        {"checkpoints": checkpoints}
        if facts == "checkpoints"
        else {"goes_on_from": {"version": 1, "checkpoints": checkpoints}}
    )
    folder.write_json(three_runs[2] / folder.SUMMARY, summary)
    assert folder.prune(tmp_path, 1) == (
        [three_runs[1]],
        {three_runs[0]: f"it has the checkpoints of {three_runs[2].name}"},
        {},
    )
