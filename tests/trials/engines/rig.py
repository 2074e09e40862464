"""The interface between a series and an engine (``Rig``), and one run of ``ddlf`` on an engine (``Run``)."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import psutil

ROOT = Path(__file__).parents[3]
DDLF = (sys.executable, "-m", "ddlf.cli.main", "run", "app.py")
QUIET = ("--no-dashboard", "--out", "none")
MARK = "DDLF_SERIES"
"""Environment variable of all processes of an engine and of its runs. Each rig has its own value."""
LOOK_S = 0.05
T = TypeVar("T")
RIGS = {
    "local": "here:LocalRig",
    "hosts": "here:HostsRig",
    "join": "here:JoinRig",
    "command": "command:CommandRig",
    "ssh": "ssh:SshRig",
    "slurm-tasks": "slurm:TasksRig",
    "slurm-steps": "slurm:StepsRig",
    "slurm-array": "slurm:ArrayRig",
    "ray": "ray:RayRig",
    "dask": "dask:DaskRig",
    "k8s": "kubernetes:KubernetesRig",
    "mpi": "mpi:OpenMpiRig",
    "mpich": "mpi:MpichRig",
    "spark": "spark:SparkRig",
}
"""The module in this folder and the class of each engine's rig. Only the module of the chosen rig is imported."""
APP = '''
import dataclasses
import hashlib
import json
import os
import time

import numpy as np

import ddlf


class Small(ddlf.IApp):
    """A small CNN on random images. It trains until there is a file ``stop``, and writes all events to a file."""

    batch_size, master_epochs, seed, slots, threads = 32, 1_000_000, 3, 4, 1
    pace = 0.05  # additional seconds of each slot
    verbose = True

    async def load_dataset(self):
        numbers = np.random.default_rng(0)
        self.x_train = numbers.normal(size=(512, 8, 8, 1)).astype("float32")
        self.y_train = np.eye(2, dtype="float32")[(self.x_train.sum((1, 2, 3)) > 0).astype(int)]

    async def create_model(self):
        import keras
        from keras import layers

        self.model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Conv2D(4, 3, activation="relu"),
                layers.Flatten(),
                layers.Dropout(0.3),
                layers.Dense(2, "softmax"),
            ]
        )
        self.model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "categorical_crossentropy")

    def train(self, weights, worker_epochs, batch_size):
        update = super().train(weights, worker_epochs, batch_size)
        time.sleep(self.pace)
        return update

    def on_round(self, record):
        if os.path.exists("stop"):
            self.stop_training()

    async def train_model(self, *, fresh=False):
        with open("events.jsonl", "a", buffering=1) as file:

            def note(event, **facts):
                file.write(json.dumps({"at": time.time(), "event": event, **facts}, default=str) + "\\n")

            self.subscribe(lambda event: note(type(event).__name__, **dataclasses.asdict(event)))
            history = await super().train_model(fresh=fresh)
            total = hashlib.sha256()
            for array in [*self.model.get_weights(), *(array for state in self.optimizers for array in state)]:
                total.update(np.ascontiguousarray(array).tobytes())
            rounds = history[-1].round
            note("Result", sha=total.hexdigest(), rounds=rounds, exact=self.ledger.is_exact(rounds))
        return history
'''

CALLS = '''
import asyncio
import json
import os
import time

from ddlf.errors import DDLFError


def number(self):
    return self.id


async def main(cluster):
    """Call all workers again and again until there is a file ``stop``. It needs no Keras, so workers start soon."""
    begun, lost, over = set(), set(), asyncio.Event()

    with open("events.jsonl", "a", buffering=1) as file:

        def note(event, **facts):
            file.write(json.dumps({"at": time.time(), "event": event, **facts}) + "\\n")

        async def call(worker):
            while not over.is_set():
                try:
                    await worker.run_method(number)
                except DDLFError as error:
                    if worker.id in begun and worker.id not in lost:
                        lost.add(worker.id)
                        note("WorkerLost", worker=worker.id, why=str(error), cause=getattr(error, "cause", None))
                    try:
                        if not worker.connected:
                            await worker.reconnect(5)
                    except DDLFError:
                        pass
                    await asyncio.sleep(0.05)
                    continue
                if worker.id in lost:
                    lost.discard(worker.id)
                    note("WorkerReturned", worker=worker.id)
                elif worker.id not in begun:
                    begun.add(worker.id)
                    note("WorkerReady", worker=worker.id)
                await asyncio.sleep(0.05)

        async with asyncio.TaskGroup() as calls:
            for worker in cluster.workers:
                calls.create_task(call(worker))
            while len(begun) < len(cluster.workers):
                await asyncio.sleep(0.05)
            note("Committed", record={"round": 1})
            while not os.path.exists("stop"):
                await asyncio.sleep(0.05)
            over.set()
        note("Result", sha="", rounds=1, exact=True)
'''


