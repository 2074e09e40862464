"""Starts the worker of one place, and starts it again if it is killed. Runs where the engine put the place: in a task of
Slurm, in an actor of Ray, or beside the master.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import IO

from ddlf.worker.grace import grace_s
from ddlf.worker.machine import CORES_VARIABLE, THREADS
from ddlf.worker.process import child_environment

TRIM = "MALLOC_TRIM_THRESHOLD_"
"""Environment variable that Dask's nanny sets for its worker. It makes the C library give memory back to the system after
each computation, which took a fifth of the time of training.
"""
LOOK_S = 0.1
"""Seconds between two looks at the worker's process."""
JOIN_FOR_S = 25
"""Seconds that a worker tries to find its master again, if the master was killed. It notices the loss within 5 s and ends
within another 5 s, so that the engine's resources are free after 35 s."""
SHORT_LIFE_S = 10.0
LONGEST_PAUSE_S = 5.0
"""After a life of less than ``SHORT_LIFE_S`` a worker is started again after a growing pause, at most this long."""
STOP_S = 5.0
WARNED = 128 + signal.SIGTERM
"""Exit code of a worker that has handed its work over after SIGTERM."""


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """The facts for the start of one place's worker. They can be pickled, and their text does not show the token.

    Args:
        gates: The master's addresses, with commas.
        place: The place, from 0; None for any free one.
        token: The token of this run.
        cores: Number of CPUs that the engine gives the worker; None if the operating system says it.
        env: More environment variables.
        join_for_s: Seconds that the worker tries to find its master, at the start and if the master was killed.
        port: The port where other workers can reach it; None if it listens nowhere.
    """

    gates: str
    place: int | None
    token: bytes = field(repr=False)
    cores: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    join_for_s: float = JOIN_FOR_S
    port: int | None = None

    def arguments(self) -> list[str]:
        """Return the arguments of ``ddlf-worker``, without the way the token goes."""
        placing = [] if self.place is None else ["--place", str(self.place)]
        listening = [] if self.port is None else ["--host", "0.0.0.0", "--port", str(self.port)]
        return ["--join", self.gates, *placing, *listening, "--join-for", f"{self.join_for_s:g}", "--quiet"]

    def environment(self) -> dict[str, str]:
        """Return the environment variables that the worker needs besides its own, without the token."""
        cores = {} if self.cores is None else {CORES_VARIABLE: str(self.cores)}
        return {**cores, **self.env}


class Supervisor:
    """Keeps the worker of one place running. A worker that is killed, or that alone got SIGTERM, is started again. The worker
    ends with this process, unless ``stay`` says otherwise.

    Args:
        worker: How to start it.
        output: A file for what the worker prints; None for this process's own output.
    """

    def __init__(self, worker: WorkerStart, output: IO[bytes] | None = None) -> None:
        self._command = [sys.executable, "-m", "ddlf.cli.worker", *worker.arguments(), "--exit-with-parent"]
        self._token = worker.token
        self._at_place = "" if worker.place is None else f" at place {worker.place}"
        self._output = output
        self._environment = worker.environment()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False
        self._stays = False
        self._grace_s: float | None = None  # the seconds of an engine's notice
        self._starting = threading.Lock()  # no process starts after ``stop``

    def start(self) -> None:
        """Start the worker's process, unless ``stop`` was called."""
        with self._starting:
            if self._is_stopped:
                return
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=self._output,
                stderr=self._output,
                env={**self._inherited_environment(), **self._environment},
                start_new_session=True,
            )
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it was killed at once; ``run`` starts it again
                self._process.stdin.write(self._token + b"\n")
                self._process.stdin.flush()
            if self._stays:
                self._say("stay 1")

    def _say(self, line: str) -> None:
        """Write a line to the worker, if it runs."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError, ValueError):  # it has ended, and its stdin may be closed
                self._process.stdin.write(f"{line}\n".encode())
                self._process.stdin.flush()

    def _inherited_environment(self) -> dict[str, str]:
        """Return this process's environment for the worker. An engine that gives cores may have set one thread for its own
        processes, and little free memory, which is not for the worker.
        """
        environment = child_environment()
        if CORES_VARIABLE in self._environment:
            for name in (*THREADS, TRIM):
                environment.pop(name, None)
        return environment

    def run(self, is_over: Callable[[], bool] = lambda: False) -> int:
        """Keep the worker of this task running until the run is over: start it again if it is killed. Then end it, unless
        it stays. Return the exit code for the task.
        """
        self.start()
        code, pause, began = 0, LOOK_S, time.monotonic()
        while not (self._is_stopped or is_over()):
            ended = self._process.poll() if self._process is not None else None
            if ended is not None and ended >= 0 and ended != WARNED:
                code = ended  # it ended by itself, and has said why
                break
            if ended is not None:
                self._close_stdin()
                pause = LOOK_S if time.monotonic() - began > SHORT_LIFE_S else min(2 * pause, LONGEST_PAUSE_S)
                name = signal.Signals(-ended if ended < 0 else signal.SIGTERM).name
                print(
                    f"ddlf: the worker{self._at_place} was ended by {name}; starting it again",
                    file=sys.stderr,
                    flush=True,
                )
                time.sleep(pause)
                self.start()
                began = time.monotonic()
            time.sleep(LOOK_S)
        if self._is_stopped or not self._stays:
            self.stop()
        return code

    def stay(self, stays: bool = True) -> None:
        """Say whether the worker continues after the end of this process, because the head of the engine is gone. Then the
        master ends it with the run, or it ends itself after ``join_for_s`` without a master.
        """
        with self._starting:
            self._stays = stays
            self._say(f"stay {stays:d}")

    def ask_to_stop(self) -> None:
        """Let ``run`` end soon. A signal handler may call this."""
        self._is_stopped = True

    def leave(self, within_s: float) -> None:
        """Pass an engine's notice on: the worker hands its work over, and ends within so many seconds."""
        self._is_stopped = True
        self._grace_s = max(0.0, within_s)

    def stop(self) -> None:
        """Let the worker hand its work over, and end it. Safe to call again."""
        with self._starting:
            self._is_stopped = True
            process = self._process
        if process is None:
            return
        if self._grace_s is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        else:
            self._say(f"leave {self._grace_s:.1f}")
        try:
            process.wait((grace_s() if self._grace_s is None else self._grace_s) + STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._close_stdin()

    def _close_stdin(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it ended before it had read the token
                self._process.stdin.close()
