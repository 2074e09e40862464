"""Send Ctrl-C at random moments of a run, from the first import to the end, and check that it ends soon and cleanly.

    python -m tests.trials.interrupts [--moments 100] [--seed 0] [--twice] [--app apps/digits_cnn.py] [-- OPTIONS OF ddlf run]

One undisturbed run measures the length. Each other run gets SIGINT at a random moment of that time, and with
``--twice`` a second SIGINT up to 0.3 s later. Then these statements must be true:

- The exit code is 130, or 0 if the run had already ended. If Python was only starting, the process may die of SIGINT,
  which a shell shows as 130.
- The process ends within 10 s. With exit code 0 it ends within 1 s, because a run that continues was not interrupted.
- No process remains that the run started, even indirectly. All of them have a mark in their environment.
- Their ports are free, their folder for temporary files is empty, and /dev/shm has no new file.
- Beside the app, only a complete model may remain.
- There is no traceback.

While Python itself starts, before the first line of the command, Python decides the exit code and may print a traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

LIMIT_S = 10.0
IGNORED_S = 1.0
MARK = "DDLF_INTERRUPTS_RUN"
ROOT = Path(__file__).parents[2]
SHARED_MEMORY = Path("/dev/shm")


@dataclass(slots=True)
class Outcome:
    """One interrupted run.

    Args:
        moment_s: The moment of SIGINT, in seconds since the start.
        code: The exit code; the negative number of a signal that ended the run.
        seconds: Seconds from SIGINT to the end.
        problems: The broken promises, as sentences.
    """

    moment_s: float
    code: int
    seconds: float
    problems: list[str] = field(default_factory=list)


class Run:
    """One run of the command in separate folders.

    Args:
        app: The file to run.
        options: More options of ``ddlf run``.
        folder: An empty folder.
    """

    def __init__(self, app: Path, options: Sequence[str], folder: Path) -> None:
        self.mark = uuid.uuid4().hex
        self.tmp, self.work = folder / "tmp", folder / "work"
        for path in (self.tmp, self.work):
            path.mkdir()
        self.shared = _shared_memory()
        self.output = folder / "output"
        self.state = folder / "STATE"
        environment = {**os.environ, MARK: self.mark, "TMPDIR": str(self.tmp), "PYTHONFAULTHANDLER": "1"}
        environment |= {f"XDG_{kind}_HOME": str(folder / kind) for kind in ("CONFIG", "STATE", "CACHE")}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "ddlf.cli.main", "run", str(app), *options]
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            # A command in a shell's background ignores SIGINT, and its child processes would inherit this.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self.began = time.monotonic()
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                cwd=self.work,
                start_new_session=True,  # like in a terminal, where Ctrl-C goes to the whole foreground group
            )

    def processes(self) -> list[psutil.Process]:
        """Return the running processes with the mark."""
        marked = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    marked.append(process)
        return marked

    def ports(self) -> set[int]:
        """Return the ports where its processes listen."""
        ports = set()
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                for connection in process.net_connections("inet"):
                    if connection.status == psutil.CONN_LISTEN:
                        ports.add(connection.laddr.port)
        return ports

    def interrupt(self) -> None:
        """Send SIGINT to the process group, like Ctrl-C."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGINT)

    def problems(self, ports: set[int]) -> list[str]:
        """Return the remaining processes, ports and files, and a traceback, as sentences."""
        sentences = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                sentences.append(f"process {process.pid} is left: {' '.join(process.cmdline())}")
                process.kill()
        for port in ports:
            with socket.socket() as sock:
                if sock.connect_ex(("127.0.0.1", port)) == 0:
                    sentences.append(f"port {port} is still in use")
        leftovers = [path for path in (*self.tmp.rglob("*"), *self.work.rglob("*")) if path.name != "model.keras"]
        leftovers += [path for path in _shared_memory() - self.shared if not _others_use(path)]
        sentences += [f"left: {path}" for path in leftovers]
        text = self.text()
        if "Traceback" in text and not self.was_starting():
            sentences.append(f"a traceback:\n{text[text.index('Traceback') :]}")
        return sentences

    def text(self) -> str:
        """Return its output."""
        return self.output.read_text(errors="replace")

    def log(self) -> str:
        """Return the output of native code."""
        return "".join(path.read_text(errors="replace") for path in self.state.rglob("master.log"))

    def was_starting(self) -> bool:
        """Return whether SIGINT interrupted Python itself, before the first line of the command."""
        text = self.text()
        return "KeyboardInterrupt" in text and "cluster " not in text and str(ROOT / "ddlf" / "cli") not in text


