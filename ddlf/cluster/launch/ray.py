"""Workers in actors of Ray: ``--launcher ray --workers 2..8``. Runs on the master; ``WorkerActor`` runs in the actors.

Each place has its own actor, and Ray finds a node for it. A place whose actor has died gets a new actor. There is
no placement group of all places, because a group that recovers in parts can block itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import re
import socket
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from functools import partial
from typing import Any

from pydantic import Field

from ddlf.cluster.launch.engine import PlaceEngine
from ddlf.cluster.launch.gate import Gate
from ddlf.cluster.launch.keys import Bytes, Cores, Env, Gpus, Keys
from ddlf.cluster.launch.launcher import Cause, Check, Left, Workers
from ddlf.cluster.launch.supervisor import Supervisor, WorkerStart
from ddlf.cluster.launch.threads import in_thread
from ddlf.errors import ConfigError, ConnectError

log = logging.getLogger(__name__)

STOP_BEFORE_S = 1.0
"""A worker must have ended this many seconds before its drained node ends."""
LOOK_FOR_DRAINS_S = 1.0
"""Seconds between two looks at the nodes that Ray drains."""
ASK_AGAIN_S = 1.0
"""Seconds until Ray is asked again about free resources."""
ANSWER_S = 5.0
"""Seconds in which the head node of Ray must answer. Ray itself would try for minutes."""
LOOK_FOR_HEAD_S = 5.0
"""Seconds between two looks of an actor at the head node. Ray ends a node one minute after the head node has ended."""
GONE_S = 5.0
"""Seconds without a worker until its place is empty, if its actor has ended after the head node."""
SURVIVES_RAY = ("RAY_gcs_rpc_server_reconnect_timeout_s", "86400")
"""Setting of Ray for this process. Without it, Ray ends the master one minute after its head node has ended, so that the
run could not save its model.
"""
SHOWN_BYTES = 2000
"""Bytes of a worker's last output in the error."""
STARTS = "its actor starts"
NOT_SHOWN = ("node:", "object_store_memory")
"""Beginnings of the names of resources that no worker asks for."""


class RayKeys(Keys):
    """The keys of the launcher ``ray``."""

    cores: Cores = Field(default=1, description="Cores of each worker, which Ray reserves: num_cpus of its actor.")
    gpus: Gpus | None = Field(default=None, description="GPUs of each worker: num_gpus of its actor.")
    memory: Bytes | None = Field(default=None, description="Memory of each worker that Ray reserves, such as 4GiB.")
    resources: dict[str, float] = Field(default={}, description="Other resources that Ray reserves, such as {TPU: 4}.")
    env: Env = Field(default={}, description="Environment variables of the workers.")


