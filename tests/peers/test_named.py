"""Trainings with a name: their commands in an empty folder, and the logs of a journal."""

import json

import pytest

from ddlf.cli.main import main
from ddlf.peers.entries import Arrived, Began, Left, Posted, Validated
from ddlf.peers.journal import open_journal
from ddlf.peers.named import logs


def ddlf(*words):
    with pytest.raises(SystemExit) as ended:
        main(["peers", *words])
    return ended.value.code


def test_new_copy_save_and_reset_work_in_an_empty_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert not ddlf("new", "digits")
    assert ddlf("new", "digits"), "a name is used once"
    assert ddlf("new", "../out"), "a name is not a path"
    run = tmp_path / "digits/runs/20260101-000000-peers-model"
    run.mkdir(parents=True)
    (run / "state.json").write_text("{}")
    journal, _ = open_journal(run)
    journal.begin_file({}, {})
    journal.append(
        [(Began(at=10.0, set=1, run="r"), b"abc"), (Validated(at=11.5, set=1, accuracy=0.5, loss=2.0, samples=9), b"")]
    )
    journal.close()
    assert not ddlf("copy", "digits", "other")
    assert sorted(path.name for path in (tmp_path / "other").iterdir()) == ["model.nnm", "settings.json"]
    assert not ddlf("save", "digits", "first")
    assert (tmp_path / "first/validation.csv").read_text() == "Time,Loss,Accuracy\n1.500,2.0,0.5\n"
    assert (tmp_path / "first/runs" / run.name / "journal-000001").read_bytes() == (run / "journal-000001").read_bytes()
    assert not ddlf("reset", "digits")
    assert sorted(path.name for path in (tmp_path / "digits").iterdir()) == ["model.nnm", "settings.json"]
    capsys.readouterr()
    assert not ddlf("list")
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["digits", "first", "other"]
    (tmp_path / "digits/settings.json").write_text(json.dumps({"batch": 3}))
    assert ddlf("train", "digits")
    assert "settings.json cannot be used" in capsys.readouterr().err
    (tmp_path / "digits/settings.json").write_text(json.dumps({"rate": 0.5, "validated_by": "server"}))
    assert ddlf("train", "digits")
    assert "cannot set rate and validated_by" in capsys.readouterr().err


def test_logs_say_who_did_what_and_when():
    found = logs(
        [
            Began(at=100.0, set=1, run="r"),
            Arrived(at=100.5, peer=1, name="a, b", samples=3, keeps=False),
            Posted(at=101.0, peer=1, number=1, set=2, contains=0, updates=5, accuracy=0.25, loss=2.0),
            Left(at=102.0, peer=1, why="bye"),
        ]
    )
    assert found["training.csv"] == "Time,Client,Loss,Accuracy\n1.000,1,2.0,0.25\n"
    assert [line.split(",")[:3] for line in found["log.csv"].splitlines()[1:]] == [
        ["0.500", "1", "join"],
        ["1.000", "1", "post"],
        ["2.000", "1", "leave"],
    ]
    assert found["validation.csv"] == "Time,Loss,Accuracy\n"
