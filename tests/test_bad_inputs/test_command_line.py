"""Tests of the errors of wrong command lines: one sentence without a traceback."""

import subprocess
import sys

import pytest

from ddlf.cli.main import main
from tests.patience import PATIENCE_S
from tests.processes import command


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["wroker"], "unknown command 'wroker', did you mean 'ddlf-worker'? It is a separate command"),
        (["worker"], "unknown command 'worker', did you mean 'ddlf-worker'?"),
        (["run", "a.py", "--local"], "argument --local: expected one argument"),
        (["run", "a.py", "--local", "1000000000"], "argument --local: must be 1-1024, got 1000000000"),
        (["run", "a.py", "--local", "1e9"], "argument --local: not a whole number: '1e9'"),
    ],
)
def test_wrong_command_line_gets_one_sentence_and_exit_code_2(capsys, arguments, sentence):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(arguments)
    text = capsys.readouterr().err
    assert sentence in text
    assert "Traceback" not in text


AS = "import os, sys; os.geteuid = lambda: {}; from ddlf.cli.worker import main; main(sys.argv[1:])"


@pytest.mark.parametrize(("user", "lines"), [(0, 1), (1000, 0)], ids=["root", "other"])
def test_worker_warns_root_in_one_line_and_nobody_else(tmp_path, user, lines):
    arguments = ["--port", "0", "--state-dir", str(tmp_path)]
    with subprocess.Popen(
        [sys.executable, "-c", AS.format(user), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        while not process.stdout.readline().startswith("ready on"):
            pass
        process.terminate()
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert [line for line in errors.splitlines() if "root" in line] == lines * [
        "ddlf-worker: WARNING: running as root, so anybody who holds the token is root here; use a separate account"
    ]


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        pytest.param("ddlf.cli.worker", ["--port", "0", "--token-file", "no\udcff"], id="token file"),
        pytest.param("ddlf.cli.main", ["status", "--config", "no\udcff.yaml"], id="config"),
        pytest.param("ddlf.cli.main", ["run", "no\udcff.py"], id="app"),
        pytest.param("ddlf.cli.main", ["no\udcff"], id="command"),
        pytest.param("ddlf.cli.main", ["status", "--hosts", "no\udcff:9000"], id="host"),
    ],
)
def test_argument_with_invalid_characters_is_shown_escaped(module, arguments):
    ended = command(module, *arguments)
    assert ended.returncode in (2, 4)
    assert "no\\udcff" in ended.stderr
    assert "Traceback" not in ended.stderr