@dataclass(frozen=True, slots=True)
class Victim:
    """One kind of loss.

    Args:
        lose: A function that causes the loss at a place of a run. It returns all affected places; None stands for this
            place only.
        says: Regular expression for the reason in the event ``WorkerLost``, in the engine's own words.
        own_s: Seconds that the engine itself needs to restart the worker.
        spares: Places that the loss cannot affect, such as the place on the master's node.
        is_notice: Whether the engine warns the worker, so that it leaves and is not lost.
        prints: Regular expression for a line that the master must print before the place works again. Some engines know
            the reason later than the master notices the loss.
        mend: A function that repairs the engine when all places work again; None if the engine is intact.
    """

    lose: Callable[[Run, int], Iterable[int] | None]
    says: str
    own_s: float = 0.0
    spares: tuple[int, ...] = ()
    is_notice: bool = False
    prints: str = ""
    mend: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class End:
    """One way to end a run.

    Args:
        act: A function that ends the run.
        ends_master: Whether the master ends, too. Otherwise it continues without workers, and only the workers must end.
    """

    act: Callable[[Run], None]
    ends_master: bool = True


class Rig(ABC):
    """An engine on this machine, for disturbed runs. Use as a context manager.

    Args:
        folder: An empty folder for the engine's files.

    Attributes:
        places: Number of workers.
        notice_s: Seconds between a notice and the end of a worker.
        mark: Value of ``MARK``.
        app: Text of the app, ``APP`` or ``CALLS``.
    """

    name: ClassVar[str]
    places = 3
    notice_s = 10.0
    app = APP

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self._before: set[psutil.Process] = set()

    def __enter__(self) -> Self:
        try:
            self.open()
        except BaseException:
            self.close()
            raise
        self._before = set(self.processes())
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()

    def open(self) -> None:  # noqa: B027 - an engine may have nothing to start
        """Start the engine. Its processes must have the environment that ``environment`` returns."""

    def close(self) -> None:  # noqa: B027
        """End the engine, also after a failure within ``open``."""

    def environment(self) -> dict[str, str]:
        """Return the environment of the engine and of ``ddlf run``."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment |= {f"XDG_{kind}_HOME": str(self.folder / kind) for kind in ("CONFIG", "STATE", "CACHE")}
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {**environment, MARK: self.mark, "PYTHONPATH": path, "DDLF_GRACE": f"{self.notice_s:g}"}

    @abstractmethod
    def launcher(self, run: Run) -> list[str]:
        """Return the options of ``ddlf run`` that choose this engine and ``places`` workers."""

    def command(self, run: Run, options: Sequence[str]) -> list[str]:
        """Return the command line of a run with more options."""
        return [*DDLF, *self.launcher(run), *options]

    @abstractmethod
    def victims(self) -> dict[str, Victim]:
        """Return all kinds of losses, by name."""

    def notice(self, run: Run, place: int) -> None:
        """Warn the worker of a place ``notice_s`` before its end, in the way of the engine."""
        warn(run.daemon(place), self.notice_s)

    def ends(self) -> dict[str, End]:
        """Return all ways to end a run, by name."""
        return {
            "Ctrl-C": End(lambda run: run.interrupt()),
            "SIGTERM": End(lambda run: run.terminate()),
            "kill -9 of the master": End(lambda run: run.kill()),
        }

    def left(self, run: Run) -> list[str]:
        """Return the remains of a run, as text. Rigs of engines add jobs, actors, Secrets and forwards."""
        remains = [f"process {process.pid}: {_words(process)}" for process in self.of_runs()]
        # After all ranks have met, their file has no token, and may remain after a kill of all processes at once.
        files = [path for path in run.folder.rglob(".ddlf-*") if not (path.is_file() and path.read_bytes() == b"{}")]
        return remains + [f"token file {path.name}" for path in files]

    def is_engine(self, process: psutil.Process) -> bool:
        """Return whether a process with the mark belongs to the engine, although it was started during a run."""
        return False

    def processes(self) -> list[psutil.Process]:
        """Return all running processes with the mark."""
        marked = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    marked.append(process)
        return marked

    def of_runs(self) -> list[psutil.Process]:
        """Return the running processes with the mark that do not belong to the engine."""
        running = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if process not in self._before and not self.is_engine(process):
                    running.append(process)
        return running

    def empty(self) -> list[str]:
        """Return the engine's own command that runs an empty program at all places and waits. Without one, return []."""
        return []

    def clean(self, run: Run) -> None:
        """Remove the remains of a run after its check."""
        for process in self.of_runs():
            with contextlib.suppress(psutil.Error):
                process.kill()


