"""A stand-in for a Kubernetes cluster: an API server for the real ``kubectl``, which runs pods as processes of this machine.

It keeps objects, and answers create, get, watch and delete. For Jobs it does the work of the Job controller, the scheduler,
the kubelet, and the collectors of garbage and of finished Jobs, as far as DDLF depends on them.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import http.server
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
from pathlib import Path

INDEX = "batch.kubernetes.io/job-completion-index"
NAMESPACE = "default"
CPUS = 64
BACK_OFF_S = 0.3
"""Pause before a pod is replaced. Kubernetes first waits 10 s, and doubles the pause each time."""
KINDS = {
    "pods": ("v1", "Pod"),
    "secrets": ("v1", "Secret"),
    "events": ("v1", "Event"),
    "services": ("v1", "Service"),
    "configmaps": ("v1", "ConfigMap"),
    "jobs": ("batch/v1", "Job"),
}
PROGRAMS = {"ddlf": "ddlf", "ddlf-worker": "ddlf.cli.worker"}


def _now() -> str:
    """Return the current time in the format of Kubernetes."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class Cluster:
    """A cluster with a running API server. ``kubeconfig`` is the configuration file for ``kubectl``.

    Args:
        folder: An empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.objects: dict[tuple[str, str], dict] = {}
        self.changes: list[tuple[int, str, str, dict]] = []
        self.changed = threading.Condition()
        self.numbers = itertools.count(1)
        self.processes: dict[str, subprocess.Popen] = {}
        self.commands: list[list[str]] = []
        self.replacements: dict[str, str] = {}
        """Texts in the commands of pods, such as host names, with their replacements on this machine."""
        self.inherited = {"PATH", "PYTHONPATH"}
        """Environment variables that the pods inherit."""
        self.results: dict[str, str] = {}
        self.denied: set[tuple[str, str]] = set()
        """Verbs and resources that the user may not use, for ``kubectl auth can-i``."""
        self.is_closed = False
        cluster = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                cluster.get(self)

            def do_POST(self):
                cluster.post(self)

            def do_PATCH(self):
                cluster.patch(self)

            def do_DELETE(self):
                cluster.delete(self)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.kubeconfig = folder / "kubeconfig"
        url = f"http://127.0.0.1:{self.server.server_address[1]}"
        context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
        self.kubeconfig.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "c",
                    "contexts": [context],
                    "clusters": [{"name": "c", "cluster": {"server": url}}],
                    "users": [{"name": "u", "user": {}}],
                }
            )
        )

    def stop_answering(self) -> None:
        """End the API server. The pods continue."""
        self.is_closed = True
        with self.changed:
            self.changed.notify_all()
        self.server.shutdown()
        self.server.server_close()

    def close(self) -> None:
        self.stop_answering()
        for process in self.processes.values():
            process.kill()
            process.wait()

    # -- the API server -----------------------------------------------------------------------------------------------

    def get(self, request) -> None:
        path, query = self._parsed(request)
        if path == ["version"]:
            return self._answer(request, {"major": "1", "minor": "34", "gitVersion": "v1.34.0"})
        if path == ["api"]:
            return self._answer(request, {"kind": "APIVersions", "versions": ["v1"]})
        if path == ["apis"]:
            version = {"groupVersion": "batch/v1", "version": "v1"}
            group = {"name": "batch", "versions": [version], "preferredVersion": version}
            return self._answer(request, {"kind": "APIGroupList", "apiVersion": "v1", "groups": [group]})
        if path in (["api", "v1"], ["apis", "batch", "v1"]):
            version = "/".join(path[1:])
            listed = [
                {
                    "name": name,
                    "singularName": kind.lower(),
                    "namespaced": True,
                    "kind": kind,
                    "verbs": ["create", "delete", "get", "list", "watch"],
                }
                for name, (api_version, kind) in KINDS.items()
                if api_version == version
            ]
            return self._answer(
                request, {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": listed}
            )
        target = self._target(path)
        if target is None:
            return self._fail(request, 404, "NotFound", "the server could not find the requested resource")
        resource, name = target
        if name:
            with self.changed:
                stored = self.objects.get((resource, name))
            if stored is None:
                return self._fail(request, 404, "NotFound", f'{resource} "{name}" not found')
            return self._answer(request, stored)
        labels = dict(part.split("=") for part in query.get("labelSelector", "").split(",") if part)
        if query.get("watch") in ("true", "1"):
            return self._stream(request, resource, labels, int(query.get("resourceVersion") or 0))
        with self.changed:
            items = [
                copy.deepcopy(item)
                for (kind, _), item in self.objects.items()
                if kind == resource and self._matches(item, labels)
            ]
            version = str(next(self.numbers))
        api, kind = KINDS[resource]
        return self._answer(
            request,
            {"apiVersion": api, "kind": f"{kind}List", "metadata": {"resourceVersion": version}, "items": items},
        )

    def _stream(self, request, resource: str, labels: dict, since: int) -> None:
        request.send_response(200)
        request.send_header("Content-Type", "application/json")
        request.end_headers()
        sent = 0
        with contextlib.suppress(OSError):
            while not self.is_closed:
                with self.changed:
                    while len(self.changes) == sent and not self.is_closed:
                        self.changed.wait(0.2)
                    new, sent = self.changes[sent:], len(self.changes)
                for number, kind, of, item in new:
                    if number > since and of == resource and self._matches(item, labels):
                        request.wfile.write(json.dumps({"type": kind, "object": item}).encode() + b"\n")
                        request.wfile.flush()

    def post(self, request) -> None:
        path, _ = self._parsed(request)
        body = request.rfile.read(int(request.headers["Content-Length"]))
        if path[-1] == "selfsubjectaccessreviews":  # kubectl sends it in another format, with plain texts
            allowed = not any(verb.encode() in body and kind.encode() in body for verb, kind in self.denied)
            answer = {"kind": "SelfSubjectAccessReview", "apiVersion": "authorization.k8s.io/v1"}
            return self._answer(request, {**answer, "spec": {}, "status": {"allowed": allowed}}, 201)
        item = json.loads(body)
        resource, _ = self._target(path)
        name = item["metadata"]["name"]
        with self.changed:
            if (resource, name) in self.objects:
                return self._fail(request, 409, "AlreadyExists", f'{resource} "{name}" already exists')
            if "forbidden" in name:
                return self._fail(request, 403, "Forbidden", f'{resource} is forbidden: User "u" cannot create')
        created = self.put(resource, item)
        if resource == "jobs" and not created["spec"].get("suspend"):
            threading.Thread(target=self._run_job, args=(created,), daemon=True).start()
        return self._answer(request, created, 201)

    def patch(self, request) -> None:
        """Change the suspension of a Job. Its pods start when it is resumed."""
        path, _ = self._parsed(request)
        change = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
        resource, name = self._target(path)
        with self.changed:
            item = copy.deepcopy(self.objects.get((resource, name)))
        if item is None:
            return self._fail(request, 404, "NotFound", f'{resource} "{name}" not found')
        was_suspended = item["spec"].get("suspend")
        item["spec"] |= change["spec"]
        patched = self.put(resource, item)
        if was_suspended and not patched["spec"]["suspend"]:
            threading.Thread(target=self._run_job, args=(patched,), daemon=True).start()
        return self._answer(request, patched)

    def delete(self, request) -> None:
        path, _ = self._parsed(request)
        resource, name = self._target(path)
        options = json.loads(request.rfile.read(int(request.headers.get("Content-Length") or 0)) or "{}")
        if (resource, name) not in self.objects:
            return self._fail(request, 404, "NotFound", f'{resource} "{name}" not found')
        if resource == "pods":
            self._delete_pod(name, options.get("gracePeriodSeconds"))
        else:
            self.remove(resource, name)
        return self._answer(request, {"kind": "Status", "apiVersion": "v1", "status": "Success"})

    @staticmethod
    def _parsed(request):
        parts = urllib.parse.urlsplit(request.path)
        return [part for part in parts.path.split("/") if part], dict(urllib.parse.parse_qsl(parts.query))

    @staticmethod
    def _target(path):
        if "namespaces" not in path:
            return None
        parts = path[path.index("namespaces") + 2 :]
        return (parts[0], parts[1] if len(parts) > 1 else "") if parts and parts[0] in KINDS else None

    @staticmethod
    def _matches(item: dict, labels: dict) -> bool:
        return labels.items() <= item["metadata"].get("labels", {}).items()

    @staticmethod
    def _answer(request, item: dict, code: int = 200) -> None:
        body = json.dumps(item).encode()
        with contextlib.suppress(OSError):
            request.send_response(code)
            request.send_header("Content-Type", "application/json")
            request.send_header("Content-Length", str(len(body)))
            request.end_headers()
            request.wfile.write(body)

    def _fail(self, request, code: int, reason: str, message: str) -> None:
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "metadata": {}}
        self._answer(request, {**status, "reason": reason, "message": message, "code": code}, code)

    # -- objects ------------------------------------------------------------------------------------------------------

    def put(self, resource: str, item: dict) -> dict:
        """Create or change an object, and notify its watchers."""
        with self.changed:
            number = next(self.numbers)
            item = copy.deepcopy(item)
            name = item["metadata"]["name"]
            item["apiVersion"], item["kind"] = KINDS[resource]
            is_new = (resource, name) not in self.objects
            if is_new:
                item["metadata"] |= {
                    "uid": f"uid-{number}",
                    "namespace": NAMESPACE,
                    "creationTimestamp": _now(),
                }
            item["metadata"]["resourceVersion"] = str(number)
            self.objects[resource, name] = item
            self.changes.append((number, "ADDED" if is_new else "MODIFIED", resource, copy.deepcopy(item)))
            self.changed.notify_all()
            return item

    def remove(self, resource: str, name: str) -> None:
        """Delete an object and all objects that it owns."""
        with self.changed:
            item = self.objects.pop((resource, name), None)
            if item is None:
                return
            self.changes.append((next(self.numbers), "DELETED", resource, item))
            self.changed.notify_all()
            owned = [
                key
                for key, other in self.objects.items()
                if any(
                    owner["uid"] == item["metadata"]["uid"] for owner in other["metadata"].get("ownerReferences", ())
                )
            ]
        if resource == "pods" and (process := self.processes.get(name)) is not None and process.poll() is None:
            process.terminate()
        for key in owned:
            self.remove(*key)

    def _delete_pod(self, name: str, grace_s: float | None) -> None:
        """Delete a pod like the kubelet: SIGTERM, then SIGKILL after its grace period. The object disappears at its end."""
        process = self.processes.get(name)
        if process is None or process.poll() is not None:
            self.remove("pods", name)
            return
        with self.changed:
            pod = copy.deepcopy(self.objects["pods", name])
            grace_s = pod["spec"]["terminationGracePeriodSeconds"] if grace_s is None else grace_s
            pod["metadata"] |= {"deletionTimestamp": _now(), "deletionGracePeriodSeconds": grace_s}
            self.put("pods", pod)
        process.terminate()
        timer = threading.Timer(grace_s, process.kill)
        timer.daemon = True
        timer.start()

    def warn(self, name: str, reason: str, message: str) -> None:
        """Add an event of type Warning about an object."""
        event = {
            "metadata": {"name": f"{name}.{next(self.numbers)}"},
            "type": "Warning",
            "reason": reason,
            "message": message,
            "involvedObject": {"name": name},
            "lastTimestamp": _now(),
        }
        self.put("events", event)

    def wait(self, holds, limit_s: float):
        """Wait until a function of this cluster returns a true value, and return the value."""
        deadline = time.monotonic() + limit_s
        with self.changed:
            while not (result := holds(self)):
                if not self.changed.wait(0.1) and time.monotonic() > deadline:
                    raise TimeoutError("it did not happen")
            return result

    def named(self, resource: str) -> list[str]:
        """Return the names of all objects of a resource."""
        with self.changed:
            return [name for kind, name in self.objects if kind == resource]

    def finished(self, job: str) -> str | None:
        """Return Complete or Failed when a Job is finished."""
        return self.results.get(job)

    def pod(self, index: int) -> str | None:
        """Return the name of the running pod with an index."""
        with self.changed:
            return next(
                (
                    name
                    for (kind, name), pod in self.objects.items()
                    if kind == "pods"
                    and pod["metadata"]["annotations"][INDEX] == str(index)
                    and pod["status"]["phase"] == "Running"
                ),
                None,
            )

    # -- pods ---------------------------------------------------------------------------------------------------------

    def end(
        self, index: int, reason: str = "", message: str = "", disruption: str = "", number: int = signal.SIGKILL
    ) -> str:
        """End the pod with an index like the kubelet or the scheduler, and return its name.

        Args:
            index: The index.
            reason: The reason of the end. OOMKilled is a reason of the container, all other ones are reasons of the pod.
            message: The message that explains the reason.
            disruption: The reason of the condition DisruptionTarget.
            number: The number of the signal.
        """
        name = self.pod(index)
        with self.changed:
            pod = copy.deepcopy(self.objects["pods", name])
        pod["ends"] = {"reason": reason, "message": message, "disruption": disruption}
        with self.changed:
            self.objects["pods", name] = pod
        self.processes[name].send_signal(number)
        return name

    def _run_job(self, job: dict) -> None:
        name, spec = job["metadata"]["name"], job["spec"]
        if spec["template"]["spec"].get("serviceAccountName") == "missing":
            message = f'Error creating: pods "{name}-0-" is forbidden: error looking up service account default/missing'
            self.warn(name, "FailedCreate", message)
            return
        ended: dict[int, bool] = {}
        threads = [
            threading.Thread(target=self._run_index, args=(job, index, ended), daemon=True)
            for index in range(spec["completions"])
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        first = spec.get("successPolicy", {}).get("rules", [{}])[0].get("succeededIndexes")
        needed = range(spec["completions"]) if first is None else [int(first)]
        self.results[name] = "Complete" if all(ended.get(index) for index in needed) else "Failed"
        if spec.get("ttlSecondsAfterFinished") == 0 and not self.is_closed:
            self.remove("jobs", name)

    def _run_index(self, job: dict, index: int, ended: dict[int, bool]) -> None:
        spec, failures = job["spec"], 0
        while ("jobs", job["metadata"]["name"]) in self.objects and not ended.get(-1):
            pod = self._run_pod(job, index, failures)
            if pod is None:
                return
            status = pod["status"]
            code = status["containerStatuses"][0]["state"]["terminated"]["exitCode"]
            if status["phase"] == "Succeeded":
                ended[index] = True
                first = spec.get("successPolicy", {}).get("rules", [{}])[0].get("succeededIndexes")
                if first == str(index):  # the Job has succeeded, and its other pods end
                    ended[-1] = True
                    self._end_others(job, index)
                return
            is_disrupted = any(condition["type"] == "DisruptionTarget" for condition in status["conditions"])
            rules = [
                rule
                for rule in spec["podFailurePolicy"]["rules"]
                if code in rule.get("onExitCodes", {}).get("values", ())
            ]
            is_disrupted = is_disrupted or any(rule["action"] == "Ignore" for rule in rules[:1])
            if not is_disrupted and rules:
                if rules[0]["action"] == "FailJob":
                    ended[-1] = True
                    self._end_others(job, index)
                return
            failures += not is_disrupted
            if failures > spec["backoffLimitPerIndex"]:
                if spec.get("maxFailedIndexes") == 0:
                    ended[-1] = True
                    self._end_others(job, index)
                return
            time.sleep(BACK_OFF_S)

    def _end_others(self, job: dict, index: int) -> None:
        for name in self.named("pods"):
            if name.startswith(f"{job['metadata']['name']}-") and (process := self.processes.get(name)) is not None:
                process.terminate()

    def _run_pod(self, job: dict, index: int, number: int) -> dict | None:
        name, template = job["metadata"]["name"], job["spec"]["template"]
        pod_name = f"{name}-{index}-{next(self.numbers):05}"
        container = template["spec"]["containers"][0]
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job["metadata"]["uid"]}
        status: dict = {"phase": "Pending", "conditions": []}
        pod = {
            "metadata": {
                "name": pod_name,
                "labels": {**template["metadata"]["labels"], "batch.kubernetes.io/job-name": name},
                "annotations": {INDEX: str(index)},
                "ownerReferences": [owner],
            },
            "spec": template["spec"],
            "status": status,
        }
        if int(container.get("resources", {}).get("limits", {}).get("cpu", 0)) > CPUS:
            message = "0/1 nodes are available: 1 Insufficient cpu."
            status["conditions"] = [
                {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
            ]
            self.put("pods", pod)
            return self._until_deleted(pod_name)
        if container["image"].startswith("missing"):
            message = f'Back-off pulling image "{container["image"]}"'
            status["containerStatuses"] = [{"state": {"waiting": {"reason": "ImagePullBackOff", "message": message}}}]
            self.put("pods", pod)
            return self._until_deleted(pod_name)
        status["containerStatuses"] = [{"state": {"waiting": {"reason": "ContainerCreating"}}}]
        pod = self.put("pods", pod)
        volumes = self._mounted(pod_name, template)
        if volumes is None:
            return None
        command, environment = self._command(container, pod, volumes)
        self.commands.append([*command, *(f"{key}={value}" for key, value in environment.items())])
        error_file = volumes["/tmp"] / "stderr"
        with open(error_file, "wb") as errors, open(volumes["/tmp"] / "stdout", "wb") as output:
            process = subprocess.Popen(
                command, env=environment, cwd=volumes["/work"], stdout=output, stderr=errors, start_new_session=True
            )
        self.processes[pod_name] = process
        pod["status"] = {"phase": "Running", "conditions": [], "containerStatuses": [{"state": {"running": {}}}]}
        if ("pods", pod_name) not in self.objects:
            process.terminate()
        else:
            self.put("pods", pod)
        code = process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the end of a container ends all its processes
        return self._ended(
            pod_name, pod, code if code >= 0 else 128 - code, error_file.read_text(errors="replace")[-2000:]
        )

    def _until_deleted(self, name: str) -> None:
        with self.changed:
            while ("pods", name) in self.objects and not self.is_closed:
                self.changed.wait(0.5)

    def _ended(self, name: str, pod: dict, code: int, errors: str) -> dict:
        with self.changed:
            request = self.objects.get(("pods", name), {}).get("ends", {})
        is_memory = request.get("reason") == "OOMKilled"
        terminated = {"exitCode": code, "reason": "OOMKilled" if is_memory else "Error" if code else "Completed"}
        if code and errors and not request:
            terminated["message"] = errors
        pod["status"] = {
            "phase": "Failed" if code else "Succeeded",
            "conditions": [],
            "containerStatuses": [{"state": {"terminated": terminated}}],
        }
        if request and not is_memory and request["reason"]:
            pod["status"] |= {"reason": request["reason"], "message": request["message"]}
        if request.get("disruption"):
            pod["status"]["conditions"] = [
                {
                    "type": "DisruptionTarget",
                    "status": "True",
                    "reason": request["disruption"],
                    "message": request["message"],
                }
            ]
        with self.changed:
            if (stored := self.objects.get(("pods", name))) is not None:
                pod["metadata"] = stored["metadata"]
                self.put("pods", pod)
                if "deletionTimestamp" in stored["metadata"]:
                    self.remove("pods", name)
        return pod

    def _mounted(self, name: str, template: dict) -> dict[str, Path] | None:
        """Make the folders of a pod. Wait for its Secret, like the kubelet."""
        folders: dict[str, Path] = {}
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        for mount in template["spec"]["containers"][0]["volumeMounts"]:
            folder = self.folder / name / mount["name"]
            folder.mkdir(parents=True)
            folders[mount["mountPath"]] = folder
            volume = volumes[mount["name"]]
            if "secret" in volume:
                secret_name = volume["secret"]["secretName"]
                with self.changed:
                    while (secret := self.objects.get(("secrets", secret_name))) is None:
                        if ("pods", name) not in self.objects or self.is_closed:
                            return None
                        self.changed.wait(0.2)
                data = {key: base64.b64decode(value) for key, value in secret.get("data", {}).items()}
                data |= {key: value.encode() for key, value in secret.get("stringData", {}).items()}
                for file, content in data.items():
                    (folder / file).write_bytes(content)
                    (folder / file).chmod(0o400 if os.geteuid() else 0o440)  # fsGroup gives files of root these rights
            if "configMap" in volume:
                config = self.objects["configmaps", volume["configMap"]["name"]]
                for file, text in config["data"].items():
                    (folder / file).write_text(text)
        return folders

    def _command(self, container: dict, pod: dict, volumes: dict[str, Path]) -> tuple[list[str], dict[str, str]]:
        variables = {"JOB_COMPLETION_INDEX": pod["metadata"]["annotations"][INDEX]}
        for variable in container["env"]:
            field = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            variables[variable["name"]] = variable["value"] if field is None else variables["JOB_COMPLETION_INDEX"]
        program, *arguments = container["command"]
        texts = {**self.replacements, **{f"$({name})": value for name, value in variables.items()}}

        def translated(text: str) -> str:
            for old, new in texts.items():
                text = text.replace(old, new)
            for path, folder in volumes.items():
                if (text == path or text.startswith(f"{path}/")) and str(self.folder) not in text:
                    return f"{folder}{text.removeprefix(path)}"
            return text

        arguments = translated("\0".join(arguments)).split("\0")
        arguments = [translated(text) for text in arguments]
        if "--port" in arguments:
            arguments[arguments.index("--port") + 1] = "0"  # all pods share the ports of this machine
        inherited = {key: os.environ[key] for key in self.inherited if key in os.environ}
        environment = {**inherited, **{key: translated(value) for key, value in variables.items()}}
        return [sys.executable, "-m", PROGRAMS[program], *arguments], environment
