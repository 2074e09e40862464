"""The rig for Ray: a head node without CPUs, and nodes with one CPU each."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import psutil

from tests.engines.ray_nodes import Nodes
from tests.trials.engines.rig import MARK, End, Rig, Run, Victim, kill
from tests.trials.engines.stuck import TIMEOUT, Stuck

SPARE = 1
"""Number of additional nodes, so that an actor need not wait for a new node."""
STOP_S = 5.0
HEALTH_S = 17.0
"""Seconds that Ray needs until an actor of a lost node runs on another node."""


class RayRig(Rig):
    """A rig with a head node, and one more node than places."""

    name = "ray"
    gone_says = "Ray does not answer"
    gone_ends = False
    gone_s = 75.0  # a raylet ends 60 s after its head node

    def open(self) -> None:
        # The path of a socket has at most 107 bytes.
        self._short = Path(tempfile.mkdtemp(prefix="ddlf-ray-", dir="/tmp"))
        os.environ |= {"RAY_TMPDIR": str(self._short), "RAY_USAGE_STATS_ENABLED": "0", MARK: self.mark}
        os.environ |= {name: self.environment()[name] for name in ("PYTHONPATH", "DDLF_GRACE")}
        os.environ.pop("RAY_ADDRESS", None)
        self._nodes: Any = Nodes(self.places + SPARE)
        os.environ["RAY_ADDRESS"] = self._nodes.ray.address

    def close(self) -> None:
        with contextlib.suppress(Exception):  # some of its processes may have ended
            self._nodes.ray.shutdown()
        self._end_processes()
        shutil.rmtree(self._short, ignore_errors=True)

    def _end_processes(self) -> None:
        engine_processes = [process for process in self.processes() if self.is_engine(process)]
        for process in engine_processes:
            kill(process)
        psutil.wait_procs(engine_processes, 10.0)

    def launcher(self, run: Run) -> list[str]:
        return ["--workers", str(self.places), "--launcher", "ray"]

    def empty(self) -> list[str]:
        task = "ray.remote(num_cpus=1, scheduling_strategy='SPREAD')(lambda: None)"
        program = f"import ray; ray.init(); task = {task}; "
        return [sys.executable, "-c", program + f"ray.get([task.remote() for _ in range({self.places})])"]

    def is_engine(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            words = " ".join(process.cmdline())
            return words.startswith("ray::IDLE") or "site-packages/ray/" in words
        return False

    def victims(self) -> dict[str, Victim]:
        died = "The actor is dead because its worker process has died"
        node = "its node has died|is unavailable|raylet|worker process has died"
        return {
            "executor": Victim(lambda run, place: kill(run.executor(place)), "SIGKILL"),
            "daemon": Victim(lambda run, place: kill(run.daemon(place)), "."),
            "actor": Victim(lambda run, place: kill(run.daemon(place).parent()), died),
            "raylet": Victim(self._lose_node, "", own_s=HEALTH_S, prints=node),  # Ray notices it after some seconds
        }

    def _node_of(self, run: Run, place: int) -> Any:
        """Return the node whose raylet has started the actor of a place."""
        raylets = {parent.pid for parent in run.daemon(place).parents()}
        return next(node for node in self._nodes.nodes if node.all_processes["raylet"][0].process.pid in raylets)

    def _lose_node(self, run: Run, place: int) -> None:
        """Kill the raylet of a place, and start another node."""
        node = self._node_of(run, place)
        kill(psutil.Process(node.all_processes["raylet"][0].process.pid))
        self._nodes.remove(node.node_id)

    def notice(self, run: Run, place: int) -> None:
        """Drain the node of a place, and end it at the deadline. Start another node, like an autoscaler."""
        node = self._node_of(run, place)
        self._nodes.drain(node.node_id, self.notice_s)

        def end() -> None:
            with contextlib.suppress(Exception):  # the rig has been closed meanwhile
                self._nodes.ray.remove_node(node, allow_graceful=False)

        self._nodes.nodes.remove(node)
        timer = threading.Timer(self.notice_s, end)
        timer.daemon = True
        timer.start()
        self._nodes.nodes.append(self._nodes.add())

    def left(self, run: Run) -> list[str]:
        return super().left(run) + [f"actor {name}" for name in self._actors()]

    def _actors(self) -> list[str]:
        """Return the actors that Ray still runs or will start."""
        from ray._private.state import GlobalState
        from ray._raylet import GcsClientOptions
        from ray.exceptions import RaySystemError

        if not self._has_head():
            return []
        state = GlobalState()
        address = self._nodes.ray.gcs_address
        state._initialize_global_state(
            GcsClientOptions.create(address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False)
        )
        try:
            table = state.actor_table(None)
        except RaySystemError:  # the head node is just ending
            return ["the head node does not answer"]
        return [f"{name[:8]} is {actor['State']}" for name, actor in table.items() if actor["State"] != "DEAD"]

    def _has_head(self) -> bool:
        servers = self._nodes.ray.head_node.all_processes.get("gcs_server")
        return bool(servers) and servers[0].process.poll() is None

    def stuck(self) -> dict[str, Stuck]:
        all_places = ["--workers", str(self.places + SPARE)]

        def ray(*keys: str) -> list[str]:
            return ["--launcher", ",".join(("ray:" + TIMEOUT, *keys))]

        return {
            "no resources": Stuck(
                [*all_places, *ray()], r"pending: \{CPU: 1\} is not free", before=[*all_places, "--launcher", "ray"]
            ),
            "infeasible": Stuck(["--workers", "2", *ray("cores=64")], r"infeasible: no node has \{CPU: 64\}"),
            "wrong Python": Stuck(["--workers", "1", *ray("env.PYTHONHOME=/nowhere")], "No module named 'encodings'"),
        }

    def ends(self) -> dict[str, End]:
        return {**super().ends(), "ray stop": End(self._stop, ends_master=False)}

    def _stop(self, run: Run) -> None:
        """End Ray like ``ray stop``: send SIGTERM, then SIGKILL to the remaining processes. The command itself would also end
        other instances of Ray on this machine.
        """
        ray_processes = [process for process in self.processes() if self.is_engine(process) or is_actor(process)]
        for process in ray_processes:
            with contextlib.suppress(psutil.Error):
                process.terminate()
        for process in psutil.wait_procs(ray_processes, STOP_S)[1]:
            kill(process)

    def lose_engine(self, run: Run) -> None:
        """Kill the head node's server."""
        self._nodes.ray.head_node.all_processes["gcs_server"][0].process.kill()

    def clean(self, run: Run) -> None:
        super().clean(run)
        if not self._has_head():
            self.close()
            self.open()


def is_actor(process: psutil.Process) -> bool:
    """Return whether a process belongs to an actor, which ``ray stop`` ends, too."""
    with contextlib.suppress(psutil.Error):
        return process.name().startswith("ray::")
    return False