class Run:
    """One run of ``ddlf`` on an engine, in a new folder.

    Args:
        rig: The engine.
        folder: The path of the new folder. All workers can read it.
        options: More options of ``ddlf run``.
        command: A command line that replaces the command line of the rig.

    Attributes:
        events: The events up to now, as dictionaries with ``at`` (seconds since 1970) and ``event`` (name of its class).
    """

    def __init__(self, rig: Rig, folder: Path, options: Sequence[str] = (), command: Sequence[str] = ()) -> None:
        self.rig, self.folder = rig, folder
        folder.mkdir(parents=True)
        (folder / "app.py").write_text(rig.app)
        self.events: list[dict[str, Any]] = []
        self._read_bytes = 0
        self._output = folder / "output"
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            # A command in a shell's background ignores SIGINT, and its child processes would inherit this.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self.began = time.time()
        with self._output.open("wb") as output:
            self.process = psutil.Popen(
                list(command) or rig.command(self, [*options, *(QUIET if rig.app is APP else ())]),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=rig.environment(),
                cwd=folder,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        """The output of the run up to now."""
        return self._output.read_text(errors="replace")

    def look(self) -> list[dict[str, Any]]:
        """Read new events, and return all events."""
        with contextlib.suppress(FileNotFoundError), (self.folder / "events.jsonl").open("rb") as file:
            file.seek(self._read_bytes)
            lines = file.read()
            lines = lines[: lines.rfind(b"\n") + 1]
            self._read_bytes += len(lines)
            self.events += [json.loads(line) for line in lines.splitlines()]
        return self.events

    def of(self, *kinds: str, since: int = 0, **facts: Any) -> Iterator[dict[str, Any]]:
        """Yield the events of these kinds with these facts, beginning at a position in ``events``."""
        for event in self.look()[since:]:
            if event["event"] in kinds and all(event.get(name) == value for name, value in facts.items()):
                yield event

    def wait_for(self, *kinds: str, since: int = 0, within_s: float, **facts: Any) -> dict[str, Any]:
        """Wait for an event and return it.

        Raises:
            TimeoutError: The event has not happened within this time.
            ChildProcessError: The run has ended without this event.
        """
        end = time.monotonic() + within_s
        while True:
            has_ended = self.has_ended()
            if event := next(self.of(*kinds, since=since, **facts), None):
                return event
            if has_ended:
                raise ChildProcessError(f"the run ended with {self.process.returncode}:\n{self.text[-3000:]}")
            if time.monotonic() > end:
                about = " ".join(f"{name}={value}" for name, value in facts.items())
                raise TimeoutError(f"no {' or '.join(kinds)} {about} within {within_s:g} s:\n{self.text[-3000:]}")
            time.sleep(LOOK_S)

    def has_ended(self) -> bool:
        """Return whether the command has ended."""
        return self.process.poll() is not None

    def result(self, within_s: float) -> dict[str, Any]:
        """Let the run end after its round, and return its last event, ``Result``."""
        (self.folder / "stop").touch()
        result = self.wait_for("Result", within_s=within_s)
        with contextlib.suppress(psutil.TimeoutExpired):
            self.process.wait(within_s)
        return result

    # -- its processes ----------------------------------------------------------------------------------------------

    def master(self) -> psutil.Process | None:
        """Return the process of the master: the command or its first descendant that is ``ddlf run``; None before its start."""
        with contextlib.suppress(psutil.Error):
            for process in [self.process, *self.process.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    if is_ddlf_run(process.cmdline()):
                        return psutil.Process(process.pid)
        return None

    def daemons(self) -> dict[int, psutil.Process]:
        """Return the newest ``ddlf-worker`` process of each place."""
        newest: dict[int, psutil.Process] = {}
        for process in self.rig.of_runs():
            with contextlib.suppress(psutil.Error, ValueError, IndexError):
                words = process.cmdline()
                if "ddlf.cli.worker" in words and is_python(words):
                    place = int(words[words.index("--place") + 1])
                    if place not in newest or newest[place].create_time() < process.create_time():
                        newest[place] = process
        return newest

    def daemon(self, place: int, within_s: float = 120.0) -> psutil.Process:
        """Wait for the ``ddlf-worker`` process of a place and return it."""
        return wait_for(lambda: self.daemons().get(place), within_s)

    def executor(self, place: int) -> psutil.Process:
        """Return the process that computes at a place."""

        def find() -> psutil.Process | None:
            with contextlib.suppress(psutil.Error):
                for process in self.daemon(place).children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        if process.name().startswith("ddlf-exec"):
                            return process
            return None

        return wait_for(find, 120.0)

    # -- its ends ---------------------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Send SIGINT to the whole foreground group, like a terminal."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGINT)

    def terminate(self) -> None:
        """Send SIGTERM to the command."""
        terminate(self.process)

    def kill(self) -> None:
        """Kill the master, or the command if the master has not started yet."""
        with contextlib.suppress(psutil.Error):
            (self.master() or self.process).kill()


def load(name: str, folder: Path) -> Rig:
    """Make the rig of an engine."""
    module, _, kind = RIGS[name].partition(":")
    rig: Rig = getattr(importlib.import_module(f"tests.trials.engines.{module}"), kind)(folder)
    return rig


def warn(process: psutil.Process, within_s: float) -> None:
    """Send SIGTERM, and SIGKILL after some seconds if the process still runs, like an engine."""

    def kill() -> None:
        with contextlib.suppress(psutil.Error):
            process.kill()  # psutil knows whether the number belongs to another process by now

    with contextlib.suppress(psutil.Error):
        process.terminate()
    timer = threading.Timer(within_s, kill)
    timer.daemon = True
    timer.start()


def kill(process: psutil.Process | None) -> None:
    """Send SIGKILL."""
    if process is not None:
        with contextlib.suppress(psutil.Error):
            process.kill()


def terminate(process: psutil.Process) -> None:
    """Send SIGTERM."""
    with contextlib.suppress(psutil.Error):
        process.terminate()


def wait_for(find: Callable[[], T | None], within_s: float) -> T:
    """Wait until a function returns a value that is not None, and return the value.

    Raises:
        TimeoutError: The function has returned None all the time.
    """
    end = time.monotonic() + within_s
    while (value := find()) is None:
        if time.monotonic() > end:
            raise TimeoutError(f"not found within {within_s:g} s")
        time.sleep(LOOK_S)
    return value


def is_python(words: Sequence[str]) -> bool:
    """Return whether a command line starts Python itself, and not a shell or an engine that starts Python."""
    return bool(words) and Path(words[0]).name.startswith("python")


def is_ddlf_run(words: Sequence[str]) -> bool:
    """Return whether a command line is ``ddlf run``."""
    return is_python(words) and "ddlf.cli.main" in words and "run" in words


def _words(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())[:200] or process.name()
    return "it has ended"