class Rayed(PlaceEngine):
    """Workers in actors of Ray, one actor for each place.

    It uses the connection to Ray that this process has already, as in a trial of Ray Tune. Otherwise it connects to
    ``RAY_ADDRESS``, or to the Ray on this machine. In a placement group that captures child tasks, the actors use its
    bundles. Otherwise Ray spreads them over the nodes.

    Raises:
        ConfigError: Ray is not installed, or a key is invalid.
    """

    name = "ray"
    model = RayKeys
    keys: RayKeys

    def __init__(self, keys: RayKeys, workers: Workers | None = None) -> None:
        super().__init__(keys, workers)
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("launcher ray needs Ray, which is not installed", hint="pip install 'ray[default]'")
        self._group = _group_of_caller()  # belongs to the caller's thread, so ``prepare`` could not find it
        self._has_connected = False
        self._head = ""  # address of Ray's head node
        self._actors: dict[int, tuple[str, Any]] = {}  # node and actor of each place whose actor lives
        self._notices: dict[int, Left] = {}
        self._reason, self._asked_at = "", -ASK_AGAIN_S  # why places wait, and when Ray was asked
        self._watching: asyncio.Task[None] | None = None

    def worker(self, gate: Gate, place: int | None) -> WorkerStart:
        return WorkerStart(
            gate.addresses(self.keys.network), place, self.tokens.primary, cores=self.keys.cores, env=self.keys.env
        )

    async def check(self) -> AsyncIterator[Check]:
        """Connect to Ray, and compare its nodes with the resources of a worker."""
        import ray

        yield Check(f"Ray {ray.__version__}")
        has_connected = await in_thread(_connect)
        try:
            nodes = await in_thread(lambda: [node["Resources"] for node in ray.nodes() if node["Alive"]])
            total, free = await in_thread(ray.cluster_resources), await in_thread(ray.available_resources)
        finally:
            if has_connected:
                await in_thread(ray.shutdown)
        yield Check(
            f"Ray has {len(nodes)} node{'s' * (len(nodes) != 1)} with {{{shown(total)}}}; free are {{{shown(free)}}}"
        )
        resources = self._requested_resources()
        if self._group is not None:
            yield Check(
                f"workers use the bundles of this trial's placement group: {in_group(resources, self._group.bundle_specs)}"
            )
        elif not any(map(partial(fits, resources), nodes)):
            yield Check(pending(resources, nodes, total, free), "ask for less, or add a node")
        else:
            needed = {name: value * len(self.addresses) for name, value in resources.items()}
            if not fits(needed, free):
                yield Check(
                    f"{len(self.addresses)} workers need {{{shown(needed)}}}, and free are {{{shown(free)}}}",
                    "start fewer workers, add nodes, or wait until others have ended",
                )
        async for check in super().check():
            yield check

    async def prepare(self) -> None:
        """Connect to Ray, unless this process is connected already.

        Raises:
            ConnectError: No Ray runs here, it does not answer, or it refuses this process.
        """
        self._has_connected = await in_thread(_connect)
        self._head = await in_thread(_address)
        log.warning("the workers run in the Ray cluster at %s", self._head)
        self._watching = asyncio.get_running_loop().create_task(self._watch_drains())

    async def run(self, place: int, worker: WorkerStart) -> Left | None:
        """Run a worker in a new actor until it ends.

        Raises:
            ConnectError: The worker fits into no bundle of the placement group.
        """
        import ray
        from ray.exceptions import RayError

        actor, incarnation = None, self.gate.incarnation(place)
        try:
            actor = await in_thread(self._new_actor)
            node = await asyncio.wrap_future(actor.node.remote().future())
            self._actors[place] = node, actor
            self._runs_in[place] = f"actor {actor._actor_id.hex()}"
            code, output_text = await asyncio.wrap_future(actor.run.remote(worker).future())
            words = f"its worker ended with exit code {code}" + (f":\n{output_text}" if output_text else "")
            return self._notices.get(place) or Left(Cause.CRASH, words, code)
        except RayError as error:
            left = self._notices.get(place) or left_by(error)
            if self.gate.incarnation(place) != incarnation and not await in_thread(head_answers, self._head):
                await self.gate.wait_until_gone(place, incarnation, GONE_S)
            return left
        finally:
            self._actors.pop(place, None)
            self._notices.pop(place, None)
            if actor is not None:
                await end_actor(partial(ray.kill, actor))

    def _new_actor(self) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = "SPREAD" if self._group is None else PlacementGroupSchedulingStrategy(self._group)
        keys = self.keys
        options = {"num_gpus": keys.gpus, "memory": keys.memory, "resources": keys.resources or None}
        try:
            return (
                ray.remote(WorkerActor)
                .options(
                    num_cpus=keys.cores,
                    scheduling_strategy=strategy,
                    max_concurrency=2,  # ``leave`` while ``run`` runs
                    **{name: value for name, value in options.items() if value is not None},
                )
                .remote()
            )
        except ValueError as error:  # as about a bundle that is too small
            raise ConnectError(f"Ray refuses its actor: {error}") from None

    async def _watch_drains(self) -> None:
        """Ask the workers of each node that Ray drains to leave, so that their places go to other nodes."""
        while True:
            await asyncio.sleep(LOOK_FOR_DRAINS_S)
            look = asyncio.ensure_future(in_thread(_draining))
            if not (await asyncio.wait({look}, timeout=ANSWER_S))[0]:
                log.warning("Ray does not answer; training continues with the workers that still run")
            draining = await look
            for place, (node, actor) in self._actors.items():
                if node in draining and place not in self._notices:
                    end_ms, now = draining[node], time.time()
                    self._notices[place] = Left(Cause.NOTICE, drained(end_ms, now))
                    actor.leave.remote(max(0.0, end_ms / 1000 - now - STOP_BEFORE_S) if end_ms else None)

    async def waits(self, index: int) -> str:
        if index in self._actors:
            return "its worker starts"
        if time.monotonic() - self._asked_at > ASK_AGAIN_S:  # all these places wait for the same resources
            self._reason = "Ray does not answer"
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    self._reason = await in_thread(self._waits_for_resources)
            self._asked_at = time.monotonic()
        left = self._left(index) if self._reason == STARTS else None
        return left.words if left is not None else self._reason

    def _requested_resources(self) -> dict[str, float]:
        """Return the resources that Ray reserves for each worker."""
        keys = self.keys
        amounts = {"CPU": keys.cores, "GPU": keys.gpus, "memory": keys.memory, **keys.resources}
        return {name: float(value) for name, value in amounts.items() if value}

    def _waits_for_resources(self) -> str:
        import ray
        from ray.autoscaler.v2.sdk import get_cluster_status

        group, resources = self._group, self._requested_resources()
        try:
            demands = get_cluster_status(ray.get_runtime_context().gcs_address).resource_demands.ray_task_actor_demand
            queued = [shape.bundle for demand in demands for shape in demand.bundles_by_count]
            if group is None and resources in queued:
                nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
                return pending(resources, nodes, ray.cluster_resources(), ray.available_resources())
            if group is not None and any(f"bundle_group_{group.id.hex()}" in bundle for bundle in queued):
                return in_group(resources, group.bundle_specs)
            return STARTS
        except Exception as error:  # Ray is gone: that is the reason
            return f"Ray does not answer: {error}"

    async def release(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        if self._has_connected:
            import ray

            self._has_connected = False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    await in_thread(ray.shutdown)


class WorkerActor:
    """The worker of one place, in an actor of Ray."""

    def __init__(self) -> None:
        self._supervisor: Supervisor | None = None
        self._is_leaving = False

    def node(self) -> str:
        """Return the id of the actor's node."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def run(self, worker: WorkerStart) -> tuple[int, str]:
        """Run the worker until the run is over, or until ``leave``. Return its exit code and its last output."""
        with tempfile.TemporaryFile() as output:
            self._supervisor = Supervisor(worker, output)
            is_over = threading.Event()
            threading.Thread(
                target=stay_without_head, args=(self._supervisor, _address(), is_over), daemon=True
            ).start()
            try:
                code = 0 if self._is_leaving else self._supervisor.run()
            finally:
                is_over.set()
            output.seek(max(0, output.seek(0, os.SEEK_END) - SHOWN_BYTES))
            text = output.read().decode(errors="replace").strip()
        if text:
            print(text, file=sys.stderr, flush=True)  # for Ray's own log of this actor
        return code, text

    def leave(self, within_s: float | None) -> None:
        """Let the worker hand its work over, and end it, and with it ``run``.

        Args:
            within_s: Seconds until its node ends; None if nobody knows them.
        """
        self._is_leaving = True
        if self._supervisor is not None:
            if within_s is None:
                self._supervisor.ask_to_stop()
            else:
                self._supervisor.leave(within_s)


def stay_without_head(supervisor: Supervisor, address: str, is_over: threading.Event) -> None:
    """Let a worker outlive its actor while the head node of Ray is gone, because Ray ends all nodes then."""
    stays = False
    while not is_over.wait(LOOK_FOR_HEAD_S):
        if stays == head_answers(address):
            stays = not stays
            supervisor.stay(stays)


def head_answers(address: str) -> bool:
    """Return whether the head node of Ray can be reached."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
    except (OSError, ValueError):
        return False
    return True


async def end_actor(kill: Callable[[], object]) -> None:
    """End an actor. If Ray is gone, so is the actor. Then the call fails, or never ends."""
    killing = asyncio.ensure_future(in_thread(kill))
    await asyncio.wait({killing}, timeout=ANSWER_S)
    killing.cancel()
    await asyncio.gather(killing, return_exceptions=True)


def _group_of_caller() -> Any:
    """Return the placement group whose bundles child tasks of the caller use; None without such a group."""
    if "ray" not in sys.modules:  # then this process is not one of Ray's
        return None
    import ray
    from ray.util import get_current_placement_group

    if not ray.is_initialized() or not ray.get_runtime_context().should_capture_child_tasks_in_placement_group:
        return None
    return get_current_placement_group()


def _connect() -> bool:
    """Connect this process to Ray, and return whether it was not connected before.

    Raises:
        ConnectError: No Ray runs here, it does not answer, or it refuses this process.
    """
    os.environ.setdefault(*SURVIVES_RAY)  # the import reads it
    import ray

    if ray.is_initialized():
        return False
    address, setting = "", os.environ.get("RAY_ADDRESS")
    with contextlib.suppress(Exception):  # ``init`` names the error
        address = ray._private.services.canonicalize_bootstrap_address("auto") or ""
    host, _, port = address.rpartition(":")
    try:
        if port:
            socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        location = f"at RAY_ADDRESS={setting}" if setting else f"at {address}" if address else "on this machine"
        raise ConnectError(
            f"cannot connect to Ray {location}: {' '.join(str(error).split()).rstrip('.')}",
            hint=advice_on(str(error), head_answers(address)),
        ) from None
    # Without the output of actors, Ray prints only its errors here: twenty lines on stdout for each lost process. The
    # launcher has the reason of each loss.
    with contextlib.suppress(AttributeError):
        ray._private.worker.print_to_stdstream = lambda *_, **__: None
    return True


def advice_on(error: str, answers: bool) -> str:
    """Return what to do about an error of the connection to Ray.

    Args:
        error: Ray's own words.
        answers: Whether something listens at the address of the head node.
    """
    if "ersion mismatch" in error:
        return "install the same versions of Ray and Python here as in the cluster"
    if "authentication" in error.lower():
        return "give this process the cluster's token: RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN"
    if answers:
        return (
            "the head node is there, but it refuses this process: if the cluster has a token, set RAY_AUTH_MODE=token, and "
            "the same RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN as there"
        )
    return "start Ray with: ray start --head; or set RAY_ADDRESS to the address of its head node"


def _address() -> str:
    """Return the address of the Ray cluster that this process is connected to."""
    import ray

    return str(ray.get_runtime_context().gcs_address)


def _draining() -> Mapping[str, int]:
    """Return the end of each node that Ray drains, in milliseconds since 1970, by its id; 0 if nobody knows it. Ray has no
    public function for that.
    """
    with contextlib.suppress(Exception):
        from ray._private.state import state

        return dict(state.get_draining_nodes())
    return {}


def drained(end_ms: int, now_s: float) -> str:
    """Return the words about a node that Ray drains until a time."""
    return "Ray drains its node" + (f", which ends in {max(0.0, end_ms / 1000 - now_s):.0f} s" if end_ms else "")


CAUSES = {
    "low on memory": Cause.MEMORY,
    "its node has died": Cause.NODE,
    "is unavailable": Cause.NODE,
    "killed by `ray.kill`": Cause.CANCELLED,
    "owner has died": Cause.CANCELLED,
}
"""Words in Ray's errors about the death of an actor. Ray gives the reason only as a text."""
ADVICE = re.compile(r"[.]? (Some common causes|The task may or may not|Memory on the node).*")
"""The general advice in these errors, and a table."""


def left_by(error: Exception) -> Left:
    """Return the reason why an actor has died, from Ray's error."""
    if getattr(error, "preempted", False):
        return Left(Cause.PREEMPTED, "Ray has drained its node, and the node has ended")
    text = str(error)
    cause = next((cause for words, cause in CAUSES.items() if words in text), Cause.CRASH)
    # Lines about the actor and of a traceback begin with a space. An error about memory continues with a table.
    lines = [line for line in text.splitlines() if line and not line[0].isspace()] or [type(error).__name__]
    return Left(cause, ADVICE.sub("", lines[0 if cause is Cause.MEMORY else -1]).rstrip("."))


def pending(
    resources: Mapping[str, float],
    nodes: Iterable[Mapping[str, float]],
    total: Mapping[str, float],
    free: Mapping[str, float],
) -> str:
    """Return why Ray has not started an actor, in the words of ``ray status``.

    Args:
        resources: Resources that the actor needs.
        nodes: Resources of each node.
        total: Resources of the cluster.
        free: Resources that nobody uses.
    """
    if not any(map(partial(fits, resources), nodes)):
        return f"infeasible: no node has {{{shown(resources)}}}; all nodes together have {{{shown(total)}}}"
    return f"pending: {{{shown(resources)}}} is not free; free are {{{shown(free)}}} of {{{shown(total)}}}"


def fits(resources: Mapping[str, float], free: Mapping[str, float]) -> bool:
    """Return whether there is enough of each resource."""
    return all(free.get(name, 0) >= value for name, value in resources.items())


def in_group(resources: Mapping[str, float], bundles: Iterable[Mapping[str, float]]) -> str:
    """Return why Ray has not started an actor in a placement group."""
    shown_bundles = ", ".join(f"{{{shown(bundle)}}}" for bundle in bundles)
    return f"pending: no bundle of the placement group has {{{shown(resources)}}} free; its bundles are {shown_bundles}"


def shown(resources: Mapping[str, float]) -> str:
    """Return resources as ``ray status`` shows them, such as ``"CPU: 2, memory: 4.0 GiB"``."""
    return ", ".join(
        f"{name}: {value / 2**30:.1f} GiB" if name == "memory" else f"{name}: {value:g}"
        for name, value in sorted(resources.items())
        if not name.startswith(NOT_SHOWN)
    )
