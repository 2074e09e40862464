"""Send SIGTERM and SIGINT at random moments to runs with checkpoints, and continue each run with ``--resume auto``.

    python -m tests.trials.signals [--signals 200] [--seed 0] [--kind "SIGTERM to the master"] [--made-up]

An undisturbed run measures the length and gives the expected bits. In a series, the same command runs again and again.
Each run gets signals at a random moment of that time, or after a random number of rounds, up to six times in a series.
If the last signal ended its run, one more run ends the series. The signals go to the master, once or twice, to one
worker, to all workers, or to the master and workers at once. These statements must be true:

- The exit code fits the signal: 143 after SIGTERM and 130 after SIGINT, if the master got it. It is 0 if the run had
  ended already, or if only workers got the signal. Death by the signal also counts, if Python was only starting, or
  after the second signal.
- The run ends within three minutes, without a traceback, and no worker remains.
- Each checkpoint in the folder is complete.
- The last run ends with the SHA-256 of the undisturbed run. It covers weights, optimizer states, and all other arrays of
  the checkpoint.

All masters are forks of a process that has imported Keras, and so are all executors, because each import takes seconds.
With ``--made-up``, workers and model are fake (``FakeRun``). Then a run takes a second, and only the master gets signals.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from ddlf.training.checkpoints.checkpoint import CheckpointFolder
from tests.templates import Standing
from tests.trials.options import read_options

LIMIT_S = 180.0
IGNORED_S = 5.0
"""Seconds after a signal in which a run that is nearly over may end by itself."""
LEFT_S = 30.0
"""Seconds that workers may take to end after their master."""
LOOK_S = 0.5
MOST_IN_SERIES = 6
ROOT = Path(__file__).parents[2]
OUTPUT = "output"
FAKE = -1
TERM, INT = signal.SIGTERM, signal.SIGINT
APP = """
import numpy as np
import ddlf

class App(ddlf.IApp):
    batch_size, master_epochs, seed, slots, threads = 32, 15, 3, 2, 1
    checkpoint_every = 1

    async def load_dataset(self):
        random = np.random.default_rng(0)
        self.x_train = random.normal(size=(256, 8)).astype("float32")
        self.y_train = (self.x_train.sum(1) > 0).astype("int32")
        self.x_test, self.y_test = self.x_train, self.y_train

    async def create_model(self):
        import keras
        from keras import layers

        self.model = keras.Sequential([keras.Input((8,)), layers.Dropout(0.3), layers.Dense(2, "softmax")])
        self.model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy")
"""
MADE_UP = """
import asyncio

from ddlf.testing import FakeCluster, FakeRun

class App(FakeRun):
    master_epochs, seed, slots, checkpoint_every, optimizer_state = 15, 3, 2, 1, "kept"

    def __init__(self, cluster):
        super().__init__(FakeCluster(2))

    async def on_round(self, record):
        await asyncio.sleep(0.005)
"""


class NoCluster:
    """A stand-in for the cluster of a run with fake workers."""

    N = places = 2
    workers = ()

    def subscribe(self, sink: object) -> Callable[[], None]:
        """Never call the sink."""
        return lambda: None

    async def connect(self, modules: Sequence[str] = ()) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of disturbance: the signals for the master and for workers.

    Args:
        name: The name of the kind in the output.
        number: The signal.
        times: Number of times that the master gets it.
        workers: Number of workers that get it, beginning with the first one.
    """

    name: str
    number: signal.Signals
    times: int
    workers: int = 0

    def fits(self, code: int) -> bool:
        """Return whether a run may end with this exit code."""
        return code == 0 or (bool(self.times) and code in (128 + self.number, -self.number))


KINDS = (
    Kind("SIGTERM to the master", TERM, 1),
    Kind("SIGTERM to the master twice", TERM, 2),
    Kind("SIGINT to the master", INT, 1),
    Kind("SIGINT to the master twice", INT, 2),
    Kind("SIGTERM to a worker", TERM, 0, 1),
    Kind("SIGTERM to all workers", TERM, 0, 2),
    Kind("SIGTERM to the master and a worker", TERM, 1, 1),
    Kind("SIGTERM to the master and all workers", TERM, 1, 2),
)


@dataclass(slots=True)
class Outcome:
    """The outcome of one run with signals.

    Args:
        kind: The kind of disturbance.
        moment_s: The moment of the first signal, in seconds since the start.
        code: The exit code; the negative number of a signal that ended the run.
        seconds: Seconds from the signal to the end.
        problems: The broken promises, as sentences.
    """

    kind: Kind
    moment_s: float
    code: int
    seconds: float
    problems: list[str] = field(default_factory=list)


