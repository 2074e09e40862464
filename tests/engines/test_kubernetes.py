"""Tests of the Kubernetes launcher: its manifests fit the schemas, and runs use ``kubectl`` on a stand-in for a cluster."""

import base64
import contextlib
import hashlib
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import jsonschema
import kubernetes_validate
import psutil
import pytest
import yaml

from ddlf.cluster.launch.supervisor import JOIN_FOR_S
from tests.engines.kubernetes_cluster import Cluster
from tests.patience import PATIENCE_S

MINORS = ("1.33", "1.34", "1.37")
APP = """
import asyncio, contextlib, ddlf
from pathlib import Path

def number(self):
    return self.id

async def all(cluster):
    while True:
        with contextlib.suppress(ddlf.errors.DDLFError):
            await cluster.connect()
            return await cluster.run_method(number)
        await asyncio.sleep(0.05)

async def main(cluster):
    print("workers", await all(cluster), flush=True)
    while Path("wait").exists():
        await all(cluster)
        await asyncio.sleep(0.05)
    print("end", await all(cluster), flush=True)
"""
TRAINED = """
import numpy as np, ddlf

class App(ddlf.IApp):
    batch_size, master_epochs, seed, slots, threads = 32, 3, 3, 4, 1

    async def load_dataset(self):
        r = np.random.default_rng(0)
        self.x_train = r.normal(size=(512, 8)).astype("float32")
        self.y_train = (self.x_train.sum(1) > 0).astype("int32")

    async def create_model(self):
        import keras
        self.model = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(16, "tanh"), keras.layers.Dropout(0.3), keras.layers.Dense(2, "softmax")]
        )
        self.model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy")
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    assert shutil.which("kubectl"), "these tests need kubectl"
    stand_in = Cluster(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(stand_in.kubeconfig))
    yield stand_in
    stand_in.close()


@contextlib.contextmanager
def ddlf(folder, *words, app=APP):
    """Run ``ddlf`` in a folder with an app."""
    (folder / "app.py").write_text(app)
    with open(folder / "errors", "w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "ddlf", *words], cwd=folder, text=True, stdout=subprocess.PIPE, stderr=errors
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()


def rendered(folder, *words, app=APP):
    """Return the output of ``ddlf k8s render``."""
    with ddlf(folder, "k8s", "render", "app.py", "--image", "image", *words, app=app) as process:
        output, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, (folder / "errors").read_text()
    return output


def launched(folder, workers, keys="", **more):
    launcher, *words = f"k8s:image=image{keys}".split()
    return ddlf(folder, "run", "app.py", "--workers", workers, "--launcher", launcher, *words, **more)


def wait_for(text, file):
    """Wait until a file contains a text."""
    pause = threading.Event()
    deadline = time.monotonic() + PATIENCE_S
    while text not in file.read_text():
        assert time.monotonic() < deadline, file.read_text()
        pause.wait(0.02)


# -- manifests ----------------------------------------------------------------------------------------------------------

MORE = ("--workers", "2..4", "--cores", "2", "--memory", "4GiB", "--gpus", "1", "--env", "A=b", "--time", "2h")
CLAIM = ("--claim", "runs", "--service-account", "trainer", "--namespace", "lab", "--options", "--master-epochs 3")


@pytest.mark.parametrize("minor", MINORS)
def test_manifests_are_valid_for_kubernetes(minor, tmp_path):
    for words in (MORE, (*MORE, *CLAIM), ("--workers", "1")):
        for manifest in yaml.safe_load_all(rendered(tmp_path, *words)):
            kubernetes_validate.validate(manifest, minor, strict=True)
    with ddlf(tmp_path, "k8s", "render", "--pool", "--workers", "3", "--image", "image", "--cores", "2") as process:
        for manifest in yaml.safe_load_all(process.communicate(timeout=PATIENCE_S)[0]):
            kubernetes_validate.validate(manifest, minor, strict=True)
    from ddlf.cluster.launch.kubernetes.manifests import PodKeys, secret, workers

    job = workers(PodKeys(image="image", cores=2, time="1h"), "job", 3, ["--join", "10.0.0.1:9100"])
    kubernetes_validate.validate(job, minor, strict=True)
    owned = secret("job", b"token", {**job, "metadata": {"name": "job", "uid": "1"}})
    kubernetes_validate.validate(owned, minor, strict=True)


def strict(properties, *required):
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


TEXTS = {"type": "array", "items": {"type": "string"}}
JOBSET = strict(
    {
        "apiVersion": {"const": "jobset.x-k8s.io/v1alpha2"},
        "kind": {"const": "JobSet"},
        "metadata": {"type": "object"},
        "spec": strict(
            {
                "replicatedJobs": {
                    "type": "array",
                    "items": strict(
                        {
                            "name": {"type": "string"},
                            "replicas": {"type": "integer"},
                            "template": strict({"metadata": {"type": "object"}, "spec": {"type": "object"}}, "spec"),
                        },
                        *("name", "template"),
                    ),
                },
                "network": strict(
                    {
                        "enableDNSHostnames": {"type": "boolean"},
                        "publishNotReadyAddresses": {"type": "boolean"},
                        "subdomain": {"type": "string"},
                    }
                ),
                "successPolicy": strict(
                    {"operator": {"enum": ["All", "Any"]}, "targetReplicatedJobs": TEXTS}, "operator"
                ),
                "failurePolicy": strict({"maxRestarts": {"type": "integer"}}),
            }
        ),
    },
    *("apiVersion", "kind", "spec"),
)
"""The part of JobSet's schema that the manifest uses. Its Jobs are checked with the schema of Kubernetes."""


