"""B1-B19: what a wrong command line says. Neither a traceback nor a secret is ever shown."""

import errno
import os
import socket
import subprocess
import sys

import pytest

from ddlf.cli import main as ddlf
from ddlf.cli import worker
from ddlf.errors import ListenError
from ddlf.rpc.listen import listening_socket
from tests.patience import PATIENCE_S
from tests.processes import command

SECRET = "hunter2-hunter2-hunter2-hunter2-hunter2"


@pytest.fixture
def say(capsys):
    """What a command prints to standard error, and its exit code."""

    def run(program, *arguments):
        with pytest.raises(SystemExit) as ended:
            program.main([str(argument) for argument in arguments])
        text = capsys.readouterr().err
        assert "Traceback" not in text
        return ended.value.code, text

    return run


@pytest.mark.parametrize(
    ("program", "arguments", "sentence"),
    [
        pytest.param(worker, ["--port", "99999"], "argument --port: must be 0-65535, got 99999", id="B1"),
        pytest.param(worker, ["--port", "-1"], "argument --port: must be 0-65535, got -1", id="B1 negative"),
        pytest.param(worker, ["--port", "abc"], "argument --port: not a whole number: 'abc'", id="B2"),
        pytest.param(
            worker,
            ["--token", SECRET],
            "unknown option --token: tokens on the command line are visible to other users; use --token-file",
            id="B8",
        ),
        pytest.param(ddlf, ["status", f"--token={SECRET}"], "--token: tokens on the command line are", id="B8 ddlf"),
        pytest.param(
            ddlf,
            ["wroker"],
            "unknown command 'wroker', did you mean 'ddlf-worker'? It is a command of its own",
            id="B12",
        ),
        pytest.param(ddlf, ["worker"], "unknown command 'worker', did you mean 'ddlf-worker'?", id="B12 no typo"),
        pytest.param(ddlf, ["statsu"], "unknown command 'statsu', did you mean 'status'?", id="B12 of ddlf"),
        pytest.param(ddlf, ["xyz"], "unknown command 'xyz'; there are: run, ", id="B12 far from all"),
        pytest.param(ddlf, ["run"], "the following arguments are required: APP\nSee: ddlf run --help", id="B13"),
        pytest.param(ddlf, ["run", "a.py", "--local"], "argument --local: expected one argument", id="B13 value"),
        *(
            pytest.param(
                ddlf, ["run", "a.py", "--local", n], f"argument --local: must be 1-1024, got {n}", id=f"B14 {n}"
            )
            for n in ("0", "-3", "1000000000")
        ),
        pytest.param(
            ddlf, ["run", "a.py", "--local", "1e9"], "argument --local: not a whole number: '1e9'", id="B14 1e9"
        ),
        pytest.param(
            ddlf, ["status", "--config", "nofile.yaml"], "config file nofile.yaml not found, looked", id="B15"
        ),
    ],
)
def test_a_wrong_command_line_gets_one_sentence_and_exit_code_2(say, program, arguments, sentence):
    code, text = say(program, *arguments)
    assert sentence in text
    assert code == 2
    assert SECRET not in text


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        pytest.param(
            errno.EACCES,
            "cannot listen on 127.0.0.1:80: permission denied; ports below 1024 need root, try 9000",
            id="B3",
        ),
        pytest.param(
            errno.EADDRINUSE, "port 80 on 127.0.0.1 is in use; stop the program that uses it, or choose", id="B4"
        ),
    ],
)
def test_a_port_that_cannot_be_had_says_why(monkeypatch, number, sentence):
    class Refusing(socket.socket):
        def bind(self, address):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket, "socket", Refusing)
    with pytest.raises(ListenError) as refused:
        listening_socket("127.0.0.1", 80)
    assert sentence in str(refused.value)
    assert refused.value.exit_code == 3


