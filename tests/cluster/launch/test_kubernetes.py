"""Tests of the launcher for Kubernetes without Kubernetes: the kinds of launcher, states of pods, and changes of pods."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from ddlf.cluster.launch.kubernetes import pods as in_pods
from ddlf.cluster.launch.kubernetes.kubectl import Kubectl, end_of_worker, waiting_reason
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


# -- reasons of waiting and ended pods ----------------------------------------------------------------------------------


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
def test_waiting_pod_has_the_reason_of_kubernetes(waiting, words):
    assert waiting_reason(waiting) == words


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
    (
        pod("Failed", terminated(137, message="an older line")),
        Left(Cause.CRASH, "exit code 137; its last output: an older line", 137),
    ),
    (pod("Failed", terminated(1)), Left(Cause.CRASH, "exit code 1", 1)),
]


@pytest.mark.parametrize(("ended", "left"), ENDS)
def test_ended_pod_has_a_reason(ended, left):
    assert end_of_worker(ended, False) == Left(left.cause, f"pod job-1-abcde: {left.words}", left.exit_code)


def test_deleted_pod_is_not_a_crash():
    words = "pod job-1-abcde: it was deleted"
    assert end_of_worker(pod("Running"), True) == Left(Cause.CANCELLED, words)
    deleted = pod("Failed", terminated(143))
    deleted["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert end_of_worker(deleted, False) == Left(Cause.CANCELLED, words, 143)
    assert end_of_worker(pod("Running"), False) is None
    assert end_of_worker(pod("Succeeded", terminated(0)), False) is None


# -- the choice of launcher ---------------------------------------------------------------------------------------------


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
    with pytest.raises(ConfigError, match="launcher k8s: network has no effect with host"):
        installed("k8s:image=a,host=master,network=10.1.0.0/16", Workers(2, 2))


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
    with pytest.raises(ConfigError, match="launcher k8s has no key 'network'"):
        installed("k8s:gate=app-0.app:9100,network=10.1.0.0/16", Workers(3, 3))
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
def test_pod_ended_by_sigterm_does_not_succeed(monkeypatch):
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
    """A stand-in for ``kubectl`` that needs no cluster.

    A watch receives ``changes``. ``hangs`` and ``fails`` select commands by their first word or by the kind that they
    create.
    """

    def __init__(self):
        super().__init__()
        self.calls = []
        self.created = []
        self.watched = []
        self.changes = []
        self.events = []
        self.hangs = self.fails = ""
        self.hanging = threading.Event()

    async def __call__(self, *arguments, stdin=None):
        self.calls.append(arguments)
        self.created.append(stdin)
        subject = arguments[0] if stdin is None else stdin["kind"]
        if subject == self.hangs:
            self.hanging.set()
            await asyncio.Event().wait()
        if subject == self.fails:
            raise ConnectError(f"kubectl {arguments[0]}: (Forbidden): no")
        return ""

    async def read(self, *arguments, stdin=None):
        await self(*arguments, stdin=stdin)
        if arguments[0] == "get":
            return {
                "items": [
                    {"involvedObject": {"name": self.created[0]["metadata"]["name"]}, **event} for event in self.events
                ]
            }
        return {**stdin, "metadata": {**stdin["metadata"], "uid": "7"}}

    def all(self, word):
        return [arguments for arguments in self.calls if arguments[0] == word]

    async def watch(self, kind, selector):
        self.watched.append(selector)
        for change in self.changes:
            yield change
        await asyncio.Event().wait()


def launcher_with_changes(*changes, workers=1, keys="start_timeout=60"):
    launcher = installed(f"k8s:image=a,{keys}", Workers(workers, workers))
    launcher._kubectl = Scripted()
    launcher._kubectl.changes = list(changes)
    return launcher


async def test_job_and_secret_are_created_and_deleted_even_if_the_start_fails():
    bad = pod("Failed", terminated(3, message="ddlf-worker: no master at 10.0.0.1"), index=0)
    launcher = launcher_with_changes(("ADDED", bad))
    with pytest.raises(ConnectError, match=r"place 0: pod job-1-abcde: ddlf-worker: no master at 10\.0\.0\.1"):
        await asyncio.wait_for(launcher.start(), PATIENCE_S)
    assert (await launcher.left(0)).exit_code == 3
    await launcher.stop()
    job, token = launcher._kubectl.created[:2]
    assert (job["kind"], token["kind"]) == ("Job", "Secret")
    assert token["metadata"]["ownerReferences"] == [
        {"apiVersion": "batch/v1", "kind": "Job", "name": launcher.job, "uid": "7"}
    ]
    assert launcher.tokens.primary.decode() not in str((job, launcher._kubectl.calls))
    (deleted,) = launcher._kubectl.all("delete")
    assert deleted[1:3] == (f"job/{launcher.job}", f"secret/{launcher.job}")


async def test_job_has_no_pods_until_its_secret_exists():
    launcher = launcher_with_changes(("ADDED", pod("Failed", terminated(3), index=0)))
    with pytest.raises(ConnectError):
        await asyncio.wait_for(launcher.start(), PATIENCE_S)
    await launcher.stop()
    assert launcher._kubectl.created[0]["spec"]["suspend"] is True
    assert launcher._kubectl.created[1]["kind"] == "Secret"
    resumed = ("patch", f"job/{launcher.job}", "--type=merge", '--patch={"spec":{"suspend":false}}')
    assert launcher._kubectl.calls[2] == resumed


@pytest.mark.parametrize("step", ["Job", "Secret", "patch"])
async def test_start_that_is_ended_or_refused_at_any_step_leaves_nothing(step):
    launcher = launcher_with_changes()
    launcher._kubectl.hangs = step
    starting = asyncio.create_task(launcher.start())
    assert await asyncio.to_thread(launcher._kubectl.hanging.wait, PATIENCE_S)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await launcher.stop()
    launcher._kubectl.hangs, launcher._kubectl.fails = "", step
    before = launcher.job
    with pytest.raises(ConnectError, match="Forbidden"):
        await launcher.start()
    await launcher.stop()
    deleted = [words[1:3] for words in launcher._kubectl.all("delete")]
    assert deleted == [(f"job/{job}", f"secret/{job}") for job in (before, launcher.job)]
    assert len(launcher._kubectl.all("patch")) == (2 if step == "patch" else 0)


async def test_job_that_cannot_be_deleted_is_named_with_the_effect_on_its_pods(caplog):
    launcher = launcher_with_changes(("ADDED", pod("Failed", terminated(3), index=0)))
    for refused, words in (
        ("Secret", "if it exists, it is suspended and has no pods"),
        ("", "its pods end by themselves"),
    ):
        launcher._kubectl.fails = refused
        with pytest.raises(ConnectError):
            await asyncio.wait_for(launcher.start(), PATIENCE_S)
        launcher._kubectl.fails = "delete"
        await launcher.stop()
        assert f"the Job {launcher.job} was not deleted: kubectl delete: (Forbidden): no; {words}" in caplog.text


async def test_job_that_kubernetes_never_accepted_is_not_named_after_the_error(caplog):
    launcher = launcher_with_changes()
    launcher._kubectl.fails = "Job"
    with pytest.raises(ConnectError, match="kubectl create"):
        await asyncio.wait_for(launcher.start(), PATIENCE_S)
    launcher._kubectl.fails = "delete"
    await launcher.stop()
    assert "was not deleted" not in [record.message for record in caplog.records if record.levelname == "WARNING"]


async def test_second_connect_does_not_see_the_pods_of_the_first():
    launcher = launcher_with_changes(("ADDED", pod("Failed", terminated(3), index=0)))
    names = []
    for _ in range(2):
        with pytest.raises(ConnectError, match="place 0"):
            await asyncio.wait_for(launcher.start(), PATIENCE_S)
        await launcher.stop()
        names.append(launcher.job)
    assert names[0] != names[1]
    kubectl = launcher._kubectl
    assert [manifest["metadata"]["name"] for manifest in kubectl.created if manifest is not None] == [
        name for name in names for _ in ("Job", "Secret")
    ]
    assert kubectl.watched == [f"app.kubernetes.io/instance={name}" for name in names]
    assert [words[1] for words in kubectl.all("delete")] == [f"job/{name}" for name in names]


async def test_watch_that_kubernetes_ends_with_an_error_starts_again(tmp_path, monkeypatch, caplog):
    bad = {"type": "ADDED", "object": pod("Failed", terminated(3, message="no master"), index=0)}
    (tmp_path / "pod").write_text(json.dumps(bad) + "\n")
    (tmp_path / "error").write_text(json.dumps(EXPIRED) + "\n")
    put_kubectl(f"#!/bin/sh\ncd {tmp_path} && mv error shown && mv pod error; cat shown\n", tmp_path, monkeypatch)

    class Watches(Scripted):
        watch = Kubectl.watch

    launcher = launcher_with_changes()
    launcher._kubectl = Watches()
    with pytest.raises(ConnectError, match="place 0: pod job-1-abcde: no master"):
        await asyncio.wait_for(launcher.start(), PATIENCE_S)
    await launcher.stop()
    assert "kubectl get: (Expired): too old resource version; the run continues, and asks again" in caplog.text


async def test_fault_in_the_watch_is_reported_and_the_watch_starts_again(caplog):
    class Faulty(Scripted):
        async def watch(self, kind, selector):
            if not self.watched:
                self.watched.append(selector)
                raise json.JSONDecodeError("no JSON", "<html>", 0)
            async for change in super().watch(kind, selector):
                yield change

    launcher = launcher_with_changes()
    launcher._kubectl = Faulty()
    launcher._kubectl.changes = [("ADDED", pod("Failed", terminated(3, message="no master"), index=0))]
    with pytest.raises(ConnectError, match="place 0: pod job-1-abcde: no master"):
        await asyncio.wait_for(launcher.start(), PATIENCE_S)
    await launcher.stop()
    assert "the watch of the pods failed (JSONDecodeError: no JSON: line 1" in caplog.text
    assert "the run continues, and asks again" in caplog.text


async def test_pod_of_an_unknown_form_is_named_once_and_other_pods_are_read(caplog):
    odd = pod(index=0)
    del odd["metadata"]["annotations"]
    end = pod("Failed", terminated(3, message="no master"), index=0)
    launcher = launcher_with_changes(("ADDED", odd), ("MODIFIED", odd), ("MODIFIED", end))
    with pytest.raises(ConnectError, match="place 0: pod job-1-abcde: no master"):
        await asyncio.wait_for(launcher.start(), PATIENCE_S)
    await launcher.stop()
    assert launcher._kubectl.watched == [f"app.kubernetes.io/instance={launcher.job}"]
    assert caplog.text.count("pod job-1-abcde: its state cannot be read (KeyError: 'annotations')") == 1


async def test_reason_of_an_end_is_forgotten_when_the_next_worker_has_joined():
    launcher = launcher_with_changes()
    incarnations = [1]
    launcher._gate = SimpleNamespace(incarnation=incarnations.__getitem__, is_over=False, has_begun=True)
    launcher._end_queues[0] = asyncio.Queue()
    launcher._see("MODIFIED", pod("Failed", terminated(137, reason="OOMKilled"), index=0))
    launcher.has_left(0, await launcher.run(0, None))
    assert (await launcher.left(0)).cause is Cause.MEMORY
    incarnations[0] = 2
    assert await launcher.left(0) is None


@pytest.mark.parametrize("end", [ConnectError("kubectl get: no answer"), asyncio.CancelledError()])
async def test_kubernetes_that_does_not_answer_is_not_asked_again_for_each_place(end, monkeypatch):
    launcher = launcher_with_changes(workers=2)
    loop = asyncio.get_running_loop()
    now = loop.time
    request_times = []

    async def read(*_, **__):
        request_times.append(now())
        monkeypatch.setattr(loop, "time", lambda: now() + 100 * len(request_times))
        raise end

    launcher._kubectl.read = read
    for index in range(2):
        with contextlib.suppress(asyncio.CancelledError):
            assert await launcher.waits(index) == ""
    assert len(request_times) == 1


async def test_worker_that_fails_three_times_before_it_joins_fails_the_start():
    ends = [("MODIFIED", pod("Failed", terminated(1), name=f"job-0-{number}", index=0)) for number in "abb"]
    launcher = launcher_with_changes(*ends, keys="start_timeout=0.5")
    with pytest.raises(ConnectError, match="no worker joined at port"):
        await launcher.start()
    await launcher.stop()
    launcher = launcher_with_changes(*ends, ("DELETED", pod("Running", name="job-0-c", index=0)))
    with pytest.raises(ConnectError, match="place 0: pod job-0-c: it was deleted"):
        await asyncio.wait_for(launcher.start(), PATIENCE_S)
    await launcher.stop()


async def test_late_changes_of_an_old_pod_have_no_effect():
    new = pod(
        "Pending", {"waiting": {"reason": "ErrImagePull", "message": "new"}}, "job-0-b", 0, "2026-01-01T00:00:09Z"
    )
    old = pod("Failed", terminated(1), "job-0-a", 0)
    launcher = launcher_with_changes(("ADDED", new), ("DELETED", old), keys="start_timeout=0.5")
    with pytest.raises(ConnectError, match="ErrImagePull: new"):
        await launcher.start()
    await launcher.stop()


async def test_place_without_a_pod_is_explained_by_the_last_warning_about_the_job():
    launcher = launcher_with_changes(keys="start_timeout=0.5")
    about = {"reason": "FailedCreate"}
    launcher._kubectl.events = [
        {**about, "message": "new", "lastTimestamp": "2026-01-02T00:00:00Z"},
        {**about, "message": "old", "lastTimestamp": "2026-01-01T00:00:00Z"},
        {"involvedObject": {"name": "other"}, "reason": "A", "message": "b", "lastTimestamp": "2026-01-03T00:00:00Z"},
    ]
    with pytest.raises(ConnectError, match=r"within 0\.5 s: FailedCreate: new"):
        await launcher.start()
    await launcher.stop()


async def test_end_after_the_time_of_the_job_is_its_time_limit():
    launcher = launcher_with_changes(
        ("MODIFIED", pod("Failed", terminated(3), index=0)), keys="start_timeout=60,time=0.000001"
    )
    with pytest.raises(ConnectError, match="the Job's time of 1e-06 s is over"):
        await asyncio.wait_for(launcher.start(), PATIENCE_S)
    assert (await launcher.left(0)).cause is Cause.TIME_LIMIT
    await launcher.stop()


async def test_missing_kubectl_is_named(monkeypatch, caplog):
    monkeypatch.setenv("PATH", "")
    launcher = installed("k8s:image=a", Workers(1, 1))
    with pytest.raises(ConfigError, match="needs the command kubectl, which is not on this machine"):
        await launcher.start()
    await launcher.stop()
    assert "was not deleted" not in caplog.text


KUBECTL = """#!/bin/sh
case "$*" in
*--watch*) printf '%s\\n' '{"type": "ADDED", "object": {"a": 1}}' '{' '  "type": "DELETED",' '  "object": {' '  }' '}';;
*fails*) echo "error: the first line" >&2; echo "Error from server (Forbidden): jobs is forbidden" >&2; exit 1;;
*) cat;;
esac
"""


EXPIRED = {
    "type": "ERROR",
    "object": {"kind": "Status", "metadata": {}, "reason": "Expired", "message": "too old resource version"},
}


def put_kubectl(text, folder, monkeypatch):
    (folder / "kubectl").write_text(text)
    (folder / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


async def test_answers_of_kubectl_are_read(tmp_path, monkeypatch):
    put_kubectl(KUBECTL, tmp_path, monkeypatch)
    kubectl = Kubectl("lab")
    assert await kubectl.read("create", stdin={"kind": "Job"}) == {"kind": "Job"}
    assert [change async for change in kubectl.watch("pods", "a=b")] == [("ADDED", {"a": 1}), ("DELETED", {})]
    with pytest.raises(ConnectError, match=r"^kubectl fails: \(Forbidden\): jobs is forbidden"):
        await kubectl("fails")


async def test_error_in_a_watch_ends_it_with_the_words_of_kubernetes(tmp_path, monkeypatch):
    (tmp_path / "said").write_text(json.dumps(EXPIRED) + "\n")
    put_kubectl(f"#!/bin/sh\ncat {tmp_path}/said\n", tmp_path, monkeypatch)
    with pytest.raises(ConnectError, match=r"^kubectl get: \(Expired\): too old resource version"):
        await anext(Kubectl().watch("pods", "a=b"))


# -- manifests ----------------------------------------------------------------------------------------------------------


def keys(**more):
    return RenderKeys(**{"image": "image", "name": "app", "workers": "4", **more})


def test_pod_does_not_run_as_root_and_writes_only_into_empty_folders():
    *_, job = run(keys(), RunCommand("/app/app.py", "text"))
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    kinds = {volume["name"]: next(key for key in volume if key != "name") for volume in pod["volumes"]}
    writable = [mount["name"] for mount in container["volumeMounts"] if not mount.get("readOnly")]
    assert [kinds[name] for name in writable] == ["emptyDir", "emptyDir"]
    assert "readOnly" in str(next(mount for mount in container["volumeMounts"] if mount["name"] == "token"))


def test_result_of_a_run_is_the_result_of_its_first_pod():
    *_, job = run(keys(), RunCommand("/app/app.py", None, ["--param", "$(x)"]))
    spec = job["spec"]
    assert spec["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    assert (spec["completionMode"], spec["podReplacementPolicy"]) == ("Indexed", "Failed")
    assert spec["podFailurePolicy"]["rules"][0]["action"] == "Ignore"
    command = spec["template"]["spec"]["containers"][0]["command"]
    assert command[3:5] == ["--param", "$$(x)"]
    assert command[-4:] == ["--launcher", "k8s:gate=app-0.app:9100,start_timeout=600", "--workers", "4"]


def test_only_the_pod_that_leads_gets_the_volume_of_a_jobset():
    *_, jobset_manifest = jobset(keys(claim="runs"), RunCommand("/app/app.py", "text"))
    lead, followers = (job["template"]["spec"]["template"]["spec"] for job in jobset_manifest["spec"]["replicatedJobs"])
    assert "persistentVolumeClaim" in str(lead["volumes"])
    assert "persistentVolumeClaim" not in str(followers["volumes"])
    assert "first=1" in str(followers["containers"][0]["command"])
    assert "k8s:gate=app-lead-0-0.app:9100" in str(followers["containers"][0]["command"])


def test_place_of_a_worker_is_its_index_and_the_worker_ends_without_its_master():
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


def test_only_the_secret_contains_the_token():
    owner = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "app", "uid": "7"}}
    assert secret("app", b"a", owner)["stringData"] == {"token": "a"}


def test_worker_that_ends_before_the_run_does_not_succeed(tmp_path):
    command = [sys.executable, "-m", "ddlf.cli.worker", "--join", "127.0.0.1:1", "--state-dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert any("joining" in line for line in process.stdout)
        process.terminate()
        assert process.wait(PATIENCE_S) == 143
