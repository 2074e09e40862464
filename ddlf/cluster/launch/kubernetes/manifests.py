"""The manifests for runs and workers on Kubernetes, as dictionaries. Runs on the master, and in ``ddlf k8s``.

No manifest contains a token. The pods read it from a Secret, which is created apart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from ddlf.cluster.launch.keys import Bytes, Cores, Env, Gpus, Keys, Seconds
from ddlf.worker.machine import CORES_VARIABLE

GATE_PORT = 9100
WORKER_PORT = 9000
TOKEN_FOLDER = "/var/run/ddlf"
TOKEN_FILE = f"{TOKEN_FOLDER}/token"
APP_FOLDER = "/app"
WORK_FOLDER = "/work"
CHECKPOINTS = f"{WORK_FOLDER}/checkpoints"
USER = 1000
"""User and group of the processes in the pods. Many images would run as root, which a pod with ``runAsNonRoot`` refuses."""
GRACE_S, HAND_OVER_S = 30, 20
"""Seconds between SIGTERM and SIGKILL in a pod, and how many of them a worker may take to hand its work over."""
INSTANCE = "app.kubernetes.io/instance"
INDEX = "batch.kubernetes.io/job-completion-index"
"""Annotation of a pod with its index in the Job."""
INDEX_VARIABLE = "JOB_COMPLETION_INDEX"
PLACE_VARIABLE = "DDLF_PLACE"
MOST_NAME = 40
"""Longest name. Kubernetes appends an index and five letters, and a host name has at most 63 letters."""
RUN_RETRIES, WORKER_RETRIES = 3, 100
"""How often a pod of one index is started again after a failure. The pod that trains begins from the last checkpoint,
or from the start.
"""
CONFIG_ERROR, CONNECT_ERROR = 2, 3
"""Exit codes of ``ddlf``."""
TERMINATED = 143
"""Exit code after SIGTERM."""

Manifest = dict[str, Any]


def _checked_name(value: str) -> str:
    if not re.fullmatch(rf"[a-z](?:[a-z0-9-]{{0,{MOST_NAME - 2}}}[a-z0-9])?", value):
        raise ValueError(
            f"must be 1-{MOST_NAME} small letters, digits and hyphens, and begin with a letter, got {value!r}"
        )
    return value


class PodKeys(Keys):
    """The keys that say what each pod gets."""

    image: str = Field(min_length=1, description="Image with ddlf, and the libraries of the app.")
    namespace: str | None = Field(default=None, description="Namespace (default: that of kubectl's context).")
    cores: Cores | None = Field(default=None, description="CPUs of each pod.")
    memory: Bytes | None = Field(default=None, description="Memory of each pod, such as 4GiB.")
    gpus: Gpus = Field(default=0, description="GPUs of each pod (nvidia.com/gpu).")
    env: Env = Field(default_factory=dict, description="Environment variables of each pod.")
    time: Seconds | None = Field(default=None, description="How long the Job may run, such as 2h.")
    service_account: str | None = Field(default=None, description="Service account of the pods.")


class RenderKeys(PodKeys):
    """The keys of ``ddlf k8s render``."""

    name: Annotated[str, AfterValidator(_checked_name)] = Field(description="Name of all objects.")
    claim: str | None = Field(default=None, description="Claim of a volume for the run's folder.")


@dataclass(frozen=True, slots=True)
class RunCommand:
    """The command that the pods of a run execute.

    Args:
        app: Path of the app's file in the pods.
        text: Content of the app's file, if the manifest brings it; None if the image has it.
        options: More options of ``ddlf run``.
    """

    app: str
    text: str | None = None
    options: Sequence[str] = ()

    def arguments(self, keys: RenderKeys, gate: str, first: int = 0) -> list[str]:
        """Return the command of the pods of one Job.

        Args:
            keys: The keys.
            gate: Host of the pod that leads.
            first: Place of the Job's first pod.
        """
        launcher = f"k8s:gate={gate}:{GATE_PORT},start_timeout={keys.start_timeout:g}"
        launcher += f",first={first}" if first else ""
        options = [_literal(option) for option in self.options]
        return ["ddlf", "run", self.app, *options, "--launcher", launcher, "--workers", str(keys.workers)]


def run(keys: RenderKeys, command: RunCommand) -> list[Manifest]:
    """Return a run as one Indexed Job. The pod with index 0 leads and works, and its success is the Job's."""
    arguments = command.arguments(keys, f"{keys.name}-0.{keys.name}")
    # No liveness probe: the port of the worker in the pod that leads closes before this pod has ended.
    pod = _pod(keys, keys.name, arguments, is_run=True, has_app=command.text is not None, probes=("readinessProbe",))
    spec = _job(keys, pod, _count(keys), RUN_RETRIES, exits=("FailJob", CONFIG_ERROR))
    spec["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}
    spec["maxFailedIndexes"] = 0  # the other pods would wait for a pod that leads
    return [*_app(keys, command), _service(keys.name), _object("batch/v1", "Job", keys.name, spec)]


def jobset(keys: RenderKeys, command: RunCommand) -> list[Manifest]:
    """Return a run as a JobSet, for a cluster whose Jobs have no ``successPolicy``. The first Job leads and works."""
    gate, count = f"{keys.name}-lead-0-0.{keys.name}", _count(keys)
    jobs = []
    for name, pods, first, retries in (("lead", 1, 0, RUN_RETRIES), ("others", count - 1, 1, WORKER_RETRIES)):
        pod = _pod(
            keys,
            keys.name,
            command.arguments(keys, gate, first),
            is_run=name == "lead",
            has_app=name == "lead" and command.text is not None,
            probes=("readinessProbe",) if name == "lead" else ("readinessProbe", "livenessProbe"),
        )
        del pod["spec"]["subdomain"]  # the JobSet sets it
        spec = _job(keys, pod, pods, retries, exits=("FailJob", CONFIG_ERROR))
        spec["backoffLimit"] = spec.pop("backoffLimitPerIndex")
        del spec["podReplacementPolicy"]
        jobs.append({"name": name, "replicas": 1, "template": {"spec": spec}})
    spec = {
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["lead"]},
        "failurePolicy": {"maxRestarts": 0},
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "replicatedJobs": jobs[:count],
    }
    return [*_app(keys, command), _object("jobset.x-k8s.io/v1alpha2", "JobSet", keys.name, spec)]


