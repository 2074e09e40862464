"""The rig for workers that the system's ssh starts, with an sshd on loopback."""

from __future__ import annotations

import contextlib
import sys

import psutil

from tests.engines.sshd import Sshd
from tests.trials.engines.rig import MARK, Rig, Run, Victim, kill, wait_for
from tests.trials.engines.stuck import TIMEOUT, Stuck


class SshRig(Rig):
    """A rig with a host name for each place. All names lead to this machine."""

    name = "ssh"
    sshd: Sshd | None = None

    def open(self) -> None:
        grace = {"DDLF_GRACE": f"{self.notice_s:g}"}
        self.sshd = Sshd(self.folder, {MARK: self.mark, **grace})

    def close(self) -> None:
        if self.sshd is not None:
            self.sshd.end()

    def environment(self) -> dict[str, str]:
        environment = super().environment()
        return environment if self.sshd is None else {**environment, "PATH": self.sshd.path}

    def launcher(self, run: Run) -> list[str]:
        hosts = ",".join(f"pc{place:02}" for place in range(self.places))
        return ["--launcher", f"ssh:hosts={hosts},python={sys.executable}"]

    def empty(self) -> list[str]:
        return ["sh", "-c", "".join(f"ssh pc{place:02} true & " for place in range(self.places)) + "wait"]

    def victims(self) -> dict[str, Victim]:
        return {
            "executor": Victim(lambda run, place: kill(run.executor(place)), "SIGKILL"),
            "daemon": Victim(lambda run, place: kill(run.daemon(place)), "(?i)killed|SIGKILL|137"),
            "ssh client": Victim(lambda run, place: kill(client(run, place)), "ssh"),
            "sshd session": Victim(
                lambda run, place: kill(session(run, place)), "(?i)ssh|connection|closed|disconnect"
            ),
        }

    def stuck(self) -> dict[str, Stuck]:
        def ssh(host: str, python: str = sys.executable) -> list[str]:
            return ["--launcher", f"ssh:hosts={host},python={python},{TIMEOUT}"]

        return {
            "dead host": Stuck(ssh("dead"), "ssh connects to dead", ends_with="(?i)timed out"),
            "host that refuses": Stuck(ssh("refused"), "refused: ssh: connect to host .*: Connection refused"),
            "wrong Python": Stuck(ssh("pc01", "/nowhere/python"), "pc01: /nowhere/python cannot run there"),
        }

    def left(self, run: Run) -> list[str]:
        assert self.sshd is not None
        connections = []
        for process in self.sshd.process.children():
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    connections.append(f"connection of sshd, process {process.pid}")
        return super().left(run) + connections


def client(run: Run, place: int) -> psutil.Process:
    """Return the client process of ssh for a place."""

    def find() -> psutil.Process | None:
        for process in run.rig.of_runs():
            with contextlib.suppress(psutil.Error):
                if process.name() == "ssh" and f"pc{place:02}" in process.cmdline():
                    return process
        return None

    return wait_for(find, 120.0)


def session(run: Run, place: int) -> psutil.Process:
    """Return the process of sshd that serves the connection of a place."""
    parents = run.daemon(place).parents()
    return next(parent for parent in parents if parent.name().startswith("sshd"))
