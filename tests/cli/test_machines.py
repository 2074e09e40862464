"""Tests of ``ddlf up``, ``ddlf down`` and ``ddlf runcmd``. A script replaces ssh, and runs everything on this machine."""

import argparse
import asyncio
import os
import signal
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import psutil
import pytest

from ddlf.cli.machines import down, runcmd, up, wheel
from ddlf.cli.main import main
from ddlf.cluster.cluster import Cluster
from ddlf.cluster.launch import remote_programs
from ddlf.cluster.launch.remote import Remote
from ddlf.errors import AuthError, ConfigError, LeaseError
from ddlf.rpc.tokens import new_token
from ddlf.version import __version__
from tests.fake_ssh import fake_ssh, write_script
from tests.patience import PATIENCE_S


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Machines:
    """A cluster file, and the files of its workers."""

    def __init__(self, folder):
        self.folder = folder
        self.state = folder / "state" / "ddlf" / "up"
        self.token = new_token()
        self.token_file = folder / "lab-token"
        self.token_file.write_text(self.token)
        self.token_file.chmod(0o600)
        self.ports = []

    def list(self, *hosts, python=sys.executable, more="", names=(), keys=""):
        self.ports = [free_port() for _ in hosts]
        called = [f"name: {name}, " for name in names] or [""] * len(hosts)
        rows = [
            f"  - {{{name}host: {host}, port: {port}, python: {python}{keys}}}\n"
            for name, host, port in zip(called, hosts, self.ports, strict=True)
        ]
        text = f"security: {{token_file: {self.token_file}}}\n{more}workers:\n{''.join(rows)}"
        (self.folder / "cluster.yaml").write_text(text)

    async def run(self, command, **options):
        defaults = {"install": False, "systemd": False, "force": False, "timeout": 30, "token_file": None}
        parsed = argparse.Namespace(config=self.folder / "cluster.yaml", **{**defaults, **options})
        return await asyncio.wait_for(command(parsed), PATIENCE_S)

    def pid(self, index):
        return int((self.state / f"{self.ports[index]}.pid").read_text())

    def files(self):
        return sorted(path.suffix for path in self.state.iterdir())


@pytest.fixture
def machines(tmp_path, monkeypatch):
    fake_ssh(tmp_path, monkeypatch)
    result = Machines(tmp_path)
    yield result
    for path in result.state.glob("*.pid") if result.state.exists() else ():
        os.kill(int(path.read_text()), signal.SIGKILL)


