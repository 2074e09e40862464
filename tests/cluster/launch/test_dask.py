"""Tests of the launcher for Dask, with a stand-in for Dask's client."""

import asyncio
import contextlib
import sys
from types import SimpleNamespace

import pytest

from ddlf.cluster.cluster import Cluster
from ddlf.cluster.launch.dask import Dask, DaskKeys, run_worker
from ddlf.cluster.launch.launcher import Cause, Left, Workers, from_keys, installed
from ddlf.cluster.launch.supervisor import Supervisor, WorkerStart
from ddlf.errors import ConfigError, ConnectError
from tests.patience import PATIENCE_S


class ClosedClientError(Exception):
    """Dask's error about a client without its scheduler."""


class FutureCancelledError(Exception):
    """Dask's error about cancelled tasks and about tasks of a lost scheduler."""


class Client:
    """A client that runs tasks like ``run_worker`` in a Dask worker, or ends them in the way that a test chooses.

    Args:
        engine: The stand-in.
    """

    def __init__(self, engine):
        self.engine = engine
        self.status = "running"
        engine.clients.append(self)
        self.scheduler = SimpleNamespace(address="tcp://scheduler:8786", identity=self.identity)

    async def identity(self, n_workers):
        return {"workers": self.engine.workers}

    async def processing(self):
        return self.engine.processing

    def subscribe_topic(self, topic, handler):
        self.engine.hear = handler

    def submit(self, function, worker, *, key, **options):
        if self.status == "closed":
            raise ClosedClientError("Client is closed. Can't send update-graph message.")
        self.engine.submitted.append((worker, key, options))
        return asyncio.get_running_loop().create_task(self.engine.end(key))

    async def cancel(self, tasks, force):
        self.engine.cancelled += tasks
        if self.engine.is_gone:
            await asyncio.Event().wait()

    def unsubscribe_topic(self, topic):
        if self.status == "closed":
            raise ClosedClientError("Client is closed. Can't send unsubscribe-topic message.")

    async def close(self):
        self.engine.is_closed = True


class Engine:
    """The stand-in for the package ``distributed``."""

    def __init__(self):
        self.workers = {}
        self.processing = {}
        self.submitted = []
        self.cancelled = []
        self.current = None
        self.configured = None
        self.dialled = []
        self.clients = []
        self.refuses = False
        self.is_closed = False
        self.is_gone = False

    async def end(self, key):
        """End a task. Tests replace this method."""
        await asyncio.Event().wait()

    def module(self):
        async def connect(address, **options):
            self.dialled.append((address, options.get("security")))
            if self.refuses:
                raise OSError("Timed out")
            return Client(self)

        config = SimpleNamespace(get=lambda name, default: self.configured)
        inner = SimpleNamespace(_get_global_client=lambda: self.current, dask=SimpleNamespace(config=config))
        return SimpleNamespace(Client=connect, client=inner)


@pytest.fixture
def engine(monkeypatch):
    stand_in = Engine()
    monkeypatch.setattr("ddlf.cluster.launch.engine.END_S", 0.1)  # the tasks of the stand-in do not end by themselves
    monkeypatch.setitem(sys.modules, "distributed", stand_in.module())
    return stand_in


def dask_launcher(workers=1, **keys):
    return Dask(DaskKeys(**{"workers": Workers.of(workers), "scheduler": "tcp://s:1", "start_timeout": 0.2, **keys}))


async def error_of(launcher):
    with pytest.raises(ConnectError) as caught:
        await asyncio.wait_for(Cluster(launcher).connect(), PATIENCE_S)
    return caught.value.message


@contextlib.asynccontextmanager
async def starting(engine, launcher):
    """Begin a start: the scheduler has all tasks, but no worker joins. The start is cancelled at the end of the block."""
    connecting = asyncio.create_task(Cluster(launcher).connect())
    async with asyncio.timeout(PATIENCE_S):
        while len(engine.submitted) < len(launcher.addresses):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    try:
        yield
    finally:
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
        await launcher.stop()


