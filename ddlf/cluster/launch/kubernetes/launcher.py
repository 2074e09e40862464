"""Workers that a Job of Kubernetes runs for a master outside of it: ``--launcher k8s:image=IMAGE``. Runs on the master.

The workers dial the master, so their pods must be able to reach it. Kubernetes starts them, and starts them again. This
launcher uses the system's ``kubectl`` with its configuration.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncIterator, Mapping
from typing import Any

from pydantic import Field

from ddlf.cluster.launch.engine import PAUSES_S, Engine, PlaceEngine
from ddlf.cluster.launch.gate import Gate
from ddlf.cluster.launch.keys import parse_keys, read_keys
from ddlf.cluster.launch.kubernetes.kubectl import Kubectl, Object, end_of_worker, waiting_reason
from ddlf.cluster.launch.kubernetes.manifests import (
    CONFIG_ERROR,
    CONNECT_ERROR,
    INDEX,
    INDEX_VARIABLE,
    INSTANCE,
    PodKeys,
    secret,
    workers,
)
from ddlf.cluster.launch.kubernetes.pods import Pods
from ddlf.cluster.launch.launcher import Cause, Check, Launcher, Left, Workers
from ddlf.cluster.launch.supervisor import WorkerStart
from ddlf.errors import ConfigError, ConnectError, DDLFError

log = logging.getLogger(__name__)

WARNINGS_S = 4.0
"""Seconds until the warnings of Kubernetes are read again."""
RIGHTS = (
    *(("create", "jobs"), ("patch", "jobs"), ("delete", "jobs"), ("create", "secrets"), ("delete", "secrets")),
    *(("list", "pods"), ("watch", "pods"), ("list", "events")),
)
"""The requests of this launcher, as verbs and kinds of objects."""
RESUME = '{"spec":{"suspend":false}}'
"""The change of a suspended Job that lets Kubernetes start its pods."""


class KubernetesKeys(PodKeys):
    """The keys of the launcher ``k8s``."""

    host: str | None = Field(default=None, description="Host of the master as the pods reach it.")
    port: int = Field(default=0, ge=0, le=65535, description="Port of the master (default: any free one).")


class Kubernetes(PlaceEngine):
    """The launcher for workers in the pods of a Job, which this process creates and deletes.

    Raises:
        ConfigError: The keys have both a host and a network.
    """

    name = "k8s"
    model = KubernetesKeys
    keys: KubernetesKeys
    restarts = "its Job"

    def __init__(self, keys: KubernetesKeys, workers: Workers | None = None) -> None:
        if keys.host is not None and keys.network is not None:
            raise ConfigError(
                "launcher k8s: network has no effect with host, which already says where the pods reach the master",
                hint="leave one of them out",
            )
        super().__init__(keys, workers)
        self.port = keys.port
        self.job = ""  # each run has its own name, so that its watch sees no pods of the run before
        self._kubectl = Kubectl(keys.namespace)
        self._pods: dict[int, Object] = {}  # the latest pod of each place
        self._counted: dict[int, set[str]] = {}  # uids of pods that ended, by place
        self._end_queues: dict[int, asyncio.Queue[Left | None]] = {}
        self._watching: asyncio.Task[None] | None = None
        self._is_created = False  # whether the Job may exist
        self._is_known = False  # whether it exists, because Kubernetes has said so
        self._is_resumed = False  # whether it may have pods
        self._began_at = 0.0
        self._warnings: list[Object] = []
        self._warnings_at = 0.0

    @classmethod
    def from_text(cls, text: str, workers: Workers | None = None) -> Launcher:
        return cls._launcher_for(parse_keys(text, cls.name), workers)

    @classmethod
    def from_keys(cls, values: Mapping[str, Any]) -> Launcher:
        return cls._launcher_for(values, None)

    @classmethod
    def _launcher_for(cls, values: Mapping[str, Any], workers: Workers | None) -> Engine:
        """Return the launcher for this process: in a pod of a run, that of its pods."""
        if "image" not in values and (INDEX_VARIABLE in os.environ or "gate" in values):
            return Pods(read_keys(Pods.model, cls.name, values, workers))
        return cls(read_keys(cls.model, cls.name, values, workers))

    async def check(self) -> AsyncIterator[Check]:
        """Ask Kubernetes for its version, and whether this user may do all that the launcher does."""
        versions = await self._kubectl.read("version")
        client, server = (versions[f"{side}Version"]["gitVersion"] for side in ("client", "server"))
        yield Check(f"Kubernetes {server}, and kubectl {client}")
        namespace = (
            f"in the namespace {self.keys.namespace}"
            if self.keys.namespace
            else "in the namespace of kubectl's context"
        )
        denied = [f"{verb} {kind}" for verb, kind in RIGHTS if not await self._kubectl.may(verb, kind)]
        if denied:
            yield Check(
                f"this user may not {', '.join(denied)} {namespace}",
                "ask for a Role with these rights",
                ConnectError.exit_code,
            )
        else:
            yield Check(f"this user may create, watch and delete Jobs, pods and Secrets {namespace}")
        if (account := self.keys.service_account) is not None:
            try:
                await self._kubectl.read("get", f"serviceaccount/{account}")
            except ConnectError as error:
                yield Check(
                    f"the service account {account}: {error.message}", "create it, or correct the key service_account"
                )
        if self.keys.host is not None:
            yield Check(f"pods reach this master at {self.keys.host}")
        else:
            async for check in super().check():
                yield check

    async def prepare(self) -> None:
        """Create the Job and the Secret that it owns, and begin to watch the pods.

        The Job is suspended until the Secret exists. If this process is killed before that, no pods wait for a Secret
        that never comes.

        Raises:
            ConfigError: There is no kubectl.
            ConnectError: Kubernetes refused the Job or the Secret, or it did not answer. ``release`` deletes both.
        """
        gate = self.gate
        gates = gate.addresses(self.keys.network) if self.keys.host is None else f"{self.keys.host}:{gate.port}"
        start = WorkerStart(gates, None, self.tokens.primary)
        self.job = f"ddlf-{secrets.token_hex(4)}"
        self._pods.clear()
        self._counted.clear()
        job = workers(self.keys, self.job, len(self.addresses), start.arguments())
        # Kubernetes may create the Job although its answer does not arrive here.
        self._is_created, self._is_known, self._is_resumed = True, False, False
        try:
            owner = await self._kubectl.read("create", "--validate=false", "--filename=-", stdin=job)
        except ConfigError:  # no command ran
            self._is_created = False
            raise
        self._is_known = True
        token = secret(self.job, self.tokens.primary, owner)
        await self._kubectl("create", "--validate=false", "--filename=-", stdin=token)
        loop = asyncio.get_running_loop()
        self._is_resumed, self._began_at = True, loop.time()  # Kubernetes counts the Job's time from here
        await self._kubectl("patch", f"job/{self.job}", "--type=merge", f"--patch={RESUME}")
        self._end_queues = {place: asyncio.Queue() for place in range(len(self.addresses))}
        self._watching = asyncio.create_task(self._watch())

    async def run(self, place: int, worker: WorkerStart) -> Left | None:
        """Wait for the end of a pod of a place, and return how it ended. The Job starts the pods, and replaces them.

        Raises:
            ConnectError: The pod would end again in the same way, or the Job's time is over.
        """
        left = await self._end_queues[place].get()
        if left is None:
            return None
        is_refused = left.exit_code in (CONFIG_ERROR, CONNECT_ERROR) and left.cause is Cause.CRASH
        if is_refused or left.cause is Cause.TIME_LIMIT:
            self.has_left(place, left)
            raise ConnectError(left.words)
        return left

    async def waits(self, index: int) -> str:
        pod, left = self._pods.get(index), self._lefts.get(index)
        if pod is None:
            return await self._warning(self.job)
        phase = pod["status"].get("phase")
        if phase == "Running":
            return f"pod {pod['metadata']['name']} runs, and its worker has not joined yet"
        if phase == "Failed" and left is not None:
            return left.words
        return waiting_reason(pod) or await self._warning(pod["metadata"]["name"])

    async def _warning(self, name: str) -> str:
        """Return the last warning of Kubernetes about an object; empty if there is none, or it may not be read."""
        loop = asyncio.get_running_loop()
        if loop.time() - self._warnings_at > WARNINGS_S:
            try:
                events = await self._kubectl.read("get", "events", "--field-selector=type=Warning")
                self._warnings = events["items"]
            except DDLFError:
                pass
            finally:  # also after the caller's timeout, or each place would wait for a Kubernetes that does not answer
                self._warnings_at = loop.time()
        about = [event for event in self._warnings if event["involvedObject"].get("name") == name]
        about.sort(key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "")
        return f"{about[-1]['reason']}: {about[-1]['message']}" if about else ""

    async def _watch(self) -> None:
        """Follow the pods until the end of the run. The run continues while Kubernetes does not answer, and after a fault
        here.
        """
        pause, shown, unread = PAUSES_S[0], "", set[str]()
        while True:
            try:
                async for kind, pod in self._kubectl.watch("pods", f"{INSTANCE}={self.job}"):
                    pause, shown = PAUSES_S[0], ""
                    try:
                        self._see(kind, pod)
                    except Exception as error:  # the other pods must still be seen
                        words = (
                            f"pod {pod['metadata']['name']}: its state cannot be read ({type(error).__name__}: {error})"
                        )
                        if words not in unread:
                            log.warning("%s; the run continues", words, exc_info=error)
                        unread.add(words)
            except Exception as error:  # of Kubernetes, of kubectl's answer, or a fault here
                message = error.message if isinstance(error, DDLFError) else None
                words = message or f"the watch of the pods failed ({type(error).__name__}: {error})"
                if words != shown:
                    log.warning("%s; the run continues, and asks again", words, exc_info=None if message else error)
                shown = words
            await asyncio.sleep(pause)
            pause = min(2 * pause, PAUSES_S[1])

    def _see(self, kind: str, pod: Object) -> None:
        """Take note of a change of a pod."""
        metadata = pod["metadata"]
        index, uid = int(metadata["annotations"][INDEX]), metadata["uid"]
        former = self._pods.get(index)
        if former is None or former["metadata"]["creationTimestamp"] <= metadata["creationTimestamp"]:
            self._pods[index] = pod
        self._runs_in[index] = f"pod {self._pods[index]['metadata']['name']}"
        counted = self._counted.setdefault(index, set())
        left = end_of_worker(pod, kind == "DELETED")
        gate = self._gate
        if left is None or uid in counted or gate is None or gate.is_over:
            return
        counted.add(uid)
        limit = self.keys.time
        if limit is not None and asyncio.get_running_loop().time() - self._began_at >= limit:
            left = Left(
                Cause.TIME_LIMIT, f"pod {metadata['name']}: the Job's time of {limit:g} s is over", left.exit_code
            )
        self._end_queues[index].put_nowait(left)

    async def _end(self, gate: Gate) -> None:
        for queue in self._end_queues.values():
            queue.put_nowait(None)
        await super()._end(gate)

    async def release(self) -> None:
        """Delete the Job with its pods, and the Secret."""
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        if not self._is_created:
            return
        self._is_created = False
        consequence = (
            "its pods end by themselves" if self._is_resumed else "if it exists, it is suspended and has no pods"
        )
        try:
            await self._kubectl("delete", f"job/{self.job}", f"secret/{self.job}", "--ignore-not-found", "--wait=false")
        except DDLFError as error:
            # Without Kubernetes' answer, the error about the Job's start says enough.
            level = logging.WARNING if self._is_known else logging.INFO
            log.log(level, "the Job %s was not deleted: %s; %s", self.job, error.message, consequence)