def nursery(template: int) -> None:
    """Import Keras once, and fork a master for each folder on standard input. Print its process id, and after its end its
    exit code, or the negative number of the signal that ended it.

    Args:
        template: The descriptor of the template for executors; -1 if workers are fake.
    """
    import ddlf.cli.run  # the forks inherit the import
    from ddlf.training import roles

    if template == FAKE:
        import ddlf.testing

        roles.import_keras = lambda: None
        ddlf.cli.run.resolve_cluster = lambda options: (NoCluster(), "made up")  # type: ignore[assignment]
    roles.import_keras()
    for line in sys.stdin:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _lead(template, line.strip())
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _lead(template: int, folder: str) -> None:
    """Run the command ``ddlf`` in the folder, as the master."""
    from ddlf.cli.main import command
    from ddlf.cluster.launch import local

    signal.signal(signal.SIGINT, signal.default_int_handler)  # commands in a shell's background ignore it
    os.setsid()
    os.chdir(folder)
    sys.path[0] = folder
    for number, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)):
        os.dup2(os.open(OUTPUT if number else os.devnull, flags), number)
    os.dup2(1, 2)
    if template != FAKE:
        standing = Standing(socket.socket(fileno=template))
        local.start_template = lambda modules: standing
    local.start_template_early = lambda modules: None
    sys.argv = ["ddlf", "run", "app.py", "--local", "2", "--no-dashboard", "--out", "none"]
    sys.argv += ["--checkpoint", "kept", "--resume", "auto"]
    code: object = 1
    try:
        command()
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
    sys.exit(code)  # type: ignore[arg-type]