def test_keys_come_from_a_text_and_from_a_mapping():
    launcher = installed("dask:scheduler=tcp://s:1,resources.GPU=1,resources.MEM=2e9,cores=2,env.A=b", Workers(2, 8))
    assert launcher.keys.resources == {"GPU": 1, "MEM": 2e9}
    assert (launcher.keys.cores, launcher.keys.env, launcher.least) == (2, {"A": "b"}, 2)
    assert from_keys("dask", {"workers": 3, "resources": {"GPU": 1}}).keys.resources == {"GPU": 1}
    with pytest.raises(ConfigError, match=r"launcher dask: env must have names .*, got 'A-B'"):
        installed("dask:env.A-B=c", Workers(1, 1))
    with pytest.raises(ConfigError, match=r"launcher dask: resources must be above 0, got '0'"):
        installed("dask:resources.GPU=0", Workers(1, 1))


async def test_without_dask_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ConfigError, match="launcher dask: Dask is not installed here") as caught:
        await Cluster(dask_launcher()).connect()
    assert caught.value.hint == "pip install distributed"


async def test_scheduler_comes_from_the_key_the_client_or_the_environment(engine):
    with pytest.raises(ConfigError, match="no scheduler is known"):
        await Cluster(dask_launcher(scheduler=None)).connect()
    engine.configured = "tcp://configured:1"
    await error_of(dask_launcher(scheduler=None))
    engine.current = SimpleNamespace(scheduler=SimpleNamespace(address="tcp://current:1"), security="TLS")
    await error_of(dask_launcher(scheduler=None))
    await error_of(dask_launcher(scheduler="tcp://key:1"))
    assert engine.dialled == [("tcp://configured:1", None), ("tcp://current:1", "TLS"), ("tcp://key:1", None)]


async def test_each_place_is_one_task_which_is_cancelled_at_the_end(engine):
    launcher = dask_launcher(2, resources={"GPU": 1}, cores=3, env={"A": "b"}, start_timeout=PATIENCE_S)
    async with starting(engine, launcher):
        pass
    assert [worker.place for worker, _, _ in engine.submitted] == [0, 1]
    for worker, _, options in engine.submitted:
        assert (worker.cores, worker.env) == (3, {"A": "b"})
        assert (options["resources"], options["pure"]) == ({"GPU": 1}, False)
        assert launcher.tokens.primary.decode() not in repr(worker)
    assert len(engine.cancelled) == 2
    assert engine.is_closed


async def test_run_ends_without_its_scheduler(engine, monkeypatch):
    monkeypatch.setattr("ddlf.cluster.launch.dask.ANSWER_S", 0.1)
    engine.is_gone = True
    async with starting(engine, dask_launcher(2, start_timeout=PATIENCE_S)):
        pass
    assert len(engine.cancelled) == 2
    assert engine.is_closed


async def test_lost_scheduler_is_reported_once_and_dialled_again(engine, caplog, monkeypatch):
    monkeypatch.setattr("ddlf.cluster.launch.engine.PAUSES_S", (0.01, 0.01))

    async def end(key):
        client = engine.clients[-1]
        while client.status == "running":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        raise FutureCancelledError("scheduler-connection-lost")

    async def submitted(count):
        async with asyncio.timeout(PATIENCE_S):
            while len(engine.submitted) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    engine.end = end
    launcher = dask_launcher(2, start_timeout=PATIENCE_S)
    connecting = asyncio.create_task(Cluster(launcher).connect())
    await submitted(2)
    launcher.gate.has_begun = True
    engine.refuses, engine.clients[-1].status = True, "closed"
    async with asyncio.timeout(PATIENCE_S):
        while len(engine.dialled) < 5:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    for place in (0, 1):
        assert await launcher.left(place) == Left(Cause.NODE, "no Dask scheduler answers at tcp://s:1")
        messages = (
            f"place {place}: the Dask scheduler tcp://s:1 is gone (node lost); starting it again",
            f"place {place}: no Dask scheduler answers at tcp://s:1 (node lost); starting it again",
        )
        assert [caplog.text.count(words) for words in messages] == [1, 1]
    engine.refuses = False
    await submitted(4)
    assert engine.hear.__self__ is launcher
    assert len(engine.clients) == 2
    engine.clients[-1].status = "closed"
    engine.refuses = True
    connecting.cancel()
    await asyncio.gather(connecting, return_exceptions=True)
    await launcher.stop()  # works although Dask's client is closed
    assert engine.is_closed


