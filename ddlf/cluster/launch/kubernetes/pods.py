"""The pods of one Job of Kubernetes, which all run the same command: ``ddlf run app.py --launcher k8s``. Runs in the pods.

The pod with index 0 is the master. Every pod, including the master's, has a worker, which joins the master by the name of
its pod. All pods have the token from the same Secret.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path

from pydantic import Field

from ddlf.cluster.config.addresses import parse_address
from ddlf.cluster.launch.keys import WorkersKeys
from ddlf.cluster.launch.kubernetes.manifests import INDEX_VARIABLE, TERMINATED, WORKER_PORT
from ddlf.cluster.launch.launcher import Requeue
from ddlf.cluster.launch.rank_launcher import Leading
from ddlf.cluster.launch.supervisor import Supervisor, WorkerStart
from ddlf.errors import ConfigError
from ddlf.rpc.tokens import find_tokens


class PodsKeys(WorkersKeys):
    """The keys of the launcher ``k8s`` in a pod. ``ddlf k8s render`` writes them into the pods' command."""

    gate: str = Field(description="Host and port of the pod that leads, such as app-0.app:9100.")
    first: int = Field(default=0, ge=0, description="Place of this Job's pod with index 0.")
    port: int = Field(default=WORKER_PORT, ge=0, le=65535, description="Port where the workers reach each other.")
    token_file: Path | None = Field(default=None, description="File with the token (default: $DDLF_TOKEN_FILE).")


class Pods(Leading):
    """The launcher for the workers of all pods of one run: each pod starts its own worker, which joins the pod that
    leads.

    Raises:
        ConfigError: This process has no index, or there is no token.
    """

    name = "k8s"
    model = PodsKeys
    keys: PodsKeys
    called = ("pod", "place")

    def __init__(self, keys: PodsKeys) -> None:
        index = os.environ.get(INDEX_VARIABLE, "")
        if not index.isdecimal():
            raise ConfigError(
                f"launcher k8s: {INDEX_VARIABLE} is not set, so this process is not in a pod of an Indexed Job",
                hint="make the Job with: ddlf k8s render app.py --workers 4 --image IMAGE",
            )
        super().__init__(keys)
        self.place = int(index) + keys.first
        if self.place >= len(self.addresses):
            raise ConfigError(
                f"launcher k8s: this is pod {self.place + 1}, but workers={keys.workers}",
                hint="give the Job as many completions as workers",
            )
        tokens = find_tokens(keys.token_file)
        if tokens is None:
            raise ConfigError("launcher k8s: the pod has no token", hint="mount the Secret, and set DDLF_TOKEN_FILE")
        self.tokens = tokens
        self.port = parse_address(keys.gate)[1]

    def requeue(self) -> Requeue:
        """Kubernetes starts the pod again by itself, since its exit code is 143."""
        return Requeue(f"pod {socket.gethostname()} of Kubernetes", lambda: None)

    def _own_worker(self, gate: str) -> WorkerStart:
        # The pod that leads may be replaced on another node, so a worker looks for it as long as for the first one.
        return WorkerStart(gate, self.place, self.tokens.primary, join_for_s=self._start_timeout_s, port=self.keys.port)

    def _follow(self) -> int:
        """Run the worker of a pod that does not lead, until the run is over. Return the exit code.

        A pod that Kubernetes ends must not succeed. Otherwise the Job would not replace it.
        """
        supervisor = Supervisor(self._own_worker(self.keys.gate))
        ended = threading.Event()

        def end(*_: object) -> None:
            ended.set()
            supervisor.ask_to_stop()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end)
        code = supervisor.run()
        return TERMINATED if ended.is_set() else code

    async def stop(self) -> None:
        """End this pod's worker. The others wait for the next master: this pod may only be evicted, and come again. When
        it succeeds, Kubernetes ends all other pods.
        """
        self.ends_workers = False
        try:
            await super().stop()
        finally:
            self.ends_workers = True
