"""Kubernetes without Kubernetes: which launcher a process gets, what pods say, and what is made of changes of pods."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from ddlf.cluster.launch.kubernetes import pods as in_pods
from ddlf.cluster.launch.kubernetes.kubectl import Kubectl, how_it_ended, why_it_waits
from ddlf.cluster.launch.kubernetes.launcher import Kubernetes
from ddlf.cluster.launch.kubernetes.manifests import (
    INDEX,
    PodKeys,
    RenderKeys,
    RunCommand,
    jobset,
    run,
    secret,
    workers,
)
from ddlf.cluster.launch.kubernetes.pods import Pods
from ddlf.cluster.launch.launcher import Cause, Left, Workers, from_keys, installed
from ddlf.cluster.launch.supervisor import Supervisor
from ddlf.errors import ConfigError, ConnectError
from tests.patience import PATIENCE_S

TOKEN = "x" * 43


def pod(phase="Running", state=None, name="job-1-abcde", index=1, created="2026-01-01T00:00:00Z", **status):
    return {
        "metadata": {"name": name, "uid": name, "annotations": {INDEX: str(index)}, "creationTimestamp": created},
        "status": {"phase": phase, "containerStatuses": [{"state": state or {}}], **status},
    }


def terminated(code, **more):
    return {"terminated": {"exitCode": code, "reason": "Error", **more}}


# -- why a pod waits, and how it ended ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("waiting", "words"),
    [
        (
            pod("Pending", conditions=[{"type": "PodScheduled", "status": "False", "reason": "A", "message": "b"}]),
            "A: b",
        ),
        (
            pod("Pending", {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}),
            "ImagePullBackOff: no such image",
        ),
        (pod("Pending", {"waiting": {"reason": "CrashLoopBackOff"}}), "CrashLoopBackOff"),
        (pod("Pending", {"waiting": {"reason": "ContainerCreating"}}), ""),
        ({"metadata": {}, "status": {"phase": "Pending"}}, ""),
    ],
)
def test_pod_that_waits_says_why_in_the_words_of_kubernetes(waiting, words):
    assert why_it_waits(waiting) == words


def disrupted(reason, message="why"):
    return [{"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}]


def evicted(message):
    return pod("Failed", reason="Evicted", message=message, conditions=disrupted("TerminationByKubelet"))


ENDS = [
    (pod("Failed", terminated(137, reason="OOMKilled")), Left(Cause.MEMORY, "OOMKilled: exit code 137", 137)),
    (evicted("low on memory"), Left(Cause.MEMORY, "Evicted: low on memory")),
    (evicted("low on disk"), Left(Cause.PREEMPTED, "Evicted: low on disk")),
    (
        pod("Failed", terminated(143), conditions=disrupted("PreemptionByScheduler")),
        Left(Cause.PREEMPTED, "PreemptionByScheduler: why", 143),
    ),
    (
        pod("Failed", terminated(143), conditions=disrupted("DeletionByTaintManager")),
        Left(Cause.NODE, "DeletionByTaintManager: why", 143),
    ),
    (pod("Failed", reason="NodeLost", message="node a is gone"), Left(Cause.NODE, "NodeLost: node a is gone")),
    (
        pod("Failed", reason="DeadlineExceeded", message="too long"),
        Left(Cause.TIME_LIMIT, "DeadlineExceeded: too long"),
    ),
    (pod("Failed", terminated(3, message="ddlf-worker: no\n master")), Left(Cause.CRASH, "ddlf-worker: no master", 3)),
    (pod("Failed", terminated(1)), Left(Cause.CRASH, "exit code 1", 1)),
]


@pytest.mark.parametrize(("ended", "left"), ENDS)
def test_pod_that_ended_says_why(ended, left):
    assert how_it_ended(ended, False) == Left(left.cause, f"pod job-1-abcde: {left.words}", left.exit_code)


def test_deleted_pod_is_no_crash():
    words = "pod job-1-abcde: it was deleted"
    assert how_it_ended(pod("Running"), True) == Left(Cause.CANCELLED, words)
    gone = pod("Failed", terminated(143))
    gone["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert how_it_ended(gone, False) == Left(Cause.CANCELLED, words, 143)
    assert how_it_ended(pod("Running"), False) is None
    assert how_it_ended(pod("Succeeded", terminated(0)), False) is None


# -- which launcher -----------------------------------------------------------------------------------------------------


def test_process_outside_gets_the_launcher_of_a_job():
    launcher = installed("k8s:image=registry:5000/ddlf:1,memory=2GiB,env.A=b,host=master,port=9100", Workers(2, 4))
    assert isinstance(launcher, Kubernetes)
    assert (launcher.least, len(launcher.addresses), launcher.port) == (2, 4, 9100)
    assert (launcher.keys.image, launcher.keys.memory, launcher.keys.env) == (
        "registry:5000/ddlf:1",
        2 * 2**30,
        {"A": "b"},
    )
    assert isinstance(from_keys("k8s", {"image": "a", "workers": 2, "env": {"A": "b"}}), Kubernetes)
    with pytest.raises(ConfigError, match="launcher k8s needs the key 'image'"):
        installed("k8s", Workers(2, 2))
    with pytest.raises(
        ConfigError, match="must not contain DDLF_TOKEN, because everybody who can see the pods sees it"
    ):
        installed(f"k8s:image=a,env.DDLF_TOKEN={TOKEN}", Workers(2, 2))
    with pytest.raises(ConfigError, match="must have names of environment variables, got 'A-B'"):
        installed("k8s:image=a,env.A-B=c", Workers(2, 2))


@pytest.fixture
def in_a_pod(monkeypatch, tmp_path):
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    monkeypatch.setenv("DDLF_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")


@pytest.mark.usefixtures("in_a_pod")
def test_pod_has_the_place_of_its_index_and_the_token_of_its_secret(monkeypatch):
    launcher = installed("k8s:gate=app-0.app:9100", Workers(3, 3))
    assert isinstance(launcher, Pods)
    assert (launcher.place, launcher.port, launcher.tokens.primary) == (1, 9100, TOKEN.encode())
    assert launcher.follower() is not None
    assert installed("k8s:gate=app-0.app:9100,first=1", Workers(3, 3)).place == 2
    with pytest.raises(ConfigError, match="this pod has place 1, and only place 0 is the master"):
        asyncio.run(launcher.start())
    with pytest.raises(ConfigError, match="this is pod 2, but workers=1; give the Job as many completions as workers"):
        installed("k8s:gate=app-0.app:9100", Workers(1, 1))
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    assert installed("k8s:gate=app-0.app:9100", Workers(3, 3)).follower() is None
    monkeypatch.delenv("JOB_COMPLETION_INDEX")
    with pytest.raises(
        ConfigError, match="JOB_COMPLETION_INDEX is not set, so this process is not in a pod of an Indexed Job"
    ):
        installed("k8s:gate=app-0.app:9100", Workers(3, 3))


@pytest.mark.usefixtures("in_a_pod")
def test_pod_that_is_ended_does_not_succeed(monkeypatch):
    started = []

    class Waits(Supervisor):
        def start(self):
            started.append(self._command)
            os.kill(os.getpid(), signal.SIGTERM)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setattr(in_pods, "Supervisor", Waits)
    try:
        assert installed("k8s:gate=app-0.app:9100,start_timeout=20", Workers(3, 3)).follower()() == 143
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    joining = ["--join", "app-0.app:9100", "--place", "1", "--host", "0.0.0.0", "--port", "9000", "--join-for", "20"]
    assert started[0][3 : 3 + len(joining)] == joining


# -- changes of pods ----------------------------------------------------------------------------------------------------


class Scripted(Kubectl):
    """Answers as ``kubectl`` would, without a cluster. ``changes`` are sent to those who watch."""

    def __init__(self):
        super().__init__()
        self.said = []
        self.created = []
        self.changes = []
        self.events = []

    async def __call__(self, *arguments, stdin=None):
        self.said.append(arguments)
        self.created.append(stdin)
        return ""

    async def read(self, *arguments, stdin=None):
        self.said.append(arguments)
        self.created.append(stdin)
        if arguments[0] == "get":
            return {"items": self.events}
        return {**stdin, "metadata": {**stdin["metadata"], "uid": "7"}}

    async def watch(self, kind, selector):
        for change in self.changes:
            yield change
        await asyncio.Event().wait()


def scripted(*changes, workers=1, keys="start_timeout=60"):
    launcher = installed(f"k8s:image=a,{keys}", Workers(workers, workers))
    launcher._kubectl = Scripted()
    launcher._kubectl.changes = list(changes)
    return launcher


async def test_job_and_secret_are_created_and_deleted_even_if_the_start_fails():
    bad = pod("Failed", terminated(3, message="ddlf-worker: no master at 10.0.0.1"), index=0)
    launcher = scripted(("ADDED", bad))
    with pytest.raises(ConnectError, match=r"place 0: pod job-1-abcde: ddlf-worker: no master at 10\.0\.0\.1"):
        await asyncio.wait_for(launcher.start(), PATIENCE_S)
    assert (await launcher.left(0)).exit_code == 3
    await launcher.stop()
    job, token = launcher._kubectl.created[:2]
    assert (job["kind"], token["kind"]) == ("Job", "Secret")
    assert token["metadata"]["ownerReferences"] == [
        {"apiVersion": "batch/v1", "kind": "Job", "name": launcher.job, "uid": "7"}
    ]
    assert launcher.tokens.primary.decode() not in str((job, launcher._kubectl.said))
    (deleted,) = [words for words in launcher._kubectl.said if words[0] == "delete"]
    assert deleted[1:3] == (f"job/{launcher.job}", f"secret/{launcher.job}")


async def test_worker_that_fails_three_times_before_it_joins_fails_the_start():
    ends = [("MODIFIED", pod("Failed", terminated(1), name=f"job-0-{number}", index=0)) for number in "abb"]
    launcher = scripted(*ends, keys="start_timeout=0.5")
    with pytest.raises(ConnectError, match="no worker joined at port"):
        await launcher.start()
    await launcher.stop()
    launcher = scripted(*ends, ("DELETED", pod("Running", name="job-0-c", index=0)))
    with pytest.raises(ConnectError, match="place 0: pod job-0-c: it was deleted"):
        await asyncio.wait_for(launcher.start(), PATIENCE_S)
    await launcher.stop()


async def test_late_news_of_an_old_pod_change_nothing():
    new = pod(
        "Pending", {"waiting": {"reason": "ErrImagePull", "message": "new"}}, "job-0-b", 0, "2026-01-01T00:00:09Z"
    )
    old = pod("Failed", terminated(1), "job-0-a", 0)
    launcher = scripted(("ADDED", new), ("DELETED", old), keys="start_timeout=0.5")
    with pytest.raises(ConnectError, match="ErrImagePull: new"):
        await launcher.start()
    await launcher.stop()


async def test_place_without_a_pod_is_explained_by_the_last_warning_about_the_job():
    launcher = scripted(keys="start_timeout=0.5")
    about = {"involvedObject": {"name": launcher.job}, "reason": "FailedCreate"}
    launcher._kubectl.events = [
        {**about, "message": "new", "lastTimestamp": "2026-01-02T00:00:00Z"},
        {**about, "message": "old", "lastTimestamp": "2026-01-01T00:00:00Z"},
        {"involvedObject": {"name": "other"}, "reason": "A", "message": "b", "lastTimestamp": "2026-01-03T00:00:00Z"},
    ]
    with pytest.raises(ConnectError, match=r"within 0\.5 s: FailedCreate: new"):
        await launcher.start()
    await launcher.stop()


async def test_end_after_the_time_of_the_job_is_its_time_limit():
    launcher = scripted(("MODIFIED", pod("Failed", terminated(3), index=0)), keys="start_timeout=60,time=0.000001")
    with pytest.raises(ConnectError, match="the Job's time of 1e-06 s is over"):
        await asyncio.wait_for(launcher.start(), PATIENCE_S)
    assert (await launcher.left(0)).cause is Cause.TIME_LIMIT
    await launcher.stop()


async def test_missing_kubectl_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "")
    launcher = installed("k8s:image=a", Workers(1, 1))
    with pytest.raises(ConfigError, match="needs the command kubectl, which is not on this machine"):
        await launcher.start()
    await launcher.stop()


KUBECTL = """#!/bin/sh
case "$*" in
*--watch*) printf '%s\\n' '{"type": "ADDED", "object": {"a": 1}}' '{' '  "type": "DELETED",' '  "object": {' '  }' '}';;
*fails*) echo "error: the first line" >&2; echo "Error from server (Forbidden): jobs is forbidden" >&2; exit 1;;
*) cat;;
esac
"""


async def test_answers_of_kubectl_are_read(tmp_path, monkeypatch):
    (tmp_path / "kubectl").write_text(KUBECTL)
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    kubectl = Kubectl("lab")
    assert await kubectl.read("create", stdin={"kind": "Job"}) == {"kind": "Job"}
    assert [change async for change in kubectl.watch("pods", "a=b")] == [("ADDED", {"a": 1}), ("DELETED", {})]
    with pytest.raises(ConnectError, match=r"^kubectl fails: \(Forbidden\): jobs is forbidden"):
        await kubectl("fails")


# -- manifests ----------------------------------------------------------------------------------------------------------


def keys(**more):
    return RenderKeys(**{"image": "image", "name": "app", "workers": "4", **more})


def test_pod_is_no_root_and_writes_only_into_empty_folders():
    *_, job = run(keys(), RunCommand("/app/app.py", "text"))
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    kinds = {volume["name"]: next(key for key in volume if key != "name") for volume in pod["volumes"]}
    writable = [mount["name"] for mount in container["volumeMounts"] if not mount.get("readOnly")]
    assert [kinds[name] for name in writable] == ["emptyDir", "emptyDir"]
    assert "readOnly" in str(next(mount for mount in container["volumeMounts"] if mount["name"] == "token"))


def test_run_is_what_its_first_pod_is():
    *_, job = run(keys(), RunCommand("/app/app.py", None, ["--param", "$(x)"]))
    spec = job["spec"]
    assert spec["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    assert (spec["completionMode"], spec["podReplacementPolicy"]) == ("Indexed", "Failed")
    assert spec["podFailurePolicy"]["rules"][0]["action"] == "Ignore"
    command = spec["template"]["spec"]["containers"][0]["command"]
    assert command[3:5] == ["--param", "$$(x)"]
    assert command[-4:] == ["--launcher", "k8s:gate=app-0.app:9100,start_timeout=600", "--workers", "4"]


def test_only_the_pod_that_leads_gets_the_volume_of_a_jobset():
    *_, both = jobset(keys(claim="runs"), RunCommand("/app/app.py", "text"))
    lead, others = (each["template"]["spec"]["template"]["spec"] for each in both["spec"]["replicatedJobs"])
    assert "persistentVolumeClaim" in str(lead["volumes"])
    assert "persistentVolumeClaim" not in str(others["volumes"])
    assert "first=1" in str(others["containers"][0]["command"])
    assert "k8s:gate=app-lead-0-0.app:9100" in str(others["containers"][0]["command"])


def test_place_of_a_worker_is_its_index_and_a_lost_master_ends_it_for_good():
    job = workers(PodKeys(image="image", cores=2, gpus=1), "job", 3, ["--join", "10.0.0.1:9100"])
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"][:5] == ["ddlf-worker", "--join", "10.0.0.1:9100", "--place", "$(DDLF_PLACE)"]
    assert {"name": "DDLF_GRACE", "value": "20"} in container["env"]
    assert job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 30
    assert container["resources"] == {"limits": {"cpu": "2", "nvidia.com/gpu": "1"}}
    assert {"name": "DDLF_CORES", "value": "2"} in container["env"]
    rules = {rule["action"]: rule for rule in job["spec"]["podFailurePolicy"]["rules"]}
    assert rules["FailIndex"]["onExitCodes"]["values"] == [2, 3]
    assert job["spec"]["ttlSecondsAfterFinished"] == 0


def test_name_that_kubernetes_would_refuse_is_refused():
    for name in ("App", "1app", "app-", "a" * 41, ""):
        with pytest.raises(ValueError, match="small letters, digits and hyphens"):
            keys(name=name)


def test_token_is_in_no_text_but_the_secret():
    owner = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "app", "uid": "7"}}
    assert secret("app", b"a", owner)["stringData"] == {"token": "a"}


def test_worker_that_is_ended_before_the_run_does_not_succeed(tmp_path):
    command = [sys.executable, "-m", "ddlf.cli.worker", "--join", "127.0.0.1:1", "--state-dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert any("joining" in line for line in process.stdout)
        process.terminate()
        assert process.wait(PATIENCE_S) == 143