def pool(keys: RenderKeys) -> list[Manifest]:
    """Return workers that serve one run after the other, as a StatefulSet."""
    arguments = ["ddlf-worker", "--port", str(WORKER_PORT), "--token-file", TOKEN_FILE]
    pod = _pod(keys, keys.name, arguments, probes=("readinessProbe", "livenessProbe"))
    del pod["spec"]["restartPolicy"]  # a StatefulSet always restarts
    spec = {
        "serviceName": keys.name,
        "replicas": _count(keys),
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": _labels(keys.name)},
        "template": pod,
    }
    return [_service(keys.name), _object("apps/v1", "StatefulSet", keys.name, spec)]


def workers(keys: PodKeys, name: str, count: int, arguments: Sequence[str]) -> Manifest:
    """Return an Indexed Job of workers that join a master elsewhere. Its pod with index i has place i. The Job is
    suspended: it has no pods until it is resumed.

    Args:
        keys: The keys.
        name: Name of the Job.
        count: Number of workers.
        arguments: Arguments of ``ddlf-worker``, without place and token.
    """
    pod_arguments = ["--place", f"$({PLACE_VARIABLE})", "--port", str(WORKER_PORT), "--token-file", TOKEN_FILE]
    pod = _pod(keys, name, ["ddlf-worker", *arguments, *pod_arguments], probes=("readinessProbe", "livenessProbe"))
    del pod["spec"]["subdomain"]  # the master introduces the workers by their addresses
    place = {"name": PLACE_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}}
    pod["spec"]["containers"][0]["env"].append(place)
    # A worker that finds no master for some time ends with CONNECT_ERROR, and Kubernetes must not start it again.
    spec = _job(keys, pod, count, WORKER_RETRIES, exits=("FailIndex", CONFIG_ERROR, CONNECT_ERROR))
    spec["suspend"] = True  # until the Secret exists
    spec["ttlSecondsAfterFinished"] = 0  # if the master was killed, nobody else deletes the Job
    return _object("batch/v1", "Job", name, spec)


def secret(name: str, token: bytes, owner: Mapping[str, Any]) -> Manifest:
    """Return the Secret with a token. It may be sent to Kubernetes, and shown to nobody.

    Args:
        name: Name of the Secret.
        token: The token.
        owner: The object that owns the Secret, as Kubernetes has returned it. Kubernetes deletes both together.
    """
    manifest = _object("v1", "Secret", name, None)
    reference = {"apiVersion": owner["apiVersion"], "kind": owner["kind"]}
    reference |= {key: owner["metadata"][key] for key in ("name", "uid")}
    manifest["metadata"]["ownerReferences"] = [reference]
    return {**manifest, "type": "Opaque", "immutable": True, "stringData": {"token": token.decode()}}