def _shared_memory() -> set[Path]:
    return set(SHARED_MEMORY.iterdir()) if SHARED_MEMORY.is_dir() else set()


def _others_use(path: Path) -> bool:
    """Return whether another program uses a new file in shared memory, or the file has disappeared by now."""
    time.sleep(0.2)
    try:
        number = f" {path.stat().st_ino} "  # a semaphore is mapped before it gets its name, so compare the number
    except OSError:
        return True
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if any(
                number in line and "/dev/shm/" in line for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
            ):
                return True
    return False


def undisturbed(app: Path, options: Sequence[str]) -> float:
    """Return the seconds of a run without an interrupt.

    Raises:
        SystemExit: The run failed, or left processes or files.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = Run(app, options, Path(folder))
        code = run.process.wait()
        seconds = time.monotonic() - run.began
        problems = run.problems(set())
        if code or problems:
            raise SystemExit(f"the undisturbed run ends with {code}: {problems}\n{run.text()}")
    return seconds


def interrupted(app: Path, options: Sequence[str], moment_s: float, again_s: float | None = None) -> Outcome:
    """Run the command, interrupt it once or twice, and return the outcome."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(app, options, Path(folder))
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.process.wait(max(0.0, moment_s - 0.05))
        ports = run.ports() if moment_s > 0.05 else set()
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.process.wait(max(0.0, moment_s - (time.monotonic() - run.began)))
        sent = time.monotonic()
        run.interrupt()
        if again_s is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.process.wait(again_s)
            run.interrupt()
        try:
            code = run.process.wait(LIMIT_S)
            problems = []
        except subprocess.TimeoutExpired:
            run.process.send_signal(signal.SIGABRT)  # it prints the stack of each thread
            code = run.process.wait()
            problems = [f"it has not ended after {LIMIT_S:g} s:\n{run.text()}{run.log()}"]
        seconds = time.monotonic() - sent
        if not problems and code not in (0, 130, -signal.SIGINT) and not run.was_starting():
            problems.append(f"it ended with {code}")
        if code == 0 and seconds > IGNORED_S:
            problems.append(f"it continued for {seconds:.1f} s:\n{run.text()}")
        _wait_for_orphans(run)
        problems += run.problems(ports)
        return Outcome(sent - run.began, code, seconds, problems)


def _wait_for_orphans(run: Run) -> None:
    """Wait until all processes of a run have ended. They may end after the command, but within the limit."""
    deadline = time.monotonic() + LIMIT_S
    while (processes := run.processes()) and (left_s := deadline - time.monotonic()) > 0:
        psutil.wait_procs(processes, left_s)


def main(argv: Sequence[str] | None = None) -> int:
    """Interrupt many runs, and return the number of runs with problems."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--twice", action="store_true")
    parser.add_argument("--app", type=Path, default=ROOT / "apps" / "digits_cnn.py")
    parser.add_argument("options", nargs="*", default=["--local", "2", "--master-epochs", "4", "--save", "model.keras"])
    parsed = parser.parse_args(argv)
    app = parsed.app.resolve()
    run_s = min(undisturbed(app, parsed.options) for _ in range(2))  # the first run fills the caches of the system
    print(
        f"{app.name} {' '.join(parsed.options)}: {run_s:.1f} s undisturbed, {parsed.moments} moments, seed {parsed.seed}",
        flush=True,
    )
    chance = random.Random(parsed.seed)
    outcomes = []
    for number in range(1, parsed.moments + 1):
        moment = chance.uniform(0, run_s)
        outcome = interrupted(app, parsed.options, moment, chance.uniform(0, 0.3) if parsed.twice else None)
        outcomes.append(outcome)
        if outcome.problems:
            print(
                f"{number:>4}  at {outcome.moment_s:6.3f} s, exit {outcome.code}: " + "; ".join(outcome.problems),
                flush=True,
            )
    bad = sum(bool(outcome.problems) for outcome in outcomes)
    seconds = sorted(outcome.seconds for outcome in outcomes)
    codes = ", ".join(f"{code}: {count}" for code, count in sorted(Counter(o.code for o in outcomes).items()))
    print(
        f"{bad} of {len(outcomes)} with problems; exit codes {codes}; "
        f"ended after {seconds[len(seconds) // 2]:.2f} s (median), {seconds[-1]:.2f} s (longest)"
    )
    return bad


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