def runs(pid):
    """Return whether a process runs. An ended process keeps its id until its parent has waited for it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_worker_begins_with_the_cards_of_its_line(machines, capsys):
    machines.list("127.0.0.1", keys=", gpus: none")
    assert await machines.run(up) == 0
    assert "--gpus none" in " ".join(psutil.Process(machines.pid(0)).cmdline())
    assert await machines.run(down) == 0


def number(self):
    return self.id


async def test_workers_stay_until_they_are_ended(machines, capsys):
    machines.list("127.0.0.1", "localhost")
    assert await machines.run(up) == 0
    assert sorted(line.partition("(")[0] for line in capsys.readouterr().out.splitlines()) == [
        f"  1  127.0.0.1:{machines.ports[0]:<11}  started ",
        f"  2  localhost:{machines.ports[1]:<11}  started ",
    ]
    pids = [machines.pid(0), machines.pid(1)]
    for path in machines.state.glob("*.token"):
        assert path.read_text() == f"{machines.token}\n"
        assert path.stat().st_mode & 0o777 == 0o600
    for pid in pids:
        process = psutil.Process(pid)
        assert machines.token not in " ".join([*process.cmdline(), *process.environ().values()])
    async with Cluster.from_config(machines.folder / "cluster.yaml") as cluster:
        assert await cluster.run_method(number) == [1, 2]

    assert await machines.run(up) == 0
    assert capsys.readouterr().out.count("runs already") == 2
    assert [machines.pid(0), machines.pid(1)] == pids

    assert await machines.run(down) == 0
    assert capsys.readouterr().out.count("ended (pid ") == 2
    assert not any(map(runs, pids))
    assert machines.files() == [".lock", ".lock", ".log", ".log"]
    assert await machines.run(down) == 0
    assert capsys.readouterr().out.count("does not run") == 2


async def test_each_machine_has_its_own_error(machines, capsys):
    machines.list("refused", "127.0.0.1", "nokey")
    assert await machines.run(up) == 3
    lines = sorted(capsys.readouterr().out.splitlines())
    assert lines[0].endswith("failed: refused: ssh: connect to host refused port 22: Connection refused")
    assert "started" in lines[1]
    assert "failed: nokey: ann@nokey: Permission denied (publickey,password); ssh must need no password" in lines[2]
    assert await machines.run(down, force=True) == 3
    assert "ended (pid " in capsys.readouterr().out


async def test_worker_that_ends_at_once_leaves_its_last_lines_only(machines, capsys):
    machines.list("127.0.0.1")
    with listening(machines.ports[0]):
        assert await machines.run(up) == 3
    output = capsys.readouterr().out
    assert "failed: 127.0.0.1: its worker ended with exit code 3:" in output
    assert f"port {machines.ports[0]} on 0.0.0.0 is in use" in output
    assert machines.files() == [".lock", ".log"]


def listening(port):
    sock = socket.socket()
    sock.bind(("0.0.0.0", port))
    sock.listen()
    return sock


async def test_process_with_the_id_of_an_earlier_worker_is_not_ended(machines, capsys):
    machines.list("127.0.0.1")
    machines.state.mkdir(parents=True)
    other = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=subprocess.PIPE)
    try:
        (machines.state / f"{machines.ports[0]}.pid").write_text(str(other.pid))
        assert await machines.run(down) == 0
        assert "does not run" in capsys.readouterr().out
        assert other.returncode is None
    finally:
        await other.communicate(b"\n")


async def test_workers_in_use_are_not_ended(machines, capsys):
    machines.list("127.0.0.1")
    assert await machines.run(up) == 0
    async with Cluster.from_config(machines.folder / "cluster.yaml"):
        with pytest.raises(LeaseError, match="1 of 1 workers are in use, so none was ended; --force ends those runs"):
            await machines.run(down)
    assert "in use by" in capsys.readouterr().out
    assert await machines.run(down) == 0


SYSTEMCTL = """#!/bin/sh
echo "$@" >> {folder}/said
case "$2" in
restart)
    line=$(sed -n 's/^ExecStart=//p' {folder}/config/systemd/user/*.service)
    eval "setsid $line > /dev/null 2>&1 < /dev/null &"
    echo $! > {folder}/service;;
show) cat {folder}/service;;
disable) kill $(cat {folder}/service) && tail --pid=$(cat {folder}/service) -f /dev/null; rm {folder}/service;;
esac
"""


async def test_service_of_systemd_is_made_and_removed(machines, capsys):
    machines.list("127.0.0.1")
    commands = machines.folder / "commands"
    write_script(commands / "systemctl", SYSTEMCTL.format(folder=machines.folder))
    write_script(commands / "loginctl", "#!/bin/sh\necho 'Access denied'\nexit 1\n")
    assert await machines.run(up, systemd=True) == 0
    pid = int((machines.folder / "service").read_text())
    try:
        output = capsys.readouterr().out
        assert (
            f"started (pid {pid}); it ends when you log out there, because enable-linger failed: Access denied"
            in output
        )
        unit = f"ddlf-worker-{machines.ports[0]}.service"
        text = (machines.folder / "config" / "systemd" / "user" / unit).read_text()
        assert "\nType=notify\n" in text
        assert machines.token not in text
        assert await machines.run(up) == 0
        assert f"runs already (pid {pid})" in capsys.readouterr().out
        assert await machines.run(down) == 0
        assert f"ended (pid {pid})" in capsys.readouterr().out
    finally:
        if runs(pid):
            os.kill(pid, signal.SIGKILL)
    lines = [line.split()[1:] for line in (machines.folder / "said").read_text().splitlines()]
    assert [line for line in lines if line[0] != "show"] == [
        ["daemon-reload"],
        ["enable", unit],
        ["restart", unit],
        ["disable", "--now", unit],
        ["daemon-reload"],
    ]
    assert not (machines.folder / "config" / "systemd" / "user" / unit).exists()


def systemd(machines):
    """Install a stand-in for systemd, and return the file of the service's unit."""
    commands = machines.folder / "commands"
    write_script(commands / "systemctl", SYSTEMCTL.format(folder=machines.folder))
    write_script(commands / "loginctl", "#!/bin/sh\nexit 0\n")
    return machines.folder / "config" / "systemd" / "user" / f"ddlf-worker-{machines.ports[0]}.service"


def end_service(machines):
    file = machines.folder / "service"
    if file.exists() and runs(pid := int(file.read_text())):
        os.kill(pid, signal.SIGKILL)


async def test_process_replaces_a_service_that_does_not_run(machines, capsys):
    machines.list("127.0.0.1")
    unit = systemd(machines)
    try:
        assert await machines.run(up, systemd=True) == 0
        end_service(machines)
        (machines.folder / "service").unlink()
        assert await machines.run(up) == 0
        assert not unit.exists()
        pid = machines.pid(0)
        assert await machines.run(up) == 0
        assert f"runs already (pid {pid})" in capsys.readouterr().out
        assert await machines.run(down) == 0
        assert f"ended (pid {pid})" in capsys.readouterr().out
        assert not runs(pid)
    finally:
        end_service(machines)


async def test_down_ends_a_service_and_a_process(machines, capsys):
    machines.list("127.0.0.1")
    assert await machines.run(up) == 0
    pid = machines.pid(0)
    unit = systemd(machines)
    unit.parent.mkdir(parents=True)
    unit.touch()
    service = await asyncio.create_subprocess_exec("sleep", "1000")
    (machines.folder / "service").write_text(str(service.pid))
    try:
        assert await machines.run(down) == 0
        assert f"ended (pid {service.pid})" in capsys.readouterr().out
        assert await asyncio.wait_for(service.wait(), PATIENCE_S) == -signal.SIGTERM
        assert not runs(pid)
        assert not unit.exists()
    finally:
        if service.returncode is None:
            service.kill()


@pytest.mark.slow
async def test_options_that_a_running_worker_would_ignore_are_refused(machines, capsys):
    machines.list("127.0.0.1")
    assert await machines.run(up) == 0
    pid = machines.pid(0)
    capsys.readouterr()
    assert await machines.run(up, systemd=True) == 3
    state = f"its worker at port {machines.ports[0]} runs (pid {pid})"
    restart = "restart it with ddlf down"
    assert f"failed: 127.0.0.1: {state}, but not as a service; {restart}" in capsys.readouterr().out
    assert await machines.run(up, install=True) == 3
    assert f"failed: 127.0.0.1: {state}, so ddlf was not installed; {restart}" in capsys.readouterr().out
    assert not (machines.folder / "data").exists()
    assert machines.pid(0) == pid
    assert await machines.run(down) == 0


def with_short_limit(path):
    """Write ``remote_programs.py`` with a short limit for the start of a worker, and return the path."""
    text = Path(remote_programs.__file__).read_text()
    assert "READY_S = 60.0" in text
    path.write_text(text.replace("READY_S = 60.0", "READY_S = 2.0"))
    return str(path)


async def test_worker_that_is_never_ready_is_ended(machines, capsys, monkeypatch):
    # The test cannot stop the worker at the right moment, so this Python starts another program instead.
    python = machines.folder / "python"
    write_script(
        python,
        f"""#!/bin/sh
case "$2" in
ddlf.cli.worker) exec {sys.executable} -c "import time; print('it loads', flush=True); time.sleep(1000)" "$@";;
*) exec {sys.executable} "$@";;
esac
""",
    )
    monkeypatch.setattr("ddlf.cluster.launch.remote.BOOTSTRAP", wrapped(python))
    monkeypatch.setattr(remote_programs, "__file__", with_short_limit(machines.folder / "remote_programs.py"))
    machines.list("127.0.0.1", python=python)
    assert await machines.run(up) == 3
    assert "failed: 127.0.0.1: its worker is not ready after 2 s" in capsys.readouterr().out
    assert machines.files() == [".lock", ".log"]
    assert not any(str(machines.ports[0]) in process.cmdline() for process in psutil.Process().children(recursive=True))


async def test_machine_that_does_not_answer_is_skipped(machines, capsys, monkeypatch):
    monkeypatch.setattr(Remote.answer, "__defaults__", (0.2,))
    machines.list("silent")
    assert await machines.run(up) == 3
    assert "failed: silent: it has not answered within 0.2 s" in capsys.readouterr().out


async def test_failed_service_is_removed(machines, capsys):
    machines.list("127.0.0.1")
    write_script(machines.folder / "commands" / "systemctl", "#!/bin/sh\necho 'Failed to connect to bus'\nexit 1\n")
    assert await machines.run(up, systemd=True) == 3
    assert "failed: 127.0.0.1: systemctl --user daemon-reload: Failed to connect to bus" in capsys.readouterr().out
    assert machines.files() == [".lock", ".log"]
    assert list((machines.folder / "config" / "systemd" / "user").iterdir()) == []


@pytest.mark.slow
async def test_install_makes_an_environment_of_the_wheel(machines, capsys, monkeypatch):
    # A virtual environment takes seconds and needs a network, so this Python only records its commands.
    python = machines.folder / "python"
    venv = machines.folder / "data" / "ddlf" / "venv"
    write_script(
        python,
        f"""#!/bin/sh
case "$1 $2" in
"-m venv") mkdir -p {venv}/bin; ln -s {python} {venv}/bin/python;;
"-m pip") echo "$@" >> {machines.folder}/said; test -f {venv}/*.whl;;
*) exec {sys.executable} "$@";;
esac
""",
    )
    monkeypatch.setattr("ddlf.cluster.launch.remote.BOOTSTRAP", wrapped(python))
    machines.list("127.0.0.1", "127.0.0.1", python=python)
    assert await machines.run(up, install=True) == 0
    lines = (machines.folder / "said").read_text().splitlines()
    assert len(lines) == 2, "once for each machine"
    assert f"ddlf-{__version__}-py3-none-any.whl[tensorflow,parquet,tfrecord]" in lines[0]
    assert "--force-reinstall --no-deps" in lines[1]
    assert list(venv.glob("*.whl")) == []
    assert capsys.readouterr().out.count("started (pid ") == 2
    assert await machines.run(down) == 0


def wrapped(python):
    """Return the usual start code of a program, with another path of Python."""
    from ddlf.cluster.launch.remote import BOOTSTRAP

    return f"import sys;sys.executable=bytes({list(os.fsencode(python))}).decode();{BOOTSTRAP}"


def test_wheel_has_all_needed_files(tmp_path):
    name, content = wheel()
    path = tmp_path / name
    path.write_bytes(content)
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        recorded = archive.read(f"ddlf-{__version__}.dist-info/RECORD").decode().splitlines()
    assert {row.split(",")[0] for row in recorded} == names
    assert not any("__pycache__" in member for member in names)
    program = (
        f"import sys; sys.path.insert(0, {str(path)!r}); import ddlf; import ddlf.cluster.launch.remote_programs as remote_programs; "
        "from importlib.metadata import distribution; print(remote_programs.__file__, distribution('ddlf').entry_points)"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert output.stdout.startswith(str(path))
    assert "ddlf-worker" in output.stdout


async def test_command_runs_once_on_each_machine(machines, capfd):
    machines.list("pc01", "pc01", "refused")
    assert await machines.run(runcmd, words=["echo", "$HOME", "it's"]) == 3
    out, err = capfd.readouterr()
    assert out == "pc01     Welcome to pc01\npc01     your quota is fine\npc01     $HOME it's\n"
    assert "refused  failed: refused: ssh: connect to host refused port 22: Connection refused\n" in err
    assert "Permanently added" not in err


async def test_lines_of_a_command_begin_with_the_name_of_the_machine(machines, capfd):
    machines.list("10.0.0.1", "10.0.0.2", "10.0.0.2", names=("pc01", "pc02a", "pc02b"))
    assert await machines.run(runcmd, words=["echo", "x"]) == 0
    assert sorted(line for line in capfd.readouterr().out.splitlines() if line.endswith("  x")) == [
        "10.0.0.2  x",  # two workers share this machine
        "pc01      x",
    ]


async def test_host_name_that_only_ssh_resolves_is_refused(machines, capsys):
    write_script(machines.folder / "commands" / "ssh", "#!/bin/sh\necho user ann\necho hostname 10.0.0.11\n")
    machines.list("pc01.invalid")
    assert await machines.run(up) == 3
    output = capsys.readouterr().out
    assert (
        "failed: only ssh knows the name 'pc01.invalid', and runs connect without ssh; write host: 10.0.0.11" in output
    )


async def test_machines_log_in_in_turns_and_their_commands_run_at_once(machines, capfd, monkeypatch):
    monkeypatch.setattr("ddlf.cluster.launch.remote.CONNECTING", 1)
    commands, folder = machines.folder / "commands", machines.folder
    (commands / "ssh").rename(commands / "login")
    write_script(
        commands / "ssh",
        f"""#!/bin/sh
mkdir {folder}/login || echo "two log in" >> {folder}/wrong
sleep 0.3
rmdir {folder}/login
exec {commands}/login "$@"
""",
    )
    machines.list("pc01", "pc02", "pc03")
    line = f"echo x >> {folder}/running; while [ $(wc -l < {folder}/running) -lt 3 ]; do sleep 0.02; done; echo done"
    assert await machines.run(runcmd, words=[line]) == 0
    assert capfd.readouterr().out.count("done\n") == 3
    assert not (folder / "wrong").exists()


async def test_single_argument_is_a_command_line_of_the_shell(machines, capfd):
    machines.list("pc01")
    assert await machines.run(runcmd, words=["echo $((1 + 1)); exit 4"]) == 3
    out, err = capfd.readouterr()
    assert out.endswith("fine\npc01  2\n")
    assert err.endswith("pc01  failed: exit code 4\n")


async def test_cluster_file_of_a_launcher_is_refused(machines):
    (machines.folder / "cluster.yaml").write_text("launcher: {ssh: {hosts: [pc01]}}\n")
    for command in (up, down, runcmd):
        with pytest.raises(ConfigError, match="lists no workers: each run starts them with launcher 'ssh'"):
            await machines.run(command, words=["true"])


async def test_up_needs_a_token_and_copies_no_certificates(machines):
    machines.list("127.0.0.1")
    text = (machines.folder / "cluster.yaml").read_text()
    (machines.folder / "cluster.yaml").write_text(text.replace("security: {", "security: {tls_ca: cluster.yaml, "))
    with pytest.raises(ConfigError, match="ddlf up does not copy certificates"):
        await machines.run(up)
    (machines.folder / "cluster.yaml").write_text("".join(text.splitlines(keepends=True)[1:]))
    with pytest.raises(AuthError, match="there is no token for the workers; create one with: ddlf token new"):
        await machines.run(up)


def test_python_of_a_worker_is_checked(machines, capsys):
    machines.list("pc01", python="'$(x)'")
    with pytest.raises(SystemExit) as ended:
        main(["up", "-c", str(machines.folder / "cluster.yaml")])
    assert ended.value.code == 2
    assert "python must be the path of a Python there, without quotes or $, got '$(x)'" in capsys.readouterr().err


def test_command_after_two_dashes_may_have_options(machines, capsys):
    machines.list("pc01")
    with pytest.raises(SystemExit) as ended:
        main(["runcmd", "-c", str(machines.folder / "cluster.yaml"), "--", "expr", "1", "-", "-1"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.endswith("fine\npc01  2\n")