async def test_place_whose_worker_outlives_the_scheduler_gets_no_second_worker(engine, caplog, monkeypatch):
    lost = asyncio.Event()

    async def end(key):
        await lost.wait()
        raise FutureCancelledError("scheduler-connection-lost")

    engine.end = end
    launcher = dask_launcher(2, start_timeout=PATIENCE_S)
    connecting = asyncio.create_task(Cluster(launcher).connect())
    async with asyncio.timeout(PATIENCE_S):
        while len(engine.submitted) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        gate, waits, ends = launcher.gate, [], asyncio.Event()

        async def wait_until_gone(place, after, for_s):
            waits.append((place, after))
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(ends.wait(), asyncio_loop))

        asyncio_loop = asyncio.get_running_loop()
        monkeypatch.setattr(gate, "wait_until_gone", wait_until_gone)
        gate.has_begun = True
        gate._states[0].incarnation = 7
        engine.refuses, engine.clients[-1].status = True, "closed"
        gate._loop.call_soon_threadsafe(lost.set)
        while (0, 0) not in waits or len(engine.dialled) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert waits == [(0, 0)], "place 1 has no worker that could stay"
    assert caplog.text.count("is gone; the training continues with the workers that still run") == 1
    connecting.cancel()
    await asyncio.gather(connecting, return_exceptions=True)
    await launcher.stop()


HAS = {"resources": {"GPU": 1}, "nthreads": 1}


@pytest.mark.parametrize(
    ("workers", "resources", "words"),
    [
        ({}, {}, "the scheduler tcp://scheduler:8786 has no Dask workers"),
        ({"a": HAS}, {"GPU": 2}, "its task is unrunnable, because none of the 1 Dask workers has the resources GPU=2"),
        ({"a": HAS, "b": HAS}, {"GPU": 1}, "its task waits for one of the 2 Dask workers"),
    ],
)
async def test_error_says_what_the_scheduler_lacks(engine, workers, resources, words):
    engine.workers = workers
    assert (await error_of(dask_launcher(resources=resources))).endswith(words)


async def test_error_says_where_a_task_waits(engine):
    engine.workers = {"tcp://a:1": HAS}
    launcher = dask_launcher(start_timeout=PATIENCE_S)
    async with starting(engine, launcher):
        engine.processing = {"tcp://a:1": ["another", engine.submitted[0][1]]}
        assert await launcher.waits(0) == "its task is at the Dask worker tcp://a:1, which has 2 tasks and nthreads=1"


async def test_task_behind_another_moves_to_a_free_dask_worker(engine, monkeypatch):
    monkeypatch.setattr("ddlf.cluster.launch.dask.LOOK_S", 0.01)
    engine.workers = {"tcp://a:1": HAS}
    launcher = dask_launcher(start_timeout=PATIENCE_S)
    async with starting(engine, launcher):
        engine.processing = {"tcp://a:1": ["another", engine.submitted[0][1]]}
        await asyncio.sleep(0.1)
        assert len(engine.submitted) == 1  # no other Dask worker is free
        engine.workers = {"tcp://a:1": HAS, "tcp://b:1": HAS}
        async with asyncio.timeout(PATIENCE_S):
            while len(engine.submitted) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert len(engine.cancelled) == 1
        assert list(launcher._tasks) == [engine.submitted[1][1]]


class KilledWorker(Exception):
    """An error with the name of Dask's error."""


@pytest.mark.parametrize(
    ("outcome", "left"),
    [
        ((3, "tcp://a:1"), Left(Cause.CRASH, "its worker ended with exit code 3: see the output of tcp://a:1", 3)),
        (KilledWorker("died"), Left(Cause.NODE, "Dask has given its task up: KilledWorker: died")),
        (
            ModuleNotFoundError("No module named 'ddlf'"),
            Left(Cause.CRASH, "Dask has given its task up: ModuleNotFoundError: No module named 'ddlf'"),
        ),
    ],
    ids=["exit code", "Dask worker", "no DDLF there"],
)
async def test_task_that_ends_again_and_again_fails_the_start(engine, outcome, left):
    async def end(key):
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    engine.end = end
    launcher = dask_launcher(start_timeout=PATIENCE_S)
    assert await error_of(launcher) == f"place 0: {left.words}"
    assert len(engine.submitted) == 3


