"""``ddlf completion``: bash completes, on a terminal."""

import os
import pty
import select
import time

import pytest

from ddlf.cli import main
from ddlf.cli.completion import SHELLS
from tests.patience import PATIENCE_S


def script(shell, capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        main.main(["completion", shell])
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_has_a_script_that_knows_verbs_and_options(shell, capsys):
    text = script(shell, capsys)
    assert "doctor" in text
    assert "master-epochs" in text
    assert "Nobody's run is disturbed" not in text, "that is for its help: a menu has one line for it"


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
def test_bash_completes_what_was_typed_when_tab_is_pressed(tmp_path, capsys, typed, completed):
    (tmp_path / "my_app.py").touch()
    (tmp_path / "cluster.yaml").touch()
    (tmp_path / "completion").write_text(script("bash", capsys))
    # What is on the line when Enter is pressed is what the function is called with.
    (tmp_path / "rc").write_text(
        "PS1='ready> '\nbind 'set enable-bracketed-paste off'\nddlf() { printf '<%s>\\n' \"ddlf $*\"; }\nsource completion\n"
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
    said, end = "", time.monotonic() + PATIENCE_S
    while text not in said:
        ready, _, _ = select.select([terminal], [], [], end - time.monotonic())
        assert ready, said
        said += os.read(terminal, 4096).decode()
    return said
