"""Workers in actors of a real Ray, with several nodes on this machine."""

import asyncio
import contextlib
import hashlib
import inspect
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ddlf.cluster.cluster import Cluster
from ddlf.cluster.launch.launcher import Cause, Workers
from ddlf.cluster.launch.ray import Rayed, RayKeys
from ddlf.errors import ConnectError, WorkerLost
from ddlf.worker.machine import cores
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.filterwarnings("default")  # Ray warns about its own future
NODES = 3
STORE = dict(object_store_memory=80 << 20)
"""The smallest object store that Ray accepts."""


class Nodes:
    """A Ray with a head node without CPUs, and some nodes of one CPU each."""

    def __init__(self):
        from ray.cluster_utils import Cluster as RayCluster

        head = dict(num_cpus=0, include_dashboard=False, **STORE)
        self.ray = RayCluster(initialize_head=True, head_node_args=head)
        self.own = [self.add() for _ in range(NODES)]

    def add(self):
        return self.ray.add_node(num_cpus=1, **STORE)

    def remove(self, node_id):
        """Kill the processes of a node, and start another one in its place."""
        index = next(index for index, node in enumerate(self.own) if node.node_id == node_id)
        self.own.append(self.add())
        self.ray.remove_node(self.own.pop(index), allow_graceful=False)

    def drain(self, node_id, for_s):
        from ray._raylet import GcsClient
        from ray.core.generated.autoscaler_pb2 import DrainNodeReason

        reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        end_ms = int((time.time() + for_s) * 1000)
        accepted, _ = GcsClient(address=self.ray.gcs_address).drain_node(node_id, reason, "a test", end_ms)
        assert accepted


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        # A path of a socket has at most 107 bytes.
        patch.setenv("RAY_TMPDIR", str(Path("/tmp") / f"ddlf-ray-{os.getpid()}"))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        patch.delenv("RAY_ADDRESS", raising=False)
        os.makedirs(os.environ["RAY_TMPDIR"], exist_ok=True)
        found = Nodes()
        patch.setenv("RAY_ADDRESS", found.ray.address)
        yield found
        found.ray.shutdown()


def rayed(workers, **keys):
    return Rayed(RayKeys(workers=Workers.of(workers), **keys))


def about(self):
    """Return the number of a worker, its cores, and a variable of its environment."""
    return self.id, cores(), os.environ["GREETING"]


def number(self):
    return self.id


async def until(get):
    """Wait until a function, which may be async, returns a true value, and return it."""
    while True:
        found = get()
        if found := await found if inspect.isawaitable(found) else found:
            return found
        await asyncio.sleep(0.05)


async def numbers(cluster, expected):
    """Wait until these workers answer."""
    while True:
        with contextlib.suppress(WorkerLost, ConnectError):
            for worker in cluster.workers:
                if not worker.connected:
                    await worker.reconnect()
            if await cluster.run_method(number) == expected:
                return


async def left(cluster, index):
    """Wait until the worker at a place has ended, and return why."""
    return await until(lambda: cluster._launcher.left(index))


