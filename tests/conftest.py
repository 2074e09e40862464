"""Choose the tests to run, and give them workers: real processes with real sockets on loopback, shared by many tests.

When no folder, file, test, ``-k`` or ``-m`` is named, tests marked ``slow`` do not run. All tests below
``tests/benchmarks`` and ``tests/trials`` get this mark.

Tests do not touch the user's own files. Before the first test, new folders replace the folders for configuration, state,
cache and temporary files. The processes that tests start inherit them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, settings

from ddlf.cluster.cluster import Cluster
from ddlf.cluster.launch import local
from ddlf.rpc import tokens
from ddlf.rpc.tokens import new_token
from tests import unasked, warm
from tests.cards import Cards
from tests.daemons import RunningDaemon
from tests.patience import PATIENCE_S
from tests.templates import Standing
from tests.trials.workers import Workers

SLOW = {Path(__file__).parent / name for name in ("benchmarks", "trials")}
USE_KERAS = (
    (
        *(
            "tests/training/roles/",
            "tests/training/slot/",
            "tests/training/test_keras_user.py",
            "tests/training/test_sync.py",
        ),
        *("tests/test_app.py", "tests/test_research.py"),
        *("tests/test_bad_inputs/test_api.py", "tests/test_bad_inputs/test_datasets.py", "tests/earlier/"),
        *("tests/peers/test_cluster.py", "tests/peers/test_model.py", "tests/worker/test_frameworks.py"),
        *("tests/extras/advice/", "tests/extras/planner/test_planning.py", "tests/extras/text/test_command.py"),
        *("tests/extras/scout/", "tests/cli/test_new.py", "tests/peers/test_classes.py"),
    ),
    (
        *("tests/training/", "tests/data/test_app_data.py", "tests/end_to_end/test_template.py"),
        *(
            "tests/extras/text/conversion/",
            "tests/extras/text/training/",
            "tests/peers/browser/test_graph.py",
            "tests/testing/test_in_process.py",
            "tests/testing/test_plan.py",
            "tests/cli/test_dry_run.py",
        ),
    ),
)
"""Two shares of tests that use Keras. Importing Keras costs as much as a hundred tests, so when several processes run
the tests, one process gets the first share, and another one gets the second. They begin with these tests."""
LONG = (
    *(
        "tests/extras/advice/test_programs.py",
        "tests/test_docs.py",
        "tests/extras/stabilisers/",
        "tests/notebooks/",
        "tests/test_site.py",
    ),
    *("tests/trials/", "tests/benchmarks/", "tests/end_to_end/", "tests/monitor/dashboard/", "tests/test_readme.py"),
    *(
        "tests/cli/",
        "tests/worker/",
        "tests/cluster/launch/",
        "tests/testing/",
        "tests/training/checkpoints/",
        "tests/data/",
    ),
)
"""Long tests. They begin in this order before all other tests, so that all processes end at about the same time."""
LEFT = pytest.StashKey[int]()

# There is no deadline for an example: its time depends on the machine, and not on the code.
settings.register_profile("thorough", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("usual", settings.get_profile("thorough"), max_examples=30)
settings.load_profile("usual")


def pytest_configure(config: pytest.Config) -> None:
    # Thousands of tests and the modules of Keras stay in memory. Rare collections do not visit all these objects so often.
    gc.set_threshold(700, 20, 100)
    # A command in a shell's background ignores SIGINT, and its child processes inherit this. Tests send SIGINT to them.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # A process of pytest-xdist gets files as arguments even if the user named none, so the main process passes on `left`.
    named = config.args_source is pytest.Config.ArgsSource.ARGS or config.option.keyword or config.option.markexpr
    config.stash[LEFT] = getattr(config, "workerinput", {"left": -1 if named else 0})["left"]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Let ``-m slow`` import only files that contain the word: most files have no slow test, and importing them takes long."""
    if config.option.markexpr != "slow" or collection_path.suffix != ".py" or SLOW & set(collection_path.parents):
        return None
    return True if re.search(r"\bslow\b", collection_path.read_text()) is None else None


@pytest.hookimpl(tryfirst=True)  # before ``-m`` looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow_files = {path for path in {item.path for item in items} if SLOW & set(path.parents)}
    for item in items:
        if item.path in slow_files:
            item.add_marker("slow")
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow and config.stash[LEFT] >= 0:
        config.stash[LEFT] = len(slow)
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: place_of(item.nodeid.partition("::")[0]))


