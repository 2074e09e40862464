"""Tests of the ``ddlf-worker`` command: its output, its refusals, and its end."""

import asyncio
import json
import os
import re
import signal
import stat
import subprocess
import sys

import psutil
import pytest

from ddlf.cli.worker import main
from ddlf.cluster.cluster import Cluster
from ddlf.errors import WorkerLost
from ddlf.events import WorkerWrote
from ddlf.rpc.tokens import new_token
from tests.patience import PATIENCE_S
from tests.processes import command, end_of, is_listening


def refused(*arguments, **environment):
    """Run the command, which must end by itself. Return its exit code and its standard error."""
    ended = command("ddlf.cli.worker", *arguments, env={**os.environ, **environment})
    assert "Traceback" not in ended.stderr
    return ended.returncode, ended.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--port", "99999"], 2, "argument --port: must be 0-65535, got 99999"),
        (["--port", "abc"], 2, "argument --port: not a whole number: 'abc'"),
        (["--token", "x"], 2, "unknown option --token: tokens on the command line are visible to other users"),
        (["--prot", "1"], 2, "unknown option '--prot', did you mean --port?"),
        (
            ["--host", "192.0.2.1", "--insecure-plaintext"],
            3,
            "192.0.2.1 is not an address of this machine; choose an address",
        ),
        (["--host", "no-such-host.invalid", "--insecure-plaintext"], 2, "'no-such-host.invalid' cannot be resolved"),
        (["--tls-cert", "c.pem"], 2, "tls_cert and tls_key belong together; set both of them, or none"),
        (["--tls-ca", "c.pem", "--insecure-plaintext"], 2, "insecure_plaintext and certificates exclude each other"),
        (["--advertise", "0.0.0.0"], 2, "--advertise: '0.0.0.0' is only an address to listen on: other workers cannot"),
        (["--advertise", "lab:9000:1"], 2, "--advertise: an IPv6 address needs brackets"),
        (["--tls-ca", "missing.pem", "--host", "127.0.0.1"], 2, "tls_ca missing.pem cannot be read: No such file"),
        (["--token-file", "missing"], 4, "token file missing does not exist; make one with 'ddlf token new'"),
        (["--token-file", "."], 4, "token file . is a directory; name a file in this directory"),
    ],
)
def test_worker_refuses_wrong_options_in_one_sentence(token_file, arguments, code, sentence):
    if "--token-file" not in arguments:
        arguments = [*arguments, "--token-file", str(token_file)]
    actual_code, text = refused(*(["--port", "0"] if "--port" not in arguments else []), *arguments)
    assert (actual_code, sentence in text) == (code, True), text
    assert len(text.splitlines()) <= 3


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_worker_without_token_listens_on_this_machine_only(host):
    for more in ([], ["--insecure-plaintext"]):
        code, text = refused("--port", "0", "--host", host, *more)
        assert code == 4
        assert f"refusing to listen on {host} without a token; run 'ddlf token new' and copy the file" in text


@pytest.mark.parametrize(
    ("content", "mode", "sentence"),
    [
        (b"", 0o600, "is empty; run 'ddlf token new'"),
        (b"\xff\x00\x01" * 20, 0o600, "is not a token"),
        (b"short123", 0o600, "token too short (8 characters), need at least 32; use 'ddlf token new'"),
        (b"a" * 43, 0o644, "is readable by others (0644); run 'chmod 600"),
    ],
)
def test_unusable_token_file_is_refused_and_not_shown(tmp_path, content, mode, sentence):
    path = tmp_path / "token"
    path.write_bytes(content)
    path.chmod(mode)
    code, text = refused("--port", "0", "--token-file", path)
    assert (code, sentence in text) == (4, True), text
    assert content.decode("latin-1") not in text or not content


def test_second_worker_on_port_is_refused(start_worker, token_file):
    worker = start_worker()
    code, text = refused("--port", worker.port, "--token-file", token_file, "--host", "127.0.0.1")
    assert code == 3
    assert f"port {worker.port} on 127.0.0.1 is in use; stop the program that uses it, or choose another" in text


