"""Tests of ``ddlf completion``, with bash on a terminal."""

import os
import pty
import select
import sys
import time

import pytest

from ddlf.cli import main
from ddlf.cli.completion import SCRIPTS, print_candidates
from ddlf.cli.main import all_commands
from ddlf.training.registry import STRATEGIES
from tests.patience import PATIENCE_S


def script(shell, capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        main.main(["completion", shell])
    return capsys.readouterr().out


def candidates(capsys, *words):
    print_candidates(words, all_commands())
    return [line.partition("\t")[0] for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("shell", SCRIPTS)
def test_completion_script_of_each_shell_asks_ddlf(shell, capsys):
    assert "_DDLF_COMPLETE" in script(shell, capsys)


def test_completion_offers_commands_actions_options_and_values(capsys):
    assert {"doctor", "run", "--help"} <= {*candidates(capsys, "")}
    assert candidates(capsys, "data", "re") == ["repartition"]
    assert candidates(capsys, "run", "app.py", "--master-e") == ["--master-epochs"]
    assert candidates(capsys, "run", "--mode", "") == [*STRATEGIES]
    assert candidates(capsys, "nothing", "") == []


def test_completion_adds_the_help_of_each_candidate(capsys):
    print_candidates(["run", "--worker-st"], all_commands())
    assert capsys.readouterr().out == "--worker-steps\tbatches per slot and round, instead of worker_epochs\n"


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("ddlf doc", "ddlf doctor"),
        ("ddlf run --master-ep", "ddlf run --master-epochs"),
        ("ddlf run --mode a", "ddlf run --mode async"),
        ("ddlf token pa", "ddlf token paste"),
        ("ddlf new lab --template custom", "ddlf new lab --template custom-loop"),
        ("ddlf run my_a", "ddlf run my_app.py"),
        ("ddlf run --dashboard my_a", "ddlf run --dashboard my_app.py"),
        ("ddlf doctor -c clu", "ddlf doctor -c cluster.yaml"),
    ],
)
def test_bash_completes_on_tab(tmp_path, capsys, typed, completed):
    (tmp_path / "my_app.py").touch()
    (tmp_path / "cluster.yaml").touch()
    (tmp_path / "completion").write_text(script("bash", capsys))
    # The shell function ``ddlf`` prints its arguments, so Enter shows the completed line.
    (tmp_path / "rc").write_text(
        f"PS1='ready> '\nbind 'set enable-bracketed-paste off'\nddlf() {{\n"
        f'if [ $_DDLF_COMPLETE ]; then {sys.executable} -m ddlf "$@"; else printf \'<%s>\\n\' "ddlf $*"; fi; }}\nsource completion\n'
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execvpe(
            "bash", ["bash", "--noprofile", "--rcfile", "rc", "-i"], {**os.environ, "TERM": "dumb", "HISTFILE": ""}
        )
    try:
        until(terminal, "ready> ")
        os.write(terminal, f"{typed}\t\n".encode())
        assert f"<{completed}" in until(terminal, ">\r\n")
        os.write(terminal, b"exit\n")
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)


def until(terminal, text):
    output, end = "", time.monotonic() + PATIENCE_S
    while text not in output:
        ready, _, _ = select.select([terminal], [], [], end - time.monotonic())
        assert ready, output
        output += os.read(terminal, 4096).decode()
    return output