def test_jobset_is_valid_and_has_no_new_fields_of_jobs(tmp_path):
    *other_manifests, jobset = yaml.safe_load_all(rendered(tmp_path, "--jobset", *MORE, *CLAIM))
    assert [manifest["kind"] for manifest in other_manifests] == ["ConfigMap"]
    jsonschema.validate(jobset, JOBSET)
    lead, followers = (manifest["template"]["spec"] for manifest in jobset["spec"]["replicatedJobs"])
    for spec in (lead, followers):
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, "spec": spec}
        kubernetes_validate.validate(job, "1.32", strict=True)
        assert not {"successPolicy", "backoffLimitPerIndex", "podReplacementPolicy"} & {*spec}
    assert (lead["completions"], followers["completions"]) == (1, 3)
    *_, alone = yaml.safe_load_all(rendered(tmp_path, "--jobset", "--workers", "1"))
    assert [manifest["name"] for manifest in alone["spec"]["replicatedJobs"]] == ["lead"]


# -- a master outside of the cluster ------------------------------------------------------------------------------------


def test_workers_in_pods_join_the_master_and_nothing_remains(cluster, tmp_path):
    with launched(tmp_path, "3", ",start_timeout=100,env.SOME=thing") as process:
        output, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, (tmp_path / "errors").read_text()
    assert "workers [1, 2, 3]" in output
    assert not [name for name in ("jobs", "pods", "secrets") if cluster.named(name)]
    (token,) = {
        item["stringData"]["token"] for _, kind, of, item in cluster.changes if of == "secrets" and kind == "ADDED"
    }
    owned = [item["metadata"]["ownerReferences"][0]["kind"] for _, _, of, item in cluster.changes if of == "secrets"]
    assert owned[0] == "Job"
    shown = json.dumps([cluster.commands, [item for _, _, of, item in cluster.changes if of != "secrets"]])
    shown += output + (tmp_path / "errors").read_text()
    assert token not in shown
    assert base64.b64encode(token.encode()).decode() not in shown
    assert all("SOME=thing" in command for command in cluster.commands)


ENDS = [
    ("OOMKilled", "", "", "OOMKilled: exit code 137 (out of memory)"),
    ("Evicted", "The node was low on resource: memory.", "TerminationByKubelet", "memory. (out of memory)"),
    ("Preempted", "Preempted by a pod on node a", "PreemptionByScheduler", "by a pod on node a (preempted)"),
    ("", "node is gone", "DeletionByPodGC", "DeletionByPodGC: node is gone (node lost)"),
    ("", "Eviction API: drain", "EvictionByEvictionAPI", "EvictionByEvictionAPI: Eviction API: drain (preempted)"),
]


def test_worker_that_kubernetes_ends_is_replaced_and_the_reason_is_printed(cluster, tmp_path):
    (tmp_path / "wait").touch()
    with launched(tmp_path, "2", ",start_timeout=100") as process:
        assert "workers [1, 2]\n" in iter(process.stdout.readline, "")
        for reason, message, disruption, words in ENDS:
            cluster.wait(lambda cluster: cluster.pod(1), PATIENCE_S)
            number = signal.SIGTERM if "API" in disruption else signal.SIGKILL
            pod = cluster.end(1, reason, message, disruption, number)
            wait_for(f"place 1: pod {pod}: ", tmp_path / "errors")
            wait_for(words, tmp_path / "errors")
        cluster.wait(lambda cluster: cluster.pod(1), PATIENCE_S)
        (tmp_path / "wait").unlink()
        output, _ = process.communicate(timeout=PATIENCE_S)
        assert output == "end [1, 2]\n", (tmp_path / "errors").read_text()
    assert not [name for name in ("jobs", "pods", "secrets") if cluster.named(name)]