def processes(is_one):
    """Return the processes of this Ray for which a function of the arguments is true."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if is_one(process.cmdline()) and process.environ().get("RAY_TMPDIR") == os.environ["RAY_TMPDIR"]:
                found.append(process)
    return found


def worker_processes():
    return processes(lambda words: "ddlf.cli.worker" in words and "--place" in words)


def actor_processes():
    return processes(lambda words: bool(words) and words[0].startswith("ray::WorkerActor"))


async def test_workers_have_their_places_cores_and_variables(nodes):
    launcher = rayed(3, env={"GREETING": "hello"})
    async with asyncio.timeout(PATIENCE_S), Cluster(launcher) as cluster:
        assert await cluster.run_method(about) == [(n, 1, "hello") for n in (1, 2, 3)]
        assert all("OMP_NUM_THREADS" not in worker.environ() for worker in worker_processes())
        assert len({node for node, _ in launcher._places.values()}) == 3
    assert worker_processes() == []


async def test_run_begins_with_few_workers_and_has_a_place_for_each(nodes):
    async with asyncio.timeout(PATIENCE_S), Cluster(rayed("2..4", start_timeout=20)) as cluster:
        assert len(await cluster.run_method(number)) >= 2

        async def one_waits():
            reasons = [await cluster._launcher.waits(index) for index in range(4)]
            return any("pending: {CPU: 1} is not free" in reason for reason in reasons)

        await until(one_waits)


def files_with(secret, folder):
    return [path for path in folder.rglob("*") if path.is_file() and secret in path.read_bytes()]


async def test_token_is_in_no_argument_environment_or_log(nodes):
    import ray

    launcher = rayed(2)
    secret = launcher.tokens.primary
    async with asyncio.timeout(PATIENCE_S), Cluster(launcher) as cluster:
        assert await cluster.run_method(number) == [1, 2]
        session = Path(ray._private.worker._global_node.get_session_dir_path())
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                assert secret.decode() not in " ".join([*process.cmdline(), *process.environ().values()])
    assert files_with(secret, session) == []


async def test_killed_worker_is_replaced(nodes):
    async with asyncio.timeout(PATIENCE_S), Cluster(rayed(2)) as cluster:
        assert await cluster.run_method(number) == [1, 2]
        worker_processes()[0].kill()
        await numbers(cluster, [1, 2])


async def test_killed_actor_is_replaced(nodes):
    async with asyncio.timeout(PATIENCE_S), Cluster(rayed(2)) as cluster:
        assert await cluster.run_method(number) == [1, 2]
        worker = next(found for found in worker_processes() if "--place 0" in " ".join(found.cmdline()))
        worker.parent().kill()
        why = await left(cluster, 0)
        assert why.cause is Cause.CRASH
        assert why.words.startswith("The actor is dead because its worker process has died")
        await numbers(cluster, [1, 2])


async def test_worker_of_a_lost_node_runs_on_another_one(nodes):
    async with asyncio.timeout(PATIENCE_S), Cluster(rayed(2)) as cluster:
        assert await cluster.run_method(number) == [1, 2]
        node, _ = cluster._launcher._places[1]
        nodes.remove(node)
        why = await left(cluster, 1)
        assert why.cause is Cause.NODE
        await numbers(cluster, [1, 2])
        assert cluster._launcher._places[1][0] != node


async def test_drained_node_is_left_before_it_ends(nodes):
    async with asyncio.timeout(PATIENCE_S), Cluster(rayed(2)) as cluster:
        assert await cluster.run_method(number) == [1, 2]
        node, _ = cluster._launcher._places[0]
        nodes.drain(node, for_s=PATIENCE_S)
        why = await left(cluster, 0)
        assert why.cause is Cause.NOTICE
        assert re.fullmatch(r"Ray drains its node, which ends in \d+ s", why.words)
        await numbers(cluster, [1, 2])
        assert cluster._launcher._places[0][0] != node
    nodes.remove(node)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"cores": 64}, r"infeasible: no node has \{CPU: 64\}; all nodes together have \{CPU: \d, memory: .* GiB\}"),
        ({"resources": {"TPU": 4}}, r"infeasible: no node has \{CPU: 1, TPU: 4\}; .*"),
    ],
    ids=["cores", "resource"],
)
async def test_error_says_which_resources_are_missing(nodes, keys, words):
    with pytest.raises(ConnectError, match=rf"no worker joined at port \d+ within 1 s: {words}"):
        await asyncio.wait_for(Cluster(rayed(2, start_timeout=1, **keys)).connect(), PATIENCE_S)
    assert worker_processes() == []


@pytest.mark.parametrize(
    ("address", "where"),
    [("127.0.0.1:1", r"at RAY_ADDRESS=127.0.0.1:1: .*refused"), (None, r"at [\d.]+:1: .*refused")],
    ids=["named", "of a Ray that was killed"],
)
async def test_error_says_how_to_start_ray(nodes, monkeypatch, address, where):
    import ray

    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr(ray._private.services, "find_gcs_addresses", list)
    monkeypatch.setattr(ray._private.services, "find_bootstrap_address", lambda folder: "127.0.0.1:1")
    if address:
        monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConnectError, match=f"cannot connect to Ray {where}") as caught:
        await asyncio.wait_for(Cluster(rayed(2)).connect(), PATIENCE_S)
    assert "ray start --head" in caught.value.hint


async def test_last_output_of_a_worker_is_in_the_error(nodes):
    launcher = rayed(1, env={"PYTHONHOME": "/nowhere"})
    with pytest.raises(ConnectError, match=r"(?s)place 0: its worker ended with exit code 1:.*No module named"):
        await asyncio.wait_for(Cluster(launcher).connect(), PATIENCE_S)


class Caller:
    """An actor in a placement group, which is a master. A trial of Ray Tune is one."""

    def train(self, **keys):
        async def run():
            async with Cluster.on("ray", **keys) as cluster:
                return await cluster.run_method(number)

        return asyncio.run(run())


@pytest.fixture
def caller(nodes):
    """Return a function that calls ``Caller.train`` in the first of some bundles."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    groups = []

    def call(bundles, **keys):
        groups.append(ray.util.placement_group(bundles))
        ray.get(groups[-1].ready())
        strategy = PlacementGroupSchedulingStrategy(groups[-1], 0, placement_group_capture_child_tasks=True)
        actor = ray.remote(Caller).options(num_cpus=0, scheduling_strategy=strategy).remote()
        return ray.get(actor.train.remote(**keys))

    yield call
    for group in groups:
        ray.util.remove_placement_group(group)
    ray.shutdown()


