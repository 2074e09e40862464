"""Tests of the keys of the launcher ``ray``, and of its messages about states of Ray. ``tests/engines`` has tests with Ray."""

import asyncio
import importlib.util
import socket
import threading

import pytest

from ddlf.cluster.launch import ray
from ddlf.cluster.launch.launcher import Cause, Left, Workers, from_keys, installed
from ddlf.cluster.launch.ray import advice_on, drained, in_group, left_by, pending
from ddlf.cluster.launch.threads import in_thread
from ddlf.errors import ConfigError
from tests.patience import PATIENCE_S

GIB = 2.0**30


@pytest.fixture
def with_ray(monkeypatch):
    """Let the launcher believe that Ray is installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True if name == "ray" else find(name))


def test_keys_come_from_a_text(with_ray):
    launcher = installed("ray:cores=2,memory=4GiB,resources.TPU=4,env.A=b", Workers(2, 8))
    assert (len(launcher.addresses), launcher.least) == (8, 2)
    keys = launcher.keys
    assert (keys.cores, keys.gpus, keys.memory, keys.resources, keys.env) == (2, None, 4 * GIB, {"TPU": 4}, {"A": "b"})


def test_keys_come_from_a_mapping(with_ray):
    keys = from_keys("ray", {"workers": 3, "gpus": 1}).keys
    assert (keys.cores, keys.gpus) == (1, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cores=0", "launcher ray: cores must be at least 1, got '0'"),
        ("core=1", "launcher ray has no key 'core'"),
        ("memory=much", "launcher ray: memory must be above 0"),
        ("python=python3", "launcher ray has no key 'python'"),
    ],
)
def test_keys_are_checked(with_ray, text, message):
    with pytest.raises(ConfigError, match=message):
        installed(f"ray:{text}", Workers(2, 2))


def test_missing_ray_is_named_with_its_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="launcher ray needs Ray, which is not installed") as caught:
        installed("ray", Workers(2, 2))
    assert caught.value.hint == "pip install 'ray[default]'"


async def test_worker_gets_its_cores_and_variables_and_hides_the_token(with_ray):
    launcher = installed("ray:cores=3,env.A=b", Workers(2, 2))
    worker = launcher.worker(launcher.open(), 1)
    await launcher.stop()
    assert worker.environment() == {"DDLF_CORES": "3", "A": "b"}
    assert launcher.tokens.primary.decode() not in repr(worker)


DIED = (
    "The actor died unexpectedly before finishing this task.\n\tclass_name: WorkerActor\n\tactor_id: 5\n\tpid: 7\n"
    "\tip: 10.0.0.2\n"
)
BECAUSE = {
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR. Some common causes include: "
    "(1) the process was killed by the OOM killer due to high memory usage": Left(
        Cause.CRASH, "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR"
    ),
    "The actor is dead because it was killed by `ray.kill`.": Left(
        Cause.CANCELLED, "The actor is dead because it was killed by `ray.kill`"
    ),
    "The actor died because its node has died. Node Id: 46\n\tthe actor's node was terminated: received SIGTERM": Left(
        Cause.NODE, "The actor died because its node has died. Node Id: 46"
    ),
}


@pytest.mark.parametrize(("text", "left"), BECAUSE.items())
def test_cause_of_a_death_is_read_from_the_error_of_ray(text, left):
    assert left_by(RuntimeError(DIED + text)) == left


def test_error_about_memory_is_one_sentence():
    text = (
        "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.0.0.2, ID: 29) was "
        "7.48GB used / 23.54GB limit (0.317844)\nTop 10 memory users: PID\tMEM(GB)\tCOMMAND\n12\t2.32\tray::A.run"
    )
    words = "1 worker(s) were killed due to the node running low on memory"
    assert left_by(RuntimeError(text)) == Left(Cause.MEMORY, words)


def test_error_in_an_actor_is_its_last_line():
    text = (
        "The actor died because of an error raised in its creation task, ray::WorkerActor.__init__() (pid=7)\n"
        "  File \"worker.py\", line 1, in load\nModuleNotFoundError: No module named 'ddlf'"
    )
    assert left_by(RuntimeError(text)) == Left(Cause.CRASH, "ModuleNotFoundError: No module named 'ddlf'")


def test_unreachable_actor_counts_as_a_lost_node():
    text = "The actor 82 is unavailable: Socket closed rpc_code: 14. The task may or may not have been executed."
    assert left_by(RuntimeError(text)) == Left(Cause.NODE, "The actor 82 is unavailable: Socket closed rpc_code: 14")


def test_drained_node_that_has_ended_was_preempted():
    error = RuntimeError(DIED)
    error.preempted = True
    assert left_by(error).cause is Cause.PREEMPTED


def test_notice_says_how_long_the_node_still_runs():
    assert drained(130_000, 100.0) == "Ray drains its node, which ends in 30 s"
    assert drained(130_000, 200.0) == "Ray drains its node, which ends in 0 s"
    assert drained(0, 100.0) == "Ray drains its node"


NODES = [{"CPU": 4.0, "node:10.0.0.1": 1.0}, {"CPU": 2.0, "GPU": 1.0, "memory": 2 * GIB}]


def test_resources_that_no_single_node_has_are_infeasible():
    total = {"CPU": 6.0, "GPU": 1.0, "memory": 2 * GIB, "node:10.0.0.1": 1.0, "object_store_memory": GIB}
    assert pending({"CPU": 4, "GPU": 1}, NODES, total, total) == (
        "infeasible: no node has {CPU: 4, GPU: 1}; all nodes together have {CPU: 6, GPU: 1, memory: 2.0 GiB}"
    )


def test_resources_in_use_are_pending():
    assert pending({"CPU": 4}, NODES, {"CPU": 6.0}, {"CPU": 1.5}) == (
        "pending: {CPU: 4} is not free; free are {CPU: 1.5} of {CPU: 6}"
    )


def test_group_without_room_is_shown_with_its_bundles():
    assert in_group({"CPU": 1}, [{"CPU": 1.0}, {"CPU": 2.0, "GPU": 1.0}]) == (
        "pending: no bundle of the placement group has {CPU: 1} free; its bundles are {CPU: 1}, {CPU: 2, GPU: 1}"
    )


async def test_place_of_an_ended_worker_waits_with_the_reason_of_the_end(with_ray, monkeypatch):
    launcher = installed("ray", Workers(2, 2))
    launcher.has_left(1, Left(Cause.CRASH, "its worker ended with exit code 1", 1))
    for reason, waits in {
        "its actor starts": ["its actor starts", "its worker ended with exit code 1"],
        "infeasible: no node has {CPU: 64}": ["infeasible: no node has {CPU: 64}"] * 2,
    }.items():
        launcher._asked_at = -ray.ASK_AGAIN_S
        monkeypatch.setattr(launcher, "_waits_for_resources", lambda reason=reason: reason)
        assert [await launcher.waits(place) for place in (0, 1)] == waits


def test_worker_outlives_its_actor_only_while_the_head_node_is_gone(monkeypatch):
    monkeypatch.setattr(ray, "LOOK_FOR_HEAD_S", 0.0)
    over, calls = threading.Event(), []
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"

    class Seen:
        def stay(self, stays):
            calls.append(stays)
            if stays:
                self.back = socket.create_server(("127.0.0.1", int(address.rpartition(":")[2])))
            else:
                self.back.close()
                over.set()

    listener.close()
    ray.stay_without_head(Seen(), address, over)
    assert calls == [True, False]


def test_missing_address_is_not_a_head_node():
    assert not ray.head_answers("")
    assert not ray.head_answers("127.0.0.1:none")


async def test_end_of_an_actor_does_not_block_the_gate_if_ray_is_gone(monkeypatch):
    monkeypatch.setattr(ray, "ANSWER_S", 0.05)
    answer, ended = threading.Event(), asyncio.Event()
    asyncio.get_running_loop().call_soon(ended.set)
    await ray.end_actor(lambda: answer.wait(PATIENCE_S))
    assert ended.is_set()
    assert not answer.is_set(), "nobody has answered"
    answer.set()


async def test_endless_call_of_ray_does_not_keep_the_process_alive():
    begun, end = threading.Event(), threading.Event()

    def hang():
        begun.set()
        end.wait()

    call = asyncio.ensure_future(in_thread(hang))
    await asyncio.to_thread(begun.wait)
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "ddlf-engine")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    end.set()
    with pytest.raises(ValueError, match="not in list"):
        await in_thread(lambda: [].index("no"))


MISMATCH = "Version mismatch: The cluster was started with: Ray: 2.52.1 Python: 3.11.7"
NO_TOKEN = "Token authentication is enabled but no authentication token was found."


@pytest.mark.parametrize(
    ("error", "answers", "advice"),
    [
        (MISMATCH, True, "install the same versions"),
        (NO_TOKEN, True, "give this process the cluster's token"),
        ("Failed to connect to Ray cluster at 10.0.0.1:6379", True, "set RAY_AUTH_MODE=token"),
        ("Failed to connect to Ray cluster at 10.0.0.1:6379", False, "ray start --head"),
    ],
)
def test_the_advice_on_a_failed_connection_follows_from_the_error_of_ray(error, answers, advice):
    assert advice in advice_on(error, answers)
