"""Tests of named trainings: their commands in an empty folder, and the logs of their journal."""

import fcntl
import json
import os

import pytest

from ddlf.cli.main import main
from ddlf.errors import ConfigError
from ddlf.peers.entries import Arrived, Began, Left, Posted, Validated
from ddlf.peers.journal import open_journal
from ddlf.peers.training_folders import logs, settings_of


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
    assert "settings.json cannot be used: batch is none of way, merge," in capsys.readouterr().err
    (tmp_path / "digits/settings.json").write_text(json.dumps({"way": "rounds"}))
    assert settings_of(tmp_path / "digits") == {"way": "rounds", "merge": "mean"}
    (tmp_path / "digits/settings.json").write_text("[]")
    assert ddlf("train", "digits")
    assert "it is not a JSON object" in capsys.readouterr().err
    (tmp_path / "digits/settings.json").write_text(json.dumps({"rate": 0.5, "validated_by": "server"}))
    assert ddlf("train", "digits")
    assert "cannot set rate and validated_by" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"merge": 3}, "merge must be a text, got 3"),
        ({"decay": "no"}, 'decay must be true or false, got "no"'),
        ({"quorum": True}, "quorum must be a whole number, got true"),
        ({"quorum": None}, "quorum must be a whole number, got null"),
        ({"delta": "x"}, 'delta must be a number, got "x"'),
        ({"classes": "cat,dog"}, 'classes must be a list of texts, got "cat,dog"'),
        ({"way": ["swap"]}, 'way must be a text, got ["swap"]'),
    ],
)
def test_a_setting_of_another_type_is_refused_by_name(settings, sentence, tmp_path):
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError) as error:
        settings_of(tmp_path)
    assert sentence in error.value.message


def test_settings_of_secure_sums_and_of_trials_match_the_command(tmp_path):
    (tmp_path / "settings.json").write_text(json.dumps({"way": "rounds", "secure_aggregation": True}))
    assert settings_of(tmp_path)["quorum"] == 3
    settings = {"trial": 0.2, "clip": None, "end": 600, "classes": ["cat", "dog"]}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    assert settings_of(tmp_path) == settings | {"merge": "weighted"}


def test_another_command_is_refused_from_the_start_of_a_training(tmp_path, monkeypatch, capsys):
    """This includes the first seconds, when Keras starts and no server can be found yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert not ddlf("new", "digits")
    run = tmp_path / "digits/runs/20260101-000000-peers-model"
    run.mkdir(parents=True)
    for name in ("state.json", "journal-000001"):
        (run / name).write_text("{}")
    for folder, commands in (
        (
            tmp_path / "digits",
            (("train", "digits"), ("retrain", "digits"), ("reset", "digits"), ("save", "digits", "new")),
        ),
        (run, (("serve", "--resume", str(run)),)),
    ):
        other = os.open(folder, os.O_RDONLY)
        fcntl.flock(other, fcntl.LOCK_EX)
        for words in commands:
            assert ddlf(*words)
            assert "is being trained; stop it first: ddlf peers stop" in capsys.readouterr().err, words
        os.close(other)
    assert not (tmp_path / "new").exists()
    assert not ddlf("reset", "digits")


def test_files_without_a_model_or_settings_are_refused_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "app.py").write_text("import ddlf\n")
    assert ddlf("new", "one", "--model", "app.py")
    assert "app.py is the code of an app, and a training with a name needs a text" in capsys.readouterr().err
    (tmp_path / "notes.txt").write_text("buy milk")
    assert ddlf("new", "one", "--model", "notes.txt")
    assert not (tmp_path / "one").exists()
    assert not ddlf("new", "one")
    (tmp_path / "one/settings.json").unlink()
    capsys.readouterr()
    assert ddlf("train", "one")
    assert "the training 'one' has no settings.json" in capsys.readouterr().err


def test_logs_give_time_peer_and_action():
    files = logs(
        [
            Began(at=100.0, set=1, run="r"),
            Arrived(at=100.5, peer=1, name="a, b", samples=3, keeps=False),
            Posted(at=101.0, peer=1, number=1, set=2, contains=0, updates=5, accuracy=0.25, loss=2.0),
            Left(at=102.0, peer=1, why="bye"),
        ]
    )
    assert files["training.csv"] == "Time,Client,Loss,Accuracy\n1.000,1,2.0,0.25\n"
    assert [line.split(",")[:3] for line in files["log.csv"].splitlines()[1:]] == [
        ["0.500", "1", "join"],
        ["1.000", "1", "post"],
        ["2.000", "1", "leave"],
    ]
    assert files["validation.csv"] == "Time,Loss,Accuracy\n"