def test_B4_a_port_that_is_taken_is_refused():
    with listening_socket("127.0.0.1", 0) as taken, pytest.raises(ListenError, match="is in use"):
        listening_socket("127.0.0.1", taken.getsockname()[1])


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1"])
def test_B5_beyond_this_machine_a_token_is_needed(say, host):
    code, text = say(worker, "--port", 0, "--host", host)
    assert code == 4
    assert f"refusing to listen on {host} without a token; run 'ddlf token new' and copy the file to the other" in text


def test_B6_without_encryption_it_starts_and_warns_each_time(start_worker):
    for _ in range(2):
        started = start_worker("--host", "0.0.0.0", "--insecure-plaintext")
        assert started.port
        assert "WARNING: 0.0.0.0 is reachable from other machines and nothing is encrypted" in started.output


def test_B7_an_address_of_another_machine_is_refused():
    with pytest.raises(ListenError, match=r"10\.9\.9\.9 is not an address of this machine; choose one of it with"):
        listening_socket("10.9.9.9", 0)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        pytest.param(lambda path: None, "does not exist; make one with 'ddlf token new'", id="B9 missing"),
        pytest.param(lambda path: path.mkdir(), "is a directory; name the file in it", id="B9 directory"),
        pytest.param(lambda path: path.write_bytes(b""), "is empty; run 'ddlf token new'", id="B9 empty"),
        pytest.param(
            lambda path: path.write_bytes(b"\xff\0\1" * 20), "is not a token: it holds spaces", id="B9 binary"
        ),
        pytest.param(
            lambda path: path.write_bytes(b"short123"), "token too short (8 characters), need at least 32", id="B11"
        ),
        pytest.param(
            lambda path: (path.write_text(SECRET), path.chmod(0o644)),
            "is readable by others (0644); run 'chmod 600",
            id="B10",
        ),
    ],
)
@pytest.mark.parametrize("program", [worker, ddlf], ids=["ddlf-worker", "ddlf"])
def test_a_token_file_that_cannot_be_used_gets_its_own_sentence(say, tmp_path, program, make, sentence):
    path = tmp_path / "token"
    if make(path) is not None and path.is_file() and "readable" not in sentence:
        path.chmod(0o600)
    arguments = ["--port", 0] if program is worker else ["status", "--hosts", "127.0.0.1:9"]
    code, text = say(program, *arguments, "--token-file", path)
    assert sentence in text
    assert str(path) in text
    assert code == 4
    assert SECRET not in text


AS = "import os, sys; os.geteuid = lambda: {}; from ddlf.cli.worker import main; main(sys.argv[1:])"


@pytest.mark.parametrize(("user", "lines"), [(0, 1), (1000, 0)], ids=["B17 root", "B17 other"])
def test_B17_root_is_warned_in_one_line_and_others_are_not(tmp_path, user, lines):
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
        "ddlf-worker: WARNING: running as root, so anybody who holds the token is root here; use an account of its own"
    ]


@pytest.mark.parametrize("arguments", [["--help"], ["token", "new", "--help"]], ids=["B18 help", "B18 of a command"])
def test_B18_a_reader_that_left_causes_no_traceback(arguments):
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        [sys.executable, "-m", "ddlf.cli.main", *arguments], stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    assert (ended.stderr, ended.returncode in (0, 141)) == ("", True)


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        pytest.param("ddlf.cli.worker", ["--port", "0", "--token-file", "no\udcff"], id="B19 token file"),
        pytest.param("ddlf.cli.main", ["status", "--config", "no\udcff.yaml"], id="B19 config"),
        pytest.param("ddlf.cli.main", ["run", "no\udcff.py"], id="B19 app"),
        pytest.param("ddlf.cli.main", ["no\udcff"], id="B19 command"),
        pytest.param("ddlf.cli.main", ["status", "--hosts", "no\udcff:9000"], id="B19 host"),
    ],
)
def test_B19_an_argument_that_is_no_text_is_shown_escaped(module, arguments):
    ended = command(module, *arguments)
    assert ended.returncode in (2, 4)
    assert "no\\udcff" in ended.stderr
    assert "Traceback" not in ended.stderr
