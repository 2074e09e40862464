"""The rig for workers that any command starts. The command is a shell, like the script of a scheduler."""

from __future__ import annotations

import contextlib

import psutil

from tests.trials.engines.rig import Rig, Run, Victim, kill, wait_for
from tests.trials.engines.stuck import Stuck


class CommandRig(Rig):
    """A rig with a shell for each place. The shell waits for its worker and ends with the worker's exit code."""

    name = "command"

    def launcher(self, run: Run) -> list[str]:
        return ["--workers", str(self.places), "--launcher", "command:sh -c '{worker}; exit $?' place-{place}"]

    def victims(self) -> dict[str, Victim]:
        return {
            "executor": Victim(lambda run, place: kill(run.executor(place)), "SIGKILL"),
            "daemon": Victim(lambda run, place: kill(run.daemon(place)), "command ended with exit code 137"),
            "command": Victim(lambda run, place: kill(shell(run, place)), "SIGTERM", is_notice=True),
        }

    def stuck(self) -> dict[str, Stuck]:
        def command(text: str) -> list[str]:
            return ["--workers", "1", "--launcher", f"command:{text}"]

        return {
            "no such program": Stuck(command("/nowhere/program {worker}"), "/nowhere/program"),
            "program that fails": Stuck(command("sh -c 'echo no such queue >&2; exit 1' {worker}"), "no such queue"),
        }


def shell(run: Run, place: int) -> psutil.Process:
    """Return the shell of a place."""

    def find() -> psutil.Process | None:
        for process in run.rig.of_runs():
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[:1] == ["sh"] and process.cmdline()[-1] == f"place-{place}":
                    return process
        return None

    return wait_for(find, 120.0)