@functools.cache  # thousands of tests are in hundreds of files
def place_of(file: str) -> tuple[int, int]:
    """Return the place of a file's tests in the order: its share, and its index in ``LONG`` or the length of ``LONG``."""
    return share_of(file), next((n for n, name in enumerate(LONG) if file.startswith(name)), len(LONG))


@functools.cache
def share_of(file: str) -> int:
    """Return the index of a file's share in ``USE_KERAS``; the length of ``USE_KERAS`` if no share has the file."""
    return next((n for n, names in enumerate(USE_KERAS) if file.startswith(names)), len(USE_KERAS))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith("tests/benchmarks/"):  # its tests take minutes and share nothing
                return nodeid
            file = nodeid.partition("::")[0]
            share = share_of(file)
            return f"keras {share}" if share < len(USE_KERAS) else file

    return ByFile(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["left"] = node.config.stash[LEFT]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left"] = session.config.stash[LEFT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[LEFT] = getattr(node, "workeroutput", {}).get("left", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.stash[LEFT] > 0:
        terminalreporter.write_line(
            f"{config.stash[LEFT]} slow tests, trials and tests of benchmarks are left to scripts/test --all"
        )


@pytest.fixture(scope="module", autouse=True)
def freeze_existing_objects() -> None:
    """Exempt existing objects, such as the modules of Keras, from the garbage collections that many tests ask for."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def own_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the tokens that a test put into the environment: the program remembers them, and the next test must not see them."""
    monkeypatch.setattr(tokens, "_FROM_ENVIRONMENT", dict(tokens._FROM_ENVIRONMENT))


@pytest.fixture(scope="session", autouse=True)
def own_folders(pytestconfig: pytest.Config) -> Iterator[Path]:
    """Set up folders for this run of the tests only, and an environment like the one of most users."""
    get_temp_dir()  # multiprocessing removes its own folder at the end of this process, after this fixture
    root = Path(tempfile.mkdtemp(prefix="ddlf-tests-"))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CONFIG", "STATE", "CACHE", "DATA"):
            (root / name.lower()).mkdir()
            patch.setenv(f"XDG_{name}_HOME", str(root / name.lower()))
        (root / "site-packages").mkdir()  # DDLF does not send modules in a folder of this name to workers
        shutil.copy(unasked.__file__, root / "site-packages" / "sitecustomize.py")
        patch.setenv("PYTHONPATH", str(root / "site-packages"), prepend=os.pathsep)
        (root / "tmp").mkdir()
        patch.setenv("TMPDIR", str(root / "tmp"))
        patch.setattr(tempfile, "tempdir", str(root / "tmp"))
        for name in ("CI", "DDLF_CONFIG", "DDLF_TOKEN", "DDLF_TOKEN_FILE", "DDLF_UI", "PYTHONUNBUFFERED"):
            patch.delenv(name, raising=False)
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # XLA's optimizations take longer than they save in tests
        if pytestconfig.option.markexpr != "slow":  # slow tests compute and start workers as users do
            patch.setenv("PLAIN_GRAPHS", "1")
            if sys.platform == "linux":
                patch.setattr(subprocess, "_fork_exec", warm.fork_exec)
        patch.setenv("DDLF_RUN_DIR", "none")  # runs of tests write no folders of runs into the current folder
        yield root
        warm.end()
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def new_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start daemons and templates as users do, not as forks: for tests of what is in such a process."""
    monkeypatch.setattr(subprocess, "_fork_exec", warm.new_process)


@pytest.fixture
def cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cards]:
    """Let this machine seem to have two cards, for one test: a stand-in replaces NVML."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    sys.modules.pop("pynvml", None)
    yield Cards(tmp_path / "cards", monkeypatch)
    sys.modules.pop("pynvml", None)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def session_cluster(own_folders: Path) -> AsyncIterator[Cluster]:
    """Return two local workers that live as long as the tests. Use ``cluster``, which resets them after each test."""
    async with Cluster.local(2) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="session")
async def cluster(session_cluster: Cluster) -> AsyncIterator[Cluster]:
    """Return two connected workers without methods, variables and data. Tests with it run on the session's event loop."""
    yield session_cluster
    await session_cluster.connect()
    await session_cluster.clean()
    for name in {name for names in await session_cluster.methods() for name in names}:
        await session_cluster.options(on_error="return").remove_method(name)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def two_workers(standing_template: Standing) -> AsyncIterator[Cluster]:
    """Return two local workers for all tests that train, because importing Keras takes longer than most tests.

    Do not import this fixture: pytest would start two more workers.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "start_template", standing_template.instead(local.start_template))
        cluster = await Cluster.local(2).connect()
    async with cluster:
        yield cluster


@pytest.fixture(scope="session")
def standing_template(own_folders: Path) -> Iterator[Standing]:
    """Return a template process that has imported Keras. Use ``one_template``."""
    standing = Standing.of_keras()
    yield standing
    standing.end()


@pytest.fixture
def one_template(standing_template: Standing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the workers of a test from one process that has imported Keras: a new template would take seconds."""
    monkeypatch.setattr(local, "start_template", standing_template.instead(local.start_template))
    monkeypatch.setattr(Workers, "template", standing_template)