def test_workers_use_the_bundles_of_the_callers_group(caller):
    assert caller([{"CPU": 1}, {"CPU": 1}], workers=2) == [1, 2]


def test_error_says_that_the_group_has_no_bundle_left(caller):
    words = r"pending: no bundle of the placement group has \{CPU: 1\} free; its bundles are \{CPU: 1\}"
    with pytest.raises(ConnectError, match=f"2  place 1 .*no worker has joined there yet: {words}"):
        caller([{"CPU": 1}], workers=2, start_timeout=6)


def test_error_says_that_no_bundle_is_large_enough(caller):
    with pytest.raises(ConnectError, match="cannot fit into any bundles"):
        caller([{"CPU": 1}], workers=1, cores=2)


def test_page_about_tune_does_what_it_says(nodes, tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs/howto/deploy.md").read_text()
    (program,) = re.findall(r"```python\n(# tune_app.py\n.*?)```", page, re.DOTALL)
    (tmp_path / "tune_app.py").write_text(program)
    monkeypatch.setenv("HOME", str(tmp_path))  # Tune writes there
    ended = subprocess.run([sys.executable, "tune_app.py"], cwd=tmp_path, text=True, capture_output=True)
    assert ended.returncode == 0, ended.stderr
    assert "'training_iteration': 3" in ended.stdout
    assert "'round': 3" in ended.stdout


APP = """
import numpy as np
import ddlf


class Small(ddlf.IApp):
    batch_size = 32
    master_epochs = 2
    seed = 3
    slots = 4
    threads = 1

    async def load_dataset(self):
        numbers = np.random.default_rng(0)
        self.x_train = numbers.normal(size=(512, 8)).astype("float32")
        self.y_train = np.eye(2, dtype="float32")[(self.x_train.sum(1) > 0).astype(int)]

    async def create_model(self):
        import keras

        layers = [keras.Input((8,)), keras.layers.Dense(16, "tanh"), keras.layers.Dropout(0.3)]
        self.model = keras.Sequential([*layers, keras.layers.Dense(2, "softmax")])
        self.model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "categorical_crossentropy")
"""


def started(tmp_path, *options):
    (tmp_path / "app.py").write_text(APP)
    return subprocess.Popen(
        [sys.executable, "-m", "ddlf.cli.main", "run", "app.py", *options],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_same_weights_as_on_this_machine(nodes, tmp_path):
    saved = []
    for name, options in (("local", ["--local", "2"]), ("ray", ["--launcher", "ray", "--workers", "2"])):
        process = started(tmp_path, *options, "--save", f"{name}.safetensors")
        said, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, said
        saved.append(hashlib.sha256((tmp_path / f"{name}.safetensors").read_bytes()).hexdigest())
    assert saved[0] == saved[1]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
async def test_nothing_remains_when_the_master_ends(nodes, tmp_path, number):
    process = started(tmp_path, "--launcher", "ray", "--workers", "2", "-p", "master_epochs=100000")
    try:
        async with asyncio.timeout(PATIENCE_S):
            await until(lambda: len(worker_processes()) == 2)
            process.send_signal(number)
            await until(lambda: not worker_processes() and not actor_processes())
    finally:
        process.kill()
        process.communicate()


async def test_check_compares_the_nodes_with_the_workers(nodes):
    async with asyncio.timeout(PATIENCE_S):
        assert [check for check in [check async for check in rayed(1).check()] if check.do] == []
        (problem,) = [check async for check in rayed(1, cores=64).check() if check.do]
    assert problem.fact.startswith("infeasible: no node has {CPU: 64}")