def test_run_continues_without_kubernetes_and_says_so(cluster, tmp_path):
    (tmp_path / "wait").touch()
    with launched(tmp_path, "2", ",start_timeout=100") as process:
        assert "workers [1, 2]\n" in iter(process.stdout.readline, "")
        cluster.stop_answering()
        wait_for("; the run continues, and asks again", tmp_path / "errors")
        (tmp_path / "wait").unlink()
        output, _ = process.communicate(timeout=PATIENCE_S)
        assert (output, process.returncode) == ("end [1, 2]\n", 0)
    errors = (tmp_path / "errors").read_text()
    assert errors.count("the run continues") == 1
    assert re.search(r"the Job ddlf-\w+ was not deleted: .*; its pods end by themselves", errors)


STUCK = [
    (",cores=65", "Unschedulable: 0/1 nodes are available: 1 Insufficient cpu."),
    (",service_account=missing", "FailedCreate: Error creating: pods "),
]


@pytest.mark.parametrize(("keys", "words"), STUCK)
def test_waiting_pod_is_reported_with_the_reason_of_kubernetes(keys, words, cluster, tmp_path):
    with launched(tmp_path, "2", f",start_timeout=7{keys}") as process:
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 3
    errors = (tmp_path / "errors").read_text()
    assert f"waiting for workers at places 0 and 1: {words}" in errors
    assert re.search(rf"no worker joined at port \d+ within 7 s: {re.escape(words)}", errors)
    assert not [name for name in ("jobs", "pods", "secrets") if cluster.named(name)]


def test_image_that_cannot_be_pulled_is_named(cluster, tmp_path):
    words = ("run", "app.py", "--workers", "1", "--launcher", "k8s:image=missing:1,start_timeout=6")
    with ddlf(tmp_path, *words) as process:
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 3
    assert 'place 0: ImagePullBackOff: Back-off pulling image "missing:1"' in (tmp_path / "errors").read_text()


def test_worker_that_cannot_reach_the_master_says_so_in_the_error(cluster, tmp_path):
    cluster.replacements[f"--join-for\x00{JOIN_FOR_S}"] = "--join-for\x001"
    with launched(tmp_path, "1", ",start_timeout=100,host=nowhere.invalid") as process:
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 3
    assert re.search(r"place 0: pod \S+: ddlf-worker: no master at nowhere.invalid", (tmp_path / "errors").read_text())