class Stage:
    """A starter of masters, which are forks. All their workers share one template. Use as a context manager.

    Args:
        made_up: Whether workers and model are fake.
    """

    def __init__(self, *, made_up: bool = False) -> None:
        self._app = MADE_UP if made_up else APP
        self._template = None if made_up else Standing.of_keras()

    def __enter__(self) -> Stage:
        self._folder = tempfile.TemporaryDirectory(prefix="ddlf-signals-")
        fd = FAKE if self._template is None else self._template.fileno()
        self._nursery = subprocess.Popen(
            [sys.executable, "-c", f"from tests.trials.signals import nursery; nursery({fd})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[] if fd == FAKE else [fd],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        )
        return self

    def __exit__(self, *exc: object) -> None:
        self._nursery.communicate()
        self._folder.cleanup()
        if self._template is not None:
            self._template.end()

    def folder(self) -> Path:
        """Return a new folder with the app."""
        path = Path(tempfile.mkdtemp(dir=self._folder.name))
        (path / "app.py").write_text(self._app)
        return path

    def run(self, folder: Path) -> Run:
        """Start the command in a folder. Only one run at a time is possible."""
        return Run(self._nursery, folder)


class Run:
    """One run of the command.

    Args:
        nursery: The process that forks the master.
        folder: The current folder of the master.
    """

    def __init__(self, nursery: subprocess.Popen[bytes], folder: Path) -> None:
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        self._codes = nursery.stdout
        nursery.stdin.write(f"{folder}\n".encode())
        nursery.stdin.flush()
        self.pid = int(self._codes.readline())
        self.output = folder / OUTPUT
        self.began = time.monotonic()
        self.code: int | None = None
        self.met: set[psutil.Process] = set()

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait for the end, at most this many seconds. Return the exit code; None if the run continues."""
        if self.code is None and select.select([self._codes], [], [], seconds)[0]:
            self.code = int(self._codes.readline())
        return self.code

    def send(self, number: signal.Signals) -> None:
        """Send the master a signal if it still runs."""
        if self.wait(0) is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def workers(self) -> list[psutil.Process]:
        """Return the daemons of the workers, in the order of their start."""
        daemons = []
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.pid).children():
                with contextlib.suppress(psutil.Error):
                    if "ddlf.cli.worker" in child.cmdline():
                        daemons.append(child)
        self.met.update(daemons)
        return sorted(daemons, key=lambda child: child.pid)

    def text(self) -> str:
        """Return the output of the master."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def problems(self) -> list[str]:
        """Return the problems after the end: remaining workers, and a traceback in the output."""
        _, alive = psutil.wait_procs(self.met, LEFT_S)
        sentences = [f"worker {process.pid} is left" for process in alive if process.status() != psutil.STATUS_ZOMBIE]
        if "Traceback" in self.text():
            sentences.append("a traceback")
        return sentences


def damaged(folder: Path) -> list[str]:
    """Return the checkpoints in a folder that are not complete."""
    entries = CheckpointFolder(folder / "kept").entries()
    return [f"{entry.name}: {entry.problem}" for entry in entries if entry.round is not None and not entry.complete]


def digest(folder: Path) -> str:
    """Return the SHA-256 of all arrays of the newest checkpoint."""
    checkpoint = CheckpointFolder(folder / "kept").newest(required=True)
    assert checkpoint is not None
    total = hashlib.sha256()
    for group, arrays in sorted(checkpoint.arrays.items()):
        for name, array in arrays.items():
            total.update(f"{checkpoint.round} {group} {name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return total.hexdigest()


def undisturbed(stage: Stage) -> tuple[float, str]:
    """Return the seconds and the digest of a run without signals."""
    folder = stage.folder()
    run = stage.run(folder)
    code = run.wait()
    seconds = time.monotonic() - run.began
    if code or run.problems():
        raise SystemExit(f"the undisturbed run ends with {code}:\n{run.text()}")
    return seconds, digest(folder)


def newest(folder: Path) -> int:
    """Return the round of the newest checkpoint; 0 without one."""
    return max((int(path.name[6:]) for path in (folder / "kept").glob("round-??????")), default=0)


def disturbed(
    stage: Stage, folder: Path, kind: Kind, moment_s: float, gap_s: float, after: int | None = None
) -> Outcome:
    """Start the command in a folder, send signals, wait for the end, and check the folder and the processes.

    Args:
        stage: The starter of the master.
        folder: The folder of the series.
        kind: The kind of disturbance.
        moment_s: Seconds from the start to the first signal.
        gap_s: Seconds from the first signal to the second one.
        after: Number of new rounds before the first signal; None if ``moment_s`` decides.
    """
    reached = newest(folder)
    run = stage.run(folder)
    if after is not None:
        while run.wait(0.002) is None and newest(folder) < reached + after:
            run.workers()
        moment_s = time.monotonic() - run.began + gap_s / 50
    run.wait(max(0.0, moment_s - 0.05))
    workers = run.workers()[: kind.workers]
    run.wait(max(0.0, moment_s - (time.monotonic() - run.began)))
    sent = time.monotonic()
    if kind.times:
        run.send(kind.number)
    for worker in workers:
        with contextlib.suppress(psutil.Error):
            worker.send_signal(kind.number)
    if kind.times > 1:
        run.wait(gap_s)
        run.send(kind.number)
    while run.wait(LOOK_S) is None and time.monotonic() < sent + LIMIT_S:
        run.workers()
    problems = []
    if run.code is None:
        problems.append(f"it has not ended after {LIMIT_S:g} s")
        run.send(signal.SIGKILL)
        run.wait()
    assert run.code is not None
    seconds = time.monotonic() - sent
    if not problems and run.code == 0 and kind.times and seconds > IGNORED_S:
        problems.append(f"it continued for {seconds:.1f} s")
    if not problems and not kind.fits(run.code):
        problems.append(f"it ended with {run.code}")
    problems += run.problems() + damaged(folder)
    if problems:
        problems.append(run.text())
    return Outcome(kind, sent - run.began, run.code, seconds, problems)


def series(
    stage: Stage, chance: random.Random, whole_s: float, expected: str, kinds: Sequence[Kind], most: int
) -> list[Outcome]:
    """Run the command again and again until it ends by itself, with signals in at most ``most`` runs. The last outcome
    includes the problems of the result.
    """
    folder = stage.folder()
    outcomes = []
    for _ in range(most):
        after = chance.choice((None, chance.randint(1, 5)))
        moment_s, gap_s = chance.uniform(0, whole_s), chance.uniform(0, 1)
        outcome = disturbed(stage, folder, chance.choice(kinds), moment_s, gap_s, after)
        outcomes.append(outcome)
        if outcome.code == 0:
            break
    problems = outcomes[-1].problems
    if outcomes[-1].code:
        run = stage.run(folder)
        if run.wait() or run.problems():
            problems.append(f"the last run ended with {run.code}: {run.text()}")
    if not problems and (sha := digest(folder)) != expected:
        problems.append(f"other bits: {sha[:16]} instead of {expected[:16]}")
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    """Send the signals, and print the outcomes. Return the number of runs with problems."""
    options = read_options(
        __doc__, arguments, signals=200, seed=0, kind=("any", *(kind.name for kind in KINDS)), made_up=False
    )
    kinds = [kind for kind in KINDS if options.kind in ("any", kind.name) and not (options.made_up and kind.workers)]
    chance = random.Random(options.seed)
    outcomes: list[Outcome] = []
    with Stage(made_up=options.made_up) as stage:
        undisturbed(stage)  # the first run fills the caches of the system
        whole_s, expected = undisturbed(stage)
        print(f"{whole_s:.1f} s undisturbed, {options.signals} signals, seed {options.seed}", flush=True)
        while (remaining := options.signals - len(outcomes)) > 0:
            done = series(stage, chance, whole_s, expected, kinds, min(remaining, MOST_IN_SERIES))
            for number, outcome in enumerate(done, len(outcomes) + 1):
                if outcome.problems:
                    print(
                        f"{number:>4}  {outcome.kind.name} at {outcome.moment_s:.3f} s, exit {outcome.code}: ", end=""
                    )
                    print("; ".join(outcome.problems), flush=True)
            outcomes += done
            print(f"{len(outcomes)} signals", flush=True)
    for kind in kinds:
        of_kind = [outcome for outcome in outcomes if outcome.kind is kind]
        codes = Counter(outcome.code for outcome in of_kind)
        longest = max((outcome.seconds for outcome in of_kind if outcome.kind.times), default=0.0)
        print(f"{kind.name:<40}{len(of_kind):>4}  exit codes {dict(sorted(codes.items()))}, {longest:.1f} s at most")
    bad = sum(bool(outcome.problems) for outcome in outcomes)
    print(f"{bad} of {len(outcomes)} with problems; SHA-256 {expected[:16]}")
    return bad


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