@dataclass
class WorkerProcess:
    """A ``ddlf-worker`` process that one test has started."""

    process: subprocess.Popen[bytes]
    port: int
    token_file: Path
    state_dir: Path
    log: Path

    @property
    def output(self) -> str:
        """The output of the process up to now."""
        return self.log.read_text(errors="replace")

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, wait for the end and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)


@pytest.fixture(scope="session")
def token_file(own_folders: Path) -> Path:
    """Return the file with the token of the workers of ``start_worker``."""
    path = own_folders / "token"
    path.write_text(f"{new_token()}\n")
    path.chmod(0o600)
    return path


@pytest.fixture(scope="session")
def bare_template(own_folders: Path) -> Iterator[Standing]:
    """Return the template process for the executors of ``start_worker``."""
    standing = Standing.bare()
    yield standing
    standing.end()


@pytest.fixture
def one_bare_template(bare_template: Standing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the executors of local workers from one process that has imported their modules, but not Keras."""
    monkeypatch.setattr(local, "start_template", bare_template.instead(local.start_template))


@pytest.fixture
def start_worker(tmp_path: Path, token_file: Path, bare_template: Standing) -> Iterator[Callable[..., WorkerProcess]]:
    """Return a function that starts ``ddlf-worker`` like a person would. The workers end after the test."""
    with starting_workers(tmp_path, token_file, bare_template) as start:
        yield start


@pytest.fixture(scope="module")
def standing_workers(
    tmp_path_factory: pytest.TempPathFactory, token_file: Path, bare_template: Standing
) -> Iterator[list[WorkerProcess]]:
    """Return two such workers for all tests of a module. Each test must restore their state."""
    with starting_workers(tmp_path_factory.mktemp("standing"), token_file, bare_template) as start:
        yield [start(), start()]


@contextlib.contextmanager
def starting_workers(folder: Path, token_file: Path, template: Standing) -> Iterator[Callable[..., WorkerProcess]]:
    started: list[WorkerProcess] = []

    def start(*arguments: str, port: int = 0, state_dir: Path | None = None, **environment: str) -> WorkerProcess:
        state = state_dir or folder / f"state-{len(started)}"
        log = folder / f"worker-{len(started)}.log"
        environment = {**os.environ, **environment}
        shared = [template.fileno()] if template.suits(environment) else []
        read_fd, write_fd = os.pipe()
        with log.open("wb") as output:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "ddlf.cli.worker", "--port", str(port), "--token-file", str(token_file)),
                    # Workers of tests listen on loopback only. If `arguments` has the option too, the last one wins.
                    *("--host", "127.0.0.1", "--state-dir", str(state), "--ready-fd", str(write_fd), *arguments),
                    *(f"--template-fd={fd}" for fd in shared),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(write_fd, *shared),
                env=environment,
                start_new_session=True,
            )
        os.close(write_fd)
        with open(read_fd) as pipe:
            line = pipe.readline()
        worker = WorkerProcess(process, json.loads(line)["port"] if line else 0, token_file, state, log)
        started.append(worker)
        return worker

    yield start
    for worker in started:
        worker.end()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningDaemon]:
    """Return a daemon in this process for all tests of a module. These tests run on the module's event loop."""
    daemon = RunningDaemon(tmp_path_factory.mktemp("state"))
    await asyncio.wait_for(daemon.ready.wait(), PATIENCE_S)
    yield daemon
    await daemon.end()


@pytest.fixture
def free_port() -> int:
    """Return a free port of loopback."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@pytest.fixture
def descendants() -> Iterator[Callable[[], list[psutil.Process]]]:
    """Return a function that lists the child processes that a test has started. After the test, kill the remaining ones."""
    before = set(psutil.Process().children(recursive=True))

    def find() -> list[psutil.Process]:
        children = psutil.Process().children(recursive=True)
        return [process for process in children if process not in before and process.pid != warm.pid()]

    yield find
    for process in find():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