@pytest.mark.slow
async def test_loss_of_a_dask_worker_is_known(engine, caplog):
    launcher = dask_launcher(2, start_timeout=PATIENCE_S)
    async with starting(engine, launcher):
        removal = {"action": "remove-worker", "worker": "tcp://a:1", "expected": False, "processing-tasks": ["x"]}
        engine.hear((0.0, removal))
        engine.hear((0.0, {"action": "add-worker"}))
        assert await launcher.left(1) is None
        engine.hear((0.0, removal | {"processing-tasks": ["x", engine.submitted[1][1]]}))
        assert await launcher.left(1) == Left(Cause.NODE, "the Dask worker tcp://a:1 is gone")
        assert "place 1: the Dask worker tcp://a:1 is gone; Dask runs its task elsewhere" in caplog.text
        engine.hear((0.0, removal | {"processing-tasks": [engine.submitted[1][1]], "expected": True}))
        assert (await launcher.left(1)).cause is Cause.NOTICE
        assert await launcher.left(0) is None
        launcher.gate._states[1].incarnation += 1
        assert await launcher.left(1) is None, "another worker is there"


@pytest.mark.parametrize(
    ("state", "status", "is_over"),
    [
        ("executing", "running", False),
        ("executing", "closing_gracefully", False),
        ("cancelled", "running", True),
        (None, "running", True),
        ("executing", "closing", True),
    ],
)
def test_worker_ends_with_its_task_and_its_dask_worker(monkeypatch, state, status, is_over):
    tasks = {} if state is None else {"key": SimpleNamespace(state=state)}
    dask = SimpleNamespace(
        get_current_task=lambda: "key",
        state=SimpleNamespace(tasks=tasks, nthreads=7),
        status=SimpleNamespace(name=status),
        address="tcp://a:1",
        nanny=None,
        log_event=None,
    )
    monkeypatch.setitem(sys.modules, "distributed", SimpleNamespace(get_worker=lambda: dask))
    started = []

    def init(self, worker):
        started.append(worker)

    monkeypatch.setattr(Supervisor, "__init__", init)
    monkeypatch.setattr(Supervisor, "run", lambda self, over: int(over()))
    assert run_worker(WorkerStart("h:1", 0, b"secret")) == (int(is_over), "tcp://a:1")
    assert run_worker(WorkerStart("h:1", 0, b"secret", cores=2)) == (int(is_over), "tcp://a:1")
    assert [worker.cores for worker in started] == [7, 2]


def test_worker_hands_its_work_over_before_its_nanny_kills_it(monkeypatch):
    dask = SimpleNamespace(
        get_current_task=lambda: "key",
        state=SimpleNamespace(tasks={"key": SimpleNamespace(state="executing")}, nthreads=1),
        status=SimpleNamespace(name="closing"),
        address="tcp://a:1",
        nanny="tcp://a:2",
        log_event=None,
    )
    monkeypatch.setitem(sys.modules, "distributed", SimpleNamespace(get_worker=lambda: dask))
    ends = []
    monkeypatch.setattr(Supervisor, "leave", lambda self, within_s: ends.append(within_s))
    monkeypatch.setattr(Supervisor, "run", lambda self, over: int(over()))
    run_worker(WorkerStart("h:1", 0, b"secret"))
    assert ends == [3.0]


@pytest.mark.parametrize(
    ("reason", "ends"),
    [("worker-handle-scheduler-connection-broken", "stays"), ("scheduler-close", "leaves within 3.0 s")],
)
def test_worker_survives_if_its_dask_worker_ends_because_of_a_lost_scheduler(monkeypatch, reason, ends):
    logged, actions = [], []
    dask = SimpleNamespace(
        get_current_task=lambda: "key",
        state=SimpleNamespace(tasks={"key": SimpleNamespace(state="executing")}, nthreads=1),
        status=SimpleNamespace(name="running"),
        address="tcp://a:1",
        nanny="tcp://a:2",
        log_event=lambda topic, message: logged.append(topic),
    )

    def run(self, over):
        assert not over()
        dask.log_event("another topic", "a text")
        dask.log_event("tcp://a:1", {"action": "closing-worker", "reason": reason})
        dask.status.name = "closing"
        assert over()
        return 0

    monkeypatch.setitem(sys.modules, "distributed", SimpleNamespace(get_worker=lambda: dask))
    monkeypatch.setattr(Supervisor, "run", run)
    monkeypatch.setattr(Supervisor, "stay", lambda self: actions.append("stays"))
    monkeypatch.setattr(Supervisor, "leave", lambda self, within_s: actions.append(f"leaves within {within_s} s"))
    run_worker(WorkerStart("h:1", 0, b"secret"))
    assert actions == [ends]
    assert logged == ["another topic", "tcp://a:1"]