def _count(keys: Keys) -> int:
    assert keys.workers is not None
    return keys.workers.most


def _literal(text: str) -> str:
    """Return a text so that Kubernetes does not replace ``$(NAME)`` in it."""
    return text.replace("$(", "$$(")


def _labels(name: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "ddlf", INSTANCE: name}


def _object(version: str, kind: str, name: str, spec: Manifest | None) -> Manifest:
    manifest: Manifest = {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": name, "labels": _labels(name)},
    }
    return manifest if spec is None else {**manifest, "spec": spec}


def _app(keys: RenderKeys, command: RunCommand) -> list[Manifest]:
    if command.text is None:
        return []
    file = command.app.rpartition("/")[2]
    return [{**_object("v1", "ConfigMap", keys.name, None), "data": {file: command.text}}]


def _service(name: str) -> Manifest:
    """Return the headless Service that gives each pod a host name, before the pod is ready."""
    ports = [{"name": "gate", "port": GATE_PORT}, {"name": "worker", "port": WORKER_PORT}]
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": _labels(name), "ports": ports}
    return _object("v1", "Service", name, spec)


def _job(keys: PodKeys, pod: Manifest, count: int, retries: int, exits: tuple[str, *tuple[int, ...]]) -> Manifest:
    action, *codes = exits
    limit = {} if keys.time is None else {"activeDeadlineSeconds": int(keys.time)}
    return {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimitPerIndex": retries,
        "podReplacementPolicy": "Failed",  # otherwise two pods have one index for a while
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                # A pod that ends by SIGTERM has not failed.
                {
                    "action": "Ignore",
                    "onExitCodes": {"containerName": "ddlf", "operator": "In", "values": [TERMINATED]},
                },
                {"action": action, "onExitCodes": {"containerName": "ddlf", "operator": "In", "values": codes}},
            ]
        },
        **limit,
        "template": pod,
    }


def _pod(
    keys: PodKeys,
    name: str,
    command: Sequence[str],
    *,
    probes: Sequence[str],
    is_run: bool = False,
    has_app: bool = False,
) -> Manifest:
    """Return the template of a pod: not root, and only empty folders can be written."""
    env = {"HOME": "/tmp", "USER": "ddlf", "DDLF_TOKEN_FILE": TOKEN_FILE, "DDLF_GRACE": str(HAND_OVER_S), **keys.env}
    if keys.cores is not None:
        env[CORES_VARIABLE] = str(keys.cores)
    resources = {"cpu": keys.cores, "memory": keys.memory, "nvidia.com/gpu": keys.gpus}
    limits = {resource: str(amount) for resource, amount in resources.items() if amount}
    claim = keys.claim if isinstance(keys, RenderKeys) and is_run else None
    mounts = [("token", TOKEN_FOLDER, True), ("tmp", "/tmp", False), ("work", WORK_FOLDER, False)]
    volumes: list[Manifest] = [
        {"name": "token", "secret": {"secretName": name, "defaultMode": 0o400}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "work", **({"emptyDir": {}} if claim is None else {"persistentVolumeClaim": {"claimName": claim}})},
    ]
    if has_app:
        mounts.append(("app", APP_FOLDER, True))
        volumes.append({"name": "app", "configMap": {"name": name}})
    container: Manifest = {
        "name": "ddlf",
        "image": keys.image,
        "command": list(command),
        "workingDir": WORK_FOLDER,
        "env": [{"name": key, "value": _literal(value)} for key, value in env.items()],
        **({"resources": {"limits": limits}} if limits else {}),
        **{
            probe: {"tcpSocket": {"port": WORKER_PORT}, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6}
            for probe in probes
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",  # so that the reason of an end is in the pod's status
        "volumeMounts": [
            {"name": volume, "mountPath": path, **({"readOnly": True} if fixed else {})}
            for volume, path, fixed in mounts
        ],
    }
    user = {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER}
    spec: Manifest = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_S,
        "subdomain": name,
        **({} if keys.service_account is None else {"serviceAccountName": keys.service_account}),
        "automountServiceAccountToken": keys.service_account is not None,
        "enableServiceLinks": False,
        "securityContext": {**user, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": volumes,
    }
    return {"metadata": {"labels": _labels(name)}, "spec": spec}
