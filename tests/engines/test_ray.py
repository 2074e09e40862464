"""Tests of workers in actors of a real Ray, with several nodes on this machine."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddlf.cluster.cluster import Cluster
from ddlf.cluster.launch.launcher import Cause, Workers
from ddlf.cluster.launch.ray import Rayed, RayKeys
from ddlf.errors import ConnectError
from ddlf.worker.machine import cores
from tests.engines.ray_nodes import Nodes
from tests.engines.running import (
    assert_hidden,
    is_alive,
    left,
    number,
    numbers,
    processes,
    replaced,
    started,
    until_ended,
    weights_after,
    workers_of,
)
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.filterwarnings("default")  # Ray warns about its own later changes
NODES = 3


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        # A path of a socket has at most 107 bytes.
        patch.setenv("RAY_TMPDIR", str(Path("/tmp") / f"ddlf-ray-{os.getpid()}"))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        patch.delenv("RAY_ADDRESS", raising=False)
        os.makedirs(os.environ["RAY_TMPDIR"], exist_ok=True)
        started_nodes = Nodes(NODES)
        patch.setenv("RAY_ADDRESS", started_nodes.ray.address)
        yield started_nodes
        started_nodes.ray.shutdown()


def rayed(workers, **keys):
    return Rayed(RayKeys(workers=Workers.of(workers), **keys))


def about(self):
    """Return the number of a worker, its cores, and a variable of its environment."""
    return self.id, cores(), os.environ["GREETING"]


async def test_workers_have_their_places_cores_and_variables(nodes):
    launcher = rayed(3, env={"GREETING": "hello"})
    async with asyncio.timeout(PATIENCE_S), Cluster(launcher) as cluster:
        assert await cluster.run_method(about) == [(n, 1, "hello") for n in (1, 2, 3)]
        processes = workers_of(cluster).values()
        assert all("OMP_NUM_THREADS" not in worker.environ() for worker in processes)
        assert len({node for node, _ in launcher._actors.values()}) == 3
    assert len(processes) == 3
    assert not any(map(is_alive, processes))


async def test_run_begins_with_few_workers_and_has_a_place_for_each(nodes):
    async with asyncio.timeout(PATIENCE_S), Cluster(rayed("2..4", start_timeout=20)) as cluster:
        assert len(await cluster.run_method(number)) >= 2

        reasons = ""
        while "pending: {CPU: 1} is not free" not in reasons:
            reasons = " ".join([await cluster._launcher.waits(index) for index in range(4)])
            await asyncio.sleep(0.05)


async def test_token_is_in_no_argument_environment_or_log(nodes):
    import ray

    launcher = rayed(2)
    secret = launcher.tokens.primary
    async with asyncio.timeout(PATIENCE_S), Cluster(launcher) as cluster:
        assert await cluster.run_method(number) == [1, 2]
        session = Path(ray._private.worker._global_node.get_session_dir_path())
        assert_hidden(secret, [session])
    assert_hidden(secret, [session])


async def test_killed_worker_is_replaced_in_its_actor(nodes):
    async with asyncio.timeout(PATIENCE_S), Cluster(rayed(2)) as cluster:
        assert await cluster.run_method(number) == [1, 2]
        before = workers_of(cluster)[0]
        actor = before.parent()
        after = await replaced(cluster, before)
        assert after.parent() == actor
        await numbers(cluster, [1, 2])


@pytest.mark.short
async def test_killed_actor_is_replaced(nodes):
    async with asyncio.timeout(PATIENCE_S), Cluster(rayed(2)) as cluster:
        assert await cluster.run_method(number) == [1, 2]
        workers_of(cluster)[0].parent().kill()
        end = await left(cluster, 0)
        assert end.cause is Cause.CRASH
        assert end.words.startswith("The actor is dead because its worker process has died")
        await numbers(cluster, [1, 2])


async def test_worker_of_a_lost_node_runs_on_another_one(nodes):
    async with asyncio.timeout(PATIENCE_S), Cluster(rayed(2)) as cluster:
        assert await cluster.run_method(number) == [1, 2]
        node, _ = cluster._launcher._actors[1]
        nodes.remove(node)
        end = await left(cluster, 1)
        assert end.cause is Cause.NODE
        await numbers(cluster, [1, 2])
        assert cluster._launcher._actors[1][0] != node


async def test_drained_node_is_left_before_it_ends(nodes):
    async with asyncio.timeout(PATIENCE_S), Cluster(rayed(2)) as cluster:
        assert await cluster.run_method(number) == [1, 2]
        node, _ = cluster._launcher._actors[0]
        nodes.drain(node, for_s=PATIENCE_S)
        end = await left(cluster, 0)
        assert end.cause is Cause.NOTICE
        assert re.fullmatch(r"Ray drains its node, which ends in \d+ s", end.words)
        await numbers(cluster, [1, 2])
        assert cluster._launcher._actors[0][0] != node
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
    """An actor in a placement group that runs a master, like a trial of Ray Tune."""

    def train(self, **keys):
        async def run():
            async with Cluster.on("ray", **keys) as cluster:
                return await cluster.run_method(number)

        return asyncio.run(run())


@pytest.fixture
def caller(nodes):
    """Return a function that calls ``Caller.train`` in the first bundle of a placement group."""
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


def test_program_of_the_page_about_tune_runs(nodes, tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs/howto/deploy.md").read_text()
    (program,) = re.findall(r"```python\n(# tune_app.py\n.*?)```", page, re.DOTALL)
    (tmp_path / "tune_app.py").write_text(program)
    monkeypatch.setenv("HOME", str(tmp_path))  # Tune writes there
    ended = subprocess.run([sys.executable, "tune_app.py"], cwd=tmp_path, text=True, capture_output=True)
    assert ended.returncode == 0, ended.stderr
    assert "'training_iteration': 3" in ended.stdout
    assert "'round': 3" in ended.stdout


@pytest.mark.short
def test_same_weights_as_on_this_machine(nodes, tmp_path):
    assert weights_after(tmp_path, "--launcher", "ray", "--workers", "2") == weights_after(tmp_path, "--local", "2")


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
async def test_nothing_remains_when_the_master_ends(nodes, tmp_path, ending):
    mark = tmp_path.name
    options = ["--launcher", f"ray:env.MARK={mark}", "--workers", "2", "-p", "master_epochs=100000"]
    process = started(tmp_path, *options)
    try:
        async with asyncio.timeout(PATIENCE_S):
            while len(workers := processes("ddlf.cli.worker", mark=mark)) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            actors = [worker.parent() for worker in workers.values()]
            process.send_signal(ending)
            for actor in actors:
                await until_ended(actor)
            while processes("ddlf.cli.worker", mark=mark):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    finally:
        process.kill()
        process.communicate()


async def test_check_compares_the_nodes_with_the_workers(nodes):
    async with asyncio.timeout(PATIENCE_S):
        assert [check for check in [check async for check in rayed(1).check()] if check.do] == []
        (problem,) = [check async for check in rayed(1, cores=64).check() if check.do]
    assert problem.fact.startswith("infeasible: no node has {CPU: 64}")
