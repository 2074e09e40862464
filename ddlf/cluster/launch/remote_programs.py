"""Programs that run on another machine: they start a worker there, end it, or install DDLF. Runs on that machine.

The text of this file travels there by ssh. So it imports only the standard library, and any Python since 3.7 can
read it: an older Python must be able to report its version. Each answer is a line of standard output that begins with
``PREFIX``, because login scripts print there, too.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, NoReturn

PREFIX = "ddlf-ssh "
"""Begins each line that answers the master."""
STOP_S = 15.0
READY_S = 60.0
"""Seconds until a worker that was started must be ready."""
SHOWN_LINES = 5
"""Lines of a log or an output in an error."""
SHOWN_BYTES = 2000
NAME_ANOTHER = "name another Python with the key python"
RESTART = "restart it with ddlf down, then ddlf up with the same options"
FACTS = "import json, sys, ddlf; print(json.dumps([list(sys.version_info[:2]), ddlf.__version__]))"


def main(text: str) -> None:
    """Run one program, and print its answer.

    Args:
        text: The program's name and its arguments, as JSON.
    """
    arguments: dict[str, Any] = json.loads(text)
    os.umask(0o077)
    tell({"begun": True})
    try:
        PROGRAMS[arguments["program"]](arguments)
    except OSError as error:
        fail(str(error))


def tell(answer: dict[str, Any]) -> None:
    """Print an answer for the master."""
    print("\n" + PREFIX + json.dumps(answer), flush=True)


def fail(sentence: str, hint: str = "") -> NoReturn:
    """Print an error for the master, and end."""
    tell({"error": sentence, "hint": hint})
    sys.exit(0)


# -- the right Python -------------------------------------------------------------------------------------------------


def find_python(arguments: dict[str, Any]) -> str:
    """Return the path of a Python that has the master's versions: the one that runs this, or that of the virtual
    environment of ``ddlf up --install``. If there is none, print an error and end.
    """
    own_facts = facts(sys.executable)
    venv = venv_python()
    for python, facts_found in (
        (sys.executable, own_facts),
        (venv, None if own_facts == arguments["facts"] else facts(venv)),
    ):
        if facts_found == arguments["facts"]:
            return python
    version, ddlf = arguments["facts"]
    facts_found = own_facts or facts(venv) or [list(sys.version_info[:2]), None]
    if facts_found[0] != version:
        fail(f"it has Python {dotted(facts_found[0])}, and the master has Python {dotted(version)}", NAME_ANOTHER)
    if facts_found[1] is None:
        fail(f"{sys.executable} has no DDLF", f"install it there with 'ddlf up --install', or {NAME_ANOTHER}")
    fail(
        f"it has DDLF {facts_found[1]}, and the master has DDLF {ddlf}",
        "install the same version, for example with 'ddlf up --install'",
    )


def facts(python: str) -> list[Any] | None:
    """Return the versions of Python and DDLF, or None if this Python has no DDLF."""
    try:
        process = subprocess.run([python, "-c", FACTS], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
        versions: list[Any] = json.loads(process.stdout)
    except (OSError, ValueError, subprocess.CalledProcessError):
        return None
    return versions


def venv_folder() -> str:
    """Return the path of the virtual environment of ``ddlf up --install``."""
    data = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    return os.path.join(data, "ddlf", "venv")


def venv_python() -> str:
    """Return the path of the Python in this environment, which may not exist."""
    return os.path.join(venv_folder(), "bin", "python")


def dotted(version: list[int]) -> str:
    return ".".join(map(str, version))


# -- a worker of one run ----------------------------------------------------------------------------------------------


def join(arguments: dict[str, Any]) -> None:
    """Become a worker that joins the master. It reads its token from standard input, and ends when that ends."""
    os.environ.update(arguments["environment"])
    python = find_python(arguments)
    tell({"ready": True})
    os.dup2(2, 1)
    os.execv(python, [python, "-m", "ddlf.cli.worker", *arguments["arguments"], "--exit-with-parent"])


def look(arguments: dict[str, Any]) -> None:
    """Find the Python that a worker would run with, and report its path."""
    tell({"python": find_python(arguments)})


# -- lasting workers --------------------------------------------------------------------------------------------------


class Lasting:
    """A worker that runs until ``down``, and its files.

    Args:
        port: Its port.
    """

    def __init__(self, port: int) -> None:
        state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        self.port = port
        self.folder = os.path.join(state, "ddlf", "up")
        self.token, self.log, self._pid = (self.file("token"), self.file("log"), self.file("pid"))
        config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
        self.unit = f"ddlf-worker-{port}.service"
        self.unit_file = os.path.join(config, "systemd", "user", self.unit)

    def file(self, ending: str) -> str:
        return os.path.join(self.folder, f"{self.port}.{ending}")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Let one program at a time start or end this worker."""
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        with open(self.file("lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def pid(self) -> int | None:
        """Return the process id of the worker, a service or a plain process; None if it does not run."""
        return self.pid_of_service() or self.pid_of_process()

    def pid_of_service(self) -> int | None:
        """Return the process id of the worker if it is a service of systemd that runs."""
        if not os.path.exists(self.unit_file):
            return None
        output = systemctl("show", "--property", "MainPID", "--value", self.unit)[1]
        return int(output) if output.isdigit() and output != "0" else None

    def pid_of_process(self) -> int | None:
        """Return the process id of the worker if it is a process that ``up`` has started without systemd."""
        try:
            with open(self._pid) as file:
                pid = int(file.read())
        except (OSError, ValueError):
            return None
        return pid if self.token in command_of(pid) else None  # another process may have this id now

    def write(self, pid: int) -> None:
        with open(self._pid, "w") as file:
            file.write(f"{pid}\n")

    def clean(self) -> None:
        """Remove the token and the process id."""
        for path in (self.token, self._pid):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def last_lines(self) -> str:
        with contextlib.suppress(OSError), open(self.log, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - SHOWN_BYTES))
            return last_lines(file.read())
        return ""


def up(arguments: dict[str, Any]) -> None:
    """Start a worker that stays when this connection ends, unless it runs already."""
    worker = Lasting(arguments["port"])
    with worker.locked():
        pid = worker.pid()
        if pid is not None:
            if arguments["systemd"] and pid == worker.pid_of_process():
                fail(f"its worker at port {worker.port} runs (pid {pid}), but not as a service", RESTART)
            tell({"pid": pid, "did": "runs already"})
            return
        python = find_python(arguments)
        if not arguments["systemd"] and os.path.exists(worker.unit_file):
            remove_unit(worker)  # it would start a second worker at the next start of the machine
        worker.clean()
        with open(os.open(worker.token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(arguments["token"] + "\n")
        command = [python, "-m", "ddlf.cli.worker", "--port", str(worker.port), "--token-file", worker.token]
        command += arguments["arguments"]
        start = start_unit if arguments["systemd"] else start_process
        pid, warning = start(worker, command)
    tell({"pid": pid, "did": "started", "warning": warning})


def start_process(worker: Lasting, command: list[str]) -> tuple[int, str]:
    """Start a worker as a process, and wait until it is ready. Return its id."""
    reading, writing = os.pipe()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with open(worker.log, "wb") as log:
        process = subprocess.Popen(
            [*command, "--ready-fd", str(writing)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=os.path.expanduser("~"),
            pass_fds=[writing],
            start_new_session=True,
        )
    os.close(writing)
    worker.write(process.pid)
    with open(reading) as pipe:
        in_time = bool(select.select([pipe], [], [], READY_S)[0])
        line = pipe.readline() if in_time else ""
    failure = f"is not ready after {READY_S:g} s"
    if in_time:
        failure = json.loads(line)["failure"] if line else f"ended with exit code {process.wait()}"
    if failure:
        if process.poll() is None:
            end(process.pid)
            process.wait()
        worker.clean()
        fail(f"its worker {failure}" + (f":\n{worker.last_lines()}" if not line else ""))
    return process.pid, ""


UNIT = """\
[Unit]
Description=DDLF worker at port {port}

[Service]
Type=notify
NotifyAccess=main
UMask=0077
ExecStart={command}
Restart=on-failure
KillMode=mixed
TimeoutStopSec=15
WatchdogSec=30
StandardOutput=append:{log}
StandardError=append:{log}

[Install]
WantedBy=default.target
"""


def start_unit(worker: Lasting, command: list[str]) -> tuple[int, str]:
    """Start a worker as a service of this user, which also starts it after a crash and with the machine. Return its
    process id, and a warning.
    """
    if shutil.which("systemctl") is None:
        worker.clean()
        fail("it has no systemd", "leave --systemd out")
    os.makedirs(os.path.dirname(worker.unit_file), exist_ok=True)
    words = " ".join(quoted(word) for word in command)
    with open(worker.unit_file, "w") as file:
        file.write(UNIT.format(port=worker.port, command=words, log=worker.log.replace("%", "%%")))
    with open(worker.log, "wb"):
        pass
    for action in (["daemon-reload"], ["enable", worker.unit], ["restart", worker.unit]):
        code, output = systemctl(*action)
        if code:
            remove_unit(worker)
            worker.clean()
            fail(f"systemctl --user {' '.join(action)}: {output}\n{worker.last_lines()}".strip())
    lingers, output = run(["loginctl", "enable-linger"])
    pid = worker.pid()
    if pid is None:
        fail(f"systemd started no worker: {worker.last_lines()}")
    return pid, f"it ends when you log out there, because enable-linger failed: {output}" if lingers else ""


def quoted(word: str) -> str:
    """Return a word for the command in a unit of systemd."""
    for special, escaped in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$")):
        word = word.replace(special, escaped)
    return f'"{word}"'


def remove_unit(worker: Lasting) -> None:
    """End a worker that is a service, and remove the service."""
    systemctl("disable", "--now", worker.unit)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(worker.unit_file)
    systemctl("daemon-reload")


def down(arguments: dict[str, Any]) -> None:
    """End a worker that ``up`` has started, and remove its token."""
    worker = Lasting(arguments["port"])
    with worker.locked():
        pid = worker.pid()
        plain = worker.pid_of_process()
        if os.path.exists(worker.unit_file):
            remove_unit(worker)
        if plain is not None:
            end(plain)
        worker.clean()
    tell({"pid": pid})


def end(pid: int) -> None:
    """Ask a process to end, and kill it if that takes too long."""
    for number, seconds in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, STOP_S)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not command_of(pid):
                return
            time.sleep(0.05)
    fail(f"process {pid} does not end")


# -- installing -------------------------------------------------------------------------------------------------------


def install(arguments: dict[str, Any]) -> None:
    """Install DDLF from a wheel into the virtual environment, which is made if it is missing."""
    if list(sys.version_info[:2]) != arguments["facts"][0]:
        own_version, master_version = dotted(list(sys.version_info[:2])), dotted(arguments["facts"][0])
        fail(f"it has Python {own_version}, and the master has Python {master_version}", NAME_ANOTHER)
    for port in arguments["ports"]:
        pid = Lasting(port).pid()
        if pid is not None:
            fail(f"its worker at port {port} runs (pid {pid}), so ddlf was not installed", RESTART)
    venv = venv_folder()
    if facts_of_version(venv_python()) != arguments["facts"][0]:
        os.makedirs(os.path.dirname(venv), exist_ok=True)
        checked([sys.executable, "-m", "venv", "--clear", venv])
    wheel = os.path.join(venv, arguments["name"])
    with open(wheel, "wb") as file:
        file.write(base64.b64decode(arguments["wheel"]))
    pip = [venv_python(), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    checked([*pip, wheel + arguments["extras"]])
    checked([*pip, "--force-reinstall", "--no-deps", wheel])  # pip leaves an installed wheel of the same version
    os.unlink(wheel)
    tell({"did": "installed"})


def facts_of_version(python: str) -> list[int] | None:
    """Return the version of a Python, or None if there is none."""
    code, output = run([python, "-c", "import sys; print(list(sys.version_info[:2]))"])
    return None if code else json.loads(output)


def checked(command: list[str]) -> None:
    """Run a command; if it fails, print its last lines as an error and end."""
    code, output = run(command)
    if code:
        fail(f"{' '.join(command[1:4])} failed:\n{output}")


# -- processes --------------------------------------------------------------------------------------------------------


def run(command: list[str]) -> tuple[int, str]:
    """Run a command, and return its exit code and the last lines of its output."""
    try:
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError as error:
        return 127, str(error)
    return ended.returncode, last_lines(ended.stdout)


def systemctl(*arguments: str) -> tuple[int, str]:
    """Run systemctl for this user's services."""
    os.environ.setdefault("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}")
    return run(["systemctl", "--user", *arguments])


def command_of(pid: int) -> str:
    """Return the command line of a process; empty if it has ended."""
    if os.path.isdir("/proc/self"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode(errors="replace")
        return ""
    code, output = run(["ps", "-ww", "-o", "args=", "-p", str(pid)])
    return "" if code else output


def last_lines(output: bytes) -> str:
    lines = output[-SHOWN_BYTES:].decode(errors="replace").strip().splitlines()
    return "\n".join(lines[-SHOWN_LINES:])


PROGRAMS = {"join": join, "look": look, "up": up, "down": down, "install": install}