def test_error_of_kubectl_without_a_cluster_is_printed(tmp_path, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with launched(tmp_path, "1") as process:
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 3
    assert "kubectl create: " in (tmp_path / "errors").read_text()


def test_nothing_remains_after_ctrl_c_and_after_a_killed_master(cluster, tmp_path):
    (tmp_path / "wait").touch()
    for number in (signal.SIGINT, signal.SIGKILL):
        with launched(tmp_path, "2", ",start_timeout=100") as process:
            assert "workers [1, 2]\n" in iter(process.stdout.readline, "")
            process.send_signal(number)
            process.communicate(timeout=PATIENCE_S)
            began = time.monotonic()
            cluster.wait(lambda cluster: not cluster.named("jobs") and not cluster.named("secrets"), PATIENCE_S)
            assert not cluster.named("pods")
            assert time.monotonic() - began < 35 + PATIENCE_S / 4
            jobs = {item["metadata"]["name"] for _, _, of, item in cluster.changes if of == "jobs"}
            shown = str([item.info for item in psutil.process_iter(["cmdline"])])
            assert not [job for job in jobs if job in shown], "no kubectl remains"


# -- a run in pods ------------------------------------------------------------------------------------------------------


def apply(folder, text):
    return subprocess.run(
        ["kubectl", "create", "--validate=false", "-f", "-"], input=text, text=True, capture_output=True, check=True
    )


def on_this_machine(cluster):
    """Let the pods of a run reach each other by an address of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cluster.replacements |= {"app-0.app:9100": f"127.0.0.1:{port}", "k8s:gate=": "k8s:port=0,gate="}


def weights(path):
    import safetensors.numpy

    digest = hashlib.sha256()
    for name, array in sorted(safetensors.numpy.load_file(path).items()):
        digest.update(name.encode() + array.tobytes())
    return digest.hexdigest()


def output_of(cluster, index, file="stdout"):
    return "".join(path.read_text() for path in sorted(cluster.folder.glob(f"app-{index}-*/tmp/{file}")))


def test_run_in_pods_has_the_bits_of_a_local_run(cluster, tmp_path):
    on_this_machine(cluster)
    text = rendered(tmp_path, "--workers", "2", "--options", f"--save {tmp_path}/model.safetensors", app=TRAINED)
    apply(tmp_path, text)
    with ddlf(tmp_path, "k8s", "secret", "job/app", app=TRAINED) as process:
        assert process.communicate(timeout=PATIENCE_S)[0] == "secret/app created\n"
    job = cluster.wait(lambda cluster: cluster.finished("app"), PATIENCE_S)
    assert job == "Complete", output_of(cluster, 0, "stderr")
    in_pods = weights(tmp_path / "model.safetensors")
    with ddlf(tmp_path, "run", "app.py", "--local", "2", "--save", "model.safetensors", app=TRAINED) as process:
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0
    assert weights(tmp_path / "model.safetensors") == in_pods
    token = cluster.objects["secrets", "app"]["stringData"]["token"]
    assert token not in text + json.dumps(cluster.commands) + output_of(cluster, "*") + output_of(
        cluster, "*", "stderr"
    )


def test_run_that_fails_ends_all_its_pods(cluster, tmp_path):
    on_this_machine(cluster)
    apply(tmp_path, rendered(tmp_path, "--workers", "2", app=APP.replace("print(", "1 / 0, print(")))
    with ddlf(tmp_path, "k8s", "secret", "job/app") as process:
        process.communicate(timeout=PATIENCE_S)
    assert cluster.wait(lambda cluster: cluster.finished("app"), PATIENCE_S) == "Failed"
    assert output_of(cluster, 0, "stderr").count("ZeroDivisionError") == 4
    assert not [pod for pod in (0, 1) if cluster.pod(pod)]


@pytest.mark.short
def test_lost_worker_of_a_training_changes_no_bit(cluster, tmp_path):
    app = TRAINED.replace("32, 3, 3, 4, 1", "32, 12, 3, 4, 1")
    with launched(tmp_path, "2", ",start_timeout=100 --save pods.safetensors", app=app) as process:
        for line in process.stdout:
            if re.match(r"round +1/", line):
                pod = cluster.end(1, "OOMKilled")
        assert process.wait(PATIENCE_S) == 0, (tmp_path / "errors").read_text()
    output = (tmp_path / "errors").read_text()
    assert f"place 1: pod {pod}: OOMKilled: exit code 137 (out of memory)" in output
    local = ("run", "app.py", "--local", "2", "--save", "local.safetensors")
    with ddlf(tmp_path, *local, app=app) as process:
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0
    assert weights(tmp_path / "pods.safetensors") == weights(tmp_path / "local.safetensors")


def test_evicted_pods_of_a_run_come_again_and_the_run_ends(cluster, tmp_path):
    on_this_machine(cluster)
    app = APP.replace('Path("wait")', f'Path("{tmp_path}/wait")')
    (tmp_path / "wait").touch()
    apply(tmp_path, rendered(tmp_path, "--workers", "3", app=app))
    with ddlf(tmp_path, "k8s", "secret", "job/app") as process:
        process.communicate(timeout=PATIENCE_S)
    cluster.wait(lambda cluster: "workers [1, 2, 3]" in output_of(cluster, 0), PATIENCE_S)
    for index in (2, 0):
        evicted = ("", "Eviction API: evicting", "EvictionByEvictionAPI", signal.SIGTERM)
        pod = cluster.end(index, *evicted)
        cluster.wait(lambda cluster, index=index, pod=pod: cluster.pod(index) not in (None, pod), PATIENCE_S)
    cluster.wait(lambda cluster: output_of(cluster, 0).count("workers [1, 2, 3]") == 2, PATIENCE_S)
    (tmp_path / "wait").unlink()
    assert cluster.wait(lambda cluster: cluster.finished("app"), PATIENCE_S) == "Complete"
    assert "end [1, 2, 3]" in output_of(cluster, 0)


def test_doctor_asks_kubernetes_for_rights_and_starts_workers(cluster, tmp_path):
    words = ("doctor", "--launcher", "k8s:image=i", "--workers", "2")
    with ddlf(tmp_path, *words) as process:
        output, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, output
    assert "Kubernetes v1.34.0, and kubectl v" in output
    assert "this user may create, watch and delete Jobs" in output
    assert output.count("the same versions") == 2
    cluster.denied.add(("create", "secrets"))
    with ddlf(tmp_path, *words) as process:
        output, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 3
    assert "this user may not create secrets in the namespace of kubectl's context" in output