def test_worker_without_token_says_how_to_accept_other_machines(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "ddlf.cli.worker", "--port", "0", "--state-dir", tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = [process.stdout.readline() for _ in range(2)]
    process.terminate()
    process.communicate()
    assert lines[0].startswith("No token: only masters on this machine can connect.")
    assert "'ddlf token new'" in lines[0]
    assert lines[1].startswith("ready on 127.0.0.1:")


def test_plaintext_worker_warns(start_worker):
    worker = start_worker("--host", "0.0.0.0", "--insecure-plaintext")
    assert "WARNING: 0.0.0.0 is reachable from other machines and nothing" in worker.output
    assert f"ready on 0.0.0.0:{worker.port}, INSECURE PLAINTEXT" in worker.output


def start(tmp_path, *arguments, **environment):
    """Start a worker of a user with a new home folder. Return the process when it is ready, with its printed lines."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ddlf.cli.worker", "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "XDG_CONFIG_HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path), **environment},
    )
    lines = []
    while not lines or not lines[-1].startswith("ready on"):
        lines.append(process.stdout.readline())
        assert lines[-1], lines
    return process, lines


@pytest.mark.parametrize(
    ("has_token", "arguments", "address", "ready"),
    [
        (False, [], "127.0.0.1", "this machine only"),
        (True, [], "0.0.0.0", "with TLS"),
        (True, ["--host", "127.0.0.1"], "127.0.0.1", "this machine only"),
    ],
)
def test_token_opens_port_to_other_machines(tmp_path, has_token, arguments, address, ready):
    if has_token:
        assert command("ddlf.cli.main", "token", "new", "--token-file", tmp_path / "ddlf" / "token").returncode == 0
    process, lines = start(tmp_path, *arguments)
    try:
        listening = [
            connection for connection in psutil.Process(process.pid).net_connections() if connection.status == "LISTEN"
        ]
        assert [connection.laddr.ip for connection in listening] == [address]
        assert lines[-1] == f"ready on {address}:{listening[0].laddr.port}, {ready} (pid {process.pid})\n"
    finally:
        process.terminate()
        process.communicate()


def test_token_cannot_be_turned_off():
    ended = command("ddlf.cli.worker", "--help-all")
    options = set(re.findall(r"--[\w-]+", ended.stdout))
    assert options - {"--help"} == {
        *(
            "--port",
            "--host",
            "--advertise",
            "--join",
            "--place",
            "--join-for",
            "--gpus",
            "--gpu-memory",
            "--token-file",
            "--insecure-plaintext",
            "--tls-ca",
            "--tls-cert",
            "--tls-key",
        ),
        *("--state-dir", "--quiet", "--exit-with-parent", "--ready-fd", "--template-fd"),
    }


def test_certificate_is_made_once_for_owner_only(start_worker, tmp_path):
    first = start_worker("--host", "0.0.0.0", state_dir=tmp_path / "state")
    path = tmp_path / "state" / "certificate.pem"
    certificate = path.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first.end()
    start_worker("--host", "0.0.0.0", state_dir=tmp_path / "state")
    assert path.read_bytes() == certificate


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_worker_ends_cleanly_on_a_signal(start_worker, own_folders, number, code):
    before = set((own_folders / "tmp").iterdir())
    worker = start_worker()
    assert worker.end(number) == code
    assert not is_listening(worker.port)
    assert set((own_folders / "tmp").iterdir()) <= before
    assert "Traceback" not in worker.output


async def test_worker_reports_a_signal_to_its_master(start_worker, token_file):
    worker = start_worker(DDLF_GRACE="0.1")
    async with Cluster(["127.0.0.1"], worker.port, token_file=token_file) as cluster:
        begun = asyncio.Event()
        cluster.subscribe(lambda event: begun.set() if isinstance(event, WorkerWrote) else None)
        running = asyncio.ensure_future(cluster.run_code("print('begun')\nimport asyncio; await asyncio.sleep(3600)"))
        await begun.wait()
        worker.process.send_signal(signal.SIGTERM)
        with pytest.raises(WorkerLost, match="was stopped by SIGTERM on its machine; start it there again") as lost:
            await running
        assert lost.value.may_have_run


async def test_worker_that_gets_sigterm_finishes_its_request_and_ends(start_worker, token_file):
    worker = start_worker(DDLF_GRACE="1000")
    async with Cluster(["127.0.0.1"], worker.port, token_file=token_file) as cluster:
        begun = asyncio.Event()
        cluster.subscribe(lambda event: begun.set() if isinstance(event, WorkerWrote) else None)
        code = "print('begun')\nimport asyncio, os\nwhile not os.path.exists(WHERE): await asyncio.sleep(0.01)\n7"
        end = worker.log.with_name("end")
        running = asyncio.ensure_future(cluster.run_code(code.replace("WHERE", repr(str(end)))))
        await begun.wait()
        worker.process.send_signal(signal.SIGTERM)
        while cluster.workers[0].notice is None:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)
        end.touch()
        assert await running == [7]
        assert await asyncio.to_thread(worker.process.wait, PATIENCE_S) == 0
        with pytest.raises(WorkerLost):
            await cluster.run_code("1")


def test_worker_that_gets_a_second_signal_ends_at_once(start_worker):
    worker = start_worker()
    worker.process.send_signal(signal.SIGSTOP)  # so that both signals wait when the process continues
    for number in (signal.SIGINT, signal.SIGTERM):
        worker.process.send_signal(number)
    worker.process.send_signal(signal.SIGCONT)
    assert worker.process.wait(PATIENCE_S) in (0, 130, -signal.SIGTERM)


def test_worker_leaves_nothing_after_a_signal_at_start(own_folders, tmp_path, descendants):
    before = set((own_folders / "tmp").iterdir())
    for number in (signal.SIGINT, signal.SIGTERM):
        process = subprocess.Popen(
            [sys.executable, "-m", "ddlf.cli.worker", "--port", "0", "--state-dir", tmp_path],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        process.stdout.readline()  # the worker prints a line about the missing token, and then starts
        process.send_signal(number)
        output, _ = process.communicate(timeout=PATIENCE_S)
        assert "Traceback" not in output
    assert descendants() == []
    assert set((own_folders / "tmp").iterdir()) <= before


def test_standard_output_stays_open_after_the_ready_line(token_file, tmp_path):
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "ddlf.cli.worker", "--quiet", "--host", "127.0.0.1", "--port", "0"),
            *("--token-file", str(token_file), "--state-dir", str(tmp_path), "--ready-fd", "1"),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert json.loads(process.stdout.readline())["pid"] == process.pid
        is_open = process.stdout.fileno()
        assert os.readlink(f"/proc/{process.pid}/fd/1") == os.readlink(f"/proc/self/fd/{is_open}")
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE_S)


def test_quiet_worker_prints_only_errors(start_worker):
    worker = start_worker("--quiet")
    worker.end()
    assert worker.output == ""


def test_state_of_worker_is_for_owner_only(start_worker):
    worker = start_worker()
    folder = worker.state_dir / f"port-{worker.port}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_worker_of_program_ends_with_it_and_needs_token(tmp_path):
    arguments = [sys.executable, "-m", "ddlf.cli.worker", "--port", "0", "--exit-with-parent"]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdin.write(f"{new_token()}\n".encode())
        process.stdin.flush()
        assert process.stdout.readline().startswith(b"ready on 127.0.0.1:")
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0
    end_of(process.pid)
    code, text = refused("--port", "0", "--exit-with-parent")
    assert (code, "no token came on stdin" in text) == (4, True)


def test_staying_worker_outlives_its_parent_until_it_has_no_master(tmp_path):
    arguments = [
        sys.executable,
        "-m",
        "ddlf.cli.worker",
        "--join",
        "127.0.0.1:1",
        "--join-for",
        "1",
        "--exit-with-parent",
    ]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdin.write(f"{new_token()}\nstay 1\n".encode())
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 3
        assert b"no master at 127.0.0.1:1 for 1 s" in process.stderr.read()


def test_worker_without_a_home_folder_says_what_to_do(monkeypatch, capsys):
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # this is the result if the user id has no home
    with pytest.raises(SystemExit) as ended:
        main(["--join", "127.0.0.1:1", "--place", "0"])
    message = "ddlf-worker: this user has no home folder for the state of the worker; set HOME, or name a folder: --state-dir DIR\n"
    assert (ended.value.code, capsys.readouterr().err) == (2, message)


def test_help_shows_the_way_to_other_machines():
    ended = command("ddlf.cli.worker", "--help")
    assert ended.returncode == 0
    assert "ddlf token new" in ended.stdout


def test_undecodable_path_is_shown_escaped():
    code, text = refused("--port", "0", "--token-file", os.fsdecode(b"no\xff-file"))
    assert code == 4
    assert "does not exist" in text
