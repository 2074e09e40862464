"""Tests of ``ddlf config show``, which prints each setting with its value and origin."""

import pytest

from ddlf.cli import main
from ddlf.training.registry import SETTINGS

APP = """
import ddlf

class Base(ddlf.IApp):
    batch_size = 64

class App(Base):
    {more}

    def __init__(self, cluster=None):
        super().__init__(cluster)
        self.slots = 7

    async def load_dataset(self): ...
    async def create_model(self): ...

async def main(cluster): ...
"""


@pytest.fixture
def show(tmp_path, monkeypatch, capsys):
    """Return a function that runs the command in a folder with an app and a cluster file.

    It returns the printed lines as lists of words, the errors and the exit code.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("DDLF_CONFIG", raising=False)

    def run(*arguments, more="pass"):
        (tmp_path / "app.py").write_text(APP.format(more=more))
        with pytest.raises(SystemExit) as ended:
            main.main(["config", "show", *arguments])
        out, err = capsys.readouterr()
        return {line.split()[0]: line.split()[1:] for line in out.splitlines()}, err, ended.value.code

    return run


def test_config_shows_each_value_with_its_origin(show, tmp_path):
    (tmp_path / "cluster.yaml").write_text(
        "workers: [127.0.0.1:9000]\nrun:\n  worker_epochs: 3\n  heartbeat_s: 0.4\n  seed: 1\n"
    )
    arguments = (
        "--origin",
        "--target",
        "App",
        "--codec",
        "int8",
        "--seed",
        "5",
        "-p",
        "outer=nesterov",
        "-q",
        "--takeover",
    )
    lines, errors, code = show("app.py", *arguments)
    assert (errors, code) == ("", 0)
    assert {name: words for name, words in lines.items() if words[1:2] != ["default"]} == {
        "worker_epochs": ["3", "cluster.yaml:3"],
        "batch_size": ["64", "class", "Base"],
        "seed": ["5", "--seed"],
        "out": ["none", "$DDLF_RUN_DIR"],
        "slots": ["7", "App.__init__"],
        "codec": ["int8", "--codec"],
        "outer": ["nesterov", "-p", "outer"],
        "takeover": ["True", "--takeover"],
        "verbose": ["False", "--quiet"],
        "ui": ["none", "--quiet"],
        "heartbeat_s": ["0.4", "cluster.yaml:4"],
    }
    assert [*lines][: len(SETTINGS)] == list(SETTINGS)
    assert lines["connect_timeout_s"] == ["10.0", "default"]


def test_config_shows_defaults_without_an_app_and_values_alone_without_origin(show):
    lines, errors, code = show("--local", "2", "--batch-size", "8")
    assert (errors, code) == ("", 0)
    assert list(lines) == list(SETTINGS)
    assert (lines["batch_size"], lines["mode"], lines["checkpoint"]) == (["8"], ["sync"], ["None"])


def test_config_marks_unused_settings_and_fails_on_refused_ones(show):
    lines, errors, code = show("app.py", "--target", "App", "--mode", "async")
    assert (lines["merge"], lines["batchnorm"]) == (
        ["mean", "not", "used", "by", "async"],
        ["averaged", "not", "used", "by", "async"],
    )
    assert (errors, code) == ("", 0)
    lines, errors, code = show("app.py", "--target", "App", "--mode", "async", more="merge = 'median'")
    assert lines["merge"][0] == "median"
    assert errors.startswith("error  merge='median' is for synchronous training: asynchronous training does not use it")
    assert code == 2


def test_config_refuses_a_function(show):
    lines, errors, code = show("app.py", "--target", "main")
    assert (lines, errors, code) == ({}, "error  main in app.py is not an app, so it has no settings\n", 2)


def test_folder_name_may_be_a_number(show):
    for text in ("3", "None"):
        shown, errors, code = show("app.py", "--target", "App", "--seed", "1", "-p", f"checkpoint={text}")
        assert (shown["checkpoint"], errors, code) == ([text], "", 0)


@pytest.mark.parametrize(
    ("arguments", "more", "sentence"),
    [
        (["--merge", "medain"], "pass", "error  --merge: unknown merge 'medain', did you mean 'median'?"),
        (["-p", "codec=int9"], "pass", "error  -p codec: unknown codec 'int9', did you mean 'int8'?"),
        ([], "merge = 'medain'", "error  class App: unknown merge 'medain', did you mean 'median'?"),
        ([], "seed = -1", "error  class App: seed must be a whole number from 0 to 4294967295, got -1"),
    ],
)
def test_wrong_value_is_refused_with_its_origin(show, arguments, more, sentence):
    _, error, code = show("app.py", *arguments, more=more)
    assert (code, error.strip()) == (2, sentence)
